"""Who is at work in a root: a small file of rank 0, so that no other run cleans up there.

A lease never decides what is whole or newest; it only holds back deleting.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import socket
from dataclasses import asdict, dataclass

from dcp_checkfreq.format.names import LEASE, RUN_FOLDER, new_attempt
from dcp_checkfreq.format.texts import is_text
from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.storage.tier import OddFile, Tier, read_small

_log = logging.getLogger(__name__)

_LONGEST_BYTES = 16 << 10
_LARGEST_PID = 1 << 31

TTL_S = 1800.0  # a run that has not saved for this long no longer holds others back


@dataclass(frozen=True, slots=True)
class RunLease:
    """The content of the lease file."""

    run_id: str
    host: str
    pid: int
    renewed_s: float  # seconds since the epoch by the holder's clock
    # Boot and start time of the holder: a restarted container has the same pid again.
    started: str = ""


def is_live(
    lease: RunLease | None, *, run_id: str, host: str, pid_alive: bool, now_s: float
) -> bool:
    """Tell whether another run may still be at work. Pure.

    Args:
        lease: what the file says; None if there is none.
        run_id: of the run that asks; its own lease does not count.
        host: where the run that asks is.
        pid_alive: whether the holder's pid exists on this host; only looked at if hosts match.
        now_s: seconds since the epoch.
    """
    if lease is None or lease.run_id == run_id:
        return False
    if lease.host == host:
        return pid_alive
    return abs(now_s - lease.renewed_s) < TTL_S


def parse_lease(content: bytes) -> RunLease | None:
    """Return the lease that a file holds; None for anything that is none. Pure."""
    try:
        fields = json.loads(content)
        lease = RunLease(**fields)
        renewed_s = float(lease.renewed_s)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return None
    texts = (lease.run_id, lease.host, lease.started)
    if not all(is_text(text) for text in texts) or type(lease.pid) is not int:
        return None
    if not (0 < lease.pid <= _LARGEST_PID and math.isfinite(renewed_s)):
        return None
    return dataclasses.replace(lease, renewed_s=renewed_s)


class LeaseFile:
    """The lease of one run on one root. Used by rank 0 only."""

    def __init__(self, root: Tier, run_id: str, clock: Clock) -> None:
        self._tier = root.child(RUN_FOLDER)
        self._run_id = run_id
        self._own = {run_id}  # every id that this process has had here
        self._clock = clock

    def begin(self, run_id: str) -> str | None:
        """Go on under another id, from the next `renew` on; return whose lease is there.

        Live or not: a run that seems dead may wake up. None: nobody's, or this process' own.
        """
        self._run_id = run_id
        self._own.add(run_id)
        try:
            lease = self._read()
        except OSError as error:
            _log.warning("%s: the lease cannot be read: %s", self._tier.location, error)
            return None
        return None if lease is None or lease.run_id in self._own else lease.run_id

    def held_by_other(self) -> RunLease | None:
        """Return the lease of another run that may still be at work."""
        lease = self._read()
        if lease is None or lease.run_id in self._own:
            return None
        alive = _is_alive(lease)
        live = is_live(
            lease,
            run_id=self._run_id,
            host=socket.gethostname(),
            pid_alive=alive,
            now_s=self._clock.wall_s(),
        )
        return lease if live else None

    def renew(self) -> None:
        """Say that this run is at work."""
        lease = RunLease(
            self._run_id,
            socket.gethostname(),
            os.getpid(),
            self._clock.wall_s(),
            _started(os.getpid()),
        )
        self._tier.make()
        self._tier.replace(
            LEASE, json.dumps(asdict(lease)).encode(), scratch=f"{LEASE}.{new_attempt()}.tmp"
        )

    def renew_quietly(self) -> None:
        """`renew`, but a storage that fails now is left to whatever is written next."""
        try:
            self.renew()
        except OSError as error:
            _log.warning("%s: the lease was not renewed: %s", self._tier.location, error)

    def release(self) -> None:
        """Say that this run is done, unless another one has taken over.

        Where that fails the lease stays, and holds nobody back once this process has ended.
        """
        try:
            lease = self._read()
            if lease is not None and lease.run_id in self._own:
                self._tier.delete(LEASE)
        except OSError as error:
            _log.warning("%s: the lease stays: %s", self._tier.location, error)

    def _read(self) -> RunLease | None:
        try:
            content = read_small(self._tier, LEASE, at_most_bytes=_LONGEST_BYTES)
        except (FileNotFoundError, IsADirectoryError, OddFile):
            return None
        return parse_lease(content)


def _is_alive(lease: RunLease) -> bool:
    if lease.started:
        return _started(lease.pid) == lease.started
    return lease.pid != os.getpid() and os.path.exists(f"/proc/{lease.pid}")


def _started(pid: int) -> str:
    """Return what tells this process from others with the same pid; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        with open(f"/proc/{int(pid)}/stat") as file:
            ticks = file.read().rpartition(")")[2].split()[19]
    except (OSError, ValueError, IndexError):
        return ""
    return f"{boot} {ticks}"
