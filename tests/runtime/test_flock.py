import errno
import fcntl
import os
import signal
import threading

import pytest
from cache_tools import start_child

from dcp_checkfreq.runtime.clock import SystemClock
from dcp_checkfreq.runtime.flock import HeldFile, flock_works
from dcp_checkfreq.testing import ManualClock


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    return str(tmp_path / "file")


def can_lock(path, *, shared):
    file = HeldFile(path, os.O_RDWR)
    try:
        return file.try_lock(shared=shared)
    finally:
        file.close()


def test_a_shared_hold_lets_others_share_and_nobody_have_it_alone(path):
    file = HeldFile(path, os.O_RDONLY)
    assert file.try_lock(shared=True)
    assert can_lock(path, shared=True)
    assert not can_lock(path, shared=False)
    file.close()
    assert can_lock(path, shared=False)


def test_a_hold_ends_with_its_process_however_it_ends(path):
    child = start_child("hold_child.py", path)
    assert child.stdout.readline() == "held\n"
    assert not can_lock(path, shared=True)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert can_lock(path, shared=False)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # Python 3.12
def test_a_forked_child_does_not_keep_what_its_parent_holds(path):
    file = HeldFile(path, os.O_RDONLY)
    assert file.try_lock(shared=False)
    asked, told = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        file.close()  # as a context does that was entered before the fork; must not harm
        os.write(told[1], b"1" if file.closed else b"0")
        os.read(asked[0], 1)
        os._exit(0)
    try:
        assert os.read(told[0], 1) == b"1"
        assert not can_lock(path, shared=True), "the child has let go of its parent's lock"
        fcntl_free = os.dup(file.fd)
        os.close(fcntl_free)  # one more close, none of them the last
        assert not can_lock(path, shared=True)
        file.close()  # closed, not unlocked: the same as a death
        assert can_lock(path, shared=False), "the child still has it"
    finally:
        os.write(asked[1], b"x")
        os.waitpid(child, 0)
        for fd in (*asked, *told):
            os.close(fd)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # Python 3.12
def test_forks_while_other_threads_open_and_close_leave_nothing_locked(path):
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            file = HeldFile(path, os.O_RDONLY)
            file.try_lock(shared=True)
            file.close()

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    asked, told = os.pipe(), os.pipe()
    children = []
    for _ in range(20):
        child = os.fork()
        if not child:
            os.write(told[1], b"x")
            os.read(asked[0], 1)
            os._exit(0)
        children.append(child)
        os.read(told[0], 1)  # the child closes files when it runs, not when fork returns here
    stop.set()
    for thread in threads:
        thread.join()
    free = can_lock(path, shared=False)
    os.write(asked[1], b"x" * len(children))
    for child in children:
        os.waitpid(child, 0)
    for fd in (*asked, *told):
        os.close(fd)
    assert free


def test_a_file_that_another_one_replaced_is_not_at_its_path(path, tmp_path):
    file = HeldFile(path, os.O_RDONLY)
    assert file.is_at(path)
    (tmp_path / "other").write_bytes(b"y")
    os.replace(tmp_path / "other", path)
    assert not file.is_at(path)
    os.unlink(path)
    assert not file.is_at(path)
    file.close()


def test_waiting_for_a_holder_that_never_lets_go_ends(path):
    holder, waiting = HeldFile(path, os.O_RDONLY), HeldFile(path, os.O_RDONLY)
    holder.try_lock(shared=False)
    clock = ManualClock()
    with pytest.raises(TimeoutError, match="more than 10 s"):
        waiting.lock_within(10.0, clock, shared=True)
    assert 10 <= clock.monotonic_s() < 10.1
    holder.close()
    waiting.lock_within(0.0, SystemClock(), shared=True)
    waiting.close()


def test_the_probe_finds_that_flock_works_and_leaves_nothing(tmp_path):
    assert flock_works(str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [None, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_the_probe_finds_that_flock_does_nothing_or_is_not_offered(tmp_path, monkeypatch, number):
    def flock(fd, operation):
        if number is not None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert not flock_works(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_the_probe_is_not_content_with_locks_per_process(tmp_path, monkeypatch):
    """As where flock is made of fcntl locks: threads of one process are not in each other's way."""

    def per_process(fd, operation):
        fcntl.lockf(fd, operation)

    monkeypatch.setattr(fcntl, "flock", per_process)
    assert not flock_works(str(tmp_path))
