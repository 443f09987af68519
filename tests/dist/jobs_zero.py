"""Jobs: `ZeroRedundancyOptimizer`, of which each rank has the state of other parameters."""

import torch
import torch.distributed as dist
from jobs import job
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dcp_checkfreq import Checkpointer


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width + 1) for width in range(3, 9)))


def groups_of(model):
    parameters = list(model.parameters())
    return [{"params": parameters[:5], "lr": 0.02}, {"params": parameters[5:], "weight_decay": 0.1}]


def train(model, optimizer, steps):
    for step in range(steps):
        model(torch.ones(2, 3) * (step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5  # as a scheduler does


def sharded(seed):
    model = DistributedDataParallel(model_of(seed))
    return model, ZeroRedundancyOptimizer(groups_of(model), torch.optim.AdamW, lr=0.05)


@job
def zero(shared):
    """Save on four ranks, restore on any, and go on; return what differs from one optimizer."""
    if dist.get_world_size() == 4:
        model, optimizer = sharded(0)
        train(model, optimizer, 3)
        with Checkpointer(shared / "zero", {"model": model, "optim": optimizer}, every=1000) as ck:
            ck.step = 3
            ck.save(wait=True)
    model, optimizer = sharded(1)
    with Checkpointer(shared / "zero", {"model": model, "optim": optimizer}, every=1000) as ckpt:
        ckpt.restore()
    whole = model_of(0)
    one = torch.optim.AdamW(groups_of(whole), lr=0.05)
    train(whole, one, 3)
    found = differing(model, optimizer, whole, one)
    if dist.get_world_size() != 3:  # the mean of three equal gradients is another one
        train(model, optimizer, 2)
        train(whole, one, 2)
        found += differing(model, optimizer, whole, one)
    return found


def differing(model, optimizer, whole, one):
    names = {id(p): name for name, p in model.module.named_parameters()}
    wanted = dict(whole.named_parameters())
    found = [
        name for name, p in model.module.named_parameters() if not torch.equal(p, wanted[name])
    ]
    owned = [p for group in optimizer.optim.param_groups for p in group["params"]]
    for p in owned:
        state = one.state[wanted[names[id(p)]]]
        mine = optimizer.optim.state[p]
        found += [key for key in state if not torch.equal(mine[key], state[key])]
    rates = [[group["lr"] for group in opt.param_groups] for opt in (optimizer, one)]
    return found + ([] if rates[0] == rates[1] and owned else ["lr"])
