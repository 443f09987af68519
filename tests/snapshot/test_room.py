"""Issue 10: memory and the snapshot slot are given back however a save ends, at once."""

import contextlib
import gc
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_checkfreq import CheckFreqSavePlanner, CheckFreqWriter, Checkpointer
from dcp_checkfreq.errors import SaveFailed
from dcp_checkfreq.snapshot.pool import PROCESS_POOL, BufferPool
from dcp_checkfreq.snapshot.stager import Stager
from dcp_checkfreq.testing import Fault, FaultyTier, MemoryTier


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Anew:
    """State that is made for each save: nothing else holds it."""

    def __init__(self):
        self.made = []

    def state_dict(self):
        flat = torch.ones(400_000)
        nested = {"offloaded": [torch.ones(300_000), {"deep": torch.ones(1000)}], "t": (flat[:10],)}
        self.made += [weakref.ref(flat), *(weakref.ref(one) for one in nested["offloaded"][:1])]
        return {"flat": flat, **nested}

    def load_state_dict(self, state):
        pass

    def left(self):
        return [ref for ref in self.made if ref() is not None]


@pytest.mark.parametrize("snapshot", ["cpu", "blocking"])
def test_what_was_made_for_a_save_of_a_checkpointer_goes_with_it(snapshot):
    model = torch.nn.Linear(600, 600)
    optim = torch.optim.AdamW(model.parameters())
    anew = Anew()
    state = {"model": model, "optim": optim, "anew": anew}
    with Checkpointer(MemoryTier(), state, every=1, snapshot=snapshot) as ckpt:
        for _ in range(3):
            model(torch.ones(2, 600)).sum().backward()
            optim.step()
            ckpt.after_step()
            ckpt.wait()
            assert len(anew.made) > 0
            assert anew.left() == []


def test_what_was_made_for_a_save_that_failed_goes_with_it():
    tier = FaultyTier(MemoryTier(), [Fault(verb="write_shard", error=28, times="forever")])
    anew = Anew()
    ckpt = Checkpointer(tier, {"anew": anew}, every=1, max_failures=100)
    with contextlib.suppress(SaveFailed), ckpt:
        for _ in range(3):
            ckpt.after_step()
            ckpt.wait()
            assert anew.left() == []
        assert ckpt.failures_in_a_row == 3


def test_what_was_made_for_an_async_save_goes_with_it():
    anew = Anew()
    for step in range(3):
        writer = CheckFreqWriter(MemoryTier().child(f"step_{step}"))
        dcp.async_save({"anew": anew}, storage_writer=writer).result()
        del writer
    assert anew.left() == []


class DiesAtOnce(CheckFreqSavePlanner):
    def set_up_planner(self, *args, **kwargs):
        raise ZeroDivisionError


class DiesInPlanning(CheckFreqSavePlanner):
    def create_local_plan(self):
        raise ZeroDivisionError


class DiesLate(CheckFreqSavePlanner):
    def finish_plan(self, new_plan):
        raise ZeroDivisionError


@pytest.mark.parametrize("planner", [DiesAtOnce, DiesInPlanning, DiesLate])
def test_a_dead_save_whose_future_is_kept_holds_up_no_other(planner, tmp_path, monkeypatch):
    monkeypatch.setattr(PROCESS_POOL, "_wait_s", 5.0)
    state = {"x": torch.ones(1000)}
    kept = dcp.async_save(
        state, storage_writer=CheckFreqWriter(tmp_path / "step_1"), planner=planner()
    )
    error = kept.exception()
    assert error is not None
    second = dcp.async_save(state, storage_writer=CheckFreqWriter(tmp_path / "step_2"))
    second.result()
    assert kept.exception() is error, "it was kept all the time"


def test_a_lease_that_nobody_has_is_none():
    pool = BufferPool(wait_s=5.0)
    stager = Stager(pool)
    lost = pool.lease(100)
    del lost
    staged = stager.stage({"x": torch.ones(10)})
    stager.release()
    again = Stager(pool).stage({"x": torch.ones(10)})
    del staged
    with pytest.raises(Exception, match="still being written"):
        BufferPool.lease(_hurried(pool), 100)
    del again
    pool.lease(100)


def _hurried(pool):
    pool._wait_s = 0.1
    return pool


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator
def test_a_save_that_is_interrupted_while_it_is_begun_leaves_nothing(monkeypatch):
    """Ctrl-C at any place of the copy, its traceback kept as notebooks do."""
    monkeypatch.setattr(PROCESS_POOL, "_wait_s", 5.0)
    state = {"x": torch.ones(1000), "y": [torch.ones(3), "text"]}
    kept = []
    with Checkpointer(MemoryTier(), state, every=1, preempt_signals=()) as ckpt:
        ckpt.after_step()
        ckpt.wait()
        main = threading.get_ident()
        for slot in range(0, 400, 7):
            seen = [0]

            def trace(frame, event, arg, seen=seen, slot=slot):
                if event == "call" and "snapshot" in frame.f_code.co_filename:
                    seen[0] += 1
                    if seen[0] == slot and threading.get_ident() == main:
                        raise KeyboardInterrupt
                return

            sys.settrace(trace)
            try:
                ckpt.after_step()
            except KeyboardInterrupt as error:
                kept.append(error)
            finally:
                sys.settrace(None)
            ckpt.wait()
        ckpt.after_step()
        ckpt.wait()
        assert ckpt.last_saved_step == ckpt.step
    assert kept
