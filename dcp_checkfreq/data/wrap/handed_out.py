"""What a wrapped loader has handed out in this epoch, and the replay that is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dcp_checkfreq.data.wrap.content import digest_of
from dcp_checkfreq.data.wrap.trail import Comparison, Trail
from dcp_checkfreq.errors import DataStateError

END = object()  # where there should be a batch: the epoch is over

_PARTED = (
    "Each epoch must yield the same batches when it is iterated anew with the same random states. "
    "If they hold the same samples and only look another way (other noise, floats of another kind "
    "of CPU), pass compare= a function that returns the ids of a batch, or compare=False"
)


class HandedOut:
    """Digests of the batches of this epoch.

    Args:
        compare: what of a batch: True all, a function what it returns for one, False nothing.
        what: named in errors.
    """

    def __init__(self, compare: bool | Callable[[Any], object], what: str) -> None:
        self._is_compared = compare is not False
        self._ids = compare if callable(compare) else None
        self._what = what
        self._trail: Trail | None = Trail()  # None: only its text was loaded
        self._loaded: str | None = None
        self._hint = ""  # why a replay may go another way

    def resume(self, trail: Trail) -> None:
        """Continue behind the batches of a trail."""
        self._trail, self._loaded = trail, None

    def load(self, text: str | None, hint: str) -> None:
        """Take over what was saved in the middle of an epoch; None: nothing is known."""
        self._trail, self._loaded, self._hint = None, text, hint

    def add(self, batch: Any) -> None:
        """Count a batch as handed out."""
        if self._is_compared:
            assert self._trail is not None, "`replay` comes before the first batch"
            self._trail.add(self._digest(batch))

    def text(self) -> str | None:
        """Return the digests to be saved; None if there are none."""
        if not self._is_compared:
            return None
        return self._loaded if self._trail is None else self._trail.text()

    def replay(self, batches: Iterator[Any], epoch: int, count: int) -> Trail:
        """Fetch the batches that were trained, and throw them away.

        Raises:
            DataStateError: they are not those that were trained, or there are fewer.
        """
        known = self.text() if count else None
        comparison = None if known is None else Comparison(known, count)
        trail = Trail()
        for done in range(count):
            batch = next(batches, END)
            if batch is END:
                raise DataStateError(
                    self._what, f"epoch {epoch} has {done} batches, {count} were trained"
                )
            if not self._is_compared:
                continue
            short = trail.add(self._digest(batch))
            parting = None if comparison is None else comparison.see(done + 1, short)
            if parting is not None:
                raise DataStateError(
                    self._what,
                    f"the replay of epoch {epoch} went another way: {parting} of {count} is not "
                    f"the one that was trained{self._hint}. {_PARTED}",
                )
        return trail

    def _digest(self, batch: Any) -> int:
        return digest_of(batch if self._ids is None else self._ids(batch))
