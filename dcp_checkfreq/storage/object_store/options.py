"""Options of a file system, kept apart: what may be shown and pickled, and what is secret.

What is not known to be harmless counts as a secret. Secrets stay in the memory of this process
(and of children that were forked from it): a pickle carries only the name under which they are
kept here.
"""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections.abc import Mapping
from typing import Any

_HARMLESS = {
    "account_name",
    "anon",
    "cache_regions",
    "default_acl",
    "default_block_size",
    "endpoint_url",
    "location",
    "max_concurrency",
    "profile",
    "project",
    "requester_pays",
    "timeout",
    "use_ssl",
    "version_aware",
}
_HARMLESS_OF_CLIENT = {"endpoint_url", "region_name", "use_ssl", "verify", "api_version"}
_HARMLESS_OF_CONFIG = {
    "connect_timeout",
    "max_pool_connections",
    "read_timeout",
    "retries",
    "s3",
    "signature_version",
}
_NESTED = {"client_kwargs": _HARMLESS_OF_CLIENT, "config_kwargs": _HARMLESS_OF_CONFIG}

_kept: dict[str, dict[str, Any]] = {}
_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """Replace a lock that a thread of the parent, which is not here, may hold for ever."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Options:
    """What a file system is made with. Shown and pickled without its secrets."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = _copy(given)
        self._shown = _shown(self._given)
        self._name = ""
        self.lost_secrets = False
        if self._shown != self._given:
            self._name = _keep(self._given)

    def __repr__(self) -> str:
        hidden = sorted(self._given.keys() - self._shown.keys())
        return f"Options({self._shown!r}, hidden={hidden})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._shown, self._name)

    def all(self) -> dict[str, Any]:
        """Return a copy of everything, secrets included."""
        return _copy(self._given)

    @property
    def digest(self) -> str:
        """A name that equal options share; tells nothing about them."""
        return hashlib.sha256(repr(sorted(self._given.items())).encode()).hexdigest()


def _restore(shown: dict[str, Any], name: str) -> Options:
    with _lock:
        given = _kept.get(name)
    options = Options(shown if given is None else given)
    options.lost_secrets = bool(name) and given is None
    return options


def _keep(given: dict[str, Any]) -> str:
    with _lock:
        for name, kept in _kept.items():
            if kept == given:
                return name
        name = uuid.uuid4().hex
        _kept[name] = given
        return name


def _shown(given: dict[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in given.items() if key in _HARMLESS and _is_plain(value)}
    for key, harmless in _NESTED.items():
        inner = given.get(key)
        if isinstance(inner, dict):
            shown[key] = {
                name: value
                for name, value in inner.items()
                if name in harmless and _is_plain(value)
            }
    return shown


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return "@" not in value  # https://user:password@proxy
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    return value is None or isinstance(value, bool | int | float)


def _copy(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in given.items()
    }
