"""Byte items back to objects without running code that the checkpoint brings along."""

from __future__ import annotations

import _codecs
import datetime
import io
import pickle
import struct
import threading
from functools import cache
from typing import Any

import torch
from torch.serialization import safe_globals

from dcp_checkfreq.errors import LoadFailed, UnsafePickle

# `safe_globals` swaps a process-wide list; two of them at once would restore each other's.
_lock = threading.Lock()


@cache
def _harmless() -> tuple[Any, ...]:
    """Return what optimizers, schedulers and RNG states hold beyond torch's own allow-list.

    Constructors of plain values only: nothing that calls, imports or opens anything. Deques and
    defaultdicts are not among them, because torch's safe unpickler cannot fill them.
    """
    allowed: list[Any] = [
        _codecs.encode,  # how pickle spells bytes in old protocols; numpy's RNG state has them
        *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
        *(bool, int, float, complex, str, bytes),
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
    """
    if allow_pickle:
        return torch.load(stream, map_location="cpu", weights_only=False)
    try:
        with _lock, safe_globals(list(_harmless())):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        text = str(error).split("Check the documentation of torch.load")[0]
        reason = [line.strip() for line in text.splitlines() if line.strip()][-1:]
        reason = [
            line.removeprefix("WeightsUnpickler error: ").split(" Please use")[0] for line in reason
        ]
        raise UnsafePickle(where, f"{key!r} needs code to unpickle ({''.join(reason)})") from error
    except (RuntimeError, ValueError, EOFError, LookupError, TypeError, struct.error) as error:
        raise LoadFailed(
            where, f"{key!r} is damaged, or not what torch.save writes: {error}"
        ) from error
