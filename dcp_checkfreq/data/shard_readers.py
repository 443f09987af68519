"""How samples lie in a shard file: tar, lines of JSON, npy, or what a function makes of it."""

from __future__ import annotations

import json
import math
import posixpath
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Protocol

# So many samples lie between two marks. Going on in a shard passes over that many at most.
MARK_EVERY = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """What one pass over a shard finds.

    Attributes:
        samples: in the shard.
        marks: byte offset of each `MARK_EVERY`-th sample, if one can begin to read there.
    """

    samples: int
    marks: tuple[int, ...] = ()


class ShardReader(Protocol):
    """Reads the samples of one shard file, from front to back."""

    def scan(self, file: IO[bytes]) -> Layout:
        """Count the samples, and note where they lie."""

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
        """Count the lines."""
        samples, offset, marks = 0, 0, []
        for line in file:
            if line.strip():
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
        return json.loads(sample)


class NpyReader:
    """The rows of an array in npy format, along its first axis. Any row is reached at once.

    Raises:
        ValueError: when read: the array has no axis, holds Python objects, or is in Fortran order.
    """

    def scan(self, file: IO[bytes]) -> Layout:
        """Read the number of rows from the header."""
        return Layout(_npy_header(file)[0][0])

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


class TarReader:
    """Samples of a tar file, as WebDataset has them.

    Neighbouring files whose paths are equal up to the first dot of the name are one sample: a dict
    of ``__key__`` and, per file, what follows that dot to its bytes.
    """

    def scan(self, file: IO[bytes]) -> Layout:
        """Count the samples; reads headers, not contents, if the file can seek."""
        samples, marks, key = 0, [], None
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in _files(tar):
                found, _ = _key_of(member)
                if found != key:
                    if samples % MARK_EVERY == 0:
                        marks.append(member.offset)
                    samples, key = samples + 1, found
        return Layout(samples, tuple(marks))

    def read(self, file: IO[bytes], start: int, marks: tuple[int, ...]) -> Iterator[dict[str, Any]]:
        """Yield the samples from number ``start`` on."""
        passed = seek_mark(file, start, marks)
        sample: dict[str, Any] = {}
        key = None
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in _files(tar):
                found, extension = _key_of(member)
                if found != key:
                    if sample:
                        yield sample
                    if key is not None and passed:
                        passed -= 1
                    key, sample = found, {}
                if not passed:
                    content = tar.extractfile(member)
                    assert content is not None  # it is a regular file
                    sample["__key__"] = found
                    sample[extension] = content.read()
            if sample:
                yield sample

    def decode(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the sample: bytes are for a transform to decode."""
        return sample


def _files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files that come next."""
    while (member := tar.next()) is not None:
        # Else it would keep a record of each file that it has seen.
        tar.members = []  # type: ignore[attr-defined]
        if member.isfile():
            yield member


def _key_of(member: tarfile.TarInfo) -> tuple[str, str]:
    folder, name = posixpath.split(member.name)
    stem, _, extension = name.partition(".")
    return posixpath.join(folder, stem), extension
