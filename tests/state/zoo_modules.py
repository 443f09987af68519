"""The modules of the zoo."""

import io
import warnings

import torch
from torch import nn
from torch.ao.nn.quantized.dynamic import Linear as DynamicLinear
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zoo import Job, Row, job_of, loss_of, numbers, sgd

X = numbers(4, 3)
IDS = torch.tensor([[0, 1, 2], [2, 2, 4]])


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def compiled(module):
    return torch.compile(module, backend="eager")


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


def in_data_parallel(module):
    return nn.DataParallel(module)


def sparse_sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def changed(module, change):
    change(module)
    return module


# --- modules with something odd in them ---


class Buffers(nn.Module):
    """Buffers of every kind; one is None at first."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("late", None)
        self.register_buffer("phase", torch.rand(3, dtype=torch.complex64))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("f8", torch.rand(4).to(torch.float8_e4m3fn))
        self.register_buffer("u16", torch.randint(0, 60000, (3,)).to(torch.uint16))

    def forward(self, x):
        self.seen += 1
        return self.body(x) * self.passing


class LateBuffer(Buffers):
    """Has one more buffer from the first step on, as a fresh one has not."""

    def forward(self, x):
        self.late = torch.full((3,), 1.5) + self.seen
        return super().forward(x)


class WithExtra(nn.Module):
    """Extra state of a kind that is given; it changes, in size as well, at each step."""

    def __init__(self, kind):
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.kind, self.steps, self.loaded = kind, 0, None

    def forward(self, x):
        if torch.is_grad_enabled() and self.training:
            self.steps += 1
        return self.body(x)

    def get_extra_state(self):
        return EXTRAS[self.kind](self.steps)

    def set_extra_state(self, state):
        self.loaded = state
        self.steps = STEPS_OF[self.kind](state)


def stream_of(steps):
    stream = io.BytesIO(bytes(range(steps)))
    stream.seek(0)
    return stream


EXTRAS = {
    "bytes": lambda n: b"x" * n,
    "stream": stream_of,
    "dict": lambda n: {"n": n, 3: (n, [None, "a.b"]), "t": torch.full((n,), 2.5)},
    "tensor": lambda n: torch.arange(n, dtype=torch.float64),
    "large tensor": lambda n: torch.arange(10_000 * n),
    "uint8 tensor": lambda n: torch.full((n,), n, dtype=torch.uint8),
    "tuple": lambda n: (n, {"a": torch.ones(n, 2)}, (n,)),
    "list": lambda n: [torch.ones(2)] * n,
    "int": lambda n: n,
    "text": lambda n: "é" * n,
    "empty dict": lambda n: {"n": 1} if n else {},
    "packed look-alike": lambda n: {"tree": (n,), "tensors": [torch.ones(n)]},
}
STEPS_OF = {
    "bytes": len,
    "stream": lambda one: len(one.getvalue()),
    "dict": lambda one: one["n"],
    "tensor": len,
    "large tensor": lambda one: len(one) // 10_000,
    "uint8 tensor": len,
    "tuple": lambda one: one[0],
    "list": len,
    "int": lambda one: one,
    "text": len,
    "empty dict": len,
    "packed look-alike": lambda one: one["tree"][0],
}


class NoneExtra(nn.Linear):
    """As modules of TransformerEngine without FP8."""

    def get_extra_state(self):
        return None

    def set_extra_state(self, state):
        assert state is None


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


class Shared(nn.Module):
    """One block that is run twice, under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([self.first, nn.BatchNorm1d(3), self.first])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.inner = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True, **options)

    def forward(self, x):
        return self.inner(x)[0]


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x):
        return self.inner(x, x, x)[0]


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.ParameterList(
            [torch.rand(3), torch.rand(2, 3), nn.Parameter(torch.rand(3))]
        )
        self.named = nn.ParameterDict(
            {"a": torch.rand(3), "weight": torch.rand(3), "ö ü": torch.rand(3)}
        )
        self.note = nn.ParameterList([torch.rand(1), "not a tensor"])

    def forward(self, x):
        total = sum((one * x[:1]).sum() for one in self.items)
        return total + sum((one * x[0]).sum() for one in self.named.values())


