"""Ctrl-C at any function entry of a save, an overwrite, a staged upload, a deletion, a cleaning or
a restore: what is published is whole, or not there.

Python runs signal handlers when a function is entered, so an exception raised there by a trace
function is what an interrupt does. All entries of the commit are tried, and every so many of the
others; ``INTERRUPT_EVERY=1 pytest tests/commit/test_interrupts.py`` tries all of them.
"""

import os
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_checkfreq
from dcp_checkfreq import CheckFreqReader, CheckFreqWriter, Checkpointer, find_latest_valid
from dcp_checkfreq.format import names
from dcp_checkfreq.format.digest import identity
from dcp_checkfreq.recovery.clean import KnownSteps, clean_root, delete_step
from dcp_checkfreq.testing import ManualClock, MemoryTier

# An interrupt in a finalizer goes nowhere; what it should have done is then done by others.
unraised = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
pytestmark = [unraised, pytest.mark.slow]

PACKAGE = os.path.dirname(dcp_checkfreq.__file__) + "/"
EVERY = int(os.environ.get("INTERRUPT_EVERY", "9"))
COMMIT = ("commit/", "dcp/writer.py")


class Interrupt:
    """Raises `KeyboardInterrupt` at the n-th entry of a function of, or from, this package."""

    def __init__(self, n):
        self.n = n
        self.entries = []

    def __call__(self, frame, event, arg):
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        here = frame.f_code.co_filename
        if event != "call" or not (here.startswith(PACKAGE) or caller.startswith(PACKAGE)):
            return
        ours = here if here.startswith(PACKAGE) else caller
        self.entries.append(f"{ours.removeprefix(PACKAGE)}:{frame.f_code.co_name}")
        if len(self.entries) == self.n:
            sys.settrace(None)
            raise KeyboardInterrupt


def state_of(value):
    return {"w": torch.full((50,), float(value)), "n": value}


def save(folder, value, **options):
    dcp.save(state_of(value), storage_writer=CheckFreqWriter(folder, **options), no_dist=True)


def value_of(root, found):
    state = {"w": torch.zeros(50), "n": None}
    dcp.load(state, storage_reader=CheckFreqReader(root.child(found.name)), no_dist=True)
    assert torch.equal(state["w"], state_of(state["n"])["w"])
    return state["n"]


def interrupted(n, work):
    """Call ``work`` with an interrupt at entry ``n``. Return the entries and what was raised."""
    interrupt = Interrupt(n)
    error = None
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        work()
    except (KeyboardInterrupt, CheckpointException) as raised:
        error = raised
    finally:
        sys.settrace(before)
    return interrupt.entries, error


def only_whole(root):
    """Return the newest step that is found; what is published is whole, to the last digest."""
    found = find_latest_valid(root, depth="digest", no_dist=True)
    broken = [r for r in found.rejected if "not published" not in r.reason]
    assert not broken, broken
    return found


def one(n, *, overwrite):
    """Interrupt a save of 2 at entry ``n``. Return the entries, the outcome, and what is found."""
    root = MemoryTier()
    save(root.child("step_1"), 1)
    folder = root.child("step_1" if overwrite else "step_2")
    entries, error = interrupted(n, lambda: save(folder, 2, overwrite=overwrite))
    return entries, error, value_of(root, only_whole(root))


@pytest.mark.parametrize("overwrite", [False, True], ids=["save", "overwrite"])
def test_an_interrupt_anywhere_leaves_the_old_values_or_the_new_ones_whole(overwrite):
    entries, error, value = one(0, overwrite=overwrite)
    assert error is None
    assert value == 2
    tried = [
        n for n, entry in enumerate(entries, start=1) if entry.startswith(COMMIT) or n % EVERY == 0
    ]
    outcomes = set()
    for n in tried:
        _, error, value = one(n, overwrite=overwrite)
        assert value == 2 if error is None else value in (1, 2), entries[n - 1]
        outcomes.add((error is None, value))
    assert {(False, 1), (False, 2)} <= outcomes, "interrupts before and after the commit"
    assert len(tried) > 40
    assert all(any(entry.startswith(part) for entry in entries) for part in COMMIT)


def three_steps():
    root = MemoryTier(clock=ManualClock(wall_s=1000.0))
    for step in (1, 2, 3):
        save(root.child(names.step_folder(step)), step)
    root.poke(f"{names.step_folder(2)}/{names.shard_file(5, 0, 'a' * 12)}", b"left by a dead save")
    root.poke(f"{names.step_folder(4)}/{names.shard_file(0, 0, 'a' * 12)}", b"left by a dead save")
    root.poke(f"{names.step_folder(4)}/{names.scratch_metadata('a' * 12)}", b"")
    return root


def every_entry(make, work, check, *, every=1):
    """Interrupt ``work(made)`` at its entries, and ``check(made, error)`` after each."""
    made = make()
    entries, error = interrupted(0, lambda: work(made))
    assert error is None
    check(made, None)
    for n in range(1, len(entries) + 1, every):
        made = make()
        _, error = interrupted(n, lambda made=made: work(made))
        check(made, error)
    return len(entries)


def test_an_interrupt_of_a_deletion_leaves_a_whole_checkpoint_or_none():
    name = names.step_folder(1)

    def delete(root):
        known = {name: identity(root.child(name).read(names.METADATA))}
        delete_step(KnownSteps(root, known), name)

    def check(root, error):
        assert value_of(root, only_whole(root)) == 3
        if error is None:
            assert f"{name}/.metadata" not in root.files()
        elif f"{name}/.metadata" in root.files():
            assert any(path.startswith(f"{name}/__0_0_") for path in root.files())

    assert every_entry(three_steps, delete, check) > 20


def test_an_interrupt_of_a_cleaning_touches_nothing_that_is_whole_and_the_next_one_ends_it():
    def clean(root):
        clean_root(root, now_s=1e6)

    def check(root, error):
        assert value_of(root, only_whole(root)) == 3
        clean(root)
        assert not [path for path in root.files() if "a" * 12 in path]
        assert value_of(root, only_whole(root)) == 3

    assert every_entry(three_steps, clean, check, every=max(1, EVERY // 3)) > 40


def test_an_interrupt_of_a_staged_save_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    def make():
        root = MemoryTier()
        save(root.child(names.step_folder(1)), 1)
        return root

    def staged(root):
        save(root.child(names.step_folder(2)), 2, staging_dir=tmp_path)

    def check(root, error):
        value = value_of(root, only_whole(root))
        assert value == 2 if error is None else value in (1, 2)

    assert every_entry(make, staged, check, every=EVERY) > 100


def test_after_an_interrupt_of_a_restore_the_next_one_finds_everything():
    trained = MemoryTier(clock=ManualClock(wall_s=1000.0))
    state = {"w": torch.zeros(50)}
    with Checkpointer(trained, state, every=1, keep_last=9, preempt_signals=()) as ckpt:
        for step in (1, 2, 3):
            state["w"].fill_(step)
            ckpt.after_step()

    def restore(root):
        state = {"w": torch.zeros(50)}
        with Checkpointer(root, state, every=1, preempt_signals=()) as ckpt:
            assert ckpt.restore().step == 3
            assert bool((state["w"] == 3).all())

    def check(root, error):
        assert only_whole(root).step == 3
        restore(root)

    def make():
        return MemoryTier.holding(trained.files(), clock=ManualClock(wall_s=1000.0))

    assert every_entry(make, restore, check, every=4 * EVERY) > 200
