"""Jobs: the rows of the zoo that take several ranks."""

import hashlib
import json
import pathlib
import sys

import torch
import torch.distributed as dist
from jobs import caught, job
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel

from dcp_checkfreq import Checkpointer

WRAPPERS = {"module", "_orig_mod"}


class Block(nn.Module):
    """Rows that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x)))) * self.scale


def body(*norms):
    return nn.Sequential(Block(), *norms, Block())


def grid(*names):
    world = dist.get_world_size()
    shape = (2, world // 2) if world % 2 == 0 else (1, world)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(model, mesh, **options):
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def two_dimensional(model):
    mesh = grid("data", "tensor")
    for block in model:
        plan = {"up": ColwiseParallel(use_local_output=True), "down": RowwiseParallel()}
        block.norm = nn.Identity()
        parallelize_module(block, mesh["tensor"], plan)
    return sharded(model, mesh["data"])


class Stages(nn.Module):
    """The blocks of this rank, a stage of a pipeline, under their names in the whole."""

    def __init__(self):
        super().__init__()
        every = [Block() for _ in range(6)]
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = {str(at): one for at, one in enumerate(every) if at % world == rank}
        self.blocks = nn.ModuleDict(mine)

    def forward(self, x):
        for one in self.blocks.values():
            x = one(x)
        return x


def fsdp1(norm, *, has_mesh=True):
    return FullyShardedDataParallel(
        body(norm),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        device_mesh=init_device_mesh("cpu", (world(),)) if has_mesh else None,
        use_orig_params=True,  # for groups that share a block
    )


def averaged(model):
    """The parts of a job that averages the weights of its last steps."""
    inner = AveragedModel(model.module, use_buffers=True)
    return {"model": model, "averaged": inner}


ROWS = {
    "DDP with BatchNorm": lambda: DistributedDataParallel(body(nn.BatchNorm1d(6))),
    "DDP with buffers that rank 0 sends": lambda: DistributedDataParallel(
        body(nn.BatchNorm1d(6, momentum=None)), broadcast_buffers=True
    ),
    "DDP with buffers of each rank": lambda: DistributedDataParallel(
        body(nn.BatchNorm1d(6)), broadcast_buffers=False
    ),
    "DDP of a compiled model": lambda: DistributedDataParallel(
        torch.compile(body(nn.BatchNorm1d(6)), backend="eager")
    ),
    "a compiled DDP": lambda: torch.compile(DistributedDataParallel(body()), backend="eager"),
    "fully_shard, uneven rows": lambda: sharded(body(), init_device_mesh("cpu", (world(),))),
    "fully_shard, mixed precision": lambda: sharded(
        body(),
        init_device_mesh("cpu", (world(),)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ),
    "FullyShardedDataParallel": lambda: fsdp1(nn.LayerNorm(6)),
    "FullyShardedDataParallel with BatchNorm": lambda: fsdp1(nn.BatchNorm1d(6)),
    "DDP with AveragedModel and SWALR": lambda: averaged(
        DistributedDataParallel(body(nn.BatchNorm1d(6)))
    ),
    "HSDP": lambda: sharded(body(), grid("replicate", "shard")),
    "TP x FSDP": lambda: two_dimensional(body()),
    "stages of a pipeline under the same names": Stages,
}


# To load the compiler takes seconds in each process.
COMPILED = ("DDP of a compiled model", "a compiled DDP")


def world():
    return dist.get_world_size()


def made(name, seed):
    torch.manual_seed(seed)
    row = ROWS[name]()
    parts = row if isinstance(row, dict) else {"model": row}
    model = parts["model"]
    named = list(model.named_parameters())
    groups = [
        {"params": [one for key, one in named if key.endswith("bias")], "weight_decay": 0.0},
        {"params": [one for key, one in named if not key.endswith("bias")], "lr": 0.03},
    ]
    parts["optim"] = torch.optim.AdamW(groups, lr=0.1)
    if "averaged" in parts:
        parts["schedule"] = SWALR(parts["optim"], swa_lr=0.02, anneal_epochs=3)
    return parts


def train(parts, steps, first=0):
    for step in range(first, first + steps):
        torch.manual_seed(100 * step + dist.get_rank())  # other batches on other ranks
        parts["model"](torch.rand(4, 6)).square().mean().backward()
        parts["optim"].step()
        parts["optim"].zero_grad()
        if "averaged" in parts:
            parts["averaged"].update_parameters(parts["model"].module)
            parts["schedule"].step()


def bits(value):
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, torch.Tensor):
        return [type(value).__name__, str(value)]
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    content = hashlib.sha256(bytes(flat.tolist())).hexdigest()
    return [str(value.dtype), list(value.shape), content]


def bare(name):
    return ".".join(one for one in name.split(".") if one not in WRAPPERS)


def bare_of(model):
    return getattr(model, "_orig_mod", model)


def whole(parts):
    """Return all of the state, by name, put together from its shards."""
    model, optimizer = parts["model"], parts["optim"]
    if isinstance(model, FullyShardedDataParallel):
        return whole_of_fsdp1(model, optimizer)
    found = {bare(key): bits(value) for key, value in model.state_dict().items()}
    for key, one in model.named_parameters():
        for name, value in optimizer.state[one].items():
            found[f"{bare(key)}: {name}"] = bits(value)
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                found[f"group {number}: {name}"] = bits(value)
    if "averaged" in parts:
        averaged_, schedule = parts["averaged"].state_dict(), parts["schedule"].state_dict()
        found |= {f"averaged: {key}": bits(value) for key, value in averaged_.items()}
        found |= {f"schedule: {key}": bits(value) for key, value in schedule.items()}
    return found


def whole_of_fsdp1(model, optimizer):
    options = StateDictOptions(full_state_dict=True)
    found = {key: bits(one) for key, one in get_model_state_dict(model, options=options).items()}
    state = get_optimizer_state_dict(model, optimizer, options=options)
    for key, one in state["state"].items():
        found |= {f"{key}: {name}": bits(value) for name, value in one.items()}
    for number, group in enumerate(state["param_groups"]):
        found |= {f"group {number}: {name}": bits(value) for name, value in group.items()}
    return found


@job
def zoo(shared):
    return saved_and_restored(shared, [name for name in ROWS if name not in COMPILED])


@job
def zoo_compiled(shared):
    return saved_and_restored(shared, COMPILED)


def saved_and_restored(shared, names):
    """Save on this number of ranks what others restore; return what differs, and was compared."""
    differ, compared = [], 0
    for name in names:
        folder = name.replace(" ", "_")
        for told in sorted(shared.glob(f"{folder}-*.json")):
            saved = json.loads(told.read_text())
            fresh = made(name, seed=7)
            with Checkpointer(told.with_suffix(""), fresh, every=1000) as ckpt:
                ckpt.restore()
            mine = whole(fresh)
            every = [None] * world()
            dist.all_gather_object(every, list(mine))
            lost = set(saved) - set().union(*every)
            wrong = sorted(lost | {key for key, one in mine.items() if saved.get(key) != one})
            differ += [f"{told.stem}: {key}" for key in wrong]
            compared += len(mine)
        if world() not in (2, 4):
            continue
        parts = made(name, seed=1)
        with Checkpointer(shared / f"{folder}-{world()}", parts, every=1000) as ckpt:
            ckpt.restore()
            for step in range(2):
                train(parts, 1, first=step)
                ckpt.after_step()
            ckpt.save(wait=True)
        every = [None] * world()
        dist.all_gather_object(every, whole(parts))
        union = {key: one for found in reversed(every) for key, one in found.items()}
        dist.barrier()  # all have looked for what is there already
        if dist.get_rank() == 0:
            (shared / f"{folder}-{world()}.json").write_text(json.dumps(union))
        fresh = made(name, seed=2)
        with Checkpointer(shared / f"{folder}-{world()}", fresh, every=1000) as ckpt:
            ckpt.restore()
        before = whole(parts)
        again = whole(fresh)
        differ += [f"{name}: {key}" for key in again if again[key] != union[key]]
        is_same = [None] * world()
        dist.all_gather_object(is_same, before == again)
        # DDP cuts its buckets anew after its first step, and so rounds sums otherwise.
        if all(is_same) and not isinstance(bare_of(parts["model"]), DistributedDataParallel):
            train(parts, 1, first=5)
            train(fresh, 1, first=5)
            before, again = whole(parts), whole(fresh)
            differ += [f"{name}, a step later: {key}" for key in again if again[key] != before[key]]
        compared += len(again)
    return {"differ": differ, "compared": compared}


class Talks:
    """Its state takes a collective."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.value)
        return {"sum": sum(found)}

    def load_state_dict(self, state):
        self.value = state["sum"]


