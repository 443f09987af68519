"""The folder of the cache, call by call. Other processes are other open files, as for flock."""

import fcntl
import os
import pathlib
import signal
import threading

import pytest
from cache_tools import look, partials_in, start_child, whole_in

from dcp_checkfreq.data.cache.file_cache import _boot
from dcp_checkfreq.data.cache.folder import CacheFolder
from dcp_checkfreq.runtime.clock import SystemClock
from dcp_checkfreq.testing import ManualClock

KIB = 1024


@pytest.fixture
def root(tmp_path):
    return str(tmp_path)


def folder_at(root, max_bytes=64 * KIB, *, evicts=True, low=0.5, clock=None, boot=None):
    folder = CacheFolder(
        root, max_bytes, evicts=evicts, low=low, clock=clock or SystemClock(), boot=boot or _boot()
    )
    folder.prepare()
    return folder


def put(folder, name, size_bytes=8 * KIB):
    """Put a file there, and return it held; None if there is no room."""
    partial, is_whole = folder.claim(name)
    assert not is_whole
    if not folder.reserve(partial, size_bytes):
        folder.abandon(partial)
        return None
    os.pwrite(partial.fd, name[:1].encode() * size_bytes, 0)
    return folder.publish(partial, name)


def has(folder, name):
    file = folder.hold(name)
    if file is not None:
        file.close()
    return file is not None


def test_a_filled_file_is_there_whole_read_only_and_counted(root):
    folder = folder_at(root)
    file = put(folder, "aa", 5000)
    assert pathlib.Path(file.path).read_bytes() == b"a" * 5000
    assert os.stat(file.path).st_mode & 0o222 == 0
    assert folder.used_bytes() == 8 * KIB
    assert partials_in(root) == []
    file.close()
    assert has(folder_at(root), "aa")


def test_nothing_is_served_before_it_is_published(root):
    folder = folder_at(root)
    partial, _ = folder.claim("aa")
    folder.reserve(partial, 8 * KIB)
    assert folder.hold("aa") is None
    assert folder.used_bytes() == 8 * KIB, "the room is taken before the first byte"
    folder.abandon(partial)
    assert folder.used_bytes() == 0
    assert partials_in(root) == []


def test_an_empty_file_takes_no_room(root):
    folder = folder_at(root)
    put(folder, "aa", 0).close()
    assert has(folder, "aa")
    assert folder.used_bytes() == 0


def test_the_least_recently_used_go_first_and_down_to_the_low_mark(root):
    clock = ManualClock()
    folder = folder_at(root, clock=clock)
    for name in "abcdefgh":
        put(folder, name).close()
        clock.advance(1)
    for name in "ba":
        file = folder.hold(name)
        folder.touch(file)
        file.close()
        clock.advance(1)
    put(folder, "i").close()
    assert "".join(sorted(path.name for path in whole_in(root))) == "abhi"
    assert look(root) == (32 * KIB, 32 * KIB)


def test_what_is_held_stays_though_everything_else_goes(root):
    folder = folder_at(root)
    held = put(folder, "a")
    for name in "bcdefghijklmn":
        put(folder, name).close()
    assert pathlib.Path(held.path).read_bytes() == b"a" * 8 * KIB
    held.close()


def test_a_file_evicted_between_its_opening_and_its_lock_is_not_served(root, monkeypatch):
    folder = folder_at(root)
    file = put(folder, "a")
    path = file.path
    file.close()
    flock = fcntl.flock

    def evicted_first(fd, operation):
        if operation & fcntl.LOCK_SH:
            os.unlink(path)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", evicted_first)
    assert folder.hold("a") is None


def test_if_all_is_held_there_is_no_room(root):
    folder = folder_at(root)
    held = [put(folder, name) for name in "abcdefgh"]
    assert put(folder, "i") is None
    held.pop().close()
    held.append(put(folder, "j"))
    assert held[-1] is not None
    for file in held:
        file.close()


def test_a_file_used_since_the_plan_was_made_is_not_evicted_by_it(root):
    clock = ManualClock()
    folder = folder_at(root, 80 * 4 * KIB, low=0.01, clock=clock)
    names = [f"{number:03d}" for number in range(145)]
    for name in names[:81]:  # the last one evicts a batch of 64; the plan has 15 more
        put(folder, name, 4 * KIB).close()
        clock.advance(1)
    assert not has(folder, names[63])
    assert has(folder, names[64])
    file = folder.hold(names[64])
    folder.touch(file)
    file.close()
    for name in names[81:]:
        put(folder, name, 4 * KIB).close()
        clock.advance(1)
    assert has(folder, names[64])
    assert not has(folder, names[65])


