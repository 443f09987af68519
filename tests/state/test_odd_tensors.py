"""Tensors of a module that are not just copied into, when something does not fit or fails."""

import pytest
import torch
from torch import nn
from zoo import Job, Row, all_of, facts, made, train
from zoo_modules import MODULES, Expanded, LateBuffer

from dcp_checkfreq import Checkpointer, StateMismatch


class Refuses:
    """Can be saved, and not restored."""

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise ValueError("not this one")


def save(root, parts):
    with Checkpointer(root, parts, every=1000) as ckpt:
        ckpt.save(wait=True)


def assert_untouched(root, job, error, match):
    before = all_of(job)
    with Checkpointer(root, job.parts, every=1000) as ckpt:
        with pytest.raises(error, match=match):
            ckpt.restore()
        assert all_of(job) == before


def test_an_expanded_tensor_takes_only_values_that_it_can_hold(tmp_path):
    parts = {"model": Expanded()}
    parts["model"].row = nn.Parameter(torch.rand(4, 3), requires_grad=False)
    save(tmp_path, parts)
    job = Job({"model": Expanded()}, lambda: None)
    assert_untouched(tmp_path, job, StateMismatch, r"elements share memory.*model\.row")


def test_a_module_that_may_change_shapes_and_cannot_is_said_to_have_another_shape(tmp_path):
    save(tmp_path, {"model": nn.BatchNorm1d(3)})
    job = Job({"model": nn.BatchNorm1d(5)}, lambda: None)
    assert_untouched(tmp_path, job, StateMismatch, r"model\.weight: saved \[3\], wanted \[5\]")


@pytest.mark.parametrize("name", ["quantisation-aware", "a buffer that is None at first"])
def test_what_changed_its_shape_has_the_old_one_again_when_another_part_fails(tmp_path, name):
    row: Row = MODULES[name]
    saved = made(row, 1)
    train(saved, 2, 1)
    save(tmp_path, {**saved.parts, "other": Refuses()})
    job = made(row, 2)
    before = facts(job.parts["model"])
    with (
        Checkpointer(tmp_path, {**job.parts, "other": Refuses()}, every=1000) as ckpt,
        pytest.raises(ValueError, match="not this one"),
    ):
        ckpt.restore()
    assert facts(job.parts["model"]) == before


def test_a_buffer_that_was_not_saved_is_said_to_be_missing(tmp_path):
    save(tmp_path, {"model": LateBuffer()})
    model = LateBuffer()
    model(torch.ones(1, 3))
    job = Job({"model": model}, lambda: None)
    assert_untouched(tmp_path, job, StateMismatch, r"lacks: model\.late")
