"""What a restarted job begins with instead of profiling again: to text and back. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_checkfreq.format.checked_json import from_text, to_text
from dcp_checkfreq.policy.costs import Costs
from dcp_checkfreq.policy.interval import MAX_INTERVAL_STEPS, Mode, check_mtbf

FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """Costs of a job and the interval that they led to."""

    fingerprint: str  # of the job; for another one it is of no use
    costs: Costs  # of the worst rank, as last seen; ``iteration_s`` is the baseline
    mode: Mode  # how snapshots were copied
    interval_steps: int  # k then
    max_overhead: float  # p then
    mtbf_s: float | None  # mean time between failures then, or None
    confirmed: bool  # k has stood up to later saves; else it is from the first save alone

    def interval_under(self, max_overhead: float, mtbf_s: float | None) -> int | None:
        """Return k if it was found under these, and is confirmed; else it is from the costs."""
        same = (self.max_overhead, self.mtbf_s) == (max_overhead, mtbf_s)
        return self.interval_steps if same and self.confirmed else None


def encode(profile: StoredProfile) -> str:
    """Return a profile as text, which `decode` turns back into an equal one, or ValueError."""
    text = to_text(profile, FORMAT_VERSION)
    decode(text)
    return text


def decode(text: str) -> StoredProfile:
    """Return the profile that ``text`` holds.

    Raises:
        ValueError: it is damaged, of another version, or holds what cannot have been measured.
    """
    try:
        found = from_text(StoredProfile, text, FORMAT_VERSION)
        if len(found.fingerprint) != 64 or set(found.fingerprint) - set("0123456789abcdef"):
            raise ValueError("fingerprint is none")
        if not 0 < found.max_overhead <= 1:
            raise ValueError(f"max_overhead {found.max_overhead} is outside (0, 1]")
        if found.mtbf_s is not None:
            check_mtbf(found.mtbf_s)
        if not 1 <= found.interval_steps <= MAX_INTERVAL_STEPS:
            raise ValueError(f"interval_steps {found.interval_steps} is not usable")
        if found.mode is Mode.GPU and found.costs.snapshot_gpu_s is None:
            raise ValueError("mode gpu without snapshot_gpu_s")
    except ValueError as error:
        raise ValueError(f"profile: {error}") from error
    return found
