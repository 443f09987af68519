"""`staged`: saves to a slow S3 server, with and without a local disk in front of it."""

from __future__ import annotations

import dataclasses
import json

from benches import Options, Report
from benches_s3 import counted_proxy, peers, server
from jobs_staged import STAGED_ARMS
from launch import run_workers

SLOW_BYTES_PER_S = 20e6


def staged_bench(options: Options) -> list[Report]:
    """Hold the server to 20 MB/s and measure how long a save holds up training."""
    arms = options.pick(STAGED_ARMS)
    options = dataclasses.replace(options, place="disk")
    with (
        server(options) as weed,
        options.scratch() as folder,
        counted_proxy(weed) as (proxy, place),
    ):
        proxy.bytes_per_s = SLOW_BYTES_PER_S
        spec = options.spec("staged", folder, arms)
        spec = dataclasses.replace(spec, folder=json.dumps([place.dump(), str(folder)]))
        result = run_workers(spec)
        more = peers() | {"slow_bytes_per_s": SLOW_BYTES_PER_S, "sent_bytes": proxy.sent_bytes}
        options = dataclasses.replace(options, place="s3")
        return [options.report("staged", str(options.ranks), folder, result, more=more)]
