"""The life of one save, on one rank, as a table: where its bytes are, and who can find them. Pure.

Without local disks it goes IDLE, WRITING, WRITTEN, COMMITTING, PUBLISHED. A save that is staged and
uploaded within DCP's save is STAGED before it is WRITTEN. One that is uploaded later is RESUMABLE
from the local commit on, whatever happens to this process: UPLOADED, FINISHING, PUBLISHED.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where a save stands."""

    IDLE = "nothing anywhere"
    WRITING = "files that nobody names"
    STAGED = "durable files on the local disk that nobody names"
    WRITTEN = "durable files that nobody names"
    COMMITTING = "the commit is under way: maybe a whole checkpoint"
    RESUMABLE = "a whole save on the local disks, which the next start can publish"
    UPLOADED = "the same, and durable files that nobody names"
    FINISHING = "the same, and the commit is under way: maybe a whole checkpoint"
    PUBLISHED = "a whole checkpoint"
    ABANDONED = "nothing, its files were removed; the local disks may hold it for the next start"
    UNKNOWN = "the commit got no answer: maybe a whole checkpoint"


class Event(Enum):
    """What happened to a save."""

    BEGAN = "this rank starts to write"
    STAGED = "this rank's files are durable on its local disk"
    WROTE = "this rank has written all that it has to"
    ALL_STAGED = "no rank holds anything in memory only, and the local disks know the whole save"
    UPLOADED = "what was on the local disk is durable where it is published"
    FAILED = "this rank, or the save as a whole, failed for certain"
    COMMITS = "the commit is about to be called"
    REFUSED = "the commit has created nothing, for certain"
    CREATED = "the commit record exists and is durable"
    NO_ANSWER = "the commit call ended without a clear answer"


NEXT: dict[tuple[Phase, Event], Phase] = {
    (Phase.IDLE, Event.BEGAN): Phase.WRITING,
    (Phase.WRITING, Event.WROTE): Phase.WRITTEN,
    (Phase.WRITING, Event.STAGED): Phase.STAGED,
    (Phase.STAGED, Event.WROTE): Phase.STAGED,
    (Phase.STAGED, Event.UPLOADED): Phase.WRITTEN,
    (Phase.STAGED, Event.ALL_STAGED): Phase.RESUMABLE,
    (Phase.RESUMABLE, Event.UPLOADED): Phase.UPLOADED,
    # A rank whose local disk was of no use has written past it, while others have not.
    (Phase.WRITTEN, Event.ALL_STAGED): Phase.WRITTEN,
    (Phase.WRITTEN, Event.UPLOADED): Phase.WRITTEN,
    # Before the effect: an interrupt just after it must not find files that may be deleted.
    (Phase.WRITTEN, Event.COMMITS): Phase.COMMITTING,
    (Phase.UPLOADED, Event.COMMITS): Phase.FINISHING,
    (Phase.COMMITTING, Event.CREATED): Phase.PUBLISHED,
    (Phase.COMMITTING, Event.REFUSED): Phase.WRITTEN,
    (Phase.COMMITTING, Event.NO_ANSWER): Phase.UNKNOWN,
    (Phase.FINISHING, Event.CREATED): Phase.PUBLISHED,
    (Phase.FINISHING, Event.REFUSED): Phase.UPLOADED,
    (Phase.FINISHING, Event.NO_ANSWER): Phase.UNKNOWN,
    (Phase.UNKNOWN, Event.CREATED): Phase.PUBLISHED,
    (Phase.WRITING, Event.FAILED): Phase.ABANDONED,
    (Phase.STAGED, Event.FAILED): Phase.ABANDONED,
    (Phase.WRITTEN, Event.FAILED): Phase.ABANDONED,
    (Phase.RESUMABLE, Event.FAILED): Phase.ABANDONED,
    (Phase.UPLOADED, Event.FAILED): Phase.ABANDONED,
}


def advance(phase: Phase, event: Event) -> Phase:
    """Return the phase after ``event``.

    Raises:
        AssertionError: no such move; it would be a bug of this package.
    """
    following = NEXT.get((phase, event))
    if following is None:  # raised, not asserted: it must hold under `python -O` too
        raise AssertionError(f"{event.name} cannot happen in {phase.name}")
    return following


def may_delete(phase: Phase) -> bool:
    """Tell whether the files of a save can be part of no checkpoint, now or later.

    Those on the local disks of a save that `may_resume` are another matter.
    """
    return (phase, Event.FAILED) in NEXT


def may_resume(phase: Phase) -> bool:
    """Tell whether the next start can publish the save from the local disks, if this fails."""
    return phase in (Phase.RESUMABLE, Phase.UPLOADED)


def may_be_published(phase: Phase) -> bool:
    """Tell whether the commit was begun, and is not known to have failed."""
    return phase in (Phase.COMMITTING, Phase.FINISHING, Phase.UNKNOWN, Phase.PUBLISHED)
