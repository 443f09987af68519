"""What a restarted job begins with instead of profiling again: to text and back. Pure."""

from __future__ import annotations

import enum
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from dcp_checkfreq.policy.costs import Costs
from dcp_checkfreq.policy.interval import MAX_INTERVAL_STEPS, Mode, check_mtbf

FORMAT_VERSION = 2  # 2: call_s, mtbf_s, confirmed
LONGEST_TEXT = 64 * 1024  # a longer one is not ours


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """Costs of a job and the interval that they led to."""

    fingerprint: str  # of the job, from `fingerprint`; for another job it is of no use
    costs: Costs  # of the worst rank, as last seen; ``iteration_s`` is the baseline
    mode: Mode  # how snapshots were copied
    interval_steps: int  # k then
    max_overhead: float  # p then
    mtbf_s: float | None  # mean time between failures then, or None
    confirmed: bool  # k has stood up to later saves; else it is from the first save alone

    def interval_under(self, max_overhead: float, mtbf_s: float | None) -> int | None:
        """Return k for this p and failure rate; None if it is to be taken from the costs.

        So it is if k was found under others, or is not confirmed.
        """
        same = (self.max_overhead, self.mtbf_s) == (max_overhead, mtbf_s)
        return self.interval_steps if same and self.confirmed else None


def fingerprint(parts: Mapping[str, object] | Sequence[object]) -> str:
    """Return a digest of plain values: the same for equal ones, on every machine and Python.

    ``parts`` says all that costs depend on: structure and bytes of the state, world size, device,
    storage URL. The order of a mapping does not matter, that of a sequence does.

    Returns:
        64 hexadecimal digits.

    Raises:
        TypeError: a value is not None, bool, int, float, str, a sequence or a mapping of such with
            str keys.
        ValueError: a float is NaN or infinite.
    """
    return _digest(_plain(parts), allow_nan=False)


def encode(profile: StoredProfile) -> str:
    """Return a profile as JSON text, which `decode` turns back into an equal one.

    Raises:
        ValueError: it holds a value that `decode` would refuse.
    """
    body = asdict(profile) | {"mode": profile.mode.value}
    _profile_of(body)
    body["version"] = FORMAT_VERSION
    return json.dumps(body | {"digest": _digest(body)}, indent=1, sort_keys=True) + "\n"


def decode(text: str) -> StoredProfile:
    """Return the profile that ``text`` holds.

    Raises:
        ValueError: it is damaged, cut short, of another version, or holds a value that cannot have
            been measured; the message says which.
    """
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"profile: {len(text)} characters are too many")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"profile: not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError("profile: not a JSON object")
    digest, version = body.pop("digest", None), body.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(f"profile: version {_short(version)}, this program reads {FORMAT_VERSION}")
    try:
        if digest != _digest(body):
            raise ValueError("profile: the digest does not fit, it was damaged or edited")
        del body["version"]
        return _profile_of(body)
    except (ArithmeticError, RecursionError) as error:  # numbers beyond floats, lists in lists
        raise ValueError(f"profile: not one of ours: {error}") from error


def _digest(plain: object, *, allow_nan: bool = True) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=allow_nan)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _profile_of(body: object) -> StoredProfile:
    found: StoredProfile = _checked(StoredProfile, body, "profile")
    if len(found.fingerprint) != 64 or set(found.fingerprint) - set("0123456789abcdef"):
        raise ValueError(f"profile: {_short(found.fingerprint)} is no fingerprint")
    if not 0 < found.max_overhead <= 1:
        raise ValueError(f"profile: max_overhead {found.max_overhead} is outside (0, 1]")
    if found.mtbf_s is not None:
        check_mtbf(found.mtbf_s)
    if not 1 <= found.interval_steps <= MAX_INTERVAL_STEPS:
        raise ValueError(f"profile: interval_steps {found.interval_steps} is not usable")
    if found.mode is Mode.GPU and found.costs.snapshot_gpu_s is None:
        raise ValueError("profile: mode gpu without snapshot_gpu_s")
    return found


def _checked(kind: Any, value: Any, name: str) -> Any:
    """Return what JSON has of a dataclass, an enum, or a number of at least 0, as that type."""
    if is_dataclass(kind):
        wanted = typing.get_type_hints(kind)
        if not isinstance(value, dict):
            raise ValueError(f"profile: {name} is not an object")
        if odd := sorted(value.keys() ^ wanted):
            raise ValueError(f"{name}: missing or unknown: {', '.join(map(_short, odd[:5]))}")
        return typing.cast("Any", kind)(
            **{key: _checked(wanted[key], value[key], key) for key in wanted}
        )
    if isinstance(kind, types.UnionType):  # or None
        return None if value is None else _checked(typing.get_args(kind)[0], value, name)
    if issubclass(kind, enum.Enum) and value in [one.value for one in kind]:
        return kind(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is kind and (kind in (bool, str) or 0 <= value < math.inf):
        return value
    raise ValueError(f"profile: {name} is {_short(value)}, not a {kind.__name__} that can be")


def _short(value: object) -> str:
    return repr(value)[:80]


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"the key {odd[0]!r} is not a str")
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [_plain(inner) for inner in value]
    raise TypeError(f"{value!r} is not a plain value")
