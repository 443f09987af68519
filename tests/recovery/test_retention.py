"""What may go: never the newest, never fewer than asked for, and the same answer twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.recovery.retention import Retention, select_expired

STEPS = st.sets(st.integers(0, 500), max_size=30)
RULES = st.builds(
    Retention,
    keep_last=st.integers(1, 6),
    keep_every=st.none() | st.integers(1, 60),
    keep_epochs_of_steps=st.none() | st.integers(1, 60),
)


@given(steps=STEPS, rule=RULES)
def test_the_newest_never_expires(steps, rule):
    expired = select_expired(steps, rule)
    assert not steps or max(steps) not in expired


@given(steps=STEPS, rule=RULES)
def test_the_last_ones_stay_and_only_what_is_there_goes(steps, rule):
    expired = select_expired(steps, rule)
    kept = steps - set(expired)
    assert set(expired) <= steps
    assert set(sorted(steps)[-rule.keep_last :]) <= kept
    assert len(kept) >= min(len(steps), rule.keep_last)


@given(steps=STEPS, rule=RULES)
def test_multiples_and_ends_of_epochs_stay_and_nothing_else_does(steps, rule):
    kept = steps - set(select_expired(steps, rule))
    multiples = {step for step in steps if rule.keep_every and step % rule.keep_every == 0}
    ends = set()
    if epoch := rule.keep_epochs_of_steps:
        for number in range(-1, 501 // epoch + 1):
            of_epoch = steps.intersection(range(number * epoch + 1, (number + 1) * epoch + 1))
            ends |= {max(of_epoch)} if of_epoch else set()
    assert kept == multiples | ends | set(sorted(steps)[-rule.keep_last :])


@given(steps=STEPS, rule=RULES)
def test_after_deleting_nothing_more_expires(steps, rule):
    kept = steps - set(select_expired(steps, rule))
    assert select_expired(kept, rule) == []


@given(steps=STEPS, rule=RULES, new=st.integers(501, 600))
def test_a_newer_step_brings_nothing_back(steps, rule, new):
    assert set(select_expired(steps, rule)) <= set(select_expired({*steps, new}, rule))


@given(steps=st.lists(st.integers(0, 500), max_size=30), rule=RULES)
def test_the_order_given_does_not_matter_and_the_oldest_go_first(steps, rule):
    expired = select_expired(steps, rule)
    assert expired == sorted(set(expired))
    assert expired == select_expired(sorted(steps, reverse=True), rule)


def test_the_last_checkpoint_of_an_epoch_is_the_one_at_or_before_its_end():
    rule = Retention(keep_last=1, keep_epochs_of_steps=100)
    assert select_expired([60, 99, 101, 160, 200, 230, 260], rule) == [60, 101, 160, 230]


def test_the_default_keeps_two():
    assert select_expired([100, 200, 300, 400], Retention()) == [100, 200]


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_last": -1}, {"keep_every": 0},
                                     {"keep_epochs_of_steps": 0}])  # fmt: skip
def test_a_rule_that_keeps_nothing_is_refused(options):
    with pytest.raises(ValueError, match="at least 1"):
        Retention(**options)
