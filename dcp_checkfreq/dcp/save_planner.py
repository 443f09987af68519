"""`CheckFreqSavePlanner`: DCP's own, plus plans that are kept and values compared between ranks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor, Shard

from dcp_checkfreq.dcp.boundary import tells_errors
from dcp_checkfreq.errors import (
    PlanCacheStale,
    ReplicasDiffer,
    SaveFailed,
)
from dcp_checkfreq.format.digest import digest
from dcp_checkfreq.format.value_checks import ValueChecks, serialised
from dcp_checkfreq.ranks.own_group import GROUP_IS_GONE
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.runtime.gc_paused import collector_held
from dcp_checkfreq.shards.assign import share_out
from dcp_checkfreq.shards.codec import bytes_of, check_storable, dense, is_sharded_tensor
from dcp_checkfreq.shards.nesting import naming
from dcp_checkfreq.shards.self_described import describes_itself, parts_of
from dcp_checkfreq.snapshot.inventory import Structure, describe
from dcp_checkfreq.state.replica_paths import View, look_into
from dcp_checkfreq.state.value_digests import value_digest

_MOST_NAMED_RANKS = 8  # that hold different values of one key; each tells what is in its own


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a rank tells the coordinator besides its plan."""

    mappings: Any  # DCP's: flat key to path
    token: str | None  # of the kept plan that this rank would use; None: its plan is attached
    name: str  # of the checkpoint that this rank is saving
    digests: Mapping[str, int] = field(default_factory=dict)  # of values that ranks must share
    # Keys of what may differ, and of which value they are: the first rank's counts.
    no_replicas: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _KeptPlan:
    """One rank's part of a plan that worked."""

    token: str
    structure: Structure  # of the state that it is for
    plan: SavePlan
    written_keys: frozenset[str]  # made with the plan: every save of the training thread asks


@dataclass(frozen=True, slots=True)
class _Decision:
    """Whether the kept plan fits a save."""

    structure: Structure  # of the state that is saved
    kept: _KeptPlan | None  # None: a new one is made


@dataclass(frozen=True, slots=True)
class _KeptGlobalPlan:
    """The coordinator's part of it."""

    token: str
    local_plans: list[SavePlan]
    metadata: Metadata


