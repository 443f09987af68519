"""Issue 10: what fails on the way from a save's error to its end, after `close`, or has no text."""

import logging
import re
import signal
import threading
import time

import pytest
from checkpointer_tools import counter, failing, steps_on

from dcp_checkfreq import Checkpointer, SaveFailed, TooManyFailures, find_latest_valid
from dcp_checkfreq.dcp.save_planner import CheckFreqSavePlanner
from dcp_checkfreq.dcp.writer import CheckFreqWriter
from dcp_checkfreq.runtime.outcome import outcome_of, report
from dcp_checkfreq.testing import ForwardingTier, MemoryTier


class Odd(Exception):
    def __str__(self):
        return ""


class Breaking(ForwardingTier):
    """Raises ``error`` in every write of a shard while there is one."""

    error = None

    def around(self, verb, name, call):
        if verb == "write_shard" and self._top.error is not None:
            raise self._top.error
        return call()


class BreaksOnce(logging.Handler):
    """Raises at the first record of one level that comes from a background thread."""

    def __init__(self, error):
        super().__init__(logging.ERROR)
        self.error, self.trains = error, threading.current_thread()

    def emit(self, record):
        error = self.error
        if error is not None and threading.current_thread() is not self.trains:
            self.error = None
            raise error


@pytest.fixture
def handler():
    log = logging.getLogger("dcp_checkfreq")
    added = []

    def add(error):
        added.append(BreaksOnce(error))
        log.addHandler(added[-1])
        return added[-1]

    yield add
    for one in added:
        log.removeHandler(one)


# --- between the error and the end ---


@pytest.mark.parametrize("error", [ConnectionError("log server"), SystemExit(3), Odd()], ids=repr)
def test_a_log_handler_that_raises_once_costs_no_later_save(handler, capfd, error):
    root = MemoryTier()
    breaks = handler(error)
    with Checkpointer(failing(root, times=1), counter(), every=1) as ckpt:
        ckpt.after_step()
        ckpt.wait()
        assert breaks.error is None, "it has raised"
        assert "No space left" in ckpt.history[-1].error
        ckpt.after_step()
        ckpt.wait()
        assert ckpt.last_saved_step == 2
    assert steps_on(root) == [2]
    assert type(error).__name__ in capfd.readouterr().err


class Breaks(logging.Handler):
    def emit(self, record):
        raise ConnectionError("log server")


def steps(ckpt):
    for _ in range(1000):
        ckpt.after_step()
        time.sleep(0.01)  # the watch for orders looks now and then


@pytest.mark.parametrize("fails", [False, True])
def test_a_log_handler_that_raises_keeps_nobody_from_stopping(capfd, fails):
    root = MemoryTier()
    ckpt = Checkpointer(failing(root, times=9) if fails else root, counter(), every=10_000)
    ckpt.after_step()
    ckpt.preempt()
    log, breaks = logging.getLogger("dcp_checkfreq.checkpointer.stopping"), Breaks()
    log.addHandler(breaks)
    try:
        with pytest.raises(SystemExit) as stopped:
            steps(ckpt)
    finally:
        log.removeHandler(breaks)
    assert stopped.value.code == (22 if fails else 0)
    assert steps_on(root) == ([] if fails else [ckpt.step])
    assert "ConnectionError: log server" in capfd.readouterr().err
    with pytest.raises(SaveFailed, match="is closed"):
        ckpt.after_step()


