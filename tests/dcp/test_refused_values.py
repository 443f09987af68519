"""A value that a restart would refuse is refused when it is saved, by the key of what is inside."""

import decimal
import enum
import fractions
import io
import re
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from behaviour_tools import fails_with, files_in, load
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_checkfreq import (
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
    Checkpointer,
    UnsupportedState,
)

WAYS = {
    "save": lambda state, planner, writer: dcp.save(state, storage_writer=writer, planner=planner),
    "async_save": lambda state, planner, writer: dcp.async_save(
        state, storage_writer=writer, planner=planner
    ).result(),
}
both_ways = pytest.mark.parametrize("run", WAYS.values(), ids=WAYS.keys())
PLANNERS = {
    "none": lambda: None,
    "stock": DefaultSavePlanner,
    "ours": CheckFreqSavePlanner,
    "ours, strict": lambda: CheckFreqSavePlanner(allow_pickle=False),
}
all_planners = pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS.keys())


class Colour(enum.Enum):
    RED = 1


class Own:
    """A class of a script's."""


class OwnDict(dict):
    """A dict of a script's."""


def nested(value, levels):
    for _ in range(levels):
        value = (value,)
    return value


REFUSED = {
    "decimal in a list in a tuple": ({"a": ({"b": [1, decimal.Decimal(3)]},)}, "'a.0.b.1'"),
    "enum as a value": ({"a": {"b": Colour.RED}}, "'a.b'"),
    "enum as a key": ({"a": ({"b": {Colour.RED: 1}},)}, "'a.0.b'"),
    "fraction in a set": ({"a": {fractions.Fraction(1, 3), 2}}, "'a."),
    "object of a script": ({"w": torch.ones(2), "a": (1, (2, Own()))}, "'a.1.1'"),
    "a subclass of dict in a tuple": ({"a": (OwnDict(x=1),)}, "'a.0'"),
}


@both_ways
@all_planners
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_at_the_save_by_the_inner_key(tmp_path, run, planner, name):
    state, key = REFUSED[name]
    with fails_with(UnsupportedState, key) as caught:
        run(state, planner(), CheckFreqWriter(tmp_path))
    assert "allow_pickle=True" in str(caught.value)
    assert ".metadata" not in files_in(tmp_path)
    assert not [file for file in files_in(tmp_path) if file.endswith(".distcp")]


@pytest.mark.slow
@all_planners
def test_what_is_nested_too_deeply_to_be_read_is_refused(tmp_path, planner):
    with fails_with(UnsupportedState, "nested too deeply"):
        dcp.save({"a": nested(1, 500)}, storage_writer=CheckFreqWriter(tmp_path), planner=planner())


@all_planners
def test_what_cannot_be_pickled_is_refused_by_the_inner_key(tmp_path, planner):
    state = {"w": torch.ones(2), "a": ({"b": [1, threading.Lock()]},)}
    with fails_with(UnsupportedState, "'a.0.b.1'"):
        dcp.save(state, storage_writer=CheckFreqWriter(tmp_path), planner=planner())
    assert ".metadata" not in files_in(tmp_path)


def test_a_list_that_holds_itself_ends_the_search_for_the_part(tmp_path):
    holds = [threading.Lock()]
    holds.append(holds)
    with fails_with(UnsupportedState, "'a.0.0'"):
        dcp.save({"a": (holds,)}, storage_writer=CheckFreqWriter(tmp_path))


@pytest.mark.parametrize("planner", [DefaultSavePlanner, CheckFreqSavePlanner])
def test_with_allow_pickle_it_is_saved_and_comes_back(tmp_path, planner):
    state = {"a": ({"b": decimal.Decimal(3)},)}
    writer = CheckFreqWriter(tmp_path, allow_pickle=True)
    dcp.save(state, storage_writer=writer, planner=planner())
    assert load(state, tmp_path, allow_pickle=True) == state


def test_a_kept_plan_does_not_let_another_value_pass(tmp_path):
    """The structure is the same as in the save before, so that nothing is planned anew."""
    part = {"a": (1,)}
    with Checkpointer(tmp_path, {"x": part}, every=1, on_error="raise") as ckpt:
        ckpt.after_step()
        ckpt.save(wait=True)
        ckpt.after_step()
        part["a"] = (re.compile("a"),)
        ckpt.wait()
        ckpt.step += 1
        with pytest.raises(UnsupportedState, match=r"a\.0"):
            ckpt.save(wait=True)


def test_a_writer_that_is_used_again_looks_at_what_changed(tmp_path):
    writer = CheckFreqWriter(tmp_path / "a")
    dcp.save({"x": (1,)}, storage_writer=writer)
    with fails_with(UnsupportedState, "'x.0'"):
        dcp.save({"x": (decimal.Decimal(1),)}, storage_writer=writer, checkpoint_id=tmp_path / "b")
    dcp.save({"x": (1,)}, storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert load({"x": None}, tmp_path / "b") == {"x": (1,)}


# --- a BytesIO is plain data ---


def stream_at(data, at):
    stream = io.BytesIO(data)
    stream.seek(at)
    return stream


@both_ways
@all_planners
def test_a_bytesio_comes_back_with_its_content_and_position(tmp_path, run, planner):
    state = {"a": stream_at(b"abcdef", 3), "b": ({"c": [stream_at(b"", 0)]},)}
    run(state, planner(), CheckFreqWriter(tmp_path))
    for reader in (CheckFreqReader, dcp.FileSystemReader):
        got = {"a": io.BytesIO(b"other"), "b": None}
        dcp.load(got, storage_reader=reader(tmp_path))
        assert (got["a"].getvalue(), got["a"].tell()) == (b"abcdef", 3)
        assert got["b"][0]["c"][0].getvalue() == b""


def test_a_restart_has_the_bytesio_that_was_saved(tmp_path):
    parts = {"x": {"log": stream_at(b"abcdef", 2)}}
    with Checkpointer(tmp_path, parts, every=1) as ckpt:
        ckpt.after_step()
        parts["x"]["log"].write(b"XYZ")  # after the snapshot
    parts = {"x": {"log": io.BytesIO()}}
    with Checkpointer(tmp_path, parts, every=1) as ckpt:
        ckpt.restore()
    assert (parts["x"]["log"].getvalue(), parts["x"]["log"].tell()) == (b"abcdef", 2)
