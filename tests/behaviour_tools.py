"""What the behaviour tests share: small saves and loads, and the error behind DCP's wrapper."""

import contextlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter


def some_state(value=1.0):
    """Return a state with tensors of several dtypes and plain values; all tell ``value``."""
    return {
        "weight": torch.full((40, 3), value),
        "half": torch.full((7,), value, dtype=torch.bfloat16),
        "count": torch.tensor(int(value)),
        "empty": torch.zeros(0, 4),
        "nested": {"lr": value, "names": ["a", f"{value}"]},
        "note": f"value {value}",
    }


def blank(value):
    """Return the same structure with nothing of the content."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, -1)
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [blank(inner) for inner in value]
    return None


def same(got, wanted):
    """Tell whether two states are equal to the last bit."""
    if isinstance(wanted, torch.Tensor):
        return got.dtype == wanted.dtype and torch.equal(got, wanted)
    if isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(same(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    return got == wanted


def save(state, path, *, planner=None, **options):
    dcp.save(state, storage_writer=CheckFreqWriter(path, **options), planner=planner)


def load(state, path, *, planner=None, **options):
    """Load the state's structure from ``path`` and return it filled."""
    target = blank(state)
    dcp.load(target, storage_reader=CheckFreqReader(path, **options), planner=planner)
    return target


def cause_of(error):
    """Return the error of the first rank that failed, without DCP's wrapper."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


@contextlib.contextmanager
def fails_with(kind, match=""):
    """Like `pytest.raises` for an error that DCP may have wrapped."""
    with pytest.raises((CheckpointException, kind)) as caught:
        yield caught
    cause = cause_of(caught.value)
    assert isinstance(cause, kind), repr(cause)
    assert match in str(cause)


def files_in(folder):
    """Return the names below ``folder``, or nothing if it is missing."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
