"""One slot of memory: reused, never rewritten while it is written out, never lost."""

import contextlib
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_checkfreq import (
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
    CheckpointExists,
    SnapshotFailed,
)
from dcp_checkfreq.snapshot import pool as pool_module
from dcp_checkfreq.snapshot.pool import PROCESS_POOL, BufferPool
from dcp_checkfreq.snapshot.stager import Stager
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import GatedTier, ManualClock, MemoryTier

MIB = 1 << 20


def values(tier):
    target = {"w": torch.zeros(1000), "step": 0}
    dcp.load(target, storage_reader=CheckFreqReader(tier))
    assert len(set(target["w"].tolist())) == 1
    return target["w"][0].item(), target["step"]


def test_memory_is_kept_and_reused_and_grows_when_it_must():
    pool = BufferPool()
    assert pool.held_bytes == 0
    first = pool.lease(3 * MIB)
    slot = first.memory.data_ptr()
    assert pool.held_bytes == 4 * MIB
    first.release()
    again = pool.lease(2 * MIB)
    assert again.memory.data_ptr() == slot
    assert again.memory.nbytes == 2 * MIB
    again.release()
    pool.lease(9 * MIB).release()
    assert pool.held_bytes == 10 * MIB
    pool.drop()
    assert pool.held_bytes == 0


def test_memory_starts_at_a_page():
    lease = BufferPool().lease(100)
    assert lease.memory.data_ptr() % 4096 == 0
    assert lease.memory.dtype == torch.uint8


def test_leased_memory_is_not_dropped():
    pool = BufferPool()
    lease = pool.lease(100)
    pool.drop()
    assert pool.held_bytes == 2 * MIB
    lease.release()


def test_a_second_lease_waits_for_the_first():
    pool = BufferPool()
    first = pool.lease(100)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(pool.lease, 100)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        first.release()
        second.result(10).release()


def test_releasing_twice_does_not_free_the_lease_of_the_next():
    pool = BufferPool(wait_s=0.0)
    first = pool.lease(100)
    first.release()
    second = pool.lease(100)
    first.release()
    with pytest.raises(SnapshotFailed):
        pool.lease(100)
    second.release()


def test_waiting_ends_after_wait_s_by_the_clock_with_an_error_that_says_so(monkeypatch):
    clock = ManualClock()
    pool = BufferPool(wait_s=600.0, clock=clock)
    monkeypatch.setattr(pool_module, "_POLL_S", 0.001)
    lease = pool.lease(100)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.lease, 100)
        clock.advance(599.0)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        clock.advance(2.0)
        with pytest.raises(SnapshotFailed, match=r"still being written after 600\.0 s"):
            waiting.result(10)
    lease.release()
    pool.lease(100).release()


def test_no_memory_is_a_snapshot_error_and_the_pool_works_after_it():
    pool = BufferPool()
    with pytest.raises(SnapshotFailed, match="bytes of pageable host memory"):
        pool.lease(1 << 60)
    pool.lease(100).release()


def test_a_slot_whose_writing_thread_has_ended_is_free():
    pool = BufferPool(wait_s=5.0)
    lease = pool.lease(100)
    lease.worker = threading.Thread(target=lambda: None)
    lease.worker.start()
    lease.worker.join()
    pool.lease(100).release()


def test_a_snapshot_that_nobody_holds_gives_its_slot_back():
    pool = BufferPool(wait_s=0.0)
    staged = Stager(pool).stage({"w": torch.ones(3)})
    del staged
    Stager(pool).stage({"w": torch.ones(3)})


# --- case 19 ---


def state_of(step, weight):
    weight.fill_(float(step))
    return {"w": weight, "step": step}


@pytest.mark.parametrize("reuse", [False, True], ids=["new writers", "one writer"])
@pytest.mark.parametrize("planner", [lambda: None, CheckFreqSavePlanner], ids=["default", "ours"])
def test_the_next_snapshot_waits_until_the_one_before_is_written_out(reuse, planner):
    root, weight, planner = MemoryTier(), torch.zeros(1000), planner()
    gate = GatedTier(root.child("step_1"))
    writer = CheckFreqWriter(gate)
    first = dcp.async_save(state_of(1, weight), storage_writer=writer, planner=planner)
    gate.wait_until_held()
    weight.fill_(-1.0)

    def second_save():
        if reuse:
            # DCP itself does not allow two saves of one writer at once: it is asked to stage only.
            return writer.stage(state_of(2, weight))
        other = CheckFreqWriter(root.child("step_2"))
        return dcp.async_save(state_of(2, weight), storage_writer=other).result(60)

    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(second_save)
        with pytest.raises(TimeoutError):
            second.result(0.1)
        assert not first.done()
        gate.release()
        first.result(60)
        second.result(60)
    assert values(root.child("step_1")) == (1.0, 1)
    if not reuse:
        assert values(root.child("step_2")) == (2.0, 2)


