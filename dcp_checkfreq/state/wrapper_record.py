"""The record that is saved next to a wrapper's inner tensors: the wrapper without them."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcp_checkfreq.errors import CheckFreqError
from dcp_checkfreq.format.safe_bytes import load_object
from dcp_checkfreq.format.texts import name_of

RECORD = "__dcp_checkfreq_wrapper__"
_BUILT_IN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class Record:
    """What wrapped the inner tensors. Written as a tuple, which DCP leaves in one piece."""

    kind: str  # module and name of the class
    names: tuple[str, ...]
    is_plain: bool  # whether the context could be loaded again
    context: Any  # None if it is not plain
    said: str  # the context as text
    size: tuple[int, ...]
    stride: tuple[int, ...] | None  # None: of a shard

    def __iter__(self) -> Iterator[Any]:
        yield from (self.kind, self.names, self.is_plain, self.context)
        yield from (self.said, self.size, self.stride)

    @staticmethod
    def of(
        wrapper: torch.Tensor,
        names: Iterable[str],
        context: Any,
        size: tuple[int, ...],
        stride: tuple[int, ...] | None,
    ) -> Record:
        """Return the record of a wrapper, with what its ``__tensor_flatten__`` returns."""
        said = repr(context)
        plain = _is_built_in(context) or _loads(type(wrapper), said, _Held(context))
        kind = name_of(type(wrapper))
        return Record(kind, tuple(names), plain, context if plain else None, said, size, stride)


def _is_built_in(context: Any) -> bool:
    if type(context) in (list, tuple):
        return all(map(_is_built_in, context))
    if type(context) is dict:
        return all(_is_built_in(one) for pair in context.items() for one in pair)
    return type(context) in _BUILT_IN


class _Held:
    """A context on the way into a cached function: two of the same class and text are the same."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=256)
def _loads(_: type, __: str, held: _Held) -> bool:
    stream = io.BytesIO()
    try:
        torch.save(held.context, stream)
        stream.seek(0)
        load_object(stream, "", "", allow_pickle=False)
    except CheckFreqError:
        return False
    except Exception:  # noqa: BLE001  whatever a context raises when it is pickled
        return False
    return True


def record_of(parts: Mapping[str, Any]) -> Record:
    """Return the record among what `stored` has made."""
    return Record(*parts[RECORD])


def why_other(saved: Any, live: Mapping[str, Any], is_shard: bool) -> str:
    """Return how a saved record and a live wrapper differ; "" if they do not."""
    was, now = Record(*saved), record_of(live)
    if was.kind.rpartition(".")[2] != now.kind.rpartition(".")[2]:
        return f"saved as {was.kind}, wanted {now.kind}"
    if was.size != now.size:
        return f"saved {list(was.size)}, wanted {list(now.size)} (shapes differ)"
    if is_shard or was.said == now.said:  # each shard may have another context
        return ""
    if not (was.is_plain and now.is_plain):
        is_same = " at 0x" in was.said  # the place of an object says nothing
    else:
        is_same = bool(was.context == now.context)
    return "" if is_same else f"{was.kind} was saved with {was.said}, and has {now.said} here"
