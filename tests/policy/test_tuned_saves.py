"""A `Checkpointer` without ``every``: it measures, saves once, and chooses its interval."""

import itertools
import logging
import time

import pytest
import torch
from checkpointer_tools import failing
from torch import nn

from dcp_checkfreq import Checkpointer, find_latest_valid
from dcp_checkfreq.policy.stored_profile import decode
from dcp_checkfreq.testing import ForwardingTier, ManualClock, MemoryTier

PERSIST_S = 8.0


class SlowTier(ForwardingTier):
    """Publishing a checkpoint takes 8 s of the hand-set clock."""

    def __init__(self, inner, clock):
        super().__init__(inner)
        self._clock = clock

    def around(self, verb, name, call):
        if verb == "write_shard":
            self._clock.advance(PERSIST_S)
        return call()


def make_parts(width=100, lr=0.1):
    model = nn.Linear(width, 100)
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)}


def tuned(root, clock, parts=None, **options):
    options = {"steps_per_epoch": 5} | options
    return Checkpointer(SlowTier(root, clock), parts or make_parts(), clock=clock, **options)


def train(ckpt, clock, steps):
    """Iterations of 1 s. A save, once begun, ends before the next iteration does."""
    for _ in range(steps):
        clock.advance(1.0)
        ckpt.after_step()
        if ckpt._saver.is_busy:
            before_s = clock.monotonic_s()
            ckpt._saver._running.wait(60)
            assert clock.monotonic_s() - before_s <= PERSIST_S


def profiled(root, **options):
    """Run until the interval is known; return it."""
    clock = ManualClock()
    with tuned(root, clock, **options) as ckpt:
        ckpt.restore()
        train(ckpt, clock, 6)
        return ckpt.interval_steps


def profile_files(root):
    folder = root.child(".checkfreq")
    names = [entry.name for entry in folder.list() if "profile" in entry.name]
    return {name: folder.read(name) for name in names}


# --- profile, one save, then k ---


@pytest.mark.parametrize(
    ("steps_per_epoch", "profile_steps"),
    [(None, 50), (5, 5), (700, 10), (2000, 20), (10**6, 50)],
)
def test_the_first_save_comes_after_the_profile(steps_per_epoch, profile_steps):
    root, clock = MemoryTier(), ManualClock()
    with tuned(root, clock, steps_per_epoch=steps_per_epoch) as ckpt:
        train(ckpt, clock, profile_steps - 1)
        assert ckpt.interval_steps is None
        assert not ckpt._saver.is_busy
        assert find_latest_valid(root) is None
        train(ckpt, clock, 1)
        train(ckpt, clock, 1)
        assert ckpt.last_saved_step == profile_steps
        assert ckpt.interval_steps is not None


def test_the_interval_is_long_enough_to_publish_and_saves_come_that_often():
    root, clock = MemoryTier(), ManualClock()
    with tuned(root, clock, keep_last=100, snapshot="cpu") as ckpt:
        train(ckpt, clock, 6)
        k = ckpt.interval_steps
        # Ti 1 s, Ts 8 s, and a copy that takes next to nothing.
        assert k in (8, 9)
        train(ckpt, clock, k - 2)
        assert ckpt.last_saved_step == 5
        assert not ckpt._saver.is_busy
        train(ckpt, clock, 2)
        assert ckpt.last_saved_step == 5 + k
        first, second = ckpt.history
    assert (first.step, first.interval_steps, first.mode) == (5, None, "blocking")
    assert (second.step, second.interval_steps, second.mode) == (5 + k, k, "cpu")
    assert first.persist_s == pytest.approx(PERSIST_S)


def test_the_interval_grows_with_what_a_save_costs():
    class Dear(SlowTier):
        def around(self, verb, name, call):
            if verb == "write_shard":
                self._clock.advance(9 * PERSIST_S)
            return super().around(verb, name, call)

    clock = ManualClock()
    with Checkpointer(
        Dear(MemoryTier(), clock), make_parts(), clock=clock, steps_per_epoch=5
    ) as ckpt:
        for _ in range(6):
            clock.advance(1.0)
            ckpt.after_step()
            ckpt.wait()
        assert ckpt.interval_steps in (80, 81)


@pytest.mark.parametrize("snapshot", ["cpu", "blocking"])
def test_a_mode_that_was_chosen_stays(snapshot):
    clock = ManualClock()
    with tuned(MemoryTier(), clock, snapshot=snapshot) as ckpt:
        train(ckpt, clock, 60)
        assert len(ckpt.history) >= 3
        assert {record.mode for record in list(ckpt.history)[1:]} == {snapshot}


def test_a_failed_first_save_is_followed_by_another_profile():
    inner, clock = MemoryTier(), ManualClock()
    with Checkpointer(failing(inner), make_parts(), clock=clock, steps_per_epoch=5) as ckpt:
        train(ckpt, clock, 6)
        assert ckpt.failures_in_a_row == 1
        assert ckpt.interval_steps is None
        assert profile_files(inner) == {}
        train(ckpt, clock, 5)
        assert ckpt.last_saved_step == 10
        assert ckpt.interval_steps is not None


