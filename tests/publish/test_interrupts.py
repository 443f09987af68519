"""Ctrl-C at any function entry of a save or an overwrite: what is published is whole, or not there.

Python runs signal handlers when a function is entered, so an exception raised there by a trace
function is what an interrupt does. All entries of the commit are tried, and every so many of the
others; ``INTERRUPT_EVERY=1 pytest tests/publish/test_interrupts.py`` tries all of them.
"""

import os
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_checkfreq
from dcp_checkfreq import CheckFreqReader, CheckFreqWriter, find_latest_valid
from dcp_checkfreq.testing import MemoryTier

# An interrupt in a finalizer goes nowhere; what it should have done is then done by others.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PACKAGE = os.path.dirname(dcp_checkfreq.__file__) + "/"
EVERY = int(os.environ.get("INTERRUPT_EVERY", "9"))
COMMIT = ("publish/", "writer.py")


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


def one(n, *, overwrite):
    """Interrupt a save of 2 at entry ``n``. Return the entries, the outcome, and what is found."""
    root = MemoryTier()
    save(root.child("step_1"), 1)
    interrupt = Interrupt(n)
    error = None
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        folder = root.child("step_1" if overwrite else "step_2")
        save(folder, 2, overwrite=overwrite)
    except (KeyboardInterrupt, CheckpointException) as raised:
        error = raised
    finally:
        sys.settrace(before)
    found = find_latest_valid(root, depth="digest", no_dist=True)
    broken = [r for r in found.rejected if "not published" not in r.reason]
    assert not broken, (interrupt.entries[n - 2 : n], broken)
    return interrupt.entries, error, value_of(root, found)


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
