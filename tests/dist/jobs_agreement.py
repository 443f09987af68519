"""Jobs: ranks with different clocks and costs, partial copies, ranks that hang or die."""

import contextlib
import dataclasses
import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import DEADLY, caught, job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dcp_checkfreq.dcp.save_planner
from dcp_checkfreq import (
    CheckFreqLoadPlanner,
    CheckFreqReader,
    Checkpointer,
    PerRank,
    RankFailed,
    TooManyFailures,
    find_latest_valid,
)
from dcp_checkfreq.snapshot import background_copy
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import Fault, FaultyTier, ForwardingTier

sys.path.append(str(Path(__file__).parent.parent))
from held_copies import HeldCopies

DEADLY |= {"a_rank_hangs_in_a_save", "a_rank_dies_between_saves"}

# --- models, and what a step must hold ---


def layers(count=12, width=128):
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def train(model, optimizer, step):
    torch.manual_seed(step)
    width = next(iter(model.parameters())).shape[-1]
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(value):
    return value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()


def state_of(model, optimizer):
    """Return all values by the names they are saved under, whole on every rank."""
    bare = getattr(model, "module", model)
    names = {parameter: name for name, parameter in bare.named_parameters()}
    state = {f"model.{name}": whole(parameter).clone() for parameter, name in names.items()}
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            state[f"optim.state.{names[parameter]}.{key}"] = whole(value).clone()
    return state


def wrong_in(root, step, wanted):
    """Return the keys of ``step`` that do not hold what they held in training."""
    target = {key: torch.full_like(value, -1) for key, value in wanted.items()}
    dcp.load(
        target,
        storage_reader=CheckFreqReader(root / f"step_{step:08d}"),
        planner=CheckFreqLoadPlanner(),
    )
    return [key for key in wanted if not torch.equal(target[key], wanted[key])]


def local_bytes(model, optimizer):
    tensors = [p.detach() for p in model.parameters()]
    tensors += [v for entries in optimizer.state.values() for v in entries.values()]
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.nbytes for t in tensors)


@contextlib.contextmanager
def copies_when_waited_for():
    """Let every overlapped copy begin only when the guard asks for it."""
    held = HeldCopies(background_copy.copy_tensors)
    real_copy, real_wait = background_copy.copy_tensors, background_copy._ThreadCopy.before_update

    def before_update(self):
        held.release()
        real_wait(self)

    background_copy.copy_tensors, background_copy._ThreadCopy.before_update = held, before_update
    try:
        yield held
    finally:
        held.release()
        background_copy.copy_tensors, background_copy._ThreadCopy.before_update = (
            real_copy,
            real_wait,
        )


def train_and_save(root, model, optimizer, steps=3, **options):
    """Save every step, each copied as late as can be. Return what this rank copied and saw."""
    wanted = {}
    parts = {"model": model, "optim": optimizer}
    options = {"every": 1, "snapshot": "cpu", "keep_last": 100} | options
    with copies_when_waited_for() as held, Checkpointer(root, parts, **options) as ckpt:
        for step in range(1, steps + 1):
            train(model, optimizer, step)
            wanted[step] = state_of(model, optimizer)
            held.hold()
            ckpt.after_step()
        train(model, optimizer, 99)  # the last save is to be torn if it can be
        held.release()
        ckpt.wait()
        records = ckpt.history
    return {
        "copied": [record.copied_bytes for record in records],
        "state": [record.state_bytes for record in records],
        "errors": [record.error for record in records],
        "local": local_bytes(model, optimizer),
        "overlapped": held.copies,
        "wrong": [wrong_in(root, step, wanted[step]) for step in wanted],
        "newest": find_latest_valid(root, depth="digest").step,
    }


