import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.data.cache.eviction import (
    BLOCK_BYTES,
    CachedFile,
    bytes_to_free,
    charge_bytes,
    plan_eviction,
)

SIZES = st.integers(0, 1 << 40)
ENTRIES = st.lists(
    st.builds(
        CachedFile, st.text("abcdef", min_size=1), st.integers(0, 50_000), st.integers(0, 20)
    ),
    unique_by=lambda entry: entry.name,
)


@given(SIZES)
def test_a_file_counts_for_the_blocks_that_it_takes(size_bytes):
    assert size_bytes <= charge_bytes(size_bytes) < size_bytes + BLOCK_BYTES
    assert charge_bytes(size_bytes) % BLOCK_BYTES == 0


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="negative"):
        charge_bytes(-1)


@given(SIZES, SIZES, st.integers(1, 1 << 40), st.floats(0.01, 1.0))
def test_what_is_to_be_freed_makes_room_and_no_more_than_the_low_mark_asks(used, need, cap, low):
    need = min(need, cap)
    free = bytes_to_free(used_bytes=used, need_bytes=need, max_bytes=cap, low=low)
    after = used + need - free
    assert after <= cap
    if used + need <= cap:
        assert free == 0
    else:
        assert after == max(int(low * cap), need)
        assert free <= used


def test_what_never_fits_is_refused():
    with pytest.raises(ValueError, match="never fit"):
        bytes_to_free(used_bytes=0, need_bytes=11, max_bytes=10, low=0.9)


@given(ENTRIES, st.integers(0, 400_000), st.sets(st.text("abcdef", min_size=1)))
def test_the_plan_is_the_shortest_run_of_the_oldest_that_is_enough(entries, free, busy):
    plan = plan_eviction(entries, free_bytes=free, busy=busy)
    left = [entry for entry in entries if entry not in plan and entry.name not in busy]
    freed = [charge_bytes(entry.size_bytes) for entry in plan]
    assert not {entry.name for entry in plan} & busy
    assert plan == sorted(plan, key=lambda entry: (entry.last_use_ns, entry.name))
    assert all(
        entry.size_bytes == 0 or (entry.last_use_ns, entry.name) > (plan[-1].last_use_ns, "")
        for entry in left
        if plan
    )
    if sum(freed) < free:
        assert not [entry for entry in left if entry.size_bytes]
    elif plan:
        assert sum(freed[:-1]) < free


def lru_hit_rate(count, capacity, *, low, epochs=6):
    """Return the part of all requests after the first epoch that find their file."""
    rng = random.Random(0)
    last_use: dict[int, int] = {}
    now = hits = 0
    for epoch in range(epochs):
        for item in rng.sample(range(count), count):
            now += 1
            hits += epoch > 0 and item in last_use
            if item not in last_use:
                free = bytes_to_free(
                    used_bytes=len(last_use) * BLOCK_BYTES,
                    need_bytes=BLOCK_BYTES,
                    max_bytes=capacity * BLOCK_BYTES,
                    low=low,
                )
                entries = [CachedFile(str(name), 1, used) for name, used in last_use.items()]
                for victim in plan_eviction(entries, free_bytes=free) if free else []:
                    del last_use[int(victim.name)]
            last_use[item] = now
    return hits / (count * (epochs - 1))


@pytest.mark.parametrize(("part", "rate"), [(0.25, 0.03), (0.5, 0.14), (0.75, 0.36), (0.9, 0.59)])
def test_reshuffled_epochs_hit_as_seldom_with_lru_as_the_page_says(part, rate):
    """With ``keep`` it is ``part`` itself. This is why ``keep`` is the default."""
    assert lru_hit_rate(400, int(400 * part), low=0.9) == pytest.approx(rate, abs=0.03)