def test_a_log_handler_that_raises_while_cleaning_up_stops_nothing(handler, monkeypatch):
    def published(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(
        "dcp_checkfreq.checkpointer.run_history.RunHistory.apply_retention", published
    )
    breaks = handler(ConnectionError("log server"))
    with Checkpointer(MemoryTier(), counter(), every=1) as ckpt:
        ckpt.after_step()
        ckpt.wait()
        assert breaks.error is None, "it has raised"
        assert ckpt.last_saved_step == 1


@pytest.mark.parametrize(
    ("owner", "name"), [(CheckFreqWriter, "close"), (CheckFreqSavePlanner, "let_go")]
)
def test_what_fails_when_a_save_lets_go_is_its_outcome_and_the_next_one_works(
    monkeypatch, owner, name
):
    real, left = getattr(owner, name), [MemoryError()]

    def breaks_once(self):
        real(self)
        if left:
            raise left.pop()

    monkeypatch.setattr(owner, name, breaks_once)
    root = MemoryTier()
    with Checkpointer(root, counter(), every=1) as ckpt:
        ckpt.after_step()
        ckpt.wait()
        assert ckpt.history[-1].error.endswith("MemoryError")
        ckpt.after_step()
        ckpt.wait()
        assert ckpt.last_saved_step == 2
    assert find_latest_valid(root).step == 2


def test_the_first_error_is_the_outcome_and_the_rest_is_done_and_logged(caplog):
    done = []

    def fails(number):
        done.append(number)
        raise KeyError(number)

    assert outcome_of(lambda: done.append(0)) is None
    first = outcome_of(lambda: fails(1), lambda: fails(2), lambda: done.append(3))
    assert (done, repr(first)) == ([0, 1, 2, 3], "KeyError(1)")
    assert "this came after KeyError: 1" in caplog.text
    assert "KeyError: 2" in caplog.text


def test_a_log_that_raises_is_told_on_stderr(capfd):
    def log(text, *args):
        raise ConnectionError(text % args)

    report(log, "step %d", 7)
    assert "ConnectionError: step 7" in capfd.readouterr().err


# --- after close ---


def files(root):
    """Return the names in the root and in its folders."""
    return {
        entry.name: sorted(inner.name for inner in root.child(entry.name).list())
        for entry in root.list()
    }


@pytest.mark.parametrize(
    "call",
    [
        lambda ckpt: ckpt.after_step(),
        lambda ckpt: ckpt.after_step(9),
        lambda ckpt: ckpt.save(wait=True),
        lambda ckpt: ckpt.restore(),
        lambda ckpt: ckpt.restore(fresh_start=True),
    ],
    ids=["after_step", "after_step(9)", "save", "restore", "fresh start"],
)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_closed_checkpointer_says_so_and_takes_nothing(call, steps):
    root = MemoryTier()
    with Checkpointer(root, counter(), every=2) as ckpt:
        ckpt.restore()
        for _ in range(steps):
            ckpt.after_step()
    before = files(root)
    threads = threading.active_count()
    for _ in range(2):
        with pytest.raises(SaveFailed, match="this Checkpointer is closed"):
            call(ckpt)
    assert files(root) == before
    assert threading.active_count() == threads
    assert ckpt.step == steps
    ckpt.close()


# --- errors without a text, and those of others ---


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError(), Odd(), AssertionError()])
def test_a_failed_save_never_has_an_empty_text(caplog, error):
    tier = Breaking(MemoryTier())
    with Checkpointer(tier, counter(), every=1, max_failures=2) as ckpt:
        tier.error = error
        ckpt.after_step()
        ckpt.wait()
        kind = type(error).__name__
        assert kind in ckpt.history[-1].error
        assert re.search(f"step 1 was not saved: .*{kind}", caplog.text)
        ckpt.save()
        with pytest.raises(TooManyFailures, match=f"last error: .*{kind}"):
            ckpt.wait()
        tier.error = None
        ckpt.save(wait=True)


@pytest.mark.parametrize("error", [MemoryError(), KeyError("driver"), Odd()], ids=repr)
def test_with_lets_the_users_own_error_out(caplog, error):
    tier = Breaking(MemoryTier())

    def job():
        with Checkpointer(tier, counter(), every=1) as ckpt:
            tier.error = error
            ckpt.after_step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        job()
    assert re.search(f"because of another error: .*{type(error).__name__}", caplog.text)


def test_with_raises_the_error_of_the_last_save_if_there_is_no_other():
    tier = Breaking(MemoryTier())
    tier.error = MemoryError()
    with (
        pytest.raises(SaveFailed, match="MemoryError") as raised,
        Checkpointer(tier, counter(), every=1) as ckpt,
    ):
        ckpt.after_step()
    assert raised.value.__cause__ is tier.error


def test_what_the_storage_raises_comes_out_as_an_error_of_this_package():
    tier = Breaking(MemoryTier())
    ckpt = Checkpointer(tier, counter(), every=1, on_error="raise")
    for call in (ckpt.wait, lambda: ckpt.save(wait=True), ckpt.after_step, ckpt.close):
        tier.error = Odd()
        ckpt.save()
        with pytest.raises(SaveFailed, match="Odd") as raised:
            call()
        assert raised.value.__cause__ is tier.error


@pytest.mark.parametrize("when", ["registered", "saved"])
def test_what_the_users_own_state_raises_comes_out_as_it_is(when):
    class Part:
        bad = when == "registered"

        def state_dict(self):
            if self.bad:
                raise Odd
            return {}

        def load_state_dict(self, state):
            pass

    part = Part()
    if when == "registered":
        with pytest.raises(Odd) as raised:
            Checkpointer(MemoryTier(), {"p": part}, every=1)
        assert "'p'" in getattr(raised.value, "__notes__", ["'p'"])[0]
        return
    with Checkpointer(MemoryTier(), {"p": part}, every=1) as ckpt:
        part.bad = True
        with pytest.raises(Odd):
            ckpt.after_step()


def test_an_interrupt_while_closing_gives_back_all_the_same(monkeypatch, new_threads):
    before = signal.getsignal(signal.SIGTERM)
    ckpt = Checkpointer(MemoryTier(), counter(), every=1)
    ckpt.restore()
    ckpt.after_step()
    ckpt.wait()
    close = ckpt._saver.close

    def interrupted():
        close()
        raise KeyboardInterrupt

    monkeypatch.setattr(ckpt._saver, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    assert signal.getsignal(signal.SIGTERM) == before
    assert new_threads("checkfreq-preempt") == []
