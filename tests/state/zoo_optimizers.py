"""The optimizers of the zoo."""

import collections
import inspect

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from zoo import Job, Row, loss_of, numbers

X = numbers(4, 3)
OPTIMIZERS: dict[str, Row] = {}


def torchs_own():
    """Return torch's optimizers by name, those of later versions as well."""
    found = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    }
    del found["Optimizer"]
    return found


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def without_biases():
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))


def trained(model, optimizer, *others, x=X, loss=loss_of):
    """Return a job whose optimizers step by a closure, which all of torch's take."""
    everything = (optimizer, *others)

    def closure():
        model.zero_grad()
        found = loss(model(x))
        found.backward()
        return found

    def step():
        for one in everything:
            one.step(closure)

    names = ["optim", *(f"optim{number}" for number in range(2, 2 + len(others)))]
    return Job({"model": model, **dict(zip(names, everything, strict=True))}, step)


def sparse_embedding(make):
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Embedding(5, 3).requires_grad_(False))
    return trained(model[0], make(model[0].parameters()), x=torch.tensor([1, 4, 1]))


# Options that change what state there is, or how it is kept. Those that an optimizer does not know
# are not tried with it.
FLAGS = {
    "amsgrad": True,
    "capturable": True,
    "centered": True,
    "decoupled_weight_decay": True,
    "differentiable": True,
    "foreach": True,
    "fused": True,
    "history_size": 3,
    "initial_accumulator_value": 0.5,
    "line_search_fn": "strong_wolfe",
    "lr": torch.tensor(0.05),
    "maximize": True,
    "momentum": 0.9,
    "weight_decay": 0.1,
}
TOGETHER = [
    ("amsgrad", "maximize"),
    ("amsgrad", "foreach", "weight_decay"),
    ("amsgrad", "fused"),
    ("centered", "momentum"),
    ("foreach", "momentum"),
    ("capturable", "foreach"),
    ("lr", "capturable", "foreach"),
    ("lr", "fused"),
    ("momentum", "nesterov"),
]
MODELS = {"Muon": without_biases}
CANNOT = {("SparseAdam", "lr"), ("LBFGS", "lr")}  # not what they are made for on this device


def of_torch(kind, flags):
    def make():
        options = {flag: True if flag == "nesterov" else FLAGS[flag] for flag in flags}
        options = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in options.items()
        }
        if kind is torch.optim.SparseAdam:
            return sparse_embedding(lambda parameters: kind(parameters, **options))
        model = MODELS.get(kind.__name__, mlp)()
        return trained(model, kind(model.parameters(), **options))

    return make


def works(make):
    """Tell whether torch itself can do it here: not every flag is for CPUs, or for every kind."""
    try:
        torch.manual_seed(0)
        make().step()
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError):
        return False
    return True


for _name, _kind in torchs_own().items():
    _known = set(inspect.signature(_kind).parameters)
    for _flags in [(), *((one,) for one in FLAGS), *TOGETHER]:
        if set(_flags) <= _known:
            _make = of_torch(_kind, _flags)
            _title = f"{_name}({', '.join(_flags)})"
            if works(_make):
                OPTIMIZERS[_title] = Row(_make)
                if _flags in ((), ("amsgrad",), ("momentum",)):
                    OPTIMIZERS[f"{_title}, restored into a trained one"] = Row(_make, fresh_steps=3)


def row(name, **stated):
    def add(make):
        OPTIMIZERS[name] = Row(make, **stated)
        return make

    return add


# --- how they are made and kept ---


@row("named parameters")
def _():
    model = mlp()
    return trained(model, torch.optim.AdamW(model.named_parameters(), lr=0.1))


@row("two over one module")
def _():
    model = mlp()
    first = torch.optim.AdamW(model[0].parameters(), lr=0.1)
    return trained(model, first, torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9))