@job
def zoo_talking_parts(shared):
    """Register two parts in another order on rank 1; return what each has got."""
    names = ["one", "two"] if dist.get_rank() == 0 else ["two", "one"]
    values = {"one": 1, "two": 10}
    with Checkpointer(shared / "talks", {n: Talks(values[n]) for n in names}, every=9) as ckpt:
        ckpt.save(wait=True)
    fresh = {name: Talks(0) for name in names}
    with Checkpointer(shared / "talks", fresh, every=9) as ckpt:
        ckpt.restore()
    return [fresh["one"].value, fresh["two"].value]


class Odd(nn.Module):
    """Holds tensors of every kind, with other numbers for each seed; parameters of all ranks."""

    def __init__(self, seed, of_all):
        super().__init__()
        zoo = tensors_of_the_zoo()
        for number, make in enumerate(zoo.IN_MODULES.values()):
            torch.manual_seed(seed)
            self.register_buffer(f"buffer{number}", make(0.0 if seed % 2 else 0.9))
            torch.manual_seed(of_all)
            self.register_parameter(f"parameter{number}", nn.Parameter(make(0.5), False))

        self.rank = seed % 7
        self.more = torch.arange(5000.0) if self.rank else None  # an item that rank 0 has not

    def get_extra_state(self):
        return {"of rank": (self.rank,), "more": self.more}

    def set_extra_state(self, state):
        (self.rank,), self.more = state["of rank"], state["more"]

    def tensors(self):
        return [*self.buffers(), *self.parameters()]


