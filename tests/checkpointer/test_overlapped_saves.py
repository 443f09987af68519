"""A save that overlaps with training holds the state of its iteration, to the last bit.

The overlapped copies are held until the guard asks for them, so that whatever training changed
before would be in them.
"""

import pytest
import torch
from overlap_tools import RECIPES, WIDE, Recipe, saved_differs, snapshot_of
from torch import nn
from wrapper_kinds import Momentum8, Quantised

from dcp_checkfreq import (
    Checkpointer,
    SnapshotFailed,
    find_latest_valid,
)
from dcp_checkfreq.testing import MemoryTier

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def root():
    return MemoryTier()


def checkpointer(root, parts, **options):
    options = {"every": 1, "keep_last": 100, "snapshot": "cpu"} | options
    return Checkpointer(root, parts, **options)


# --- trainings of every kind ---


@pytest.mark.parametrize(
    ("name", "halfway"),
    [*((name, False) for name in RECIPES), ("adamw", True), ("everything", True)],
)
def test_every_saved_step_is_the_state_of_its_iteration(root, late, name, halfway):
    recipe = RECIPES[name]()
    every = 4 if name == "accumulation" else 2
    wanted = {}
    with checkpointer(root, recipe.parts, every=every) as ckpt:
        for step in range(1, 7 if every == 2 else 9):
            recipe.iterate()
            if step % every == 0:
                wanted[step] = snapshot_of(recipe.parts)
                late.hold(halfway=halfway)
            ckpt.after_step()
        late.release()
    assert late.copies == len(wanted), "the copies were to be overlapped"
    assert ckpt.failures_in_a_row == 0
    for step, state in wanted.items():
        assert saved_differs(root, step, state) == []