@job
def partial_copies_ddp(shared):
    model = nn.parallel.DistributedDataParallel(layers(count=30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train_and_save(shared / "partial_ddp", model, optimizer)


@job
def partial_copies_fsdp(shared):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = layers(count=6, width=384)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train_and_save(shared / "partial_fsdp", model, optimizer)


@job
def partial_copies_hsdp(shared):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = layers(count=8, width=384)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train_and_save(shared / "partial_hsdp", model, optimizer)


@job
def structure_changes(shared):
    """Return for each save: what it was, what this rank copied of all it holds, what is wrong."""
    rank = dist.get_rank()
    root = shared / "structure"
    model = layers(count=8)
    model[0].requires_grad_(False)
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained[:-2], lr=0.01)
    own = PerRank({"x": torch.ones(6000) * rank})
    parts = {"model": model, "optim": optimizer, "own": own}
    said, wanted = [], {}

    def grow_on_one_rank():
        if rank == 1:
            own.value["y"] = torch.ones(7000)

    changes = [
        ("gradients and no state", lambda: model(torch.ones(2, 128)).sum().backward()),
        ("first state", lambda: train(model, optimizer, 2)),
        ("same", lambda: train(model, optimizer, 3)),
        ("new group", lambda: optimizer.add_param_group({"params": trained[-2:]})),
        ("its state", lambda: train(model, optimizer, 5)),
        ("same", lambda: train(model, optimizer, 6)),
        ("more on rank 1", grow_on_one_rank),
        ("same", lambda: train(model, optimizer, 8)),
    ]
    with Checkpointer(root, parts, every=1, keep_last=100) as ckpt:
        for step, (name, change) in enumerate(changes, start=1):
            change()
            wanted[step] = state_of(model, optimizer)
            ckpt.after_step()
            ckpt.wait()
            record = ckpt.history[-1]
            said.append([name, record.copied_bytes, record.state_bytes, record.error])
    wrong = [wrong_in(root, step, wanted[step]) for step in wanted]
    return {"said": said, "wrong": wrong, "newest": find_latest_valid(root, depth="digest").step}


@job
def replicas_are_checked(shared):
    model = nn.parallel.DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    parts = {"model": model, "optim": optimizer}
    with Checkpointer(shared / "checked", parts, every=1000) as ckpt:
        for check in (False, False, True, False):
            train(model, optimizer, ckpt.step)
            ckpt.after_step()
            ckpt.save(wait=True, check_replicas=check)
        records = ckpt.history
    return [[record.copied_bytes, record.state_bytes] for record in records]


def all_to_rank_2(held):
    return [
        set(held[2]) if rank == 2 else set(mine) - set(held[2]) for rank, mine in enumerate(held)
    ]


def forgets_once_that_its_plan_fits(planner):
    decide = planner.decide

    def decides_and_forgets(structure):
        keys = decide(structure)
        planner._decided = dataclasses.replace(planner._decided, kept=None)
        del planner.decide
        return keys

    planner.decide = decides_and_forgets


@job
def a_piece_that_was_not_copied(shared):
    """By a fault of rank 0 a new plan gives pieces to ranks that did not copy them."""
    rank = dist.get_rank()
    root = shared / "not_copied"
    model = nn.parallel.DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    parts = {"model": model, "optim": optimizer}
    said = []
    share_out = dcp_checkfreq.dcp.save_planner.share_out
    with contextlib.suppress(Exception), Checkpointer(root, parts, every=1000) as ckpt:
        for step in range(1, 6):
            train(model, optimizer, step)
            wanted = state_of(model, optimizer)
            ckpt.after_step()
            if step == 3:
                if rank == 2:
                    forgets_once_that_its_plan_fits(ckpt._planner)
                if rank == 0:
                    dcp_checkfreq.dcp.save_planner.share_out = all_to_rank_2
            error = caught(lambda: ckpt.save(wait=True))
            dcp_checkfreq.dcp.save_planner.share_out = share_out
            dist.barrier()
            found = find_latest_valid(root, depth="digest").step
            record = ckpt.history[-1]
            wrong = [] if error else wrong_in(root, step, wanted)
            said.append([error, found, record.copied_bytes, record.state_bytes, wrong])
    return said


@job
def sharded_weights_change_outside_of_a_step(shared):
    """Save, and scale all weights in place while they are being copied."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = layers(count=8, width=512)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parts = {"model": model, "optim": optimizer}
    root = shared / "scaled"
    with (
        copies_when_waited_for() as held,
        Checkpointer(root, parts, every=2, snapshot="cpu") as ckpt,
    ):
        for step in range(2):
            train(model, optimizer, step)
            wanted = state_of(model, optimizer)
            held.hold()
            ckpt.after_step()
        begun = held.begun.wait(20)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        held.release()
        ckpt.wait()
        error = ckpt.history[-1].error
    return [begun, error, [] if error else wrong_in(root, 2, wanted)]


# --- clocks and costs that differ ---


class OtherClock:
    """A clock that started elsewhere, runs at another speed, and now and then jumps ahead."""

    def __init__(self, rank, *, wild):
        self._offset_s = 1e6 * rank
        self._speed = ([1.0, 3.0, 0.3, 1.0] if wild else [1.0, 1.2, 0.8, 1.0])[rank % 4]
        self._jumps_s = [0.01, 1.0, 3600.0] if wild else [0.01]
        self._jumps = rank % 4 == 3
        self._chance = random.Random(rank)

    def wall_s(self):
        return time.time() + self._chance.uniform(-1e5, 1e5)

    def monotonic_s(self):
        if self._jumps and self._chance.random() < 0.02:
            self._offset_s += self._chance.choice(self._jumps_s)
        return self._offset_s + self._speed * time.monotonic()

    def sleep(self, seconds_s):
        time.sleep(seconds_s)


class SlowAtTimes(ForwardingTier):
    """Writes of this rank take long in some saves and not in others."""

    def __init__(self, inner, chance):
        super().__init__(inner)
        self._chance = chance

    def around(self, verb, name, call):
        if verb in ("write_shard", "create") and self._chance.random() < 0.3:
            time.sleep(self._chance.choice([0.002, 0.02]))
        return call()


def tuned(root, rank, *, at_least, saves, most_steps, collectives, wild=False):
    """Train until so many ``saves`` have ended, or for ``most_steps``. Return k after every step.

    The busier the machine, the more steps a save takes, without a limit: so no number of steps has
    a number of saves for sure, and ``at_least`` so many are waited for. All ranks know of the end
    of a save at the same step, so they leave the loop at the same one.
    """
    chance = random.Random(100 + rank)
    world = dist.get_world_size()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])] if collectives else []
    weight = torch.zeros(5000)
    parts = {"w": weight, "own": PerRank(rank)}
    tier = SlowAtTimes(LocalTier(root), chance) if rank == 2 else LocalTier(root)
    ks, bad = [], 0
    with Checkpointer(
        tier,
        parts,
        max_overhead=0.9,
        steps_per_epoch=3,
        clock=OtherClock(rank, wild=wild),
        timeout_s=60,
    ) as ckpt:
        while (
            (ended := len(ckpt.history)) < at_least
            or (ended < saves and ckpt.step < most_steps)
            or ckpt.step % 20
        ):
            at = ckpt.step + 1
            weight.fill_(float(at))
            time.sleep(0.0004 * (5 if rank == 1 else 1) * (1 + (at // 100) % 3))
            if collectives:
                value = torch.tensor([float(at * 10 + rank)])
                dist.all_reduce(value)
                bad += value.item() != at * 10 * world + sum(range(world))
                half = torch.tensor([float(rank)])
                dist.all_reduce(half, group=halves[rank // 2])
                bad += half.item() != (1.0 if rank < 2 else 5.0)
            ckpt.after_step()
            ks.append(ckpt.interval_steps)
        saved = [[record.step, record.interval_steps, record.error] for record in ckpt.history]
    found = find_latest_valid(root, depth="digest")
    target = {"w.tensors.0": torch.zeros(5000)}
    folder = root / f"step_{found.step:08d}"
    dcp.load(target, storage_reader=CheckFreqReader(folder), planner=CheckFreqLoadPlanner())
    right = bool((target["w.tensors.0"] == found.step).all())
    last = ckpt.interval_steps  # the save that `close` waited for may have changed it
    return {"k": ks, "last": last, "saved": saved, "bad": bad, "right": right}


@job
def ranks_agree_beside_collectives(shared):
    return tuned(
        shared / "agree_1",
        dist.get_rank(),
        at_least=20,
        saves=60,
        most_steps=4000,
        collectives=True,
    )


@job
def ranks_agree_whatever_their_clocks_say(shared):
    """Some clocks run three times too fast or too slow, and one jumps by an hour."""
    return tuned(
        shared / "agree_3",
        dist.get_rank(),
        at_least=3,
        saves=1000,
        most_steps=240,
        collectives=True,
        wild=True,
    )


@job
def ranks_agree_without_collectives(shared):
    """Nothing but saves keeps the ranks together: they are at different steps most of the time."""
    return tuned(
        shared / "agree_2",
        dist.get_rank(),
        at_least=40,
        saves=140,
        most_steps=8000,
        collectives=False,
    )


@job
def a_restart_knows_its_interval(shared):
    """Return k at once of the same job, and of one whose rank 3 holds something else."""
    answer = []
    for own in (0, "text" if dist.get_rank() == 3 else 0):
        parts = {"w": torch.zeros(5000), "own": PerRank(own)}
        if own:
            parts["more"] = PerRank(torch.zeros(5000))
        with Checkpointer(shared / "agree_2", parts, max_overhead=0.9, timeout_s=60) as ckpt:
            answer.append(ckpt.interval_steps)
    return answer


# --- errors ---


@job
def errors_reach_all_ranks_at_one_step(shared):
    """Every third save fails on another rank; ranks run at different speeds. Steps of errors."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chance = random.Random(rank)
    faults = [
        Fault(verb="write_shard", error=errno.ENOSPC, name=f"__{rank}_*", nth=nth)
        for nth in range(60)
        if nth % 3 == 0 and nth // 3 % world == rank
    ]
    tier = FaultyTier(LocalTier(shared / "errors"), faults)
    own = {"part": PerRank(torch.ones(5000))}
    raised = []
    ckpt = Checkpointer(tier, own, every=5, on_error="raise", timeout_s=60)
    for _ in range(200):
        time.sleep(chance.choice([0.0, 0.001, 0.004]))
        try:
            ckpt.after_step()
        except Exception as error:  # noqa: BLE001
            raised.append([ckpt.step, type(error).__name__])
    with contextlib.suppress(Exception):
        ckpt.close()
    return {"raised": raised, "struck": tier.struck}


@job
def a_failed_decision_at_one_step(shared):
    """Rank 0 cannot decide; ranks run at different speeds. Steps of errors."""
    chance = random.Random(dist.get_rank())
    root, raised = shared / "undecided", []
    ckpt = Checkpointer(root, {"x": torch.ones(5)}, steps_per_epoch=500, on_error="raise")

    def decide(timings):
        raise ZeroDivisionError("this rule has a bug")

    ckpt._schedule.decide = decide  # that of rank 0 is asked
    while ckpt.step < 60 or (not raised and ckpt.step < 3000):  # a busy machine saves slowly
        time.sleep(chance.choice([0.0, 0.001, 0.004]))
        try:
            ckpt.after_step()
        except RankFailed as error:
            raised.append([ckpt.step, str(error)])
    with contextlib.suppress(RankFailed):
        ckpt.close()
    return raised


@job
def too_many_failures_at_one_step(shared):
    rank = dist.get_rank()
    chance = random.Random(rank)
    fault = [Fault(verb="write_shard", error=errno.EIO, nth=2, times="forever")]
    root = LocalTier(shared / "too_many")
    tier = FaultyTier(root, fault if rank == 3 else [])
    own = {"part": PerRank(torch.ones(5000))}
    ckpt = Checkpointer(tier, own, every=4, max_failures=3, timeout_s=60)
    answer = None
    for _ in range(100):
        time.sleep(chance.choice([0.0, 0.001, 0.005]))
        try:
            ckpt.after_step()
        except TooManyFailures as error:
            answer = [ckpt.step, ckpt.last_saved_step, str(error)]
            break
    answer.append(caught(ckpt.close))
    answer.append(find_latest_valid(root, depth="digest").step)
    return answer


class BreaksOnce(logging.Handler):
    error = ConnectionError("log server")

    def emit(self, record):
        error, self.error = self.error, None
        if error is not None:
            raise error


@job
def a_log_handler_raises_on_one_rank(shared):
    """A save fails on all ranks, and on rank 1 the handler of its error, too."""
    root, log = LocalTier(shared / "handler"), logging.getLogger("dcp_checkfreq.checkpointer.saver")
    handler = BreaksOnce(logging.ERROR)
    fault = [Fault(verb="write_shard", error=errno.EIO)]
    tier = FaultyTier(root, fault if dist.get_rank() == 0 else [])
    if dist.get_rank() == 1:
        log.addHandler(handler)
    try:
        own = {"part": PerRank(torch.ones(5000))}
        with Checkpointer(tier, own, every=1, max_failures=9, timeout_s=30) as ckpt:
            for _ in range(3):
                ckpt.after_step()
                ckpt.wait()
    finally:
        log.removeHandler(handler)
    failed = [save.step for save in ckpt.history if save.error]
    return [failed, ckpt.last_saved_step, handler.error is None]


# --- ranks that hang or die ---


class StopsWhileWriting(ForwardingTier):
    def around(self, verb, name, call):
        if verb == "write_shard":
            os.kill(os.getpid(), signal.SIGSTOP)
        return call()


def seconds(action):
    begun = time.monotonic()
    error = caught(action)
    return error, time.monotonic() - begun


@job
def a_rank_hangs_in_a_save(shared):
    """Rank 1 stops in the second save and is woken up 10 s later."""
    rank = dist.get_rank()
    root = LocalTier(shared / "hangs")
    own = {"part": PerRank(torch.ones(20_000))}
    ckpt = Checkpointer(root, own, every=1, timeout_s=5)
    ckpt.after_step()
    ckpt.wait()
    if rank == 1:
        ckpt._run_history._root = StopsWhileWriting(root)
        subprocess.Popen(["sh", "-c", f"sleep 10; kill -CONT {os.getpid()}"])

    def train():
        for _ in range(1000):
            ckpt.after_step()
            time.sleep(0.01)

    raised = seconds(train)
    closed = seconds(ckpt.close)
    found = find_latest_valid(root, no_dist=True, depth="digest")
    return [raised, closed, ckpt.last_saved_step, found.step]


@job
def a_rank_dies_between_saves(shared):
    rank = dist.get_rank()
    root = LocalTier(shared / "dies")
    own = {"part": PerRank(torch.ones(20_000))}
    ckpt = Checkpointer(root, own, every=3, timeout_s=10)

    def train():
        for _ in range(30):
            ckpt.after_step()
            if rank == 2 and ckpt.step == 8:
                ckpt.wait()
                os.kill(os.getpid(), signal.SIGKILL)

    raised = seconds(train)
    closed = seconds(ckpt.close)
    found = find_latest_valid(root, no_dist=True, depth="digest")
    return [raised, closed, ckpt.step, found.step]
