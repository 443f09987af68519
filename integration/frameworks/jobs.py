"""Starts jobs of frameworks, and reads what they have trained on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT_S = 150


def run(script, *arguments, ranks=1, dies=False, fails=False, launched=False):
    """Run a job to its end; it must be killed (``dies``), or fail. Return its output.

    One rank is ``launched`` by torchrun, too, or runs alone.
    """
    launch = [
        *("-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--master-addr", "127.0.0.1", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-backend", "c10d"),
    ]
    command = [
        sys.executable,
        *(launch if ranks > 1 or launched else ()),
        HERE / script,
        *arguments,
    ]
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with subprocess.Popen(
        list(map(str, command)),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            said, _ = job.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            said, _ = job.communicate()
            raise AssertionError(f"the job hangs\n{said[-5000:]}") from None
    assert (job.returncode != 0) == (dies or fails), said[-8000:]
    if dies:
        assert job.returncode == -signal.SIGKILL or "SIGKILL" in said, said[-8000:]
    return said


def die(root, published_at_least):
    """In a job: be killed, once so many checkpoints are there."""
    until_s = time.monotonic() + TIMEOUT_S / 3
    while len(published(root)) < published_at_least and time.monotonic() < until_s:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def trained(out):
    """Return step to sorted samples of all ranks; a step that was trained again counts once."""
    found = {}
    for path in sorted(out.glob("rank*.jsonl")):
        of_rank = {}
        for line in path.read_text().splitlines():
            said = json.loads(line)
            of_rank.setdefault(said["step"], []).append(said)
        for step, lines in of_rank.items():
            life = lines[-1]["pid"]  # the last life that trained this step
            samples = [one for line in lines if line["pid"] == life for one in line["samples"]]
            found.setdefault(step, []).extend(samples)
    return {step: sorted(samples) for step, samples in sorted(found.items())}


def end(out):
    """Return the losses and the model at the end."""
    return torch.load(out / "end.pt", weights_only=True)


def assert_every_sample_once(found, steps=16, per_epoch=8, samples=64):
    """Make sure that each epoch has each sample once."""
    assert sorted(found) == list(range(1, steps + 1))
    for first in range(1, steps, per_epoch):
        of_epoch = [one for step in range(first, first + per_epoch) for one in found[step]]
        assert sorted(of_epoch) == list(range(samples))


def assert_equal(one, other):
    """Compare losses and weights bit for bit."""
    assert one["losses"] == other["losses"]
    assert one["model"].keys() == other["model"].keys()
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name


def published(root):
    """Return the steps that are whole, by their names."""
    return sorted(int(path.parent.name[5:]) for path in root.glob("step_*/.metadata"))


def saved_before(root, step):
    """Return the last step that a job had saved when it was killed in ``step``."""
    steps = published(root)
    assert steps, "it was killed before its first save"
    assert max(steps) < step
    return max(steps)
