"""268 simulated jobs of nine kinds, in hand-set time: what the tuner's rules buy.

    python integration/policy/grid.py --out after.json
    python integration/policy/grid.py --tree ../before --out before.json --against after.json

`--tree` is a checkout whose `dcp_checkfreq` and `tests/policy/simulated_job.py` are used: the same
jobs with other rules. A job is drawn from its number: iteration, copy, persist, slow-down, stall,
noise and budget, and what changes over time. Figures are of the later half of 90 saves.
"""

import functools
import itertools
import json
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

KINDS = ("steady", "noisy", "jump", "busy", "swing", "cold", "contention", "drift", "long")
JOBS = 270
TREE = Path(__file__).parents[2]
SAVES = 90
NUMBERS = ("overhead", "over", "late", "k", "growths", "changes")


def draw(number, steady, stepped):
    """Return what kind of job this is, and the arguments that `simulated_job.Job` takes for it."""
    chance, kind = random.Random(number), KINDS[number % len(KINDS)]
    ti = chance.choice([0.05, 0.3, 1.0, 5.0])
    tc = ti * chance.choice([0.1, 0.5, 0.9, 2.0, 4.0])
    ts = ti * chance.choice([0.2, 1.0, 3.0, 10.0, 40.0])
    slow = chance.choice([0.0, 0.0, 0.05, 0.2, 0.5])
    blocked = ti * chance.choice([0.0, 0.0, 0.02, 0.3])
    job = dict(
        ti=steady(ti), tc=tc, ts=steady(ts), slow_persist=steady(slow), blocked=steady(blocked),
        noise=chance.choice([0.0, 0.02]), seed=number, p=chance.choice([0.01, 0.035, 0.035, 0.1]),
        profile={"call_s": blocked},
    )  # fmt: skip
    factor = chance.choice([2, 4, 10, 30])
    if kind == "noisy":
        job["noise"] = chance.choice([0.05, 0.1, 0.2])
    if kind == "jump":
        before = {"ts": ts, "slow_persist": slow, "blocked": blocked}
        after = {"ts": ts * factor, "slow_persist": slow + 0.3, "blocked": blocked + 0.3 * ti}
        which = chance.choice(list(before))
        job[which] = stepped(before[which], after[which], 30)
    if kind == "busy":
        job["ts"] = stepped(ts, ts * factor, 30, 60)
        job["slow_persist"] = stepped(slow, slow + chance.choice([0, 0.2]), 30, 60)
    if kind == "swing":
        share, every = chance.choice([0.1, 0.2, 0.5]), chance.choice([0, 4, 6, 10])

        def is_long(save):
            if every:
                return save % every == 0
            return random.Random(7919 * save + number).random() < share

        job["ts"] = lambda save: ts * (3 if is_long(save) else 1)
    if kind == "cold":
        job["profile"] = {
            "call_s": blocked, "snapshot_cpu_s": factor * tc, "persist_s": factor * ts,
        }  # fmt: skip
    if kind == "contention":
        job["contention"] = chance.choice([steady(1.5), steady(3.0), stepped(6.0, 1.0, 20)])
    if kind == "drift":
        to = chance.choice([0.5, 1.2, 2.0])
        job["ti"] = lambda step: ti * (1 + (to - 1) * min(1, step / 400))
    if kind == "long":
        job["ts"] = steady(ti * chance.choice([100, 400, 2000]))
    return kind, job


def run(number, module):
    """Return the figures of one job; None if it made too few saves to have settled."""
    kind, arguments = draw(number, module.steady, module.stepped)
    job = module.Job(**arguments)
    marks, without_saves_s = [], 0.0
    while len(job.decisions) < SAVES and job.step < (12000 if kind == "long" else 5000):
        seen = len(job.decisions)
        job.one_step()
        without_saves_s += job.ti(job.step)
        if len(job.decisions) != seen:
            marks.append((job.now, without_saves_s, job.step))
    if len(marks) < 4:
        return None
    (from_s, from_ideal_s, from_step), (now, ideal_s, step) = marks[len(marks) // 2], marks[-1]
    overhead = (now - from_s) / (ideal_s - from_ideal_s) - 1
    intervals = job.intervals()
    pairs = list(itertools.pairwise(intervals))
    return {
        "job": number,
        "kind": kind,
        "overhead": overhead,
        "over": overhead > 1.1 * job.p,
        "late": sum(s > 1e-9 for s in job.queued[3:]) / max(1, len(job.queued) - 3),
        "k": (step - from_step) / max(1, sum(saved > from_step for saved in job.save_steps)),
        "growths": sum(one < other for one, other in pairs),
        "changes": sum(one != other for one, other in pairs),
    }


def table(rows):
    """Return the means of each kind of job, and of all; of k the geometric one."""
    found = {}
    for kind in ("all", *KINDS):
        mine = [row for row in rows if kind in ("all", row["kind"])]
        if mine:
            found[kind] = {name: statistics.fmean(row[name] for row in mine) for name in NUMBERS}
            found[kind]["k"] = math.exp(statistics.fmean(math.log(row["k"]) for row in mine))
    return found


def main(
    tree: Annotated[Path, typer.Option(help="a checkout with the rules")] = TREE,
    jobs: Annotated[int, typer.Option(min=1, help="how many numbers are drawn from")] = JOBS,
    out: Annotated[Optional[Path], typer.Option(help="JSON of each job")] = None,  # noqa: UP045 - evaluated on 3.10
    against: Annotated[Optional[Path], typer.Option(help="another run's --out")] = None,  # noqa: UP045
):  # fmt: skip
    """Run the jobs and print the means of each kind."""
    sys.path[:0] = [str(tree), str(tree / "tests" / "policy")]
    import simulated_job

    work = functools.partial(run, module=simulated_job)
    rows = [row for row in map(work, range(jobs)) if row is not None]
    if out is not None:
        out.write_text(json.dumps(rows))
    tables = [table(rows)]
    if against is not None:
        tables.append(table(json.loads(against.read_text())))
    print(f"{len(rows)} jobs" + (", each figure here and there" if len(tables) > 1 else ""))
    for kind in tables[0]:
        shown = (
            f"{name} " + " ".join(
                f"{one[kind][name]:.2%}" if name in NUMBERS[:3] else f"{one[kind][name]:.2f}"
                for one in tables
            )
            for name in NUMBERS
        )  # fmt: skip
        print(f"{kind:10}", "  ".join(shown))


if __name__ == "__main__":
    typer.run(main)
