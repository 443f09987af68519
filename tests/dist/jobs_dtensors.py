"""Jobs: DTensors of every kind, and wrappers in them, through Checkpointer."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import job
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

sys.path.append(str(Path(__file__).parents[1]))
from wrapper_kinds import Momentum8, Quantised, Shaped, quantised

from dcp_checkfreq import CheckFreqSavePlanner, CheckFreqWriter, Checkpointer, UnsupportedState

torch.serialization.add_safe_globals([Quantised, Shaped])


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def own(value):
    """Return this rank's plain tensors of a value, by path."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if not hasattr(value, "__tensor_flatten__"):
        return {"": value.detach()}
    return {
        f".{name}{path}": one
        for name in value.__tensor_flatten__()[0]
        for path, one in own(getattr(value, name)).items()
    }


def differing(got, wanted):
    ours, theirs = own(got), own(wanted)
    if type(got) is not type(wanted) or ours.keys() != theirs.keys():
        return [f"{type(got)} {sorted(ours)}"]
    if isinstance(got, DTensor) and got.placements != wanted.placements:
        return [f"{got.placements}, wanted {wanted.placements}"]
    return [
        f"{path}: {one.tolist()}, wanted {theirs[path].tolist()}"
        for path, one in ours.items()
        if one.dtype != theirs[path].dtype or not torch.equal(one, theirs[path])
    ]


class Held(nn.Module):
    """Parameters as they are given."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def wrapped_rows(whole, kind):
    """Return a DTensor whose local parts are wrappers of rows."""
    rows = [one.chunk(dist.get_world_size())[dist.get_rank()].clone() for one in whole]
    size = (whole[0].shape[0], whole[0].shape[1])
    return DTensor.from_local(
        kind(*rows),
        mesh(),
        [Shard(0)],
        run_check=False,
        shape=torch.Size(size),
        stride=(size[1], 1),
    )


def tensors_of(start):
    """Return a model's parameters: each has values of its own."""
    flat = mesh()

    def whole(*shape):
        return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(
            shape
        )

    q = quantised(6, 4, seed=start)
    made = {
        "uneven": distribute_tensor(whole(5, 3), flat, [Shard(0)]),
        "empty": distribute_tensor(whole(1, 3), flat, [Shard(0)]),
        "columns": distribute_tensor(whole(3, 5), flat, [Shard(1)]),
        "copies": distribute_tensor(whole(3, 5), flat, [Replicate()]),
        "qkv": distribute_tensor(whole(12, 3), flat, [_StridedShard(0, split_factor=3)]),
        "qkv_uneven": distribute_tensor(
            whole(7, 2), flat, [_StridedShard(0, split_factor=3)], src_data_rank=None
        ),
        "qkv_columns": distribute_tensor(whole(2, 12), flat, [_StridedShard(1, split_factor=3)]),
        "two": wrapped_rows((whole(4, 3), -whole(4, 3)), TwoTensor),
        "quantised": wrapped_rows((q.codes, q.scale), Quantised),
        "two_of_dtensors": TwoTensor(
            distribute_tensor(whole(5, 2), flat, [Shard(0)]),
            distribute_tensor(-whole(5, 2), flat, [Shard(0)]),
        ),
    }
    one = DeviceMesh("cpu", [0])
    made["of_first_rank"] = distribute_tensor(whole(4, 2), one, [Shard(0)])
    return made


@job
def dtensors_through_checkpointer(shared):
    """Save by two ranks, restore by any, with every kind of placement."""
    root = shared / "dtensors"
    if dist.get_world_size() == 2:
        with Checkpointer(root, {"model": Held(tensors_of(3))}, every=1) as ckpt:
            for _ in range(3):  # the third by a kept plan
                ckpt.after_step()
            ckpt.wait()
            failures = ckpt.failures_in_a_row
        if failures:
            return [f"{failures} failures"]
    fresh, wanted = Held(tensors_of(100)), Held(tensors_of(3))
    with Checkpointer(root, {"model": fresh}, every=1000) as ckpt:
        ckpt.restore()
    theirs = dict(wanted.named_parameters())
    wrong = [
        f"{name}{one}"
        for name, got in fresh.named_parameters()
        for one in differing(got.data, theirs[name].data)
    ]
    value = {"big": tensors_of(3)["qkv"]}
    with Checkpointer(
        root.with_name(f"value{dist.get_world_size()}"), {"v": value}, every=1
    ) as ckpt:
        ckpt.after_step()
        ckpt.wait()
    parts = {"v": {"big": tensors_of(100)["qkv"]}}
    with Checkpointer(root.with_name(f"value{dist.get_world_size()}"), parts, every=1) as ckpt:
        ckpt.restore()
    return wrong + differing(parts["v"]["big"], value["big"])


@job
def partial_is_refused(shared):
    tensor = DTensor.from_local(torch.ones(2, 2), mesh(), [Partial()], run_check=False)
    try:
        Checkpointer(shared / "partial", {"v": {"deep": [tensor]}}, every=1)
    except UnsupportedState as error:
        return str(error)
    return None