class CheckFreqSavePlanner(DefaultSavePlanner):
    """DCP's default plans, kept while the structure of the state is unchanged.

    Keep one instance and pass it to every save: from the second save on no rank makes or sends a
    plan. If keys, shapes, dtypes or shardings change on any rank, all ranks plan anew. In an
    instance that is used once it only adds the check below.

    Values that DCP keeps once for all ranks must be the same on all ranks: byte items are compared
    at every save, replicated tensors at the first one and when `check_tensors_once` was called.

    Not thread-safe: one save at a time.

    Args:
        allow_pickle: whether the reader will allow pickles. If not, a value that would need
            one is refused when it is saved, rather than when it is needed.
        clock: for what planning takes.
    """

    def __init__(self, *, allow_pickle: bool = True, clock: Clock | None = None) -> None:
        super().__init__()
        self._allow_pickle = allow_pickle
        self._clock = clock or SystemClock()
        self._begun_s = 0.0
        self.planning_s = 0.0  # what planning anew took in the last save; 0 for a kept plan
        self._kept: _KeptPlan | None = None
        self._kept_global: _KeptGlobalPlan | None = None
        self._decided: _Decision | None = None  # of the next save, if it was asked for
        self._streams: dict[str, io.BytesIO] = {}
        self._values = ValueChecks()
        self._check_tensors = True
        self._is_partial = False
        self._ranks: int | None = None
        self._no_replicas: Mapping[str, str] = {}
        self._where = self._name = ""
        self._digests: dict[str, int] = {}

    @property
    def written_keys(self) -> frozenset[str]:
        """Flat keys of what this rank writes by the kept plan; none if no plan is kept."""
        return frozenset() if self._kept is None else self._kept.written_keys

    def decide(self, structure: Structure) -> frozenset[str] | None:
        """Decide whether the kept plan fits the next save.

        Who looks at the state before it is copied calls this, and no more has to be copied than
        what this rank writes, if all ranks have a plan that fits. Nobody has to: otherwise it is
        decided when the plan is asked for.

        Args:
            structure: of the live state.

        Returns:
            Flat keys of what this rank writes; None if the kept plan does not fit, or if replicated
            tensors are to be compared, which takes all of them.
        """
        self._decided = self._decision_on(structure)
        kept = self._decided.kept
        return None if kept is None or self._check_tensors else kept.written_keys

    def _decision_on(self, structure: Structure) -> _Decision:
        # Put back only when the plan worked: after a failed save this rank sends its whole plan.
        kept, self._kept = self._kept, None
        fits = kept is not None and kept.structure == structure
        return _Decision(structure, kept if fits else None)

    def expect_partial(self, is_partial: bool) -> None:
        """Say whether the next state has meta tensors in place of what other ranks write."""
        self._is_partial = is_partial

    def expect_no_replicas(self, keys: Mapping[str, str]) -> None:
        """Say of which flat keys each rank has a value of its own, and the first rank's is kept.

        Such are the buffers of modules under DDP: each rank makes them from its own batches. By
        key is said of which value it is a part: all parts of a value come from one rank.
        """
        self._no_replicas = keys

    def expect_ranks(self, ranks: int) -> None:
        """Say how many ranks save together. DCP takes a rank for alone once its group is gone."""
        self._ranks = ranks

    def let_go(self) -> None:
        """Keep nothing of the state alive, now that it is saved, or not."""
        self.state_dict, self._streams, self._digests = {}, {}, {}

    def check_tensors_once(self) -> None:
        """Compare replicated tensors between ranks at the next save. Call it on all ranks."""
        self._check_tensors = True

    @tells_errors(SaveFailed, "planning")
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state of a new save."""
        self._begun_s = self._clock.monotonic_s()
        with collector_held(), naming(lambda: state_dict):
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._where = str(storage_meta.checkpoint_id) if storage_meta else "this save"
        self._name = os.path.basename(self._where)

    @tells_errors(SaveFailed, "planning")
    def create_local_plan(self) -> SavePlan:
        """Return this rank's plan, or just a token if the kept one still fits."""
        with collector_held(), naming(lambda: self.state_dict):
            return self._create_local_plan()

    def _create_local_plan(self) -> SavePlan:
        decided, self._decided = self._decided, None
        if decided is None:
            leaves = [describe(key, value) for key, value in self.state_dict.items()]
            decided = self._decision_on(Structure(leaves, self.mappings))
        self._decision = decided
        self._streams = {
            key: serialised(value, key)
            for key, value in self.state_dict.items()
            if not isinstance(value, torch.Tensor)
        }
        if not self._allow_pickle:
            for key, stream in self._streams.items():
                look_up = functools.partial(self.state_dict.get, key)
                self._values.check(key, stream, self._where, look_up)
        shared = {key: value for key, value in self.state_dict.items() if not self._may_differ(key)}
        # Not of the bytes: those of one value differ between processes.
        compared = () if self._ranks == 1 else self._streams
        digests = {key: value_digest(shared[key]) for key in compared if key in shared}
        if self._check_tensors:
            digests |= _tensor_digests(shared)
        self._digests = digests
        if decided.kept is not None:
            facts = _Facts({}, decided.kept.token, self._name, digests)
            return SavePlan([], planner_data=facts, usable=False)
        plan = super().create_local_plan()
        return dataclasses.replace(
            plan,
            planner_data=_Facts(plan.planner_data, None, self._name, digests, self._no_replicas),
            usable=True,
        )

    def look_into(self, keys: Sequence[str]) -> dict[str, View]:
        """Return what this rank has under keys that differ between ranks."""
        return look_into(self.state_dict, self.mappings, self._digests, keys)

    def _may_differ(self, key: str) -> bool:
        return key in self._no_replicas

    @tells_errors(SaveFailed, "planning")
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that the ranks agree, and plan anew if any of them has changed.

        Raises:
            ReplicasDiffer: values that are kept once differ between ranks.
            PlanCacheStale: a rank relies on a plan that this one does not have.
            SaveFailed: the ranks are in different saves, or some are missing.
        """
        if self._ranks not in (None, len(all_plans)):
            raise SaveFailed(self._where, GROUP_IS_GONE)
        facts: list[_Facts] = [plan.planner_data for plan in all_plans]
        saving = sorted({fact.name for fact in facts})
        if len(saving) > 1:
            raise SaveFailed(self._where, f"the ranks are saving different checkpoints: {saving}")
        differing = _differing_keys([fact.digests for fact in facts])
        if differing:
            raise ReplicasDiffer(self._where, list(differing), list(differing.values()))
        kept, self._kept_global = self._kept_global, None
        tokens = {fact.token for fact in facts if fact.token is not None}
        if tokens and (kept is None or tokens != {kept.token}):
            raise PlanCacheStale(self._where, "ranks rely on different kept plans; plan anew")
        if kept is not None and all(fact.token is not None for fact in facts):
            self._kept_global = kept
            self.metadata = copy.copy(kept.metadata)
            return [SavePlan([], usable=False) for _ in all_plans], self.metadata
        local_plans = [
            kept.local_plans[rank]
            if kept is not None and fact.token is not None
            else dataclasses.replace(plan, planner_data=fact.mappings)
            for rank, (plan, fact) in enumerate(zip(all_plans, facts, strict=True))
        ]
        no_replicas = {key: of for fact in facts for key, of in fact.no_replicas.items()}
        local_plans = _each_item_once(local_plans, no_replicas)
        token = uuid.uuid4().hex
        plans, metadata = super().create_global_plan(local_plans)
        self._kept_global = _KeptGlobalPlan(token, local_plans, copy.copy(metadata))
        return [dataclasses.replace(plan, planner_data=token) for plan in plans], metadata

    @tells_errors(SaveFailed, "planning")
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan to carry out, and keep it for the next save."""
        if new_plan.usable:
            keys = frozenset(item.index.fqn for item in new_plan.items)
            self._kept = _KeptPlan(new_plan.planner_data, self._decision.structure, new_plan, keys)
        else:
            if self._decision.kept is None:
                raise PlanCacheStale(self._where, "this rank has no kept plan")
            self._kept = self._decision.kept
        self._check_tensors = False
        self.planning_s = self._clock.monotonic_s() - self._begun_s if new_plan.usable else 0.0
        self.plan = self._kept.plan
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor or value that a write item stands for."""
        value = self.state_dict[index.fqn]
        if type(value) is not torch.Tensor or describes_itself(value):
            value = super().lookup_object(index)
        # A plain tensor is in one piece; DCP's look-up comes to the same, in ten times the time.
        if self._is_partial and isinstance(value, torch.Tensor) and value.is_meta:
            self._kept = None
            raise PlanCacheStale(
                self._where,
                f"{index.fqn!r} is this rank's to write by a new plan, and was not copied. "
                "The next save copies everything and plans anew",
            )
        return value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return the bytes of a byte item, which were made for the plan, or the tensor."""
        if write_item.type is WriteItemType.BYTE_IO:
            return self._streams[write_item.index.fqn]
        return object


