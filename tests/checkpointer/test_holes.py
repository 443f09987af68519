"""F5: what no chunk of a checkpoint covers is never left as it was without a word."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from behaviour_tools import fails_with, save
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_checkfreq import (
    BrokenMetadata,
    CheckFreqLoadPlanner,
    CheckFreqReader,
    Checkpointer,
    StateMismatch,
)
from dcp_checkfreq.format import metadata as metadata_format

ROWS, COLUMNS = 4, 3


def two_halves(path, *, ours):
    """Save a tensor, and describe it as two chunks of whole rows, as two ranks would have."""
    state = {"w": torch.arange(12.0).reshape(ROWS, COLUMNS), "other": torch.ones(2)}
    if ours:
        save(state, path)
    else:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    rewrite(path, lambda metadata: None)


def rewrite(path, change):
    """Put other metadata under a checkpoint, as a stock writer would have written it."""
    content = (path / ".metadata").read_bytes()
    metadata = pickle.loads(content)
    vars(metadata).pop(metadata_format.ATTRIBUTE, None)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def chunks(*boxes):
    def change(metadata):
        kept = metadata.state_dict_metadata["w"]
        info = metadata.storage_data.pop(MetadataIndex("w", torch.Size([0, 0])))
        kept.chunks = [
            ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in boxes
        ]
        for number, (start, _) in enumerate(boxes):
            metadata.storage_data[MetadataIndex("w", torch.Size(start), number)] = info

    return change


HOLES = {
    "no chunk": ([], 12),
    "a half": ([([0, 0], [2, 3])], 6),
    "a column": ([([0, 0], [4, 1]), ([0, 2], [4, 1])], 4),
    # Their volumes add up to that of the tensor.
    "an overlap": ([([0, 0], [2, 3]), ([1, 0], [2, 3])], 3),
    "one half twice": ([([0, 0], [2, 3]), ([0, 0], [2, 3])], 6),
}


@pytest.mark.parametrize("hole", HOLES)
@pytest.mark.parametrize("make_planner", [lambda: None, DefaultLoadPlanner, CheckFreqLoadPlanner])
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock"])
def test_a_hole_is_an_error_that_names_the_key_before_anything_is_read(
    tmp_path, ours, make_planner, hole
):
    two_halves(tmp_path, ours=ours)
    boxes, missing = HOLES[hole]
    rewrite(tmp_path, chunks(*boxes))
    target = {"w": torch.full((ROWS, COLUMNS), -1.0), "other": torch.full((2,), -1.0)}
    with fails_with(BrokenMetadata, rf"{missing} of the 12 elements of 'w'"):
        dcp.load(target, storage_reader=CheckFreqReader(tmp_path), planner=make_planner())
    assert bool((target["w"] == -1).all())
    assert bool((target["other"] == -1).all())


def test_our_planner_notices_with_the_stock_reader_too(tmp_path):
    two_halves(tmp_path, ours=False)
    rewrite(tmp_path, chunks(([0, 0], [2, 3])))
    with fails_with(BrokenMetadata, "6 of the 12"):
        dcp.load(
            {"w": torch.zeros(ROWS, COLUMNS)},
            storage_reader=FileSystemReader(tmp_path),
            planner=CheckFreqLoadPlanner(),
        )


def test_what_is_not_wanted_need_not_be_whole(tmp_path):
    two_halves(tmp_path, ours=True)
    rewrite(tmp_path, chunks(([0, 0], [2, 3])))
    target = {"other": torch.zeros(2)}
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path))
    assert target["other"].tolist() == [1, 1]


class Forgetful(DefaultLoadPlanner):
    """Plans all but the first item of each tensor that is in several."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        return LoadPlan([item for item in plan.items if item.storage_index.index != 0])


def test_a_planner_that_forgets_a_part_is_told(tmp_path):
    two_halves(tmp_path, ours=True)
    rewrite(tmp_path, chunks(([0, 0], [1, 3]), ([1, 0], [3, 3])))
    target = {"w": torch.zeros(ROWS, COLUMNS)}
    with fails_with(StateMismatch, "'w': what the planner reads leaves 3 of 12"):
        dcp.load(target, storage_reader=CheckFreqReader(tmp_path), planner=Forgetful())
    assert bool((target["w"] == 0).all())


def test_a_restore_goes_on_to_an_older_checkpoint(tmp_path):
    part = torch.nn.Linear(3, 4, bias=False)
    with Checkpointer(tmp_path, {"part": part}, every=1) as checkpointer:
        checkpointer.restore(fresh_start=True)
        for step in (1, 2):
            with torch.no_grad():
                part.weight.fill_(step)
            checkpointer.after_step(step)
    newest = tmp_path / "step_00000002"
    metadata, record = metadata_format.load((newest / ".metadata").read_bytes(), "")
    kept = metadata.state_dict_metadata["part.weight"]
    kept.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 3]))]
    (newest / ".metadata").write_bytes(metadata_format.dump(metadata, record))
    with Checkpointer(tmp_path, {"part": part}, every=100) as checkpointer:
        assert checkpointer.restore().step == 1
    assert bool((part.weight == 1).all())
