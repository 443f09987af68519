"""Wrapper subclasses (``__tensor_flatten__``) as their inner tensors, and back.

Such a tensor has no bytes of its own: quantised weights are codes and scales. Each inner tensor is
saved under a key of its own, which any DCP reads as a plain tensor. A record next to them says what
they were. No class is looked up by what a checkpoint says, unless the program has said that it is
safe (`torch.serialization.add_safe_globals`), or a live tensor is of it.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import CheckFreqError, StateMismatch, UnsupportedState
from dcp_checkfreq.format.safe_bytes import load_object
from dcp_checkfreq.format.texts import name_of
from dcp_checkfreq.shards.boxes import (
    Box,
    Layout,
    are_usual,
    boxed,
    is_odd,
    layout_of,
    sharded_dim,
)
from dcp_checkfreq.shards.codec import local_of
from dcp_checkfreq.shards.self_described import describes_itself

RECORD = "__dcp_checkfreq_wrapper__"
PLAIN = (torch.Tensor, torch.nn.Parameter)
_BUILT_IN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
Path = tuple[str, ...]


def is_wrapper(value: object) -> bool:
    """Tell whether a value is a tensor that consists of others; DTensor is not meant."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in PLAIN
        and hasattr(value, "__tensor_flatten__")
        and not isinstance(value, DTensor)
        and not value.is_nested
        and not describes_itself(value)
    )


def holds_wrapper(value: object) -> bool:
    """Tell whether a value is a wrapper, or a DTensor of which this rank's shard is one."""
    if type(value) in PLAIN or not isinstance(value, torch.Tensor):
        return False
    return is_wrapper(local_of(value) if isinstance(value, DTensor) else value)


def is_usual_shard(value: object) -> bool:
    """Tell whether a value is a DTensor with a plain shard of one box, as nearly all are. Fast."""
    if type(value) is not DTensor or not are_usual(value.placements):
        return False
    return value.device_mesh.get_coordinate() is not None and type(_shard_of(value)) in PLAIN


def _shard_of(value: DTensor) -> Any:
    """Return the local tensor as it is: `to_local` would take most of the time of a capture."""
    names, _ = value.__tensor_flatten__()  # type: ignore[no-untyped-call]
    return getattr(value, names[0])


def stored(value: Any, key: str = "") -> Any:
    """Return what DCP shall see of a tensor: itself, its boxes, or inner tensors in a dict.

    Raises:
        UnsupportedState: it is not known where inner tensors of a shard belong.
    """
    if type(value) in PLAIN or not isinstance(value, torch.Tensor):
        return value
    if is_usual_shard(value):
        return value
    if isinstance(value, DTensor):
        local = _shard_of(value)
        if any(placement.is_partial() for placement in value.placements):
            return value  # refused where it is looked at
        if is_wrapper(local):
            return _taken_apart(local, key, layout_of(value), _cuts(value), tuple(value.shape))
        if is_odd(value):
            layout = layout_of(value)
            return boxed(local, layout, value) if len(layout.boxes) != 1 else value
        return value
    return _taken_apart(value, key) if is_wrapper(value) else value


def _cuts(tensor: DTensor) -> frozenset[int]:
    return frozenset(dim for dim in map(sharded_dim, tensor.placements) if dim is not None)


