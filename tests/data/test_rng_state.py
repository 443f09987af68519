"""Random states come back exactly, each rank's own, from values that no code is run for."""

import io
import random

import numpy as np
import pytest
import torch

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.data import DataStateError, RNGState, seed_everything
from dcp_checkfreq.state.app_state import AppState
from dcp_checkfreq.state.unpacked import unpack

BIT_GENERATORS = ["PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937"]


def some_generators(seed=0):
    kinds = {name: np.random.Generator(getattr(np.random, name)(seed)) for name in BIT_GENERATORS}
    own_torch = torch.Generator()
    own_torch.manual_seed(seed)
    return kinds | {
        "legacy": np.random.RandomState(seed),
        "python": random.Random(seed),
        "torch": own_torch,
    }


def draw(generators=None):
    """Draw from all there is; normals too, of which generators may keep a second one for later."""
    found = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    found += [torch.rand(()).item(), torch.randn(()).item()]
    for generator in (generators or {}).values():
        if isinstance(generator, torch.Generator):
            found.append(torch.rand((), generator=generator).item())
        elif isinstance(generator, random.Random):
            found.append(generator.gauss(0, 1))
        else:
            found += (
                [generator.normal(), generator.integers(10**9)]
                if hasattr(generator, "bit_generator")
                else [generator.randn(), generator.randint(10**9)]
            )
    return found


def test_every_state_comes_back_exactly_through_the_safe_unpickler():
    seed_everything(7)
    generators = some_generators()
    rng = RNGState(generators=generators)
    draw(generators)  # an odd number of normals: the second of the pair is part of the state
    stream = io.BytesIO()
    torch.save(rng.state_dict(), stream)
    wanted = [draw(generators) for _ in range(3)]
    stream.seek(0)
    rng.load_state_dict(torch.load(stream, weights_only=True))
    assert [draw(generators) for _ in range(3)] == wanted
    assert len(stream.getvalue()) < 64 << 10


def test_it_comes_back_from_a_checkpoint(tmp_path):
    generators = some_generators()
    with Checkpointer(tmp_path, {"rng": RNGState(generators=generators)}, every=1) as ckpt:
        ckpt.save(wait=True)
        wanted = draw(generators)
    others = some_generators(5)
    seed_everything(99)
    with Checkpointer(tmp_path, {"rng": RNGState(generators=others)}, every=1) as ckpt:
        ckpt.restore()
        assert draw(others) == wanted


def test_it_is_saved_under_a_key_of_its_rank():
    assert list(RNGState(rank=3).state_dict()) == ["rank3"]
    with pytest.raises(DataStateError, match=r"no 'rank4' in it, only \['rank3'\]"):
        RNGState(rank=4).load_state_dict(RNGState(rank=3).state_dict())


def test_each_rank_gets_its_own_back():
    captured, wanted = {}, []
    for rank in range(2):
        seed_everything(0, rank=rank)
        captured |= AppState({"rng": RNGState(rank=rank)}, rank).capture()
        wanted.append(draw())
    for rank in range(2):
        seed_everything(5)
        RNGState(rank=rank).value = unpack(captured[f"rng/rank{rank}"])
        assert draw() == wanted[rank]
    assert wanted[0] != wanted[1]


def test_a_new_rank_gets_numbers_of_its_own_and_says_so(caplog):
    drawn = {}
    for rank, step, seed in ((2, 10, 1), (3, 10, 1), (2, 11, 1), (2, 10, 2), (2, 10, 1)):
        generators = some_generators()
        seed_everything(0)
        RNGState(seed, generators=generators).absent(rank, step)
        found = draw(generators)
        assert drawn.setdefault((rank, step, seed), found) == found
    numbers = [number for found in drawn.values() for number in found]
    assert len(set(numbers)) == len(numbers)
    assert "step 11 has no random states of rank 2" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state | {"format": 2}, "format 2, this version reads 1"),
        (lambda state: {k: v for k, v in state.items() if k != "torch"}, "none of random states"),
        (lambda state: None, "None"),
        (
            lambda state: state | {"generators": {"g": ("Philox", {})}},
            "was a Philox, now it is a PCG64: pass one of the kind that was, or leave it out",
        ),
        (
            lambda state: state | {"numpy": {"bit_generator": "MT19937"}},
            "damaged, restore an older",
        ),
        (lambda state: state | {"torch": state["torch"][:100]}, "damaged, restore an older one"),
        (lambda state: state | {"generators": {"g": ("PCG64", {"state": 5})}}, "damaged"),
        (lambda state: state | {"generators": 5}, "none of random states"),
    ],
)
def test_a_state_that_does_not_fit_sets_nothing_and_says_what_to_do(change, said):
    generators = {"g": np.random.default_rng(1)}
    rng = RNGState(generators=generators, rank=0)
    state = rng.value
    draw(generators)
    now = rng.value
    with pytest.raises(DataStateError, match=f"RNGState: .*{said}.*Nothing was changed"):
        rng.load_state_dict({"rank0": change(state)})
    wanted = draw(generators)
    rng.value = now
    assert draw(generators) == wanted  # the refused state changed nothing
    rng.value = state
    assert draw(generators) != wanted


def test_generators_that_came_or_went_are_told_and_the_rest_is_restored(caplog):
    old, new = np.random.default_rng(1), np.random.default_rng(2)
    state = RNGState(generators={"old": old, "both": old}, rank=0).state_dict()
    wanted = old.random()
    kept = new.random()
    new = np.random.default_rng(2)
    both = np.random.default_rng(3)
    RNGState(generators={"new": new, "both": both}, rank=0).load_state_dict(state)
    assert (both.random(), new.random()) == (wanted, kept)
    assert "no generator 'old' is registered now" in caplog.text
    assert "no generator 'new' is in the checkpoint" in caplog.text


def test_what_is_no_generator_is_refused():
    with pytest.raises(TypeError, match="'g' must be"):
        RNGState(generators={"g": 5})


def test_seed_everything_makes_the_same_numbers_and_a_rank_its_own():
    def after(seed, **options):
        seed_everything(seed, **options)
        return tuple(draw())

    assert after(5) == after(5) != after(6)
    found = [after(5), after(5, rank=0), after(5, rank=1), after(6, rank=0)]
    assert len({number for numbers in found for number in numbers}) == 4 * 6
    for bad in (-1, 1 << 64, 1.0):
        with pytest.raises(ValueError, match="seed"):
            seed_everything(bad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_state_of_the_device_comes_back():
    seed_everything(3)
    torch.rand(5, device="cuda")
    rng = RNGState(rank=0)
    state = rng.state_dict()
    wanted = torch.rand(5, device="cuda")
    torch.rand(5, device="cuda")
    rng.load_state_dict(state)
    assert torch.equal(torch.rand(5, device="cuda"), wanted)
