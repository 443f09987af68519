"""`SaveRecord`: one save as a rank saw it."""

from __future__ import annotations

from dataclasses import dataclass


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


def told(save: SaveRecord) -> str:
    """Return what a log line says of it."""
    return (
        f"{save.copied_bytes / 1e6:.1f} MB of this rank copied in {save.copy_s:.3f} s "
        f"({save.mode}), published {save.persist_s:.3f} s later; training was held up for "
        f"{save.blocked_s + save.waited_s:.3f} s"
    )
