"""Every name that we give can be read again, and no name of anyone else is taken for ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.format import names

ATTEMPTS = st.text("0123456789abcdef", min_size=12, max_size=12)
COUNTS = st.integers(0, 10**12)


@given(step=st.integers(0, 10**30))
def test_a_step_is_read_back_from_the_folder_that_was_named_for_it(step):
    assert names.parse_step(names.step_folder(step)) == step


@given(steps=st.lists(st.integers(0, 10**8 - 1)))
def test_up_to_eight_digits_text_order_is_step_order(steps):
    assert sorted(map(names.step_folder, steps)) == [names.step_folder(s) for s in sorted(steps)]


@pytest.mark.parametrize("step", [0, 7, 1000, 99_999_999, 123_456_789_012])
@pytest.mark.parametrize("spelling", ["step_{}", "step-{}", "step_{:05d}", "step-{:012d}"])
def test_both_spellings_and_any_padding_name_the_step(step, spelling):
    assert names.parse_step(spelling.format(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        "",
        "step",
        "step_",
        "step10",
        "step__10",
        "step_-1",
        "step_+1",
        "step_1e3",
        "step_1_000",
        "step_1.0",
        "step_0x10",
        "step_ 10",
        "step_10 ",
        "step_10\n",
        "step_13.tmp",
        "step_10-unsharded",
        "Step_10",
        "xstep_10",
        ".step_10",
        "global_step10",
        "step_٣",  # ARABIC-INDIC DIGIT THREE: a digit for str.isdigit, not for us
        "step_\uff11\uff10",  # fullwidth digits
        "step_²",
        ".metadata",
        ".checkfreq",
        "__0_0.distcp",
    ],
)
def test_a_foreign_folder_is_no_step(name):
    assert names.parse_step(name) is None


def test_a_negative_step_has_no_folder():
    with pytest.raises(ValueError, match="negative"):
        names.step_folder(-1)


@given(rank=COUNTS, number=COUNTS, attempt=ATTEMPTS)
def test_a_shard_name_is_read_back_as_it_was_built(rank, number, attempt):
    assert names.parse_shard(names.shard_file(rank, number, attempt)) == (rank, number, attempt)


@given(attempt=ATTEMPTS)
def test_a_scratch_name_is_read_back_and_is_not_the_commit_record(attempt):
    name = names.scratch_metadata(attempt)
    assert names.parse_scratch(name) == attempt
    assert name != names.METADATA


def test_a_new_attempt_fits_both_names_and_is_new_each_time():
    attempts = {names.new_attempt() for _ in range(100)}
    assert len(attempts) == 100
    for attempt in attempts:
        assert names.parse_shard(names.shard_file(3, 1, attempt)) == (3, 1, attempt)
        assert names.parse_scratch(names.scratch_metadata(attempt)) == attempt


@pytest.mark.parametrize(
    "name",
    [
        "__0_0.distcp",  # stock DCP: not ours to delete
        "__0_0_0123456789ab.distcp.tmp",
        "__0_0_0123456789aB.distcp",
        "__0_0_0123456789abc.distcp",
        "__0_0_0123456789ab",
        "__-1_0_0123456789ab.distcp",
        "__٣_0_0123456789ab.distcp",
        "x__0_0_0123456789ab.distcp",
        "__0_0_0123456789ab.distcp\n",
        ".metadata",
        ".metadata.tmp",  # stock DCP's temporary name
        ".metadata.0123456789ab",
        ".metadata.0123456789ab.tmp~",
        "metadata.0123456789ab.tmp",
        "model.safetensors",
    ],
)
def test_a_foreign_file_is_neither_shard_nor_scratch(name):
    assert names.parse_shard(name) is None
    assert names.parse_scratch(name) is None


@given(name=st.text(max_size=40))
def test_any_text_is_parsed_without_an_error(name):
    for parse in (names.parse_step, names.parse_shard, names.parse_scratch):
        parse(name)
    step = names.parse_step(name)
    assert step is None or name.isascii()
