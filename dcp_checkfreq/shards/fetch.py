"""Carries out a read plan: large reads in threads, each block checked before it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from dcp_checkfreq.clock import Clock, SystemClock
from dcp_checkfreq.errors import BrokenShard
from dcp_checkfreq.format.digest import first_bad_block
from dcp_checkfreq.shards.read_plan import Want, Window, windows
from dcp_checkfreq.storage.bounce import BOUNCE_BYTES, borrowed, huge_buffer
from dcp_checkfreq.storage.late import look_again
from dcp_checkfreq.storage.tier import RangeReader, Tier, reads_at_once

# Reading over a gap costs less than another request; the envelopes between payloads are gaps.
MAX_GAP_BYTES = 16 << 10


class Taker(Protocol):
    """Whoever wants bytes. Called from several threads, never twice for the same bytes."""

    def take(self, want: Want, data: memoryview) -> None:
        """Take payload bytes ``[want.start, want.stop)``; ``data`` is only lent."""
        ...


class Fetcher:
    """Reads from the files of one checkpoint. Close it when done.

    Args:
        tier: folder of the checkpoint.
        sizes: exact size of each file in bytes, where known.
        threads: reads at once, at least; more where the tier is best asked for more.
    """

    def __init__(
        self, tier: Tier, sizes: Mapping[str, int], threads: int, clock: Clock | None = None
    ) -> None:
        self._tier = tier
        self._clock = clock or SystemClock()
        self._sizes = sizes
        self._threads = max(threads, reads_at_once(tier))
        self._open: dict[str, RangeReader] = {}

    def fetch(
        self, wants: Sequence[Want], targets: Sequence[Taker], digests: Sequence[Sequence[int]]
    ) -> int:
        """Read every want and hand it to the target of its ticket; return the bytes read.

        ``targets`` and ``digests`` (one per block of the whole payload, empty for none) are
        looked up by ticket.

        Raises:
            BrokenShard: a file is missing or short, or a block fails its digest. That block and
                those after it in its read did not reach a target; others may have.
        """
        planned = windows(wants, max_bytes=BOUNCE_BYTES, max_gap_bytes=MAX_GAP_BYTES)
        files = {window.file for window in planned}

        def read(window: Window) -> int:
            return self._read(window, targets, digests)

        if len(planned) <= 1 or self._threads == 1:
            for file in files:
                self.reader(file)
            return sum(map(read, planned))
        with ThreadPoolExecutor(self._threads, thread_name_prefix="checkfreq-read") as pool:
            list(pool.map(self.reader, files))  # all sizes are right before a byte is read
            running = [pool.submit(read, window) for window in planned]
            try:
                return sum(job.result() for job in running)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def reader(self, file: str) -> RangeReader:
        """Return an open file, checked for its size."""
        reader = self._open.get(file)
        if reader is None:
            try:
                reader = look_again(self._tier, lambda: self._tier.open(file), self._clock)
                self._open[file] = reader
            except FileNotFoundError as error:
                raise BrokenShard(self._tier.location, f"{file} is missing") from error
            except OSError as error:
                raise BrokenShard(self._tier.location, f"{file}: {error}") from error
            expected = self._sizes.get(file, reader.size_bytes)
            if reader.size_bytes != expected:
                raise BrokenShard(
                    self._tier.location,
                    f"{file} has {reader.size_bytes} bytes, it was saved with {expected}",
                )
        return reader

    def _read(
        self, window: Window, targets: Sequence[Taker], digests: Sequence[Sequence[int]]
    ) -> int:
        reader = self.reader(window.file)
        stop = min(window.stop, reader.size_bytes)
        size = stop - window.start
        with borrowed() as bounce:
            memory = bounce if size <= len(bounce) else huge_buffer(size)
            try:
                reader.read_into(window.start, memory[:size])
            except (EOFError, OSError) as error:
                raise BrokenShard(self._tier.location, f"{window.file}: {error}") from error
            for want in window.wants:
                begin = want.payload_offset + want.start - window.start
                data = memory[begin : begin + want.stop - want.start]
                if len(data) != want.stop - want.start:
                    raise BrokenShard(self._tier.location, f"{window.file} ends inside of an item")
                self._check(window.file, want, data, digests[want.ticket])
                targets[want.ticket].take(want, data)
        return size

    def _check(self, file: str, want: Want, data: memoryview, digests: Sequence[int]) -> None:
        if not digests:
            return
        first = want.start // want.block
        bad = first_bad_block(data, want.block, digests[first : first - (-len(data) // want.block)])
        if bad is not None:
            at = want.payload_offset + want.start + bad * want.block
            raise BrokenShard(
                self._tier.location, f"{file} fails its digest in the block at byte {at}"
            )

    def close(self) -> None:
        """Close the files."""
        for reader in self._open.values():
            reader.close()
        self._open.clear()
