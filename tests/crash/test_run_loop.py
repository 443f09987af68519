"""The power fails at every step of a run that restores, cleans, saves and retires old steps."""

import itertools

import pytest
import torch

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.testing import CrashTier, ManualClock, MemoryTier

pytestmark = [pytest.mark.crash, pytest.mark.slow]


class Job:
    """A model and a plain value that both tell the last step that was done."""

    def __init__(self, tier):
        self.model = torch.nn.Linear(3, 2)
        self.state = {"model": self.model, "count": 0}
        self.clock = ManualClock(wall_s=2e9)  # long after every file was written
        self.ckpt = Checkpointer(
            tier, self.state, every=1, keep_last=2, on_error="raise", clock=self.clock
        )

    def run(self, until):
        with self.ckpt as ckpt:
            restored = ckpt.restore()
            done = 0 if restored is None else restored.step
            self.check(done)
            while done < until:
                done += 1
                with torch.no_grad():
                    self.model.weight.fill_(done)
                self.state["count"] = done
                ckpt.after_step()
                ckpt.wait()
        return self

    def check(self, step):
        assert self.state["count"] == step
        if step:
            assert torch.equal(self.model.weight, torch.full_like(self.model.weight, step))


def whole_steps(tier):
    return {path.split("/")[0] for path in tier.files() if path.endswith("/.metadata")}


def test_a_run_that_crashes_anywhere_goes_on_from_its_last_saved_step_or_the_next():
    start = MemoryTier()
    Job(start).run(until=3)
    assert whole_steps(start) == {"step_00000002", "step_00000003"}
    seen = set()
    for n in itertools.count():
        tier = CrashTier(start, crash_at=n, clock=ManualClock(wall_s=1e9))
        saved = 3
        job = None
        try:
            job = Job(tier)
            job.run(until=5)
        except BaseException:
            if not tier.crashed:
                raise
        if job is not None:
            saved = max(saved, job.ckpt.last_saved_step or 0)
        for keep in ("none", "all", 1, 2):
            left = tier.after_power_loss(keep=keep)
            again = Job(left)
            with again.ckpt as ckpt:
                found = ckpt.restore().step
            again.check(found)
            assert saved <= found <= min(saved + 1, 5), (n, keep, saved, tier.log[-8:])
            seen.add(found)
        if not tier.crashed:
            break
    assert seen == {3, 4, 5}
    assert n >= 40, tier.log
    assert whole_steps(tier.after_power_loss(keep="none")) == {"step_00000004", "step_00000005"}
    assert {path.split("/")[0] for path in tier.after_power_loss(keep="all").files()} <= {
        "step_00000004",
        "step_00000005",
        ".checkfreq",
    }
