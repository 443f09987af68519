"""A stored profile comes back as it was, or not at all; a job is known by its fingerprint."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.format.checked_json import LONGEST_TEXT, digest_of, fingerprint
from dcp_checkfreq.policy.costs import Costs
from dcp_checkfreq.policy.interval import MAX_INTERVAL_STEPS, Mode
from dcp_checkfreq.policy.stored_profile import (
    StoredProfile,
    decode,
    encode,
)

SECONDS = st.floats(0, 1e9)
BYTES = st.integers(0, 10**15)
PROFILES = st.builds(
    StoredProfile,
    fingerprint=st.binary().map(lambda b: fingerprint([b.hex()])),
    costs=st.builds(
        Costs, iteration_s=SECONDS, update_s=SECONDS, snapshot_gpu_s=SECONDS,
        snapshot_cpu_s=SECONDS, persist_s=SECONDS, state_bytes=BYTES, gpu_used_bytes=BYTES,
        gpu_total_bytes=BYTES, call_s=SECONDS,
    ),
    mode=st.sampled_from(Mode),
    interval_steps=st.integers(1, MAX_INTERVAL_STEPS),
    max_overhead=st.floats(0.001, 1),
    mtbf_s=st.none() | st.floats(1e-9, 1e9),
    confirmed=st.booleans(),
)  # fmt: skip
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip

ONE = StoredProfile(
    fingerprint=fingerprint({"world": 4}),
    costs=Costs(
        iteration_s=0.5, update_s=0.05, snapshot_gpu_s=None, snapshot_cpu_s=0.25, persist_s=3.0,
        state_bytes=10**9, gpu_used_bytes=0, gpu_total_bytes=0, call_s=0.125,
    ),
    mode=Mode.CPU,
    interval_steps=7,
    max_overhead=0.035,
    mtbf_s=3600.0,
    confirmed=True,
)  # fmt: skip


def edited(change):
    """Return the text of a profile that was changed and then digested again."""
    body = json.loads(encode(ONE))
    del body["digest"]
    change(body)
    return json.dumps(body | {"digest": digest_of(body)})


@given(PROFILES)
def test_what_was_stored_comes_back(profile):
    assert decode(encode(profile)) == profile
    without = replace(profile, costs=replace(profile.costs, snapshot_gpu_s=None), mode=Mode.CPU)
    assert decode(encode(without)) == without


@given(where=st.integers(0, len(encode(ONE)) - 1), new=st.characters(max_codepoint=300))
def test_one_changed_character_is_noticed(where, new):
    text = encode(ONE)
    damaged = text[:where] + new + text[where + 1 :]
    try:
        found = decode(damaged)
    except ValueError:
        return
    assert found == ONE  # white space, or the same character


@given(st.integers(0, len(encode(ONE)) - 3))
def test_a_text_cut_short_is_refused(length):
    with pytest.raises(ValueError, match="profile"):
        decode(encode(ONE)[:length])


@given(st.text(max_size=200))
def test_any_other_text_is_refused(text):
    with pytest.raises(ValueError, match="profile"):
        decode(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "version None"),
        ("[" * 60_000, "not JSON"),
        ("1" * 5000, "not"),
        (" " * LONGEST_TEXT + "{}", "too many"),
        (edited(lambda body: body.update(version=1)), "version 1, this program reads 2"),
        (edited(lambda body: body.update(version=3)), "version 3"),
        (edited(lambda body: body.update(version=True)), "version True"),
        (encode(ONE).replace("7", "8", 1), "digest"),
    ],
)
def test_what_is_no_profile_of_this_version_is_refused_with_the_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        decode(text)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, True, "1", None, [], {}])
@pytest.mark.parametrize(
    "name", ["iteration_s", "update_s", "snapshot_cpu_s", "persist_s", "call_s", "state_bytes"]
)
def test_a_cost_that_cannot_have_been_measured_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        decode(edited(lambda body: body["costs"].update({name: value})))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"interval_steps": 0}, "interval_steps"),
        ({"interval_steps": 1.5}, "interval_steps"),
        ({"interval_steps": MAX_INTERVAL_STEPS + 1}, "interval_steps"),
        ({"max_overhead": 0}, "max_overhead"),
        ({"max_overhead": 1.5}, "max_overhead"),
        ({"mtbf_s": 0}, "mtbf_s"),
        ({"mtbf_s": -1.0}, "mtbf_s"),
        ({"mtbf_s": math.inf}, "mtbf_s"),
        ({"mtbf_s": "1"}, "mtbf_s"),
        ({"confirmed": 1}, "confirmed"),
        ({"mode": "disk"}, "mode"),
        ({"mode": []}, "mode"),
        ({"mode": "gpu"}, "snapshot_gpu_s"),
        ({"fingerprint": "abc"}, "fingerprint"),
        ({"fingerprint": None}, "fingerprint"),
        ({"costs": None}, "costs"),
        ({"costs": {}}, "missing"),
        ({"more": 1}, "unknown"),
    ],
)
def test_a_field_that_cannot_be_right_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        decode(edited(lambda body: body.update(change)))


def test_the_interval_holds_under_the_same_budget_and_failure_rate_only():
    assert ONE.interval_under(0.035, 3600.0) == 7
    for other in ((0.035, None), (0.035, 7200.0), (0.05, 3600.0)):
        assert ONE.interval_under(*other) is None
    without = replace(ONE, mtbf_s=None)
    assert without.interval_under(0.035, None) == 7
    assert without.interval_under(0.035, 3600.0) is None
    assert replace(ONE, confirmed=False).interval_under(0.035, 3600.0) is None


def test_a_missing_field_is_refused():
    with pytest.raises(ValueError, match="interval_steps"):
        decode(edited(lambda body: body.pop("interval_steps")))


def test_what_could_not_be_read_again_is_not_written():
    with pytest.raises(ValueError, match="persist_s"):
        encode(replace(ONE, costs=replace(ONE.costs, persist_s=math.nan)))
    with pytest.raises(ValueError, match="interval_steps"):
        encode(replace(ONE, interval_steps=0))


@given(PLAIN, PLAIN)
def test_equal_values_have_one_fingerprint_and_others_another(one, other):
    same = json.dumps(one) == json.dumps(other)
    text_of = lambda v: json.dumps(v, sort_keys=True)  # noqa: E731
    assert (fingerprint([one]) == fingerprint([other])) == (text_of(one) == text_of(other))
    assert not same or fingerprint([one]) == fingerprint([other])


def test_order_matters_in_sequences_only_and_kinds_of_values_are_told_apart():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint([1, 2]) == fingerprint((1, 2)) != fingerprint([2, 1])
    kinds = [[1], ["1"], [True], [None], ["None"], [[1]], [{"1": 1}], [{}], [[]], [1.5]]
    assert len({fingerprint(kind) for kind in kinds}) == len(kinds)


def test_another_process_finds_the_same():
    parts = "{'url': 's3://b/x', 'world': 4, 'keys': ['w', 'b'], 'bytes': 123, 'share': 0.1}"
    code = f"from dcp_checkfreq.format.checked_json import fingerprint; print(fingerprint({parts}))"
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True,
        env={"PYTHONHASHSEED": "77"},
    )  # fmt: skip
    assert found.stdout.strip() == fingerprint(
        {"url": "s3://b/x", "world": 4, "keys": ["w", "b"], "bytes": 123, "share": 0.1}
    )


@pytest.mark.parametrize("parts", [[b"x"], [{1: 2}], [object()], [{1, 2}], {"a": [b"x"]}])
def test_what_is_not_plain_is_refused(parts):
    with pytest.raises(TypeError):
        fingerprint(parts)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="JSON"):
        fingerprint([value])
