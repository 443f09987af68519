"""From what a user writes (text, Path, URL, tier) to the tier of a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from dcp_checkfreq.errors import BadLocation
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.storage.object_store.tier import RemoteTier
from dcp_checkfreq.storage.tier import Tier

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)
# What pathlib makes of a URL: "s3://bucket/x" becomes "s3:/bucket/x", a local folder named "s3:".
_SQUASHED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/[^/]")

Location = str | os.PathLike[str] | Tier


def open_tier(
    location: Location,
    *,
    direct_io: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Tier:
    """Return the tier of a folder; touches nothing.

    Args:
        location: a local path (text or PathLike; ``~`` is expanded, environment variables are
            not), ``file://`` or fsspec URL, or a tier.
        direct_io: see `LocalTier`.
        storage_options: for the file system of a URL, as fsspec's own take them (for ``s3://``
            those of s3fs). A tier has its own already.

    Raises:
        BadLocation: not something this package can store in.
    """
    if isinstance(location, Tier):
        return location
    try:
        text = os.fspath(location)
    except TypeError:
        raise BadLocation(repr(location), "expected a path, a URL or a Tier") from None
    if not isinstance(text, str):
        raise BadLocation(repr(location), "expected text, not bytes")
    if "\0" in text:
        raise BadLocation(text, "there is a zero byte in it, which names cannot have")
    if not text:
        raise BadLocation(text, "the path is empty")
    if _SQUASHED_URL.match(text):
        raise BadLocation(
            text, "looks like a URL that went through pathlib.Path, which drops a slash: pass a str"
        )
    url = _URL.fullmatch(text)
    if is_remote(text):
        assert url is not None
        return _remote(url[1], url[2], dict(storage_options or {}))
    if storage_options:
        raise BadLocation(text, "storage_options are for URLs of other storages, this is local")
    if url is None:
        return LocalTier(text, direct_io=direct_io)
    if not url[2].startswith("/"):
        raise BadLocation(text, "a file URL needs an absolute path: file:///...")
    return LocalTier(url[2], direct_io=direct_io)


def is_remote(location: Location) -> bool:
    """Tell whether this is a URL of another storage, to whose file system options are given."""
    if not isinstance(location, (str, os.PathLike)):
        return False  # a tier has its options already
    url = _URL.fullmatch(os.fspath(location))
    return url is not None and url[1].lower() not in ("file", "local")


def _remote(protocol: str, rest: str, options: dict[str, Any]) -> RemoteTier:
    url = f"{protocol.lower()}://{rest}"
    host = rest.partition("/")[0]
    if "@" in host:
        # Not shown again: what is before the @ may be a password.
        raise BadLocation(f"{protocol}://...@...", "pass credentials in storage_options instead")
    if not _is_known(protocol.lower()):
        raise BadLocation(url, f"fsspec knows no {protocol}://")
    if not rest.strip("/"):
        raise BadLocation(url, "names no bucket or folder")
    return RemoteTier(url, options)


def _is_known(protocol: str) -> bool:
    """Tell whether fsspec has it: its own, or one that was registered, by name or as a class."""
    import fsspec

    return protocol in fsspec.available_protocols() or protocol in fsspec.registry


def can_open(location: Location) -> bool:
    """Tell whether `open_tier` would take it."""
    try:
        open_tier(location)
    except BadLocation:
        return False
    return True
