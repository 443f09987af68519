"""Issue 10, line 4: a call from within another one, or beside it, is an error at once, by name."""

import os
import signal
import threading

import pytest
import torch

from dcp_checkfreq import CheckFreqError, Checkpointer, SaveFailed
from dcp_checkfreq.runtime.one_call import OneCall, one_at_a_time

CALLS = ["save", "restore", "after_step", "close", "wait"]


class Part:
    """A user's part that calls back."""

    def __init__(self):
        self.value, self.saving, self.loading = torch.ones(3), None, None

    def state_dict(self):
        if self.saving is not None:
            self.saving()
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.loading is not None:
            self.loading()
        self.value = state["value"]


@pytest.fixture
def job(tmp_path):
    part = Part()
    with Checkpointer(tmp_path, {"part": part}, every=1, on_error="raise") as ckpt:
        ckpt.restore()
        ckpt.after_step()
        ckpt.wait()
        yield part, ckpt
        part.saving = part.loading = None
        ckpt.after_step()
        ckpt.wait()
        assert ckpt.last_saved_step == ckpt.step, "it works as ever afterwards"
        assert ckpt.restore().step == ckpt.step


@pytest.mark.parametrize("outer", ["save", "after_step"])
@pytest.mark.parametrize("inner", CALLS)
def test_a_call_from_within_state_dict_is_refused_by_name(job, outer, inner):
    part, ckpt = job
    part.saving = getattr(ckpt, inner)
    if outer == "save":
        ckpt.step += 1
    with pytest.raises(CheckFreqError, match=rf"{inner}\(\) was called from within {outer}\(\)"):
        getattr(ckpt, outer)()


@pytest.mark.parametrize("inner", CALLS)
def test_a_call_from_within_load_state_dict_is_refused_by_name(job, inner):
    part, ckpt = job
    part.loading = getattr(ckpt, inner)
    with pytest.raises(CheckFreqError, match=rf"{inner}\(\) was called from within restore\(\)"):
        ckpt.restore()


@pytest.mark.parametrize("inner", CALLS)
def test_a_call_from_another_thread_is_refused_while_one_is_going_on(job, inner):
    part, ckpt = job
    said = []

    def call():
        try:
            getattr(ckpt, inner)()
        except SaveFailed as error:
            said.append(str(error))

    def beside():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(30)

    part.saving = beside
    ckpt.after_step()
    assert f"{inner}() was called while after_step()" in said[0]
    assert "'MainThread'" in said[0]


def test_another_thread_may_have_it_when_the_first_is_through(job):
    _, ckpt = job
    thread = threading.Thread(target=lambda: (ckpt.after_step(), ckpt.wait()))
    thread.start()
    thread.join(30)
    ckpt.wait()
    assert ckpt.last_saved_step == 2


def test_preempt_may_be_called_at_any_time(tmp_path):
    part = Part()
    old = signal.signal(signal.SIGALRM, lambda *_: ckpt.preempt())
    try:
        with Checkpointer(tmp_path, {"part": part}, every=10**6, preempt_signals=()) as ckpt:
            ckpt.restore()
            ckpt.after_step()
            part.saving = lambda: os.kill(os.getpid(), signal.SIGALRM)
            ckpt.save()
            part.saving = None

            def train():
                for _ in range(2000):
                    ckpt.after_step()
                    threading.Event().wait(0.005)

            with pytest.raises(SystemExit) as ended:
                train()
            assert ended.value.code == 0
            assert ckpt.last_saved_step == ckpt.step
    finally:
        signal.signal(signal.SIGALRM, old)


def test_a_handler_that_saves_is_told_to_preempt(tmp_path):
    part, said = Part(), []

    def handler(*_):
        try:
            ckpt.save()
        except SaveFailed as error:
            said.append(str(error))

    old = signal.signal(signal.SIGALRM, handler)
    try:
        with Checkpointer(tmp_path, {"part": part}, every=1) as ckpt:
            ckpt.restore()
            part.saving = lambda: os.kill(os.getpid(), signal.SIGALRM)
            ckpt.after_step()
            part.saving = None
    finally:
        signal.signal(signal.SIGALRM, old)
    assert "only preempt() may be called" in said[0]


def test_a_child_that_was_forked_during_a_call_may_close(job):
    part, ckpt = job
    codes = []

    def fork():
        child = os.fork()
        if not child:
            code = 1
            try:
                ckpt.close()
                code = 0
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    part.saving = fork
    ckpt.after_step()
    assert codes == [0]


class Owner:
    def __init__(self):
        self._calls = OneCall("here")

    @one_at_a_time
    def work(self, then=lambda: None):
        then()


def test_an_interrupt_before_the_end_was_noted_leaves_nothing_locked():
    owner = Owner()

    def interrupted(before):
        raise KeyboardInterrupt

    owner._calls.end, end = interrupted, owner._calls.end
    with pytest.raises(KeyboardInterrupt):
        owner.work()
    owner._calls.end = end
    owner.work()
    owner.work(lambda: None)
    with pytest.raises(SaveFailed, match="from within"):
        owner.work(owner.work)
    owner.work()


def test_what_another_thread_left_noted_is_no_call():
    owner = Owner()

    def interrupted(before):
        raise KeyboardInterrupt

    def work():
        with pytest.raises(KeyboardInterrupt):
            owner.work()

    owner._calls.end, end = interrupted, owner._calls.end
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    owner._calls.end = end
    owner.work()
