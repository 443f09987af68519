"""What is captured is what torch's own state dicts hold, under the same names."""

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,  # no public name, and names of modules change with it in a way of its own
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dcp_checkfreq import UnsupportedState
from dcp_checkfreq.shards.codec import is_sharded_tensor
from dcp_checkfreq.state.fsdp1_part import Fsdp1ModulePart, Fsdp1OptimizerPart, is_fsdp1
from dcp_checkfreq.state.module_part import ModulePart
from dcp_checkfreq.state.optimizer_part import OptimizerPart
from dcp_checkfreq.state.packed import is_packed
from dcp_checkfreq.state.unpacked import unpack

COMPILED = type(torch.compile(nn.Identity(), backend="eager"))


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def facts(value, memory=True):
    """All that makes a state dict what it is, the order and the memory of tensors included."""

    def of_all(values):
        return [facts(one, memory) for one in values]

    if isinstance(value, dict):
        return type(value), list(value), of_all(value.values())
    if isinstance(value, (list, tuple)):
        return type(value), of_all(value)
    if isinstance(value, DTensor):
        return DTensor, value.shape, value.placements, facts(value.to_local(), memory)
    if is_sharded_tensor(value):
        return value.metadata(), of_all(shard.tensor for shard in value.local_shards())
    if not isinstance(value, torch.Tensor):
        return type(value), value
    if value.is_meta:
        return type(value), value.device
    where = value.data_ptr() if memory else None
    content = value.dtype, value.shape, value.stride(), value.tolist()
    return type(value), value.requires_grad, where, content


def as_it_was(value):
    """Undo what is only done for DCP."""
    if is_packed(value):
        return unpack(value)
    if isinstance(value, dict):
        return {key: as_it_was(inner) for key, inner in value.items()}
    return [as_it_was(one) for one in value] if type(value) is list else value


class Job:
    """A module and its optimizers, captured next to torch."""

    def __init__(self, module, *optimizers, memory=True):
        self.memory = memory
        self.module = module
        kind = Fsdp1OptimizerPart if is_fsdp1(module) else OptimizerPart
        self.part = (Fsdp1ModulePart if is_fsdp1(module) else ModulePart)("model", module)
        self.optimizers = [kind("optim", optimizer, {"model": module}) for optimizer in optimizers]

    def check(self):
        if is_fsdp1(self.module) != isinstance(self.part, Fsdp1ModulePart):
            optimizers = [part.optimizer for part in self.optimizers]
            self.__init__(self.module, *optimizers, memory=self.memory)
        for part in self.optimizers:
            # Torch makes state where there is none, by a step; we leave it at that.
            torchs = get_optimizer_state_dict(self.module, part.optimizer)
            ours = as_it_was(part.capture())
            if part.optimizer.state or not isinstance(part, Fsdp1OptimizerPart):
                assert facts(ours, self.memory) == facts(torchs, self.memory)
        torchs = get_model_state_dict(self.module)
        ours = as_it_was(dict(self.part.capture()))
        assert facts(ours, self.memory) == facts(dict(torchs), self.memory)

    def train(self):
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        for part in self.optimizers:
            part.optimizer.step()


def assert_named_alike(job):
    """Whatever is trained, names are those of torch."""
    job.check()
    for _ in range(2):
        job.train()
        job.check()


class Kept(nn.Module):
    """A parameter, buffers that are saved and not, and state that is no tensor."""

    def __init__(self, **children):
        super().__init__()
        self.w = nn.Parameter(torch.rand(2, 2))
        self.register_buffer("saved", torch.rand(2))
        self.register_buffer("passing", torch.rand(2), persistent=False)
        self.extra = {"id": id(self), "tensor": self.saved, "none": None}
        for name, child in children.items():
            self.add_module(name, child)

    def get_extra_state(self):
        return self.extra


class Inner(nn.Module):
    """Its child may be named as those of wrappers are, whose names torch leaves out."""

    def __init__(self, name, child):
        super().__init__()
        self.add_module(name, child)


