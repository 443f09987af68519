"""The classes that wrappers may be made of when nothing live is in their place.

No class is looked up by what a checkpoint says, unless the program has said that it is safe
(`torch.serialization.add_safe_globals`), or a live tensor is of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import StateMismatch
from dcp_checkfreq.format.texts import name_of
from dcp_checkfreq.shards.codec import local_of
from dcp_checkfreq.state.wrapper_record import RECORD, Record, record_of
from dcp_checkfreq.state.wrappers import holds_wrapper, is_taken_apart, is_wrapper


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
        one = Record(*record)
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
        if size is None and record.stride is None:  # in a shard: as long as its inner tensors
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
    """Return a context in which the shape of another shard is replaced by that of this one."""
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