def _taken_apart(
    wrapper: Any,
    key: str,
    around: Layout | None = None,
    cuts: frozenset[int] = frozenset(),
    size: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    names, context = wrapper.__tensor_flatten__()
    found: dict[str, Any] = {}
    for name in names:
        inner = getattr(wrapper, name)
        inner_key = f"{key}.{name}"
        layout = None if around is None or not cuts else _inner_layout(around, cuts, wrapper, name)
        is_unclear = around is not None and cuts and layout is None and inner.ndim
        if is_unclear and not _stays_whole(wrapper, cuts, name):
            raise UnsupportedState(
                inner_key,
                f"inner tensor of a sharded {type(wrapper).__name__}",
                f"its shape {list(inner.shape)} does not say how it is sharded along with "
                f"{list(wrapper.shape)}. Save a dequantised copy",
            )
        if is_wrapper(inner):
            found[name] = (
                _taken_apart(inner, inner_key)
                if layout is None
                else _taken_apart(inner, inner_key, layout, cuts, layout.size)
            )
        elif layout is None:
            found[name] = stored(inner, inner_key)
        else:
            found[name] = boxed(inner, layout)
    made = (tuple(wrapper.shape), tuple(wrapper.stride())) if size is None else (size, None)
    found[RECORD] = tuple(_Record.of(wrapper, list(names), context, *made))
    return found


def _inner_layout(
    around: Layout, cuts: frozenset[int], wrapper: torch.Tensor, name: str
) -> Layout | None:
    """Return where an inner tensor of a shard belongs in that of the whole; None: it is whole."""
    inner: torch.Tensor = getattr(wrapper, name)
    if all(dim < inner.ndim and inner.shape[dim] == wrapper.shape[dim] for dim in cuts):
        size = tuple(
            around.size[dim] if dim in cuts else length for dim, length in enumerate(inner.shape)
        )
        rest = range(inner.ndim)
        boxes = (
            Box(
                tuple(box.offset[dim] if dim in cuts else 0 for dim in rest),
                tuple(box.at[dim] if dim in cuts else 0 for dim in rest),
                tuple(box.sizes[dim] if dim in cuts else size[dim] for dim in rest),
            )
            for box in around.boxes
        )
        return Layout(size, tuple(inner.shape), tuple(dict.fromkeys(boxes)))
    # One element of it stands for several rows or blocks of rows.
    if cuts != {0} or inner.ndim != 1 or len(around.boxes) > 1:
        return None
    rows = wrapper.shape[0]
    if not rows or _after_slicing(wrapper, name) != "shorter":
        return None
    count = inner.shape[0]
    (box,) = around.boxes
    total, start = around.size[0] * count, box.offset[0] * count
    if total % rows or start % rows:
        return None
    return Layout((total // rows,), (count,), (Box((start // rows,), (0,), (count,)),))


def _stays_whole(wrapper: torch.Tensor, cuts: frozenset[int], name: str) -> bool:
    return cuts == {0} and _after_slicing(wrapper, name) == "whole"


def _after_slicing(wrapper: torch.Tensor, name: str) -> str:
    """Ask the class what it makes of an inner tensor when rows are taken; "" if it does not say."""
    rows = wrapper.shape[0]
    before = getattr(wrapper, name).shape
    for cut in dict.fromkeys((rows // 2, 1 << max((rows - 1).bit_length() - 1, 0))):
        if not 0 < cut < rows:
            continue
        try:
            after = getattr(wrapper[:cut], name).shape
        except Exception:  # noqa: BLE001  what a class raises that cannot take rows at this place
            continue
        if after == before:
            return "whole"
        if len(after) == 1 and after[0] * rows == before[0] * cut:
            return "shorter"
    return ""


# --- the record ---


@dataclass(frozen=True, slots=True)
class _Record:
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
    ) -> _Record:
        said = repr(context)
        plain = _is_built_in(context) or _loads(type(wrapper), said, _Held(context))
        kind = name_of(type(wrapper))
        return _Record(kind, tuple(names), plain, context if plain else None, said, size, stride)


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


def record_of(parts: Mapping[str, Any]) -> _Record:
    """Return the record among what `stored` has made."""
    return _Record(*parts[RECORD])


def is_taken_apart(value: object) -> bool:
    """Tell whether a value is what `stored` makes of a wrapper."""
    return type(value) is dict and RECORD in value


def flat(parts: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what `stored` has made of a wrapper, by path; records too."""
    for name, inner in parts.items():
        if is_taken_apart(inner):
            yield from flat(inner, (*above, name))
        else:
            yield (*above, name), inner


def live_parts(value: torch.Tensor) -> dict[Path, torch.Tensor]:
    """Return the memory of the inner tensors of a wrapper that is here, by path."""
    local = local_of(value)
    if not is_wrapper(local):
        return {(): local}
    wrapper: Any = local
    return {
        (name, *path): inner
        for name in wrapper.__tensor_flatten__()[0]
        for path, inner in live_parts(getattr(wrapper, name)).items()
    }


def why_other(saved: Any, live: Mapping[str, Any], is_shard: bool) -> str:
    """Return what differs between a saved record and what a live wrapper is; "" if nothing."""
    was, now = _Record(*saved), record_of(live)
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


# --- and back, where nothing live is ---


class Kinds:
    """The classes that saved wrappers may be made of.

    Args:
        live: values of the live state; their classes are known by that.
    """

    def __init__(self, live: Iterable[object] = ()) -> None:
        self._known = {name_of(one): one for one in map(_class_of, torch_safe()) if one}
        for value in live:
            while isinstance(value, torch.Tensor):
                local = local_of(value)
                if not is_wrapper(local):
                    break
                self._known[name_of(type(local))] = type(local)
                wrapper: Any = local
                inner = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
                value = next((one for one in inner if holds_wrapper(one)), None)

    def knows(self, record: Any) -> bool:
        """Tell whether a wrapper could be made of a record."""
        one = _Record(*record)
        return one.is_plain and one.kind in self._known

    def made(
        self, parts: Mapping[str, Any], where: str, key: str, size: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Put a wrapper together.

        Args:
            parts: what was loaded of what `stored` has made.
            where: it was loaded from.
            key: of it.
            size: of the shard that it is to be.

        Raises:
            StateMismatch: its class is not known here, or makes something else of it.
        """
        record = record_of(parts)
        inner = {
            name: self.made(parts[name], where, f"{key}.{name}")
            if is_taken_apart(parts[name])
            else parts[name]
            for name in record.names
        }
        if not self.knows(parts[RECORD]):
            raise StateMismatch(where, f"{key!r} was saved as a {record.kind}. {HOW_TO_KNOW}")
        wanted = record.size if size is None else size
        if size is None and record.stride is None:  # in a shard: as long as what is in it
            wanted = tuple(inner[record.names[0]].shape)
        kind: Any = self._known[record.kind]
        stride = record.stride
        if stride is None:
            stride = torch.empty(wanted, device="meta").stride()
        try:
            made = kind.__tensor_unflatten__(
                inner, record.context, torch.Size(wanted), tuple(stride)
            )
            if record.stride is None and made.shape != wanted:  # its context says another shard's
                context = _reshaped(record.context, tuple(made.shape), tuple(wanted))
                made = kind.__tensor_unflatten__(inner, context, torch.Size(wanted), tuple(stride))
        except Exception as error:
            raise StateMismatch(
                where, f"{key!r}: {record.kind} cannot be put together again: {error}"
            ) from error
        if tuple(made.shape) != tuple(wanted):
            raise StateMismatch(
                where,
                f"{key!r}: {record.kind} made {list(made.shape)} of its inner tensors, "
                f"not {list(wanted)}",
            )
        return made  # type: ignore[no-any-return]


def _reshaped(context: Any, was: tuple[int, ...], now: tuple[int, ...]) -> Any:
    """Return a context with the shape of this shard in the place of another one's."""
    if isinstance(context, (tuple, list)) and tuple(context) == was:
        return type(context)(now)
    if type(context) in (tuple, list):
        return type(context)(_reshaped(one, was, now) for one in context)
    if type(context) is dict:
        return {key: _reshaped(one, was, now) for key, one in context.items()}
    return context


HOW_TO_KNOW = (
    "Say that its class may be made of what is in a checkpoint: "
    "`torch.serialization.add_safe_globals([its class])`, before it is saved and before it is "
    "restored; what its __tensor_flatten__ returns besides the names must be plain values"
)


def torch_safe() -> list[Any]:
    """Return what the program has declared to torch to be safe."""
    return list(torch.serialization.get_safe_globals())


def _class_of(entry: Any) -> type | None:
    one = entry[0] if isinstance(entry, tuple) else entry
    is_wrapper_class = (
        isinstance(one, type)
        and issubclass(one, torch.Tensor)
        and not issubclass(one, DTensor)
        and hasattr(one, "__tensor_unflatten__")
    )
    return one if is_wrapper_class else None
