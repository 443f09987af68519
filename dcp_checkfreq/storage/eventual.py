"""Looks again for what another machine has written: shared file systems may show it late."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.storage.tier import Tier

T = TypeVar("T")

_FIRST_WAIT_S = 0.05
_LOOKS = 6  # about 1.5 s in all


def look_again(tier: Tier, look: Callable[[], T], clock: Clock) -> T:
    """Return ``look()``; while it finds nothing, wait and try again, six times in all.

    Only for a name in ``tier`` that is known to exist, because another rank has said so.

    Raises:
        FileNotFoundError: still not there.
    """
    wait_s = _FIRST_WAIT_S
    for _ in range(_LOOKS - 1):
        try:
            return look()
        except FileNotFoundError:
            clock.sleep(wait_s)
            wait_s *= 2
            tier.list()  # makes NFS ask its server instead of its cache
    return look()
