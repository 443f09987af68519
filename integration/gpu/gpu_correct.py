"""What a snapshot of a training GPU promises: the state of its iteration, bit for bit."""

from __future__ import annotations

import time
from typing import Any

import torch
from gpu_jobs import Job
from gpu_report import Facts, Skipped
from gpu_site import (
    Site,
    checkpointer,
    differing,
    flat,
    folder_of,
    frozen,
    loaded,
    mapped,
    must_equal,
    nbytes,
)

from dcp_checkfreq import SaveFailed, SnapshotFailed
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format.index import digest_starts
from dcp_checkfreq.snapshot.optimizer_guard import Guard
from dcp_checkfreq.snapshot.stager import Stager


def stream_order(site: Site) -> Facts:
    """Slow work on the training stream writes the parameters right before the save."""
    facts: Facts = {}
    for own in (False, True):
        for mode in site.modes:
            job = Job(site, layers=4)
            job.iterate()
            name = f"{mode}, {'own' if own else 'default'} stream"
            with site.root() as root, checkpointer(root, job.parts, mode) as ckpt:
                ckpt.after_step()
                ckpt.save(wait=True)  # the buffers are there
                with site.stream(own=own):
                    zero = site.slow.queue(0.2)
                    with torch.no_grad():
                        for number, parameter in enumerate(job.model.parameters()):
                            parameter.copy_(parameter + zero + number + 1)
                    written = site.mark()
                    want = frozen(job.capture())
                    ckpt.after_step()
                    ckpt.save()
                    was_running = not written.query() if site.on_gpu else True
                    ckpt.wait()
                must_equal(want, loaded(folder_of(root, ckpt), want), name)
                facts[name] = "still computing when the save began" if was_running else "too fast"
    if site.on_gpu and "too fast" in facts.values():
        raise AssertionError(f"the slow work was too short, or the save waited for it: {facts}")
    return facts


def torn_snapshot(site: Site, kind: str, mode: str, *, guarded: bool = True) -> int:
    """Update right after a snapshot has begun, many times; return how often that was noticed."""
    job = Job(site, kind=kind, layers=site.size(16, 8))
    job.iterate()
    guard, stager = Guard([job.optim]), Stager()
    noticed = 0
    try:
        for number in range(site.size(20, 3)):
            job.compute()
            state = job.capture()
            want = frozen(state)
            snapshot = stager.begin(
                stager.survey(state), guarded=guard.addresses(), on_gpu=mode == "gpu"
            )
            if guarded:
                guard.arm(snapshot)
            job.optim.step()
            try:
                snapshot.wait()
            except SnapshotFailed:
                noticed += 1
                if guarded:
                    raise
            else:
                paths = differing(want, snapshot.state)
                noticed += bool(paths)
                if paths and guarded:
                    what = f"{kind}, {mode}, repeat {number}"
                    raise AssertionError(f"{what}: torn in {len(paths)} tensors: {paths[:5]}")
            moved = differing(want, job.capture())
            assert len(moved) >= len(list(job.model.parameters())), "the update changed nothing"
            del snapshot, state
            stager.release()
    finally:
        stager.release()
        guard.close()
    return noticed


def never_torn(site: Site) -> Facts:
    """The optimizer steps while the copy is under way; the copy is what was before."""
    facts: Facts = {}
    for kind in ("fused", "foreach"):
        for mode in [one for one in site.modes if one != "blocking"]:
            torn_snapshot(site, kind, mode)
            facts[f"{kind}, {mode}"] = f"{site.size(20, 3)} updates at once, none torn"
            site.tidy()
    return facts


def seen_without_guard(site: Site) -> Facts:
    """The check before this one can fail: without the guard it does, or the change is noticed."""
    facts: Facts = {}
    for kind in ("fused", "foreach"):
        noticed = torn_snapshot(site, kind, "cpu", guarded=False)
        facts[kind] = f"{noticed} of {site.size(20, 3)} seen"
        if not noticed:
            if not site.on_gpu:
                raise Skipped(f"{kind}: every copy was done before the update began")
            raise AssertionError(f"{kind}: without the guard nothing was torn: nothing is shown")
    return facts


