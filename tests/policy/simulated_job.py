"""A training job in hand-set time that saves as the tuner says. No clock, no thread.

An iteration is ``ti`` seconds of work. It goes slower while a copy or a persist is under way, and
its weight update waits for the copy. A save waits for the one before. What the job measured goes
to the tuner when the save is finished, as in a real run, and the answer holds from the next
iteration on.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dcp_checkfreq.policy.costs import Costs
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import Iteration, summarise
from dcp_checkfreq.policy.save_timings import SaveTimings
from dcp_checkfreq.policy.tuner import observe, opening, start

At = Callable[[int], float]  # of the number of the save, or for `ti` of the step


def steady(value: float) -> At:
    return lambda _: value


def stepped(before: float, after: float, at: int, until: int = 10**9) -> At:
    return lambda n: after if at <= n < until else before


@dataclass
class Flight:
    """A save under way: when its copy and its persist end."""

    number: int
    copied: float
    published: float
    seen: SaveTimings | None = None


@dataclass
class Job:
    """Costs as functions of the step (``ti``) or of the number of the save (all others)."""

    ti: At = field(default_factory=lambda: steady(1.0))
    tw: float = 0.1  # share of an iteration
    tc: float = 0.5
    ts: At = field(default_factory=lambda: steady(3.0))
    slow_copy: At = field(default_factory=lambda: steady(0.0))  # 0.5: half as much again
    slow_persist: At = field(default_factory=lambda: steady(0.0))
    blocked: At = field(default_factory=lambda: steady(0.0))  # also when overlapped
    contention: At = field(default_factory=lambda: steady(1.0))  # overlapped Tc times this
    noise: float = 0.0
    seed: int = 0
    odd: dict = field(default_factory=dict)  # step -> seconds more, once; in a save as well
    profile: dict = field(default_factory=dict)  # of its costs: what was not as in later saves
    base_steps: int = 10
    p: float = 0.035
    mtbf_s: float | None = None
    mode: Mode | None = None
    knows_copying: bool = True

    def __post_init__(self):
        self.chance = random.Random(self.seed)
        self.now, self.step, self.saves = 0.0, 0, 0
        self.flight, self.iterations = None, []
        self.decisions, self.overheads, self.save_steps = [], [], []
        self.published_steps, self.queued = [], []  # of every save: when it was; for how long the
        # loop waited to start it
        self.tuning = start(
            replace(self.warm_costs(), **self.profile),
            max_overhead=self.p, mtbf_s=self.mtbf_s, mode=self.mode,
            base_steps=self.base_steps,
        )  # fmt: skip
        self.decision = opening(self.tuning)

    def warm_costs(self):
        """Return what a profile with warm buffers finds."""
        return Costs(
            iteration_s=self.ti(0), update_s=self.tw * self.ti(0), snapshot_gpu_s=None,
            snapshot_cpu_s=self.tc, persist_s=self.ts(0), state_bytes=10**9,
            gpu_used_bytes=0, gpu_total_bytes=0,
        )  # fmt: skip

    def about(self, value):
        return value * self.chance.uniform(1 - self.noise, 1 + self.noise)

    def run(self, saves):
        """Go on until so many more saves were seen; return the interval after each of them."""
        wanted = len(self.decisions) + saves
        while len(self.decisions) < wanted:
            self.one_step()
        return self.intervals()[-saves:]

    def intervals(self):
        return [decision.interval_steps for decision in self.decisions]

    def one_step(self):
        began, self.step = self.now, self.step + 1
        flight = self.flight
        copying = flight is not None and flight.copied > began
        loaded = flight is not None and flight.published > began
        work = self.about(self.ti(self.step))
        self.work((1 - self.tw) * work)
        waited = max(0.0, flight.copied - self.now) if flight is not None else 0.0
        self.now += waited
        self.work(self.tw * work)
        self.stand_still(self.odd.get(self.step, 0.0))
        seconds, entered = self.now - began, self.now
        self.hear()
        last = self.save_steps[-1] if self.save_steps else 0
        queued = 0.0
        is_save = self.step >= last + self.decision.interval_steps + self.decision.gap_steps
        if is_save:
            self.decision = replace(self.decision, gap_steps=0)  # a gap is for one interval
            queued = self.save()
        self.iterations.append(
            Iteration(
                seconds=seconds, blocked_s=self.now - entered, waited_s=waited,
                update_s=self.tw * work, loaded=loaded, queued_s=queued,
                copying=copying and self.knows_copying,
            )
        )  # fmt: skip
        if is_save:
            self.close_interval()

    def work(self, left):
        """Let ``left`` seconds of work pass, slower while a save is under way."""
        while left > 1e-12:
            rate, until = 1.0, float("inf")
            if self.flight is not None and self.now < self.flight.copied:
                rate, until = 1 + self.slow_copy(self.saves), self.flight.copied
            elif self.flight is not None and self.now < self.flight.published:
                rate, until = 1 + self.slow_persist(self.saves), self.flight.published
            passed = min(left * rate, until - self.now)
            self.now += passed
            left -= passed / rate

    def stand_still(self, seconds):
        """Let the clock jump. A save under way takes longer by that."""
        flight = self.flight
        if seconds and flight is not None and flight.seen is not None:
            if flight.copied > self.now:
                flight.copied += seconds
                flight.seen = replace(flight.seen, copy_s=flight.seen.copy_s + seconds)
            elif flight.published > self.now:
                flight.seen = replace(flight.seen, persist_s=flight.seen.persist_s + seconds)
            if flight.published > self.now:
                flight.published += seconds
        self.now += seconds

    def save(self):
        queued = max(0.0, self.flight.published - self.now) if self.flight is not None else 0.0
        self.now += queued
        self.hear()
        self.saves += 1
        self.save_steps.append(self.step)
        self.queued.append(queued)
        blocking = self.decision.mode is Mode.BLOCKING
        copy_s = self.about(self.tc * (1.0 if blocking else self.contention(self.saves)))
        persist_s = self.about(self.ts(self.saves))
        self.now += self.blocked(self.saves)
        copied = self.now + copy_s
        if blocking:
            self.now = copied
        self.flight = Flight(self.saves, copied, copied + persist_s)
        self.copy_s, self.persist_s, self.mode_now = copy_s, persist_s, self.decision.mode
        return queued

    def close_interval(self):
        self.flight.seen = SaveTimings(
            interval=summarise(self.iterations), mode=self.mode_now, copy_s=self.copy_s,
            persist_s=self.persist_s, copied_bytes=10**9, state_bytes=10**9,
            is_first=self.saves == 1, call_s=self.blocked(self.saves),
        )  # fmt: skip
        self.iterations = []

    def hear(self):
        """If the save in flight is finished, tell the tuner once."""
        flight = self.flight
        if flight is None or flight.seen is None or flight.published > self.now:
            return
        self.tuning, self.decision = observe(self.tuning, flight.seen)
        self.decisions.append(self.decision)
        self.published_steps.append(self.step)
        if self.decision.overhead_seen is not None:
            self.overheads.append(self.decision.overhead_seen)
        flight.seen = None