def test_keep_evicts_nothing_and_sees_at_a_glance_that_it_is_full(root):
    folder = folder_at(root, evicts=False)
    for name in "abcdefgh":
        assert not folder.is_full_for(1)
        put(folder, name).close()
    assert folder.is_full_for(1)
    assert put(folder, "i") is None
    assert all(has(folder, name) for name in "abcdefgh")


def test_the_room_of_a_killed_writer_is_found_again_without_a_restart(root):
    folder = folder_at(root, evicts=False)
    child = start_child("fill_child.py", root, 64 * KIB, "zz", 64 * KIB)
    assert child.stdout.readline() == "half\n"
    assert put(folder, "a") is None, "the writer lives: its room is taken"
    assert partials_in(root) == ["zz"]
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not folder.is_full_for(8 * KIB), "a partial is there that may be dead"
    put(folder, "a").close()
    assert partials_in(root) == []
    assert look(root) == (8 * KIB, 8 * KIB)


def test_who_wants_the_file_of_a_killed_writer_takes_it_over_clean(root):
    folder = folder_at(root)
    child = start_child("fill_child.py", root, 64 * KIB, "zz", 64 * KIB)
    assert child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    file = put(folder, "zz", 12 * KIB)
    assert pathlib.Path(file.path).read_bytes() == b"z" * 12 * KIB
    file.close()
    assert look(root) == (12 * KIB, 12 * KIB)


def test_start_sweeps_what_dead_writers_left(root):
    child = start_child("fill_child.py", root, 64 * KIB, "zz", 64 * KIB)
    assert child.stdout.readline() == "half\n"
    folder_at(root)
    assert partials_in(root) == ["zz"], "alive"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    folder = folder_at(root)
    assert partials_in(root) == []
    assert folder.used_bytes() == 0


def test_one_that_wants_a_file_that_another_one_fills_waits_and_gets_it(root):
    folder = folder_at(root)
    partial, _ = folder.claim("aa")
    folder.reserve(partial, 8 * KIB)
    got = []

    def claim():
        file, is_whole = folder_at(root).claim("aa")
        got.append(is_whole)
        file.close()

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert got == []
    folder.publish(partial, "aa").close()
    for thread in threads:
        thread.join()
    assert got == [True] * 4
    assert partials_in(root) == []


def test_waiting_for_one_that_never_fills_it_ends(root):
    folder = folder_at(root)
    partial, _ = folder.claim("aa")
    clock = ManualClock()
    with pytest.raises(TimeoutError):
        folder_at(root, clock=clock).claim("aa")
    assert 120 <= clock.monotonic_s() < 121
    folder.abandon(partial)


@pytest.mark.parametrize("content", [b"", b"\0" * 90, b"checkfreq-cache-1 5 ended x 00000000\n"])
def test_a_damaged_byte_count_costs_the_files_and_nothing_else(root, content):
    folder = folder_at(root)
    put(folder, "aa").close()
    with open(os.path.join(root, "books"), "wb") as file:
        file.write(content)
    assert folder.used_bytes() == 0
    assert not has(folder, "aa"), "after a power loss it might be hollow"
    put(folder, "aa").close()
    assert look(root) == (8 * KIB, 8 * KIB)


def test_the_files_of_another_boot_are_not_served(root):
    put(folder_at(root, boot="before"), "aa").close()
    assert has(folder_at(root, boot="before"), "aa")
    after = folder_at(root, boot="after")
    assert not has(after, "aa")
    assert after.used_bytes() == 0


def test_a_death_in_the_middle_of_a_change_is_counted_anew(root):
    folder = folder_at(root)
    put(folder, "aa").close()
    put(folder, "bb").close()
    child = start_child("die_in_change_child.py", root)
    child.wait()
    child.stdout.close()
    assert look(root) == (8 * KIB, None)
    assert folder.used_bytes() == 8 * KIB
    assert look(root) == (8 * KIB, 8 * KIB)


def test_a_smaller_bound_holds_from_the_start_also_for_keep(root):
    folder = folder_at(root, evicts=False)
    for name in "abcdefgh":
        put(folder, name).close()
    folder_at(root, 32 * KIB, evicts=False, low=1.0)
    assert look(root) == (32 * KIB, 32 * KIB)