ODD_NAMES = (
    "0",
    "module",
    "_orig_mod",
    "state",
    "a b",
    "ünïcode",
    "tree",
    "x/y",
    "_extra_state",
)


class OddNames(nn.Module):
    def __init__(self, names):
        super().__init__()
        inner = {name: nn.ModuleDict({name: nn.Linear(3, 1)}) for name in names}
        self.blocks = nn.ModuleDict(inner)

    def forward(self, x):
        return [one(x) for inner in self.blocks.values() for one in inner.values()]


class OwnStateDict(nn.Module):
    """Puts more into its state dict, and takes it out when it is loaded."""

    def __init__(self):
        super().__init__()
        self.body, self.epochs = nn.Linear(3, 2), 0

    def forward(self, x):
        self.epochs += 1
        return self.body(x)

    def state_dict(self, *args, **options):
        state = super().state_dict(*args, **options)
        state["epochs"] = self.epochs
        state["history"] = [{"epoch": one, "at": (one, one / 3)} for one in range(self.epochs)]
        return state

    def load_state_dict(self, state, strict=True, assign=False):
        state = dict(state)
        self.epochs = state.pop("epochs")
        assert len(state.pop("history")) == self.epochs
        return super().load_state_dict(state, strict, assign)


class RenamedKeys(nn.Module):
    """Its state dict has a prefix that its modules have not, as models of pytorch-lightning may."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)

    def forward(self, x):
        return self.body(x)

    def state_dict(self, *args, **options):
        state = super().state_dict(*args, **options)
        return {f"net.{key}": value for key, value in state.items()}

    def load_state_dict(self, state, strict=True, assign=False):
        state = {key.removeprefix("net."): value for key, value in state.items()}
        return super().load_state_dict(state, strict, assign)


class Migrated(nn.Module):
    """Its version tells that old checkpoints have no scale."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.register_buffer("scale", torch.rand(2))

    def forward(self, x):
        return self.body(x) * self.scale

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", None) is None or local_metadata["version"] < 2:
            state_dict[f"{prefix}scale"] = torch.zeros(2)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class HalfFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.body[0].requires_grad_(False)

    def forward(self, x):
        return self.body(x)


