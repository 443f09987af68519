"""A tensor that says itself what is saved of it is copied with all that it says."""

import itertools
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed.checkpoint as dcp
from self_described_kinds import KINDS, Buffer, Wrapper, blocks_of
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.utils import find_state_dict_object

from dcp_checkfreq import (
    CheckFreqLoadPlanner,
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
    UnsupportedState,
)
from dcp_checkfreq.shards.self_described import describes_itself
from dcp_checkfreq.snapshot.pool import BufferPool
from dcp_checkfreq.snapshot.stager import Stager

WHOLE = (7, 4)
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def filled(kind, start=0.0, cuts=(0, 3, 7)):
    values = torch.arange(28.0).reshape(WHOLE) + start
    pairs = itertools.pairwise(cuts)
    return kind(WHOLE, {begin: values[begin:end].clone() for begin, end in pairs})


def seen(state):
    """Return what stock DCP would save of a state."""
    items = create_default_local_save_plan(state, True).items
    return [(item, find_state_dict_object(state, item.index).tolist()) for item in items]


def add(tensor, value):
    for block in blocks_of(tensor).values():
        block.add_(value)


@kinds
def test_planners_see_the_same_in_a_snapshot_and_later_changes_do_not_reach_it(kind):
    live = {"a": {"w": filled(kind)}, "b": torch.ones(2)}
    flat = {"a.w": live["a"]["w"], "b": live["b"]}
    before = seen(flat)
    stager = Stager(BufferPool())
    for number in range(3):  # the later ones use what the first one kept
        staged = stager.stage(live)
        wanted = seen(flat)
        add(live["a"]["w"], 100.0)
        assert seen({"a.w": staged["a"]["w"], "b": staged["b"]}) == wanted
        stager.release()
        assert (wanted == before) is (number == 0)


@kinds
def test_a_snapshot_that_is_sent_to_another_process_says_the_same(kind):
    live = {"a": [{"w": filled(kind)}], "b": torch.ones(2)}
    stager = Stager(BufferPool())
    sent = pickle.loads(ForkingPickler.dumps(stager.stage(live)))
    flat = {"a.0.w": live["a"][0]["w"], "b": live["b"]}
    assert seen({"a.0.w": sent["a"][0]["w"], "b": sent["b"]}) == seen(flat)
    stager.release()


@kinds
def test_another_layout_of_the_same_memory_is_noticed(kind):
    stager = Stager(BufferPool())
    blocks = blocks_of(filled(kind))
    for whole in (WHOLE, (9, 4), WHOLE):
        live = {"w": kind(whole, blocks)}
        staged = stager.stage(live)
        assert seen(staged) == seen(live)
        stager.release()


SAVES = {
    "save": lambda state, **options: dcp.save(state, **options),
    "async_save": lambda state, **options: dcp.async_save(state, **options).result(),
}


@kinds
@pytest.mark.parametrize("run", SAVES.values(), ids=SAVES.keys())
@pytest.mark.parametrize("planner", [lambda: None, CheckFreqSavePlanner], ids=["stock", "ours"])
def test_it_is_saved_and_loaded_by_its_parts(tmp_path, kind, run, planner):
    ours = planner()
    for number in range(2):
        state = {"w": filled(kind, start=number)}
        run(state, storage_writer=CheckFreqWriter(tmp_path / f"{number}"), planner=ours)
    saved = CheckFreqReader(tmp_path / "1").read_metadata().state_dict_metadata["w"]
    assert [chunk.offsets[0] for chunk in saved.chunks] == [0, 3]
    for reader in (CheckFreqReader, dcp.FileSystemReader):
        for load_planner in (None, CheckFreqLoadPlanner()):
            got = {"w": filled(kind, start=50.0, cuts=(0, 1, 5, 7))}
            dcp.load(got, storage_reader=reader(tmp_path / "1"), planner=load_planner)
            assert torch.equal(
                torch.cat(list(blocks_of(got["w"]).values())), torch.arange(28.0).reshape(7, 4) + 1
            )


@kinds
def test_a_whole_tensor_goes_into_parts_and_back(tmp_path, kind):
    values = torch.arange(28.0).reshape(WHOLE)
    dcp.save({"w": values}, storage_writer=CheckFreqWriter(tmp_path / "a"))
    got = {"w": filled(kind, start=9.0)}
    dcp.load(got, storage_reader=CheckFreqReader(tmp_path / "a"), planner=CheckFreqLoadPlanner())
    dcp.save(got, storage_writer=CheckFreqWriter(tmp_path / "b"), planner=CheckFreqSavePlanner())
    back = {"w": torch.zeros(WHOLE)}
    dcp.load(back, storage_reader=CheckFreqReader(tmp_path / "b"), planner=CheckFreqLoadPlanner())
    assert torch.equal(back["w"], values)


def test_what_contradicts_itself_is_refused_by_its_key(tmp_path):
    bad = filled(Wrapper)
    bad.__create_chunk_list__ = list  # says less than it has: that is its right
    dcp.save({"w": bad, "b": torch.ones(1)}, storage_writer=CheckFreqWriter(tmp_path / "a"))
    bad = filled(Wrapper)
    bad.blocks[3] = bad.blocks[3][:2]
    bad.__create_write_items__ = filled(Wrapper).__create_write_items__
    for run in SAVES.values():
        with pytest.raises((UnsupportedState, dcp.CheckpointException), match=r"'deep\.w'"):
            run(
                {"deep": {"w": bad}},
                storage_writer=CheckFreqWriter(tmp_path / "b"),
                planner=CheckFreqSavePlanner(),
            )


def test_only_those_that_dcp_asks_count():
    plain = torch.ones(3)
    plain.note = "mine"
    plain.global_shape = (6,)  # one field alone says nothing
    assert not describes_itself(plain)
    assert not describes_itself(torch.nn.Parameter(plain))
    plain.__get_tensor_shard__ = lambda index: plain
    assert describes_itself(plain)
    assert describes_itself(filled(Wrapper))
    assert describes_itself(filled(KINDS["buffer"]))
    assert isinstance(filled(KINDS["buffer"]), Buffer)