@pytest.mark.slow
def test_many_background_saves_keep_their_own_values_in_one_buffer():
    root, weight = MemoryTier(), torch.zeros(1000)
    futures = []
    for step in range(1, 9):
        writer = CheckFreqWriter(root.child(f"step_{step}"))
        futures.append(dcp.async_save(state_of(step, weight), storage_writer=writer))
        weight.fill_(-1.0)
    for future in futures:
        future.result(60)
    for step in range(1, 9):
        assert values(root.child(f"step_{step}")) == (float(step), step)
    assert PROCESS_POOL.held_bytes % (2 * MIB) == 0


def test_writers_made_anew_reuse_the_process_wide_buffer():
    root, weight = MemoryTier(), torch.zeros(3 * MIB)
    slots, held = set(), set()
    for step in range(3):
        writer = CheckFreqWriter(root.child(f"step_{step}"))
        staged = writer.stage({"w": weight})
        slots.add(staged["w"].data_ptr())
        held.add(PROCESS_POOL.held_bytes)
        dcp.save(staged, storage_writer=writer)
        del staged
    assert len(slots) == len(held) == 1


@pytest.mark.parametrize("verb", ["write_shard", "create"])
def test_one_writer_may_start_the_next_save_while_the_first_is_not_published_yet(tmp_path, verb):
    weight = torch.zeros(1000)
    gate = GatedTier(LocalTier(tmp_path / "step_1"), verbs=[verb])
    writer = CheckFreqWriter(gate)
    first = dcp.async_save(state_of(1, weight), storage_writer=writer)
    gate.wait_until_held()

    def second_save():
        state = state_of(2, weight)
        return dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / "step_2")

    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(second_save)
        with contextlib.suppress(TimeoutError):
            second.result(0.1).result(0.1)  # it may wait at any place, or be done
        gate.release()
        first.result(60)
        second.result(60).result(60)
    assert values(tmp_path / "step_1") == (1.0, 1)
    assert values(tmp_path / "step_2") == (2.0, 2)


class FailsToPlan(DefaultSavePlanner):
    def create_local_plan(self):
        raise ValueError("this planner never plans")


@pytest.mark.parametrize("same_writer", [False, True])
def test_a_save_that_failed_in_planning_does_not_block_the_next(tmp_path, same_writer):
    weight = torch.zeros(1000)
    writer = CheckFreqWriter(tmp_path / "a")
    failed = dcp.async_save(state_of(1, weight), storage_writer=writer, planner=FailsToPlan())
    assert "never plans" in str(failed.exception(60))
    # `failed` is still held, and with it the traceback and the state of the failed save.
    again = writer if same_writer else CheckFreqWriter(tmp_path / "a")
    dcp.async_save(state_of(2, weight), storage_writer=again).result(60)
    assert values(tmp_path / "a") == (2.0, 2)
    assert failed.exception() is not None


def test_a_save_that_was_refused_does_not_block_the_next(tmp_path):
    weight = torch.zeros(1000)
    dcp.async_save(state_of(1, weight), storage_writer=CheckFreqWriter(tmp_path / "a")).result(60)
    refused = [
        dcp.async_save(state_of(2, weight), storage_writer=CheckFreqWriter(tmp_path / "a"))
        for _ in range(3)
    ]
    for future in refused:
        assert CheckpointExists.__name__ in str(future.exception(60))
    dcp.async_save(state_of(3, weight), storage_writer=CheckFreqWriter(tmp_path / "b")).result(60)
    assert values(tmp_path / "b") == (3.0, 3)
    assert values(tmp_path / "a") == (1.0, 1)


def test_a_failed_write_gives_the_slot_back_at_once():
    import errno

    from dcp_checkfreq.testing import Fault, FaultyTier

    root, weight = MemoryTier(), torch.zeros(1000)
    full = FaultyTier(root.child("a"), [Fault(verb="write_shard", error=errno.ENOSPC)])
    failed = dcp.async_save(state_of(1, weight), storage_writer=CheckFreqWriter(full))
    assert failed.exception(60) is not None
    dcp.async_save(state_of(2, weight), storage_writer=CheckFreqWriter(root.child("a"))).result(60)
    assert values(root.child("a")) == (2.0, 2)


# --- case 20 through DCP: the real thing, with a slow storage ---


