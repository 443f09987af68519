"""What belongs to a rank beside what all have in common: by hand, and of objects of the user's."""

import json
import logging

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, random_split

from dcp_checkfreq import Checkpointer, DataStateError, PerRank, StateMismatch
from dcp_checkfreq.data import ResumableIterator


class Numbers(Dataset):
    def __init__(self, count, shift=0):
        self.count, self.shift = count, shift

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index + self.shift


def wrapped(rank=0, world_size=2, *, shift=0, count=40):
    loader = DataLoader(Numbers(count, shift + 100 * rank), 4, shuffle=True)
    return ResumableIterator(loader, rank=rank, world_size=world_size)


def trained(iterator, count=3):
    """Take some batches; return the iterator."""
    batches = iter(iterator)
    for _ in range(count):
        next(batches)
    return iterator


def whole(iterator):
    """Return both parts of a state, as they come back from a file."""
    common, of_rank = iterator.split_state_dict()
    assert common == iterator.state_dict()
    assert not common.keys() & of_rank.keys()
    return json.loads(json.dumps(common | of_rank))


def test_a_state_kept_by_hand_in_both_parts_is_compared_on_its_rank_only():
    state = whole(trained(wrapped(1)))
    changed = wrapped(1, shift=7)
    changed.load_state_dict(state)
    with pytest.raises(DataStateError, match="batch 1 of 3"):
        next(iter(changed))
    with pytest.raises(DataStateError, match="number of items was 40, now it is 44"):
        wrapped(1, count=44).load_state_dict(state)
    of_other_rank = wrapped(0, count=44)
    of_other_rank.load_state_dict(state)
    assert len(list(of_other_rank)) == 11 - 3


def test_a_restored_state_can_be_saved_again_before_and_after_the_replay():
    state = whole(trained(wrapped(1)))
    again = wrapped(1)
    again.load_state_dict(state)
    assert whole(again) == state
    trained(again, 2)
    assert whole(again) == whole(trained(wrapped(1), 5))


def test_alone_or_in_per_rank_all_is_in_one_state():
    alone = trained(wrapped(world_size=1))
    assert alone.split_state_dict() == (alone.state_dict(), {})
    kept = PerRank(trained(wrapped(1))).value
    assert kept.split_state_dict() == (kept.state_dict(), {})
    assert "trail" in json.loads(kept.state_dict()["state"])


@pytest.mark.parametrize(
    "of_rank",
    ["", 3, "[]", '{"format":1}', '{"format":1,"rank":-1}', '{"format":99,"rank":1}',
     '{"format":1,"rank":1,"roots":3}', '{"format":1,"rank":1,"trail":"1:00"}'],
)  # fmt: skip
def test_a_damaged_part_of_the_rank_is_a_named_error(of_rank):
    iterator = trained(wrapped(1), 1)
    before = whole(iterator)
    with pytest.raises(DataStateError):
        iterator.load_state_dict({**whole(trained(wrapped(1))), "of_rank": of_rank})
    assert whole(iterator) == before


def test_what_is_not_compared_is_said_once_at_info(caplog):
    caplog.set_level(logging.INFO)
    for rank in range(2):
        iterator = wrapped(rank)
        iterator.load_state_dict(trained(wrapped(rank)).state_dict())
    assert len([one for one in caplog.messages if "in common" in one]) == 1
    caplog.clear()
    wrapped(0).load_state_dict(whole(trained(wrapped(0))))
    wrapped(world_size=1).load_state_dict(trained(wrapped(world_size=1)).state_dict())
    assert not caplog.messages


class Split:
    """An object of the user's: a table that all have, and counts of the rank's own."""

    def __init__(self, fill):
        self.table, self.counts = torch.full((3,), float(fill)), torch.full((2,), fill)
        self.refuses = False

    def split_state_dict(self):
        return {"table": self.table}, {"counts": self.counts}

    def state_dict(self):
        return {"table": self.table}

    def load_state_dict(self, state):
        if self.refuses:
            self.table = None
            self.refuses = False
            raise ValueError("not now")
        self.table, self.counts = state["table"], state.get("counts", torch.tensor([-1]))


def saved(root, part, name="data"):
    with Checkpointer(root, {name: part}, every=100) as ckpt:
        ckpt.step = 1
        ckpt.save(wait=True)


def test_objects_of_the_users_keep_both_under_another_name_too(tmp_path):
    saved(tmp_path, Split(5), "old")
    for part in (Split(0), PerRank(Split(0))):
        with Checkpointer(tmp_path, {"data": part}, every=100) as ckpt:
            ckpt.restore(rename={"data": "old"})
        value = part.value if isinstance(part, PerRank) else part
        assert value.table.tolist() == [5.0] * 3
        assert value.counts.tolist() == [5, 5]


def test_a_restore_that_fails_puts_both_back(tmp_path):
    saved(tmp_path, Split(5))
    part = Split(2)
    part.refuses = True
    with (
        Checkpointer(tmp_path, {"data": part}, every=100) as ckpt,
        pytest.raises(ValueError, match="not now"),
    ):
        ckpt.restore()
    assert part.table.tolist() == [2.0] * 3
    assert part.counts.tolist() == [2, 2]


def test_values_that_do_not_split_still_differ_from_those_per_rank(tmp_path):
    saved(tmp_path, PerRank({"a": 1}))
    with (
        Checkpointer(tmp_path, {"data": {"a": 2}}, every=100) as ckpt,
        pytest.raises(StateMismatch, match="no 'data'"),
    ):
        ckpt.restore()


def split_at_random(seed, wrap=lambda one: one):
    first, _ = random_split(Numbers(60), [40, 20], torch.Generator().manual_seed(seed))
    return ResumableIterator(DataLoader(wrap(first), 4, shuffle=True))


@pytest.mark.parametrize(
    "wrap", [lambda one: one, lambda one: ConcatDataset([Numbers(4), one]),
             lambda one: Subset(one, range(20))], ids=["plain", "in a chain", "of a subset"],
)  # fmt: skip
def test_another_random_split_is_noticed_also_between_epochs(wrap, caplog):
    first = split_at_random(1, wrap)
    list(first)
    between = first.state_dict()
    split_at_random(1, wrap).load_state_dict(between)
    assert not caplog.messages
    split_at_random(2, wrap).load_state_dict(between)
    assert "choice of items (Subset, random_split) was" in caplog.text
    with pytest.raises(DataStateError, match="choice of items"):
        split_at_random(2, wrap).load_state_dict(trained(first).state_dict())
