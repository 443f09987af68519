"""Copies half of a file into a cache, and then hangs until it is killed."""

import os
import signal
import sys

from dcp_checkfreq.data.cache.file_cache import _boot
from dcp_checkfreq.data.cache.folder import CacheFolder
from dcp_checkfreq.runtime.clock import SystemClock

root, max_bytes, name, size_bytes = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
folder = CacheFolder(root, max_bytes, evicts=True, low=0.9, clock=SystemClock(), boot=_boot())
folder.prepare()
partial, _ = folder.claim(name)
assert folder.reserve(partial, size_bytes)
os.pwrite(partial.fd, b"?" * (size_bytes // 2), 0)
print("half", flush=True)
signal.pause()