def never_torn_on_storage(site: Site) -> Facts:
    """The same through `Checkpointer`, down to the files."""
    facts: Facts = {}
    for kind in ("fused", "foreach"):
        for mode in site.modes:
            job = Job(site, kind=kind)
            with site.root() as root, checkpointer(root, job.parts, mode) as ckpt:
                for number in range(2):
                    job.iterate()
                    ckpt.after_step()
                    want = frozen(job.capture())
                    ckpt.save()
                    job.optim.step()  # at once, with the gradients that are there
                    ckpt.wait()
                    what = f"{kind}, {mode}, save {number}"
                    must_equal(want, loaded(folder_of(root, ckpt), want), what)
            facts[f"{kind}, {mode}"] = "equal"
    return facts


def _extra(site: Site) -> dict[str, Any]:
    """What no optimizer guards, in every kind."""
    return {
        "ema": torch.randn(1 << site.size(22, 15), device=site.device),
        "transposed": torch.randn(512, 256, device=site.device).t(),
        "small": torch.arange(10, device=site.device),
        "host": torch.randn(1 << site.size(22, 15)),
        "step": 7,
    }


def unguarded_state(site: Site) -> Facts:
    """BatchNorm, EMA, CPU tensors and plain values change as soon as the save has begun."""
    facts: Facts = {}
    for mode in site.modes:
        job = Job(site, norm=True)
        job.iterate()
        parts = {**job.parts, "extra": _extra(site)}
        with site.root() as root:
            with checkpointer(root, parts, mode) as ckpt:
                ckpt.after_step()
                ckpt.save(wait=True)
                job.iterate()
                ckpt.after_step()
                site.slow.queue(0.1)
                want = frozen({**job.capture(), "extra": parts["extra"]})
                ckpt.save()
                job.model(job.batch)  # changes the statistics of the norm
                for tensor in flat(parts["extra"]).values():
                    tensor.add_(1)
                job.optim.step()
                ckpt.wait()
            other = Job(site, norm=True, seed=1)
            restored = {**other.parts, "extra": _extra(site)}
            with checkpointer(root, restored, mode) as ckpt:
                ckpt.restore()
                must_equal(want, {**other.capture(), "extra": restored["extra"]}, mode)
        facts[mode] = "equal"
    return facts


def lazy_bits(site: Site) -> Facts:
    """Conjugated and negated CUDA tensors: torch finishes them on the host, before they arrive."""
    values = torch.randn(1 << 16, dtype=torch.complex64, device=site.device)
    parts = {"extra": {"conjugated": values.conj(), "negated": values.conj().imag}}
    with site.root() as root:
        with checkpointer(root, parts, "cpu") as ckpt:
            ckpt.after_step()
            ckpt.save(wait=True)
            ckpt.after_step()
            want = frozen(parts)
            site.slow.queue(0.1)  # the copy arrives long after the call
            ckpt.save(wait=True)
        again = {"extra": frozen(parts["extra"])}
        with checkpointer(root, again, "cpu") as ckpt:
            ckpt.restore()
        must_equal(want, again, "lazy conjugation")
    return {}


def changed_in_place(site: Site) -> Facts:
    """A change outside of `optimizer.step` fails the save, or came after the copy.

    On the host one gap is known: torch counts a change when it is done, so one that is being made
    as the copy ends is not seen. On a GPU a change is counted when it is queued.
    """
    facts: Facts = {}
    for mode in [one for one in site.modes if one != "blocking"]:
        job = Job(site)
        job.iterate()
        with site.root() as root:
            ckpt = checkpointer(root, job.parts, mode, on_error="log")
            ckpt.after_step()
            ckpt.save(wait=True)
            ckpt.after_step()
            want = frozen(job.capture())
            ckpt.save()
            with torch.no_grad():
                for parameter in job.model.parameters():
                    parameter.add_(1)
            job.optim.step()
            try:
                ckpt.wait()
                ckpt.close()
            except (SaveFailed, SnapshotFailed):
                pass
            error = ckpt.history[-1].error
            facts[mode] = f"reported: {error}" if error else "saved"
            if error is None:
                torn = differing(want, loaded(folder_of(root, ckpt), want))
                if torn and not site.on_gpu:
                    raise Skipped(f"published with a change that was under way: {torn}")
                assert not torn, f"{mode}: published, and torn: {torn[:5]}"
    return facts


