"""Schedulers, scalers, samplers and random numbers come back exactly."""

import random

import pytest
import torch
from zoo import check
from zoo_others import OTHERS, SCHEDULERS, Randomness, torchs_own

from dcp_checkfreq import Checkpointer, PerRank


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_comes_back_exactly(tmp_path, name):
    check(SCHEDULERS[name], tmp_path)


def test_every_scheduler_of_torch_has_a_row():
    assert [name for name in torchs_own() if name not in SCHEDULERS] == []


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_comes_back_exactly(tmp_path, name):
    check(OTHERS[name], tmp_path)


@pytest.mark.parametrize("wrap", [lambda one: one, PerRank], ids=["plain", "of each rank"])
def test_random_numbers_go_on_where_they_were(tmp_path, wrap):
    before = Randomness().state_dict()
    try:
        torch.manual_seed(1)
        random.seed(1)
        with Checkpointer(tmp_path, {"random": wrap(Randomness())}, every=1000) as ckpt:
            random.gauss(0, 1)  # keeps another number for the next call
            ckpt.save(wait=True)
        drawn = torch.rand(5).tolist(), torch.randperm(9).tolist(), random.gauss(0, 1)
        torch.manual_seed(2)
        random.seed(2)
        with Checkpointer(tmp_path, {"random": wrap(Randomness())}, every=1000) as ckpt:
            ckpt.restore()
        assert drawn == (torch.rand(5).tolist(), torch.randperm(9).tolist(), random.gauss(0, 1))
    finally:
        Randomness().load_state_dict(before)
