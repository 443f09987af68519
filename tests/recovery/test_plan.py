"""Which step to resume: by number, whole, and of the history that is alive."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from dcp_checkfreq.format.index import Columns, Record
from dcp_checkfreq.format.names import step_folder
from dcp_checkfreq.recovery.plan import (
    StepRecord,
    abandoned_by,
    begin_history,
    leaves,
    left_by,
    line_of,
    rank,
    step_record,
)


def record(step, run="", *, name=None, problem=None, abandons=None, folders=None, identity=""):
    return StepRecord(
        name=name or step_folder(step),
        step=step,
        problem=problem,
        run_id=run,
        identity=identity,
        abandons=abandons or {},
        abandons_folders=folders or {},
    )


def saved_by(run, resumed, records, *steps):
    """Return what a run saves that goes on from ``resumed`` among ``records``."""
    lineage = begin_history(run, resumed, records)
    return [
        record(
            step,
            run,
            identity=f"{run} at {step}",
            abandons=lineage.abandons,
            folders=lineage.abandons_folders,
        )
        for step in steps
    ]


def newest(records):
    candidates = rank(records).candidates
    return candidates[0] if candidates else None


RECORDS = st.lists(
    st.builds(
        StepRecord,
        name=st.text("step_-0123456789", min_size=6, max_size=12),
        step=st.integers(0, 30),
        problem=st.sampled_from([None, None, "cut short"]),
        run_id=st.sampled_from(["", "a", "b", "c"]),
        identity=st.sampled_from(["", "one", "two"]),
        abandons=st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 30), max_size=3),
    ),
    max_size=12,
    unique_by=lambda r: r.name,  # as in any folder
)


@given(records=RECORDS)
def test_every_record_is_a_candidate_or_rejected_with_a_reason(records):
    ranking = rank(records)
    named = [r.name for r in ranking.candidates] + [r.name for r in ranking.rejected]
    assert sorted(named) == sorted(r.name for r in records)
    assert all(passed.reason for passed in ranking.rejected)


@given(records=RECORDS)
def test_candidates_are_whole_and_newest_first_and_each_step_counts_once(records):
    ranking = rank(records)
    steps = [r.step for r in ranking.candidates]
    assert steps == sorted(set(steps), reverse=True)
    assert all(r.problem is None for r in ranking.candidates)


@given(records=RECORDS, data=st.data())
def test_the_order_of_the_scan_does_not_matter(records, data):
    shuffled = data.draw(st.permutations(records))
    assert [r.step for r in rank(records).candidates] == [r.step for r in rank(shuffled).candidates]


@given(records=RECORDS)
def test_without_branches_the_newest_whole_step_is_resumed(records):
    plain = [record(r.step, r.run_id, name=r.name, problem=r.problem) for r in records]
    whole = [r.step for r in plain if r.problem is None]
    chosen = newest(plain)
    assert (chosen.step if chosen else None) == max(whole, default=None)


@pytest.mark.parametrize("steps", [[9, 10], [99, 100], [99_999_999, 100_000_000], [9, 10**12]])
def test_order_is_by_number_at_any_width(steps):
    for spelling in ("step_{}", "step-{}", "step_{:08d}"):
        records = [record(step, name=spelling.format(step)) for step in steps]
        assert newest(records).step == max(steps)
        assert [r.step for r in rank(records).candidates] == sorted(steps, reverse=True)


@pytest.mark.parametrize("other", ["step_10", "step-10", "step-00000010", "step_0000000010"])
def test_of_two_spellings_of_one_step_the_usual_one_counts(other):
    usual = record(10)
    for records in ([usual, record(10, name=other)], [record(10, name=other), usual]):
        ranking = rank(records)
        assert [r.name for r in ranking.candidates] == [usual.name]
        assert [(r.name, r.step) for r in ranking.rejected] == [(other, 10)]
        assert usual.name in ranking.rejected[0].reason


def test_a_broken_spelling_does_not_hide_the_whole_one():
    ranking = rank([record(10, problem="cut short"), record(10, name="step_10")])
    assert [r.name for r in ranking.candidates] == ["step_10"]


def test_a_newer_broken_step_is_passed_over_with_its_reason():
    ranking = rank([record(1), record(2), record(3, problem="a file is missing")])
    assert [r.step for r in ranking.candidates] == [2, 1]
    assert [(r.step, r.reason) for r in ranking.rejected] == [(3, "a file is missing")]


def test_steps_of_stock_dcp_are_as_good_as_ours():
    records = [record(100, "a"), record(200), record(300, "a", problem="cut short")]
    assert newest(records).step == 200


# --- branches ---


def test_the_step_of_a_branch_that_was_left_is_not_the_newest():
    old = [record(step, "a") for step in (100, 200, 300, 400, 5000)]
    abandons = abandoned_by(old[2], old)
    assert abandons == {"a": 301}
    ranking = rank([*old, record(350, "b", abandons=abandons)])
    assert [(r.step, r.run_id) for r in ranking.candidates] == [
        (350, "b"), (300, "a"), (200, "a"), (100, "a"),
    ]  # fmt: skip
    assert [r.step for r in ranking.rejected] == [5000, 400]
    assert all("abandoned" in r.reason for r in ranking.rejected)


def test_until_the_new_branch_has_a_whole_step_the_old_one_is_alive():
    old = [record(300, "a"), record(5000, "a")]
    torn = record(350, "b", problem="cut short", abandons=abandoned_by(old[0], old))
    assert newest([*old, torn]).step == 5000


def test_who_goes_on_from_the_new_branch_still_leaves_the_old_one():
    old = [record(300, "a"), record(5000, "a")]
    second = record(350, "b", abandons=abandoned_by(old[0], old))
    third = record(360, "c", abandons=abandoned_by(second, [*old, second]))
    assert third.abandons == {"a": 301, "b": 351}
    assert newest([*old, third]).run_id == "c", "also when b's steps have expired"
    assert newest([*old, second, third]).run_id == "c"


def test_an_explicit_return_to_the_old_branch_makes_it_the_newest():
    old = [record(300, "a"), record(5000, "a")]
    second = record(350, "b", abandons=abandoned_by(old[0], old))
    everything = [*old, second]
    back = record(5100, "c", abandons=abandoned_by(old[1], everything))
    assert newest([*everything, back]).run_id == "c"


def test_after_an_explicit_return_a_torn_step_falls_back_to_where_it_came_from():
    old = [record(300, "a"), record(600, "a"), record(5000, "a")]
    second = record(350, "b", abandons=abandoned_by(old[0], old))
    everything = [*old, second]
    back = [
        record(650, "c", abandons=abandoned_by(old[1], everything)),
        record(700, "c", problem="torn", abandons=abandoned_by(old[1], everything)),
    ]
    ranking = rank([*everything, *back])
    assert [(r.step, r.run_id) for r in ranking.candidates][:2] == [(650, "c"), (600, "a")]


def test_a_fresh_start_leaves_everything():
    old = [record(100, "a"), record(50, "b")]
    abandons = abandoned_by(None, old)
    assert abandons == {"a": 0, "b": 0}
    assert newest([*old, record(10, "c", abandons=abandons)]).run_id == "c"


def test_a_run_that_has_saved_nothing_yet_is_left_by_its_id():
    old = [record(100, "a")]
    hung = begin_history("hung", old[0], old)
    new = begin_history("new", old[0], old, others=["hung", "a"])
    assert new.abandons == {"a": 101, "hung": 0}
    late = record(110, "hung", abandons=hung.abandons)
    own = record(105, "new", abandons=new.abandons)
    assert [r.step for r in rank([*old, late, own]).candidates] == [105, 100]
    assert left_by(hung, 120, [*old, late, own]) == own
    assert left_by(new, 120, [*old, late, own]) is None
    assert begin_history("fresh", None, old, others=["hung"]).abandons == {"a": 0, "hung": 0}


def test_what_cannot_be_read_today_is_left_too_in_case_that_it_can_tomorrow():
    (torn,) = saved_by("b", None, [], 500)
    torn = replace(torn, problem="a file is missing")
    stock = record(600, identity="stock", problem="cut short")
    old = record(400, "a")
    goes_on = saved_by("c", old, [old, torn, stock], 410)
    healed = [replace(torn, problem=None), replace(stock, problem=None)]
    assert newest([old, *healed, *goes_on]).step == 410


# --- steps without a run id ---


def test_a_fresh_start_leaves_the_steps_of_stock_dcp():
    stock = [record(4000, identity="x"), record(5000, identity="y")]
    own = saved_by("a", None, stock, 10)
    ranking = rank([*stock, *own])
    assert [r.step for r in ranking.candidates] == [10]
    assert all("abandoned" in passed.reason for passed in ranking.rejected)
    then = saved_by("b", own[0], [*stock, *own], 20)
    assert newest([*stock, *then]).step == 20, "also when a's steps have expired"


def test_a_return_to_an_earlier_step_leaves_later_ones_of_stock_dcp_and_no_earlier_ones():
    stock = [record(step, identity=f"s{step}") for step in (10, 20, 30)]
    own = saved_by("a", stock[1], stock, 25)
    assert [r.step for r in rank([*stock, *own]).candidates] == [25, 20, 10]
    assert not leaves(own[0], own[0])


def test_what_stock_dcp_saves_after_the_return_counts_as_new():
    stock = record(5000, identity="before")
    own = saved_by("a", None, [stock], 10)
    later = record(5000, identity="after")
    assert newest([later, *own]) == later
    assert newest([*own, record(6000, identity="more")]).step == 6000
    assert newest([*own, record(5000, name="step_5000", identity="before")]).step == 5000


def test_an_explicit_return_to_a_step_of_stock_dcp_revives_it_and_those_before_it():
    stock = [record(step, identity=f"s{step}") for step in (10, 20, 30)]
    own = saved_by("a", stock[0], stock, 15)
    back = saved_by("b", stock[2], [*stock, *own], 40)
    assert [r.step for r in rank([*stock, *own, *back]).candidates] == [40, 30, 20, 10]


def test_what_was_left_stays_left_when_those_who_left_it_are_gone():
    stock = [record(2, identity="s2"), record(5, "a")]
    fresh = saved_by("b", None, stock, 1)
    later = record(3, identity="s3")  # which hands nothing down
    on = saved_by("c", later, [*stock, *fresh, later], 4)
    assert [r.step for r in rank([*stock, *fresh, later, *on]).candidates] == [4, 3, 1]
    assert [r.step for r in rank([*stock, later, *on]).candidates] == [4, 3]


def test_what_is_dead_stays_dead_when_a_run_goes_back_to_a_step_that_hands_nothing_down():
    dead, back_to = record(6, identity="s6"), record(12, identity="s12")
    first = saved_by("a", record(4, "z"), [record(4, "z"), dead], 5)
    second = saved_by("b", back_to, [*first, dead, back_to], 13)
    third = begin_history("c", back_to, [dead, back_to, *second])  # what a had saved has expired
    assert [r.step for r in line_of(third, [dead, back_to, *second])] == [12]


def test_a_step_of_stock_dcp_without_a_commit_record_is_nothing_to_leave():
    assert begin_history("a", None, [record(7, problem="not published")]).abandons_folders == {}
    assert not leaves(record(1, "a", folders={step_folder(7): ""}), record(7))


# --- nothing leaves itself ---


def test_a_record_never_leaves_itself_or_its_run_whatever_it_says():
    # As an earlier version wrote them after a second restore in one process.
    damaged = [record(step, "a", abandons={"a": 5}) for step in (6, 8, 10)]
    assert [r.step for r in rank(damaged).candidates] == [10, 8, 6]
    before = [record(step, "a") for step in (2, 4, 7, 9)]
    assert [r.step for r in rank([*before, *damaged]).candidates] == [10, 8, 6, 4, 2]


def test_what_goes_on_from_a_record_that_left_itself_does_not_leave_it():
    damaged = [record(step, "a", abandons={"a": 5}) for step in (6, 8, 10)]
    on = saved_by("b", damaged[-1], damaged, 12)
    assert on[0].abandons == {"a": 11}
    assert [r.step for r in rank([*damaged, *on]).candidates] == [12, 10, 8, 6]


def test_a_circle_of_damaged_records_hides_none_of_them():
    circle = [
        record(10, "a", abandons={"b": 0}),
        record(20, "b", abandons={"c": 0}),
        record(30, "c", abandons={"a": 0}),
    ]
    assert [r.step for r in rank(circle).candidates] == [30, 20, 10]
    two = [record(10, "a", abandons={"b": 0}), record(20, "b", abandons={"a": 0})]
    assert [r.step for r in rank(two).candidates] == [20, 10]
    beside = [record(5, "d"), record(40, "e", abandons={"d": 0})]
    assert [r.step for r in rank([*circle, *beside]).candidates] == [40, 30, 20, 10]


@given(records=RECORDS)
def test_no_damage_hides_all_whole_checkpoints(records):
    whole = [r for r in records if r.problem is None]
    assert bool(rank(records).candidates) == bool(whole)


@given(records=RECORDS, pick=st.integers(0, 11))
def test_whatever_is_there_a_new_history_keeps_what_it_goes_on_from(records, pick):
    # Any circles, but no record that names its own run: those of one run cannot be told apart.
    records = [
        replace(r, abandons={k: v for k, v in r.abandons.items() if r.run_id not in ("", k)})
        for r in records
    ]
    whole = [r for r in records if r.problem is None]
    resumed = whole[pick % len(whole)] if whole else None
    history = begin_history("new", resumed, records)
    line = line_of(history, records)
    if resumed is None:
        assert all(r.run_id == "" and r.identity == "" for r in line)
    else:
        assert any(r.step == resumed.step for r in line)
    own = saved_by("new", resumed, records, (resumed.step if resumed else 0) + 1)
    assert newest([r for r in records if r.identity or r.run_id] + own) == own[0]


def test_hundreds_of_histories_are_ranked_at_once():
    records, resumed = [], None
    for number in range(300):
        (resumed,) = saved_by(f"run {number}", resumed, records[-1:], number)
        records.append(resumed)
    assert [r.step for r in rank(records).candidates] == [*reversed(range(300))]


def test_what_retention_looks_after_is_the_line_that_was_chosen():
    old = [record(step, "a") for step in (100, 300, 5000)]
    other = saved_by("b", old[1], old, 350, 400)
    back = begin_history("c", old[2], [*old, *other])
    assert [r.step for r in line_of(back, [*old, *other])] == [5000, 300, 100]
    again = begin_history("d", other[1], [*old, *other])
    assert [r.step for r in line_of(again, [*old, *other])] == [400, 350, 300, 100]
    assert line_of(begin_history("e", None, [*old, *other]), [*old, *other]) == ()


# --- one step's files under another's name ---


@pytest.mark.parametrize(("told", "folder", "is_whole"), [(4, 4, 1), (4, 40, 0), (None, 40, 1)])
def test_a_record_of_another_step_is_a_problem_with_both_numbers(told, folder, is_whole):
    columns = Columns(payload_offset=[], payload_bytes=[], block_bytes=[], digests=[])
    saved = Record(attempt="a", world_size=1, files={}, columns=columns, step=told)
    read = step_record(step_folder(folder), folder, None, saved, published=True)
    assert (read.problem is None) == bool(is_whole)
    if not is_whole:
        assert "step 4 in a folder of step 40" in read.problem
    torn = step_record(step_folder(folder), folder, "torn", saved, published=True)
    assert torn.problem == "torn"


@st.composite
def histories(draw):
    """Runs one after the other: each resumes the newest or any whole step, then saves a few.

    Yields, after every save, what is on storage and the line of saves that led to the last one.
    """
    on_storage: dict[int, StepRecord] = {}
    line_to: dict[str, list[StepRecord]] = {}  # by run: what it went on from, oldest first
    moments = []
    for number in range(draw(st.integers(1, 6))):
        records = list(on_storage.values())
        resumed = newest(records)
        if records and draw(st.booleans()):
            resumed = draw(st.sampled_from(records))  # asked for by its step
        line = []
        if resumed is not None:
            line = [r for r in line_to[resumed.run_id] if r.step <= resumed.step]
        run = f"run {number}"
        line_to[run] = line
        abandons = abandoned_by(resumed, records)
        step = resumed.step if resumed else 0
        for _ in range(draw(st.integers(1, 4))):
            step += 10
            on_storage[step] = record(step, run, abandons=abandons)
            line.append(on_storage[step])
            moments.append((list(on_storage.values()), list(line)))
    return moments


@given(history=histories())
def test_through_any_history_the_newest_is_what_was_saved_last(history):
    for on_storage, line in history:
        assert newest(on_storage) == line[-1]


@examples(300)
@given(history=histories())
def test_through_any_history_only_the_line_of_the_last_save_is_fallen_back_to(history):
    for on_storage, line in history:
        assert all(candidate in line for candidate in rank(on_storage).candidates)
