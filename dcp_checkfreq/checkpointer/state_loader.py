"""One checkpoint into the live state: read whole on all ranks, compared, and then put back."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dcp_checkfreq.checkpointer.run import Run
from dcp_checkfreq.dcp.reader import CheckFreqReader
from dcp_checkfreq.dcp.wanted_planner import WantedPlanner
from dcp_checkfreq.errors import BrokenMetadata, LoadFailed
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format.torch_private import dcp_load
from dcp_checkfreq.ranks.patience import Asking
from dcp_checkfreq.recovery.files import content_of
from dcp_checkfreq.runtime.error_reports import Wrap
from dcp_checkfreq.state.app_state import AppState
from dcp_checkfreq.state.restoration import Restoration, Selection, Unexpected


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load came to.

    Attributes:
        files: of the checkpoint, as far as they are known.
        restoration: what was put where.
        bytes_read: from the storage, by this rank.
        bytes_received: from other ranks instead.
    """

    files: frozenset[str]
    restoration: Restoration
    bytes_read: int
    bytes_received: int


class StateLoader:
    """Loads on all ranks.

    Args:
        run: that restores.
        state: to fill.
        share_reads: see `CheckFreqReader`.
        allow_pickle: unpickle values that run code.
    """

    def __init__(self, run: Run, state: AppState, *, share_reads: bool, allow_pickle: bool) -> None:
        self._run, self._ranks, self._state = run, run.ranks, state
        self._share_reads, self._allow_pickle = share_reads, allow_pickle

    def load(self, name: str, step: int, content: bytes | None, selection: Selection) -> Loaded:
        """Load a checkpoint into the live state, or leave all of it as it was.

        Args:
            name: of its folder.
            step: of it.
            content: of its ``.metadata``, if that is not in the folder.
            selection: what of it is wanted.

        Raises:
            BrokenShard: its bytes are damaged; on all ranks.
            BrokenMetadata: its ``.metadata`` is; on all ranks.
            LoadFailed: it does not fit; on all ranks.
        """
        folder = self._run.root.child(name)

        def read() -> bytes:
            if content is not None:
                return content
            try:
                return content_of(folder)
            except FileNotFoundError:  # another run's retention, say
                why = "its .metadata was removed since it was found"
                raise BrokenMetadata(folder.location, why) from None

        # Read once for all ranks: on shared file systems others might not see it yet.
        asking = Asking(
            self._ranks.watchdog, functools.partial(LoadFailed, self._run.root.location)
        )
        known = self._ranks.on_rank_0(
            lambda: metadata_format.load(
                asking.run(read, "reading .metadata", folder.location), folder.location
            ),
            "reading .metadata",
        )
        wrap = functools.partial(LoadFailed, folder.location)
        with self._ranks.region("making room for what is loaded", wrap=wrap):
            reader = CheckFreqReader(
                folder,
                threads=self._run.threads,
                known=known,
                share_reads=self._share_reads,
                agreement=self._ranks,
            )
            reader.watchdog = self._ranks.watchdog
            restoration = self._state.restoration(known[0], folder.location, selection)
        self._settle(restoration, wrap)
        with self._ranks.dcp("loading", folder.location, wrap=wrap):
            dcp_load(
                {"wanted": None},  # the planner knows what is; DCP refuses an empty one
                storage_reader=reader,
                planner=WantedPlanner(restoration.wanted, allow_pickle=self._allow_pickle),
                process_group=self._ranks.group,
                no_dist=self._ranks.is_alone,
            )
        self._put_back(restoration, step, wrap)
        files = frozenset(known[1].files if known[1] is not None else ())
        return Loaded(files, restoration, reader.bytes_read, reader.bytes_received)

    def _settle(self, restoration: Restoration, wrap: Wrap) -> None:
        """Find out what of the checkpoint no rank has a place for."""
        found = self._ranks.combine(
            "comparing parts", restoration.unexpected, Unexpected.of_all, wrap=wrap
        )
        with self._ranks.region("comparing parts", wrap=wrap):
            restoration.settle(found)

    def _put_back(self, restoration: Restoration, step: int, wrap: Wrap) -> None:
        """Put what was loaded into the live state, on all ranks, or leave all as it was."""
        with self._ranks.region("comparing what was loaded", wrap=wrap):
            restoration.check()
        self._settle(restoration, wrap)
        # The outer one, so that another rank's error puts back this one's parts, too.
        with (
            restoration.undone_if_it_fails(),
            self._ranks.region("putting back what was loaded", wrap=wrap),
        ):
            restoration.put_where_it_may_fail(step)
        with self._ranks.region("putting back what was loaded", wrap=wrap):
            restoration.put_the_rest()
        if self._ranks.rank == 0:
            restoration.tell()
