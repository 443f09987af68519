"""Jobs: local disks in front of a shared root; every rank is a node of its own, or all are one."""

import errno
import os
import signal
import time

import torch
import torch.distributed as dist
from jobs import caught, job

from dcp_checkfreq import Checkpointer, PerRank, find_latest_valid
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import Fault, FaultyTier, ForwardingTier, GatedTier

STEPS = 2  # that are published before anything happens


def model_at(step):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with torch.no_grad():
        for part in model.parameters():
            part.fill_(float(step))
    return model


def state_at(step):
    # the second value is written by one rank and read by all of them
    return {"model": model_at(step), "note": f"at {step}", "own": PerRank(step + dist.get_rank())}


def train(root, node, steps, *, wrong, **options):
    """Go on for so many steps; return the step restored. ``wrong`` collects what is not right."""
    state = state_at(-1)
    options = {"every": 1, "on_error": "raise", "timeout_s": 20} | options
    with Checkpointer(root, state, staging_dir=node, **options) as ckpt:
        restored = ckpt.restore()
        if restored is not None:
            right = state["note"] == f"at {restored.step}"
            right &= all(bool((p == restored.step).all()) for p in state["model"].parameters())
            right &= state["own"].value == restored.step + dist.get_rank()
            if not right:
                wrong.append(f"rank {dist.get_rank()} restored step {restored.step} wrongly")
        for _ in range(steps):
            at = ckpt.step + 1
            with torch.no_grad():
                for part in state["model"].parameters():
                    part.fill_(float(at))
            state["note"], state["own"].value = f"at {at}", at + dist.get_rank()
            ckpt.after_step()
            ckpt.wait()
    return None if restored is None else restored.step


def interrupted(shared, name, *, nodes):
    """Leave a run whose third step is on the local disks only; return what each rank was told."""
    root = LocalTier(shared / name / "slow")
    wrong = []
    train(root, nodes[dist.get_rank()], STEPS, wrong=wrong)
    sick = root
    if dist.get_rank() == 1:
        sick = FaultyTier(root, [Fault(verb="write_shard", error=errno.EIO, times="forever")])
    error = caught(lambda: train(sick, nodes[dist.get_rank()], 1, wrong=wrong))
    dist.barrier()
    left = list((shared / name / "slow" / "step_00000003").glob("*"))
    assert not left, left
    dist.barrier()
    return root, error, wrong


def nodes_of(shared, name):
    return [shared / name / f"node {rank}" for rank in range(dist.get_world_size())]


def whole(root):
    found = find_latest_valid(root, depth="digest")
    return None if found is None else found.step


@job
def staged_upload_fails_on_one_rank(shared):
    nodes = nodes_of(shared, "fails")
    root, error, wrong = interrupted(shared, "fails", nodes=nodes)
    seen = find_latest_valid(root, staging_dir=nodes[dist.get_rank()])
    restored = train(root, nodes[dist.get_rank()], 0, wrong=wrong)
    return {
        "error": error,
        "seen": [seen.step, [passed.reason for passed in seen.rejected]],
        "restored": restored,
        "whole": whole(root),
        "wrong": wrong,
    }


@job
def staged_ranks_change_places(shared):
    nodes = nodes_of(shared, "places")
    root, _, wrong = interrupted(shared, "places", nodes=nodes)
    restored = train(root, nodes[::-1][dist.get_rank()], 1, wrong=wrong)
    return {"restored": restored, "whole": whole(root), "wrong": wrong}


@job
def staged_one_node_is_new(shared):
    nodes = nodes_of(shared, "new node")
    root, _, wrong = interrupted(shared, "new node", nodes=nodes)
    nodes[1] = shared / "new node" / "another node"
    restored = train(root, nodes[dist.get_rank()], 1, wrong=wrong)
    return {"restored": restored, "whole": whole(root), "wrong": wrong}


@job
def staged_on_one_node(shared):
    """The upload is held, so what is restored can only come from the local disk."""
    nodes = [shared / "one node" / "nvme"] * dist.get_world_size()
    root, _, wrong = interrupted(shared, "one node", nodes=nodes)
    seen = find_latest_valid(root, staging_dir=nodes[0], depth="digest")
    held = GatedTier(root)
    state = state_at(-1)
    with Checkpointer(held, state, every=1, staging_dir=nodes[0]) as ckpt:
        restored = ckpt.restore()
        held.wait_until_held()
        before = (shared / "one node" / "slow" / "step_00000003" / ".metadata").exists()
        if not all(bool((p == 3).all()) for p in state["model"].parameters()):
            wrong.append("restored wrongly")
        dist.barrier()
        held.release()
        ckpt.wait()
        dist.barrier()
        after = whole(root)
    files = sorted(path.suffix for path in nodes[0].rglob("*") if path.is_file())
    return {
        "seen": [seen.step, seen.path.startswith(str(nodes[0]))],
        "restored": restored.step,
        "before": before,
        "after": after,
        "wrong": wrong,
        "files": files,
    }


@job
def staged_one_disk_is_full(shared):
    """One rank goes straight from memory, and the upload of the other one is interrupted."""
    nodes = nodes_of(shared, "full")
    root = LocalTier(shared / "full" / "slow")
    wrong = []
    disk = LocalTier(nodes[dist.get_rank()])
    if dist.get_rank() == 1:
        disk = FaultyTier(
            disk, [Fault(verb="write_shard", error=errno.ENOSPC, after_bytes=99, times="forever")]
        )
    train(root, disk, 3, wrong=wrong)
    restored = train(root, nodes[dist.get_rank()], 0, wrong=wrong)
    return {"restored": restored, "whole": whole(root), "wrong": wrong}


class Dies(ForwardingTier):
    """All ranks die in the midst of their upload of step 3."""

    def around_pieces(self, name, pieces):
        for piece in pieces:
            yield piece[: len(piece) // 2]
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(ForwardingTier):
    """Takes six seconds for each shard."""

    def around_pieces(self, name, pieces):
        time.sleep(6)
        return pieces


@job
def staged_upload_outlasts_the_timeout(shared):
    """Ranks wait for each other for three seconds only; rank 1 uploads for six."""
    nodes = nodes_of(shared, "outlasts")
    root = LocalTier(shared / "outlasts" / "slow")
    wrong = []
    slow = Slow(root) if dist.get_rank() == 1 else root
    train(slow, nodes[dist.get_rank()], 1, wrong=wrong, timeout_s=3)
    return {"whole": whole(root), "wrong": wrong}


@job
def staged_ranks_are_killed(shared):
    nodes = nodes_of(shared, "killed")
    root = LocalTier(shared / "killed" / "slow")
    train(root, nodes[dist.get_rank()], STEPS, wrong=[])
    train(Dies(root), nodes[dist.get_rank()], 1, wrong=[])


@job
def staged_after_the_kill(shared):
    nodes = nodes_of(shared, "killed")
    root = LocalTier(shared / "killed" / "slow")
    wrong = []
    restored = train(root, nodes[dist.get_rank()], 1, wrong=wrong)
    return {"restored": restored, "whole": whole(root), "wrong": wrong}
