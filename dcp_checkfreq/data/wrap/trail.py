"""What was handed out in an epoch, as digests that a replay is compared with. Pure.

Each digest stands for all batches up to one: it chains the digests of the batches. Kept are those
after 1, 2, 4, 8, ... and after the last few batches, so that a replay is found to differ at once if
it does so from its begin, and in the end if it does so late.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_checkfreq.data.order.permutation import derive

_SCHEME = "1"  # how digests are made and which are kept; those of another scheme are not compared
_LAST = 4
_DIGITS = 8  # of hex: 32 bits


def marks(count: int) -> list[int]:
    """Return after which batches a digest is kept, of so many."""
    powers = {1 << n for n in range(count.bit_length())}
    return sorted(powers | set(range(max(1, count - _LAST + 1), count + 1)))


@dataclass(frozen=True, slots=True)
class Parting:
    """A replay differed: after ``after`` batches all was right, at ``at`` it was not."""

    after: int
    at: int

    def __str__(self) -> str:
        if self.at == self.after + 1:
            return f"batch {self.at}"
        return f"one of the batches {self.after + 1} to {self.at}"


class Trail:
    """The digests of an epoch so far."""

    def __init__(self) -> None:
        self.count = 0
        self._chain = 0
        self._kept: dict[int, int] = {}

    def add(self, digest: int) -> int:
        """Take in the digest of the next batch; return what all up to it amounts to."""
        self._chain = derive(self._chain, digest)
        self.count += 1
        self._kept[self.count] = short = self._chain >> (64 - 4 * _DIGITS)
        gone = self.count - _LAST
        if gone & (gone - 1):  # neither among the last ones nor a power of two
            self._kept.pop(gone, None)
        return short

    def text(self) -> str:
        """Return the digests at the marks: under 250 characters for a million batches."""
        kept = "".join(f"{self._kept[at]:0{_DIGITS}x}" for at in marks(self.count))
        return f"{_SCHEME}:{kept}"


class Comparison:
    """A replay, compared with what was handed out.

    Args:
        text: of `Trail.text`, after ``count`` batches.
        count: batches that are replayed.

    Raises:
        ValueError: the text is none of so many batches.
    """

    def __init__(self, text: str, count: int) -> None:
        scheme, _, digits = text.partition(":")
        self.is_known = scheme == _SCHEME
        self._expected: dict[int, int] = {}
        self._right = 0
        if not self.is_known:
            return
        places = marks(count)
        if len(digits) != _DIGITS * len(places):
            raise ValueError(f"{len(digits)} digits do not belong to {count} batches")
        for number, at in enumerate(places):
            self._expected[at] = int(digits[number * _DIGITS : (number + 1) * _DIGITS], 16)

    def see(self, at: int, short: int) -> Parting | None:
        """Compare what `Trail.add` returned for the replayed batch number ``at``, from 1 on."""
        expected = self._expected.get(at)
        if expected is None:
            return None
        if expected != short:
            return Parting(self._right, at)
        self._right = at
        return None
