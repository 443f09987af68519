"""Public test tools: tiers that crash, fail or wait on demand, a hand-set clock, a tier suite."""

from dcp_checkfreq.testing.clock import ManualClock
from dcp_checkfreq.testing.crash_tier import CrashTier, PowerLoss
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
