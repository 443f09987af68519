"""Fixtures of several folders."""

import threading

import pytest
from held_copies import held_copies, let_go_when_waited_for
from torch.distributed.checkpoint.planner import SavePlanner

from dcp_checkfreq.storage.local import abilities
from dcp_checkfreq.storage.local.abilities import Abilities
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
def mounts_are_tried_out_anew():
    """What a test made a mount refuse is not so in the next one."""
    yield
    if any(can != Abilities() for can in abilities._known.values()):
        abilities.forget()


@pytest.fixture
def new_threads():
    """A function of a prefix: the names of the threads that began in this test and still run.

    What another test left may be held by its error until the collector comes.
    """
    before = set(threading.enumerate())

    def names(prefix):
        new = [one.name for one in threading.enumerate() if one not in before]
        return [name for name in new if name.startswith(prefix)]

    return names


@pytest.fixture
def held(monkeypatch):
    with held_copies(monkeypatch) as copies:
        yield copies


@pytest.fixture
def late(held, monkeypatch):
    """Copies that begin only when the guard, or a later save, waits for them."""
    let_go_when_waited_for(held, monkeypatch)
    return held


@pytest.fixture
def nothing_is_remembered(monkeypatch):
    """For simulated deaths of the process: the next one knows nothing of the save before."""
    monkeypatch.setattr("dcp_checkfreq.dcp.rank_save.remember", lambda attempt: None)


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests():
    """Stock planners keep their cached plans on the class: they would reach the next test."""
    for cache in _STOCK_CACHES:
        cache.clear()


@pytest.fixture(params=["memory", "disk"])
def root(request, tmp_path):
    return MemoryTier() if request.param == "memory" else LocalTier(tmp_path / "run")
