"""Tensors that consist of others: saved as those, put together again."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from wrapper_kinds import (
    Momentum8,
    Odd,
    Other,
    Quantised,
    assert_same,
    inner_of,
    quantised,
)

from dcp_checkfreq import (
    Checkpointer,
    StateMismatch,
    UnsupportedState,
    find_latest_valid,
    load_part,
)


def save(root, parts):
    with Checkpointer(root, parts, every=1000) as ckpt:
        ckpt.step = 1
        ckpt.save(wait=True)


def restored(root, parts, **options):
    with Checkpointer(root, parts, every=1000) as ckpt:
        return ckpt.restore(**options)


@pytest.fixture
def known():
    """Let Quantised be made of what is in a checkpoint, as torchao does for its classes."""
    with torch.serialization.safe_globals([Quantised]):
        yield


def two(shape=(4, 6), seed=0):
    made = torch.Generator().manual_seed(seed)
    return TwoTensor(torch.rand(shape, generator=made), torch.rand(shape, generator=made))


def nested(seed=0):
    return TwoTensor(two(seed=seed), two(seed=seed + 1))


def net(make, seed, *, as_buffer=False):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    if as_buffer:
        module.register_buffer("table", make(seed=seed))
    else:
        module[0].weight = nn.Parameter(make(seed=seed), requires_grad=False)
    return module


def weight(module):
    return getattr(module, "table", module[0].weight)


KINDS = {"quantised": quantised, "two": two, "nested": nested}


@pytest.mark.parametrize("as_buffer", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_a_module_gets_its_wrappers_back_in_all_bits(tmp_path, make, as_buffer):
    module, fresh = net(make, 1, as_buffer=as_buffer), net(make, 5, as_buffer=as_buffer)
    save(tmp_path, {"model": module})
    live = weight(fresh)
    restored(tmp_path, {"model": fresh})
    assert weight(fresh) is live
    assert_same(weight(fresh), weight(module))
    assert torch.equal(fresh[1].weight, module[1].weight)


def test_one_part_of_a_checkpoint_goes_into_a_module_with_wrappers(tmp_path):
    module, fresh = net(quantised, 1), net(quantised, 5)
    save(tmp_path, {"model": module})
    load_part(find_latest_valid(tmp_path).path, "model", into=fresh)
    assert_same(fresh[0].weight, module[0].weight)


def test_stock_dcp_reads_the_inner_tensors_as_plain_ones(tmp_path):
    module = net(quantised, 1)
    save(tmp_path, {"model": module})
    target = {
        "model.0.weight.codes": torch.zeros(4, 6, dtype=torch.int8),
        "model.0.weight.scale": torch.zeros(4),
    }
    dcp.load(target, checkpoint_id=find_latest_valid(tmp_path).path)
    assert torch.equal(target["model.0.weight.codes"], module[0].weight.codes)
    assert torch.equal(target["model.0.weight.scale"], module[0].weight.scale)


def plain(seed=0):
    return torch.rand(4, 6, generator=torch.Generator().manual_seed(seed))


def other(seed=0):
    return quantised(seed=seed, kind=Other)


def another_zero(seed=0):
    return quantised(seed=seed, zero=3)


def longer(seed=0):
    return quantised(5, seed=seed)


MISFITS = {
    "plain here": (quantised, plain, "plain tensor here, and was saved as a wrapper"),
    "plain there": (plain, quantised, "a Quantised here, and was saved as a plain tensor"),
    "class": (quantised, other, r"saved as .*Quantised, wanted .*Other"),
    "context": (quantised, another_zero, r"was saved with \(0,\), and has \(3,\) here"),
    "shape": (quantised, longer, r"0\.weight\.codes: saved \[4, 6\], wanted \[5, 6\]"),
    "others inside": (two, nested, r"of a\.a, a\.b, b\.a, b\.b here, and was saved as one of a, b"),
}


@pytest.mark.parametrize(("saved", "wanted", "text"), MISFITS.values(), ids=MISFITS.keys())
def test_what_does_not_fit_is_named_and_nothing_is_touched(tmp_path, saved, wanted, text):
    save(tmp_path, {"model": net(saved, 1)})
    fresh = net(wanted, 5)
    before = {path: one.clone() for path, one in inner_of(fresh[0].weight).items()}
    with pytest.raises(StateMismatch, match=text):
        restored(tmp_path, {"model": fresh})
    after = inner_of(fresh[0].weight)
    assert all(torch.equal(after[path], one) for path, one in before.items())
    assert torch.equal(fresh[1].weight, net(wanted, 5)[1].weight)


def scaled(scales, *, seed=0):
    """The same shape, with more or fewer scales."""
    return Quantised(quantised(seed=seed).codes, torch.rand(scales))


@pytest.mark.parametrize(
    ("saved", "wanted", "said"),
    [
        (
            scaled(4),
            scaled(7),
            "model.0.weight.scale: saved [4], wanted [7] (shapes differ)",
        ),
        (
            TwoTensor(two(), scaled(2)),
            TwoTensor(two(), scaled(9)),
            "model.0.weight.b.scale: saved [2], wanted [9] (shapes differ)",
        ),
        (
            nested(),
            TwoTensor(two((3, 5)), two((3, 5))),
            "model.0.weight.a.a: saved [4, 6], wanted [3, 5] (shapes differ), "
            "model.0.weight.a.b: saved [4, 6], wanted [3, 5] (shapes differ), "
            "model.0.weight.b.a: saved [4, 6], wanted [3, 5] (shapes differ), "
            "model.0.weight.b.b: saved [4, 6], wanted [3, 5] (shapes differ)",
        ),
    ],
    ids=["scales", "inside of another", "all"],
)
def test_inner_tensors_of_other_sizes_are_named_by_whole_key_with_both_sizes(
    tmp_path, saved, wanted, said
):
    save(tmp_path, {"model": net(lambda seed: saved, 1)})
    fresh = net(lambda seed: wanted, 5)
    before = {path: one.clone() for path, one in inner_of(fresh[0].weight).items()}
    with pytest.raises(StateMismatch) as caught:
        restored(tmp_path, {"model": fresh})
    assert f"it does not fit: {said}" in str(caught.value)
    assert all(torch.equal(inner_of(fresh[0].weight)[path], one) for path, one in before.items())


def test_a_context_that_is_not_plain_is_compared_by_its_text(tmp_path):
    save(tmp_path, {"model": net(lambda seed: quantised(seed=seed, zero=Odd(1)), 1)})
    fresh = net(lambda seed: quantised(seed=seed, zero=Odd(1)), 5)
    restored(tmp_path, {"model": fresh})
    assert_same(fresh[0].weight, quantised(seed=1))
    fresh = net(lambda seed: quantised(seed=seed, zero=Odd(2)), 5)
    with pytest.raises(StateMismatch, match=r"Odd\(1\),\), and has \(Odd\(2\)"):
        restored(tmp_path, {"model": fresh})


class Failing:
    """Lets a restore fail after the module got its wrappers."""

    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        if self.fails:
            raise ValueError("no")

    fails = False


def test_a_restore_that_fails_later_puts_wrappers_back(tmp_path):
    class Own(nn.Linear):
        def _load_from_state_dict(self, *args):
            super()._load_from_state_dict(*args)

    def parts(seed):
        module = net(quantised, seed)
        module.append(Own(2, 2))
        return {"model": module, "z": Failing()}

    save(tmp_path, parts(1))
    fresh = parts(5)
    fresh["z"].fails = True
    with pytest.raises(Exception, match="no"):
        restored(tmp_path, fresh)
    assert_same(fresh["model"][0].weight, nn.Parameter(quantised(seed=5), requires_grad=False))


# --- optimizers and values ---


def trained(steps, seed=0, **options):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    optimizer = Momentum8(module.parameters(), **options)
    train(module, optimizer, steps)
    return {"model": module, "optim": optimizer}


def train(module, optimizer, steps):
    for step in range(steps):
        module(torch.ones(2, 6) * (step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "stepped"])
def test_quantised_state_of_an_optimizer_comes_back(tmp_path, known, steps):
    parts, fresh = trained(3), trained(steps, seed=1)
    save(tmp_path, parts)
    restored(tmp_path, fresh)
    for one, name in zip(parts["model"].parameters(), ("0.weight", "0.bias"), strict=False):
        now = fresh["optim"].state[fresh["model"].get_parameter(name)]
        was = parts["optim"].state[one]
        assert now.keys() == was.keys()
        if was:
            assert now["step"] == was["step"] == 3
            assert_same(now["m"], was["m"])
    for job in (parts, fresh):
        train(job["model"], job["optim"], 2)
    for one, same in zip(parts["model"].parameters(), fresh["model"].parameters(), strict=True):
        assert torch.equal(one, same)


def test_state_that_no_restart_could_make_is_refused_after_the_first_step(tmp_path):
    parts = trained(0)
    with Checkpointer(tmp_path, parts, every=1) as ckpt:
        train(parts["model"], parts["optim"], 1)
        with pytest.raises(UnsupportedState, match=r"'optim\.state\.0\.weight\.m'.*add_safe_gl"):
            ckpt.after_step()
    assert find_latest_valid(tmp_path) is None


def test_a_class_that_is_not_known_at_the_restart_is_named(tmp_path):
    with torch.serialization.safe_globals([Quantised]):
        save(tmp_path, trained(1))
    with pytest.raises(StateMismatch, match=r"state\.0\.weight\.m' was saved as a .*Quantised"):
        restored(tmp_path, trained(0))


def test_wrappers_in_a_plain_value_come_back(tmp_path):
    parts = {"deep": {"w": quantised(200, 200, seed=1), 3: [two(seed=2), (nested(seed=3),)]}}
    fresh = {"deep": {"w": quantised(200, 200, seed=5), 3: [two(seed=6), (nested(seed=7),)]}}
    save(tmp_path, parts)
    restored(tmp_path, fresh)
    assert_same(fresh["deep"]["w"], parts["deep"]["w"])
    assert_same(fresh["deep"][3][0], parts["deep"][3][0])
    assert_same(fresh["deep"][3][1][0], parts["deep"][3][1][0])


def test_wrappers_in_a_value_of_an_unknown_class_are_named(tmp_path):
    save(tmp_path, {"deep": {"w": quantised(seed=1)}})
    fresh = {"deep": {"w": None}}
    with pytest.raises(StateMismatch, match=r"'deep' was saved as a .*Quantised.*add_safe_globals"):
        restored(tmp_path, fresh)
    assert fresh["deep"] == {"w": None}
