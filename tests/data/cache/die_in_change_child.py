"""Removes a file of a cache, and is killed before it wrote that down."""

import os
import pathlib
import signal
import sys

from dcp_checkfreq.data.cache.byte_count import locked_byte_count
from dcp_checkfreq.data.cache.file_cache import _boot
from dcp_checkfreq.runtime.clock import SystemClock

root = pathlib.Path(sys.argv[1])
with locked_byte_count(str(root / "books"), _boot(), SystemClock(), 10.0) as byte_count:
    byte_count.begin()
    next(path for path in (root / "whole").rglob("*") if path.is_file()).unlink()
    os.kill(os.getpid(), signal.SIGKILL)
