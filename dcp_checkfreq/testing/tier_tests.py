"""What the tests of `TierSuite` share: a tier, contents, and threads that start together."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dcp_checkfreq.storage.tier import Tier

ODD_NAMES = (
    "plain",
    "with space",
    "grüße-😀",
    "[brackets]{braces}",
    "star*question?",
    "per%20cent#hash",
    "quote'\"quote",
    "-dash",
    ".metadata",
    "__0_0_0123456789abcdef.distcp",
)
SIZES_BYTES = (0, 1, 511, 512, 4095, 4096, 4097, 65_536, (1 << 20) + 1)


class TierTests:
    """A tier, and what is really there."""

    keeps_empty_folders = True  # False for object stores, where folders are parts of names
    turns = 16  # of what is tried several times because its order is left to chance

    def make_tier(self, tmp_path: Path) -> Tier:
        """Return a tier of an empty folder, which need not exist yet."""
        raise NotImplementedError

    def raw_files(self, tier: Tier, tmp_path: Path) -> Mapping[str, bytes]:
        """Return the content of all files of this tier by relative path, not by its own calls."""
        raise NotImplementedError

    def made(self, tmp_path: Path) -> Tier:
        """Return the tier with its folder made."""
        tier = self.make_tier(tmp_path)
        tier.make()
        return tier


def pattern(size_bytes: int, seed: int = 1) -> bytes:
    """Return bytes that repeat nowhere, the same on every run."""
    return random.Random(seed).randbytes(size_bytes)


def cut(data: bytes, lengths: list[int]) -> Iterator[memoryview]:
    """Yield ``data`` in pieces of these lengths, taken in turn."""
    start, turn = 0, 0
    while start < len(data):
        stop = start + lengths[turn % len(lengths)]
        yield memoryview(data)[start:stop]
        start, turn = min(stop, len(data)), turn + 1


def same(got: bytes | bytearray, wanted: bytes) -> bool:
    """Compare large content; a plain ``==`` in an assert would print all of it on failure."""
    return len(got) == len(wanted) and bytes(got) == wanted


def expect(
    kind: type[BaseException], call: Callable[..., object], *args: object, **kwargs: object
) -> BaseException:
    """Return the error of this kind that the call raises.

    Raises:
        AssertionError: it returned. An error of another kind goes through as it is.
    """
    try:
        call(*args, **kwargs)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def at_once(threads: int, work: Callable[[int], object]) -> list[BaseException | None]:
    """Run ``work(0)``, ``work(1)`` ... in threads that start together; return what each raised."""
    barrier = threading.Barrier(threads)

    def run(who: int) -> BaseException | None:
        barrier.wait()
        try:
            work(who)
        except (Exception, AssertionError) as error:  # noqa: BLE001 - the caller checks each
            return error
        return None

    numbers: Iterable[int] = range(threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="tier-suite") as pool:
        return list(pool.map(run, numbers))