class FailingSavePlanner(CheckFreqSavePlanner):
    """Takes part in a save only to tell all ranks why it cannot be done.

    Args:
        error: what this rank ran into before the save began.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def create_local_plan(self) -> SavePlan:
        """Raise the error, which DCP brings to all ranks."""
        raise self._error


def _each_item_once(
    plans: list[SavePlan], no_replicas: Mapping[str, str] = MappingProxyType({})
) -> list[SavePlan]:
    """Give every item that several ranks hold to one of them; DCP's rule balances less well.

    Those that may differ go to the first that holds them: statistics of one kind come from one
    rank.
    """
    taken: set[MetadataIndex] = set()
    has_come: set[str] = set()  # values of several parts, of which a rank before may have fewer
    held: list[dict[MetadataIndex, int]] = []
    for plan in plans:
        mine = {item.index: _bytes_of_item(item) for item in plan.items}
        first_come = {index for index in mine if index.fqn in no_replicas}
        taken |= {index for index in first_come if no_replicas[index.fqn] in has_come}
        held.append({index: size for index, size in mine.items() if index not in taken})
        taken |= first_come
        values = {no_replicas[index.fqn] for index in first_come}
        has_come |= values - {index.fqn for index in first_come}
    chosen = share_out(held)
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if item.index in mine])
        for plan, mine in zip(plans, chosen, strict=True)
    ]


def _bytes_of_item(item: WriteItem) -> int:
    return item.tensor_storage_size() or 1  # the size of a byte item is not in the plan


def _tensor_digests(state_dict: Mapping[str, Any]) -> dict[str, int]:
    """Digest tensors of which only one rank's copy is kept. Shards of a tensor differ by right."""
    digests = {}
    for key, value in state_dict.items():
        if isinstance(value, DTensor):
            if any(isinstance(placement, Shard) for placement in value.placements):
                continue
            value = value.to_local()
        if isinstance(value, torch.Tensor) and describes_itself(value):
            for item, _, shard in parts_of(key, value):  # several ranks may have the same part
                check_storable(shard, key)
                name = f"{key} at {list(item.index.offset or ())}"
                digests[name] = digest(bytes_of(dense(shard)))
        elif isinstance(value, torch.Tensor) and not is_sharded_tensor(value):
            check_storable(value, key)
            digests[key] = digest(bytes_of(dense(value)))
    return digests


def _differing_keys(digests_by_rank: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Return keys of which the digests differ, with some ranks of which no two have the same."""
    first: dict[str, int] = {}
    differing = set()
    for digests in digests_by_rank:
        for key, value in digests.items():
            if first.setdefault(key, value) != value:
                differing.add(key)
    found = {}
    for key in sorted(differing):
        holders: dict[int, int] = {}  # by digest the first rank that has it
        for rank, digests in enumerate(digests_by_rank):
            if key in digests:
                holders.setdefault(digests[key], rank)
        found[key] = list(holders.values())[:_MOST_NAMED_RANKS]
    return found
