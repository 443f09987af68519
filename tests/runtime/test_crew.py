"""Issue 10: work gets done, and errors surface, whether or not a thread can be had."""

import gc
import os
import threading
import weakref

import pytest

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.runtime.crew import Crew
from dcp_checkfreq.testing import MemoryTier


@pytest.fixture(params=["threads", "no threads"])
def refused(request, monkeypatch):
    if request.param == "no threads":

        def refuse(self):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)


def names():
    return [one.name for one in threading.enumerate() if one.name.startswith("test-crew")]


@pytest.mark.usefixtures("refused")
def test_results_come_in_order_and_nothing_is_left():
    with Crew(2, "test-crew") as crew:
        assert crew.run_all([lambda n=n: n * n for n in range(20)]) == [n * n for n in range(20)]
        assert crew.start(lambda: "one").result() == "one"
    assert names() == []


@pytest.mark.usefixtures("refused")
def test_the_first_error_surfaces_when_all_else_is_done():
    done = []

    def work(number):
        if number == 3:
            raise ZeroDivisionError
        done.append(number)

    with Crew(1, "test-crew") as crew, pytest.raises(ZeroDivisionError):
        crew.run_all([lambda n=n: work(n) for n in range(1000)])
    assert len(done) == 999
    assert names() == []


def test_what_nobody_took_is_cancelled_when_the_one_that_waits_is_interrupted():
    done = []

    def press():
        raise KeyboardInterrupt

    with Crew(0, "test-crew") as crew, pytest.raises(KeyboardInterrupt):
        crew.run_all([press, lambda: done.append(1)])
    assert done == []


def test_a_dropped_crew_ends_its_threads_and_a_task_lets_go_of_its_work():
    class Model:
        pass

    gc.disable()
    try:
        crew, model = Crew(1, "test-crew"), Model()
        task = crew.start(lambda model=model: model is None)
        gone = weakref.ref(model)
        del model
        assert task.result() is False
        assert gone() is None
        (thread,) = [one for one in threading.enumerate() if one.name.startswith("test-crew")]
        del crew
        thread.join(10)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_a_forked_child_has_a_crew_of_its_own():
    with Crew(1, "test-crew") as crew:
        crew.start(lambda: None).result()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                code = 0 if crew.start(lambda: "mine").result() == "mine" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("refused_one", range(1, 7))
def test_one_refused_thread_costs_no_save(refused_one, monkeypatch):
    """F7: a state that was set before what may fail made every later step raise."""
    real, asked = threading.Thread.start, [0]

    def start(thread):
        asked[0] += 1
        if asked[0] == refused_one:
            raise RuntimeError("can't start new thread")
        real(thread)

    state = {"step": 0}
    ckpt = Checkpointer(MemoryTier(), state, every=1, preempt_signals=())
    with monkeypatch.context() as patch, ckpt:
        patch.setattr(threading.Thread, "start", start)
        for step in range(1, 6):
            state["step"] = step
            ckpt.after_step()
            ckpt.wait()
            assert ckpt.last_saved_step == step
