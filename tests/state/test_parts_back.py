"""What comes back of a checkpoint, what is refused, and that nothing is touched then."""

import copy
import itertools
import threading

import pytest
import torch
from torch import nn

from dcp_checkfreq import (
    BadLocation,
    Checkpointer,
    PerRank,
    StateMismatch,
    UnsupportedOption,
    UnsupportedState,
    find_latest_valid,
    load_part,
)


def net(*widths, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def train(model, optimizer, steps=1):
    for step in range(steps):
        x = torch.ones(2, model[0].in_features) * (step + 1)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(root, parts, step=1):
    with Checkpointer(root, parts, every=1000) as ckpt:
        ckpt.step = step
        ckpt.save(wait=True)


def restored(root, parts, **options):
    with Checkpointer(root, parts, every=1000) as ckpt:
        return ckpt.restore(**options)


def bits(value):
    """Return all of a state, to compare: tensors as dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), bytes(flat.tolist())
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(bits, value))
    return value


def job(optimizer=torch.optim.AdamW, widths=(3, 4, 2), seed=0):
    model = net(*widths, seed=seed)
    return {"model": model, "optim": optimizer(model.parameters(), lr=0.1)}


def trained(**options):
    parts = job(**options)
    train(parts["model"], parts["optim"], 2)
    return parts


# --- no step is taken, nothing is cast ---


class OwnWay(torch.optim.Optimizer):
    """Its step changes weights whatever the rate, and needs a closure."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("codes", torch.zeros(5, dtype=torch.uint8)).add_(3)
            state["row"] = {"stats": [torch.full((2, 7), 1 / 3, dtype=torch.float64)], 1: (2, "x")}
            state["half"] = parameter.to(torch.bfloat16) * 3
            parameter.add_(1)


def test_an_optimizer_is_never_stepped_to_look_at_its_state(tmp_path):
    parts = job(OwnWay)
    before = bits(parts["model"].state_dict())
    save(tmp_path, parts)
    fresh = job(OwnWay, seed=1)
    restored(tmp_path, fresh)
    assert bits(fresh["model"].state_dict()) == before
    assert not fresh["optim"].state


def test_state_of_any_dtype_shape_and_nesting_comes_back_to_a_fresh_optimizer(tmp_path):
    parts = job(OwnWay)
    parts["optim"].step(lambda: None)
    save(tmp_path, parts)
    fresh = job(OwnWay, seed=1)
    restored(tmp_path, fresh)
    assert bits(fresh["optim"].state_dict()) == bits(parts["optim"].state_dict())


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_fresh", [True, False])
def test_moments_of_another_dtype_than_the_parameter_are_not_cast(tmp_path, parameters, is_fresh):
    parts = trained()
    parts["model"].to(parameters)
    for state in parts["optim"].state.values():
        state["exp_avg"].div_(3)
    save(tmp_path, parts)
    fresh = job(seed=1) if is_fresh else trained(seed=1)
    fresh["model"].to(parameters)
    restored(tmp_path, fresh)
    assert bits(fresh["optim"].state_dict()) == bits(parts["optim"].state_dict())
    assert fresh["optim"].state[fresh["model"][0].weight]["exp_avg"].dtype == torch.float32


def test_a_parameter_without_state_has_none_afterwards(tmp_path):
    parts = job()
    parts["model"][0].weight.sum().backward()
    parts["optim"].step()
    save(tmp_path, parts)
    fresh = trained(seed=1)
    restored(tmp_path, fresh)
    assert list(fresh["optim"].state) == [fresh["model"][0].weight]


# --- what does not fit is an error, and nothing was touched ---


def another_width():
    return trained(widths=(3, 5, 2))


def a_layer_more():
    return trained(widths=(3, 4, 2, 2))


def a_layer_less():
    return trained(widths=(3, 4))


def another_dtype():
    parts = trained()
    parts["model"].double()
    return parts


def a_group_more():
    parts = trained()
    weight = parts["model"][0].weight
    group = parts["optim"].param_groups[0]
    group["params"] = [one for one in group["params"] if one is not weight]
    parts["optim"].add_param_group({"params": [weight], "lr": 0.5})
    return parts


def a_part_more():
    return {**trained(), "ema": net(3, 4)}


MISFITS = {
    another_width: r"model\.0\.weight: saved \[4, 3\], wanted \[5, 3\]",
    a_layer_more: r"lacks: model\.2\.weight",
    a_layer_less: r"more than is registered: model\.1\.weight",
    another_dtype: r"another dtype: model\.0\.weight \(torch\.float32 as torch\.float64\)",
    a_part_more: "it has no 'ema'",
}


@pytest.mark.parametrize("make", MISFITS)
def test_what_does_not_fit_is_refused_before_anything_is_touched(tmp_path, make):
    save(tmp_path, trained(seed=5))
    parts = make()
    before = bits([part.state_dict() for part in parts.values()])
    with pytest.raises(StateMismatch, match=MISFITS[make]):
        restored(tmp_path, parts)
    assert bits([part.state_dict() for part in parts.values()]) == before


def test_groups_that_were_one_take_its_options_each(tmp_path):
    parts = trained(seed=5)
    save(tmp_path, parts)
    fresh = a_group_more()
    restored(tmp_path, fresh)
    assert [group["lr"] for group in fresh["optim"].param_groups] == [0.1, 0.1]


def test_groups_with_other_options_are_not_merged(tmp_path):
    save(tmp_path, a_group_more())
    fresh = trained(seed=1)
    before = bits(fresh["optim"].state_dict())
    with pytest.raises(StateMismatch, match="saved as groups 0, 1, with other options"):
        restored(tmp_path, fresh)
    assert bits(fresh["optim"].state_dict()) == before


class Refuses:
    """Loads itself, then finds that it cannot."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        if state["value"] == 13:
            raise ValueError("not this one")


class RefusingLayer(nn.Linear):
    def get_extra_state(self):
        return {"bad": True}

    def set_extra_state(self, state):
        raise ValueError("not this one")


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("kind", ["object", "module"])
def test_a_part_that_cannot_load_leaves_all_as_it_was(tmp_path, where, kind):
    def make(value, seed):
        bad = Refuses(value) if kind == "object" else nn.Sequential(net(2, 3), RefusingLayer(2, 2))
        others = {**trained(seed=seed), "good": Refuses(value - 1), "n": [value]}
        return {"bad": bad, **others} if where == "first" else {**others, "bad": bad}

    save(tmp_path, make(13, seed=5))
    parts = make(3, seed=1)
    objects = [part for part in parts.values() if not isinstance(part, list)]
    before = bits([part.state_dict() for part in objects])
    with Checkpointer(tmp_path, parts, every=1000) as ckpt:
        with pytest.raises(ValueError, match="not this one"):
            ckpt.restore()
        assert bits([part.state_dict() for part in objects]) == before
        assert parts["n"] == [3]


def test_a_hook_that_changes_what_is_loaded_is_noticed(tmp_path):
    save(tmp_path, trained(seed=5))
    parts = trained(seed=1)

    def halve(module, state, prefix, *_):
        state["0.weight"] = state["0.weight"] / 2

    parts["model"].register_load_state_dict_pre_hook(halve)
    before = bits(parts["model"].state_dict())
    with pytest.raises(StateMismatch, match=r"are not what was saved: 0\.weight"):
        restored(tmp_path, parts)
    assert bits(parts["model"].state_dict()) == before


class Adapted(nn.Module):
    """Its state dict has only what is trained; the base comes from elsewhere."""

    def __init__(self, seed):
        super().__init__()
        self.base = net(3, 3, seed=4)
        self.adapter = net(3, 3, seed=seed)

        def leave_out(module, state, prefix, _):
            for key in [key for key in state if key.startswith(f"{prefix}base.")]:
                del state[key]

        self.register_state_dict_post_hook(leave_out)


def test_what_a_hook_of_the_state_dict_leaves_out_stays_as_it_is(tmp_path):
    saved = Adapted(5)
    save(tmp_path, {"model": saved})
    fresh = Adapted(6)
    base = bits(fresh.base.state_dict())
    restored(tmp_path, {"model": fresh})
    assert bits(fresh.state_dict()) == bits(saved.state_dict())
    assert bits(fresh.base.state_dict()) == base


def test_a_hook_that_renames_and_nothing_that_takes_it_back_is_noticed(tmp_path):
    def renaming(seed):
        model = net(3, 3, seed=seed)

        def rename(module, state, prefix, _):
            state["other"] = state.pop("0.weight")

        model.register_state_dict_post_hook(rename)
        return {"model": model}

    save(tmp_path, renaming(5))
    parts = renaming(6)
    before = bits(parts["model"].state_dict())
    with pytest.raises(StateMismatch, match="does not take what was saved: other"):
        restored(tmp_path, parts)
    assert bits(parts["model"].state_dict()) == before


# --- parts of it ---


def test_only_some_parts(tmp_path):
    saved = {**trained(seed=5), "note": 5}
    save(tmp_path, saved)
    parts = {**trained(seed=1), "note": 1}
    before = bits(parts["optim"].state_dict())
    found = restored(tmp_path, parts, only=["model"])
    assert bits(parts["model"].state_dict()) == bits(saved["model"].state_dict())
    assert bits(parts["optim"].state_dict()) == before
    assert parts["note"] == 1
    assert found.left_out == ()


def test_an_optional_part_that_was_added_keeps_what_it_has(tmp_path, caplog):
    save(tmp_path, {**trained(seed=5), "old": 1})
    parts = {**trained(seed=1), "ema": net(3, 4, 2, seed=9)}
    before = bits(parts["ema"].state_dict())
    found = restored(tmp_path, parts, optional=["ema"])
    assert bits(parts["ema"].state_dict()) == before
    assert (found.absent, found.left_out) == (("ema",), ("old",))
    assert "has no ema" in caplog.text
    assert "also holds old" in caplog.text


def test_what_fits_is_taken_and_the_rest_listed(tmp_path, caplog):
    saved = trained(widths=(3, 4, 2, 2), seed=5)
    saved["model"][0].half()
    save(tmp_path, saved)
    parts = {
        "model": nn.ModuleDict({"0": nn.Linear(3, 4), "1": nn.Linear(4, 2), "new": nn.Linear(1, 1)})
    }
    found = restored(tmp_path, parts, strict=False)
    mine = found.differences["model"]
    assert mine.missing == ["model.new.weight", "model.new.bias"]
    assert mine.unexpected == ["model.2.weight", "model.2.bias"]
    assert mine.cast == [
        f"model.0.{one} (torch.float16 as torch.float32)" for one in ("weight", "bias")
    ]
    assert torch.equal(parts["model"]["0"].weight, saved["model"][0].weight.float())
    assert torch.equal(parts["model"]["1"].weight, saved["model"][1].weight)
    assert "model.new.weight" in caplog.text


def test_a_part_under_another_name(tmp_path):
    saved = {**trained(seed=5), "ema": net(3, 4, 2, seed=8)}
    save(tmp_path, saved)
    parts = {"model": net(3, 4, 2)}
    restored(tmp_path, parts, rename={"model": "ema"})
    assert bits(parts["model"].state_dict()) == bits(saved["ema"].state_dict())


def test_a_pretrained_base_below_other_names(tmp_path):
    saved = trained(seed=5)
    save(tmp_path, saved)
    parts = {"lora": nn.ModuleDict({"base": net(3, 4, 2), "down": nn.Linear(3, 1)})}
    found = restored(tmp_path, parts, rename={"lora.base": "model"}, strict=False)
    assert bits(parts["lora"]["base"].state_dict()) == bits(saved["model"].state_dict())
    assert found.differences["lora"].missing == ["lora.down.weight", "lora.down.bias"]
    assert found.differences["lora"].unexpected == []
    assert found.left_out == ("optim",)


def test_an_optimizer_that_was_split_in_two(tmp_path):
    saved = trained(seed=5)
    save(tmp_path, saved)
    model = net(3, 4, 2)
    parts = {
        "model": model,
        "first": torch.optim.AdamW(model[0].parameters(), lr=0.3),
        "second": torch.optim.AdamW(model[1].parameters(), lr=0.3),
    }
    restored(tmp_path, parts, rename={"first": "optim", "second": "optim"})
    wanted = saved["optim"].state_dict()["state"]
    got = [parts[name].state_dict() for name in ("first", "second")]
    assert bits([*got[0]["state"].values(), *got[1]["state"].values()]) == bits([*wanted.values()])
    assert [one["param_groups"][0]["lr"] for one in got] == [0.1, 0.1]


def test_unknown_names_are_refused(tmp_path):
    save(tmp_path, trained())
    for option in ({"only": ["modle"]}, {"optional": ["ema"]}, {"rename": {"modle.0": "model"}}):
        with pytest.raises(UnsupportedOption, match="no part is called"):
            restored(tmp_path, trained(), **option)


# --- load_part ---


def test_one_part_without_a_run(tmp_path, caplog):
    saved = trained(seed=5)
    save(tmp_path, saved)
    model = net(3, 4, 2)
    caplog.clear()
    assert not load_part(find_latest_valid(tmp_path), "model", into=model)
    assert caplog.text == "", "who asks for one part knows that there are others"
    assert bits(model.state_dict()) == bits(saved["model"].state_dict())
    before = bits(model.state_dict())
    bigger = net(3, 4, 2, 2, seed=7)
    with pytest.raises(StateMismatch, match=r"lacks: model\.2"):
        load_part(find_latest_valid(tmp_path), "model", into=bigger)
    found = load_part(find_latest_valid(tmp_path), "model", into=bigger, strict=False)
    assert found.missing == ["model.2.weight", "model.2.bias"]
    assert bits(bigger[:2].state_dict()) == before


def test_no_checkpoint_is_said_so(tmp_path):
    with pytest.raises(BadLocation, match="has found no whole checkpoint"):
        load_part(find_latest_valid(tmp_path), "model", into=net(1, 1))


# --- one way in ---


def sparse():
    return torch.eye(200).to_sparse()


REFUSED = {
    "lock": ({"x": {"b": threading.Lock()}}, r"'part\.x\.b' is a value of type _thread\.lock"),
    "generator": ({"it": [0, (x for x in ())]}, r"'part\.it\.1' is a value of type generator"),
    "sparse": (
        {"deep": [sparse().to("meta")]},
        r"'part\.deep\.0' is a torch\.sparse_coo tensor",
    ),
    "meta": ({"w": (torch.empty(3, device="meta"),)}, r"'part\.w\.0' is a meta tensor"),
    "lambda": ({"f": copy.copy}, r"'part\.f'"),
}


@pytest.mark.parametrize(("part", "said"), REFUSED.values(), ids=REFUSED)
def test_what_can_never_be_saved_is_refused_when_it_is_registered(tmp_path, part, said):
    with pytest.raises(UnsupportedState, match=said):
        Checkpointer(tmp_path, {"model": net(2, 2), "part": part}, every=1000)


def test_what_the_first_step_makes_is_refused_after_it_whatever_on_error_says(tmp_path):
    parts = job(OwnWay)
    with Checkpointer(tmp_path, parts, every=1000, on_error="log") as ckpt:
        ckpt.restore()
        parts["optim"].step(lambda: None)
        state = parts["optim"].state[parts["model"][0].weight]
        state["history"] = {"kept": [sparse().to("meta")]}
        with pytest.raises(UnsupportedState, match=r"'optim\.state\.0\.weight\.history\.kept\.0'"):
            ckpt.after_step()


def test_a_module_with_nothing_in_it_is_saved(tmp_path):
    save(tmp_path, {"relu": nn.ReLU(), "own": PerRank(3)})
    parts = {"relu": nn.ReLU(), "own": PerRank(0)}
    restored(tmp_path, parts)
    assert parts["own"].value == 3


# --- a parameter that the optimizer does not know ---


def test_a_replaced_parameter_is_named_when_registered_and_in_a_later_save(tmp_path):
    def replace(parts):
        parts["model"][1].weight = nn.Parameter(torch.ones(2, 4))

    parts = job()
    replace(parts)
    text = r"number 2 of shape \[2, 4\].*replaced.*as model\.1\.weight may.*make it anew"
    with pytest.raises(UnsupportedState, match=text):
        Checkpointer(tmp_path, parts, every=1)
    parts = job()
    with Checkpointer(tmp_path, parts, every=1) as ckpt:
        train(parts["model"], parts["optim"])
        ckpt.after_step()
        replace(parts)
        with pytest.raises(UnsupportedState, match=text):
            ckpt.after_step()
    assert find_latest_valid(tmp_path).step == 1
