"""Jobs: values that differ between ranks, and values that only look so."""

import contextlib
import dataclasses
import logging

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import caught, job

from dcp_checkfreq import CheckFreqSavePlanner, CheckFreqWriter, Checkpointer, PerRank
from dcp_checkfreq.errors import ReplicasDiffer


@dataclasses.dataclass
class Progress:
    seen_samples: int
    host: str


class Trainer:
    """25 fields, of which 4 differ between ranks."""

    def __init__(self, rank):
        self.fields = {f"field_{n}": [n, {"name": f"n{n}"}] for n in range(22)}
        self.progress = Progress(640 + 32 * rank, f"node-{rank}")
        self.hooks = [{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.1 * (1 + rank)}]
        self.averages = {"fast": torch.full((9_000,), 1.0 + rank), "slow": torch.ones(9_000)}

    def state_dict(self):
        return {**self.fields, "progress": self.progress, "hooks": self.hooks,
                "averages": self.averages}  # fmt: skip

    def load_state_dict(self, state):
        raise NotImplementedError


def trained(rank):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    groups = [{"params": one.parameters(), "lr": 0.1} for one in model]
    groups[1]["lr"] = 0.1 + rank
    return model, torch.optim.SGD(groups)


def error_of(action):
    try:
        action()
    except ReplicasDiffer as error:
        return {"keys": error.keys, "found": error.differences, "text": str(error)}
    return None


@job
def differing_values_are_named(shared):
    rank = dist.get_rank()
    model, optimizer = trained(rank)
    parts = {"trainer": Trainer(rank), "model": model, "optim": optimizer}
    said = {}
    ckpt = Checkpointer(shared / "named", parts, every=1000)
    with contextlib.closing(ckpt):
        said["waiting"] = error_of(lambda: ckpt.save(wait=True))
        optimizer.param_groups[1]["lr"] = 0.1
        parts["trainer"].__init__(0)
        with torch.no_grad():
            model[0].weight.add_(rank)
        said["weights"] = error_of(lambda: ckpt.save(wait=True))
        with torch.no_grad():
            model[0].weight.zero_()
        parts["trainer"].hooks[0]["lr"] = rank  # the tree only
        said["once more"] = error_of(lambda: ckpt.save(wait=True))
        parts["trainer"].hooks[0]["lr"] = 0
        said["agreed"] = caught(lambda: ckpt.save(wait=True))
        ckpt.after_step(1)
        parts["trainer"].progress.host = f"node-{rank}"
        parts["trainer"].averages["slow"] = torch.ones(9_000)
        said["kept plan"] = error_of(lambda: ckpt.save(wait=True))
        parts["trainer"].progress.host = "node"
        said["agreed again"] = caught(lambda: ckpt.save(wait=True))
    said["published"] = sorted(one.name for one in (shared / "named").glob("step_*/.metadata"))
    return said


@job
def differing_values_in_the_background(shared):
    """The loop goes on while the ranks find out, and all of them hear it at one step."""
    rank = dist.get_rank()
    parts = {"trainer": {"seen": 0}, "noise": PerRank([rank] * 3)}
    heard = []
    with Checkpointer(shared / "background", parts, every=2, on_error="log") as ckpt:
        log = logging.getLogger("dcp_checkfreq")
        log.addHandler(kept := Kept())
        for step in range(1, 9):
            parts["trainer"]["seen"] = rank if step < 5 else step
            dist.all_reduce(torch.ones(1))
            ckpt.after_step(step)
        ckpt.save(wait=True)
        log.removeHandler(kept)
        heard += kept.texts
    return [text for text in heard if "trainer.seen" in text], ckpt.last_saved_step


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@job
def a_rank_cannot_look_into_its_values(shared):
    """Then the key is named, by all ranks, and the next save works."""
    rank = dist.get_rank()
    parts = {"trainer": {"seen": rank}}
    ckpt = Checkpointer(shared / "blind", parts, every=1000)
    planner = ckpt._planner

    def blind(keys):
        raise RuntimeError("it is dark")

    with contextlib.closing(ckpt):
        if rank == 1:
            planner.look_into = blind
        first = error_of(lambda: ckpt.save(wait=True))
        parts["trainer"]["seen"] = 1
        return first, caught(lambda: ckpt.save(wait=True))


@job
def values_that_only_look_different(shared):
    """Ranks make the same values on different ways; with hash seeds of their own, too."""
    rank = dist.get_rank()
    names = {f"name-{n}" for n in range(50)}
    text = "".join(["ad", "am"])
    value = {
        "names": names,
        "by name": dict.fromkeys(names, 0),
        "frozen": frozenset(names),
        "sets in a set": {frozenset(names), frozenset(["x"])},
        "in a tuple": (names, {"deep": [{"er": names}]}),
        "twice": [text, text if rank else "".join(["ad", "am"])],
        "nan": float("nan"),
        "order": {"a": 1, "b": 2} if rank else {"b": 2, "a": 1},
    }
    with Checkpointer(shared / "alike", {"trainer": value, "text": text}, every=1000) as ckpt:
        ours = [caught(lambda: ckpt.save(wait=True)) for _ in range(2)]
    planner = CheckFreqSavePlanner()
    plain = [
        caught(
            lambda step=step: dcp.save(
                dict(value, w=torch.ones(3)),
                storage_writer=CheckFreqWriter(shared / f"alike_{step}"),
                planner=planner,
            )
        )
        for step in range(2)
    ]
    return ours, plain, list(names)[:5]
