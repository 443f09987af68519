"""A file of a local disk as memory: what is looked at is read when it is looked at."""

from __future__ import annotations

import mmap
import os

from dcp_checkfreq.storage.local.regular import open_regular
from dcp_checkfreq.storage.local.tier import LocalTier


def mapped(tier: LocalTier, name: str) -> memoryview:
    """Return the content of a file as memory. What is written to it reaches the file never.

    The mapping lives as long as a slice of it. The file may be deleted meanwhile, but not cut:
    to look at a page that was cut off ends the process (SIGBUS).

    Raises:
        OSError: of the file system; see `open_regular`.
    """
    fd, size = open_regular(os.path.join(tier.location, name))
    try:
        if not size:
            return memoryview(b"")
        return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=_READ_AND_WRITE))
    finally:
        os.close(fd)


_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE  # torch has no tensors that are read only
