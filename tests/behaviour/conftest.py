import pytest
from torch.distributed.checkpoint.planner import SavePlanner

from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import MemoryTier

_STOCK_CACHES = (
    SavePlanner._cached_save_plan,
    SavePlanner._cached_final_save_plan,
    SavePlanner._cached_all_plans,
    SavePlanner._cached_global_plan,
    SavePlanner._cached_metadata,
)


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests():
    """Stock planners keep their cached plans on the class: they would reach the next test."""
    for cache in _STOCK_CACHES:
        cache.clear()


@pytest.fixture(params=["memory", "disk"])
def root(request, tmp_path):
    return MemoryTier() if request.param == "memory" else LocalTier(tmp_path / "run")
