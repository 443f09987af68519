"""What the tests of `Checkpointer` share."""

import errno

import torch

from dcp_checkfreq import (
    Checkpointer,
)
from dcp_checkfreq.testing import Fault, FaultyTier


def counter(value=0.0):
    return {"w": torch.full((5,), float(value)), "note": f"at {value}"}


def run(root, steps, state=None, **options):
    """Train ``steps`` steps: after step n every value tells n. Return the Checkpointer's steps."""
    state = counter() if state is None else state
    options = {"every": 1, "keep_last": 100} | options
    seen = []
    with Checkpointer(root, state, **options) as ckpt:
        ckpt.restore()
        for _ in range(steps):
            at = ckpt.step + 1
            state["w"].fill_(float(at))
            state["note"] = f"at {at}"
            ckpt.after_step()
            seen.append(ckpt.step)
    return seen


def steps_on(root):
    """Return the steps whose folder holds a commit record."""
    return sorted(
        int(entry.name.removeprefix("step_"))
        for entry in root.list()
        if entry.name.startswith("step_")
        and any(inner.name == ".metadata" for inner in root.child(entry.name).list())
    )


def step_until_it_raises(ckpt, at_most=10_000):
    """A background save ends at its own time: one of the next calls tells."""
    for _ in range(at_most):
        ckpt.after_step()


def train_on(root, steps, **options):
    with Checkpointer(root, counter(), every=1, **options) as ckpt:
        ckpt.restore()
        for _ in range(steps):
            ckpt.after_step()


def train_and_crash(root):
    with Checkpointer(root, counter(), every=1) as ckpt:
        ckpt.after_step()
        raise ZeroDivisionError


def restored_from(root, **options):
    state = counter(-1)
    with Checkpointer(root, state, every=1) as ckpt:
        restored = ckpt.restore(**options)
    return restored, state


def failing(inner, **fault):
    return FaultyTier(inner, [Fault(verb="write_shard", error=errno.ENOSPC, **fault)])
