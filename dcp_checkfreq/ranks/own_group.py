"""The process groups that a job of ours makes for itself, and how their end is heard of."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import weakref

import torch.distributed as dist

from dcp_checkfreq.errors import SaveFailed
from dcp_checkfreq.runtime.process_end import wait_for_all

_HERALDS = "checkfreq"  # the name of their backend

GROUP_IS_GONE = (
    "the process group with which the Checkpointer was made was destroyed. Close the Checkpointer, "
    "or leave its with block, before destroy_process_group(), and make a new one after "
    "init_process_group()"
)
_OF_THE_PARENT = (
    "a forked child has the connections of its parent's process group, and would take the answers "
    "of other ranks from it. Fork before init_process_group(), start the child in another way "
    "(multiprocessing's 'spawn'), or let the parent save"
)


def world() -> dist.ProcessGroup | None:
    """Return the process group of this job."""
    is_there = dist.is_available() and dist.is_initialized()
    return dist.group.WORLD if is_there else None


class KnownGroup:
    """Knows a process group again. It is not kept alive: that would keep its connections open."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None else weakref.ref(group)

    def is_it(self, group: dist.ProcessGroup | None) -> bool:
        """Tell whether this is the group."""
        return group is not None and self._group is not None and self._group() is group


_inherited = KnownGroup(None)


def _in_child() -> None:
    global _inherited
    _inherited = KnownGroup(world())


os.register_at_fork(after_in_child=_in_child)


def refuse_parents_group(group: dist.ProcessGroup | None) -> None:
    """Refuse to work with a group that a fork has brought along.

    Raises:
        SaveFailed: this is a forked child, and the group is its parent's.
    """
    if group is not None and _inherited.is_it(group):
        raise SaveFailed(f"process {os.getpid()}", _OF_THE_PARENT)


class OwnGroup:
    """A gloo group for nothing else, and one that carries nothing and hears of the end of both.

    Args:
        timeout_s: how long a rank waits for the others.
    """

    def __init__(self, timeout_s: float) -> None:
        timeout = datetime.timedelta(seconds=timeout_s)
        self._herald: dist.ProcessGroup | None = None
        self.group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)
        try:
            _register_heralds()
            self._herald = dist.new_group(backend=_HERALDS, timeout=timeout)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Close its connections, by which the other ranks hear of it. May be called twice."""
        groups = self.group, self._herald
        self.group = self._herald = None
        if groups[1] is not None:
            groups[1].is_armed = False  # type: ignore[attr-defined]
        for group in groups:
            if group is not None and dist.is_initialized():
                with contextlib.suppress(ValueError, RuntimeError):  # gone with the default group
                    dist.destroy_process_group(group)


@functools.cache
def _register_heralds() -> None:
    """Make known to torch a kind of group that carries nothing, and hears of its end.

    `destroy_process_group` calls `shutdown` of all groups before it takes anything apart. Scripts
    end with that call, torch tells nobody of it, and a save needs its group to the end.
    """

    class Herald(dist.ProcessGroup):  # here, as there are builds of torch without any groups
        is_armed = True

        def getBackendName(self) -> str:
            return _HERALDS

        def shutdown(self) -> None:
            if self.is_armed:
                wait_for_all()

    def make(_store: object, rank: int, world_size: int, _timeout: object) -> Herald:
        return Herald(rank, world_size)  # type: ignore[call-arg]  # not in the stubs

    dist.Backend.register_backend(_HERALDS, make, devices=["cpu"])
