"""The registered parts, looked at on all ranks before anything is saved."""

from __future__ import annotations

import itertools
from typing import Any

from dcp_checkfreq.dcp.save_planner import CheckFreqSavePlanner
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.state.app_state import AppState

Groups = dict[str, list[list[str]]]  # FQNs in each group of each optimizer


class Registered:
    """Captures the parts in one order on all ranks.

    Args:
        state: the parts.
        ranks: of this job.
        planner: of their saves; hears what may differ between ranks.
        allow_pickle: values that need code to unpickle are right.
    """

    def __init__(
        self,
        state: AppState,
        ranks: Ranks,
        planner: CheckFreqSavePlanner,
        *,
        allow_pickle: bool,
    ) -> None:
        self._state, self._ranks, self._planner = state, ranks, planner
        self._allow_pickle = allow_pickle
        self._optimizers_are_checked = False

    def check(self) -> None:
        """Capture all of them once, and save nothing.

        Raises:
            UnsupportedState: something could not be saved, or not be restored; on all ranks.
        """
        self._state.follow(self._ranks.on_rank_0(lambda: self._state.names, "naming the parts"))
        with self._ranks.region("looking at the parts"):
            self._state.check(allow_pickle=self._allow_pickle)
        groups = self._ranks.combine("naming parameters", self._state.group_names, _of_all)
        self._state.share_groups(groups)

    def check_optimizers_once(self) -> None:
        """Look at what the first step has made. All ranks call it, with no save in flight."""
        if self._optimizers_are_checked:
            return
        names = self._state.optimizer_names()
        with self._ranks.region("looking at the optimizers"):
            self._state.check(allow_pickle=self._allow_pickle, names=names)
        self._optimizers_are_checked = True

    def gpu_memory_bytes(self) -> tuple[int, int]:
        """Return how much GPU memory is in use where the parts are, and how much there is."""
        return self._state.gpu_memory_bytes()

    def without_state(self) -> tuple[str, ...]:
        """Return the names of the optimizers that have made no state, or not yet."""
        return self._state.optimizers_without_state()

    def capture(self) -> dict[str, Any]:
        """Return the state to save."""
        state = self._state.capture()
        self._planner.expect_no_replicas(self._state.no_replicas)
        return state


def _of_all(ranks: list[Groups]) -> Groups:
    """Return all FQNs of each group: stages of a pipeline have some each under the same name."""
    found: Groups = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        of_ranks = [rank[name] for rank in ranks if name in rank]
        found[name] = [
            list(dict.fromkeys(fqn for fqns in group for fqn in fqns))
            for group in itertools.zip_longest(*of_ranks, fillvalue=())
        ]
    return found
