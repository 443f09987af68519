"""torchao's quantised weights and 8-bit optimizers, if it is installed."""

import pytest
import torch
from torch import nn
from wrapper_kinds import assert_same

from dcp_checkfreq import Checkpointer, StateMismatch

pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")

from torchao import optim
from torchao.quantization import Int8WeightOnlyConfig, quantize_

pytestmark = pytest.mark.filterwarnings("ignore")


def net(seed, *, quantised):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    if quantised:
        quantize_(model, Int8WeightOnlyConfig())
    return model


def save(root, parts):
    with Checkpointer(root, parts, every=1) as ckpt:
        ckpt.after_step()
        ckpt.wait()


def restore(root, parts):
    with Checkpointer(root, parts, every=1000) as ckpt:
        ckpt.restore()


def test_int8_weights_come_back(tmp_path):
    model, fresh = net(0, quantised=True), net(1, quantised=True)
    save(tmp_path, {"model": model})
    restore(tmp_path, {"model": fresh})
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert_same(ours, theirs)
    x = torch.ones(2, 64)
    assert torch.equal(fresh(x), model(x))
    with pytest.raises(StateMismatch, match="plain tensor here"):
        restore(tmp_path, {"model": net(2, quantised=False)})


def trained(kind, seed, steps):
    model = net(seed, quantised=False)
    optimizer = kind(model.parameters(), lr=0.01)
    train(model, optimizer, steps)
    return {"model": model, "optim": optimizer}


def train(model, optimizer, steps):
    for step in range(steps):
        model(torch.ones(2, 64) * (step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8])
def test_quantised_optimizers_go_on_exactly(tmp_path, kind):
    with torch.compiler.set_stance("force_eager"):
        parts, fresh = trained(kind, 0, 2), trained(kind, 1, 0)
        save(tmp_path, parts)
        restore(tmp_path, fresh)
        for ours, theirs in zip(
            fresh["model"].parameters(), parts["model"].parameters(), strict=True
        ):
            now, was = fresh["optim"].state[ours], parts["optim"].state[theirs]
            assert now.keys() == was.keys()
            for name, value in was.items():
                assert_same(now[name], value)
        for job in (parts, fresh):
            train(job["model"], job["optim"], 2)
    for ours, theirs in zip(fresh["model"].parameters(), parts["model"].parameters(), strict=True):
        assert torch.equal(ours, theirs)
