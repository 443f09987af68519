"""The life of a save as a table: moves are listed or raise, and no published file is deleted."""

import itertools

import pytest

from dcp_checkfreq.commit.phases import (
    NEXT,
    Event,
    Phase,
    advance,
    may_delete,
)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", Event)
def test_every_pair_is_in_the_table_or_raises(phase, event):
    following = NEXT.get((phase, event))
    if following is None:
        with pytest.raises(AssertionError, match=f"{event.name} cannot happen in {phase.name}"):
            advance(phase, event)
    else:
        assert advance(phase, event) is following


def traces():
    """Yield every walk through the table as a list of phases, until no new phase is left."""

    def walk(path):
        yield path
        for (phase, _), following in NEXT.items():
            if phase is path[-1] and following not in path:
                yield from walk([*path, following])

    return walk([Phase.IDLE])


def test_every_phase_is_reached_and_every_walk_ends():
    walks = list(traces())
    assert set(itertools.chain(*walks)) == set(Phase)
    lasts = {path[-1] for path in walks}
    final = {phase for phase in lasts if not any(source is phase for source, _ in NEXT)}
    assert final == {Phase.PUBLISHED, Phase.ABANDONED}


def test_what_is_published_or_may_be_is_never_deleted():
    maybe = {Phase.PUBLISHED, Phase.UNKNOWN}
    for path in traces():
        seen = False
        for phase in path:
            seen = seen or phase in maybe
            assert not (seen and may_delete(phase)), path


def test_deleting_ends_in_abandoned_from_where_nothing_leads_on():
    for phase in filter(may_delete, Phase):
        assert advance(phase, Event.FAILED) is Phase.ABANDONED
    assert not any(source is Phase.ABANDONED for source, _ in NEXT)
    assert not may_delete(Phase.ABANDONED)


def test_only_durable_files_are_published():
    for (phase, event), following in NEXT.items():
        if following in (Phase.PUBLISHED, Phase.UNKNOWN):
            assert phase in (Phase.COMMITTING, Phase.UNKNOWN), (phase, event)
    assert {p for (p, _), to in NEXT.items() if to is Phase.COMMITTING} == {Phase.WRITTEN}


def test_from_the_call_of_the_commit_until_its_answer_nothing_may_be_deleted():
    assert not may_delete(Phase.COMMITTING)
    assert (Phase.COMMITTING, Event.FAILED) not in NEXT


def test_a_commit_without_an_answer_is_never_called_failed():
    assert (Phase.UNKNOWN, Event.FAILED) not in NEXT
    assert (Phase.PUBLISHED, Event.FAILED) not in NEXT
