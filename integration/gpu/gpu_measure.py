"""What saves cost a training GPU: copies, storage, stall per save, overhead at the chosen k."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from gpu_jobs import Trainer
from gpu_laps import Laps, Saving, stall_of
from gpu_report import Facts, say
from gpu_site import Site, checkpointer, nbytes
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.snapshot.optimizer_guard import Guard
from dcp_checkfreq.snapshot.stager import Stager
from dcp_checkfreq.storage.local.huge_pages import address_of, huge_buffer

GIB = 1 << 30
IN_MEMORY = Path("/dev/shm")


def pinning(site: Site) -> Facts:
    """What pinned host memory costs: torch's allocator against registered huge pages."""
    site.need_gpu()
    size = site.size(3 * GIB, 96 << 20)  # no power of two
    source = torch.empty(size, dtype=torch.uint8, device=site.device)
    before = torch.cuda.host_memory_stats()
    begun_s = time.perf_counter()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    facts: Facts = {"asked_bytes": size, "torch_s": time.perf_counter() - begun_s}
    facts["torch_bytes_per_s"] = _copy_rate(site, source, pinned)
    stats = torch.cuda.host_memory_stats()
    facts["torch_pinned_bytes"] = {
        key: stats[key] - before.get(key, 0) for key in stats if "bytes.current" in key
    }
    del pinned
    buffer = huge_buffer(size)
    address = address_of(buffer)
    begun_s = time.perf_counter()
    ctypes.memset(address, 0, size)
    facts["touch_s"] = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    code = int(torch.cuda.cudart().cudaHostRegister(address, size, 1))  # 1: portable
    facts["register_s"] = time.perf_counter() - begun_s
    facts["register_code"] = code
    if code == 0:
        registered = torch.frombuffer(buffer, dtype=torch.uint8)
        facts["registered_is_pinned"] = registered.is_pinned()
        facts["registered_bytes_per_s"] = _copy_rate(site, source, registered)
        site.sync()
        torch.cuda.cudart().cudaHostUnregister(address)
    return facts


def _copy_rate(site: Site, source: torch.Tensor, target: torch.Tensor) -> float:
    return source.nbytes / _copy_s(site, [(source, target)])


