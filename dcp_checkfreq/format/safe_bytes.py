"""Byte items back to objects without running code that the checkpoint brings along."""

from __future__ import annotations

import _codecs
import datetime
import io
import os
import pickle
import struct
import threading
from functools import cache
from typing import Any

import torch
from torch.serialization import safe_globals

from dcp_checkfreq.errors import BrokenShard, UnsafePickle
from dcp_checkfreq.format.item_checks import check_pickle, pickles_of
from dcp_checkfreq.format.numpy_checks import NotPlain
from dcp_checkfreq.format.texts import clipped, shown

# What damaged archives make torch raise.
_LOADING_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)

# `safe_globals` swaps a process-wide list; two of them at once would restore each other's.
_lock = threading.Lock()


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have had it


os.register_at_fork(after_in_child=_in_child)


@cache
def _harmless() -> tuple[Any, ...]:
    """Return what optimizers, schedulers and RNG states hold beyond torch's own allow-list.

    Constructors of plain values only: nothing that calls, imports or opens anything. Deques and
    defaultdicts are not among them, because torch's safe unpickler cannot fill them.
    """
    allowed: list[Any] = [
        _codecs.encode,  # how pickle spells bytes in old protocols; numpy's RNG state has them
        *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
        *(bool, int, float, complex, str, bytes, io.BytesIO),
        *(list, tuple, dict, set, frozenset, range, slice),
    ]
    try:
        import numpy as np
    except ImportError:
        return tuple(allowed)
    allowed += [np.dtype, np.ndarray]
    allowed += [kind for kind in vars(np.dtypes).values() if isinstance(kind, type)]
    # numpy moved these between 1.x and 2.x; a checkpoint may come from either.
    scalar = np.float64(0).__reduce__()[0]
    rebuild = np.zeros(0).__reduce__()[0]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        allowed += [(scalar, f"{module}.scalar"), (rebuild, f"{module}._reconstruct")]
    return tuple(allowed)


def load_object(stream: io.BytesIO, key: str, where: str, *, allow_pickle: bool) -> Any:
    """Return the object that `torch.save` put into ``stream``.

    With ``allow_pickle`` False only plain values, containers, tensors, numpy scalars and arrays
    are built. ``key`` and ``where`` are named in errors.

    Raises:
        UnsafePickle: it needs more than that; none of its code was run.
        BrokenShard: it is damaged, or would take far more memory or time than its size.
    """
    if allow_pickle:
        return torch.load(stream, map_location="cpu", weights_only=False)
    try:
        for content in pickles_of(stream.getbuffer()):
            check_pickle(content)
        with _lock, safe_globals(list(_harmless())):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        text = str(error).split("Check the documentation of torch.load")[0]
        reason = [line.strip() for line in text.splitlines() if line.strip()][-1:]
        reason = [
            line.removeprefix("WeightsUnpickler error: ").split(" Please use")[0] for line in reason
        ]
        code = clipped("".join(reason), 300)
        raise UnsafePickle(where, f"{shown(key)} needs code to unpickle ({code})") from error
    except NotPlain as error:
        raise UnsafePickle(where, f"{shown(key)} needs trust ({error})") from error
    except _LOADING_ERRORS as error:
        problem = clipped(str(error) or type(error).__name__, 300)
        raise BrokenShard(
            where, f"{shown(key)} is damaged, or not what torch.save writes: {problem}"
        ) from error


def load_tensor(archive: bytearray, size: torch.Size, key: str, where: str) -> torch.Tensor:
    """Return the tensor of this size that `torch.save` put into ``archive``.

    Raises:
        BrokenShard: there is something else in it.
    """
    try:
        loaded = load_object(io.BytesIO(archive), key, where, allow_pickle=False)
    except UnsafePickle as error:
        raise BrokenShard(where, f"{shown(key)} is not an archive of a tensor") from error
    if not isinstance(loaded, torch.Tensor):
        kind = type(loaded).__name__
        raise BrokenShard(where, f"{shown(key)}: a {kind} is where a tensor should be")
    if loaded.shape != size:
        raise BrokenShard(
            where, f"{shown(key)}: {shown(loaded.shape)} is where {shown(size)} should be"
        )
    return loaded