@row("two over the same parameters")
def _():
    model = mlp()
    first = torch.optim.AdamW(model.parameters(), lr=0.1)
    return trained(model, first, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@row("one over several modules")
def _():
    models = {"body": nn.Linear(3, 4), "head": nn.Linear(4, 2)}
    whole = nn.Sequential(*models.values())
    job = trained(whole, torch.optim.AdamW(whole.parameters(), lr=0.1))
    del job.parts["model"]
    job.parts |= models
    return job


@row("one over parts of two modules")
def _():
    body, head = nn.Linear(3, 4), nn.Linear(4, 2)
    mine = [body.weight, head.bias]
    job = trained(nn.Sequential(body, head), torch.optim.Adam(mine, lr=0.1))
    del job.parts["model"]
    job.parts |= {"body": body, "head": head}
    return job


@row("a group for each parameter")
def _():
    model = mlp()
    groups = [{"params": [one], "lr": 0.1 + at / 7} for at, one in enumerate(model.parameters())]
    return trained(model, torch.optim.AdamW(groups))


@row("groups with options of their own")
def _():
    model = mlp()
    groups = [
        {"params": list(model[0].parameters()), "name": "body", "lr_scale": 0.5, "tags": ["a", 1]},
        {"params": list(model[2].parameters()), "betas": (0.8, 0.9), "where": {"depth": (1, 2)}},
    ]
    return trained(model, torch.optim.AdamW(groups, lr=0.1))


@row("a group added by hand")
def _():
    model = mlp()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.3})
    return trained(model, optimizer)


@row("groups without parameters")
def _():
    model = mlp()
    groups = [{"params": [], "lr": 0.5}, {"params": list(model.parameters())}, {"params": []}]
    return trained(model, torch.optim.AdamW(groups, lr=0.1))


@row("tied parameters")
def _():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.1))


@row("learning rates that are tensors, one for each group")
def _():
    model = mlp()
    groups = [
        {"params": list(part.parameters()), "lr": torch.tensor(0.1 + at)}
        for at, part in enumerate((model[0], model[2]))
    ]
    return trained(model, torch.optim.AdamW(groups))


@row("betas that are tensors")
def _():
    model = mlp()
    betas = (torch.tensor(0.8), torch.tensor(0.9))
    return trained(
        model,
        torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), betas=betas, foreach=False),
    )


@row("parameters in bfloat16")
def _():
    model = mlp().bfloat16()
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.1), x=X.bfloat16())


@row("complex parameters")
def _():
    model = nn.Linear(3, 2, dtype=torch.complex64)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.1), x=X.to(torch.complex64))


@row("a model that is averaged beside it")
def _():
    model = mlp()
    job = trained(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    job.parts["average"] = AveragedModel(model)
    first = job.step
    job.step = lambda: (first(), job.parts["average"].update_parameters(model))
    return job


@row("a lazy model, made before it is run")
def _():
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.1))


@row(
    "a parameter that is in no registered module",
    refused="are in none of the registered",
    why="it has no name to be saved under: register its module too",
)
def _():
    model, other = mlp(), mlp()
    return trained(model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))


# --- optimizers made by hand ---


class Plain(torch.optim.Optimizer):
    """Steps down the gradient; what it keeps is in `keep`."""

    def __init__(self, params, lr=0.1, **defaults):
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.sub_(one.grad * self.rate(one, self.state[one]) * group["lr"])
        return loss

    def rate(self, one, state):
        return 1.0


def by_hand(kind, **options):
    model = mlp()
    return trained(model, kind(model.parameters(), **options))


def plain(name, **stated):
    def add(kind):
        OPTIMIZERS[name] = Row(lambda: by_hand(kind), **stated)
        return kind

    return add


@plain("state in other dtypes")
class OtherDtypes(Plain):
    def rate(self, one, state):
        state["half"] = one.detach().half() / 3
        state["wide"] = one.detach().double() / 3
        state["count"] = state.get("count", torch.zeros((), dtype=torch.int64)) + 1
        state["f8"] = one.detach().to(torch.float8_e5m2)
        state["flags"] = one.detach() > 0
        return 1 / float(state["count"])


