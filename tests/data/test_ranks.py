"""Who this process is among those that share the data."""

import pytest
import torch.distributed as dist

from dcp_checkfreq.data import ResumableBatchSampler, ResumableLoader
from dcp_checkfreq.data.order.ranks import DataRank, resolve


@pytest.fixture
def as_rank_2_of_3(monkeypatch):
    """Torch says so from now on; a real group of three would be three processes."""

    def bring_up():
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: 2)
        monkeypatch.setattr(dist, "get_world_size", lambda: 3)

    return bring_up


def test_alone_without_a_group_and_as_told_with_one(as_rank_2_of_3):
    assert resolve(None, None) == DataRank(0, 1, assumed=True)
    assert resolve(1, 4) == DataRank(1, 4)
    as_rank_2_of_3()
    assert resolve(None, None) == DataRank(2, 3)
    assert resolve(1, 4) == DataRank(1, 4)


@pytest.mark.parametrize("told", [(0, None), (None, 2)])
def test_half_a_place_is_refused(told):
    with pytest.raises(ValueError, match="both or neither"):
        resolve(*told)


@pytest.mark.parametrize(
    "make",
    [lambda **o: ResumableLoader([1, 2], 1, **o), lambda **o: ResumableBatchSampler(2, 1, **o)],
)
def test_made_before_the_group_it_does_not_train_all_data_on_every_rank(make, as_rank_2_of_3):
    unaware, told = make(), make(rank=0, world_size=1)
    as_rank_2_of_3()
    with pytest.raises(RuntimeError, match="rank 2 of 3"):
        iter(unaware)
    assert len(list(told)) == 2