class Kinds(nn.Module):
    """Parameters of many dtypes and layouts in memory."""

    def __init__(self):
        super().__init__()
        self.f16 = nn.Parameter(torch.rand(3).half())
        self.bf16 = nn.Parameter(torch.rand(3).bfloat16())
        self.f64 = nn.Parameter(torch.rand(3).double())
        self.c64 = nn.Parameter(torch.rand(3, dtype=torch.complex64))
        self.codes = nn.Parameter(torch.randint(-9, 9, (3,), dtype=torch.int8), requires_grad=False)
        self.flags = nn.Parameter(torch.rand(3) > 0.5, requires_grad=False)
        self.scalar = nn.Parameter(torch.rand(()))
        self.across = nn.Parameter(torch.rand(4, 3).t())
        self.last = nn.Parameter(torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.void = nn.Parameter(torch.rand(0, 3))

    def forward(self, x):
        floats = (self.f16, self.bf16, self.f64, self.scalar, self.across, self.last)
        return [*(one.float() for one in floats), self.c64 * 1.5]


class Expanded(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.row = nn.Parameter(torch.rand(1, 3).expand(4, 3), requires_grad=False)
        self.register_buffer("column", torch.rand(3, 1).expand(3, 5))

    def forward(self, x):
        return self.body(x + self.row)


class Flat(nn.Module):
    """Its parameters are views of one buffer of memory, as fused optimizers make them."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        flat = torch.cat([one.detach().reshape(-1) for one in self.body.parameters()])
        at = 0
        for one in self.body.parameters():
            one.data = flat[at : at + one.numel()].view(one.shape)
            at += one.numel()

    def forward(self, x):
        return self.body(x)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.body(x))


def lazy(initialised):
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    if initialised:
        module(X)
    return module


def lazy_alone(initialised):
    """An optimizer takes no lazy parameters of a shape that is not known; there is none."""
    return job_of(lazy(initialised), X, optimizer=None)


def never_run():
    module = lazy(False)
    return Job({"model": module}, lambda: None)


def old(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def pruned():
    module = mlp()
    prune.l1_unstructured(module[0], "weight", amount=0.4)
    prune.random_structured(module[2], "weight", amount=1, dim=0)
    return module


def functional():
    module = mlp()
    job = job_of(module, X)
    job.also = lambda: torch.func.functional_call(
        module, {key: value * 2 for key, value in module.state_dict().items()}, (X,)
    )
    return job


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear}, dtype=torch.qint8)
    assert isinstance(module[0], DynamicLinear)
    return job_of(module, X, optimizer=None)


def fake_quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = mlp().train()
        module.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
        inner = torch.ao.quantization.prepare_qat(module)
    return job_of(inner, X)


def averaged(**options):
    job = job_of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), X)
    average = job.parts["average"] = AveragedModel(job.parts["model"], **options)
    train = job.step

    def step():
        train()
        average.update_parameters(job.parts["model"])

    job.step = step
    return job


def graph():
    return torch.fx.symbolic_trace(nn.Sequential(mlp(), nn.BatchNorm1d(2)))


def scripted():
    return old(lambda: torch.jit.script(Scripted()))


def generator_and_discriminator():
    job = job_of(mlp(), X)
    other = job_of(nn.Sequential(nn.Linear(3, 1)), X)
    job.parts |= {"critic": other.parts["model"], "critic_optim": other.parts["optim"]}
    first = job.step
    job.step = lambda: (first(), other.step())
    return job


def dropped_in():
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))


def spectral_norm_new():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 1))


def unused():
    module = nn.ModuleDict({"body": nn.Linear(3, 2), "never": nn.Linear(7, 7)})
    optim = sgd(module)

    def step():
        loss_of(module["body"](X)).backward()
        optim.step()
        optim.zero_grad()

    return Job({"model": module, "optim": optim}, step)


IMAGE = numbers(2, 4, 5, 5)
WORDS = numbers(2, 3, 4)
SEQUENCE = numbers(2, 5, 3)
SEQUENTIAL = nn.Sequential

MODULES: dict[str, Row] = {}


def row(name, make, *inputs, **stated):
    """Add a module, with SGD over it."""
    options = {key: stated.pop(key) for key in ("optimizer",) if key in stated}
    MODULES[name] = Row(lambda: job_of(make(), *(inputs or (X,)), **options), **stated)


def job_row(name, make, **stated):
    MODULES[name] = Row(make, **stated)


for norm in (nn.BatchNorm2d, nn.SyncBatchNorm):
    row(f"{norm.__name__}, evaluated", lambda n=norm: SEQUENTIAL(n(4)).eval(), IMAGE)
row("BatchNorm1d", lambda: SEQUENTIAL(nn.Linear(3, 4), nn.BatchNorm1d(4)))
row("BatchNorm2d, momentum None", lambda: nn.BatchNorm2d(4, momentum=None), IMAGE)
row("BatchNorm2d without running statistics",
    lambda: nn.BatchNorm2d(4, track_running_stats=False), IMAGE)  # fmt: skip
row("BatchNorm3d", lambda: nn.BatchNorm3d(2), numbers(2, 2, 3, 3, 3))
row("GroupNorm, InstanceNorm, LayerNorm, RMSNorm", lambda: SEQUENTIAL(
    nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    nn.LayerNorm([5, 5]), nn.RMSNorm([5])), IMAGE)  # fmt: skip
row("Conv2d, ConvTranspose2d, PReLU", lambda: SEQUENTIAL(
    nn.Conv2d(4, 6, 3, groups=2), nn.PReLU(6), nn.ConvTranspose2d(6, 2, 2)), IMAGE)  # fmt: skip
for recurrent in (nn.LSTM, nn.GRU, nn.RNN):
    row(recurrent.__name__, lambda kind=recurrent: Recurrent(kind), SEQUENCE)
row("LSTM with projections", lambda: Recurrent(nn.LSTM, proj_size=2), SEQUENCE)
row("MultiheadAttention", Attention, WORDS)
row("MultiheadAttention, other sizes of keys", lambda: Attention(
    kdim=4, vdim=4, add_bias_kv=True), WORDS)  # fmt: skip
row("TransformerEncoder with dropout", lambda: nn.TransformerEncoder(
    nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2), WORDS)  # fmt: skip
row("TransformerDecoderLayer", lambda: nn.TransformerDecoderLayer(4, 2, 8, 0.0), WORDS, WORDS)
row("Embedding(max_norm)", lambda: nn.Embedding(5, 3, max_norm=0.5, padding_idx=1), IDS)
row("Embedding(sparse)", lambda: nn.Embedding(5, 3, sparse=True), IDS, optimizer=sparse_sgd)
row("EmbeddingBag", lambda: nn.EmbeddingBag(5, 3, mode="mean"), IDS)
row("EmbeddingBag(sparse)", lambda: nn.EmbeddingBag(
    5, 3, mode="sum", sparse=True), IDS, optimizer=sparse_sgd)  # fmt: skip
row("Bilinear", lambda: nn.Bilinear(3, 3, 2), X, X)
row("Dropout", dropped_in)
row("ParameterList and ParameterDict", Listed)
row("names that look like others", lambda: OddNames(ODD_NAMES))
row("buffers of all kinds", Buffers)
row("a buffer that is None at first", LateBuffer)
row("a buffer that became None", lambda: LateBuffer(), fresh_steps=1, before=2)
for extra in EXTRAS:
    row(f"extra state: {extra}", lambda kind=extra: SEQUENTIAL(WithExtra(kind), nn.ReLU()))
    row(f"extra state: {extra}, restored into a trained one",
        lambda kind=extra: WithExtra(kind), fresh_steps=5)  # fmt: skip
row("extra state: None", lambda: SEQUENTIAL(NoneExtra(3, 2)))
row("tied", Tied, IDS)
row("untied, as it was tied once", lambda: Tied(tied=False), IDS)
row("a block under two names", Shared)
row("no parameters", lambda: SEQUENTIAL(nn.ReLU()), optimizer=None)
row("empty modules", lambda: SEQUENTIAL(
    nn.Identity(), nn.Sequential(), nn.Flatten()), optimizer=None)  # fmt: skip
job_row("lazy, not run yet", never_run)
job_row("lazy, run before it is restored", lambda: lazy_alone(True))
job_row("lazy, run before the save, not before the restore", lambda: lazy_alone(False))
row("lazy, run before the optimizer is made", lambda: lazy(True))
row("weight_norm (old)",
    lambda: old(lambda: SEQUENTIAL(nn.utils.weight_norm(nn.Linear(3, 4)))))  # fmt: skip
row("spectral_norm (old)",
    lambda: old(lambda: SEQUENTIAL(nn.utils.spectral_norm(nn.Linear(3, 4)))))  # fmt: skip
row("weight_norm", lambda: SEQUENTIAL(parametrizations.weight_norm(nn.Linear(3, 4))))
row("spectral_norm", spectral_norm_new)
row("orthogonal", lambda: SEQUENTIAL(parametrizations.orthogonal(nn.Linear(3, 3))))
row("pruned", pruned)
job_row("quantised, dynamic", quantised)
job_row("quantisation-aware", fake_quantised)
WRAPPERS = {
    "compile": compiled,
    "compile in place": compiled_in_place,
    "checkpoint_wrapper": checkpoint_wrapper,
    "DataParallel": in_data_parallel,
}
for outer, wrap in WRAPPERS.items():
    row(outer, lambda wrap=wrap: wrap(mlp()))
    for inner, wrap_inner in WRAPPERS.items():
        if outer != inner:
            row(f"{outer} of {inner}", lambda w=wrap, i=wrap_inner: w(SEQUENTIAL(i(mlp()))))
            row(f"{outer} right around {inner}", lambda w=wrap, i=wrap_inner: w(i(mlp())))
job_row("functional_call beside it", functional)
row("ScriptModule", scripted)
row("fx GraphModule", graph)
job_row("AveragedModel", averaged)
job_row("AveragedModel with buffers, EMA",
    lambda: averaged(multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True))  # fmt: skip
row("state_dict and load_state_dict of its own", OwnStateDict)
row("state_dict with other names", RenamedKeys)
row("_load_from_state_dict with versions", lambda: SEQUENTIAL(Migrated()))
row("partly frozen", HalfFrozen)
row("parameters of all dtypes and strides", Kinds)
row("expanded", Expanded)
row("views of one flat buffer", Flat)
job_row("a parameter without a gradient", unused)
job_row("two models with an optimizer each", generator_and_discriminator)
