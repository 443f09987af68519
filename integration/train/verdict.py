"""What the runs of the main job did, and whether that is what was promised. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LOSS_TOLERANCE = 1e-4
ALL_RANKS = "all ranks"


@dataclass(frozen=True, slots=True)
class Kill:
    from_step: int  # in the first save of this step or a later one that is caught in flight
    victim: int | None  # rank, or None for all of them


@dataclass(frozen=True, slots=True)
class Launch:
    ranks: int
    kill: Kill | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    launches: tuple[Launch, ...]


@dataclass(frozen=True, slots=True)
class Killed:
    saving_step: int  # the step whose save was in flight
    victim: str
    files_seen: int  # shard files of it on storage at the kill
    files_left: int  # of these, after the death: ranks that live on take theirs back
    bytes_left: int
    published: bool  # `.metadata` is there after all: the kill came too late


@dataclass(frozen=True, slots=True)
class StepRecord:
    loss: float
    ids: tuple[tuple[int, int], ...]  # (epoch, sample) over all ranks, in rank order


@dataclass(slots=True)
class Outcome:
    """What one launch did, read from the logs of its ranks."""

    ranks: int
    restored: int | None
    newest_whole: int | None  # newest step with `.metadata` before the launch
    restore_s: float
    last_step: int  # the last step that any rank finished
    killed: Killed | None
    wall_s: float
    steps: dict[int, StepRecord]  # the steps that every rank finished
    finish: dict[str, Any] | None


@dataclass(slots=True)
class Check:
    promise: str
    kept: bool
    seen: str


@dataclass(slots=True)
class Run:
    plan: Plan
    outcomes: list[Outcome] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def history(self) -> dict[int, StepRecord]:
        """The steps that count: a restore takes back all later steps of the launches before it."""
        kept: dict[int, StepRecord] = {}
        for outcome in self.outcomes:
            start = outcome.restored or 0
            kept = {step: record for step, record in kept.items() if step <= start}
            kept.update(outcome.steps)
        return dict(sorted(kept.items()))

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.kept for check in self.checks)


def check_run(run: Run, *, steps: int, batch: int, samples: int) -> list[Check]:
    """Check what any run must keep, whatever happened to it."""
    history = run.history
    missing = sorted(set(range(1, steps + 1)) - set(history))
    checks = [
        Check(
            f"every step from 1 to {steps} is in the surviving history",
            not missing and len(history) == steps and run.outcomes[-1].finish is not None,
            f"missing: {missing}" if missing else f"{len(history)} steps",
        ),
        check_samples(history, steps=steps, batch=batch, samples=samples),
    ]
    for earlier, later in zip(run.outcomes, run.outcomes[1:], strict=False):
        killed = earlier.killed
        assert killed is not None
        checks.append(
            Check(
                f"kill -9 of {killed.victim} came during the save of step {killed.saving_step}",
                killed.files_seen > 0
                and (killed.files_left > 0 or killed.victim != ALL_RANKS)
                and not killed.published,
                f"shard files: {killed.files_seen}, left: {killed.files_left}, "
                f"{killed.bytes_left / 1e6:.1f} MB, "
                + ("and .metadata" if killed.published else "no .metadata"),
            )
        )
        checks.append(
            Check(
                "resumed from the newest whole checkpoint",
                later.restored is not None and later.restored == later.newest_whole,
                f"step {later.restored}, newest with .metadata: {later.newest_whole}",
            )
        )
    return checks


def check_samples(history: dict[int, StepRecord], *, steps: int, batch: int, samples: int) -> Check:
    seen: dict[int, list[int]] = {}
    for record in history.values():
        for epoch, sample in record.ids:
            seen.setdefault(epoch, []).append(sample)
    whole_epochs, rest = divmod(steps * batch, samples)
    once = all(len(record.ids) == batch for record in history.values())
    for epoch in range(whole_epochs):
        once &= sorted(seen.get(epoch, [])) == list(range(samples))
    last = seen.get(whole_epochs, [])
    once &= len(last) == len(set(last)) == rest and set(last) <= set(range(samples))
    once &= set(seen) <= set(range(whole_epochs + 1))
    return Check(
        "every sample exactly once per epoch",
        once,
        f"{whole_epochs} epochs of {samples}, {rest} of the next",
    )


def check_against(run: Run, reference: Run, *, bit_identical: bool) -> list[Check]:
    """Check a killed run against the uninterrupted one."""
    ours, theirs = run.history, reference.history
    common = sorted(ours.keys() & theirs.keys())
    gap = max((abs(ours[step].loss - theirs[step].loss) for step in common), default=float("inf"))
    checks = [
        Check(
            "the same samples in every step",
            len(common) == len(theirs)
            and all(ours[step].ids == theirs[step].ids for step in common),
            f"{len(common)} steps compared",
        )
    ]
    if not bit_identical:
        within = len(common) == len(theirs) and gap <= LOSS_TOLERANCE
        promise = f"loss equal within {LOSS_TOLERANCE:g} at every step"
        return [*checks, Check(promise, within, f"largest difference {gap:.1e}")]
    checks.append(
        Check(
            "loss equal to the last bit at every step",
            len(common) == len(theirs) and gap == 0.0,
            f"largest difference {gap:.1e}",
        )
    )
    last, expected = run.outcomes[-1].finish or {}, reference.outcomes[-1].finish or {}
    for what in ("model", "optimizer"):
        digest, wanted = last.get(f"{what}_sha256"), expected.get(f"{what}_sha256")
        name = {"model": "parameters", "optimizer": "optimizer state"}[what]
        checks.append(
            Check(
                f"final {name} bit-identical",
                digest is not None and digest == wanted,
                f"sha256 {str(digest)[:12]}, never killed: {str(wanted)[:12]}",
            )
        )
    return checks
