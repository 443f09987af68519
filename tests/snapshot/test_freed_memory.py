"""Issue 10: memory that is freed while it is copied fails the save, and never ends the process."""

import errno
import mmap
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import CheckFreqWriter, SnapshotFailed, UnsupportedState
from dcp_checkfreq.snapshot import memcpy, reads
from dcp_checkfreq.snapshot.inventory import Survey
from dcp_checkfreq.snapshot.pool import BufferPool
from dcp_checkfreq.snapshot.stager import Stager
from dcp_checkfreq.storage.local.huge_pages import address_of

BYTES = 64 << 20  # more than any allocator keeps: what is freed is unmapped


def emptied(tensor):
    tensor.untyped_storage().resize_(0)


def emptied_and_made_again(tensor):
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    junk = torch.full((size // 4,), 7.0)
    storage.resize_(size + junk.nbytes)


def grown(tensor):
    tensor.untyped_storage().resize_(3 * BYTES)


def grown_by_a_view(tensor):
    flat = torch.empty(0).set_(tensor.untyped_storage())
    flat.resize_(BYTES)  # elements, so four times as much


def shared(tensor):
    tensor.untyped_storage().share_memory_()


def transposed():
    return torch.ones(4096, BYTES // 4096 // 4).t()


SHAPES = {
    "plain": lambda: torch.ones(BYTES // 4),
    "transposed": transposed,
    "conjugated": lambda: torch.ones(BYTES // 8, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("way", [emptied, emptied_and_made_again, grown, grown_by_a_view, shared])
def test_memory_that_goes_before_it_is_copied_fails_the_snapshot(held, way, make):
    stager = Stager(BufferPool(wait_s=5.0), overlap_from_bytes=0)
    state = {"first": torch.zeros(10), "deep": {"moving": make()}}
    everything = {piece.address for piece in Survey(state).inventory.pieces}
    held.hold()
    snapshot = stager.begin(stager.survey(state), guarded=everything)
    assert held.begun.wait(10)
    way(state["deep"]["moving"])
    held.release()
    for look in (snapshot.wait, snapshot.before_update, snapshot.wait):
        with pytest.raises(SnapshotFailed, match=r"'deep.moving' was changed \(its memory.*block"):
            look()
    stager.release()


@pytest.mark.parametrize("way", [emptied, grown, shared])
def test_memory_that_goes_after_it_was_copied_is_no_harm(way):
    stager = Stager(BufferPool(wait_s=5.0), overlap_from_bytes=0)
    state = {"moving": torch.arange(BYTES // 4)}
    everything = {piece.address for piece in Survey(state).inventory.pieces}
    snapshot = stager.begin(stager.survey(state), guarded=everything)
    (copying,) = snapshot._pending
    assert copying._copying.problem() is None
    way(state["moving"])
    snapshot.before_update()
    snapshot.wait()
    assert torch.equal(snapshot.state["moving"], torch.arange(BYTES // 4))
    stager.release()


def save_at_once(state, folder):
    dcp.save(state, storage_writer=CheckFreqWriter(folder))


def save_in_the_background(state, folder):
    dcp.async_save(state, storage_writer=CheckFreqWriter(folder)).result()


@pytest.mark.parametrize("save", [save_at_once, save_in_the_background])
@pytest.mark.parametrize("left", [0, 4 * 99])
def test_memory_that_is_gone_before_the_save_is_refused_by_its_key(tmp_path, save, left):
    state = {"deep": {"gone": torch.ones(200)[100:]}, "there": torch.ones(5)}
    state["deep"]["gone"].untyped_storage().resize_(left)
    with pytest.raises((UnsupportedState, CheckpointException), match=r"deep.gone.*was freed"):
        save(state, tmp_path / "c")
    assert not (tmp_path / "c" / ".metadata").exists()


# Each in a process of its own: where it fails, that one dies.
UNMAPPED = """
import ctypes, mmap
from dcp_checkfreq.snapshot import reads
from dcp_checkfreq.storage.local.huge_pages import address_of
page = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
gone = address_of(memoryview(page))
own = bytearray(1 << 20)
target = address_of(memoryview(own))
assert ctypes.CDLL(None).munmap(ctypes.c_void_p(gone), ctypes.c_size_t(1 << 20)) == 0
known = ctypes.create_string_buffer(b"known", 5)
for short in (False, True):
    assert reads.read([target], [gone], [1 << 20], short=short) == 0
    there = [ctypes.addressof(known), gone]
    assert reads.read([target, target + 5], there, [5, 9], short=short) == 5
    assert own[:5] == b"known"
print("alive", flush=True)
import os
os._exit(0)  # the mapping's object would unmap it again
"""

RACE = """
import threading, time
import torch
from dcp_checkfreq.snapshot.memcpy import Moved, copy_tensors
source, target = torch.ones(16 << 20), torch.empty(16 << 20)
storage, size, stop, ends = source.untyped_storage(), source.nbytes, threading.Event(), []
def free_and_take():
    while not stop.is_set():
        storage.resize_(0)
        storage.resize_(size)
        source.fill_(1)
thread = threading.Thread(target=free_and_take)
thread.start()
until = time.monotonic() + 2
while time.monotonic() < until:
    try:
        copy_tensors([source], [target], [source.data_ptr()])
    except Moved as moved:
        assert moved.number == 0
        ends.append("moved")
    else:
        ends.append("copied")
stop.set()
thread.join()
assert "moved" in ends, ends
print("alive", len(ends))
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [UNMAPPED, RACE], ids=["unmapped", "race"])
def test_memory_that_goes_while_it_is_read_does_not_end_the_process(script):
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "alive" in ended.stdout


@pytest.fixture
def small_spans(monkeypatch):
    monkeypatch.setattr(memcpy, "_SPAN_BYTES", 1000)
    monkeypatch.setattr(memcpy, "_IN_THREADS_FROM_BYTES", 2000)
    monkeypatch.setattr(reads, "MOST_SPANS", 3)


ODD = {
    "transposed": lambda t: t.t(),
    "permuted": lambda t: t.view(8, 5, 90).permute(2, 0, 1),
    "every other": lambda t: t[:, ::2],
    "a column": lambda t: t[:, 7:8],
    "expanded": lambda t: t[:1].expand(30, 90),
    "all the same": lambda t: t[0, 0].expand(700),
    "conjugated": lambda t: t.to(torch.complex64).conj(),
    "conjugated and transposed": lambda t: t.to(torch.complex64).t().conj(),
    "negated": lambda t: torch.complex(t, t).conj().imag,
    "one element, conjugated": lambda t: t.to(torch.complex64)[3, 3].conj(),
    "one of each": lambda t: t[::40, ::90],
    "none": lambda t: t[:, :0].t(),
    "plain": lambda t: t,
}


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_odd_strides_are_copied_piece_by_piece(small_spans, monkeypatch, odd, refused):
    if refused:
        monkeypatch.setattr(reads, "_writes", {False: None, True: None})
    source = odd(torch.randn(40, 90, generator=torch.Generator().manual_seed(0)))
    plain = torch.zeros(5000)
    target, other = torch.full(source.shape, 9, dtype=source.dtype), torch.ones(5000)
    memcpy.copy_tensors([plain, source], [other, target], [plain.data_ptr(), source.data_ptr()])
    assert torch.equal(target, source)
    assert torch.equal(other, plain)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_where_a_sandbox_refuses_it_memory_is_copied_without_the_kernel(monkeypatch, code):
    asked = []

    def refuses(*_):
        asked.append(1)
        reads.ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(reads, "_writes", {False: refuses, True: refuses})
    source, target = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    for _ in range(3):
        target.zero_()
        memcpy.copy_tensors([source], [target], [source.data_ptr()])
        assert torch.equal(source, target)
    assert len(asked) == 1


def test_memory_that_the_kernel_cannot_write_to_is_told_from_a_source_that_is_gone():
    pages = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = address_of(memoryview(pages))
    assert reads.ctypes.CDLL(None).mprotect(reads.ctypes.c_void_p(address), 4096, 1) == 0
    write = reads._writes[False]
    assert not reads._can_reach(write, address)
    assert reads._can_reach(write, torch.zeros(1).data_ptr())