def equal_modes(site: Site) -> Facts:
    """All modes write the same bytes: the digests of all payloads are equal."""
    job = Job(site, norm=True)
    job.iterate()
    job.iterate()
    want = frozen(job.capture())
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for mode in site.modes:
        with site.root() as root, checkpointer(root, job.parts, mode) as ckpt:
            ckpt.after_step()
            ckpt.save(wait=True)
            folder = folder_of(root, ckpt)
            must_equal(want, loaded(folder, want), mode)
            found[mode] = _digests(folder)
    first = found[site.modes[0]]
    for mode, digests in found.items():
        odd = [key for key in first if digests.get(key) != first[key]]
        assert digests.keys() == first.keys(), f"{mode} holds other items"
        assert not odd, f"{mode} differs from {site.modes[0]} in {odd[:5]}"
    return {"items": len(first), "bytes": nbytes(want), "modes": list(found)}


def _digests(folder: Any) -> dict[str, tuple[int, ...]]:
    metadata, record = metadata_format.load((folder / ".metadata").read_bytes(), str(folder))
    assert record is not None
    starts = digest_starts(record.columns)
    return {
        str(index): tuple(record.columns.digests[starts[number] : starts[number + 1]])
        for number, index in enumerate(metadata.storage_data)
    }


def host_is_not_blocked(site: Site) -> Facts:
    """`optimizer.step` returns to the host while a large copy is still under way."""
    site.need_gpu()
    job = Job(site, width=site.size(4096, 1024), layers=site.size(24, 8))
    job.iterate()
    job.iterate()
    guard, stager = Guard([job.optim]), Stager()
    free_s, guarded_s, copies_s, was_copying = [], [], [], 0
    try:
        for _ in range(5):
            job.compute()
            site.sync()
            begun_s = time.perf_counter()
            job.optim.step()
            free_s.append(time.perf_counter() - begun_s)
            job.compute()
            site.sync()
            state = job.capture()
            snapshot = stager.begin(stager.survey(state), guarded=guard.addresses())
            guard.arm(snapshot)
            begun_s = time.perf_counter()
            job.optim.step()
            guarded_s.append(time.perf_counter() - begun_s)
            was_copying += not snapshot.is_done
            snapshot.wait()
            copies_s.append(snapshot.copy_s)
            del state, snapshot
            stager.release()
    finally:
        guard.close()
        stager.release()
    facts = {
        "state_bytes": nbytes(job.capture()),
        "step_host_s": min(free_s),
        "step_host_beside_copy_s": min(guarded_s),
        "copy_s": min(copies_s),
        "returned_while_copying": f"{was_copying} of 5",
    }
    assert was_copying >= 3, f"the host waited for the copy: {facts}"
    assert min(guarded_s) < 0.5 * min(copies_s) + 0.002, f"the host waited: {facts}"
    return facts


def out_of_gpu_memory(site: Site) -> Facts:
    """Mode "gpu" without the memory for it: the save falls back or fails; training goes on."""
    site.need_gpu()
    job = Job(site, layers=site.size(24, 8))
    job.iterate()
    job.iterate()
    site.tidy()
    total = torch.cuda.get_device_properties(site.device).total_memory
    share = (torch.cuda.memory_reserved(site.device) + (64 << 20)) / total
    with site.root() as root:
        ckpt = checkpointer(root, job.parts, "gpu", on_error="log", max_failures=3)
        ckpt.after_step()
        torch.cuda.set_per_process_memory_fraction(share, site.device)
        try:
            want = mapped(job.capture(), lambda tensor: tensor.detach().cpu().clone())
            ckpt.save()
            ckpt.wait()
            first = ckpt.history[-1]
            job.optim.step()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, site.device)
        if first.error is None:
            must_equal(want, loaded(folder_of(root, ckpt), want), "saved without memory")
        ckpt.after_step()
        want = frozen(job.capture())
        ckpt.save()
        ckpt.wait()
        again = ckpt.history[-1]
        assert again.error is None, f"with the memory back it still fails: {again.error}"
        must_equal(want, loaded(folder_of(root, ckpt), want), "with the memory back")
        ckpt.close()
    short = f"failed: {first.error}" if first.error else f"saved in mode {first.mode}"
    return {"without_memory": short, "with_memory_back": again.mode}
