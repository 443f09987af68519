"""Optimizers of every kind come back exactly, or are refused by name."""

import pytest
import torch
from zoo import all_of, check, facts, made, train
from zoo_optimizers import OPTIMIZERS, REGROUPED, Row, Wrapping, in_groups, mlp, torchs_own

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.snapshot.optimizer_guard import Guard


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_comes_back_exactly_or_is_refused(tmp_path, name):
    check(OPTIMIZERS[name], tmp_path)


def test_every_optimizer_of_torch_has_a_row():
    assert [one for one in torchs_own() if f"{one}()" not in OPTIMIZERS] == []


@pytest.mark.parametrize("name", REGROUPED)
def test_state_follows_its_parameter_into_another_group(tmp_path, name):
    before, after = REGROUPED[name]
    job, fresh = made(Row(lambda: in_groups(*before)), 1), made(Row(lambda: in_groups(*after)), 2)
    train(job, 3, 1)
    with Checkpointer(tmp_path, job.parts, every=1000) as ckpt:
        ckpt.save(wait=True)
    with Checkpointer(tmp_path, fresh.parts, every=1000) as ckpt:
        ckpt.restore()
    for _ in range(2):
        assert facts(fresh.parts["model"]) == facts(job.parts["model"])
        mine, theirs = (
            [facts(one.parts["optim"].state[p]) for p in one.parts["model"].parameters()]
            for one in (fresh, job)
        )
        assert mine == theirs
        train(job, 1, 5)
        train(fresh, 1, 5)
    assert all_of(fresh).keys() == all_of(job).keys()


class Snapshot:
    """Takes note of who waits for it."""

    is_done = True

    def __init__(self):
        self.waited = 0

    def before_update(self):
        self.waited += 1


def test_the_step_of_a_wrapper_waits_for_a_snapshot_once():
    inner = torch.optim.AdamW(mlp().parameters())
    wrapper = Wrapping(Wrapping(inner))
    guard, snapshot = Guard([wrapper, inner]), Snapshot()
    guard.arm(snapshot)
    wrapper.step()
    assert snapshot.waited == 1
    guard.close()