@pytest.mark.parametrize("name", ["adamw fused", "scaler", "everything"])
def test_saving_changes_nothing_of_the_training(root, late, name):
    alone, saved = RECIPES[name](), None
    torch.manual_seed(5)
    for _ in range(6):
        alone.iterate()
    saved = RECIPES[name]()
    torch.manual_seed(5)
    with checkpointer(root, saved.parts) as ckpt:
        for _ in range(6):
            saved.iterate()
            late.release()  # a scaler that skips an update does not wait for the copy
            ckpt.wait()
            late.hold()
            ckpt.after_step()
        late.release()
    assert ckpt.failures_in_a_row == 0
    for ours, theirs in zip(alone.model.parameters(), saved.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_a_save_at_every_step_with_copies_at_full_speed_is_never_torn(root):
    recipe = RECIPES["everything"]()
    wanted = {}
    with checkpointer(root, recipe.parts) as ckpt:
        for step in range(1, 13):
            recipe.iterate()
            wanted[step] = snapshot_of(recipe.parts)
            ckpt.after_step()
    assert find_latest_valid(root, depth="digest").step == 12
    assert [saved_differs(root, step, wanted[step]) for step in wanted] == [[]] * 12


def test_accumulation_that_steps_long_after_the_save_waits_there(root, late):
    """`after_step` only where there is a step; forward and backward run four times between."""
    recipe = RECIPES["sgd momentum"]()
    wanted = {}
    with checkpointer(root, recipe.parts) as ckpt:
        for step in range(1, 4):
            for _ in range(4):
                recipe.loss().backward()
                assert step == 1 or not late._go.is_set(), "nothing waited for the copy so far"
            recipe.parts["optim"].step()
            recipe.parts["optim"].zero_grad()
            wanted[step] = snapshot_of(recipe.parts)
            late.hold()
            ckpt.after_step()
        late.release()
    assert [saved_differs(root, step, wanted[step]) for step in wanted] == [[]] * 3


# --- the guard is what keeps them whole ---


def trained(root, name, late, *, with_guard):
    """Save step 1 with a held copy, step once more, then let it go. Return what was step 1."""
    recipe = RECIPES[name]()
    ckpt = checkpointer(root, recipe.parts)
    recipe.iterate()
    if not with_guard:
        for hook in ckpt._guard._hooks:
            hook.remove()
    wanted = snapshot_of(recipe.parts)
    late.hold()
    ckpt.after_step()
    late.begun.wait(30)
    recipe.iterate()
    late.release()
    ckpt.wait()
    return ckpt, wanted


@pytest.mark.parametrize("name", ["adamw", "adamw foreach", "sgd plain", "everything"])
def test_without_the_guard_an_update_is_noticed_and_nothing_torn_is_published(root, late, name):
    ckpt, _ = trained(root, name, late, with_guard=False)
    assert "was changed while it was being copied" in ckpt.history[-1].error
    assert ckpt.last_saved_step is None
    assert find_latest_valid(root) is None
    assert root.child("step_00000001").list() == []
    ckpt.save(wait=True)
    assert find_latest_valid(root, depth="digest").step == 1
    ckpt.close()


@pytest.mark.parametrize("name", ["adamw", "adamw fused"])
def test_with_the_guard_the_same_is_whole(root, late, name):
    ckpt, wanted = trained(root, name, late, with_guard=True)
    assert ckpt.last_saved_step == 1
    assert saved_differs(root, 1, wanted) == []
    ckpt.close()


def test_changes_through_data_show_in_no_version_and_are_noticed_all_the_same(root, held):
    recipe = RECIPES["sgd plain"]()
    with checkpointer(root, recipe.parts) as ckpt:
        recipe.iterate()
        held.hold(halfway=True)
        ckpt.after_step()
        held.begun.wait(30)
        for parameter in recipe.model.parameters():
            parameter.data.add_(1)
        held.release()
        ckpt.wait()
        assert "was changed while it was being copied" in ckpt.history[-1].error
    assert find_latest_valid(root) is None


def test_the_update_of_a_fused_optimizer_nobody_registered_is_noticed_too(root, held):
    recipe = RECIPES["sgd plain"]()
    stranger = torch.optim.SGD(recipe.model.parameters(), lr=0.1, fused=True)
    with checkpointer(root, {**recipe.parts, "more": torch.ones(5)}) as ckpt:
        recipe.iterate()
        held.hold()
        ckpt.after_step()
        held.begun.wait(30)
        recipe.loss().backward()
        stranger.step()
        held.release()
        ckpt.wait()
        assert "was changed while it was being copied" in ckpt.history[-1].error


# --- what no guard protects is copied before `after_step` returns ---


class Mixed(Recipe):
    """One guarded layer among everything that may change at any moment."""

    def build(self):
        self.model = self.parts["model"] = nn.ModuleDict(
            {
                "guarded": nn.Linear(WIDE, 2 * WIDE),
                "norm": nn.BatchNorm1d(2 * WIDE),
                "foreign": nn.Linear(WIDE, WIDE),  # of an optimizer that is not registered
                "frozen": nn.Linear(WIDE, WIDE),
            }
        )
        self.model["frozen"].requires_grad_(False)
        trained = [*self.model["guarded"].parameters(), *self.model["norm"].parameters()]
        self.rate = torch.tensor(0.01)
        optim = self.parts["optim"] = torch.optim.AdamW(trained, lr=self.rate, foreach=False)
        self.foreign = torch.optim.SGD(self.model["foreign"].parameters(), lr=1.0)
        self.parts["average"] = torch.optim.swa_utils.AveragedModel(self.model["guarded"])
        self.parts["sched"] = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)
        self.parts["seen"] = {"n": 1, "list": [1], "large": torch.ones(9000), "t": torch.ones(2)}
        self.parts["view"] = self.model["guarded"].weight.detach()[3:5]
        self.parts["rng"] = torch.get_rng_state()

    def loss(self):
        mixed = self.model["norm"](self.model["guarded"](self.batch()))
        return mixed.square().mean() + self.model["foreign"](self.batch()).square().mean()


