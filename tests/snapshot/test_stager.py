"""What is copied, how much memory it takes, and that later changes never reach the copy."""

import copy
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from dcp_checkfreq import SnapshotFailed, UnsupportedState
from dcp_checkfreq.snapshot.pool import BufferPool
from dcp_checkfreq.snapshot.stager import Stager

HUGE_PAGE_BYTES = 2 << 20


@pytest.fixture
def pool():
    return BufferPool(wait_s=5.0)


def staged(state, pool):
    return Stager(pool).stage(state)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.int64,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (5, 3), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_is_copied_exactly(pool, dtype, shape):
    torch.manual_seed(0)
    source = (torch.randn(shape) * 50).to(dtype)
    got = staged({"t": source}, pool)["t"]
    assert (got.dtype, got.shape) == (source.dtype, source.shape)
    assert torch.equal(got.reshape(-1).view(torch.uint8), source.reshape(-1).view(torch.uint8))
    assert not source.numel() or got.data_ptr() != source.data_ptr()


BASE = torch.arange(60.0).reshape(6, 10)
ODD = {
    "transposed": lambda: BASE.t(),
    "strided": lambda: BASE[::2, 1::3],
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "needs grad": lambda: torch.randn(3, requires_grad=True),
    "not a leaf": lambda: torch.randn(3, requires_grad=True) * 2,
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "0-dim view": lambda: BASE[2, 3],
    "unaligned": lambda: torch.arange(100, dtype=torch.uint8)[3:90],
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD.keys())
def test_views_of_every_kind_are_copied_by_value_into_plain_memory(pool, make):
    source = make()
    got = staged({"t": source}, pool)["t"]
    assert torch.equal(got, source.detach())
    assert got.is_contiguous()
    assert not got.is_conj()
    assert not got.is_neg()
    assert not got.requires_grad


def test_a_small_view_of_a_large_storage_copies_only_itself(pool):
    big = torch.ones(100_000_000)
    got = staged({"v": big[:10], "w": big.view(-1, 10)[5]}, pool)
    assert pool.held_bytes <= HUGE_PAGE_BYTES
    assert got["v"].tolist() == [1.0] * 10
    del big


def test_tied_tensors_take_memory_once_and_stay_tied(pool):
    weight = torch.randn(2_000_000)
    got = staged({"embed": weight, "head": {"weight": weight}, "again": [weight.view(-1)]}, pool)
    assert pool.held_bytes <= weight.nbytes + HUGE_PAGE_BYTES
    assert got["embed"].data_ptr() == got["head"]["weight"].data_ptr()
    assert got["embed"].data_ptr() == got["again"][0].data_ptr()
    assert torch.equal(got["head"]["weight"], weight)


def test_overlapping_views_are_each_right(pool):
    base = torch.arange(100_000.0)
    got = staged({"a": base[:60_000], "b": base[40_000:], "c": base}, pool)
    assert torch.equal(got["a"], base[:60_000])
    assert torch.equal(got["b"], base[40_000:])
    assert torch.equal(got["c"], base)


def test_the_memory_is_about_the_bytes_of_the_state(pool):
    state = {f"w{n}": torch.randn(100_003) for n in range(50)}
    size = sum(tensor.nbytes for tensor in state.values())
    staged(state, pool)
    assert size <= pool.held_bytes <= size + 50 * 4096 + HUGE_PAGE_BYTES


@dataclass
class Counter:
    step: int
    history: list


def mutable_state():
    array = np.ones(4)
    return {
        "tensor": torch.ones(4),
        "scalar": torch.tensor(1),
        "array": array,
        "list": [1, [2, torch.ones(2)]],
        "dict": {"lr": 0.1, 3: {"deep": [0]}},
        "bytes": bytearray(b"old!"),
        "object": types.SimpleNamespace(step=1, table=[1, 2]),
        "dataclass": Counter(1, [torch.ones(2)]),
        "tuple": (torch.ones(2), [5]),
        "set": {1, 2},
        "alias": array,
    }


def mutate(state):
    state["tensor"].fill_(2)
    state["scalar"].add_(1)
    state["array"][:] = 2
    state["list"][0] = 99
    state["list"][1][0] = 99
    state["list"][1][1].fill_(2)
    state["dict"]["lr"] = 9.9
    state["dict"][3]["deep"].append(1)
    state["dict"]["new"] = 1
    state["bytes"][:] = b"new!"
    state["object"].step = 2
    state["object"].table.append(3)
    state["dataclass"].step = 2
    state["dataclass"].history[0].fill_(2)
    state["tuple"][0].fill_(2)
    state["tuple"][1][0] = 6
    state["set"].add(3)
    state["more"] = 1