@pytest.mark.parametrize("planner", [lambda: None, CheckFreqSavePlanner], ids=["default", "ours"])
def test_what_is_changed_while_the_background_writes_is_saved_as_it_was(planner):
    import numpy as np

    root = MemoryTier()
    gate = GatedTier(root.child("a"), verbs=["make"])
    state = {"t": torch.ones(4), "n": (np.ones(4),), "l": [1, 2], "d": {"lr": 0.1}, "b": (bytearray(b"old"),)}  # noqa: E501  # fmt: skip
    future = dcp.async_save(state, storage_writer=CheckFreqWriter(gate), planner=planner())
    gate.wait_until_held()
    state["t"].fill_(2)
    state["n"][0][:] = 2
    state["l"][0] = 99
    state["d"]["lr"] = 9.9
    state["b"][0][:] = b"new"
    gate.release()
    future.result(60)
    target = {"t": torch.zeros(4), "n": None, "l": [0, 0], "d": {"lr": 0}, "b": None}
    dcp.load(target, storage_reader=CheckFreqReader(root.child("a")))
    assert target["t"].tolist() == [1] * 4
    assert target["n"][0].tolist() == [1] * 4
    assert target["l"] == [1, 2]
    assert target["d"] == {"lr": 0.1}
    assert target["b"][0] == b"old"


def test_a_statefuls_state_is_asked_once_and_on_the_training_thread(tmp_path):
    asked = []

    class Part:
        def state_dict(self):
            asked.append(threading.current_thread())
            return {"v": 1}

        def load_state_dict(self, state):
            pass

    dcp.async_save({"p": Part()}, storage_writer=CheckFreqWriter(tmp_path)).result(60)
    assert asked == [threading.current_thread()]


def test_tied_tensors_are_stored_once_and_both_keys_load(tmp_path):
    weight = torch.randn(20_000, 32)
    for name, save in (
        ("sync", lambda state, w: dcp.save(state, storage_writer=w)),
        ("async", lambda state, w: dcp.async_save(state, storage_writer=w).result(60)),
    ):
        folder = tmp_path / name
        save({"e": weight, "h": {"w": weight}}, CheckFreqWriter(folder))
        (shard,) = folder.glob("*.distcp")
        assert shard.stat().st_size < 1.05 * weight.nbytes
        for reader in (CheckFreqReader(folder), dcp.FileSystemReader(folder)):
            target = {"e": torch.zeros(20_000, 32), "h": {"w": torch.zeros(20_000, 32)}}
            dcp.load(target, storage_reader=reader)
            assert torch.equal(target["e"], weight)
            assert torch.equal(target["h"]["w"], weight)


def test_a_view_takes_room_for_itself_in_memory_and_on_disk(tmp_path):
    big = torch.ones(50_000_000)
    before = PROCESS_POOL.held_bytes
    dcp.async_save({"v": big[5:15]}, storage_writer=CheckFreqWriter(tmp_path)).result(60)
    assert PROCESS_POOL.held_bytes <= max(before, 2 * MIB)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 20_000


HOLDERS = {
    "tuple": lambda t: (t,),
    "tuple in a list": lambda t: [(1, t)],
    "dict in a tuple": lambda t: ({"a": [t]},),
    "object": lambda t: types.SimpleNamespace(t=t),
    "dict and tuple": lambda t: {"a": t, "b": (t,)},
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
@pytest.mark.parametrize("planner", [lambda: None, CheckFreqSavePlanner], ids=["default", "ours"])
def test_a_tensor_in_a_byte_item_takes_room_for_itself(tmp_path, hold, planner):
    state = {"big": torch.randn(1 << 20), "held": hold(torch.arange(10_000.0)[3:7])}
    writer = CheckFreqWriter(tmp_path, allow_pickle=True)
    dcp.async_save(state, storage_writer=writer, planner=planner()).result(60)
    (shard,) = tmp_path.glob("*.distcp")
    assert shard.stat().st_size < (4 << 20) + 64_000
    reader = CheckFreqReader(tmp_path, allow_pickle=True)
    target = {"held": None}
    if isinstance(state["held"], list):
        target = {"held": [None]}
    elif isinstance(state["held"], dict):
        target = {"held": {"a": torch.zeros(4), "b": None}}
    dcp.load(target, storage_reader=reader)
    assert "3., 4., 5., 6." in str(target["held"])


@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.parametrize("make", [torch.nn.Parameter, torch.Tensor.requires_grad_])
def test_a_tensor_in_a_byte_item_stays_a_parameter_or_wants_a_gradient(
    tmp_path, make, has_gradient
):
    held = make(torch.arange(4.0), has_gradient)
    writer = CheckFreqWriter(tmp_path, allow_pickle=True)
    dcp.async_save({"held": (held,)}, storage_writer=writer).result(60)
    target = {"held": None}
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path, allow_pickle=True))
    (back,) = target["held"]
    assert (type(back), back.requires_grad) == (type(held), has_gradient)
    assert torch.equal(back, held)
