"""Issue 10: what nobody means to save or to save to is refused at the save, by its name."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import (
    BadLocation,
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
    Checkpointer,
    UnsupportedState,
    find_latest_valid,
)
from dcp_checkfreq.runtime.error_reports import survives_pickle
from dcp_checkfreq.testing import MemoryTier

DEEP = 3000  # more than any stack; and then as much as ends a process that walks it in C
DEEPER = 200_000


def nested(kind, levels):
    value = "bottom"
    for _ in range(levels):
        value = {"k": value} if kind is dict else kind([value])
    return value


def holds_itself(kind):
    if kind is dict:
        value = {"a": 1}
        value["again"] = [value]
        return value
    within = [1]
    value = kind([within, 2])
    within.append(value)
    return value


class Part:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"n": 1, "odd": self.value}

    def load_state_dict(self, state):
        self.value = state["odd"]


def by_checkpointer(value):
    with Checkpointer(MemoryTier(), {"part": Part(value)}, every=1) as ckpt:
        ckpt.after_step()


def by_checkpointer_plain(value):
    with Checkpointer(MemoryTier(), {"part": {"odd": value}}, every=1) as ckpt:
        ckpt.save(wait=True)


def by_async_save(value):
    dcp.async_save({"part": {"odd": value}}, storage_writer=CheckFreqWriter(MemoryTier())).result()


def by_planner(value):
    dcp.save(
        {"part": {"odd": value}},
        storage_writer=CheckFreqWriter(MemoryTier()),
        planner=CheckFreqSavePlanner(),
    )


WAYS = [by_checkpointer, by_checkpointer_plain, by_async_save, by_planner]


def refusal_of(way, value):
    with pytest.raises((UnsupportedState, CheckpointException)) as raised:
        way(value)
    error = raised.value
    if isinstance(error, CheckpointException):
        error = error.failures[0][0]
    assert isinstance(error, UnsupportedState)
    return error


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [list, dict, tuple])
@pytest.mark.parametrize("levels", [DEEP, DEEPER])
def test_what_is_nested_too_deep_is_refused_by_its_key(way, kind, levels):
    error = refusal_of(way, nested(kind, levels))
    assert error.key.startswith("part.odd.")
    assert "more than 100 others hold it" in error.why
    assert len(str(error)) < 400


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "key"), [(list, "part.odd.0.1"), (dict, "part.odd.again.0")])
def test_what_holds_itself_is_refused_by_its_key(way, kind, key):
    error = refusal_of(way, holds_itself(kind))
    assert (error.key, error.why) == (key, "it holds itself")


@pytest.mark.parametrize("way", WAYS)
def test_what_is_there_twice_is_no_value_that_holds_itself(way):
    shared = [1, {"t": torch.ones(3)}, (2, 3)]
    way({"one": shared, "two": [shared, (shared, shared)]})


def test_a_value_under_stock_planners_is_refused_by_its_key_where_it_is_pickled(tmp_path):
    with pytest.raises(CheckpointException, match=r"UnsupportedState.*'part.odd'"):
        dcp.save({"part": {"odd": nested(tuple, DEEP)}}, storage_writer=CheckFreqWriter(tmp_path))
    assert not list(tmp_path.iterdir())


def test_an_error_with_a_value_that_holds_itself_crosses_no_border():
    assert not survives_pickle(ValueError(holds_itself(list)))
    assert not survives_pickle(ValueError(nested(tuple, DEEP)))
    assert survives_pickle(ValueError(nested(tuple, 10)))


@pytest.mark.parametrize("place", ["/tmp/a\0b", "/tmp/a/\0", "file:///tmp/\0", "s3://bucket/a\0"])
@pytest.mark.parametrize(
    "use",
    [
        lambda place: Checkpointer(place, {"p": Part(1)}),
        CheckFreqWriter,
        CheckFreqReader,
        find_latest_valid,
        lambda place: Checkpointer(MemoryTier(), {"p": Part(1)}, staging_dir=place[:6] + "\0"),
        lambda place: dcp.save(
            {"a": torch.ones(1)}, storage_writer=CheckFreqWriter("/tmp/x"), checkpoint_id=place
        ),
    ],
)
def test_a_place_with_a_zero_byte_is_refused_by_its_name(place, use):
    with pytest.raises((BadLocation, CheckpointException), match="zero byte"):
        use(place)
