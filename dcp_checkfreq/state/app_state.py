"""The parts that a training script hands to `Checkpointer`, as one state for DCP and back.

Modules and optimizers go under FQNs, so that DDP, FSDP2 and plain ones all reshard. Everything else
(schedulers, samplers, plain values) is packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from dcp_checkfreq.errors import CheckFreqError, UnsupportedState
from dcp_checkfreq.runtime.gc_paused import collector_held
from dcp_checkfreq.state.fsdp1_part import Fsdp1ModulePart, Fsdp1OptimizerPart, is_fsdp1
from dcp_checkfreq.state.held_optimizers import initialised_in
from dcp_checkfreq.state.module_part import ModulePart
from dcp_checkfreq.state.optimizer_part import OptimizerPart
from dcp_checkfreq.state.part import Part
from dcp_checkfreq.state.per_rank import PerRank as PerRank
from dcp_checkfreq.state.per_rank import has_state_of_rank
from dcp_checkfreq.state.prepared import check_prepared
from dcp_checkfreq.state.restoration import Restoration, Selection
from dcp_checkfreq.state.storable import check_leaves
from dcp_checkfreq.state.value_part import ValuePart


class AppState:
    """The registered parts of a job.

    Args:
        parts: name to module, optimizer, `Stateful`, `PerRank` or plain value. Restored plain
            values are put into this mapping.
        rank: of this process.
    """

    def __init__(self, parts: MutableMapping[str, Any], rank: int) -> None:
        if not parts:
            raise ValueError("the state is empty: there would be nothing to save")
        names: list[object] = list(parts)
        for name in names:
            if not isinstance(name, str) or not name or "." in name or "/" in name:
                raise UnsupportedState(
                    str(name), "part name", "names are non-empty text without dots or slashes"
                )
        self._parts = parts
        self._rank = rank
        self._order = list(parts)
        self._known: dict[str, tuple[object, Part]] = {}
        for name, part in parts.items():
            if isinstance(part, torch.optim.Optimizer):
                self._part(name)  # raises now if it has no names

    @property
    def names(self) -> list[str]:
        """Names of the parts, in the order in which they were registered."""
        return list(self._parts)

    def follow(self, names: Iterable[str]) -> None:
        """Ask parts in the order of these names; those that are not among them come after.

        What user code says to other ranks is then said at the same place on all of them.
        """
        first = [name for name in names if name in self._parts]
        self._order = first + [name for name in self._parts if name not in set(first)]

    def _part(self, name: str) -> Part:
        part = self._parts[name]
        known = self._known.get(name)
        if known is None or known[0] is not part:
            known = self._known[name] = (part, self._made(name, part))
        return known[1]

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Return the parts by name, in the agreed order."""
        return ((name, self._part(name)) for name in self._names())

    def _made(self, name: str, part: Any) -> Part:
        if isinstance(part, torch.nn.Module):
            return Fsdp1ModulePart(name, part) if is_fsdp1(part) else ModulePart(name, part)
        if isinstance(part, torch.optim.Optimizer):
            modules = {
                key: one for key, one in self._parts.items() if isinstance(one, torch.nn.Module)
            }
            kind = Fsdp1OptimizerPart if any(map(is_fsdp1, modules.values())) else OptimizerPart
            return kind(name, part, modules)
        check_prepared(name, part.value if type(part) is PerRank else part)
        return ValuePart(name, self._parts, self._rank)

    def _captured(self, name: str) -> dict[str, Any]:
        """Return the state of a part, by the keys that DCP knows it by."""
        part = self._part(name)
        return part.capture_by_key() if isinstance(part, ValuePart) else {name: part.capture()}

    def capture(self) -> dict[str, Any]:
        """Return the state dict to save. Tensors are the live ones; each part is asked once."""
        captured: dict[str, Any] = {}
        with collector_held():
            for name in self._names():
                captured |= self._captured(name)
        return captured

    def _names(self) -> Iterable[str]:
        """Return all names in the agreed order, those that were added since at the end."""
        order = [name for name in self._order if name in self._parts]
        return order + [name for name in self._parts if name not in set(order)]

    @property
    def no_replicas(self) -> dict[str, str]:
        """Flat keys of what was captured last and may differ between ranks: rank 0's is kept.

        By key is said of which value it is a part.
        """
        return {
            f"{name}.{key}": f"{name}.{value}"
            for name in self._parts
            for key, value in getattr(self._part(name), "no_replicas", {}).items()
        }

    def check(self, *, allow_pickle: bool, names: Sequence[str] | None = None) -> None:
        """Capture once, and make sure that all of it could be saved and restored.

        Args:
            allow_pickle: values that need code to unpickle are right.
            names: of parts to look at; default: all.

        Raises:
            UnsupportedState: something could not.
        """
        for name in self._names():
            if names is not None and name not in names:
                continue
            part = self._part(name)
            try:
                captured = self._captured(name)
            except CheckFreqError:
                raise
            except Exception as error:  # what user code raises comes out as it is
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note(f"in the state of the registered part {name!r}")
                raise
            for key, state in captured.items():
                check_leaves(
                    key,
                    state,
                    allow_pickle=allow_pickle,
                    kinds=part.kinds() if isinstance(part, OptimizerPart) else None,
                    has_live=isinstance(part, ModulePart),
                )

    def optimizer_names(self) -> list[str]:
        """Return the names of the registered optimizers."""
        return [
            name for name, part in self._parts.items() if isinstance(part, torch.optim.Optimizer)
        ]

    def optimizers_without_state(self) -> tuple[str, ...]:
        """Return the names of those that have made no state, or not yet."""
        return tuple(
            name
            for name in self.optimizer_names()
            if not any(one.state for one in initialised_in(self._parts[name]))
        )

    def group_names(self) -> dict[str, list[list[str]]]:
        """Return the FQNs in each group of each optimizer."""
        found = {name: self._part(name) for name in self.optimizer_names()}
        return {
            name: part.group_names()
            for name, part in found.items()
            if isinstance(part, OptimizerPart)
        }

    def share_groups(self, of_all_ranks: Mapping[str, list[list[str]]]) -> None:
        """Take what `group_names` returns on all ranks together."""
        for name, groups in of_all_ranks.items():
            part = self._part(name) if name in self._parts else None
            if isinstance(part, OptimizerPart):
                part.share_groups(groups)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the registered optimizers."""
        return [part for part in self._parts.values() if isinstance(part, torch.optim.Optimizer)]

    def gpu(self) -> torch.device | None:
        """Return the CUDA device that this rank trains on, or None."""
        for part in self._parts.values():
            if isinstance(part, torch.nn.Module):
                for parameter in part.parameters():
                    if parameter.is_cuda:
                        return parameter.device
        return None

    def gpu_memory_bytes(self) -> tuple[int, int]:
        """Return the GPU memory in use, caches included, and all there is (M, Mmax)."""
        device = self.gpu()
        if device is None:
            return 0, 0
        free, total = torch.cuda.mem_get_info(device)
        return total - free, total

    def describe(self) -> list[object]:
        """Return plain values that say what saving this state costs, without its content.

        They differ between jobs whose saves cost differently: names, shapes, dtypes, devices and
        shardings of all parameters and buffers, kinds and switches of optimizers, kinds of others.
        """
        return [[name, *self._part(name).describe()] for name in self._parts]

    def restoration(self, metadata: Metadata, where: str, selection: Selection) -> Restoration:
        """Return the restoration of a checkpoint: what to load, and the way into the live parts.

        Raises:
            StateMismatch: the checkpoint and the parts do not fit. Nothing was touched.
        """
        chosen = [name for name in self._parts if selection.only is None or name in selection.only]
        selection.check(self._parts)
        return Restoration(
            {name: self._part(name) for name in chosen},
            frozenset(name for name in chosen if has_state_of_rank(self._parts[name])),
            metadata,
            where,
            selection,
        )
