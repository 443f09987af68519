"""One save as a rank saw it: while it goes on, when it has ended, and what is remembered of it."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.tuner import Decision
from dcp_checkfreq.runtime.told import text_of


@dataclass(slots=True)
class Measured:
    """What a save cost this rank. Filled in as the save goes on; seconds on the host's clock."""

    mode: Mode
    interval_steps: int | None = None  # k when it began
    blocked_s: float = 0.0  # the loop was held up for it
    failed: bool = False
    copied_bytes: int = 0
    state_bytes: int = 0
    call_s: float = 0.0  # before copying begins: looking at the state, agreeing with other ranks
    copy_s: float = 0.0  # Tc or Tg
    persist_s: float = 0.0  # Ts: copied until published, cleaning up after the save before included
    gpu_copy_s: float | None = None  # Tg, where it was tried
    written_bytes: int = 0  # of tensors that this rank writes from now on


@dataclass(frozen=True, slots=True)
class Ended:
    """A save that has ended, as all ranks know it."""

    step: int
    at: int  # the first step at which all ranks act on it
    error: BaseException | None
    decision: Decision | None


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """One save as this rank saw it. Bytes and seconds are of this rank."""

    step: int
    interval_steps: int | None  # k when it began; None while profiling
    mode: str  # how the snapshot was copied: "cpu", "gpu" or "blocking"
    state_bytes: int  # tensors that this rank holds
    copied_bytes: int  # of these, what it copied because no other rank writes it
    blocked_s: float  # the loop was held up in `after_step` or `save`
    waited_s: float  # the update after it waited for the copy
    copy_s: float  # Tc or Tg
    persist_s: float  # Ts: from copied to published, waiting for the clean-up before it included
    overhead: float | None  # share of training time that saving cost in the interval before
    error: str | None

    @classmethod
    def of(cls, measured: Measured, ended: Ended, waited_s: float) -> SaveRecord:
        """Return what is remembered of a save."""
        return cls(
            step=ended.step,
            interval_steps=measured.interval_steps,
            mode=measured.mode.value,
            state_bytes=measured.state_bytes,
            copied_bytes=measured.copied_bytes,
            blocked_s=measured.blocked_s,
            waited_s=waited_s,
            copy_s=measured.copy_s,
            persist_s=measured.persist_s,
            overhead=None if ended.decision is None else ended.decision.overhead_seen,
            error=None if ended.error is None else text_of(ended.error),
        )


def told(save: SaveRecord) -> str:
    """Return what a log line says of it."""
    return (
        f"{save.copied_bytes / 1e6:.1f} MB of this rank copied in {save.copy_s:.3f} s "
        f"({save.mode}), published {save.persist_s:.3f} s later; training was held up for "
        f"{save.blocked_s + save.waited_s:.3f} s"
    )
