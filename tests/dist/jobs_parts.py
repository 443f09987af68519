"""Jobs: a restore that fails on one rank leaves the state of all ranks as it was."""

import torch
import torch.distributed as dist
from jobs import caught, job
from torch import nn

from dcp_checkfreq import Checkpointer


class Refuses:
    """Takes a value, and then finds that this rank cannot."""

    def __init__(self, value, bad_rank=None):
        self.value, self.bad_rank = value, bad_rank

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        if dist.get_rank() == self.bad_rank and state["value"] == 7:
            raise ValueError("not here")


class OwnLayer(nn.Linear):
    """Its module has a say in how it is loaded, so it is restored first."""

    def set_extra_state(self, state):
        self.note = state

    def get_extra_state(self):
        return getattr(self, "note", "none")


def parts(seed, value, bad_rank=None):
    torch.manual_seed(seed)
    model, own = nn.Linear(4, 4), OwnLayer(4, 4)
    own.note = f"of {seed}"
    optimizer = torch.optim.AdamW([*model.parameters(), *own.parameters()])
    (model(torch.ones(2, 4)) + own(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    first, last = Refuses(value), Refuses(value, bad_rank)
    return {"first": first, "own": own, "model": model, "optim": optimizer, "last": last}


def seen(of):
    tensors = [one.tolist() for part in (of["model"], of["own"]) for one in part.parameters()]
    moments = [one["exp_avg"].tolist() for one in of["optim"].state.values()]
    return tensors, moments, of["own"].note, of["first"].value, of["last"].value


@job
def failed_restores_touch_nothing(shared):
    root = shared / "touch_nothing"
    with Checkpointer(root, parts(0, 7), every=1000) as ckpt:
        ckpt.step = 1
        ckpt.save(wait=True)
    answers = []
    for bad_rank in (0, 1):
        mine = parts(1, 3, bad_rank)
        before = seen(mine)
        with Checkpointer(root, mine, every=1000, timeout_s=20) as ckpt:
            error = caught(ckpt.restore)
            was_left = seen(mine) == before
            mine["last"].bad_rank = None
            ckpt.restore()
        answers.append([error[0], was_left, seen(mine) == seen(parts(0, 7))])
    return answers
