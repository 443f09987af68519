"""What a run goes on from, and how it gets into the live state."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from dcp_checkfreq.agreement import Agreement
from dcp_checkfreq.app_state import AppState
from dcp_checkfreq.clock import Clock
from dcp_checkfreq.errors import BrokenShard
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format import names
from dcp_checkfreq.planner import CheckFreqLoadPlanner
from dcp_checkfreq.reader import CheckFreqReader
from dcp_checkfreq.recovery.choose import Choice, choose_newest, choose_nothing, choose_step
from dcp_checkfreq.recovery.clean import clean_root
from dcp_checkfreq.recovery.lease import LeaseFile
from dcp_checkfreq.recovery.scan import Depth
from dcp_checkfreq.saving import cause_of
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """What `Checkpointer.restore` put into the state."""

    step: int
    path: str
    world_size: int  # ranks that saved it; 0 if not recorded
    seconds: float  # from the call to the restored state, on this rank
    passed_over: tuple[str, ...]  # newer steps that were not whole, with the reason


class Restorer:
    """Chooses on rank 0, and loads on all ranks.

    Args:
        root: folder of the run.
        agree: of the ranks.
        state: to fill.
        lease: of this run on the root.
        clock: for the time it takes.
        threads: shard files that a rank reads at once.
        allow_pickle: unpickle values that run code.
    """

    def __init__(
        self,
        root: Tier,
        agree: Agreement,
        state: AppState,
        lease: LeaseFile,
        clock: Clock,
        *,
        threads: int,
        allow_pickle: bool,
    ) -> None:
        self._root = root
        self._agree = agree
        self._state = state
        self._lease = lease
        self._clock = clock
        self._threads = threads
        self._allow_pickle = allow_pickle

    def run(
        self, step: int | None, depth: Depth, *, fresh_start: bool
    ) -> tuple[Choice, Restored | None]:
        """Restore, and return what was chosen. See `Checkpointer.restore`."""
        started_s = self._clock.monotonic_s()
        broken: dict[str, str] = {}
        while True:
            choice = self._agree.decide(lambda: self._choose(step, depth, fresh_start, broken))
            record = choice.record
            if record is None:
                return choice, None
            try:
                self._load(record.name, record.step)
            except CheckpointException as error:
                cause = cause_of(error)
                if step is not None or not isinstance(cause, BrokenShard):
                    raise cause from error
                _log.warning("%s; trying the next older checkpoint", cause)
                broken[record.name] = cause.why
                continue
            seconds = self._clock.monotonic_s() - started_s
            path = os.path.join(self._root.location, record.name)
            if self._agree.rank == 0:
                _log.info("restored step %d from %s in %.2f s", record.step, path, seconds)
            passed_over = choice.passed_over
            return choice, Restored(record.step, path, record.world_size, seconds, passed_over)

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

    def _load(self, name: str, step: int) -> None:
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
        self._state.restore(target, step)
