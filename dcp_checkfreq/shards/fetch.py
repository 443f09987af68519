"""Carries out a read plan: large reads in threads, each block checked before it is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dcp_checkfreq.errors import BrokenShard
from dcp_checkfreq.format.digest import ALGORITHM, digest, first_bad_block
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.runtime.crew import Crew
from dcp_checkfreq.shards.read_plan import Want, Window, windows
from dcp_checkfreq.storage.eventual import look_again
from dcp_checkfreq.storage.local.huge_pages import BOUNCE_BYTES, borrowed, huge_buffer
from dcp_checkfreq.storage.tier import RangeReader, Tier, reads_at_once

T = TypeVar("T")

# Reading over a gap costs less than another request; the envelopes between payloads are gaps.
MAX_GAP_BYTES = 16 << 10


class Taker(Protocol):
    """A receiver of bytes. Called from several threads, never twice for the same bytes."""

    def take(self, want: Want, data: memoryview) -> None:
        """Take payload bytes ``[want.start, want.stop)``; ``data`` is only lent."""
        ...


@dataclass(slots=True)
class _Fetch:
    """One call of `fetch`."""

    wants: Sequence[Want]
    targets: Sequence[Taker]
    digests: Sequence[Sequence[int]]
    keys: Sequence[str]
    has_failed: bool = False

    def key(self, want: Want) -> str:
        """Return whose bytes these are, as a user knows them."""
        return repr(self.keys[want.ticket]) if self.keys else f"item {want.ticket}"

    def held(self, file: str) -> str:
        """Return what is wanted of a file."""
        return f"it holds {listed(self.key(want) for want in self.wants if want.file == file)}"


def listed(names: Iterable[str]) -> str:
    """Return the first few of a list of names, each once, and how many more there are."""
    known = list(dict.fromkeys(names))
    shown = ", ".join(known[:3])
    return f"{shown} and {len(known) - 3} more" if len(known) > 3 else shown


def told_damage(want: Want, data: memoryview, digests: Sequence[int], key: str) -> str | None:
    """Return which block of what was read fails its digest, or None.

    Args:
        want: what was to be read.
        data: bytes ``[want.start, want.stop)`` of the payload.
        digests: of all blocks of the payload; none: it has none.
        key: whose bytes these are, for people.
    """
    if not digests:
        return None
    first = want.start // want.block
    bad = first_bad_block(data, want.block, digests[first : first - (-len(data) // want.block)])
    if bad is None:
        return None
    start = bad * want.block
    block = data[start : start + want.block]
    at = want.payload_offset + want.start + start
    return (
        f"{want.file} fails its digest in the block at byte {at}: block {first + bad + 1} of "
        f"{len(digests)} of {key}, bytes [{at}, {at + len(block)}), was saved with "
        f"{ALGORITHM} {digests[first + bad]:016x}, there is {digest(block):016x}"
    )


class Fetcher:
    """Reads from the files of one checkpoint. Close it when done; several threads may fetch.

    Args:
        tier: folder of the checkpoint.
        sizes: exact size of each file in bytes, where known.
        threads: reads at once, at least; more where the tier is best asked for more.
        moved: called after each read, before its bytes reach a target. What it raises ends all.
    """

    def __init__(
        self,
        tier: Tier,
        sizes: Mapping[str, int],
        threads: int,
        clock: Clock | None = None,
        *,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._moved = moved
        self._tier = tier
        self._clock = clock or SystemClock()
        self._sizes = sizes
        self._threads = max(threads, reads_at_once(tier))
        self._open: dict[str, RangeReader] = {}

    def fetch(
        self,
        wants: Sequence[Want],
        targets: Sequence[Taker],
        digests: Sequence[Sequence[int]],
        keys: Sequence[str] = (),
    ) -> int:
        """Read every want and hand it to the target of its ticket; return the bytes read.

        ``targets``, ``digests`` (one per block of the whole payload, empty for none) and ``keys``
        (for the text of errors) are looked up by ticket.

        Raises:
            BrokenShard: a file is missing or short, or a block fails its digest. That block and
                those after it in its read did not reach a target; others may have.
        """
        job = _Fetch(wants, targets, digests, keys)
        self._check_ends(job)
        planned = windows(wants, max_bytes=BOUNCE_BYTES, max_gap_bytes=MAX_GAP_BYTES)

        def read(window: Window) -> int:
            if job.has_failed:
                return 0
            try:
                return self._read(window, job)
            except BaseException:
                job.has_failed = True
                raise

        return sum(self._side_by_side([functools.partial(read, window) for window in planned]))

    def _side_by_side(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Do jobs in daemons, and in this thread: nobody waits for a read that hangs for ever."""
        if len(jobs) <= 1 or self._threads == 1:
            return [job() for job in jobs]
        with Crew(self._threads - 1, "checkfreq-read") as crew:  # and this thread
            return crew.run_all(jobs)

    def _check_ends(self, job: _Fetch) -> None:
        """Make sure that all files have the right size, and enough bytes, before one is read.

        Before wants are planned, too: one of an absurd size would be cut into as many parts.
        """
        files = list({want.file for want in job.wants if want.start < want.stop})
        readers = self._side_by_side([functools.partial(self._reader, f, job) for f in files])
        sizes = {file: reader.size_bytes for file, reader in zip(files, readers, strict=True)}
        for want in job.wants:
            at, end = want.payload_offset + want.start, want.payload_offset + want.stop
            if at < end and end > sizes[want.file]:
                raise self._broken(
                    f"{want.file} has {sizes[want.file]} bytes and ends inside of "
                    f"{job.key(want)}, of which bytes [{at}, {end}) are wanted"
                )

    def _reader(self, file: str, job: _Fetch) -> RangeReader:
        """Return an open file, checked for its size."""
        reader = self._open.get(file)
        if reader is None:
            try:
                opened = look_again(self._tier, lambda: self._tier.open(file), self._clock)
            except FileNotFoundError as error:
                raise self._broken(f"{file} is missing, {job.held(file)}") from error
            except OSError as error:
                raise self._broken(f"{file}: {error}, {job.held(file)}") from error
            reader = self._open.setdefault(file, opened)
            if reader is not opened:  # another thread was quicker
                opened.close()
            expected = self._sizes.get(file, reader.size_bytes)
            if reader.size_bytes != expected:
                raise self._broken(
                    f"{file} has {reader.size_bytes} bytes, it was saved with {expected}, "
                    f"{job.held(file)}"
                )
            self._moved()
        return reader

    def _broken(self, why: str) -> BrokenShard:
        return BrokenShard(self._tier.location, why)

    def _read(self, window: Window, job: _Fetch) -> int:
        reader = self._reader(window.file, job)
        stop = min(window.stop, reader.size_bytes)
        size = stop - window.start
        with borrowed() as bounce:
            memory = bounce if size <= len(bounce) else huge_buffer(size)
            try:
                reader.read_into(window.start, memory[:size])
            except (EOFError, OSError) as error:
                names = listed(job.key(want) for want in window.wants)
                raise self._broken(
                    f"{window.file}: {error}, while reading bytes [{window.start}, {stop}) of "
                    f"{names}"
                ) from error
            self._moved()
            for want in window.wants:
                begin = want.payload_offset + want.start - window.start
                data = memory[begin : begin + want.stop - want.start]
                self._check(want, data, job)
                job.targets[want.ticket].take(want, data)
        return size

    def _check(self, want: Want, data: memoryview, job: _Fetch) -> None:
        problem = told_damage(want, data, job.digests[want.ticket], job.key(want))
        if problem is not None:
            raise self._broken(problem)

    def close(self) -> None:
        """Close the files."""
        for reader in self._open.values():
            reader.close()
        self._open.clear()
