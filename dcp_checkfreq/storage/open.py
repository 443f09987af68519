"""From what a user writes (text, Path, URL, tier) to the tier of a folder."""

from __future__ import annotations

import os
import re

from dcp_checkfreq.errors import BadLocation
from dcp_checkfreq.storage.local import LocalTier
from dcp_checkfreq.storage.tier import Tier

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)
# What pathlib makes of a URL: "s3://bucket/x" becomes "s3:/bucket/x", a local folder named "s3:".
_SQUASHED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/[^/]")

Location = str | os.PathLike[str] | Tier


def open_tier(location: Location, *, direct_io: bool | None = None) -> Tier:
    """Return the tier of a folder; touches nothing.

    Args:
        location: a local path (text or PathLike), ``file://`` URL, or a tier.
        direct_io: see `LocalTier`.

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
    if not text:
        raise BadLocation(text, "the path is empty")
    if _SQUASHED_URL.match(text):
        raise BadLocation(
            text, "looks like a URL that went through pathlib.Path, which drops a slash: pass a str"
        )
    url = _URL.fullmatch(text)
    if url is None:
        return LocalTier(text, direct_io=direct_io)
    if url[1].lower() in ("file", "local"):
        if not url[2].startswith("/"):
            raise BadLocation(text, "a file URL needs an absolute path: file:///...")
        return LocalTier(url[2], direct_io=direct_io)
    raise BadLocation(
        text, f"{url[1]}:// is not supported in this version: only local paths and file://"
    )


def can_open(location: Location) -> bool:
    """Tell whether `open_tier` would take it."""
    try:
        open_tier(location)
    except BadLocation:
        return False
    return True
