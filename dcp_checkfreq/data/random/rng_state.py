"""Random states of a rank, saved and restored; `seed_everything`."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import torch

from dcp_checkfreq.data.order.permutation import RANK_STREAM, derive, numpy_or_none
from dcp_checkfreq.data.order.ranks import resolve
from dcp_checkfreq.data.random import generators, global_state
from dcp_checkfreq.errors import DataStateError
from dcp_checkfreq.state.per_rank import PerRank

_log = logging.getLogger(__name__)

FORMAT = 1
_WHAT = "RNGState"
_ARRAY = "__ndarray__"  # marks an array kept as a tensor of bytes


def seed_everything(seed: int, *, rank: int | None = None) -> None:
    """Seed `random`, NumPy's legacy generator and torch on all devices.

    Args:
        seed: in ``[0, 2**64)``.
        rank: gives each rank numbers of its own; without it all ranks draw the same, as the
            initial weights of a replicated model must be.
    """
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be a whole number in [0, 2**64), got {seed!r}")
    key = derive(RANK_STREAM, seed) if rank is None else derive(RANK_STREAM, seed, rank)
    global_state.seed_all(key)
    torch.manual_seed(key & 0xFFFFFFFF)  # also the devices


class RNGState(PerRank):
    """The random states of each rank; register it with `Checkpointer` as it is.

    ::

        seed_everything(1)
        parts = {"model": model, "optim": optimizer, "rng": RNGState(seed=1)}

    Holds `random`, NumPy's legacy generator, torch's CPU generator, that of the current CUDA
    device, and those in ``generators``. The saved values load with ``torch.load(...,
    weights_only=True)``. A rank that the checkpoint does not know (the job resumes with more) gets
    new numbers, from (seed, rank, step), with a warning.

    Args:
        seed: for ranks that the checkpoint does not know.
        generators: name to `random.Random`, ``np.random.Generator``, ``np.random.RandomState`` or
            `torch.Generator`; restored in place.
        rank: of this process; default: in the default process group.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        generators: Mapping[str, Any] | None = None,
        rank: int | None = None,
    ) -> None:
        self._seed = seed
        self._generators = dict(generators or {})
        self._given_rank = rank
        for name, generator in self._generators.items():
            _kind(generator, name)

    @property
    def _rank(self) -> int:
        return resolve(None, None).rank if self._given_rank is None else self._given_rank

    @property
    def value(self) -> dict[str, Any]:
        """What is saved for this rank: plain values and tensors. Set it to restore."""
        python, numpy, torch_cpu = global_state.save()
        state = {
            "format": FORMAT,
            "python": python,
            "numpy": _plain(numpy),
            "torch": torch_cpu,
            "generators": {
                name: (_kind(generator, name), _plain(generators.state_of(generator)))
                for name, generator in self._generators.items()
            },
        }
        # Not before the job has used CUDA: asking would start it, on a rank's wrong device maybe.
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    @value.setter
    def value(self, state: Any) -> None:
        self._restore(state)

    def _restore(self, state: Any) -> None:
        """Set everything, or nothing."""
        _check(state)
        saved = state["generators"]
        for name, (kind, _) in saved.items():
            present = self._generators.get(name)
            if present is not None and _kind(present, name) != kind:
                raise DataStateError(
                    _WHAT,
                    f"generator {name!r} was a {kind}, now it is a {_kind(present, name)}: pass "
                    "one of the kind that was, or leave it out of generators=",
                )
        before = self.value
        try:
            self._set(state)
        except (ValueError, TypeError, LookupError, RuntimeError, OverflowError) as error:
            self._set(before)
            raise DataStateError(
                _WHAT, f"the saved state is damaged, restore an older one: {error!r}"
            ) from error
        for name in sorted(saved.keys() ^ self._generators.keys()):
            where = "is registered now" if name in saved else "is in the checkpoint"
            _log.warning("%s: no generator %r %s; it is left out", _WHAT, name, where)

    def _set(self, state: Any) -> None:
        saved = state["generators"]
        numpy_state = _from_plain(state["numpy"])
        if numpy_state is None and numpy_or_none() is not None:
            numpy_state = global_state.save()[1]  # saved where there was no NumPy
        global_state.bring_back((_as_tuples(state["python"]), numpy_state, state["torch"]))
        for name in saved.keys() & self._generators.keys():
            own = _from_plain(saved[name][1])
            if isinstance(self._generators[name], random.Random):
                own = _as_tuples(own)
            generators.set_state(self._generators[name], own)
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])

    def absent(self, rank: int, step: int) -> None:
        """Draw new numbers: the checkpoint of ``step`` has none for this rank.

        To keep those of the start would repeat what this rank drew then, and what others drew that
        were seeded alike.
        """
        key = derive(RANK_STREAM, self._seed, rank, step)
        global_state.seed_all(key)
        torch.manual_seed(key & 0xFFFFFFFF)
        for number, name in enumerate(sorted(self._generators)):
            key = derive(RANK_STREAM, self._seed, rank, step, number)
            generators.reseed(self._generators[name], key)
        _log.warning(
            "%s: the checkpoint of step %d has no random states of rank %d: seeded anew from "
            "seed %d, rank and step",
            *(_WHAT, step, rank, self._seed),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"rank<r>": value}``, for plain DCP or `torch.save`: one key per rank."""
        return {f"rank{self._rank}": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's entry.

        Raises:
            DataStateError: there is none (see `absent`), or it does not fit. Nothing was set.
        """
        key = f"rank{self._rank}"
        if key not in state:
            raise DataStateError(
                _WHAT,
                f"there is no {key!r} in it, only {sorted(state)}: call absent() for new numbers",
            )
        self.value = state[key]


def _check(state: Any) -> None:
    wanted = ("format", "python", "numpy", "torch", "generators")
    is_one = isinstance(state, Mapping) and all(key in state for key in wanted)
    if not is_one or not isinstance(state["generators"], Mapping):
        raise DataStateError(
            _WHAT,
            f"the saved state is none of random states, restore an older one: {state!r:.200}",
        )
    if state["format"] != FORMAT:
        raise DataStateError(
            _WHAT,
            f"saved in format {state['format']!r}, this version reads {FORMAT}: load it with the "
            "version that saved it",
        )


def _kind(generator: Any, name: str) -> str:
    found = generators.kind_of(generator)
    if found is None:
        raise TypeError(
            f"generator {name!r} must be a random.Random, np.random.Generator, "
            f"np.random.RandomState or torch.Generator, got {type(generator).__name__}"
        )
    return found


def _plain(value: Any) -> Any:
    """Return the value with arrays as tensors of bytes, and NumPy's numbers as Python's.

    Torch's safe unpickler knows no NumPy.
    """
    np = numpy_or_none()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if np is not None and isinstance(value, np.ndarray):
        as_bytes = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        return {_ARRAY: value.dtype.str, "shape": list(value.shape), "bytes": as_bytes}
    if np is not None and isinstance(value, np.generic):
        return value.item()
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict) and _ARRAY in value:
        np = numpy_or_none()
        if np is None:
            return None
        flat = np.frombuffer(bytes(value["bytes"].tolist()), dtype=np.dtype(value[_ARRAY]))
        return flat.reshape(value["shape"]).copy()
    if isinstance(value, dict):
        return {key: _from_plain(inner) for key, inner in value.items()}
    return value


def _as_tuples(value: Any) -> Any:
    """Return nested lists as tuples: `random` takes nothing else."""
    if isinstance(value, (list, tuple)):
        return tuple(_as_tuples(inner) for inner in value)
    return value
