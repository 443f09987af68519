"""The life of a save as a table: moves are listed or raise, and no published file is deleted."""

import itertools

import pytest

from dcp_checkfreq.commit.phases import (
    NEXT,
    Event,
    Phase,
    advance,
    may_be_published,
    may_delete,
    may_resume,
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
    assert not any(may_delete(phase) and may_be_published(phase) for phase in Phase)
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
            assert phase in (Phase.COMMITTING, Phase.FINISHING, Phase.UNKNOWN), (phase, event)
    assert {p for (p, _), to in NEXT.items() if to is Phase.COMMITTING} == {Phase.WRITTEN}
    assert {p for (p, _), to in NEXT.items() if to is Phase.FINISHING} == {Phase.UPLOADED}


def test_what_is_staged_is_published_only_after_its_upload():
    for path in traces():
        if Phase.STAGED in path and path[-1] in (Phase.COMMITTING, Phase.FINISHING):
            moves = {
                (one, other) for (one, event), other in NEXT.items() if event.name == "UPLOADED"
            }
            assert moves & set(itertools.pairwise(path)), path


def test_what_the_next_start_can_publish_stays_so_until_this_one_knows_how_it_ended():
    ends = {Phase.PUBLISHED, Phase.UNKNOWN, Phase.ABANDONED}
    for path in traces():
        since = next((at for at, phase in enumerate(path) if may_resume(phase)), None)
        if since is not None:
            inside = [phase for phase in path[since:] if phase not in ends]
            assert all(may_resume(one) or one is Phase.FINISHING for one in inside), path


def test_only_what_all_ranks_have_staged_can_be_published_by_the_next_start():
    into = {
        event for (phase, event), to in NEXT.items() if may_resume(to) and not may_resume(phase)
    }
    assert into == {Event.ALL_STAGED, Event.REFUSED}
    refused = {
        phase for (phase, event), to in NEXT.items() if event is Event.REFUSED and may_resume(to)
    }
    assert refused == {Phase.FINISHING}


def test_from_the_call_of_the_commit_until_its_answer_nothing_may_be_deleted():
    for phase in (Phase.COMMITTING, Phase.FINISHING):
        assert not may_delete(phase)
        assert (phase, Event.FAILED) not in NEXT


def test_a_commit_without_an_answer_is_never_called_failed():
    assert (Phase.UNKNOWN, Event.FAILED) not in NEXT
    assert (Phase.PUBLISHED, Event.FAILED) not in NEXT
