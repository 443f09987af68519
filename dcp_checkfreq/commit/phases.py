"""The life of one attempt to save, on one rank, as a table. Pure."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where an attempt stands."""

    IDLE = "nothing on storage"
    WRITING = "files that nobody names"
    WRITTEN = "durable files that nobody names"
    COMMITTING = "the commit is under way: maybe a whole checkpoint"
    PUBLISHED = "a whole checkpoint"
    ABANDONED = "nothing, its files were removed"
    UNKNOWN = "the commit got no answer: maybe a whole checkpoint"


class Event(Enum):
    """What happened to an attempt."""

    BEGAN = "this rank starts to write"
    WROTE = "this rank's files are durable"
    FAILED = "this rank, or the save as a whole, failed for certain"
    COMMITS = "the commit is about to be called"
    REFUSED = "the commit has created nothing, for certain"
    CREATED = "the commit record exists and is durable"
    NO_ANSWER = "the commit call ended without a clear answer"


NEXT: dict[tuple[Phase, Event], Phase] = {
    (Phase.IDLE, Event.BEGAN): Phase.WRITING,
    (Phase.WRITING, Event.WROTE): Phase.WRITTEN,
    (Phase.WRITING, Event.FAILED): Phase.ABANDONED,
    (Phase.WRITTEN, Event.FAILED): Phase.ABANDONED,
    # Before the effect: an interrupt just after it must not find files that may be deleted.
    (Phase.WRITTEN, Event.COMMITS): Phase.COMMITTING,
    (Phase.COMMITTING, Event.CREATED): Phase.PUBLISHED,
    (Phase.COMMITTING, Event.REFUSED): Phase.WRITTEN,
    (Phase.COMMITTING, Event.NO_ANSWER): Phase.UNKNOWN,
    (Phase.UNKNOWN, Event.CREATED): Phase.PUBLISHED,
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
    """Tell whether the files of an attempt can be part of no checkpoint, now or later."""
    return phase in (Phase.WRITING, Phase.WRITTEN)
