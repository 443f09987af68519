"""Loaders that accelerate has prepared are refused by name if they keep no position."""

import pytest
from torch.utils.data import DataLoader

from dcp_checkfreq import Checkpointer, PerRank, UnsupportedState

LOADER = list(range(4))


class Adapter:
    """As accelerate's: it has the methods, and hands them on to what may not have them."""

    def __init__(self, inner):
        self.base_dataloader = inner

    @property
    def __class__(self):
        return type(self.base_dataloader)

    def state_dict(self):
        return self.base_dataloader.state_dict()

    def load_state_dict(self, state):
        self.base_dataloader.load_state_dict(state)


class Stateful(DataLoader):
    def state_dict(self):
        return {"at": 3}

    def load_state_dict(self, state):
        assert state == {"at": 3}


def prepared(kind, inner):
    made = type(kind, (Adapter,), {"__module__": "accelerate.data_loader"})
    return made(inner)


@pytest.mark.parametrize("kind", ["DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader"])
@pytest.mark.parametrize("wrap", [lambda one: one, PerRank], ids=["shared", "per rank"])
def test_a_prepared_loader_without_a_position_is_refused_by_name(tmp_path, kind, wrap):
    part = wrap(prepared(kind, DataLoader(LOADER)))
    with pytest.raises(UnsupportedState, match=f"(?s)data.*{kind}.*ResumableLoader"):
        Checkpointer(tmp_path, {"data": part})


def test_one_that_has_a_position_is_saved_and_restored(tmp_path):
    parts = {"data": prepared("DataLoaderShard", Stateful(LOADER))}
    with Checkpointer(tmp_path, parts) as ckpt:
        ckpt.after_step()
        ckpt.save(wait=True)
    with Checkpointer(tmp_path, parts) as ckpt:
        assert ckpt.restore().step == 1
