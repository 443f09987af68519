"""Whoever is stopped wherever, and whoever comes meanwhile: what a save said it saved is there."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from interleave import every_order

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter, find_latest_valid
from dcp_checkfreq.format import names
from dcp_checkfreq.format.digest import identity
from dcp_checkfreq.recovery.clean import KnownSteps, clean_root, delete_step
from dcp_checkfreq.testing import ManualClock, MemoryTier

LATE_S = 1e6  # by the clock of whoever cleans, everything there is old
FOLDER = names.step_folder(2)
in_threads = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
pytestmark = [in_threads, pytest.mark.slow]


def save(value, *, step=2, **options):
    def work(root):
        folder = root.child(names.step_folder(step))
        state = {"w": torch.full((40,), float(value)), "n": value}
        writer = CheckFreqWriter(folder, **options)
        dcp.save(state, storage_writer=writer, no_dist=True)
        return value

    return work


def clean(root):
    """Clean as a run does that finds everything old."""
    clean_root(root, now_s=LATE_S, young_s=0.0)
    return


def value_of(root, step=2):
    state = {"w": torch.zeros(40), "n": None}
    folder = root.child(names.step_folder(step))
    dcp.load(state, storage_reader=CheckFreqReader(folder), no_dist=True)
    assert torch.equal(state["w"], torch.full((40,), float(state["n"])))
    return state["n"]


def newest(root):
    found = find_latest_valid(root, depth="digest", no_dist=True)
    return None if found is None else (found.step, value_of(root, found.step))


def storage():
    root = MemoryTier(clock=ManualClock(wall_s=1000.0))
    save(1, step=1)(root)
    return root


def with_step_2():
    root = storage()
    save(2)(root)
    return root


def with_a_dead_attempt():
    root = storage()
    root.poke(f"{FOLDER}/{names.shard_file(0, 0, 'a' * 12)}", b"x")
    root.poke(f"{FOLDER}/{names.scratch_metadata('a' * 12)}", b"")
    return root


def check_whole(root, schedule):
    """No step that is published is broken, and step 1 is as it was."""
    assert value_of(root, 1) == 1, schedule
    found = find_latest_valid(root, depth="digest", no_dist=True)
    broken = [one for one in found.rejected if "not published" not in one.reason]
    assert not broken, (schedule, broken)


@pytest.mark.parametrize("start", [storage, with_a_dead_attempt])
def test_a_save_that_was_cleaned_away_under_it_fails_and_one_that_returned_is_whole(start):
    outcomes = set()
    for schedule, root, saving, _ in every_order(save(7), clean, start):
        check_whole(root, schedule)
        outcomes.add(saving.error is None)
        assert newest(root) == ((2, 7) if saving.error is None else (1, 1)), schedule
    assert outcomes == {True, False}, "one of the two never happened: the test proves nothing"


def test_a_cleaner_that_is_stopped_anywhere_and_comes_back_breaks_no_save():
    for schedule, root, _, saving in every_order(clean, save(7), with_a_dead_attempt):
        check_whole(root, schedule)
        assert newest(root) == ((2, 7) if saving.error is None else (1, 1)), schedule


def test_an_overwrite_and_a_cleaner_leave_all_old_or_all_new_values():
    overwrite = save(7, overwrite=True)
    for schedule, root, saving, _ in every_order(overwrite, clean, with_step_2):
        check_whole(root, schedule)
        assert value_of(root) == (7 if saving.error is None else 2), schedule


def test_of_two_saves_of_one_step_exactly_one_returns():
    for schedule, root, one, other in every_order(save(7), save(8), storage):
        winners = [actor.result for actor in (one, other) if actor.error is None]
        assert len(winners) == 1, schedule
        check_whole(root, schedule)
        assert newest(root) == (2, winners[0]), schedule


def test_two_overwrites_leave_the_values_of_one_that_returned():
    overwrites = save(7, overwrite=True), save(8, overwrite=True)
    for schedule, root, one, other in every_order(*overwrites, with_step_2):
        winners = [actor.result for actor in (one, other) if actor.error is None]
        check_whole(root, schedule)
        assert value_of(root) in winners, (schedule, one.error, other.error)


def known_step_2(root):
    return KnownSteps(root, {FOLDER: identity(root.child(FOLDER).read(names.METADATA))})


def test_a_late_retention_deletes_nothing_of_the_checkpoint_that_took_the_name():
    """The old run knows its own step 2; another one replaces it before, or while, it is deleted.

    Between the comparison and the deletion there is one call: a run that is stopped exactly there,
    and comes back after the name was taken, is the one case that a look cannot exclude.
    """
    start = with_step_2()
    mine = identity(start.child(FOLDER).read(names.METADATA))

    def retention(root):
        return delete_step(KnownSteps(root, {FOLDER: mine}), FOLDER)

    def copy():
        return MemoryTier.holding(start.files(), clock=ManualClock(wall_s=1000.0))

    unexcluded = []
    for schedule, root, deleting, saving in every_order(retention, save(7, overwrite=True), copy):
        assert deleting.error is None, schedule
        if saving.error is not None:
            continue
        calls = deleting.tier.calls
        stopped_at = calls[schedule[0]] if schedule[0] < len(calls) else None
        if stopped_at == ("delete", names.METADATA):
            unexcluded.append(schedule)
            continue
        check_whole(root, schedule)
        assert newest(root) == (2, 7), (schedule, calls)
    assert len(unexcluded) < 30
