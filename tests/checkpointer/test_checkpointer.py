"""`Checkpointer` in one process: counting, saving, restoring, failing, cleaning up."""

import errno
import logging
import threading

import pytest
import torch
from behaviour_tools import load
from checkpointer_tools import (
    counter,
    failing,
    restored_from,
    run,
    step_until_it_raises,
    steps_on,
    train_and_crash,
    train_on,
)
from torch import nn

from dcp_checkfreq import (
    Checkpointer,
    MemoryForecast,
    PerRank,
    SaveFailed,
    TooManyFailures,
    UnsupportedState,
    WriteFailed,
    find_latest_valid,
)
from dcp_checkfreq.checkpointer.memory_forecast import Needs, forecasts
from dcp_checkfreq.snapshot.pool import PROCESS_POOL
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import (
    Fault,
    FaultyTier,
    ForwardingTier,
    GatedTier,
    ManualClock,
    MemoryTier,
)

# --- counting and saving ---


def test_a_fresh_start_restores_nothing_and_counts_from_one(root):
    assert run(root, 3) == [1, 2, 3]
    assert steps_on(root) == [1, 2, 3]


def test_saves_come_every_n_steps(root):
    run(root, 10, every=4)
    assert steps_on(root) == [4, 8]


def test_counting_goes_on_from_the_restored_step(root):
    run(root, 5, every=2)
    assert steps_on(root) == [2, 4]
    assert run(root, 3, every=2) == [5, 6, 7]
    assert steps_on(root) == [2, 4, 6]
    restored, state = restored_from(root)
    assert restored.step == 6
    assert state["w"].tolist() == [6.0] * 5
    assert state["note"] == "at 6"


def test_an_explicit_step_may_be_given(root):
    with Checkpointer(root, counter(), every=10) as ckpt:
        ckpt.restore()
        for step in (5, 10, 17, 20):
            ckpt.after_step(step)
        assert ckpt.step == 20
        ckpt.after_step()
        assert ckpt.step == 21
    assert steps_on(root) == [10, 20]


def test_restored_tells_step_path_world_size_and_seconds(tmp_path):
    run(tmp_path, 3)
    restored, _ = restored_from(tmp_path)
    assert restored.step == 3
    assert restored.path == str(tmp_path / "step_00000003")
    assert restored.world_size == 1
    assert restored.seconds > 0
    assert restored.passed_over == ()


def test_seconds_are_measured_by_the_clock():
    root = MemoryTier()
    run(root, 1)
    clock = ManualClock()

    class Slow(FaultyTier):
        def around(self, verb, name, call):
            clock.advance(1.0 if verb == "read_into" else 0.0)
            return super().around(verb, name, call)

    with Checkpointer(Slow(root, []), counter(), every=1, clock=clock) as ckpt:
        assert ckpt.restore().seconds >= 1.0


class Watching(ForwardingTier):
    """Notes what the training thread asks of the storage; fails reads of the background."""

    def __init__(self, inner):
        super().__init__(inner)
        self.training = threading.current_thread()
        self.seen, self.fails = [], False

    def around(self, verb, name, call):
        if threading.current_thread() is self.training:
            self.seen.append((verb, name))
        elif self.fails and verb in ("read", "size"):
            raise OSError("no route to storage")
        return super().around(verb, name, call)


def test_saves_use_the_storage_in_the_background_only():
    root = Watching(MemoryTier())
    with Checkpointer(root, counter(), every=1) as ckpt:
        ckpt.restore()
        root.seen.clear()
        for _ in range(3):
            ckpt.after_step()
        ckpt.save(wait=True)
        assert root.seen == []
        assert ckpt.last_saved_step == 3


def test_a_save_fails_if_it_cannot_tell_what_is_in_its_way():
    root = Watching(MemoryTier())
    with Checkpointer(root, counter(), every=1) as ckpt:
        ckpt.restore()
        root.fails = True
        ckpt.after_step()
        ckpt.wait()
        assert "no route to storage" in ckpt.history[-1].error
        root.fails = False
        ckpt.after_step()
    assert steps_on(root) == [2]


def test_save_can_be_asked_for_at_any_step_and_waited_for(root):
    with Checkpointer(root, counter(), every=1000) as ckpt:
        ckpt.after_step()
        ckpt.save(wait=True)
        assert ckpt.last_saved_step == 1
        assert find_latest_valid(root).step == 1
        ckpt.after_step()
        ckpt.save()
        ckpt.wait()
        assert ckpt.last_saved_step == 2


