"""Holds a file until it is killed."""

import os
import signal
import sys

from dcp_checkfreq.runtime.flock import HeldFile

file = HeldFile(sys.argv[1], os.O_RDWR)
assert file.try_lock(shared=False)
print("held", flush=True)
signal.pause()
