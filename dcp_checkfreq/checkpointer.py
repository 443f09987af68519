"""`Checkpointer`: the one object that a training loop holds."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dcp_checkfreq.agreement import Agreement
from dcp_checkfreq.app_state import AppState
from dcp_checkfreq.clock import Clock, SystemClock
from dcp_checkfreq.errors import (
    BrokenShard,
    CheckFreqError,
    PublishUnknown,
    RootDiffers,
    SaveFailed,
    StepsExist,
    TooManyFailures,
)
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format import names
from dcp_checkfreq.format.index import Lineage
from dcp_checkfreq.planner import CheckFreqLoadPlanner, CheckFreqSavePlanner, FailingSavePlanner
from dcp_checkfreq.policy.retention import Retention, select_expired
from dcp_checkfreq.reader import CheckFreqReader
from dcp_checkfreq.recovery.choose import Choice, choose_newest, choose_nothing, choose_step
from dcp_checkfreq.recovery.clean import clean_root, delete_step
from dcp_checkfreq.recovery.lease import LeaseFile
from dcp_checkfreq.recovery.scan import Depth, examine, scan
from dcp_checkfreq.storage.late import look_again
from dcp_checkfreq.storage.open import Location, open_tier
from dcp_checkfreq.writer import CheckFreqWriter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """What `Checkpointer.restore` put into the state."""

    step: int
    path: str
    world_size: int  # ranks that saved it; 0 if not recorded
    seconds: float  # from the call to the restored state, on this rank
    passed_over: tuple[str, ...]  # newer steps that were not whole, with the reason


class Checkpointer:
    """Saves a job's state every so many steps in the background, and restores the newest whole one.

    ::

        with Checkpointer(root, {"model": model, "optim": optim}, every=500) as ckpt:
            ckpt.restore()
            for batch in loader:
                ...  # forward, backward, optim.step()
                ckpt.after_step()

    All ranks make it, and call its methods, at the same places. A save copies the state while
    `after_step` runs and is written while training goes on. At most one save is in flight, and it
    is never given up for a newer one: a crash loses at most the steps since the last published
    save. A failed save leaves earlier checkpoints untouched and is reported by the next call.

    Args:
        root: folder of the run: path, ``file://`` URL or `Tier`; the same for all ranks.
        state: name to module, optimizer, `Stateful` object (scheduler, sampler, ...), `PerRank` or
            plain value. Restored plain values are put back into this mapping.
        every: steps from one save to the next.
        keep_last: published checkpoints of this history to keep.
        keep_every: also keep steps that are multiples of this.
        on_error: "log" goes on after a failed save, "raise" raises it at the next call.
        max_failures: this many failed saves in a row raise `TooManyFailures` in any case.
        threads: shard files that a rank writes or reads at once.
        allow_pickle: save and restore values whose unpickling runs code. Without it they are
            refused when they are saved.
        timeout_s: how long a rank waits for the others in a save or restore.
        clock: where time comes from.

    Raises:
        RootDiffers: the ranks do not see the same folder under ``root``.
    """

    def __init__(
        self,
        root: Location,
        state: MutableMapping[str, Any],
        *,
        every: int,
        keep_last: int = 2,
        keep_every: int | None = None,
        on_error: Literal["log", "raise"] = "log",
        max_failures: int = 3,
        threads: int = 2,
        allow_pickle: bool = False,
        timeout_s: float = 1800.0,
        clock: Clock | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        if on_error not in ("log", "raise"):
            raise ValueError(f"on_error must be 'log' or 'raise', got {on_error!r}")
        self._every = every
        self._rule = Retention(keep_last=keep_last, keep_every=keep_every)
        self._raise_errors = on_error == "raise"
        self._max_failures = max_failures
        self._threads = threads
        self._clock = clock or SystemClock()
        self._root = open_tier(root)
        self._agree = Agreement(timeout_s=timeout_s)
        self._state = AppState(state, self._agree.rank)
        self._allow_pickle = allow_pickle
        self._planner = CheckFreqSavePlanner(allow_pickle=allow_pickle)
        run_id = self._agree.decide(lambda: uuid.uuid4().hex[:12])
        self._lineage: Lineage | None = None  # known once it is clear what this run goes on from
        self._run_id = run_id
        self._kept: dict[int, str] = {}  # on rank 0: what retention looks after
        self._lease = LeaseFile(self._root, run_id, self._clock)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkfreq-save")
        self._in_flight: Future[None] | None = None
        self._in_flight_step = -1
        self._closed = False
        self.step = 0
        self.last_saved_step: int | None = None
        self.failures_in_a_row = 0
        self._check_root()

    def _check_root(self) -> None:
        """Make sure that all ranks see what rank 0 writes: else nothing would ever be whole."""
        folder = self._root.child(names.RUN_FOLDER)
        probe = f"probe-{self._run_id}"

        def leave_probe() -> None:
            folder.make()
            folder.replace(probe, b"", scratch=f"{probe}.tmp")

        self._agree.decide(leave_probe)
        try:
            look_again(folder, lambda: folder.size(probe), self._clock)
            sees_it = True
        except OSError:
            sees_it = False
        blind = [rank for rank, sees in enumerate(self._agree.gather(sees_it)) if not sees]
        if self._agree.rank == 0:
            folder.delete(probe)
        if blind:
            raise RootDiffers(
                self._root.location,
                f"ranks {blind} do not see what rank 0 writes there. Is it a disk of one node? "
                "All ranks need the same shared folder",
            )

    # --- restoring ---

    def restore(
        self, step: int | None = None, *, depth: Depth = "size", fresh_start: bool = False
    ) -> Restored | None:
        """Put the newest whole checkpoint into the state, and go on from it.

        A checkpoint that turns out damaged while it is read is passed over for the next older one.

        Args:
            step: this step instead of the newest. Newer ones are then an abandoned branch: this
                run, and those that go on from it, never come back to them.
            depth: "digest" reads and checks everything before choosing.
            fresh_start: start from nothing although checkpoints are there.

        Returns:
            What was restored, or None for a fresh start.

        Raises:
            StepNotFound: ``step`` is not there or not whole.
            NoValidCheckpoint: checkpoints are there, but none is whole.
            LoadFailed: the checkpoint does not fit the state; see the subclasses.
        """
        self._finish_in_flight()
        started_s = self._clock.monotonic_s()
        broken: dict[str, str] = {}
        while True:
            choice = self._agree.decide(lambda: self._choose(step, depth, fresh_start, broken))
            record = choice.record
            if record is None:
                self._go_on_from(choice)
                return None
            try:
                self._load(record.name)
            except CheckpointException as error:
                cause = _cause(error)
                if step is not None or not isinstance(cause, BrokenShard):
                    raise cause from error
                _log.warning("%s; trying the next older checkpoint", cause)
                broken[record.name] = cause.why
                continue
            self._go_on_from(choice)
            seconds = self._clock.monotonic_s() - started_s
            path = os.path.join(self._root.location, record.name)
            if self._agree.rank == 0:
                _log.info("restored step %d from %s in %.2f s", record.step, path, seconds)
            return Restored(record.step, path, record.world_size, seconds, choice.passed_over)

    def _choose(
        self, step: int | None, depth: Depth, fresh_start: bool, broken: dict[str, str]
    ) -> Choice:
        """On rank 0: clean up, look, and decide what to go on from."""
        holder = self._lease.held_by_other()
        if holder is None:
            self._lease.renew()
            clean_root(self._root, now_s=self._clock.wall_s())
        else:
            _log.warning(
                "%s: run %s on %s (pid %d) may still be at work there; nothing is cleaned up",
                *(self._root.location, holder.run_id, holder.host, holder.pid),
            )
        if fresh_start:
            return choose_nothing(self._root)
        if step is not None:
            return choose_step(self._root, step, depth)
        choice = choose_newest(self._root, depth, broken)
        for text in choice.passed_over:
            _log.warning("%s: passed over %s", self._root.location, text)
        return choice

    def _load(self, name: str) -> None:
        folder = self._root.child(name)
        # Read once for all ranks: on shared file systems others might not see it yet.
        known = self._agree.decide(
            lambda: metadata_format.load(folder.read(names.METADATA), folder.location)
        )
        reader = CheckFreqReader(folder, threads=self._threads, known=known)
        target = self._state.targets(known[0], folder.location)
        dcp_load(
            target,
            storage_reader=reader,
            planner=CheckFreqLoadPlanner(allow_pickle=self._allow_pickle),
            process_group=self._agree.group,
            no_dist=self._agree.is_alone,
        )
        self._state.restore(target)

    def _go_on_from(self, choice: Choice) -> None:
        parent_step = None if choice.record is None else choice.record.step
        self.step = parent_step or 0
        self.last_saved_step = parent_step
        self._kept = choice.kept
        self._lineage = Lineage(
            run_id=self._run_id, parent_step=parent_step, abandons=choice.abandons
        )

    # --- saving ---

    def after_step(self, step: int | None = None) -> None:
        """Say that a training step is done; starts a save when one is due.

        Args:
            step: number of the step that is done; default: one more than the last.

        Raises:
            SaveFailed: a background save failed (see ``on_error`` and ``max_failures``). It is
                logged when it happens, and raised at the next step; with several ranks at the next
                save, so that all of them raise at the same step.
        """
        done = self.step + 1 if step is None else step
        due = done % self._every == 0
        finished = self._in_flight is not None and self._in_flight.done()
        if due or (finished and self._agree.is_alone):
            # With several ranks errors wait for the next save, where all ranks wait: raised as
            # soon as one rank knows, they would leave it and the others in different steps.
            self._finish_in_flight()
        self.step = done
        if due:
            self.save()

    def save(self, *, wait: bool = False, check_replicas: bool = False) -> None:
        """Save the state as it is now, as the current step.

        Waits for the save before, copies the state, and returns while it is being written.

        Args:
            wait: return only when the checkpoint is published, and raise if it is not.
            check_replicas: compare tensors of which only one rank's copy is kept between ranks, as
                the first save does; a difference fails this save, and those after it until one
                passes, with `ReplicasDiffer`. Small tensors and other values are always compared.
        """
        self._finish_in_flight()
        if check_replicas:
            self._planner.check_tensors_once()
        if self._closed:
            raise SaveFailed(self._root.location, "this Checkpointer is closed")
        if self._lineage is None:
            self._agree.decide(self._refuse_foreign_steps)
            self._lineage = Lineage(run_id=self._run_id)
        step = self.step
        folder = self._root.child(names.step_folder(step))
        writer = CheckFreqWriter(
            folder,
            threads=self._threads,
            lineage=self._lineage,
            overwrite=self._agree.rank == 0 and self._is_replaceable(step),
        )
        staged: dict[str, Any] = {}
        planner = self._planner
        try:
            staged = writer.stage(self._state.capture())
        except Exception as error:
            if self._agree.is_alone:
                raise
            # The others are on their way into the save: this rank has to be there and say no.
            planner = FailingSavePlanner(error)
        self._in_flight_step = step
        self._in_flight = self._pool.submit(self._write, writer, staged, planner, step)
        if wait:
            self._finish_in_flight(must_raise=True)

    def _refuse_foreign_steps(self) -> None:
        whole = sorted(record.step for record in scan(self._root) if record.problem is None)
        if whole:
            raise StepsExist(
                self._root.location,
                f"it holds steps {whole} of another run. Call restore() before saving, with "
                "fresh_start=True if this run is to start from nothing",
            )

    def _is_replaceable(self, step: int) -> bool:
        """On rank 0: whether a checkpoint is in the way that is damaged or was left behind."""
        assert self._lineage is not None
        name = names.step_folder(step)
        record = examine(self._root.child(name), name, step)
        first = self._lineage.abandons.get(record.run_id)
        left_behind = first is not None and step >= first
        return record.published and (left_behind or record.problem is not None)

    def _write(
        self,
        writer: CheckFreqWriter,
        staged: dict[str, Any],
        planner: CheckFreqSavePlanner,
        step: int,
    ) -> None:
        """In the background thread: write, publish, and on rank 0 let old checkpoints go."""
        try:
            self._write_and_publish(writer, staged, planner)
        except BaseException as error:
            # Now, not only when the loop comes to ask: it may never come.
            _log.error("step %d was not saved: %s", step, error)
            raise
        finally:
            writer.close()
        if self._agree.rank == 0:
            self._let_old_steps_go(step)

    def _write_and_publish(
        self, writer: CheckFreqWriter, staged: dict[str, Any], planner: CheckFreqSavePlanner
    ) -> None:
        if self._agree.rank == 0:
            self._lease.renew()
        try:
            dcp_save(
                staged,
                storage_writer=writer,
                planner=planner,
                process_group=self._agree.group,
                no_dist=self._agree.is_alone,
            )
        except CheckpointException as error:
            cause = _cause(error)
            if not isinstance(cause, PublishUnknown):
                writer.abandon()
            raise cause from error
        except RuntimeError as error:  # of the collectives
            if self._agree.rank == 0:
                writer.abandon()  # no one but this writer could have published it, and it did not
            raise SaveFailed(
                writer.checkpoint_id,
                f"another rank did not answer; its own log says why ({error})",
            ) from error

    def _let_old_steps_go(self, published: int) -> None:
        """Delete what the retention rule lets go; never fails a save that is published."""
        self._kept[published] = names.step_folder(published)
        try:
            for step in select_expired(self._kept, self._rule):
                delete_step(self._root, self._kept[step])
                del self._kept[step]
        except OSError as error:
            _log.warning("%s: old checkpoints stay for now: %s", self._root.location, error)

    def wait(self) -> None:
        """Wait until the save in flight is published, and report it like `after_step`."""
        self._finish_in_flight()

    def _finish_in_flight(self, *, must_raise: bool = False) -> None:
        future, self._in_flight = self._in_flight, None
        if future is None:
            return
        error = future.exception()
        if error is None:
            self.last_saved_step = self._in_flight_step
            self.failures_in_a_row = 0
            return
        self.failures_in_a_row += 1
        if self._raise_errors or must_raise:
            raise error
        if self.failures_in_a_row >= self._max_failures:
            raise TooManyFailures(
                self._root.location,
                f"the last {self.failures_in_a_row} saves failed; last published step: "
                f"{self.last_saved_step}; last error: {error}",
            ) from error

    def close(self) -> None:
        """Wait for the save in flight and give everything back. May be called twice.

        Raises:
            SaveFailed: the last save failed: unlike `after_step`, whatever ``on_error`` says.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._finish_in_flight(must_raise=True)
        finally:
            self._pool.shutdown()
            if self._agree.rank == 0:
                self._lease.release()
            self._agree.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckFreqError as failed:
            if error is None:
                raise
            _log.error("while leaving because of another error: %s", failed)


def _cause(error: CheckpointException) -> BaseException:
    """Return the error of the lowest rank that failed, rather than DCP's wrapper."""
    _, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return cause
