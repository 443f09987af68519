"""Which rank writes what: everything once, about as many bytes each, the same on every call."""

from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.shards.assign import share_out

SIZES = st.one_of(st.integers(0, 5), st.integers(0, 1 << 20), st.sampled_from([1024, 4096]))


@st.composite
def held_by_ranks(draw):
    """Return what each rank holds; what several of them hold has one size."""
    ranks = draw(st.integers(1, 6))
    sizes = draw(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), SIZES, max_size=25))
    held = [{} for _ in range(ranks)]
    for key, size in sizes.items():
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank][key] = size
    return held


def loads(held, chosen):
    return [sum(mine[key] for key in keys) for mine, keys in zip(held, chosen, strict=True)]


@given(held=held_by_ranks())
def test_everything_is_written_once_by_a_rank_that_holds_it(held):
    chosen = share_out(held)
    assert len(chosen) == len(held)
    assert sorted(key for keys in chosen for key in keys) == sorted(
        {k for mine in held for k in mine}
    )
    assert all(keys <= mine.keys() for mine, keys in zip(held, chosen, strict=True))


@given(held=held_by_ranks())
def test_the_same_is_shared_out_the_same_way(held):
    assert share_out(held) == share_out([dict(mine) for mine in held])


@given(sizes=st.lists(SIZES, max_size=40), ranks=st.integers(1, 8))
def test_what_all_ranks_hold_is_spread_to_within_its_largest_piece(sizes, ranks):
    held = [dict(enumerate(sizes))] * ranks
    written = loads(held, share_out(held))
    assert max(written) - min(written) <= max(sizes, default=0)
    # Largest first onto the least loaded (Graham 1969): at most 4/3 of the best there is.
    best = max(max(sizes, default=0), sum(sizes) / ranks)
    assert max(written) <= 4 / 3 * best + max(sizes, default=0) / 3


@given(held=held_by_ranks())
def test_no_rank_takes_shared_pieces_while_another_holder_has_less(held):
    """Moving any shared piece to another holder would not make the two more equal."""
    chosen = share_out(held)
    written = loads(held, chosen)

    def ranks_but(rank, key):
        return [r for r, mine in enumerate(held) if key in mine and r != rank]

    for rank, keys in enumerate(chosen):
        shared = [key for key in keys if sum(key in mine for mine in held) > 1]
        if shared:
            least = min(held[rank][key] for key in shared)
            lasts = [key for key in shared if held[rank][key] == least]  # one was given out last
            assert any(
                written[rank] - least <= min(written[r] for r in ranks_but(rank, last))
                for last in lasts
            )


@given(own=st.lists(SIZES, min_size=2, max_size=6), shared=st.lists(SIZES, max_size=30))
def test_what_one_rank_has_to_write_anyway_counts_before_shared_pieces(own, shared):
    ranks = len(own)
    pieces = {f"shared{n}": size for n, size in enumerate(shared)}
    held = [{f"own{rank}": own[rank]} | pieces for rank in range(ranks)]
    written = loads(held, share_out(held))
    assert max(written) <= max(max(own), min(written) + max(shared, default=0))


def test_a_model_of_many_layers_on_four_ranks_is_within_five_percent_of_a_quarter():
    """Weights, both moments and counters of 24 blocks of a transformer, and its embedding."""
    sizes = {"embed": 50_000 * 512 * 4 // 8}
    for layer in range(24):
        for name, count in (("qkv", 3 * 512 * 512), ("out", 512 * 512), ("up", 2048 * 512)):
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                sizes[f"{layer}.{name}.{kind}"] = 4 * count
        sizes[f"{layer}.norm"] = 2048
        sizes[f"{layer}.step"] = 4
    held = [sizes] * 4
    quarter = sum(sizes.values()) / 4
    assert all(abs(load - quarter) <= 0.05 * quarter for load in loads(held, share_out(held)))


def test_no_ranks_and_nothing_held_are_no_trouble():
    assert share_out([]) == []
    assert share_out([{}, {}]) == [set(), set()]