@torch.no_grad()
def change_what_is_not_guarded(recipe):
    model = recipe.model
    model["norm"](model["guarded"](recipe.batch()))  # statistics and their counter
    for name in ("foreign", "frozen"):
        for parameter in model[name].parameters():
            parameter.add_(1)
    for parameter in recipe.parts["average"].parameters():
        parameter.data.add_(1)
    recipe.parts["average"].n_averaged.add_(1)
    recipe.rate.mul_(0.1)
    recipe.parts["optim"].param_groups[0]["weight_decay"] = 0.5
    recipe.parts["sched"].last_epoch = 77
    recipe.parts["seen"]["n"] = 2
    recipe.parts["seen"]["list"].append(2)
    recipe.parts["seen"]["large"].zero_()
    recipe.parts["seen"]["t"].zero_()
    recipe.parts["seen"]["new"] = 1
    recipe.parts["rng"].zero_()


@pytest.mark.parametrize("halfway", [False, True], ids=["whole", "halfway"])
def test_what_no_guard_protects_may_change_as_soon_as_after_step_returns(root, late, halfway):
    recipe = Mixed()
    with checkpointer(root, recipe.parts) as ckpt:
        recipe.iterate()
        for step in (1, 2):  # the second one is copied by the kept plan
            wanted = snapshot_of(recipe.parts)
            late.hold(halfway=halfway)
            ckpt.after_step()
            assert late.begun.wait(30)
            change_what_is_not_guarded(recipe)
            assert not late._go.is_set()
            recipe.iterate()
            ckpt.wait()
            assert ckpt.last_saved_step == step, ckpt.history[-1].error
            assert saved_differs(root, step, wanted) == []


def test_a_small_view_of_a_guarded_parameter_is_copied_at_once(root, late):
    recipe = Mixed()
    with checkpointer(root, recipe.parts) as ckpt:
        recipe.iterate()
        wanted = snapshot_of(recipe.parts)
        late.hold()
        ckpt.after_step()
        recipe.iterate()
        ckpt.wait()
    assert saved_differs(root, 1, wanted) == []


# --- changes outside of a step ---


def changed(change, root, held, name="adamw", **options):
    """Save step 1 whole; while step 2 is copied, make a change. Return what step 2 was."""
    recipe = RECIPES[name]()
    ckpt = checkpointer(root, recipe.parts, **options)
    recipe.iterate()
    ckpt.after_step()
    ckpt.wait()
    recipe.iterate()
    wanted = snapshot_of(recipe.parts)
    held.hold(halfway=True)
    ckpt.after_step()
    assert held.begun.wait(30)
    change(recipe)
    held.release()
    ckpt.wait()
    return ckpt, recipe, wanted


def other_state(recipe):
    return {key: value + 1 for key, value in recipe.model.state_dict().items()}


