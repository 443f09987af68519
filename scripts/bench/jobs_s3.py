"""Worker jobs for `s3`. ``spec.folder`` names a place on a server, not a folder."""

from __future__ import annotations

from typing import Any

from arms_s3 import S3_LOAD_ARMS, S3_SAVE_ARMS, Place, set_environment
from harness import Ranks, measure, order, record
from limits import huge_buffers
from spec import Samples, Spec
from states import build, check, clear, leaves, local_bytes


def s3_save_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Measure every save arm, each save into a bucket of its own that is removed afterwards."""
    place = _place(spec)
    state = build(leaves(spec.state, spec.scale), rank=ranks.rank, ranks=ranks.count, filled=True)
    huge_buffers()
    samples: Samples = {}
    for round_number, name in order(spec.arms, spec.repeats, spec.seed):
        own = Place(place.endpoint, f"{place.bucket}-{name.replace('_', '-')}-{round_number}")
        _make_bucket(own, ranks)
        save = S3_SAVE_ARMS[name]
        cost = measure(ranks, lambda own=own, save=save: save(state, own.below("run"), ranks))
        if round_number:
            record(samples, name, cost)
        _remove_bucket(own, ranks)
    return {"samples": samples, "bytes": sum(ranks.gather(local_bytes(state)))}


def s3_prepare_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Save once with every arm, into a folder of the arm's name that stays."""
    place = _place(spec)
    state = build(leaves(spec.state, spec.scale), rank=ranks.rank, ranks=ranks.count, filled=True)
    for name in spec.arms:
        S3_SAVE_ARMS[name](state, place.below(name), ranks)
        ranks.barrier()
    return {"samples": {}, "bytes": sum(ranks.gather(local_bytes(state)))}


def s3_load_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Measure every load arm on what `s3_prepare_job` left; the warm-up round checks values."""
    place = _place(spec)
    wanted = leaves(spec.state, spec.scale)
    state = build(wanted, rank=ranks.rank, ranks=ranks.count, filled=False)
    huge_buffers()
    samples: Samples = {}
    for round_number, name in order(spec.arms, spec.repeats, spec.seed):
        arm = S3_LOAD_ARMS[name]
        counts: dict[str, float] = {}
        if not round_number:
            clear(state)

        def load(arm=arm, counts=counts) -> None:
            counts.update(arm.load(state, place.below(arm.saved_by), ranks))

        cost = measure(ranks, load)
        if round_number:
            counted = ranks.gather(counts)
            cost |= {key: float(sum(c[key] for c in counted)) for key in counts}
            if counts:
                cost["counted_per_needed"] = (
                    cost["counted_read_bytes"] / cost["counted_needed_bytes"]
                )
            record(samples, name, cost)
        elif not arm.is_limit:
            check(state, wanted, rank=ranks.rank, ranks=ranks.count)
    return {"samples": samples, "bytes": sum(ranks.gather(local_bytes(state)))}


def _place(spec: Spec) -> Place:
    place = Place.load(spec.folder)
    set_environment(place.endpoint)
    return place


def _make_bucket(place: Place, ranks: Ranks) -> None:
    if ranks.rank == 0:
        place.client().create_bucket(Bucket=place.bucket)
    ranks.barrier()


def _remove_bucket(place: Place, ranks: Ranks) -> None:
    """Remove a bucket: SeaweedFS then drops its volumes, which deleting objects does not."""
    ranks.barrier()
    if ranks.rank == 0:
        empty_and_remove(place)
    ranks.barrier()


def empty_and_remove(place: Place) -> None:
    """Remove a bucket and all that is in it."""
    client = place.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket):
        doomed = [{"Key": item["Key"]} for item in page.get("Contents", [])]
        if doomed:
            client.delete_objects(Bucket=place.bucket, Delete={"Objects": doomed})
    client.delete_bucket(Bucket=place.bucket)