class Net(nn.Module):
    """`norm` is not trained."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), compiled(linear())
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)


def compiled(module):
    return module if isinstance(module, COMPILED) else torch.compile(module, backend="eager")


def linear(**options):
    return nn.Linear(2, 2, **options)


def tied():
    module = nn.Sequential(linear(), linear(), linear(bias=False))
    module[2].weight = module[0].weight
    return module


# What a hook does to the state dict of `Net`.
HOOKS = {
    "adds": lambda net, state: state.update(more=net.a.weight.detach(), number=3),
    "adds before": lambda net, state: (state.update(more=3), state.move_to_end("more", False)),
    "renames": lambda net, state: state.update(new=state.pop("seen")),
    "drops": lambda net, state: state.pop("a.weight"),
    "reorders": lambda net, state: state.move_to_end("c._orig_mod.weight", last=False),
    "exchanges": lambda net, state: state.update({"a.bias": state["b.bias"]}),
    "views": lambda net, state: state.update({"a.weight": state["a.weight"][:1]}),
    "numbers": lambda net, state: state.update({"a.weight": 3}),
}


def hook(net, change):
    def on_state(module, state, prefix, metadata):
        change(module, state)

    net.register_state_dict_post_hook(on_state)
    return net


def copy_all(net, state):
    state.update({key: value.clone() for key, value in state.items()})


MODULES = {
    "one layer": linear,
    "nested": lambda: nn.ModuleDict({"b": nn.ModuleList([linear(), Kept(in_it=Kept())])}),
    "tied": tied,
    "shared": lambda: nn.ModuleDict({"b": (one := linear()), "a": nn.Sequential(one), "c": one}),
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(2), nn.BatchNorm1d(2)),
    "list": lambda: nn.ParameterList([torch.ones(1), torch.ones(2)]),
    "dict": lambda: compiled(nn.ParameterDict({"z": torch.ones(1), "a": torch.ones(2)})),
    "parametrized": lambda: compiled(nn.utils.parametrizations.weight_norm(linear())),
    "compiled": lambda: compiled(nn.Sequential(linear(), Kept())),
    "compiled inside": lambda: nn.Sequential(linear(), compiled(Kept(z=linear())), linear()),
    "compiled in compiled": lambda: compiled(nn.Sequential(linear(), compiled(tied()))),
    "compiled in place": lambda: (module := tied()).compile(backend="eager") or module,
    "compiled and tied": lambda: nn.ModuleList([compiled(module := linear()), module]),
    "checkpointed": lambda: nn.Sequential(checkpoint_wrapper(linear()), linear()),
    "child named as a wrapper's": lambda: nn.Sequential(Inner("module", linear())),
    "meta": lambda: nn.Sequential(compiled(linear()), linear()).to("meta"),
    "empty tensors": lambda: compiled(nn.ParameterList([torch.ones(0), torch.ones(0, 2)])),
    "half": lambda: nn.Sequential(compiled(linear()), linear()).to(torch.bfloat16),
    "net": Net,
    **{f"hook {name}": lambda do=do: hook(Net(), do) for name, do in HOOKS.items()},
}


def adamw(module):
    return torch.optim.AdamW(module.parameters())


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_modules_are_named_as_torch_names_them(make):
    module = make()
    assert_named_alike(Job(module, adamw(module)))


ddp = DistributedDataParallel


def fsdp2(module, *parts):
    mesh = init_device_mesh("cpu", (1,))
    for part in (*parts, module):
        fully_shard(part, mesh=mesh)
    return module


GROUPED = {
    "DDP": lambda: ddp(nn.Sequential(linear(), Kept())),
    "DDP inside": lambda: nn.ModuleDict({"b": ddp(linear()), "a": linear()}),
    "DDP of compiled": lambda: ddp(compiled(tied())),
    "compiled DDP": lambda: compiled(ddp(nn.Sequential(compiled(linear()), linear()))),
    "DDP of a child named module": lambda: ddp(Inner("module", linear())),
    "FSDP2": lambda: fsdp2(nn.Sequential(linear(), linear())),
    "FSDP2 of layers": lambda: fsdp2((net := tied()), net[1]),
    "FSDP2 of compiled": lambda: fsdp2((net := nn.Sequential(compiled(linear()), Kept())), net[0]),
    "compiled FSDP2": lambda: compiled(fsdp2(nn.Sequential(linear(), nn.BatchNorm1d(2)))),
}


@pytest.mark.parametrize("make", GROUPED.values(), ids=GROUPED.keys())
def test_wrapped_modules_are_named_as_torch_names_them(group, make):
    module = make()
    assert_named_alike(Job(module, adamw(module)))


class Nested(torch.optim.Optimizer):
    """Its state is more than tensors by name."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "kind": ("a", None), "schedule": [1, 2.5]})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for one in self.param_groups for p in one["params"]):
            if parameter.grad is not None:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["nothing"], state["rate"], state["name"] = None, 0.5, "x"
                inner = state.setdefault("inner", {1: {"deep": [torch.zeros(2), 3]}, "m": {}})
                inner["m"][state["step"] % 2] = torch.rand_like(parameter)


