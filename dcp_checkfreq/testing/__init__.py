"""Public test tools for authors of tiers, and for tests of training scripts.

`memory_tier` keeps files in memory, `crash_tier` loses power, and `crash_disk` is its disk.
`faulty_tier` fails or waits on demand, `forwarding_tier` hands every call on. `clock` is set by
hand, `disk_calls` stops before any call to a disk. `tier_suite` is what every tier has to pass:
`folder_suite`, `record_suite` and `shard_suite`, which share `tier_tests`.
"""

from dcp_checkfreq.testing.clock import ManualClock
from dcp_checkfreq.testing.crash_disk import PowerLoss
from dcp_checkfreq.testing.crash_tier import CrashTier
from dcp_checkfreq.testing.disk_calls import DiskCalls, at_disk_call
from dcp_checkfreq.testing.faulty_tier import Fault, FaultyTier, GatedTier
from dcp_checkfreq.testing.forwarding_tier import ForwardingTier
from dcp_checkfreq.testing.memory_tier import MemoryTier
from dcp_checkfreq.testing.tier_suite import TierSuite

__all__ = [
    "MemoryTier",
    "CrashTier",
    "PowerLoss",
    "FaultyTier",
    "Fault",
    "GatedTier",
    "ForwardingTier",
    "ManualClock",
    "TierSuite",
    "at_disk_call",
    "DiskCalls",
]
