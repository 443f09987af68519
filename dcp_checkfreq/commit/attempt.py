"""One rank's attempt to save: its files, its right to commit, and what of it may be deleted."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from dcp_checkfreq.commit.phases import (
    Event,
    Phase,
    advance,
    may_be_published,
    may_delete,
    may_resume,
)
from dcp_checkfreq.commit.publish import reserve
from dcp_checkfreq.errors import CheckFreqError, PublishUnknown
from dcp_checkfreq.format import names
from dcp_checkfreq.storage.tier import Reservation, Tier

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SaveAttempt:
    """Carried from the first moment of a save to its end. Used by one thread at a time.

    Attributes:
        tier: folder of the checkpoint.
        id: part of the name of every file that this attempt makes.
        phase: where its bytes are.
        files: shards of this rank.
        reservation: on the coordinator, the right to commit.
        reserved_by: process id of the coordinator, once it has made the reservation.
        given_up: nobody waits for it any more: it must not be committed.
    """

    tier: Tier
    id: str
    phase: Phase = Phase.IDLE
    files: Collection[str] = ()
    reservation: Reservation | None = None
    reserved_by: int | None = None
    given_up: CheckFreqError | None = None

    def reserve(self) -> None:
        """On the coordinator, before any rank writes: make the folder, and the right to commit.

        Raises:
            OSError: of the storage.
        """
        self.reservation = reserve(self.tier, self.id)
        self.reserved_by = os.getpid()

    def begin(self) -> None:
        """Say that this rank starts to write."""
        self.phase = advance(self.phase, Event.BEGAN)

    def staged(self) -> None:
        """Say that this rank's files are durable on its local disk."""
        self.phase = advance(self.phase, Event.STAGED)

    def wrote(self) -> None:
        """Say that this rank has written all that it has to."""
        self.phase = advance(self.phase, Event.WROTE)

    def all_staged(self) -> None:
        """Say that all ranks have written, and the local disks know of the whole save."""
        self.phase = advance(self.phase, Event.ALL_STAGED)

    def uploaded(self) -> None:
        """Say that what was on the local disk is durable where it is published."""
        self.phase = advance(self.phase, Event.UPLOADED)

    def give_up(self, error: CheckFreqError) -> None:
        """On another thread: let `commit` raise ``error``. `may_be_published` says if it is late.

        One sets this and looks at the phase, the other sets the phase and looks at this.
        """
        self.given_up = error

    def commit(self, publish: Callable[[Reservation], bytes | None]) -> bytes | None:
        """On the coordinator: call ``publish``, and keep track of what became of it.

        An interrupt at any place leaves a phase in which nothing may be deleted, or one in which
        nothing was committed.
        """
        assert self.reservation is not None, "prepare_global_plan has made it"
        self.phase = advance(self.phase, Event.COMMITS)
        try:
            if self.given_up is not None:
                raise self.given_up
            replaced = publish(self.reservation)
        except PublishUnknown:
            self.phase = advance(self.phase, Event.NO_ANSWER)
            raise
        except CheckFreqError:
            self.phase = advance(self.phase, Event.REFUSED)
            raise
        self.phase = advance(self.phase, Event.CREATED)
        return replaced

    @property
    def may_be_published(self) -> bool:
        """Whether the commit was begun, and is not known to have failed."""
        return may_be_published(self.phase)

    @property
    def may_delete(self) -> bool:
        """Whether there are files, which are part of no checkpoint, now or later."""
        return may_delete(self.phase)

    @property
    def may_resume(self) -> bool:
        """Whether the local disks of all ranks hold the save, for the next start."""
        return may_resume(self.phase)

    def abandon(self) -> None:
        """Give up a save that is known to have failed, and remove this rank's files.

        Does nothing once they may be part of a checkpoint. What cannot be removed is left to
        cleaning.
        """
        if self.may_be_published:
            return
        reservation, self.reservation = self.reservation, None
        if reservation is not None:
            self._quietly(reservation.cancel)  # first: then nobody can commit what goes
        if self.may_delete:
            self.remove(self.files)
            self.phase = advance(self.phase, Event.FAILED)

    def remove(self, doomed: Iterable[str]) -> None:
        """Delete files that no checkpoint names; what resists is left to cleaning."""
        for name in doomed:
            self._quietly(lambda name=name: self.tier.delete(name))  # type: ignore[misc]

    def _quietly(self, clean: Callable[[], None]) -> None:
        try:
            clean()
        except OSError as error:
            _log.warning(
                "%s: files that no checkpoint names could not be removed (%s); "
                "the next restore cleans them up",
                self.tier.location,
                error,
            )


def new_attempt(tier: Tier) -> SaveAttempt:
    """Return an attempt with a name of its own."""
    return SaveAttempt(tier, names.new_attempt())
