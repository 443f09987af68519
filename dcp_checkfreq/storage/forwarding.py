"""A tier that passes every call on, with one place to step in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

from dcp_checkfreq.storage.tier import Entry, RangeReader, Reservation, Tier, read_small

Verb = Literal[
    "make",
    "list",
    "size",
    "read",
    "open",
    "read_into",
    "write_shard",
    "sync",
    "create",
    "replace",
    "reserve",
    "revoke",
    "delete",
    "remove",
]
Result = TypeVar("Result")


class ForwardingTier:
    """Passes every call of a `Tier` to ``inner`` through `around`, which a subclass overrides.

    Children are forwarding tiers of the same kind that call the same `around`, so one object
    sees the calls of the whole tree.
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self._top: ForwardingTier = self
        self._folder = ""

    def around(self, verb: Verb, name: str, call: Callable[[], Result]) -> Result:
        """Carry out one call. ``name`` is the file, or the folder for `make`, `sync` and so on.

        Called from whatever thread made the call, and by several at once.
        """
        del verb, name
        return call()

    def around_pieces(self, name: str, pieces: Iterable[memoryview]) -> Iterable[memoryview]:
        """Return the pieces that `write_shard` hands on. The place to fail in mid-file."""
        del name
        return pieces

    def __getattr__(self, name: str) -> Any:
        # What a tier may have or not; see `storage/tier`.
        if name in ("reads_at_once", "abort_uploads", "disk"):
            return getattr(self.inner, name)
        raise AttributeError(name)

    @property
    def location(self) -> str:
        """Where the inner tier is."""
        return self.inner.location

    def child(self, name: str) -> ForwardingTier:
        """Return the tier of the folder ``name``, whose calls go through the same `around`."""
        child = ForwardingTier(self.inner.child(name))
        child._top, child._folder = self._top, name
        return child

    def make(self) -> None:
        """Hand on `make`."""
        self._top.around("make", self._folder, self.inner.make)

    def list(self) -> list[Entry]:
        """Hand on `list`."""
        return self._top.around("list", self._folder, self.inner.list)

    def size(self, name: str) -> int:
        """Hand on `size`."""
        return self._top.around("size", name, lambda: self.inner.size(name))

    def read(self, name: str) -> bytes:
        """Hand on `read`."""
        return self._top.around("read", name, lambda: self.inner.read(name))

    def read_at_most(self, name: str, at_most_bytes: int) -> bytes:
        """Hand on a read with a bound, which counts as `read`."""
        return self._top.around(
            "read", name, lambda: read_small(self.inner, name, at_most_bytes=at_most_bytes)
        )

    def open(self, name: str) -> RangeReader:
        """Hand on `open`; reads of the opened file go through `around` as ``read_into``."""
        reader = self._top.around("open", name, lambda: self.inner.open(name))
        return _ForwardingReader(self._top, name, reader)

    def write_shard(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Hand on `write_shard`, with the pieces of `around_pieces`."""
        self._top.around(
            "write_shard",
            name,
            lambda: self.inner.write_shard(name, self._top.around_pieces(name, pieces), size_bytes),
        )

    def sync(self) -> None:
        """Hand on `sync`."""
        self._top.around("sync", self._folder, self.inner.sync)

    def create(self, name: str, data: bytes, *, scratch: str) -> None:
        """Hand on `create`."""
        self._top.around("create", name, lambda: self.inner.create(name, data, scratch=scratch))

    def replace(self, name: str, data: bytes, *, scratch: str) -> None:
        """Hand on `replace`."""
        self._top.around("replace", name, lambda: self.inner.replace(name, data, scratch=scratch))

    def reserve(self, name: str, *, scratch: str) -> ForwardingReservation:
        """Hand on `reserve`. Its commit goes through `around` as ``create`` or ``replace``."""
        made = self._top.around("reserve", name, lambda: self.inner.reserve(name, scratch=scratch))
        return ForwardingReservation(self._top, name, scratch, made)

    def revoke(self, name: str, *, scratch: str) -> bool:
        """Hand on `revoke`."""
        return self._top.around("revoke", name, lambda: self.inner.revoke(name, scratch=scratch))

    def delete(self, name: str) -> None:
        """Hand on `delete`."""
        self._top.around("delete", name, lambda: self.inner.delete(name))

    def remove(self) -> None:
        """Hand on `remove`."""
        self._top.around("remove", self._folder, self.inner.remove)


class ForwardingReservation:
    """A reservation whose calls go through `ForwardingTier.around`."""

    def __init__(self, top: ForwardingTier, name: str, scratch: str, inner: Reservation) -> None:
        self._top, self._name, self._scratch, self._inner = top, name, scratch, inner

    def commit(self, data: bytes, *, over: bytes | None) -> None:
        """Hand it on as ``create``, or as ``replace`` if something may be replaced."""
        verb: Verb = "create" if over is None else "replace"
        self._top.around(verb, self._name, lambda: self._inner.commit(data, over=over))

    def cancel(self) -> None:
        """Hand it on as ``delete`` of the temporary name."""
        self._top.around("delete", self._scratch, self._inner.cancel)


class _ForwardingReader:
    def __init__(self, top: ForwardingTier, name: str, inner: RangeReader) -> None:
        self._top, self._name, self._inner = top, name, inner
        self.size_bytes = inner.size_bytes

    def read_into(self, offset: int, target: memoryview) -> None:
        self._top.around("read_into", self._name, lambda: self._inner.read_into(offset, target))

    def close(self) -> None:
        self._inner.close()


class NotedTier(ForwardingTier):
    """Says of every call that it has come back.

    Args:
        inner: carries the calls out.
        moved: called before and after each of them, in its thread. What it raises ends the call.
    """

    def __init__(self, inner: Tier, moved: Callable[[], None]) -> None:
        super().__init__(inner)
        self._moved = moved

    def around(self, verb: Verb, name: str, call: Callable[[], Result]) -> Result:
        """Carry out the call between two words of it."""
        self._moved()
        result = call()
        self._moved()
        return result
