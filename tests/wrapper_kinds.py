"""Tensors that consist of others, as libraries make them."""

import torch
from torch.utils._pytree import tree_map


class Quantised(torch.Tensor):
    """int8 codes and a scale for each row; ops see it dequantised, and it cannot be copied into."""

    @staticmethod
    def __new__(cls, codes, scale, zero=0):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale, zero=0):
        self.codes, self.scale, self.zero = codes, scale, zero

    def __tensor_flatten__(self):
        return ["codes", "scale"], (self.zero,)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], *context)

    def __repr__(self):
        return "Quantised"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function in (aten.detach.default, aten.alias.default):
            return cls(args[0].codes, args[0].scale, args[0].zero)
        if function is aten.slice.Tensor and args[1] == 0:
            return type(args[0]).of_rows(args[0], slice(*args[2:4]))
        if function is aten.view.default and tuple(args[1]) == tuple(args[0].shape):
            return cls(args[0].codes, args[0].scale, args[0].zero)

        def plain(value):
            if not isinstance(value, Quantised):
                return value
            return (value.codes.float() - value.zero) * value.scale[:, None]

        if function is aten.copy_.default:
            raise NotImplementedError("copy_ into codes")
        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def of_rows(self, rows):
        return Quantised(self.codes[rows], self.scale[rows], self.zero)


class Shaped(Quantised):
    """Codes lie flat, and its context says the shape; each shard has another one."""

    @staticmethod
    def __new__(cls, codes, scale, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, codes, scale, shape):
        self.codes, self.scale, self.shape_said = codes, scale, tuple(shape)

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"shape": self.shape_said}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], context["shape"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function in (aten.detach.default, aten.alias.default, aten.view.default):
            return Shaped(args[0].codes, args[0].scale, args[0].shape_said)
        if function is aten.slice.Tensor and args[1] == 0:
            return args[0].of_rows(slice(*args[2:4]))
        raise NotImplementedError(str(function))

    def of_rows(self, rows):
        columns = self.shape_said[1]
        codes = self.codes.view(self.shape_said)[rows].reshape(-1)
        return Shaped(codes, self.scale[rows], (len(codes) // columns, columns))


class Other(Quantised):
    """The same under another name."""


class Odd:
    """A context that is not plain."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    def __repr__(self):
        return f"Odd({self.value})"


def quantised(rows=4, columns=6, *, seed=0, kind=Quantised, zero=0):
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=made)
    return kind(codes, torch.rand(rows, generator=made), zero)


class Momentum8(torch.optim.Optimizer):
    """Keeps its momentum quantised, a new tensor at every step."""

    def __init__(self, params, lr=0.1, kind=Quantised):
        super().__init__(params, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.one(parameter, group["lr"])

    def one(self, parameter, lr):
        state = self.state[parameter]
        if parameter.ndim != 2:
            return
        before = state["m"].codes.float() * state["m"].scale[:, None] if state else 0
        now = before * 0.9 + parameter.grad
        scale = now.abs().amax(1) / 127 + 1e-9
        state["m"] = self.kind((now / scale[:, None]).round().to(torch.int8), scale)
        state["step"] = state.get("step", 0) + 1
        parameter.sub_(now, alpha=lr)


def inner_of(value):
    """Return all plain tensors in a wrapper, by path."""
    if not hasattr(value, "__tensor_flatten__"):
        return {(): value.detach()}
    return {
        (name, *path): one
        for name in value.__tensor_flatten__()[0]
        for path, one in inner_of(getattr(value, name)).items()
    }


def assert_same(value, other):
    ours, theirs = inner_of(value), inner_of(other)
    assert type(value) is type(other)
    assert ours.keys() == theirs.keys()
    for path, one in ours.items():
        assert one.dtype == theirs[path].dtype
        assert torch.equal(one, theirs[path]), path