@plain("state in codes of 8 bits, with tables (bitsandbytes)")
class Codes(Plain):
    def rate(self, one, state):
        table = torch.linspace(-1, 1, 256)
        state["state1"] = (one.detach() * 50).to(torch.int8).view(torch.uint8)
        state["qmap1"] = table
        state["absmax1"] = one.detach().abs().amax().reshape(1)
        state["step"] = state.get("step", 0) + 1
        return table[state["state1"].long()].mean() + state["step"]


@plain("nested state")
class NestedState(Plain):
    def rate(self, one, state):
        n = state.get("n", 0) + 1
        state["n"] = n
        state["deep"] = {"list": [one.detach() / n, {"t": (n, one.detach().half())}], 3: None}
        state["tuple"] = (n, "a", one.detach() * n)
        state["big"] = [torch.full((3000,), n / 3, dtype=torch.float64)]
        return 1 / n


@plain("state of other shapes (Shampoo, GaLore)")
class OtherShapes(Plain):
    def rate(self, one, state):
        flat = one.detach().reshape(one.shape[0], -1)
        for dim, matrix in enumerate((flat @ flat.T, flat.T @ flat)):
            state[f"preconditioner_{dim}"] = state.get(f"preconditioner_{dim}", 0) + matrix
        state["none"] = torch.empty(0)
        return 1 / (1 + state["preconditioner_0"].trace())


@plain("state that is not in a dict")
class BareState(Plain):
    def rate(self, one, state):
        known = self.state[one]
        self.state[one] = one.detach() / 3 + (known if isinstance(known, torch.Tensor) else 0)
        return self.state[one].mean()


@plain("state of the whole, under names of its own")
class GlobalState(Plain):
    def rate(self, one, state):
        whole = self.state.setdefault("global", {"steps": 0, "norm": torch.zeros(())})
        whole["steps"] += 1
        whole["norm"] = whole["norm"] + one.grad.norm()
        return 1 / whole["steps"]


@plain("values of many kinds as state")
class ManyKinds(Plain):
    def rate(self, one, state):
        state["f"] = state.get("f", 0.1) * 1.5
        state |= {"none": None, "text": "é.ö", "flag": True, "complex": 1 + 2j, "bytes": b"\0"}
        state["set"] = {1, 2}
        return state["f"]


@plain("more in its state dict (Lookahead-like)")
class MoreKeys(Plain):
    def __init__(self, params):
        super().__init__(params)
        self.slow = [one.detach().clone() for group in self.param_groups for one in group["params"]]
        self.steps = 0

    def rate(self, one, state):
        self.steps += 1
        self.slow = [one / 2 + self.steps for one in self.slow]
        return self.slow[0].mean() / 100

    def state_dict(self):
        return super().state_dict() | {"slow": self.slow, "steps": self.steps, "at": (1, {2: "x"})}

    def load_state_dict(self, state):
        state = dict(state)
        self.slow, self.steps, at = state.pop("slow"), state.pop("steps"), state.pop("at")
        assert at == (1, {2: "x"})
        super().load_state_dict(state)


@plain("__setstate__ of its own")
class OwnSetState(Plain):
    def __init__(self, params):
        super().__init__(params, added_later=False)

    def __setstate__(self, state):
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("added_later", False)

    def rate(self, one, state):
        state["m"] = state.get("m", 0) * 0.9 + one.grad
        return state["m"].mean()


@plain("load hooks of its own")
class Hooked(Plain):
    def __init__(self, params):
        super().__init__(params)
        self.loads = 0
        self.register_load_state_dict_post_hook(self.loaded)

    @staticmethod
    def loaded(optimizer):
        optimizer.loads += 1

    def rate(self, one, state):
        state["m"] = one.detach().bfloat16()
        return 1.0


