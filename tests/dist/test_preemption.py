"""Case 05: real ranks and real signals.

What a launcher has a part in runs under torch's own, in a fork (`forked_torchrun.py`).
"""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import forked_torchrun
import pytest
from forked_ranks import ForkedRanks, free_port

from dcp_checkfreq import find_latest_valid

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("jobs_preemption.py")


def kill_ranks(folder):
    """Kill what a launcher that was killed has left; a pid counts while it is a fork of ours."""
    for path in folder.glob("*.pid"):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{path.read_text()}/cmdline").read_bytes()
            if b"rank_server" in command:
                os.kill(int(path.read_text()), signal.SIGKILL)


class Running:
    """A job of several ranks that was started."""

    def __init__(self, folder, ranks, job):
        self.folder, self.ranks, self.job = folder, ranks, job

    def wait_for(self, ending):
        """Wait until every rank has written its file of that kind; return the texts."""
        paths = [self.folder / f"{rank}.{ending}" for rank in range(self.ranks)]
        end_s = time.monotonic() + 60
        while not all(path.exists() for path in paths):
            assert time.monotonic() < end_s, self.everything()
            assert self.job.is_running(), self.everything()
            time.sleep(0.02)
        return [path.read_text() for path in paths]

    def pids(self):
        self.wait_for("running")
        return [int(text) for text in self.wait_for("pid")]

    def wait_for_log(self, rank, text):
        end_s = time.monotonic() + 60
        while text not in self.log(rank):
            assert time.monotonic() < end_s, self.everything()
            time.sleep(0.02)

    def log(self, rank):
        path = self.folder / f"{rank}.log"
        return path.read_text() if path.exists() else ""

    def everything(self):
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*"))
            if path.is_file() and path.suffix in (".log", ".json", ".out")
        )

    def ended(self):
        """Wait for the end; return the exit codes and what each rank said."""
        codes = self.job.wait()
        paths = [self.folder / f"{rank}.json" for rank in range(self.ranks)]
        assert all(path.exists() for path in paths), self.everything()
        return codes, [json.loads(path.read_text()) for path in paths]