def tensors_of_the_zoo():
    """Return the table, which lies with the tests of one rank."""
    folder = str(pathlib.Path(__file__).parents[1] / "state")
    sys.path.append(folder)
    try:
        import zoo_tensors
    finally:
        sys.path.remove(folder)
    return zoo_tensors


@job
def zoo_odd(shared):
    """Save buffers of every kind that differ between ranks; return what is not rank 0's."""
    rank, differs = dist.get_rank(), tensors_of_the_zoo().differs
    with Checkpointer(shared / "odd", {"model": Odd(rank, of_all=5)}, every=9) as ckpt:
        ckpt.save(wait=True)
    fresh = Odd(7 + rank, of_all=6)
    with Checkpointer(shared / "odd", {"model": fresh}, every=9) as ckpt:
        ckpt.restore()
    found = differs(fresh.tensors(), Odd(0, of_all=5).tensors())
    return [found, fresh.rank, fresh.more]


@job
def zoo_partial(shared):
    """Register a parameter of which each rank has a part of the sum."""
    mesh = init_device_mesh("cpu", (world(),))
    model = nn.Linear(2, 2)
    summands = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()], run_check=False)
    model.weight = nn.Parameter(summands)
    return caught(lambda: Checkpointer(shared / "partial", {"model": model}, every=9))


@job
def zoo_sharded_tensor(shared):
    """Register a model under FSDP1 that makes shards of the old kind."""
    model = fsdp1(nn.LayerNorm(6), has_mesh=False)
    return caught(lambda: Checkpointer(shared / "sharded", {"model": model}, every=9))


def has_one_size(tensor):
    """Tell whether torch loads it under FSDP1, too: no nested one, nor a sparse of other size."""
    return not tensor.is_nested and "sparse" not in str(tensor.layout)


@job
def zoo_extra_under_fsdp1(shared):
    """Save extra state, quantised and mkldnn buffers under FSDP1; return what is not as saved."""
    differs = tensors_of_the_zoo().differs

    def made(seed, of_all):
        odd = Odd(seed, of_all)
        odd._parameters.clear()  # which torch would put in a row
        for key in [key for key, one in odd.named_buffers() if not has_one_size(one)]:
            del odd._buffers[key]
        model = fsdp1(odd)
        return model, next(one for one in model.modules() if isinstance(one, Odd))

    model, _ = made(dist.get_rank(), of_all=5)
    with Checkpointer(shared / "extra", {"model": model}, every=9) as ckpt:
        ckpt.save(wait=True)
    model, fresh = made(7 + dist.get_rank(), of_all=6)
    with Checkpointer(shared / "extra", {"model": model}, every=9) as ckpt:
        ckpt.restore()
    of_rank_0 = [one for one in Odd(0, of_all=5).buffers() if has_one_size(one)]
    found = differs(list(fresh.buffers()), of_rank_0)
    return [found, fresh.rank, fresh.more]
