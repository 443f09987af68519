"""Issue 10: who finds a checkpoint in the way is told whether it is one that can be loaded."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import CheckFreqWriter, CheckpointExists

STATE = {"weight": torch.arange(5000.0), "step": 7}


def save(folder, **options):
    dcp.save(STATE, storage_writer=CheckFreqWriter(folder, **options))


def refusal(folder):
    with pytest.raises(CheckpointException) as raised:
        save(folder)
    error = raised.value.failures[0][0]
    assert type(error) is CheckpointExists
    return error


def cut(folder):
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:-30])


def emptied(folder):
    (folder / ".metadata").write_bytes(b"")


def anothers(folder):
    (folder / ".metadata").write_text("{}")


def without_a_shard(folder):
    next(folder.glob("*.distcp")).unlink()


def with_a_short_shard(folder):
    shard = next(folder.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])


HARMS = [cut, emptied, anothers, without_a_shard, with_a_short_shard]


@pytest.mark.parametrize("harm", HARMS)
def test_one_that_cannot_be_loaded_is_said_to_be_one_and_stays(tmp_path, harm):
    folder = tmp_path / "step_1"
    save(folder)
    harm(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    error = refusal(folder)
    assert error.problem
    assert error.problem in str(error)
    assert "whole checkpoint" not in str(error)
    assert "overwrite=True" in str(error)
    assert "remove the folder" in str(error)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("harm", [cut, emptied, without_a_shard, with_a_short_shard])
def test_what_it_says_to_do_works(tmp_path, harm):
    save(tmp_path)
    harm(tmp_path)
    save(tmp_path, overwrite=True)
    loaded = {"weight": torch.zeros(5000), "step": 0}
    dcp.load(loaded, checkpoint_id=str(tmp_path))
    assert torch.equal(loaded["weight"], STATE["weight"])


def test_a_whole_one_is_said_to_be_whole(tmp_path):
    save(tmp_path)
    error = refusal(tmp_path)
    assert error.problem == ""
    assert "holds a whole checkpoint" in str(error)


def test_the_problem_crosses_ranks():
    error = CheckpointExists("/runs/a", "cut short")
    again = pickle.loads(pickle.dumps(error))
    assert (again.where, again.problem, str(again)) == ("/runs/a", "cut short", str(error))
