"""Cleaning removes what dead attempts left, and nothing that is or may be part of a checkpoint."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter
from dcp_checkfreq.format import names
from dcp_checkfreq.format.digest import identity
from dcp_checkfreq.recovery.clean import (
    YOUNG_S,
    KnownSteps,
    clean_root,
    delete_step,
    leftovers,
)
from dcp_checkfreq.storage.tier import Entry
from dcp_checkfreq.testing import ForwardingTier, ManualClock, MemoryTier

DEAD = "aaaaaaaaaaaa"
START_S = 1_700_000_000.0
LATER_S = START_S + YOUNG_S + 1


def saved(step=1, *, clock=None):
    """Return a root with one published step, all of it modified at START_S."""
    root = MemoryTier(clock=clock or ManualClock(wall_s=START_S))
    state = {"w": torch.arange(100.0), "n": step}
    folder = root.child(names.step_folder(step))
    dcp.save(state, storage_writer=CheckFreqWriter(folder), no_dist=True)
    return root


def known(root, *step_names):
    """Return these steps as they are now."""
    return KnownSteps(
        root, {name: identity(root.child(name).read(names.METADATA)) for name in step_names}
    )


def assert_loads(root, step=1):
    state = {"w": torch.zeros(100), "n": None}
    folder = root.child(names.step_folder(step))
    dcp.load(state, storage_reader=CheckFreqReader(folder), no_dist=True)
    assert torch.equal(state["w"], torch.arange(100.0))


NAMES = st.one_of(
    st.builds(
        names.shard_file, st.integers(0, 2), st.integers(0, 2), st.sampled_from([DEAD, "b" * 12])
    ),
    st.just(names.scratch_metadata(DEAD)),
    st.sampled_from([".metadata", "__0_0.distcp", "README", ".metadata.tmp", "model.safetensors"]),
)
ENTRIES = st.lists(
    st.builds(Entry, NAMES, st.booleans(), st.just(5), st.integers(0, 20).map(float)),
    unique_by=lambda entry: entry.name,
    max_size=12,
)


@given(entries=ENTRIES, named=st.sets(NAMES), before_s=st.integers(0, 20).map(float))
def test_leftovers_are_old_files_of_ours_that_no_checkpoint_names(entries, named, before_s):
    by_name = {entry.name: entry for entry in entries}
    doomed = leftovers(entries, named, before_s=before_s)
    assert len(doomed) == len(set(doomed))
    assert not set(doomed) & named
    for name in doomed:
        assert by_name[name].modified_s < before_s
        assert not by_name[name].is_folder
        assert names.parse_shard(name) or names.parse_scratch(name)
        assert name != names.METADATA
    for entry in entries:
        ours = names.parse_shard(entry.name) or names.parse_scratch(entry.name)
        if ours and not entry.is_folder and entry.name not in named and entry.modified_s < before_s:
            assert entry.name in doomed


def test_files_of_a_dead_attempt_go_and_with_them_their_folder():
    clock = ManualClock(wall_s=START_S)
    root = MemoryTier.holding(
        {
            f"step_00000005/{names.shard_file(0, 0, DEAD)}": b"x",
            f"step_00000005/{names.shard_file(1, 0, DEAD)}": b"x",
            f"step_00000005/{names.scratch_metadata(DEAD)}": b"x",
        },
        clock=clock,
    )
    assert len(clean_root(root, now_s=LATER_S)) == 3
    assert root.files() == {}
    assert root.folders() == set()


def test_a_published_step_is_never_touched():
    root = saved()
    before = root.files()
    assert clean_root(root, now_s=LATER_S + 1e9) == []
    assert root.files() == before
    assert_loads(root)


def test_leftovers_beside_a_published_step_go_and_it_still_loads():
    root = saved()
    before = root.files()
    root.poke(f"step_00000001/{names.shard_file(0, 1, DEAD)}", b"x")
    assert clean_root(root, now_s=LATER_S) == [f"step_00000001/{names.shard_file(0, 1, DEAD)}"]
    assert root.files() == before
    assert_loads(root)


def test_a_step_of_stock_dcp_and_its_files_stay(tmp_path):
    dcp.save({"w": torch.arange(100.0), "n": 1}, checkpoint_id=tmp_path, no_dist=True)
    content = {f"step_1/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    root = MemoryTier.holding(content, clock=ManualClock(wall_s=START_S))
    clean_root(root, now_s=LATER_S)
    assert root.files() == content


FOREIGN = {
    "step_00000005/__0_0.distcp": b"stock's, maybe still being written",
    "step_00000005/.metadata.tmp": b"stock's",
    "step_00000005/README": b"a person's",
    "other/" + names.shard_file(0, 0, DEAD): b"not in a step folder",
    "step_5.tmp/" + names.shard_file(0, 0, DEAD): b"not in a step folder",
    "step_00000006/inner/" + names.shard_file(0, 0, DEAD): b"deeper than we write",
    names.shard_file(0, 0, DEAD): b"in the root",
    ".checkfreq/lease.json": b"{}",
}


def test_foreign_files_stay():
    root = MemoryTier.holding(FOREIGN, clock=ManualClock(wall_s=START_S))
    root.poke(f"step_00000005/{names.shard_file(0, 0, DEAD)}", b"x")
    assert clean_root(root, now_s=LATER_S) == [f"step_00000005/{names.shard_file(0, 0, DEAD)}"]
    assert root.files() == FOREIGN


@pytest.mark.parametrize("age_s", [0.0, 1.0, YOUNG_S - 1, -100.0])
def test_young_files_are_spared(age_s):
    path = f"step_00000005/{names.shard_file(0, 0, DEAD)}"
    root = MemoryTier.holding({path: b"x"}, clock=ManualClock(wall_s=START_S))
    assert clean_root(root, now_s=START_S + age_s) == []
    assert list(root.files()) == [path]


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "foreign", "newer"])
def test_a_folder_whose_metadata_cannot_be_read_is_left_as_it_is(damage):
    root = saved()
    content = root.files()["step_00000001/.metadata"]
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    root.poke(
        "step_00000001/.metadata",
        {
            "empty": b"",
            "cut": content[:-1],
            "flipped": bytes(flipped),
            "foreign": b"not a pickle",
            "newer": content[: len(content) // 2],
        }[damage],
    )
    root.poke(f"step_00000001/{names.shard_file(0, 1, DEAD)}", b"x")
    before = root.files()
    assert clean_root(root, now_s=LATER_S) == []
    assert root.files() == before
    assert not delete_step(known(root, "step_00000001"), "step_00000001")
    assert root.files() == before


def test_the_step_that_is_deleted_goes_whole_and_no_other():
    clock = ManualClock(wall_s=START_S)
    root = saved(1, clock=clock)
    folder = root.child(names.step_folder(2))
    dcp.save(
        {"w": torch.arange(100.0), "n": 2}, storage_writer=CheckFreqWriter(folder), no_dist=True
    )
    assert delete_step(known(root, "step_00000001"), "step_00000001")
    assert root.folders() == {"step_00000002"}
    assert_loads(root, 2)


def test_a_step_is_no_checkpoint_any_more_before_its_first_file_goes():
    calls = []

    class Listening(ForwardingTier):
        def around(self, verb, name, call):
            if verb in ("delete", "sync", "remove"):
                calls.append((verb, name))
            return call()

    root = saved()
    assert delete_step(known(Listening(root), "step_00000001"), "step_00000001")
    assert calls[0] == ("delete", names.METADATA)
    assert calls[1][0] == "sync"
    assert all(verb in ("delete", "remove", "sync") for verb, _ in calls[2:])
    assert root.files() == {}


def test_what_people_put_beside_a_step_stays_when_it_is_deleted():
    root = saved()
    root.poke("step_00000001/README", b"a person's")
    root.poke(f"step_00000001/{names.shard_file(0, 1, DEAD)}", b"x")
    leftover = f"step_00000001/{names.shard_file(0, 1, DEAD)}"
    assert delete_step(known(root, "step_00000001"), "step_00000001")
    # The leftover may be of a save that is under way: cleaning can tell.
    assert root.files() == {"step_00000001/README": b"a person's", leftover: b"x"}
    assert clean_root(root, now_s=LATER_S) == [leftover]
    assert root.files() == {"step_00000001/README": b"a person's"}


def test_deleting_a_step_that_is_not_there_does_nothing():
    root = MemoryTier.holding({"README": b"x"})
    root.child("step_00000009").make()
    assert delete_step(KnownSteps(root, {"step_00000009": "seen"}), "step_00000009")
    assert root.files() == {"README": b"x"}
