"""Calls of an fsspec file system: each is tried again for a while, and its errors are `OSError`.

One file system object per process and set of options, made on first use and never shared with the
caller's code: no listing cache, and sockets and event loops never cross a fork.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from dcp_checkfreq.errors import BadLocation
from dcp_checkfreq.storage.object_store.errors import (
    as_os_error,
    is_expired,
    is_passing,
    lacks_a_reason,
)
from dcp_checkfreq.storage.object_store.options import Options

_log = logging.getLogger(__name__)

T = TypeVar("T")
Calls = TypeVar("Calls", bound="FsspecCalls")

RETRY_FOR_S = 180.0  # from the first try of a call; also what each part of an upload gets
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 15.0

_lock = threading.Lock()
_after_fork: list[object] = []  # closing what a parent opened would touch the parent's sockets


class FsspecCalls:
    """A file system of this process, and how it is called."""

    def __init__(
        self, protocol: str, options: Options, *, retry_for_s: float = RETRY_FOR_S
    ) -> None:
        self.protocol = protocol
        self.options = options
        self.retry_for_s = retry_for_s
        self._fs: Any = None
        self._pid = 0
        self.make_locks()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.protocol!r}, {self.options!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return shared, (type(self), self.protocol, self.options, self.retry_for_s)

    def make_locks(self) -> None:
        """Make the locks of this object, also anew after a fork."""

    # --- the file system object of this process ---

    @property
    def fs(self) -> Any:
        """The file system; made anew in a forked child."""
        with _lock:
            if self._pid != os.getpid():
                self._forget()
            if self._fs is None:
                self._fs = self._make()
                self._pid = os.getpid()
            return self._fs

    def _forget(self) -> None:
        if self._fs is not None and self._pid != os.getpid():
            _after_fork.append(self._fs)
        self._fs = None

    def _make(self) -> Any:
        import fsspec

        try:
            kind = fsspec.get_filesystem_class(self.protocol)
        except (ImportError, ValueError) as error:
            raise BadLocation(f"{self.protocol}://", str(error)) from error
        return kind(**{**self.options.all(), **self._own_options()})

    def _own_options(self) -> dict[str, Any]:
        return {"use_listings_cache": False, "skip_instance_cache": True}

    def renew(self) -> None:
        """Ask for credentials again at the next call."""
        with _lock:
            self._fs = None

    def path_of(self, url: str) -> str:
        """Return what the file system itself calls a URL."""
        return str(self.fs._strip_protocol(url))

    def call(self, where: str, work: Callable[[Any], T], *, for_s: float | None = None) -> T:
        """Run ``work(fs)`` until it works, for a bounded time; errors as `as_os_error` has them.

        Throttling, 5xx and broken lines are tried again with growing, random waits. Expired
        credentials are asked for anew, once. Everything else is raised at once.
        """
        import tenacity

        renewed = False

        def again(state: tenacity.RetryCallState) -> bool:
            nonlocal renewed
            error = state.outcome.exception() if state.outcome else None
            if error is None:
                return False
            if is_expired(error) and not renewed:
                renewed = True
                self.renew()
                return True
            return is_passing(error)

        def tell(state: tenacity.RetryCallState) -> None:
            if state.attempt_number == 1 and state.outcome:
                error = state.outcome.exception()
                _log.warning("%s: %s; trying again", where, as_os_error(error, where))  # type: ignore[arg-type]

        retrying = tenacity.Retrying(
            retry=again,
            wait=tenacity.wait_random_exponential(_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
            stop=tenacity.stop_after_delay(min(self.retry_for_s, for_s or self.retry_for_s)),
            before_sleep=tell,
            reraise=True,
        )

        def attempt() -> T:
            fs = self.fs
            try:
                return work(fs)
            except Exception as error:
                if not lacks_a_reason(error):
                    raise
                unclear = error
            raise self._reason(fs, where) or unclear

        try:
            return retrying(attempt)
        except Exception as error:
            translated = as_os_error(error, where, lost_secrets=self.options.lost_secrets)
            if translated is error:
                raise
            raise translated from error

    def _reason(self, fs: Any, path: str) -> Exception | None:
        """Return the error of a like request whose answer says why it is refused, if there is."""
        return None


def _after_fork_in_child() -> None:
    """Replace locks that a thread of the parent, which is not here, may hold for ever."""
    global _lock
    _lock = threading.Lock()
    for calls in _shared.values():
        calls.make_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

_shared: dict[tuple[type[FsspecCalls], str, str, float], FsspecCalls] = {}


def shared(kind: type[Calls], protocol: str, options: Options, retry_for_s: float) -> Calls:
    """Return the files that all tiers with these options share in this process."""
    key = (kind, protocol, options.digest, retry_for_s)
    with _lock:
        if key not in _shared:
            _shared[key] = kind(protocol, options, retry_for_s=retry_for_s)
        found = _shared[key]
    assert isinstance(found, kind)
    return found
