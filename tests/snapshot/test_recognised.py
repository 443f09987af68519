"""A state that is recognised is copied by what was worked out before: it must be the same state."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_checkfreq.snapshot.inventory import Survey
from dcp_checkfreq.snapshot.pool import BufferPool
from dcp_checkfreq.snapshot.stager import Stager
from dcp_checkfreq.state.app_state import AppState


def recognised(before, after):
    known = Survey(before).inventory
    return Survey(after, [known]).inventory is known


def test_a_trained_job_is_recognised_from_save_to_save():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optim = torch.optim.AdamW(model.parameters())
    state = AppState({"model": model, "optim": optim, "epoch": 1}, 0)

    def step():
        model(torch.randn(3, 4)).sum().backward()
        optim.step()
        return state.capture()

    known = Survey(step()).inventory
    for _ in range(3):
        assert Survey(step(), [known]).inventory is known


BASE = torch.arange(12.0).view(3, 4)
COMPLEX = torch.ones(3, dtype=torch.complex64)
EMPTY = torch.ones(0, 4)
CHANGES = {
    "other memory": (BASE, BASE.clone()),
    "part of it": (BASE, BASE[:2]),
    "transposed": (torch.ones(3, 3), None),
    "another shape": (BASE, BASE.view(4, 3)),
    "another stride": (BASE, BASE.as_strided((3, 4), (4, 0))),
    "another dtype": (BASE, BASE.view(torch.int32)),
    "conjugated": (COMPLEX, COMPLEX.conj()),
    "negated": (COMPLEX.conj().imag, torch.view_as_real(COMPLEX)[:, 1]),
    "another kind of tensor": (BASE, torch.nn.Parameter(BASE)),
    "a value for a tensor": (BASE, 3),
    "a tensor for a value": (3, BASE),
    "another shape without elements": (EMPTY, EMPTY.view(4, 0)),
    "deeper": (BASE, [BASE]),
    "longer": ([BASE], [BASE, 1]),
}
square = CHANGES["transposed"][0]
CHANGES["transposed"] = (square, square.t())


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_what_has_changed_in_more_than_content_is_not_recognised(before, after):
    assert recognised({"x": before, "y": 1}, {"x": before, "y": 2})
    assert not recognised({"x": before, "y": 1}, {"x": after, "y": 1})


@pytest.mark.parametrize(
    "after",
    [{"b": BASE, "a": 1}, {"a": BASE}, {"a": BASE, "b": 1, "c": 1}, {"a": BASE, "c": 1}],
    ids=["order", "less", "more", "key"],
)
def test_other_keys_are_not_recognised(after):
    assert not recognised({"a": BASE, "b": 1}, after)


def test_tensors_that_come_to_share_memory_are_not_recognised():
    one, two = torch.ones(3), torch.ones(3)
    assert not recognised({"a": one, "b": two}, {"a": one, "b": one})
    assert not recognised({"a": one, "b": one}, {"a": one, "b": two})


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    yield DeviceMesh("cpu", [0])
    torch.distributed.destroy_process_group()


def test_another_layout_of_the_same_shard_is_not_recognised(mesh):
    local = torch.ones(4, 4)

    def sharded(placement):
        return {"w": DTensor.from_local(local, mesh, [placement])}

    assert recognised(sharded(Shard(0)), sharded(Shard(0)))
    for other in (Shard(1), Replicate()):
        assert not recognised(sharded(Shard(0)), sharded(other))
    assert not recognised(sharded(Replicate()), {"w": local})


def test_what_is_kept_holds_no_tensor_of_the_state():
    import gc
    import weakref

    pool = BufferPool()
    tensor = torch.ones(1000)
    gone = weakref.ref(tensor.untyped_storage())
    stager = Stager(pool)
    stager.stage({"w": tensor})
    stager.release()
    del tensor, stager
    gc.collect()
    assert gone() is None
    assert len(pool.kept) == 1


def test_what_is_kept_goes_when_its_memory_goes():
    pool = BufferPool()
    stager = Stager(pool)
    stager.stage({"w": torch.ones(1000)})
    (kept,) = pool.kept
    stager.release()
    pool.drop()
    assert not pool.kept
    assert kept.plan is None
    assert not kept.targets
    assert not kept.tensors


def test_states_that_are_saved_in_turn_are_all_recognised_and_few_are_kept():
    pool = BufferPool()
    states = [{"w": torch.ones(n)} for n in range(1, 7)]

    def stage(state):
        stager = Stager(pool)
        survey = stager.survey(state)
        stager.begin(survey).wait()
        stager.release()
        return survey.inventory

    first = [stage(state) for state in states[:4]]
    assert [stage(state) for state in states[:4]] == first
    for state in states[4:]:
        stage(state)
    assert len(pool.kept) == 4
    assert stage(states[3]) is first[3]
    assert stage(states[0]) is not first[0]


# --- any sequence of saves ---

NAMES = ("a", "b", "c")
SHAPES = ((), (0,), (3,), (2, 3), (3, 2), (400, 700))
DTYPES = (torch.float32, torch.int64, torch.complex64)


class State:
    """A state that is changed in some way between saves, as training scripts may."""

    def __init__(self):
        self.count = 0
        self.parts = {"a": self.new((2, 3), torch.float32), "n": {"deep": [1, self.new((3,))]}}

    def new(self, shape, dtype=torch.float32):
        self.count += 1
        return torch.full(shape, self.count).to(dtype)

    def everything(self):
        return {**self.parts, "n": {**self.parts["n"], "count": self.count}}

    def train(self):
        self.count += 1
        for tensor in list(self.tensors()):
            tensor.add_(1)

    def tensors(self):
        yield from (part for part in self.parts.values() if isinstance(part, torch.Tensor))
        deep = self.parts["n"]["deep"]
        yield from (one for one in deep if isinstance(one, torch.Tensor))


def replace(state, name, shape, dtype):
    state.parts[name] = state.new(shape, dtype)


def replace_data(state, name, shape, dtype):
    if isinstance(state.parts.get(name), torch.Tensor):
        state.parts[name].data = state.new(shape, state.parts[name].dtype)


def reuse_object_memory(state, name, shape, dtype):
    """Free a tensor right before one of the same size is made: addresses come back."""
    state.parts.pop(name, None)
    state.parts[name] = state.new(shape, dtype)


def tie(state, name, shape, dtype):
    state.parts[name] = state.parts.get("a", 0)


def view(state, name, shape, dtype):
    source = state.parts.get("a")
    if isinstance(source, torch.Tensor) and source.dim() == 2:
        state.parts[name] = source.t() if shape else source[:, :1]


def conjugate(state, name, shape, dtype):
    source = state.parts.get(name)
    if isinstance(source, torch.Tensor) and source.is_complex():
        state.parts[name] = source.conj()


def remove(state, name, shape, dtype):
    state.parts.pop(name, None)


def deepen(state, name, shape, dtype):
    state.parts["n"]["deep"].append(state.new(shape, dtype))


def shorten(state, name, shape, dtype):
    if state.parts["n"]["deep"]:
        state.parts["n"]["deep"].pop()


def value(state, name, shape, dtype):
    state.parts[name] = len(shape)


def nothing(state, name, shape, dtype):
    pass


CHANGING = (
    replace, replace_data, reuse_object_memory, tie, view, conjugate, remove, deepen, shorten,
    value, nothing, nothing,
)  # fmt: skip
change = st.tuples(
    st.sampled_from(CHANGING), st.sampled_from(NAMES), st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
)  # fmt: skip


def same(one, other):
    if isinstance(one, torch.Tensor):
        if one.is_meta or other.is_meta:
            return one.device == other.device and one.shape == other.shape
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            change, st.booleans(), st.booleans(), st.none() | st.sets(st.sampled_from(NAMES))
        ),
        max_size=12,
    )
)
def test_every_save_of_a_state_that_changes_is_the_state_of_its_moment(saves):
    pool, state = BufferPool(), State()
    stager = Stager(pool, overlap_from_bytes=0)
    for (act, *how), is_guarded, is_new_writer, only in saves:
        act(state, *how)
        state.train()
        live = state.everything()
        wanted = copy.deepcopy(live)
        if is_new_writer:
            stager = Stager(pool, overlap_from_bytes=0)
        addresses = {piece.address for piece in Survey(live).inventory.pieces}
        snapshot = stager.begin(
            stager.survey(live),
            guarded=addresses if is_guarded else frozenset(),
            only=None if only is None else frozenset(only),
        )
        if is_guarded:
            snapshot.before_update()
        state.train()  # allowed now: it must not reach the copy
        snapshot.wait()
        assert same(snapshot.state, absent(wanted, live, only))
        stager.release()
        del snapshot


def absent(wanted, live, only):
    """Put a meta tensor for each tensor of which nothing is in ``only``."""
    if only is None:
        return wanted
    pieces = {piece.paths for piece in Survey(live).inventory.pieces}
    copied = {path for paths in pieces if only & set(paths) for path in paths}

    def rest(value, path):
        if isinstance(value, dict):
            return {
                key: rest(inner, f"{path}.{key}" if path else key) for key, inner in value.items()
            }
        if isinstance(value, list):
            return [rest(inner, f"{path}.{number}") for number, inner in enumerate(value)]
        if isinstance(value, torch.Tensor) and path not in copied:
            return value.to("meta")
        return value

    return rest(wanted, "")