@job
def plain_saves_of_odd_shards(shared):
    """Return what `dcp.save` and `dcp.async_save` say of shards that stock DCP takes for others."""
    odd = {
        "partial": DTensor.from_local(torch.ones(6, 2), mesh(), [Partial()], run_check=False),
        "strided": distribute_tensor(torch.ones(12, 2), mesh(), [_StridedShard(0, split_factor=3)]),
    }
    said = []
    for name, tensor in odd.items():
        writer = CheckFreqWriter(shared / f"plain_{name}")
        for way in (dcp.save, dcp.async_save):
            try:
                way({"deep": {"w": tensor}}, storage_writer=writer, planner=CheckFreqSavePlanner())
            except (CheckpointException, UnsupportedState) as error:
                said.append(str(error))
    return said


def sharded_net(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    fully_shard(model, mesh=mesh())
    return model


def train(model, optimizer, steps=2):
    for step in range(steps):
        model(torch.ones(2, 4) * (step + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class Momentum8Sharded(Momentum8):
    """Its momentum is a DTensor of which each shard is quantised."""

    def one(self, parameter, lr):
        if parameter.ndim != 2:
            return
        state, grad = self.state[parameter], parameter.grad
        local = grad.to_local()
        now = local
        if state:
            before = state["m"].to_local()
            now = local + before.codes.view(local.shape).float() * before.scale[:, None]
        scale = now.abs().amax(1) / 127 + 1e-9
        state["m"] = DTensor.from_local(
            self.made((now / scale[:, None]).round().to(torch.int8), scale),
            grad.device_mesh,
            grad.placements,
            run_check=False,
            shape=grad.shape,
            stride=grad.stride(),
        )
        # A count that is a DTensor too.
        count = state.get(
            "step", distribute_tensor(torch.zeros(()), grad.device_mesh, [Replicate()])
        )
        state["step"] = count + 1
        parameter.to_local().sub_(now, alpha=lr)

    def made(self, codes, scale):
        if self.kind is Shaped:
            return Shaped(codes.reshape(-1), scale, codes.shape)
        return self.kind(codes, scale)


class Factored(Momentum8):
    """Statistics of rows and of columns, as Adafactor keeps them (torch's fails with DTensors)."""

    def one(self, parameter, lr):
        state, grad = self.state[parameter], parameter.grad
        if parameter.ndim != 2:
            return
        for name, dim in (("row", 1), ("column", 0)):
            now = grad.square().sum(dim, keepdim=True)
            if dim == 0:
                now = now.redistribute(placements=[Replicate()])
            state[name] = now if name not in state else state[name] * 0.9 + now
        scale = (state["row"] * state["column"]).sqrt() + 1
        parameter.sub_(grad / scale, alpha=lr)


OPTIMIZERS = {
    "factored": lambda parameters: Factored(parameters, lr=0.1),
    "momentum8": lambda parameters: Momentum8Sharded(parameters, lr=0.1),
    "shaped": lambda parameters: Momentum8Sharded(parameters, lr=0.1, kind=Shaped),
}


def state_of(model, optimizer):
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def sharded_states_of(shared, saving_ranks):
    """A fresh optimizer gets back state of other shapes, and quantised, as it was sharded.

    All ranks have the same batches, so that any number of them trains the same.
    """
    wrong = []
    for kind, make in OPTIMIZERS.items():
        root = shared / f"states_{kind}_{saving_ranks}"
        model = sharded_net(0)
        optimizer = make(model.parameters())
        train(model, optimizer)
        if dist.get_world_size() == saving_ranks:
            with Checkpointer(root, {"model": model, "optim": optimizer}, every=1) as ckpt:
                for _ in range(3):  # the third by a kept plan
                    ckpt.after_step()
                ckpt.wait()
                if ckpt.failures_in_a_row:
                    wrong.append(f"{kind}: saves failed")
        fresh_model = sharded_net(1)
        fresh = make(fresh_model.parameters())
        with Checkpointer(root, {"model": fresh_model, "optim": fresh}, every=1000) as ckpt:
            ckpt.restore()
        got, wanted = state_of(fresh_model, fresh), state_of(model, optimizer)
        if got.keys() != wanted.keys():
            wrong.append(f"{kind}: {sorted(got)}")
        is_exact = dist.get_world_size() == saving_ranks or kind != "factored"  # sums are rounded
        for key in got.keys() & wanted.keys():
            if type(got[key]) is not type(wanted[key]):
                wrong.append(f"{kind} {key} is a {type(got[key])}")
            elif is_exact and isinstance(wanted[key], torch.Tensor):
                wrong += [f"{kind} {key}{one}" for one in differing(got[key], wanted[key])]
        for one, its in ((model, optimizer), (fresh_model, fresh)):
            train(one, its)
        for (name, ours), theirs in zip(
            fresh_model.named_parameters(), model.parameters(), strict=True
        ):
            if is_exact:
                wrong += [
                    f"{kind} {name} goes on{one}" for one in differing(ours.data, theirs.data)
                ]
    return wrong


@job
def sharded_states(shared):
    return sharded_states_of(shared, 2)


@job
def sharded_states_of_one(shared):
    return sharded_states_of(shared, 1)
