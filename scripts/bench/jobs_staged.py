"""Worker job for `staged`: how long a training loop is held up by a save, and until when it lasts.

``spec.folder`` is JSON: a place on a server, and a folder on the local disk.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from arms_s3 import Place
from harness import Ranks, measure, order, record
from spec import Samples, Spec
from states import build, leaves, local_bytes, nested

STAGED_ARMS = ("local", "staged", "direct")


def staged_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Let one `Checkpointer` per arm save in turn; the next save begins when one is published."""
    place_text, folder = json.loads(spec.folder)
    place = Place.load(place_text)
    state = build(leaves(spec.state, spec.scale), rank=ranks.rank, ranks=ranks.count, filled=True)
    samples: Samples = {}
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(_checkpointer(name, nested(state), place, Path(folder)))
            for name in spec.arms
        }
        for round_number, name in order(spec.arms, spec.repeats, spec.seed):
            ckpt = runs[name]
            begun_s = time.perf_counter()
            blocked_s = measure(ranks, ckpt.after_step)["wall_s"]
            ckpt.wait()
            took_s = time.perf_counter() - begun_s
            if round_number:
                cost = {"blocked_s": blocked_s, "published_s": max(ranks.gather(took_s))}
                record(samples, name, cost)
    return {"samples": samples, "bytes": sum(ranks.gather(local_bytes(state)))}


def _checkpointer(name: str, state: dict[str, Any], place: Place, folder: Path) -> Any:
    from dcp_checkfreq import Checkpointer

    common: dict[str, Any] = {"every": 1, "on_error": "raise", "preempt_signals": ()}
    if name == "local":
        return Checkpointer(folder / "run", state, **common)
    common["storage_options"] = place.options
    if name == "staged":
        common["staging_dir"] = folder / "nvme"
    return Checkpointer(place.below(name).url, state, **common)
