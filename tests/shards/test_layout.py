"""From a plan to items in files: tied memory once, every item accounted for."""

import io

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_checkfreq.errors import UnsupportedState
from dcp_checkfreq.format.digest import block_bytes
from dcp_checkfreq.format.envelope import Envelopes
from dcp_checkfreq.shards.assign import MIN_FILE_BYTES
from dcp_checkfreq.shards.codec import pieces
from dcp_checkfreq.shards.layout import lay_out, report, resolve


def planned(state):
    """Return a planner that has planned ``state``, and its plan, as DCP makes them."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    (plan,), _ = planner.create_global_plan([planner.create_local_plan()])
    return planner, planner.finish_plan(plan)


def written(state, max_files=1):
    """Return the report of a save of ``state`` and the content of its files by name."""
    planner, plan = planned(state)
    items = resolve(plan, planner, Envelopes())
    placements = lay_out(items, max_files)
    names = [f"file {number}" for number in range(len(placements))]
    files = {
        name: b"".join(pieces(items, placement))
        for name, placement in zip(names, placements, strict=True)
    }
    return report(plan, items, placements, names), files


def values_of(made, files):
    """Read every item back through nothing but torch.load."""
    values = {}
    for index, name, start, size in zip(
        made.indices, made.file_name, made.start, made.item_bytes, strict=True
    ):
        item = io.BytesIO(files[name][start : start + size])
        values[index.fqn] = torch.load(item, weights_only=True)
    return values


def test_every_item_of_the_plan_is_where_the_report_says():
    state = {
        "a": torch.arange(5.0),
        "b": torch.ones(2, 3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "bytes": ({"x": 1}, ["text"]),
    }
    made, files = written(state)
    assert {name: len(content) for name, content in files.items()} == made.files
    values = values_of(made, files)
    for key in ("a", "b", "empty", "scalar"):
        assert torch.equal(values[key], state[key])
    assert values["bytes"] == ({"x": 1}, ["text"])


def test_the_payload_columns_point_at_the_bytes_of_the_tensor():
    state = {"a": torch.arange(500.0), "b": torch.arange(7)}
    made, files = written(state)
    for position, index in enumerate(made.indices):
        offset, size = made.payload_offset[position], made.payload_bytes[position]
        payload = files[made.file_name[position]][offset : offset + size]
        assert payload == state[index.fqn].numpy().tobytes()
        assert made.block_bytes[position] == block_bytes(size)
        assert len(made.digests[position]) == -(-size // made.block_bytes[position])


def test_tied_memory_is_written_once_and_reported_for_every_key():
    tied = torch.arange(50_000.0)
    alone, _ = written({"a": tied})
    made, files = written({"a": tied, "b": tied, "c": tied.view(tied.shape), "d": tied.clone()})
    assert sum(made.files.values()) < 2.5 * sum(alone.files.values())
    place = {index.fqn: made.payload_offset[n] for n, index in enumerate(made.indices)}
    assert place["a"] == place["b"] == place["c"] != place["d"]
    assert all(torch.equal(value, tied) for value in values_of(made, files).values())
    assert all(made.digests)


def test_views_that_only_overlap_are_written_each():
    whole = torch.arange(10.0)
    state = {"whole": whole, "head": whole[:5], "tail": whole[5:], "t": whole.reshape(2, 5).t()}
    values = values_of(*written(state))
    assert all(torch.equal(values[key], state[key]) for key in state)


def test_large_states_are_spread_over_files():
    state = {str(n): torch.zeros(MIN_FILE_BYTES // 2, dtype=torch.uint8) for n in range(4)}
    made, files = written(state, max_files=2)
    assert len(files) == len(made.files) == 2
    assert sorted(set(made.file_name)) == sorted(files)
    assert max(made.files.values()) < 1.1 * min(made.files.values())


def test_an_item_that_cannot_be_written_is_named_before_anything_is():
    planner, plan = planned({"fine": torch.ones(2), "odd": torch.ones(2, device="meta")})
    with pytest.raises(UnsupportedState, match="odd"):
        resolve(plan, planner, Envelopes())
