"""The id of a root: tells it from one that was removed and made anew under the same name."""

from __future__ import annotations

import logging
import re
import uuid

from dcp_checkfreq.format import names
from dcp_checkfreq.storage.tier import OddFile, Tier, read_small

_log = logging.getLogger(__name__)

_LONGEST_ID_BYTES = 4096
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


def read_root_id(folder: Tier) -> str | None:
    """Return the root id in a folder; None if there is none, or something that can be none.

    Raises:
        OSError: of the storage.
    """
    try:
        content = read_small(folder, names.ROOT_ID, at_most_bytes=_LONGEST_ID_BYTES)
    except (FileNotFoundError, OddFile, IsADirectoryError):
        return None
    return content.decode(errors="replace")


def id_of_root(root: Tier) -> str | None:
    """Return the id of a root; None if it has none, or none that makes sense.

    Raises:
        OSError: of the storage.
    """
    text = read_root_id(root.child(names.RUN_FOLDER))
    return text if text is not None and _ID.fullmatch(text) else None


def readable_id_of_root(root: Tier) -> str | None:
    """`id_of_root`, but an id that cannot be read is none: reading does not depend on it.

    A save asks for the id itself, and fails where it cannot be read.
    """
    try:
        return id_of_root(root)
    except OSError as error:
        _log.warning("%s: its id cannot be read: %s", root.location, error)
        return None


def make_root_id(root: Tier, wanted: str | None = None) -> str:
    """Return the id of a root, which is made if it has none: ``wanted``, or a new one.

    Of two jobs that start in a new root at the same moment both may make one. The last one counts,
    and the other job gets an error at its first save: it is not alone.

    Raises:
        OSError: of the storage.
    """
    known = id_of_root(root)
    if known is not None:
        return known
    made = wanted or uuid.uuid4().hex
    folder = root.child(names.RUN_FOLDER)
    folder.make()
    scratch = f"{names.ROOT_ID}.{names.new_attempt()}"
    folder.replace(names.ROOT_ID, made.encode(), scratch=scratch)
    return made
