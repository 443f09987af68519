"""`load_part`: one part of a checkpoint, without a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcp_checkfreq.dcp.reader import CheckFreqReader
from dcp_checkfreq.dcp.wanted_planner import WantedPlanner
from dcp_checkfreq.errors import BadLocation
from dcp_checkfreq.runtime import options
from dcp_checkfreq.state.app_state import AppState
from dcp_checkfreq.state.differences import Differences
from dcp_checkfreq.state.restoration import Selection
from dcp_checkfreq.storage.open import Location


def load_part(
    path: Location,
    name: str,
    *,
    into: torch.nn.Module | Stateful,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    allow_pickle: bool = False,
    threads: int = 2,
    storage_options: Mapping[str, Any] | None = None,
) -> Differences:
    """Put one part of a checkpoint into a module or object, for evaluation or as a start.

    Nothing is written, so the storage may be read-only. A sharded module takes its shards, on any
    number of ranks; ranks do not wait for each other. If it fails, ``into`` is as it was.

    Args:
        path: of the checkpoint: path, URL, `Tier`, or what `find_latest_valid` returned.
        name: of the part when it was saved.
        into: what takes it.
        strict: tensors that are missing, more than wanted, or of another dtype are an error.
            Otherwise they are logged and returned, and are left out or cast.
        rename: what is called otherwise in the checkpoint, by its name here up to a dot, the name
            of the part first: ``{"model.body": "model.encoder"}``.
        allow_pickle: see `CheckFreqReader`.
        threads: see `CheckFreqReader`.
        storage_options: see `CheckFreqReader`.

    Returns:
        What was missing, unexpected or cast; nothing of it if ``strict``.

    Raises:
        BadLocation: ``path`` is None, for one: there is no checkpoint.
        LoadFailed: see the subclasses.
    """
    options.check(options.LOAD_PART, locals())
    if path is None:
        raise BadLocation("None", "`find_latest_valid` has found no whole checkpoint there")
    reader = CheckFreqReader(
        path, threads=threads, allow_pickle=allow_pickle, storage_options=storage_options
    )
    where = reader.checkpoint_id
    metadata = reader.read_metadata()
    selection = Selection(only=(name,), rename=rename or {}, strict=strict)
    restoration = AppState({name: into}, 0).restoration(metadata, where, selection)
    restoration.settle(restoration.unexpected())
    # As DCP does it in one process; there are no others to agree with.
    planner = WantedPlanner(restoration.wanted, allow_pickle=allow_pickle)
    planner.set_up_planner({}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    restoration.check()
    restoration.settle(restoration.unexpected())
    with restoration.undone_if_it_fails():
        restoration.put_where_it_may_fail(0)
    restoration.put_the_rest()
    restoration.tell()
    return restoration.differences[name]