IN_PLACE = {
    "load_state_dict": lambda recipe: recipe.model.load_state_dict(other_state(recipe)),
    "no_grad": lambda recipe: torch.nn.init.zeros_(recipe.model[0].weight),
    "a view": lambda recipe: recipe.model[0].weight.detach()[1:2].zero_(),
    "optimizer state": lambda recipe: (
        recipe.parts["optim"].state[recipe.model[0].weight]["exp_avg"].zero_()
    ),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_a_change_in_place_outside_of_a_step_fails_that_save_alone(root, held, change, caplog):
    ckpt, recipe, _ = changed(change, root, held)
    assert ckpt.last_saved_step == 1
    assert ckpt.failures_in_a_row == 1
    assert "changed while it was being copied" in ckpt.history[-1].error
    assert "step 2 was not saved" in caplog.text
    assert find_latest_valid(root, depth="digest").step == 1
    assert root.child("step_00000002").list() == []
    recipe.iterate()
    wanted = snapshot_of(recipe.parts)
    ckpt.after_step()
    ckpt.close()
    assert (ckpt.last_saved_step, ckpt.failures_in_a_row) == (3, 0)
    assert saved_differs(root, 3, wanted) == []


def new_group(recipe):
    extra = nn.Parameter(torch.ones(20))
    recipe.model.register_parameter("extra", extra)
    recipe.parts["optim"].add_param_group({"params": [extra]})


def swap_data(recipe):
    for parameter in recipe.model.parameters():
        parameter.data = torch.zeros_like(parameter)


def drop_grads(recipe):
    recipe.loss().backward()
    recipe.parts["optim"].zero_grad(set_to_none=True)


def load_optimizer(recipe):
    content = recipe.parts["optim"].state_dict()
    recipe.parts["optim"].load_state_dict(
        {
            **content,
            "state": {
                number: {key: value * 0 for key, value in state.items()}
                for number, state in content["state"].items()
            },
        }
    )


REPLACING = {
    "load_state_dict(assign=True)": lambda recipe: recipe.model.load_state_dict(
        other_state(recipe), assign=True
    ),
    "other data": swap_data,
    "zero_grad": drop_grads,
    "optimizer.load_state_dict": load_optimizer,
    "add_param_group": new_group,
    "to": lambda recipe: recipe.model.to(torch.float64),
    "deleted": lambda recipe: recipe.model.__delitem__(0),
}


@pytest.mark.parametrize("change", REPLACING.values(), ids=REPLACING.keys())
def test_tensors_that_are_replaced_meanwhile_leave_the_save_as_it_was(root, held, change):
    ckpt, _, wanted = changed(change, root, held)
    assert ckpt.last_saved_step == 2, ckpt.history[-1].error
    assert saved_differs(root, 2, wanted) == []
    ckpt.close()


def test_a_new_param_group_is_guarded_from_the_next_save_on(root, late):
    ckpt, recipe, _ = changed(new_group, root, late)
    recipe.model.extra.sum().backward()
    recipe.iterate()
    wanted = snapshot_of(recipe.parts)
    late.hold()
    ckpt.after_step()
    recipe.model.extra.sum().backward()
    recipe.iterate()
    ckpt.close()
    assert "extra" in wanted["model"]
    assert saved_differs(root, 3, wanted) == []


def test_weights_that_change_in_the_forward_fail_loudly_and_are_saved_blocking(root, late):
    """Embedding(max_norm=...) renormalises its weight in the forward, outside of any step."""

    def train(root, snapshot):
        torch.manual_seed(0)
        model = nn.Embedding(3000, 128, max_norm=0.1)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = {"model": model, "optim": optim}
        with checkpointer(root, parts, snapshot=snapshot) as ckpt:
            model(torch.arange(100)).sum().backward()
            optim.step()
            wanted = snapshot_of(parts)
            late.hold()
            ckpt.after_step()
            model(torch.arange(100, 200)).sum().backward()
            optim.step()
            ckpt.wait()
        return ckpt, wanted

    ckpt, _ = train(MemoryTier(), "cpu")
    assert "'model.weight' was changed" in ckpt.history[0].error
    ckpt, wanted = train(root, "blocking")
    assert saved_differs(root, 1, wanted) == []


def test_wait_for_snapshot_makes_such_a_change_safe(root, late):
    recipe = RECIPES["adamw"]()
    with checkpointer(root, recipe.parts) as ckpt:
        recipe.iterate()
        wanted = snapshot_of(recipe.parts)
        late.hold()
        ckpt.after_step()
        ckpt.wait_for_snapshot()
        swap = other_state(recipe)
        recipe.model.load_state_dict(swap)
        ckpt.wait()
        assert ckpt.last_saved_step == 1
    assert saved_differs(root, 1, wanted) == []


# --- snapshots that fail ---


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("broken"), OSError(5, "x")])
def test_a_copy_that_fails_is_told_at_the_next_update_and_reported_as_not_saved(
    root, late, error, caplog
):
    recipe = RECIPES["adamw"]()
    with checkpointer(root, recipe.parts) as ckpt:
        recipe.iterate()
        ckpt.after_step()
        ckpt.wait()
        before = root.child("step_00000001").list()
        recipe.iterate()
        late.hold()
        late.error = error
        ckpt.after_step()
        caplog.clear()
        recipe.iterate()
        at_the_update = [
            r for r in caplog.records if r.name == "dcp_checkfreq.snapshot.optimizer_guard"
        ]
        assert len(at_the_update) == 1
        assert "will not be saved: no snapshot was taken" in at_the_update[0].getMessage()
        ckpt.wait()
        assert (ckpt.last_saved_step, ckpt.failures_in_a_row) == (1, 1)
        assert find_latest_valid(root, depth="digest").step == 1
        assert root.child("step_00000001").list() == before
        wanted = snapshot_of(recipe.parts)
        ckpt.after_step()
        ckpt.wait()
        assert (ckpt.last_saved_step, ckpt.failures_in_a_row) == (3, 0)
    assert saved_differs(root, 3, wanted) == []


