"""No rank leaves by itself what all do together: the others raise the same, named with the rank.

The table: where a rank fails, how, and which one. What kills no process runs in one pair of them
(`jobs_no_rank_alone`); processes that die are forked (`deaths`).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs_no_rank_alone import HERE_AND_THERE, PLACES, cells, ranks_of
from launch import start, values

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]

SECONDS = 15.0  # a rank that was left alone waits for longer
OWN = {"interrupt": "KeyboardInterrupt", "system exit": "SystemExit"}
ASKED_FOR_TOGETHER = [
    "no_rank_alone",
    "options_that_differ",
    "data_that_does_not_fit",
    "calls_from_within",
]

# One death of every call is always tried, the rest of the table with `-m long`.
DEATHS = [
    ("constructor: root", 1),
    ("capture", 0),
    ("writing", 1),
    ("reading", 0),
    ("restore of a part", 1),
]
GROUPS = ["makes_groups_anew", "forks"]
NEVER_COMES = ["never_comes|dies", "never_comes|sleeps"]
MORE_DEATHS = [
    (place, rank) for place in PLACES for rank in ranks_of(place) if (place, rank) not in DEATHS
]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return start(2, folder, ASKED_FOR_TOGETHER, timeout_s=300)


def told(answers, cell):
    return [answer[cell] for answer in values(answers)]


@pytest.mark.parametrize(("place", "kind", "rank"), cells())
def test_an_error_of_one_rank_is_raised_on_all_with_its_number(two, place, kind, rank):
    both = told(two["no_rank_alone"], f"{place}|{kind}|{rank}")
    failed, other = both[rank], both[1 - rank]
    kinds = ("RankFailed", "SaveFailed", "LoadFailed", "SnapshotFailed", "UnsupportedState")
    assert other["kind"] in kinds, other
    assert f"rank {rank}" in other["text"]
    if kind in OWN:
        assert failed["kind"] == OWN[kind]
        assert OWN[kind] in other["text"]
    else:
        assert (failed["kind"], failed["text"]) == (other["kind"], other["text"])
        assert "boom" in other["text"] or kind == "speechless"
    for said in both:
        assert said["seconds"] < SECONDS
        assert said["worked"], "the next save and restore"


def test_the_table_is_whole():
    assert len(cells()) == 25 * 3 + 4 * 2 * len(HERE_AND_THERE)
    assert len(DEATHS) + len(MORE_DEATHS) == 25


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("keep_last=0", "keep_last must be a whole number of at least 1"),
        ("timeout_s=-1", "timeout_s must be a number"),
        ("timeout_s='soon'", "TypeError: timeout_s must be"),
        ("every=7", "must be the same on all ranks"),
        ("every=0", "every must be"),
        ("on_error='raise'", "must be the same on all ranks"),
        ("max_overhead=3", "max_overhead must be"),
    ],
)
def test_an_option_of_one_rank_is_refused_on_all(two, option, text, rank):
    both = told(two["options_that_differ"], f"{option}|{rank}")
    for said in both:
        assert (said["kind"], said["text"]) == (both[0]["kind"], both[0]["text"])
        assert said["kind"] in ("RankFailed", "UnsupportedOption")
        assert text in said["text"]
        assert "rank" in said["text"]
        assert said["seconds"] < SECONDS


def test_what_all_ranks_do_wrong_is_the_error_of_one_process(two):
    for said in told(two["options_that_differ"], "all the same"):
        assert said["kind"] == "ValueError"
        assert said["text"].startswith("every must be ")


def test_ranks_in_different_calls_are_told_at_once(two):
    for cell, kind in (("arguments", "UnsupportedOption"), ("calls", "RankFailed")):
        for said in told(two["options_that_differ"], cell):
            assert said["kind"] == kind, said
            assert said["seconds"] < SECONDS
    assert told(two["options_that_differ"], "at last") == [1, 1]


def test_data_that_does_not_fit_on_one_rank_stops_all(two):
    for rank in (0, 1):
        for said in told(two["data_that_does_not_fit"], f"{rank}|1"):
            assert said["kind"] == "DataStateError"
            assert f"rank {rank}: the number of items was 64, now it is 60" in said["text"]
            assert said["seconds"] < SECONDS


@pytest.mark.parametrize("inner", ["save", "restore", "after_step", "close"])
@pytest.mark.parametrize("odd", ["0", "1", "both"])
def test_a_call_from_within_another_is_refused_on_all_ranks_at_once(two, odd, inner):
    for phase, outer in (("saving", "after_step"), ("loading", "restore")):
        for said in told(two["calls_from_within"], f"{odd}|{inner}|{phase}"):
            assert f"{inner}() was called from within {outer}()" in said["text"], said
            assert odd == "both" or f"rank {odd}" in said["text"]
            assert said["seconds"] < SECONDS
    assert all(told(two["calls_from_within"], f"{odd}|{inner}|worked"))


# --- ranks that do not live on ---


def deaths(folder, *jobs):
    script = Path(__file__).with_name("deaths.py")
    command = [sys.executable, str(script), str(folder), *jobs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    logs = "".join(path.read_text(errors="replace")[-1500:] for path in folder.rglob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    return json.loads(done.stdout), logs


def assert_lost(said, rank, logs):
    assert said is not None, logs
    assert said["kind"] == "RankLost", said
    assert f"rank {rank} is gone or does not answer" in said["text"]
    assert said["seconds"] < SECONDS


@pytest.fixture(scope="module")
def some_deaths(tmp_path_factory):
    jobs = [f"dies|{place}|{rank}" for place, rank in DEATHS]
    return deaths(
        tmp_path_factory.mktemp("deaths"),
        *jobs,
        "is_killed",
        "leaves",
        "hangs",
        *NEVER_COMES,
        *GROUPS,
    )


@pytest.mark.parametrize(("place", "rank"), DEATHS)
def test_a_rank_that_dies_is_named_to_the_others_within_seconds(some_deaths, place, rank):
    said, logs = some_deaths
    both = said[f"dies|{place}|{rank}"]
    assert both[rank] is None
    assert_lost(both[1 - rank], rank, logs)


@pytest.mark.long
def test_a_rank_that_dies_anywhere_is_named_to_the_others_within_seconds(tmp_path):
    said, logs = deaths(tmp_path, *(f"dies|{place}|{rank}" for place, rank in MORE_DEATHS))
    for place, rank in MORE_DEATHS:
        assert_lost(said[f"dies|{place}|{rank}"][1 - rank], rank, f"{place}: {logs}")


def test_of_three_ranks_the_one_that_was_killed_is_named(some_deaths):
    said, logs = some_deaths
    zero, one, two = said["is_killed"]
    assert one is None
    for other in (zero, two):
        assert_lost(other, 1, logs)
        assert "rank 0 is" not in other["text"]
        assert "rank 2 is" not in other["text"]


def test_a_rank_that_leaves_its_loop_is_named_with_its_reason(some_deaths):
    said, _ = some_deaths
    for other in said["leaves"][:2]:
        for ended in (other, other["again"]):
            assert ended["kind"] == "RankLost"
            assert "rank 2 has left" in ended["text"]
            assert "ZeroDivisionError: the loss is gone" in ended["text"]
            assert ended["seconds"] < SECONDS


def test_a_write_that_hangs_is_told_each_minute_and_in_the_error_of_the_other_rank(some_deaths):
    said, logs = some_deaths
    waiting, hung = said["hangs"]
    assert_lost(waiting, 1, logs)
    assert "rank 1 is gone or does not answer, it has been writing" in waiting["text"]
    assert "step_00000000 for" in waiting["text"]
    assert hung["kind"] == "SaveFailed", "it was given up on its own rank, too"
    assert "the storage does not come back: rank 1 has been writing" in hung["text"]
    assert "step_00000000" in hung["text"]
    assert hung["seconds"] < SECONDS
    told_of_hung = [text for text in hung["told"] if text.startswith("rank 1 has been writing")]
    assert len(told_of_hung) >= 3
    assert all("step_00000000" in text for text in told_of_hung)
    told_of_wait = [text for text in waiting["told"] if "waiting for the other ranks" in text]
    assert any("rank 1 has been writing" in text for text in told_of_wait)


@pytest.mark.parametrize("cell", NEVER_COMES)
def test_a_rank_that_never_makes_its_checkpointer_is_told_and_named_after_the_timeout(
    some_deaths, cell
):
    said, logs = some_deaths
    zero, _, two = said[cell]
    for rank, other in ((0, zero), (2, two)):
        assert_lost(other, 1, logs)
        assert "rank 1 is gone or does not answer" in other["text"]
        assert "rank 0 is" not in other["text"]
        assert "rank 2 is" not in other["text"]
        assert "while making a process group" in other["text"]
        wait = f"rank {rank} has been waiting for the other ranks while making a process group for "
        assert sum(text.startswith(wait) for text in other["told"]) >= 3
        assert not [name for name in other["threads"] if name == "checkfreq-watch"]


def test_a_checkpointer_whose_groups_were_made_anew_says_what_to_do(some_deaths):
    said, logs = some_deaths
    for rank in said["makes_groups_anew"]:
        assert rank is not None, logs
        for call in ("after_step", "again", "restore"):
            assert rank[call]["kind"] == "RankLost", rank[call]
            assert "make a new one after init_process_group()" in rank[call]["text"]
            assert rank[call]["seconds"] < SECONDS
        assert rank["close"]["kind"] is None, "closing is quiet"
        assert rank["close"]["seconds"] < SECONDS
        assert rank["told"] == []
        assert rank["anew"] == [1, 2]


def test_a_forked_child_of_a_rank_is_refused_and_harms_nothing(some_deaths):
    said, logs = some_deaths
    for rank in said["forks"]:
        assert rank is not None, logs
        assert rank["child"]["kind"] == "SaveFailed"
        assert "a forked child has the connections of its parent" in rank["child"]["text"]
        assert rank["child"]["seconds"] < SECONDS
        assert rank["saved"] == 1
