"""A small training whose every value tells its step, with a local disk in front of its root."""

import functools

import torch

from dcp_checkfreq import Checkpointer


def train(root, staging, steps, restore=None, **options):
    """Go on from what is there for so many steps, saving each; return the step restored.

    ``restore`` and ``options`` are arguments of `Checkpointer.restore` and of `Checkpointer`.
    """
    state = {"model": torch.nn.Linear(37, 27), "note": "nothing"}
    options = {"every": 1, "on_error": "raise"} | options
    with Checkpointer(root, state, staging_dir=staging, **options) as ckpt:
        restored = ckpt.restore(**restore or {})
        if restored is not None:
            assert state["note"] == f"at {restored.step}"
            assert bool((state["model"].weight == restored.step).all())
        for _ in range(steps):
            at = ckpt.step + 1
            with torch.no_grad():
                state["model"].weight.fill_(float(at))
            state["note"] = f"at {at}"
            ckpt.after_step()
            ckpt.wait()
    return None if restored is None else restored.step


# The n-th call to a disk is the same one every time, and no signal is caught.
train_in_one_thread = functools.partial(train, threads=1, preempt_signals=())