def _copy_s(site: Site, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Median seconds of copying all pairs, after one try."""
    taken = []
    for _ in range(6):
        site.sync()
        begun = site.mark()
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
        taken.append(site.between(begun, site.mark()))
    return median(taken[1:])


def copies(site: Site) -> Facts:
    """Snapshots of many tensors against one copy of as many bytes, to the host and to the GPU."""
    job = Trainer(site, "tiny" if site.tiny else "200M", 2)
    job.iterate()
    state = job.capture()
    guard, stager = Guard([job.optim]), Stager()
    size = nbytes(state)
    facts: Facts = {"state_bytes": size}
    for mode in [one for one in site.modes if one != "blocking"]:
        ours = []
        for _ in range(6):
            site.sync()
            snapshot = stager.begin(
                stager.survey(state), guarded=guard.addresses(), on_gpu=mode == "gpu"
            )
            begun_s = time.perf_counter()
            snapshot.wait()
            ours.append(snapshot.copy_s if site.on_gpu else time.perf_counter() - begun_s)
            del snapshot
            stager.release()
        one = torch.empty(size, dtype=torch.uint8, device=site.device)
        where: dict[str, Any] = {"device": site.device} if mode == "gpu" else {}
        if site.on_gpu and mode == "cpu":
            where = {"pin_memory": True}
        plain_s = _copy_s(site, [(one, torch.empty(size, dtype=torch.uint8, **where))])
        ours_s = median(ours[1:])
        facts[f"{mode}_ours_s"] = ours_s
        facts[f"{mode}_plain_s"] = plain_s
        facts[f"{mode}_ours_bytes_per_s"] = size / max(ours_s, 1e-9)
        facts[f"{mode}_plain_bytes_per_s"] = size / max(plain_s, 1e-9)
        facts[f"{mode}_ours_of_plain"] = plain_s / max(ours_s, 1e-9)
    guard.close()
    return facts


def disk(site: Site) -> Facts:
    """How fast plain writes with fdatasync are, where the checkpoints go."""
    size = site.size(2 * GIB, 8 << 20)
    facts: Facts = {}
    for name, folder in (("folder", site.folder), ("memory", IN_MEMORY)):
        if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 4 * size:
            facts[f"{name}_bytes_per_s"] = _write_rate(folder / f"gpu-check-{os.getpid()}", size)
            facts[f"{name}_free_bytes"] = shutil.disk_usage(folder).free
    site.disk_bytes_per_s = facts.get("folder_bytes_per_s", 0.0)
    return facts


def _write_rate(path: Path, size: int) -> float:
    chunk = os.urandom(1 << 20) * 8
    begun_s = time.perf_counter()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for _ in range(max(1, size // len(chunk))):
                os.write(fd, chunk)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        return size / (time.perf_counter() - begun_s)
    finally:
        path.unlink(missing_ok=True)


# --- stall ---


def _trainer(site: Site) -> Trainer:
    """Return a job whose saves are small enough for several in the budget."""
    job = Trainer(site, "tiny" if site.tiny else "200M", site.size(16, 2))
    for _ in range(3):
        job.iterate()
    return job


def stall(site: Site) -> Facts:
    """What one save adds to the iterations from its start until it is published, by mode."""
    job = _trainer(site)
    facts: Facts = {"state_bytes": nbytes(job.capture()), "parameters": job.parameters}
    with _fast_enough(site, facts, longest_s=6):
        return _stall_by_mode(site, job, facts)


def _stall_by_mode(site: Site, job: Trainer, facts: Facts) -> Facts:
    for mode in site.modes:
        with site.root() as root, checkpointer(root, job.parts, mode) as ckpt:
            ckpt.after_step()
            ckpt.save(wait=True)  # the buffers are there
            ckpt.after_step()
            saved: list[int] = []

            def begin(ckpt: Checkpointer = ckpt, saved: list[int] = saved) -> None:
                saved.append(ckpt.step)
                ckpt.save()

            def done(ckpt: Checkpointer = ckpt, saved: list[int] = saved) -> bool:
                return ckpt.last_saved_step == saved[-1]

            saving = Saving(begin, done, after_step=ckpt.after_step)
            facts[mode] = stall_of(Laps(site, job), saving, saves=site.size(3, 2))
            facts[mode]["persist_bytes_per_s"] = [
                record.copied_bytes / record.persist_s
                for record in ckpt.history
                if record.persist_s
            ]
            facts[mode]["records"] = [_fields(record) for record in ckpt.history]
        say(f"          {mode}: {_line(facts[mode])}")
    return facts


def _line(found: Facts) -> str:
    return (
        f"stall {1000 * found['stall_s']:.1f} ms a save, of it "
        f"{1000 * found['first_iteration_s']:.1f} ms in the first iteration; an iteration is "
        f"{1000 * found['iteration_s']:.1f} ms, {found['loaded_iterations']} beside a save"
    )


def _fields(record: Any) -> Facts:
    return {name: getattr(record, name) for name in record.__slots__}


def stock_stall(site: Site) -> Facts:
    """The same for DCP's own `async_save`: as it comes, and with its pinned stager."""
    job = _trainer(site)
    facts: Facts = {"state_bytes": nbytes(job.capture())}
    with _fast_enough(site, facts, longest_s=6):
        return _stock_by_arm(site, job, facts)


def _stock_by_arm(site: Site, job: Trainer, facts: Facts) -> Facts:
    arms: dict[str, Callable[[], Any]] = {"default": lambda: None}
    if site.on_gpu:
        arms["pinned"] = DefaultStager
    for name, make_stager in arms.items():
        try:
            with site.root() as root:
                facts[name] = _stock_arm(site, job, root, make_stager())
            say(f"          {name}: {_line(facts[name])}")
        except Exception as error:  # noqa: BLE001  a peer that does not run is a finding
            facts[name] = {"failed": f"{type(error).__name__}: {error}"}
            say(f"          {name}: {facts[name]['failed']}")
        site.tidy()
    return facts


def _stock_arm(site: Site, job: Trainer, root: Path, stager: Any) -> Facts:
    pending: dict[str, Any] = {}

    def begin() -> None:
        path = root / f"save_{len(list(root.iterdir()))}"
        options = {} if stager is None else {"async_stager": stager}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            made = dcp.async_save(job.capture(), storage_writer=FileSystemWriter(path), **options)
        pending["staged"] = getattr(made, "staging_completion", None)
        pending["saved"] = getattr(made, "upload_completion", made)

    def before_update() -> None:
        staged = pending.pop("staged", None)
        if staged is not None:
            staged.result()  # as DCP's guide asks: before the weights change

    def done() -> bool:
        if not pending["saved"].done():
            return False
        pending["saved"].result()
        return True

    try:
        begin()
        before_update()
        pending["saved"].result()  # the buffers are there
        saving = Saving(begin, done, before_update=before_update)
        return stall_of(Laps(site, job), saving, saves=site.size(3, 2))
    finally:
        if stager is not None:
            stager.close()


# --- overhead ---


def overhead(site: Site) -> Facts:
    """Overhead of `Checkpointer(max_overhead=0.035)` at its own k, against no checkpointing."""
    job = Trainer(site, "tiny" if site.tiny else "1B", 2 if site.tiny else 4)
    facts: Facts = {"parameters": job.parameters, "state_bytes": 0}
    laps = Laps(site, job)
    _set_length(site, job, laps)
    facts |= {"state_bytes": nbytes(job.capture()), "batch": job.batch, "max_overhead": 0.035}
    before = laps.run(site.size(25, 5))
    with _fast_enough(site, facts, longest_s=20), site.root() as root:
        options = {"every": None, "steps_per_epoch": site.size(2000, 300)}
        with checkpointer(root, job.parts, "auto", **options) as ckpt:
            facts |= _at_own_interval(site, laps, ckpt)
    site.tidy()
    after = laps.run(site.size(25, 5))
    base_s = median(before + after)
    facts |= {
        "iteration_before_s": median(before),
        "iteration_after_s": median(after),
        "mean_before_after_s": sum(before + after) / len(before + after),
    }
    window = facts["window_s"]
    if window:
        facts["overhead"] = sum(window) / len(window) / facts["mean_before_after_s"] - 1
        facts["overhead_of_medians"] = median(window) / base_s - 1
    return facts


def _set_length(site: Site, job: Trainer, laps: Laps) -> None:
    """Choose the batch so that an iteration takes 0.2 to 0.5 s."""
    laps.run(2)
    if site.tiny:
        return
    one_s = median(laps.run(4))
    job.set_batch(max(1, min(16, round(job.batch * 0.33 / one_s))))
    laps.run(2)


@contextlib.contextmanager
def _fast_enough(site: Site, facts: Facts, *, longest_s: float) -> Iterator[None]:
    """Save into memory meanwhile, if one save to the disk would take longer."""
    size, disk_folder = facts["state_bytes"], site.folder
    if not site.tiny:
        if not site.disk_bytes_per_s:
            disk(site)
        slow = size / max(site.disk_bytes_per_s, 1.0) > longest_s
        small = shutil.disk_usage(site.folder).free < 2.5 * size
        if (slow or small) and shutil.disk_usage(IN_MEMORY).free > 2.5 * size:
            site.folder = IN_MEMORY
            say(f"          the disk is too {'slow' if slow else 'small'}: saves to {IN_MEMORY}")
    facts["folder"] = str(site.folder)
    try:
        yield
    finally:
        site.folder = disk_folder


def _at_own_interval(site: Site, laps: Laps, ckpt: Checkpointer) -> Facts:
    """Train until k is known, let a save pass, then measure from one publication to another."""
    published_at: list[int] = []  # iterations done when a save was seen to be published
    done, first = 0, None
    wanted = site.size(5, 4)  # the profile's, one to settle, and three whole intervals

    def after_step() -> None:
        nonlocal done, first
        ckpt.after_step()
        done += 1
        published_at.extend([done] * (len(ckpt.history) - len(published_at)))
        if first is None and ckpt.interval_steps is not None:
            first = ckpt.interval_steps
            say(f"          k is {first} after {done} iterations")

    def enough() -> bool:
        return len(published_at) >= wanted or site.report.left_s < 15

    # One run without a pause: whoever asks what an iteration took waits for the GPU.
    times = laps.run(1, after_step, until=enough, longest_s=600)
    whole = published_at[1:]  # from the second on
    window = times[whole[0] : whole[-1]] if len(whole) > 1 else []
    ckpt.wait()
    return {
        "first_interval_steps": first,
        "interval_steps": ckpt.interval_steps,
        "iterations": len(times),
        "saves_in_window": max(0, len(whole) - 1),
        "is_whole": len(published_at) >= wanted,
        "window_s": window,
        "records": [_fields(record) for record in ckpt.history],
        "persist_bytes_per_s": [
            record.copied_bytes / record.persist_s for record in ckpt.history if record.persist_s
        ],
    }
