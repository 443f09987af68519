"""The one number that a file cache keeps: how many bytes it holds. Corrupted, it says so."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.runtime.flock import HeldFile

_MAGIC = "checkfreq-cache-1"
_READ_BYTES = 4096  # more than a record has


class ByteCount:
    """The record while it is locked.

    Attributes:
        used_bytes: charged bytes of all files, whole or partial.
        must_count: a change was begun and not written down to its end; count anew.
        must_clear: not a record of this boot. After a power loss a file may have its full size
            and no content, so nothing that is there can be trusted.
    """

    def __init__(self, file: HeldFile, boot: str) -> None:
        self._file = file
        self._boot = boot
        found = decode(os.pread(file.fd, _READ_BYTES, 0))
        self.must_clear = found is None or found[2] != boot
        self.used_bytes, self.must_count = (0, True) if found is None else found[:2]
        self._open = False

    def begin(self) -> None:
        """Write down that a change is on its way, so that the next one counts if we die in it."""
        if not self._open:
            self._open = True
            os.pwrite(self._file.fd, encode(self.used_bytes, True, self._boot), 0)

    def end(self) -> None:
        """Write down the outcome of the changes since `begin`."""
        if self._open:
            content = encode(self.used_bytes, False, self._boot)
            os.pwrite(self._file.fd, content, 0)
            os.ftruncate(self._file.fd, len(content))


@contextmanager
def locked_byte_count(path: str, boot: str, clock: Clock, wait_s: float) -> Iterator[ByteCount]:
    """Give the record, locked. An error inside leaves it begun: the next one counts.

    Raises:
        TimeoutError: others have it for longer than ``wait_s``.
        OSError: it cannot be opened, read or written.
    """
    while True:
        file = HeldFile(path, os.O_RDWR | os.O_CREAT)
        try:
            file.lock_within(wait_s, clock, shared=False)
            if not file.is_at(path):
                continue  # removed with the whole cache while we waited
            byte_count = ByteCount(file, boot)
            yield byte_count
            byte_count.end()
            return
        finally:
            file.close()


def peek(path: str, boot: str) -> int | None:
    """Return the bytes in use without the lock; None if only a look under the lock can tell.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        found = decode(file.read(_READ_BYTES))
    if found is None or found[1] or found[2] != boot:
        return None
    return found[0]


def encode(used_bytes: int, begun: bool, boot: str) -> bytes:
    """Return the content of the file."""
    line = f"{_MAGIC} {used_bytes:020d} {'begun' if begun else 'ended'} {boot or '-'}"
    return f"{line} {zlib.crc32(line.encode()):08x}\n".encode()


def decode(content: bytes) -> tuple[int, bool, str] | None:
    """Return bytes in use, whether a change was begun, boot; None if it is no whole record."""
    try:
        line, _, crc = content.decode("ascii").rstrip("\n").rpartition(" ")
        magic, used, state, boot = line.split(" ")
        if magic != _MAGIC or int(crc, 16) != zlib.crc32(line.encode()):
            return None
        return int(used), state != "ended", "" if boot == "-" else boot
    except ValueError:  # also UnicodeDecodeError
        return None