@plain("state dict of another layout")
class OtherLayout(Plain):
    """Its state dict has no "state" and no numbers, as that of torch_optimizer's Lookahead."""

    def rate(self, one, state):
        state["m"] = state.get("m", 0) * 0.9 + one.grad
        return state["m"].mean()

    def state_dict(self):
        own = super().state_dict()
        return {"fast_state": own["state"], "groups": own["param_groups"], "kind": "other"}

    def load_state_dict(self, state):
        assert state["kind"] == "other"
        super().load_state_dict({"state": state["fast_state"], "param_groups": state["groups"]})


class Wrapping(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer: an optimizer by name that hands all on to another."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def add_param_group(self, group):
        self.optimizer.add_param_group(group)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.optimizer.step(closure)


class HandMade(torch.optim.Optimizer):
    """Is an optimizer without torch's `__init__`, and holds no other."""

    def __init__(self, params):
        self.param_groups = [{"params": list(params), "lr": 0.1}]
        self.state = collections.defaultdict(dict)
        self.defaults = {}

    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for one in self.param_groups[0]["params"]:
                one.sub_(one.grad * 0.1)
                self.state[one]["n"] = self.state[one].get("n", 0) + 1

    def state_dict(self):
        numbers = {id(one): at for at, one in enumerate(self.param_groups[0]["params"])}
        state = {numbers[id(one)]: dict(kept) for one, kept in self.state.items()}
        return {"state": state, "param_groups": [{"lr": 0.1, "params": list(numbers.values())}]}

    def load_state_dict(self, state):
        parameters = self.param_groups[0]["params"]
        self.state.clear()
        for at, kept in state["state"].items():
            self.state[parameters[at]] = dict(kept)


@row("a wrapper without __init__ (accelerate)")
def _():
    model = mlp()
    return trained(model, Wrapping(torch.optim.AdamW(model.parameters(), lr=0.1)))


@row("a wrapper of a wrapper without __init__")
def _():
    model = mlp()
    return trained(model, Wrapping(Wrapping(torch.optim.AdamW(model.parameters(), lr=0.1))))


@row("made by hand, without __init__")
def _():
    return by_hand(HandMade)


@row("an optimizer that is in no class of torch's")
def _():
    class Duck:
        def __init__(self, model):
            self.inner = torch.optim.AdamW(model.parameters(), lr=0.1)
            self.scale = 1.0

        def step(self, closure):
            self.scale *= 1.5
            self.inner.step(closure)

        def state_dict(self):
            return {"inner": self.inner.state_dict(), "scale": self.scale}

        def load_state_dict(self, state):
            self.inner.load_state_dict(state["inner"])
            self.scale = state["scale"]

    model = mlp()
    return trained(model, Duck(model))


# --- state that no restart could bring back ---


@plain("sparse state")
class SparseState(Plain):
    def rate(self, one, state):
        state["m"] = one.detach().to_sparse()
        return 1.0


@plain(
    "a function as state",
    refused=r"'optim\.state\.0\.weight\.rule'",
    when="after the first step",
    why="it needs code to come back: `allow_pickle=True`",
)
class FunctionState(Plain):
    def rate(self, one, state):
        state["rule"] = loss_of
        return 1.0


# --- groups that are others now than when they were saved ---


def adam(groups):
    return torch.optim.AdamW(groups, lr=0.1)


def in_groups(*layout, lr=0.1):
    """Return a job whose parameters are in groups as the layout says, by their places."""
    model = mlp()
    every = list(model.parameters())
    return trained(model, adam([{"params": [every[at] for at in group]} for group in layout]))


REGROUPED = {
    "reordered groups": (([0, 1], [2, 3]), ([2, 3], [0, 1])),
    "reordered parameters": (([0, 1, 2, 3],), ([3, 1, 0, 2],)),
    "one group became two": (([0, 1, 2, 3],), ([0, 2], [1, 3])),
    "two groups became one": (([0, 2], [1, 3]), ([0, 1, 2, 3],)),
    "one for each became one": (([0], [1], [2], [3]), ([0, 1, 2, 3],)),
    "one became one for each": (([0, 1, 2, 3],), ([3], [2], [1], [0])),
}