def test_on_error_raise_raises_before_the_update_and_the_weights_stay(root, late):
    recipe = RECIPES["adamw"]()
    ckpt = checkpointer(root, recipe.parts, on_error="raise")
    recipe.iterate()
    late.hold()
    late.error = MemoryError("no room")
    ckpt.after_step()
    before = snapshot_of(recipe.parts)["model"]
    recipe.loss().backward()
    with pytest.raises(SnapshotFailed, match="no room"):
        recipe.parts["optim"].step()
    for name, value in recipe.model.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(SnapshotFailed, match="no room"):
        ckpt.close()
    assert find_latest_valid(root) is None


def test_no_memory_for_the_buffer_fails_the_save_and_not_the_training(root, monkeypatch, late):
    from dcp_checkfreq.snapshot import pool

    recipe = RECIPES["adamw"]()
    monkeypatch.setattr(pool, "PROCESS_POOL", pool.BufferPool())

    def no_memory(size_bytes):
        raise MemoryError(f"no {size_bytes}")

    with checkpointer(root, recipe.parts) as ckpt:
        recipe.iterate()
        pool.PROCESS_POOL.drop()
        from dcp_checkfreq.snapshot.stager import PROCESS_POOL

        PROCESS_POOL.drop()
        with monkeypatch.context() as patched:
            patched.setattr(pool, "huge_buffer", no_memory)
            ckpt.after_step()
            ckpt.wait()
        assert ckpt.failures_in_a_row == 1
        assert "memory for the buffer" in ckpt.history[-1].error
        recipe.iterate()
        ckpt.after_step()
    assert ckpt.last_saved_step == 2


def test_many_failed_snapshots_in_a_row_raise(root, late):
    from dcp_checkfreq import TooManyFailures

    recipe = RECIPES["adamw"]()
    ckpt = checkpointer(root, recipe.parts, max_failures=3)
    ckpt.after_step()
    ckpt.wait()

    def train():
        for _ in range(10):
            recipe.iterate()
            late.hold()
            late.error = MemoryError("no room")
            ckpt.after_step()

    with pytest.raises(TooManyFailures, match="last published step: 1"):
        train()
    assert ckpt.step in (4, 5), "told by the next call, or by the next save at the latest"
    ckpt.close()


def test_inner_tensors_of_wrappers_are_as_they_were_then(root, late):
    """They are replaced at every step of one layer, and changed in place in the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 8))
    optimizer = Momentum8(model.parameters(), lr=0.1)
    wanted = {}
    with (
        torch.serialization.safe_globals([Quantised]),
        checkpointer(root, {"model": model, "optim": optimizer}, every=2) as ckpt,
    ):
        for step in range(1, 9):
            model(torch.ones(2, WIDE) * step).square().mean().backward()
            optimizer.step()
            optimizer.state[model[1].weight]["m"].codes.sub_(1)
            optimizer.zero_grad()
            if step % 2 == 0:
                moments = [optimizer.state[model[n].weight]["m"] for n in range(2)]
                wanted[step] = [
                    inner.clone() for one in moments for inner in (one.codes, one.scale)
                ]
                late.hold()
            ckpt.after_step()
        late.release()
    assert late.copies == len(wanted)
    assert ckpt.failures_in_a_row == 0
    names = [f"optim.state.{n}.weight.m.{name}" for n in (0, 1) for name in ("codes", "scale")]
    for step, state in wanted.items():
        assert saved_differs(root, step, dict(zip(names, state, strict=True))) == []
