"""What stands where a save was to be published."""

from __future__ import annotations

import os

from dcp_checkfreq.errors import CheckpointExists
from dcp_checkfreq.format.names import parse_step
from dcp_checkfreq.recovery.scan import examine
from dcp_checkfreq.storage.tier import Tier


def standing(folder: Tier) -> CheckpointExists:
    """Return the error of a folder that has a ``.metadata``, which says whether that is whole."""
    name = os.path.basename(folder.location)
    step = parse_step(name) or 0  # as the writer notes it; none for a folder of another name
    try:
        found = examine(folder, name, step)
    except OSError as error:
        return CheckpointExists(folder.location, f"it cannot be looked at: {error}")
    return CheckpointExists(folder.location, (found.published and found.problem) or "")