def test_the_record_tells_the_run_its_parent_and_the_step(tmp_path):
    run(tmp_path, 2)
    first = find_latest_valid(tmp_path)
    run(tmp_path, 1)
    second = find_latest_valid(tmp_path)
    assert (first.step, second.step) == (2, 3)
    assert first.run_id
    assert second.run_id
    assert first.run_id != second.run_id
    from dcp_checkfreq.format import metadata as metadata_format

    content = (tmp_path / "step_00000003" / ".metadata").read_bytes()
    _, record = metadata_format.load(content, "here")
    assert (record.step, record.lineage.parent_step) == (3, 2)


def test_a_checkpoint_of_the_checkpointer_is_a_plain_dcp_checkpoint(tmp_path):
    import torch.distributed.checkpoint as dcp

    model = nn.Linear(3, 2)
    with Checkpointer(tmp_path, {"model": model}, every=1) as ckpt:
        ckpt.after_step()
    target = {"model": nn.Linear(3, 2).state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "step_00000001")
    assert torch.equal(target["model"]["weight"], model.weight)
    assert torch.equal(
        load({"model": model.state_dict()}, tmp_path / "step_00000001")["model"]["bias"],
        model.bias,
    )


# --- one save in flight; nothing claims success early (cases 06, 19) ---


def test_training_goes_on_while_the_save_is_written_and_nothing_is_claimed_early():
    inner = MemoryTier()
    run(inner, 1)
    gate = GatedTier(inner, verbs=["write_shard"])
    state = counter()
    with Checkpointer(gate, state, every=1) as ckpt:
        ckpt.restore()
        state["w"].fill_(2.0)
        ckpt.after_step()
        gate.wait_until_held()
        assert (ckpt.step, ckpt.last_saved_step) == (2, 1)
        assert find_latest_valid(inner).step == 1
        state["w"].fill_(-7.0)
        gate.release()
        ckpt.wait()
        assert ckpt.last_saved_step == 2
    _, got = restored_from(inner)
    assert got["w"].tolist() == [2.0] * 5


def test_a_save_that_is_due_waits_for_the_one_in_flight_and_replaces_nothing():
    from concurrent.futures import ThreadPoolExecutor

    inner = MemoryTier()
    gate = GatedTier(inner, verbs=["write_shard"])
    state = counter()
    with ThreadPoolExecutor(1) as threads, Checkpointer(gate, state, every=1) as ckpt:
        state["w"].fill_(1.0)
        ckpt.after_step()
        gate.wait_until_held()
        second = threads.submit(ckpt.after_step)
        with pytest.raises(TimeoutError):
            second.result(0.1)
        gate.release()
        second.result(60)
    assert steps_on(inner) == [1, 2]


def test_close_waits_for_the_save_in_flight():
    from concurrent.futures import ThreadPoolExecutor

    inner = MemoryTier()
    gate = GatedTier(inner, verbs=["create"])
    ckpt = Checkpointer(gate, counter(), every=1)
    ckpt.after_step()
    gate.wait_until_held()
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(ckpt.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)
        gate.release()
        closing.result(60)
    assert find_latest_valid(inner).step == 1
    ckpt.close()
    with pytest.raises(SaveFailed, match="closed"):
        ckpt.save()


# --- failures (cases 04, 14, 17) ---


def test_a_failed_save_is_logged_counted_and_training_goes_on(caplog):
    inner = MemoryTier()
    with (
        caplog.at_level(logging.ERROR),
        Checkpointer(failing(inner, nth=1), counter(), every=1) as ckpt,
    ):
        for _ in range(2):
            ckpt.after_step()
            ckpt.wait()
        assert ckpt.failures_in_a_row == 1
        assert ckpt.last_saved_step == 1
        assert "step 2 was not saved" in caplog.text
        assert "No space left" in caplog.text
        ckpt.after_step()
    assert ckpt.failures_in_a_row == 0
    assert steps_on(inner) == [1, 3]


def test_a_failed_save_is_raised_by_the_next_call_if_asked():
    tier = failing(MemoryTier())
    with Checkpointer(tier, counter(), every=2, on_error="raise") as ckpt:
        ckpt.after_step()
        ckpt.after_step()
        with pytest.raises(WriteFailed, match="No space left"):
            step_until_it_raises(ckpt)
        ckpt.save(wait=True)
    assert ckpt.failures_in_a_row == 0


def test_too_many_failures_in_a_row_are_raised_whatever_on_error_says():
    tier = failing(MemoryTier(), times="forever", nth=1)
    with Checkpointer(tier, counter(), every=1, max_failures=3) as ckpt:
        with pytest.raises(TooManyFailures, match="last 3 saves failed; last published step: 1"):
            step_until_it_raises(ckpt)
        assert ckpt.step in (4, 5), "told by the next call, or by the next save at the latest"
        assert ckpt.last_saved_step == 1


