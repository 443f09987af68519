"""An error of the loop ends in a save of the last complete step, or in a line that says why not."""

import errno
import logging
import random

import pytest
import torch
from torch import nn

from dcp_checkfreq import Checkpointer, PerRank, SaveFailed, find_latest_valid
from dcp_checkfreq.checkpointer.last_step import LastStep
from dcp_checkfreq.data import ResumableIterator, RNGState
from dcp_checkfreq.testing import Fault, FaultyTier, ForwardingTier, ManualClock, MemoryTier


class Boom(Exception):
    pass


class Half(torch.optim.Optimizer):
    """Fails in the middle of a step when told to. Writes as old code does, past torch's counts."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.fails = False

    def step(self):
        for number, one in enumerate(self.param_groups[0]["params"]):
            if self.fails and number == 1:
                raise Boom("in the middle of a step")
            one.data.add_(1.0)
            self.state[one]["n"] = self.state[one].get("n", 0) + 1


class Job:
    """A loop of three whole steps, and a fourth that runs into an error somewhere."""

    def __init__(self, optim=torch.optim.AdamW, norm=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), norm or nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.model[0].register_buffer("table", torch.ones(50_000))
        self.optim = optim(self.model.parameters())
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 2)
        self.parts = {
            "model": self.model,
            "optim": self.optim,
            "sched": self.sched,
            "seen": {"samples": 0, "order": [3, 1, 2], "mask": torch.zeros(3)},
            "rng": PerRank(torch.Generator().manual_seed(1)),
        }

    def step(self, ckpt, at=lambda place: None):
        at("begin")
        self.parts["seen"]["samples"] += 2
        self.parts["seen"]["mask"] += 1
        batch = torch.randn(6, 4, generator=self.parts["rng"].value)
        at("fetched")
        self.optim.zero_grad()
        loss = self.model.train()(batch).sum()
        at("forward")
        loss.backward()
        at("backward")
        self.optim.step()
        at("stepped")
        self.sched.step()
        ckpt.after_step()

    def state(self):
        parts = self.parts
        return {
            "model": {key: one.clone() for key, one in self.model.state_dict().items()},
            "optim": repr(self.optim.state_dict()),
            "sched": dict(self.sched.state_dict()),
            "seen": repr(parts["seen"]),
            "rng": parts["rng"].value.get_state(),
        }


def same(one, other):
    return all(
        torch.equal(value, other[key])
        if isinstance(value, torch.Tensor)
        else same(value, other[key])
        if isinstance(value, dict)
        else value == other[key]
        for key, value in one.items()
    )


def run(root, parts, train, error=Boom, **options):
    with pytest.raises(error), Checkpointer(root, parts, **{"every": 1000} | options) as ckpt:
        train(ckpt)


def step_and_fail(ckpt):
    ckpt.after_step()
    raise Boom


def fail_at(root, place, job=None, do=lambda job: None, error=Boom, **options):
    """Return the state after step 3; step 4 fails at ``place``."""
    job = job or Job()

    def at(here):
        if here == place:
            do(job)
            raise error(f"at {here}")

    whole = {}

    def train(ckpt):
        ckpt.restore()
        for _ in range(3):
            job.step(ckpt)
        whole.update(job.state())
        job.step(ckpt, at)

    run(root, job.parts, train, error, **options)
    return whole


def restored(root, job=None):
    job = job or Job()
    with Checkpointer(root, job.parts, every=1000) as ckpt:
        found = ckpt.restore()
    return None if found is None else found.step, job.state()


def said(caplog):
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("after ")]


@pytest.mark.parametrize("place", ["begin", "fetched"])
def test_an_error_before_the_model_has_moved_ends_in_a_save_of_the_last_step(
    tmp_path, caplog, place
):
    whole = fail_at(tmp_path, place)
    step, state = restored(tmp_path)
    assert step == 3
    assert same(state, whole), "values that have moved on are those of the step"
    assert said(caplog) == ["after Boom: step 3 was saved"]


def test_a_model_without_buffers_is_saved_after_its_backward_too(tmp_path, caplog):
    def job():
        return Job(norm=nn.LayerNorm(8))

    whole = fail_at(tmp_path, "backward", job())
    step, state = restored(tmp_path, job())
    assert step == 3
    assert same(state, whole)


def moved_constant(job):
    job.model[0].table.data.mul_(2)


def one_row_of_a_table(job):
    job.model[0].table.data[20_000] = 5


def uncounted_after_counted(job):
    job.model[1].running_mean.data.mul_(2)


def replaced_buffer(job):
    job.model[1].running_var = job.model[1].running_var * 2


def loaded_optimizer(job):
    job.optim.load_state_dict(job.optim.state_dict())


def other_rate(job):
    job.optim.param_groups[0]["lr"] = 7.0


def clipped_weight(job):
    with torch.no_grad():
        job.model[0].weight.clamp_(-0.1, 0.1)


def other_part(job):
    job.parts["more"] = 1


@pytest.mark.parametrize(
    ("place", "do", "why"),
    [
        ("forward", lambda job: None, "in 'model', '1.num_batches_tracked' was changed since"),
        ("begin", moved_constant, "in 'model', a buffer was changed since"),
        ("begin", one_row_of_a_table, "in 'model', a buffer was changed since"),
        ("begin", uncounted_after_counted, "in 'model', a buffer was changed since"),
        ("begin", replaced_buffer, "in 'model', '1.running_var' is another one since"),
        ("begin", clipped_weight, "in 'model', '0.weight' was changed since"),
        ("begin", loaded_optimizer, "in 'optim', its state was replaced since"),
        ("begin", other_rate, "in 'optim', an option of a group was changed since"),
        ("begin", other_part, "other parts are registered by now"),
        ("stepped", lambda job: None, "an optimizer's step has begun since"),
    ],
)
def test_a_state_that_was_changed_since_is_not_saved(tmp_path, caplog, place, do, why):
    fail_at(tmp_path, place, do=do)
    assert find_latest_valid(tmp_path) is None
    (line,) = said(caplog)
    assert line.startswith(f"after Boom: step 3 is not saved: {why}")
    assert line.endswith("The last published step is None")


def test_an_option_that_was_changed_in_place_is_noticed(tmp_path, caplog):
    job = Job()
    job.optim.param_groups[0]["layers"] = [1, 2]
    fail_at(tmp_path, "begin", job, lambda job: job.optim.param_groups[0]["layers"].append(3))
    assert find_latest_valid(tmp_path) is None
    assert "an option of a group was changed since" in said(caplog)[0]


def test_a_buffer_that_is_too_large_to_be_compared_is_named(tmp_path, caplog):
    job = Job()
    job.model[0].register_buffer("large", torch.ones(300_000))
    fail_at(tmp_path, "begin", job)
    assert find_latest_valid(tmp_path) is None
    assert "it has a buffer that is too large to be compared at every step" in said(caplog)[0]


def test_half_a_step_of_an_optimizer_is_not_saved(tmp_path, caplog):
    job = Job(Half)

    def fail(job):
        job.optim.fails = True
        job.optim.step()

    fail_at(tmp_path, "begin", job, fail)
    assert find_latest_valid(tmp_path) is None
    assert "an optimizer's step has begun since" in said(caplog)[0]


def test_parts_that_cannot_be_followed_are_named(tmp_path, caplog):
    class Own:
        def state_dict(self):
            return {"n": torch.get_rng_state()}

        def load_state_dict(self, state):
            pass

    class Keeps(Own):
        def __iter__(self):
            return iter(range(3))

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    for number, (part, why) in enumerate(
        [
            (Own(), "its state is known by Own.state_dict only"),
            (
                ResumableIterator(Keeps(), mode="own"),
                "the loader in it would be asked for its state at every step",
            ),
            (Extra(1, 1), "Extra saves more than its tensors"),
            ({"many": list(range(5000))}, "it is too large"),
            (torch.zeros(1 << 20), "it is too large"),
        ]
    ):
        caplog.clear()
        run(tmp_path / str(number), {"odd": part}, step_and_fail)
        why = f"after Boom: step 1 is not saved: 'odd' cannot be followed from step to step: {why}"
        assert said(caplog) == [f"{why}. The last published step is None"]
        assert find_latest_valid(tmp_path / str(number)) is None


def test_a_step_in_flight_or_saved_is_all_there_is_to_do(tmp_path, caplog):
    whole = fail_at(tmp_path, "stepped", every=3)
    step, state = restored(tmp_path)
    assert step == 3
    assert same(state, whole)
    assert said(caplog) == ["after Boom: step 3 is saved already"]


def test_a_save_in_flight_of_an_earlier_step_is_finished_first(tmp_path, caplog):
    whole = fail_at(tmp_path, "fetched", every=2)
    step, state = restored(tmp_path)
    assert step == 3
    assert same(state, whole)
    assert sorted(one.name for one in tmp_path.glob("step_*")) == ["step_00000002", "step_00000003"]


def test_the_profile_does_not_learn_from_it(tmp_path):
    options = {"every": None, "max_overhead": 0.01}
    whole = fail_at(tmp_path, "fetched", **options)
    assert same(restored(tmp_path)[1], whole)
    job = Job()
    with Checkpointer(tmp_path, job.parts, max_overhead=0.01) as ckpt:
        assert ckpt.interval_steps is None


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_a_broken_storage_does_not_hide_the_error(caplog, on_error):
    root = FaultyTier(MemoryTier(), [Fault(verb="write_shard", error=errno.ENOSPC)])
    fail_at(root, "fetched", on_error=on_error)
    (line,) = said(caplog)
    assert line.startswith("after Boom: step 3 is not saved: ")
    assert "No space left" in line


def test_after_an_error_of_saving_no_other_save_is_begun(caplog):
    root = FaultyTier(MemoryTier(), [Fault(verb="write_shard", error=errno.ENOSPC)])
    job = Job()

    def train(ckpt):
        job.step(ckpt)
        ckpt.wait()

    run(root, job.parts, train, SaveFailed, every=1, on_error="raise")
    (line,) = said(caplog)
    assert "saving is what has failed" in line


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_who_interrupts_wants_out(tmp_path, caplog, error):
    fail_at(tmp_path, "begin", error=error)
    assert find_latest_valid(tmp_path) is None
    assert said(caplog) == []


def test_what_would_take_longer_than_the_grace_is_not_begun(tmp_path, caplog):
    clock = ManualClock()

    class Slow(ForwardingTier):
        def around(self, verb, name, call):
            if verb == "write_shard":
                clock.advance(30.0)
            return super().around(verb, name, call)

    fail_at(Slow(MemoryTier()), "fetched", every=2, clock=clock)
    (line,) = said(caplog)
    assert (
        "a save takes about 45.0 s, 25.0 s of grace_s are left. The last published step is 2"
        in (line)
    )


def test_nothing_is_said_before_the_first_step_and_after_the_end(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    def close(ckpt):
        job.step(ckpt)
        ckpt.close()
        raise Boom

    def fail(ckpt):
        raise Boom

    run(tmp_path / "a", Job().parts, fail)
    job = Job()
    run(tmp_path / "b", job.parts, close)
    assert said(caplog) == []


def test_what_changed_after_waiting_for_the_snapshot_is_not_saved(tmp_path, caplog):
    job = Job()

    def train(ckpt):
        job.step(ckpt)
        ckpt.wait_for_snapshot()
        next(iter(job.optim.state.values()))["exp_avg"].data.zero_()
        raise Boom

    run(tmp_path, job.parts, train)
    assert "its snapshot was waited for" in said(caplog)[0]


def test_a_position_in_the_data_is_that_of_the_step(tmp_path, caplog):
    def data():
        loader = torch.utils.data.DataLoader(list(range(40)), batch_size=4, shuffle=True)
        return ResumableIterator(loader, seed=3)

    seen = []

    def train(ckpt):
        ckpt.restore()
        for batch in parts["data"]:
            if ckpt.step == 4:
                raise Boom("after fetching")
            seen.append(batch.tolist())
            ckpt.after_step()

    parts = {"data": data()}
    run(tmp_path, parts, train)
    assert said(caplog) == ["after Boom: step 4 was saved"]
    parts = {"data": data()}
    with Checkpointer(tmp_path, parts, every=1000) as ckpt:
        assert ckpt.restore().step == 4
        seen += [batch.tolist() for batch in parts["data"]]
    assert sorted(one for batch in seen for one in batch) == list(range(40)), "each once"


@pytest.mark.parametrize(("step_s", "is_saved"), [(1.0, True), (0.01, False)])
def test_following_the_state_is_given_up_where_it_takes_too_much_of_a_step(
    tmp_path, caplog, monkeypatch, step_s, is_saved
):
    clock = ManualClock()
    mark = LastStep.mark

    def slow(self, step, *, anew):
        mark(self, step, anew=anew)
        clock.advance(0.001)

    monkeypatch.setattr(LastStep, "mark", slow)

    def train(ckpt):
        for _ in range(30):
            clock.advance(step_s)
            ckpt.after_step()
        raise Boom

    run(tmp_path, {"n": 1}, train, clock=clock)
    (line,) = said(caplog)
    assert line.startswith("after Boom: step 30 was saved") == is_saved
    if not is_saved:
        assert "would take more than 0.5% of each step" in line


def test_random_states_are_those_of_the_step(tmp_path, caplog):
    random.seed(1)
    torch.manual_seed(1)
    drawn = {}

    def train(ckpt):
        for _ in range(3):
            random.random()
            torch.rand(1)
            ckpt.after_step()
        drawn["next"] = random.random(), torch.rand(1).item()
        raise Boom

    run(tmp_path, {"rng": RNGState(1)}, train)
    assert said(caplog) == ["after Boom: step 3 was saved"]
    with Checkpointer(tmp_path, {"rng": RNGState(1)}, every=1000) as ckpt:
        ckpt.restore()
    assert (random.random(), torch.rand(1).item()) == drawn["next"]


def test_following_the_state_copies_no_parameter(tmp_path, monkeypatch):
    copied = []
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda one, _: copied.append(one))
    fail_at(tmp_path, "begin")
    assert copied == []
    assert find_latest_valid(tmp_path).step == 3