def test_a_fixed_interval_profiles_nothing():
    root = MemoryTier()
    with Checkpointer(root, make_parts(), every=2) as ckpt:
        assert ckpt.interval_steps == 2
        for _ in range(6):
            ckpt.after_step()
    assert ckpt.last_saved_step == 6
    assert profile_files(root) == {}


# --- a restart of the same job does not profile again ---


def test_what_was_measured_is_stored():
    root = MemoryTier()
    k = profiled(root)
    ((name, content),) = profile_files(root).items()
    stored = decode(content.decode())
    assert stored.fingerprint in name or name.endswith(".json")
    assert (stored.interval_steps, stored.max_overhead) == (k, 0.035)
    assert stored.costs.iteration_s == pytest.approx(1.0)
    assert stored.costs.persist_s == pytest.approx(PERSIST_S)
    assert stored.costs.state_bytes >= 100 * 100 * 4


def test_a_restart_of_the_same_job_knows_its_interval_at_once():
    root = MemoryTier()
    k = profiled(root)
    clock = ManualClock()
    with tuned(root, clock) as ckpt:
        assert ckpt.restore().step == 5
        assert ckpt.interval_steps == k
        train(ckpt, clock, k)
        ckpt.wait()
        assert ckpt.last_saved_step == 5 + k


SAME_JOB = {
    "another learning rate": {"parts": lambda: make_parts(lr=0.001)},
    "another length of epoch": {"steps_per_epoch": 9},
    "other retention": {"keep_last": 5},
}


@pytest.mark.parametrize("options", SAME_JOB.values(), ids=SAME_JOB.keys())
def test_what_costs_do_not_depend_on_is_the_same_job(options):
    root = MemoryTier()
    k = profiled(root)
    options = {"parts": make_parts} | options
    with tuned(root, ManualClock(), options.pop("parts")(), **options) as ckpt:
        assert ckpt.interval_steps == k


OTHER_JOB = {
    "a larger layer": lambda: make_parts(width=200),
    "another optimizer": lambda: (
        make_parts()
        | {"optim": torch.optim.AdamW((m := nn.Linear(100, 100)).parameters()), "model": m}
    ),
    "one part more": lambda: make_parts() | {"more": 1},
    "another dtype": lambda: {"model": nn.Linear(100, 100).double()},
}


@pytest.mark.parametrize("make", OTHER_JOB.values(), ids=OTHER_JOB.keys())
def test_another_state_profiles_anew(make):
    root = MemoryTier()
    profiled(root)
    with tuned(root, ManualClock(), make()) as ckpt:
        assert ckpt.interval_steps is None


def test_another_budget_uses_the_costs_and_not_the_interval():
    root = MemoryTier()
    profiled(root)
    with tuned(root, ManualClock(), max_overhead=0.5) as ckpt:
        assert ckpt.interval_steps in (8, 9)


DAMAGES = {
    "cut short": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "a changed digit": lambda content: content.replace(b"8.0", b"9.0", 1),
    "no text": lambda content: b"\xff\xfe" + content,
    "an older version": lambda content: content.replace(b'"version": 2', b'"version": 1'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_profile_is_named_and_the_job_profiles_anew(damage, caplog):
    root = MemoryTier()
    k = profiled(root)
    ((name, content),) = profile_files(root).items()
    assert damage(content) != content
    root.child(".checkfreq").replace(name, damage(content), scratch="x")
    with caplog.at_level(logging.WARNING):
        clock = ManualClock()
        with tuned(root, clock) as ckpt:
            assert ckpt.interval_steps is None
            assert f"{name} is not used" in caplog.text
            ckpt.restore()
            train(ckpt, clock, 6)
            assert ckpt.interval_steps == k
    assert decode(profile_files(root)[name].decode()).interval_steps == k


# --- by the real clock ---


def test_a_real_run_profiles_saves_and_can_be_resumed(tmp_path):
    parts = make_parts()
    with Checkpointer(tmp_path, parts, max_overhead=0.5, steps_per_epoch=10) as ckpt:
        ckpt.restore()
        while len(ckpt.history) < 4:
            parts["model"](torch.ones(2, 100)).sum().backward()
            time.sleep(0.002)
            parts["optim"].step()
            parts["optim"].zero_grad()
            ckpt.after_step()
        k, records = ckpt.interval_steps, list(ckpt.history)
    assert records[0].step == 10
    assert all(one.error is None for one in records)
    steps = [one.step for one in records]
    for before, after in itertools.pairwise(records):
        assert after.step - before.step >= (after.interval_steps or 1)
    assert k >= 1
    with Checkpointer(tmp_path, make_parts(), max_overhead=0.5) as ckpt:
        assert ckpt.restore().step >= steps[-1]
        assert ckpt.interval_steps is not None