def test_leaving_the_with_block_raises_the_error_of_the_last_save():
    with (
        pytest.raises(WriteFailed, match="No space left"),
        Checkpointer(failing(MemoryTier()), counter(), every=1) as ckpt,
    ):
        ckpt.after_step()


def test_an_error_of_the_training_is_not_hidden_by_one_of_the_save(caplog):
    with pytest.raises(ZeroDivisionError):
        train_and_crash(failing(MemoryTier()))
    assert "No space left" in caplog.text


def test_save_with_wait_raises_whatever_on_error_says():
    with (
        Checkpointer(failing(MemoryTier()), counter(), every=1000) as ckpt,
        pytest.raises(WriteFailed),
    ):
        ckpt.save(wait=True)


def test_a_failed_save_leaves_no_files_and_older_checkpoints_untouched(root):
    run(root, 2)
    before = steps_on(root)
    with pytest.raises(WriteFailed):
        train_on(failing(root, times="forever"), 1)
    assert [step for step in before if not root.child(f"step_{step:08d}").list()] == []
    assert root.child("step_00000003").list() == []
    assert find_latest_valid(root, depth="digest").step == 2


@pytest.mark.parametrize("verb", ["write_shard", "create"])
def test_the_folders_of_saves_that_failed_are_gone_after_the_next_one(tmp_path, verb):
    faults = [Fault(verb=verb, error=errno.EDQUOT, nth=nth) for nth in (1, 2, 3)]
    root = tmp_path / "run"
    tier = FaultyTier(LocalTier(root), faults)
    with Checkpointer(tier, counter(), every=1, keep_last=9, max_failures=9) as ckpt:
        for _ in range(6):
            ckpt.after_step()
            ckpt.wait()
    failed = [record.step for record in ckpt.history if record.error]
    assert failed == [2, 3, 4]
    folders = sorted(path.name for path in root.glob("step_*"))
    assert folders == ["step_00000001", "step_00000005", "step_00000006"]


def test_a_lost_answer_of_the_commit_deletes_nothing_and_the_step_is_there(root, caplog):
    tier = FaultyTier(root, [Fault(verb="create", error=errno.EIO, lost_answer=True)])
    with Checkpointer(tier, counter(4), every=1) as ckpt:
        ckpt.after_step()
        ckpt.wait()
    assert find_latest_valid(root, depth="digest").step == 1
    assert "step 1 may have been saved or not: PublishUnknown" in caplog.text


# --- arguments ---


def test_steps_do_not_go_back_and_both_numbers_are_told(root):
    state = counter()
    with Checkpointer(root, state, every=10) as ckpt:
        ckpt.after_step(20)
        ckpt.after_step(20)  # the same one: more work of it
        for back in (19, 5, 0):
            with pytest.raises(ValueError, match=rf"step {back} comes after step 20"):
                ckpt.after_step(back)
        assert ckpt.step == 20
        ckpt.after_step(40)
        ckpt.wait()
        assert ckpt.restore(20).step == 20
        ckpt.after_step(21)
    assert steps_on(root) == [20, 40]


def test_a_step_without_a_name_is_refused_at_once(root):
    with Checkpointer(root, counter(), every=10) as ckpt:
        with pytest.raises(ValueError, match="too large"):
            ckpt.after_step(10**300 + 1)
        assert ckpt.step == 0
        ckpt.after_step(10**30)
        ckpt.wait()
    assert find_latest_valid(root).step == 10**30


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"every": 1, "keep_last": 0}, {"every": 1, "on_error": "shrug"},
     {"every": 1, "keep_every": 0}],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=r"every|keep_last|on_error"):
        Checkpointer(tmp_path, counter(), **options)


@pytest.mark.parametrize("name", ["", "a.b", "a/b"])
def test_part_names_that_could_collide_are_refused(tmp_path, name):
    with pytest.raises(UnsupportedState, match="names are"):
        Checkpointer(tmp_path, {name: 1}, every=1)


