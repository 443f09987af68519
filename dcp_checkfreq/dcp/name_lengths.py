"""Refuses folders in which names would get too long, before anything is sent or written."""

from __future__ import annotations

import os
from collections.abc import Iterable

from dcp_checkfreq.errors import BadLocation
from dcp_checkfreq.format import names
from dcp_checkfreq.staging.staged_tier import StagedTier
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.storage.object_store.tier import RemoteTier
from dcp_checkfreq.storage.tier import Tier

_NAME_BYTES = 255  # of every file system in wide use
_PATH_BYTES = 4095  # the kernel takes 4096 with the zero at the end
_KEY_BYTES = 1024
_WITH_KEYS = ("s3://", "s3a://", "gs://", "gcs://")


def check_root_lengths(root: Tier) -> None:
    """See that everything that a run writes below its root has room for its name.

    Raises:
        BadLocation: with the limit, and the longest name that would be needed.
    """
    _check(root, names.longest_in_root(names.longest_in_step()))
    if isinstance(root, StagedTier):
        _check(root.area.local, names.longest_in_root(names.longest_in_staged_step()))


def check_step_lengths(folder: Tier) -> None:
    """The same for the folder of one checkpoint.

    Raises:
        BadLocation: with the limit, and the longest name that would be needed.
    """
    _check(folder, names.longest_in_step())
    if isinstance(folder, StagedTier):
        _check(folder.local, names.longest_in_staged_step())


def _check(tier: Tier, below: str) -> None:
    if isinstance(tier, StagedTier):
        tier = tier.remote
    whole = f"{tier.location.rstrip('/')}/{below}"
    if isinstance(tier, LocalTier):
        _check_local(tier.location, whole, below)
    elif isinstance(tier, RemoteTier) and whole.startswith(_WITH_KEYS):
        key = whole.partition("://")[2].partition("/")[2]
        if _size(key) > _KEY_BYTES:
            raise BadLocation(
                tier.location,
                f"keys get too long there: with {below!r} the longest has {_size(key)} bytes of "
                f"UTF-8, {_KEY_BYTES} are allowed. Nothing was sent",
            )


def _check_local(location: str, whole: str, below: str) -> None:
    long = _longest(whole.split("/"))
    if _size(long) > _NAME_BYTES:
        raise BadLocation(
            location,
            f"the name {long!r} has {_size(long)} bytes, file systems take {_NAME_BYTES}. "
            "Nothing was written",
        )
    if _size(whole) > _PATH_BYTES:
        raise BadLocation(
            location,
            f"paths get too long there: with {below!r} the longest has {_size(whole)} bytes, the "
            f"system takes {_PATH_BYTES}. Nothing was written",
        )


def _longest(parts: Iterable[str]) -> str:
    return max(parts, key=_size)


def _size(text: str) -> int:
    return len(os.fsencode(text))