@pytest.fixture
def start(tmp_path):
    """Give a function that starts a job; what is left of it at the end is killed."""
    with contextlib.ExitStack() as stack:

        def start(ranks, job, *, by="tcp", launcher=(), **options):
            arguments = [job, str(tmp_path), json.dumps(options)]
            if by == "torchrun":
                launched = [f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"]
                launched += [f"--master-port={free_port()}", *launcher, SCRIPT]
                started = ForkedRanks(
                    forked_torchrun.SCRIPT, 1, [*launched, *arguments], tmp_path, timeout_s=90
                )
                stack.callback(kill_ranks, tmp_path)
            else:
                method = {
                    "file": f"file://{tmp_path}/store",
                    "tcp": f"tcp://127.0.0.1:{free_port()}",
                }
                started = ForkedRanks(
                    SCRIPT, ranks, arguments, tmp_path, timeout_s=90, TEST_INIT_METHOD=method[by]
                )
            return Running(tmp_path, ranks, stack.enter_context(started))

        yield start


def one_step(said):
    """Return the step at which all ranks stopped."""
    (step,) = {one["stopped"] for one in said}
    assert step is not None
    return step


@pytest.mark.parametrize("by", ["torchrun", "file", "tcp"])
def test_a_signal_to_one_rank_stops_all_at_one_step(start, by):
    running = start(3, "until_told", by=by)
    os.kill(running.pids()[2], signal.SIGTERM)
    codes, said = running.ended()
    assert one_step(said) == said[0]["stop_at"]
    assert set(codes) == {0}, "no rank was ended, so a launcher sees no failure"
    assert "SIGTERM on rank 2" in running.log(0)


def test_signals_to_all_ranks_stop_all_at_one_step(start):
    running = start(3, "until_told")
    for pid in running.pids():
        os.kill(pid, signal.SIGTERM)
    codes, said = running.ended()
    one_step(said)
    assert codes == [0] * 3


def test_the_launcher_hands_its_signal_on_and_all_ranks_stop_at_one_step(start):
    running = start(2, "until_told", by="torchrun")
    running.pids()
    os.kill(running.job.pids[0], signal.SIGTERM)
    codes, said = running.ended()
    one_step(said)
    assert codes != [0], "torchrun itself says that it got a signal"


@pytest.mark.long
def test_the_launcher_hands_on_other_signals_if_it_is_told_to(start):
    running = start(
        2, "until_told", by="torchrun", launcher=["--signals-to-handle=SIGTERM,SIGUSR1"]
    )
    running.pids()
    os.kill(running.job.pids[0], signal.SIGUSR1)
    _, said = running.ended()
    one_step(said)
    assert "SIGUSR1 on rank" in running.log(0)


def test_a_second_signal_changes_nothing(start):
    running = start(2, "until_told", step_s=0.3)
    pids = running.pids()
    os.kill(pids[1], signal.SIGTERM)
    running.wait_for_log(0, "stopping at step")
    os.kill(pids[0], signal.SIGTERM)
    os.kill(pids[1], signal.SIGTERM)
    codes, said = running.ended()
    assert one_step(said) == said[1]["stop_at"]
    assert codes == [0, 0]
    assert "already stopping" in running.log(1)


@pytest.mark.parametrize(
    "moment", ["before the collective", "after the collective", "after the gate"]
)
@pytest.mark.long
def test_a_signal_at_any_moment_of_a_step_stops_all_at_one_later_step(start, moment):
    codes, stopped = start(2, "at_a_moment", by="file", moment=moment).ended()
    assert stopped[0] == stopped[1] >= (6 if moment == "after the gate" else 5)
    assert codes == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree_whatever_the_timing(start, ranks):
    rounds = 20
    codes, stopped = start(ranks, "many_rounds", by="torchrun", rounds=rounds).ended()
    assert len(stopped[0]) == rounds
    assert None not in stopped[0]
    assert all(one == stopped[0] for one in stopped)
    assert codes == [0]


@pytest.mark.long
def test_the_agreement_does_not_wait_for_a_training_thread(start):
    _, (waiting, sleeping) = start(2, "while_one_sleeps", by="torchrun").ended()
    assert waiting["stopped"] == sleeping["stopped"] == 5
    assert sleeping["agreed"] < sleeping["awake"] - 1.0
    assert waiting["agreed"] < sleeping["awake"] - 1.0, "noticed inside of the collective"


@pytest.mark.long
def test_a_stopped_rank_makes_an_agreement_impossible_and_training_goes_on(start):
    running = start(3, "until_told", by="torchrun", agree_timeout_s=1.0, steps=150)
    pids = running.pids()
    os.kill(pids[2], signal.SIGSTOP)
    os.kill(pids[0], signal.SIGTERM)
    for rank in (0, 1):
        running.wait_for_log(rank, "no answer from ranks [2] within 1 s")
    os.kill(pids[2], signal.SIGCONT)
    codes, said = running.ended()
    assert said == [{"stopped": None, "stop_at": None}] * 3
    assert codes == [0]
    assert "there will be no last save" in running.log(2)


@pytest.mark.long
def test_a_stopped_server_of_the_store_holds_up_no_step_for_long(start):
    running = start(2, "until_told", by="tcp", agree_timeout_s=1.0, steps=150)
    pids = running.pids()
    os.kill(pids[0], signal.SIGSTOP)
    time.sleep(1.0)  # rank 1 looks every 0.05 s, and hangs before it can tell its step
    os.kill(pids[1], signal.SIGTERM)
    running.wait_for_log(1, "the store does not answer")
    os.kill(pids[0], signal.SIGCONT)
    codes, said = running.ended()
    assert said == [{"stopped": None, "stop_at": None}] * 2
    assert codes == [0, 0]


# --- with a `Checkpointer` ---


def forget(folder):
    for path in [*folder.glob("*.pid"), *folder.glob("*.running"), *folder.glob("*.json")]:
        path.unlink()


def test_all_ranks_save_once_more_and_the_next_run_goes_on_from_there(start):
    running = start(2, "with_checkpointer", by="torchrun", every=1000)
    os.kill(running.pids()[1], signal.SIGTERM)
    codes, said = running.ended()
    step = one_step(said)
    assert set(codes) == {0}
    assert [one["saved"] for one in said] == [step, step]
    assert find_latest_valid(running.folder / "root", depth="digest").step == step
    assert f"stopping after step {step}" in running.log(0)
    forget(running.folder)
    again = start(2, "with_checkpointer", max_overhead=0.5)
    os.kill(again.pids()[0], signal.SIGUSR1)
    codes, said = again.ended()
    assert {one["first"] for one in said} == {step + 1}
    assert one_step(said) == said[0]["saved"]


def test_a_save_in_flight_is_waited_for_and_then_there_is_one_more(start):
    running = start(2, "with_checkpointer", every=4, shard_s=1.5, step_s=0.2)
    pids = running.pids()  # in step 4: its save takes longer than the agreement
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    time.sleep(1)
    os.kill(pids[0], signal.SIGTERM)
    codes, said = running.ended()
    step = one_step(said)
    assert set(codes) == {0}
    whole = sorted(
        int(path.parent.name[5:]) for path in (running.folder / "root").glob("*/.metadata")
    )
    assert whole == [4, step]
    assert {one["saved"] for one in said} == {step}


def test_without_time_for_another_save_none_is_begun(start):
    running = start(2, "with_checkpointer", every=4, shard_s=2.0, step_s=0.2, grace_s=3.0)
    pids = running.pids()
    running.wait_for_log(0, "step 4 saved")
    os.kill(pids[0], signal.SIGTERM)
    codes, said = running.ended()
    step = one_step(said)
    assert set(codes) == {0}
    assert {one["saved"] for one in said} < set(range(4, step))
    assert "none is begun" in running.log(0)