def test_an_empty_state_is_refused(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        Checkpointer(tmp_path, {}, every=1)


def test_all_kinds_of_parts_round_trip(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        optim = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
        return {
            "model": model,
            "optim": optim,
            "sched": torch.optim.lr_scheduler.CosineAnnealingLR(optim, 100),
            "rng": PerRank(torch.get_rng_state()),
            "number": seed,
            "text": f"seed {seed}",
            "large": torch.full((100, 100), float(seed)),
            "nothing": None,
            "list": [seed, torch.full((3,), seed), {"a": (seed,)}],
        }

    def train(parts, steps):
        for _ in range(steps):
            parts["model"](torch.ones(2, 4)).sum().backward()
            parts["optim"].step()
            parts["sched"].step()
            parts["optim"].zero_grad()

    first = make(1)
    train(first, 3)
    with Checkpointer(tmp_path, first, every=1) as ckpt:
        ckpt.after_step()
    second = make(2)
    with Checkpointer(tmp_path, second, every=1) as ckpt:
        assert ckpt.restore().step == 1
    assert torch.equal(second["rng"].value, first["rng"].value)
    assert torch.equal(second["large"], first["large"])
    assert (second["number"], second["text"], second["nothing"]) == (1, "seed 1", None)
    assert str(second["list"]) == str(first["list"])
    train(first, 4)
    train(second, 4)
    for ours, theirs in zip(second["model"].parameters(), first["model"].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert second["sched"].get_last_lr() == first["sched"].get_last_lr()


def test_small_states_make_small_files(tmp_path):
    parts = {
        "model": nn.Linear(1000, 1000),
        "rng": PerRank(torch.get_rng_state()),
        "counters": {"seen": torch.arange(10), "step": torch.tensor(3)},
        "few": torch.ones(3),
    }
    with Checkpointer(tmp_path, parts, every=1) as ckpt:
        ckpt.after_step()
    (shard,) = tmp_path.rglob("*.distcp")
    assert shard.stat().st_size < 4_004_000 + 50_000


def test_what_a_snapshot_takes_is_said_before_it_is_taken(caplog):
    PROCESS_POOL.drop()
    caplog.set_level(logging.INFO, logger="dcp_checkfreq")
    with Checkpointer(MemoryTier(), {"w": torch.zeros(5 << 20)}, every=1) as ckpt:
        ckpt.after_step()
    said, taken, *_ = [record.getMessage() for record in caplog.records]
    assert said == (
        f"snapshots take {PROCESS_POOL.held_bytes} bytes of host memory and 0 bytes of GPU memory "
        "on this node (1 rank), the first one now"
    )
    assert "taking" in taken


@pytest.mark.parametrize(
    ("writes_s", "options", "warns"),
    [
        (20.0, {}, True),  # and half of it more would not fit into 25 s
        (15.0, {}, False),
        (20.0, {"grace_s": 31.0}, False),
        (20.0, {"preempt_signals": ()}, False),
    ],
)
def test_saves_that_do_not_fit_into_the_grace_are_warned_of_once(caplog, writes_s, options, warns):
    clock = ManualClock()

    class Slow(ForwardingTier):
        def around(self, verb, name, call):
            if verb == "write_shard":
                clock.advance(writes_s)
            return super().around(verb, name, call)

    with Checkpointer(Slow(MemoryTier()), counter(), every=1, clock=clock, **options) as ckpt:
        for _ in range(3):
            ckpt.after_step()
            ckpt.wait()
    said = [record.message for record in caplog.records if "grace_s" in record.message]
    assert len(said) == warns
    if warns:
        assert "the last save took 20.0 s" in said[0]
        assert "set grace_s above 30" in said[0]


def test_what_snapshots_take_can_be_asked_before_any_is_taken(tmp_path):
    PROCESS_POOL.drop()
    model = nn.Linear(1 << 10, 5 << 10)
    optim = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path, {"model": model, "optim": optim}, every=1) as ckpt:
        before = ckpt.forecast()
        assert before == MemoryForecast(
            host_bytes=before.host_bytes,
            gpu_bytes=0,
            node_host_bytes=before.host_bytes,
            node_gpu_bytes=0,
            node_ranks=1,
            without_state=("optim",),
        )
        assert PROCESS_POOL.held_bytes == 0, "none was taken"
        assert list(tmp_path.glob("step_*")) == []
        model(torch.ones(1, 1 << 10)).sum().backward()
        optim.step()
        stepped = ckpt.forecast()
        assert stepped.host_bytes > 2.8 * before.host_bytes > 0
        assert stepped.without_state == ()
        ckpt.after_step()
        assert ckpt.forecast() == stepped, "the save in flight has ended"
        assert stepped.host_bytes == PROCESS_POOL.held_bytes
        assert ckpt.last_saved_step == 1
    with pytest.raises(SaveFailed, match="closed"):
        ckpt.forecast()


def test_a_forecast_is_per_node():
    sizes = [("a", 1, 10), ("b", 2, 20), ("a", 4, 40)]
    first, second, third = forecasts([Needs(*one) for one in sizes])
    assert (first.node_host_bytes, first.node_gpu_bytes, first.node_ranks) == (5, 50, 2)
    assert (second.node_host_bytes, second.node_gpu_bytes, second.node_ranks) == (2, 20, 1)
    assert (third.host_bytes, third.gpu_bytes, third.node_host_bytes) == (4, 40, 5)