def test_no_change_after_stage_reaches_the_copy(pool):
    state = mutable_state()
    got = staged(state, pool)
    mutate(state)
    wanted = mutable_state()
    assert got.keys() == wanted.keys()
    for key in ("list", "dict", "bytes", "object", "dataclass", "tuple", "set"):
        assert str(got[key]) == str(wanted[key]), key
    assert torch.equal(got["tensor"], wanted["tensor"])
    assert int(got["scalar"]) == 1
    assert np.array_equal(got["array"], wanted["array"])
    assert type(got["object"]) is types.SimpleNamespace


def test_tensors_inside_of_objects_are_copied_too(pool):
    holder = types.SimpleNamespace(weight=torch.ones(3))
    got = staged({"holder": holder, "same": holder.weight}, pool)
    holder.weight.fill_(2)
    assert got["holder"].weight.tolist() == [1, 1, 1]
    assert got["same"].tolist() == [1, 1, 1]


def linked_value():
    """What is in it twice, what holds itself, and what nobody can change."""
    one, tensor, fixed = [1], torch.ones(2), (1, "a", (2.0, None))
    ring: list = [one]
    ring.append((ring, one))
    holder = types.SimpleNamespace(one=one, tensor=tensor)
    return {
        "one": one,
        "ring": ring,
        "holder": holder,
        "tensor": (tensor, [tensor]),
        "fixed": fixed,
    }


def test_what_is_in_a_byte_item_twice_is_one_object_in_the_copy(pool):
    live = linked_value()
    got = staged({"value": (live,)}, pool)["value"][0]
    assert got["one"] is got["ring"][0] is got["ring"][1][1] is got["holder"].one
    assert got["ring"][1][0] is got["ring"]
    assert got["tensor"][0] is got["tensor"][1][0] is got["holder"].tensor
    assert got["fixed"] == live["fixed"]
    live["one"][0] = 2
    live["tensor"][0].fill_(2)
    assert got["one"] == [1]
    assert got["holder"].tensor.tolist() == [1, 1]


def test_staging_changes_nothing_of_the_state(pool):
    state = mutable_state()
    before = copy.deepcopy(state)
    staged(state, pool)
    assert str(state) == str(before)
    assert state["array"] is state["alias"]


def test_module_state_dicts_keep_their_order_and_type_of_mapping(pool):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    got = staged({"model": model.state_dict()}, pool)
    assert list(got["model"]) == list(model.state_dict())
    assert all(torch.equal(got["model"][k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo tensor"),
        (lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr tensor"),
        (lambda: torch.empty(2, device="meta"), "meta tensor"),
    ],
    ids=["sparse", "csr", "meta"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_tensors_without_plain_bytes_are_refused_by_path_and_leave_the_slot_free(pool, make, kind):
    with pytest.raises(UnsupportedState, match=r"'a\.1\.b'") as caught:
        staged({"a": [0, {"b": make()}]}, pool)
    assert caught.value.kind == kind
    pool.lease(10).release()


def test_a_value_that_cannot_be_copied_leaves_the_slot_free(pool):
    import threading

    with pytest.raises(SnapshotFailed, match="cannot be copied"):
        staged({"w": torch.ones(2), "lock": threading.Lock()}, pool)
    pool.lease(10).release()


def test_an_error_of_a_users_own_copy_fails_the_snapshot_and_leaves_the_slot_free(pool):
    class Stubborn:
        def __deepcopy__(self, memo):
            raise KeyError("mine")

    with pytest.raises(SnapshotFailed, match="mine"):
        staged({"w": torch.ones(2), "s": Stubborn()}, pool)
    pool.lease(10).release()


def test_a_tensor_that_shows_up_twice_as_another_view_of_it_is_right(pool):
    base = torch.arange(6.0)
    state = {"a": base, "b": base.reshape(2, 3), "c": base.view(torch.int32)}
    got = staged(state, pool)
    base.zero_()
    assert got["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert got["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(got["c"], torch.arange(6.0).view(torch.int32))


def test_ten_thousand_small_tensors_stage_at_once_in_one_slot(pool):
    state = {f"w{n}": torch.full((16,), float(n)) for n in range(10_000)}
    got = staged(state, pool)
    assert pool.held_bytes <= 10_000 * 64 + HUGE_PAGE_BYTES
    assert all(got[key][3] == state[key][3] for key in ("w0", "w1", "w5000", "w9999"))