def two_groups(net):
    one, two = [net.b.weight, net.a.bias], [net.c.weight]
    groups = [{"params": one, "lr": 0.5}, {"params": two, "weight_decay": 0.1}]
    return [torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False, amsgrad=True)]


OPTIMIZERS = {
    "SGD with momentum": lambda net: [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)],
    "AdamW": lambda net: [adamw(net)],
    "Adagrad": lambda net: [torch.optim.Adagrad(net.parameters())],
    "names in groups": lambda net: [torch.optim.AdamW(net.named_parameters())],
    "reversed": lambda net: [torch.optim.AdamW(list(net.parameters())[::-1])],
    "two groups": two_groups,
    "two optimizers": lambda net: [adamw(net.c), torch.optim.Adagrad(net.a.parameters())],
    "frozen": lambda net: [adamw(net), net.a.requires_grad_(False)][:1],
    "nested state": lambda net: [Nested(net.parameters())],
}


@pytest.mark.parametrize("trained_first", [False, True], ids=["no state", "trained"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizers_are_named_as_torch_names_them(make, trained_first):
    net = Net()
    job = Job(net, *make(net))
    if trained_first:
        job.train()
    assert_named_alike(job)


def test_an_optimizer_without_state_is_asked_for_every_time():
    net = Net()
    job = Job(net, torch.optim.SGD(net.parameters(), lr=0.1))
    job.check()
    job.train()
    job.check()


def test_hooks_that_make_new_tensors():
    net, optimizer, _ = job_of_net()
    hook(net, copy_all)
    optimizer.register_state_dict_post_hook(lambda _, state: copy.deepcopy(state))
    job = Job(net, optimizer, memory=False)
    job.check()


def fsdp1(module, **options):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_fsdp1(group, inside, original):
    module = fsdp1(linear(), use_orig_params=original)
    module = nn.Sequential(linear(), module) if inside else module
    job = Job(module, adamw(module), memory=False)
    job.check()
    job.train()
    job.check()


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_of_no_registered_module_is_refused_by_name_beside_fsdp1(group):
    module, other = fsdp1(linear(), use_orig_params=True), linear()
    for modules in ({"model": module}, {}):
        with pytest.raises(UnsupportedState, match="'optim' is a AdamW: 2 of its parameters"):
            Fsdp1OptimizerPart("optim", adamw(other), modules)


def follow(optimizer, net):
    """Let the optimizer train what the module has now, and nothing else."""
    there = {id(p): p for p in net.parameters()}
    for one in optimizer.param_groups:
        one["params"] = [p for p in one["params"] if there.pop(id(p), None) is not None]
    new = [p for name, p in net.named_parameters() if id(p) in there and "norm" not in name]
    optimizer.param_groups[-1]["params"] += new
    now = {id(p) for one in optimizer.param_groups for p in one["params"]}
    for gone in [p for p in optimizer.state if id(p) not in now]:
        del optimizer.state[gone]


def setting(**values):
    return lambda net, _: [setattr(net, name, make(net)) for name, make in values.items()]


def taken(layer):
    return layer._parameters.pop("weight")


def new_weight():
    return nn.Parameter(torch.rand(2, 2))


def reload(_, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for one in state["state"].values():
        one["exp_avg"] += 1
    optimizer.load_state_dict(state)


def first(optimizer, number=0):
    return optimizer.param_groups[number]["params"]


# What is changed while a job runs.
CHANGES = {
    "layer added": setting(d=lambda net: linear()),
    "compiled layer added": setting(d=lambda net: compiled(linear())),
    "layer added, not trained": setting(norm2=lambda net: linear()),
    "layer removed": lambda net, _: delattr(net, "b"),
    "layer replaced": setting(a=lambda net: linear()),
    "layers swapped": lambda net, _: vars(net)["_modules"].update(a=net.b, b=net.a),
    "compiled swapped": lambda net, _: vars(net)["_modules"].update(a=net.c, c=net.a),
    "parameter replaced": lambda net, _: setattr(net.a, "weight", new_weight()),
    "parameters tied": lambda net, _: setattr(net.b, "weight", net.a.weight),
    "order of parameters": lambda net, _: net.a._parameters.update(weight=taken(net.a)),
    "load_state_dict": lambda net, _: net.load_state_dict(Net().state_dict()),
    "assigned": lambda net, _: net.load_state_dict(Net().state_dict(), assign=True),
    "bias removed": setting(a=lambda net: linear(bias=False)),
    "frozen": lambda net, _: net.a.requires_grad_(False) and None,
    "compiled in place": setting(a=lambda net: compiled(net.a)),
    "no longer compiled": setting(c=lambda net: net.c._orig_mod),
    "wrapped in place": setting(a=lambda net: nn.Sequential(net.a)),
    **{f"hook {name}": lambda net, _, do=do: hook(net, do) for name, do in HOOKS.items()},
    "buffer no longer saved": lambda net, _: net._non_persistent_buffers_set.add("seen"),
    "buffer saved": lambda net, _: net.register_buffer("passing", torch.rand(2)),
    "buffer replaced": setting(seen=lambda net: torch.rand(2)),
    "new data": lambda net, _: setattr(net.a.bias, "data", torch.rand(2)),
    "group added": lambda net, opt: opt.add_param_group({"params": net.norm.parameters()}),
    "other order": lambda _, opt: first(opt).reverse(),
    "other order of groups": lambda _, opt: opt.param_groups.reverse(),
    "same order, other groups": lambda _, opt: first(opt, 1).insert(0, first(opt).pop()),
    "optimizer.load_state_dict": reload,
    "state cleared": lambda _, opt: (opt.zero_grad(), opt.state.clear()),
    "state of one lost": lambda _, opt: opt.state.pop(first(opt)[1]),
    "learning rate": lambda _, opt: opt.param_groups[1].update(lr=0.3, initial_lr=0.5),
}


def job_of_net():
    net = Net()
    b, a, c = (list(one.parameters()) for one in (net.b, net.a, net.c))
    optimizer = torch.optim.AdamW([{"params": b + a}, {"params": c, "lr": 0.2}])
    return net, optimizer, Job(net, optimizer)


@pytest.mark.parametrize("trained", [False, True], ids=["not trained", "trained"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_noticed(change, trained):
    net, optimizer, job = job_of_net()
    if trained:
        job.train()
    job.check()
    change(net, optimizer)
    follow(optimizer, net)
    job.check()
    job.train()
    job.check()


def test_a_foreign_parameter_is_refused_after_names_were_learned():
    _, optimizer, job = job_of_net()
    job.check()
    optimizer.add_param_group({"params": [new_weight()]})
    with pytest.raises(UnsupportedState, match="1 of its parameters"):
        job.optimizers[0].capture()


LEAVES = [linear, lambda: linear(bias=False), lambda: nn.BatchNorm1d(2), Kept, nn.Identity]
KINDS = [
    lambda *all: nn.ModuleDict({f"{9 - number}": one for number, one in enumerate(all)}),
    lambda *all: nn.ModuleList(all),
    nn.Sequential,
    lambda *all: compiled(nn.Sequential(*all)),
    lambda *all: Inner("module", all[0]),
]
leaves = st.sampled_from(LEAVES).map(lambda make: lambda: make())
trees = st.recursive(
    leaves,
    lambda inner: st.builds(
        lambda kind, all: lambda: kind(*(one() for one in all)),
        st.sampled_from(KINDS),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=6,
)


SAFE = ["layer added", "buffer no longer saved", "buffer saved", "buffer replaced"]
SAFE += ["compiled in place", "wrapped in place", "layer replaced", "learning rate"]
SAFE += ["other order", "other order of groups", "optimizer.load_state_dict", "state cleared"]


class Place:
    """One of the places of modules (or parameters) in a tree, which is chosen by a number."""

    def __init__(self, root, kind, number):
        holders = [vars(one)[kind] for one in root.modules() if not isinstance(one, COMPILED)]
        places = [(one, name) for one in holders for name in one if one[name] is not None]
        self.dict, self.name = places[number % len(places)]
        self.value = self.dict[self.name]

    def put(self, value):
        inside = value.modules() if isinstance(value, nn.Module) else ()
        if all(vars(one)["_modules"] is not self.dict for one in inside):  # else a circle
            self.dict[self.name] = value

    def swap(self, other):
        self.put(other.value)
        if self.dict[self.name] is other.value:
            other.put(self.value)


AT_PLACES = {
    "swap": ("_modules", Place.swap),
    "share": ("_modules", lambda one, other: one.put(other.value)),
    "compile": ("_modules", lambda one, _: one.put(compiled(one.value))),
    "uncompile": ("_modules", lambda one, _: one.put(getattr(one.value, "_orig_mod", one.value))),
    "wrap": ("_modules", lambda one, _: one.put(Inner("inner", one.value))),
    "add": ("_modules", lambda one, _: one.dict.update({f"n{len(one.dict)}": Kept()})),
    "remove": ("_modules", lambda one, _: one.dict.pop(one.name) if len(one.dict) > 1 else None),
    "tie": ("_parameters", lambda one, other: one.put(other.value)),
    "swap two": ("_parameters", Place.swap),
    "replace": ("_parameters", lambda one, _: one.put(nn.Parameter(torch.rand_like(one.value)))),
}
numbers = st.integers(0, 30)
changes_in_trees = st.tuples(st.sampled_from(list(AT_PLACES)), numbers, numbers, st.booleans())
changes_of_net = st.tuples(st.sampled_from(SAFE), st.none(), st.none(), st.booleans())


@given(trees, st.lists(changes_in_trees | changes_of_net, min_size=1, max_size=8))
@examples(60)
def test_whatever_is_changed_names_are_those_of_torch(tree, changes):
    net, optimizer, job = job_of_net()
    net.tree = nn.ModuleDict({"of": tree(), "and": nn.BatchNorm1d(2)})
    job.check()
    for change, i, j, train in changes:
        if change in AT_PLACES:
            kind, act = AT_PLACES[change]
            act(Place(net.tree, kind, i), Place(net.tree, kind, j))
        else:
            CHANGES[change](net, optimizer)
        follow(optimizer, net)
        if train:
            job.train()
        job.check()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (compiled, lambda layer: Inner("_orig_mod", layer)),
        (lambda layer: layer, lambda layer: fsdp1(layer, use_orig_params=True)),
    ],
    ids=["_orig_mod", "FSDP1"],
)
@pytest.mark.filterwarnings("ignore")
def test_wrapped_in_another_way_under_the_same_keys(group, before, after):
    layer = linear()
    net = nn.Sequential(before(layer))
    job = Job(net, *[adamw(net)] if after is ddp else [], memory=False)
    job.check()
    net[0] = after(layer)
    job.check()


class Extra(Inner):
    def get_extra_state(self):
        return id(self)


@pytest.mark.parametrize("tell_apart", ["values", "tensors"])
def test_names_that_overlap_are_told_apart(group, tell_apart):
    if tell_apart == "values":
        net = Extra("module", Extra("none", None))
        net.layer = linear()
    else:
        net = Inner("module", linear(bias=False))
        net.weight = net.module.weight
    job = Job(ddp(net))
    job.check()
    if tell_apart == "tensors":
        net.weight = new_weight()
    job.check()


def test_versions_of_modules_are_kept():
    part = ModulePart("model", Net())
    for _ in range(2):
        ours, torchs = part.capture(), get_model_state_dict(part.module)
        assert type(ours) is type(torchs)
        assert ours._metadata == torchs._metadata
