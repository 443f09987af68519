"""How samples lie in a shard file: lines of JSON, npy, or what a function makes of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Protocol

# So many samples lie between two marks. To resume in a shard passes over that many at most.
MARK_EVERY = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """What one pass over a shard finds.

    Attributes:
        samples: in the shard.
        marks: byte offset of each `MARK_EVERY`-th sample, if one can begin to read there.
        notes: what is odd, and not wrong enough to refuse the shard.
    """

    samples: int
    marks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


class ShardReader(Protocol):
    """Reads the samples of one shard file, from front to back."""

    def scan(self, file: IO[bytes]) -> Layout:
        """Count the samples, and note where they lie.

        What it raises for a shard that is wrong (ValueError, EOFError, `tarfile.TarError`) becomes
        a ValueError with the shard's path.
        """

    def read(self, file: IO[bytes], start: int, marks: tuple[int, ...]) -> Iterator[Any]:
        """Yield the samples from number ``start`` on, as they lie there.

        Args:
            file: open, at its begin.
            start: at most the number of samples.
            marks: of `scan`, or none.
        """

    def decode(self, sample: Any) -> Any:
        """Make of what `read` yields what the training gets. In the workers, if there are any."""


def seek_mark(file: IO[bytes], start: int, marks: tuple[int, ...]) -> int:
    """Seek to the last mark that is not behind sample ``start``; return how many to pass over."""
    if not marks:
        return start
    number = min(start // MARK_EVERY, len(marks) - 1)
    file.seek(marks[number])
    return start - number * MARK_EVERY


class FunctionReader:
    """Samples as a function yields them. It always begins at the front of the shard.

    Args:
        function: open binary file to samples, the same ones every time.
    """

    def __init__(self, function: Callable[[IO[bytes]], Iterable[Any]]) -> None:
        self._function = function

    def scan(self, file: IO[bytes]) -> Layout:
        """Count the samples by making all of them."""
        return Layout(sum(1 for _ in self._function(file)))

    def read(self, file: IO[bytes], start: int, marks: tuple[int, ...]) -> Iterator[Any]:
        """Yield the samples from number ``start`` on; those before are made and thrown away."""
        samples = iter(self._function(file))
        for _ in range(start):
            next(samples, None)
        yield from samples

    def decode(self, sample: Any) -> Any:
        """Return the sample."""
        return sample


class JsonLinesReader:
    """One JSON value per line; empty lines are passed over. ``read`` yields bytes."""

    def scan(self, file: IO[bytes]) -> Layout:
        """Count the lines, and look at how each begins and ends.

        Raises:
            ValueError: a line is cut, or is no JSON.
        """
        samples, offset, marks = 0, 0, []
        for number, line in enumerate(file, start=1):
            value = line.strip().removeprefix(_BOM)
            if value:
                if not _looks_like_json(value):
                    raise ValueError(
                        f"line {number} is no whole JSON value: {value[:40]!r} ... {value[-10:]!r}"
                    )
                if samples % MARK_EVERY == 0:
                    marks.append(offset)
                samples += 1
            offset += len(line)
        return Layout(samples, tuple(marks))

    def read(self, file: IO[bytes], start: int, marks: tuple[int, ...]) -> Iterator[bytes]:
        """Yield the lines from number ``start`` on."""
        passed = seek_mark(file, start, marks)
        for line in file:
            if not line.strip():
                continue
            if passed:
                passed -= 1
                continue
            yield line

    def decode(self, sample: bytes) -> Any:
        """Return the value of a line."""
        try:
            return json.loads(sample)
        except json.JSONDecodeError as error:
            said = f"{error.msg}, in the line {sample[:80]!r}"
            raise json.JSONDecodeError(said, error.doc, error.pos) from error


_BOM = b"\xef\xbb\xbf"
_ENDS = {b"{": b"}", b"[": b"]", b'"': b'"'}
_SCALAR_ENDS = b"0123456789elyN"  # of numbers, true, false, null, Infinity, NaN


def _looks_like_json(value: bytes) -> bool:
    first, last = value[:1], value[-1:]
    if first in _ENDS:
        return last == _ENDS[first] and len(value) > 1
    return first in b"-0123456789tfnIN" and last in _SCALAR_ENDS


class NpyReader:
    """The rows of an array in npy format, along its first axis. Any row is reached at once.

    Raises:
        ValueError: when read: the array has no axis, holds Python objects, or is in Fortran order.
    """

    def scan(self, file: IO[bytes]) -> Layout:
        """Read the number of rows from the header.

        Raises:
            ValueError: the file is shorter or longer than that says.
        """
        (rows, *shape), dtype = _npy_header(file)
        end = file.tell() + rows * math.prod(shape) * dtype.itemsize
        size = file.seek(0, 2)
        if size != end:
            raise ValueError(
                f"its header says {rows} rows, which is {end} bytes, and it has {size}: "
                + ("cut short?" if size < end else "several arrays one after the other?")
            )
        return Layout(rows)

    def read(self, file: IO[bytes], start: int, marks: tuple[int, ...]) -> Iterator[Any]:
        """Yield the rows from number ``start`` on: arrays that can be written to."""
        import numpy as np

        (rows, *shape), dtype = _npy_header(file)
        row_bytes = math.prod(shape) * dtype.itemsize
        file.seek(file.tell() + start * row_bytes)
        for first in range(start, rows, MARK_EVERY):
            count = min(MARK_EVERY, rows - first)
            data = file.read(count * row_bytes)
            if len(data) != count * row_bytes:
                raise EOFError(
                    f"{count * row_bytes} bytes were expected for {count} rows, {len(data)} came"
                )
            for row in np.frombuffer(data, dtype).reshape(count, *shape):
                yield row.copy()

    def decode(self, sample: Any) -> Any:
        """Return the row."""
        return sample


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], Any]:
    """Read the header; return shape and dtype. The file is then at the first row."""
    from numpy.lib import format as npy

    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if not shape or is_fortran or dtype.hasobject:
        raise ValueError(
            f"an npy shard needs rows in C order and no Python objects, not {dtype} of shape "
            f"{shape}{' in Fortran order' if is_fortran else ''}"
        )
    return shape, dtype
