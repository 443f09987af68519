"""What a restarted job begins with instead of profiling again: to text and back. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from dcp_checkfreq.policy.costs import Costs
from dcp_checkfreq.policy.interval import MAX_INTERVAL_STEPS, Mode, check_mtbf

FORMAT_VERSION = 2  # 2: call_s, mtbf_s, confirmed
LONGEST_TEXT = 64 * 1024  # a longer one is not ours

_BYTES = ("state_bytes", "gpu_used_bytes", "gpu_total_bytes")
_HEX = set("0123456789abcdef")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """Costs of a job and the interval that they led to.

    Attributes:
        fingerprint: of the job, from `fingerprint`. For another job it is of no use.
        costs: of the worst rank, as last seen. ``iteration_s`` is the baseline.
        mode: how snapshots were copied.
        interval_steps: k then.
        max_overhead: p then.
        mtbf_s: mean time between failures then, or None.
        confirmed: k has stood up to later saves; else it is from the first save alone.
    """

    fingerprint: str
    costs: Costs
    mode: Mode
    interval_steps: int
    max_overhead: float
    mtbf_s: float | None
    confirmed: bool

    def interval_under(self, max_overhead: float, mtbf_s: float | None) -> int | None:
        """Return k for this p and failure rate; None if it is to be taken from the costs.

        So it is if k was found under others, or is not confirmed.
        """
        same = (self.max_overhead, self.mtbf_s) == (max_overhead, mtbf_s)
        return self.interval_steps if same and self.confirmed else None


def fingerprint(parts: Mapping[str, object] | Sequence[object]) -> str:
    """Return a digest of plain values: the same for equal ones, on every machine and Python.

    ``parts`` says all that costs depend on: structure and bytes of the state, world size, device,
    storage URL. The order of a mapping does not matter, that of a sequence does. Tuples and lists
    are alike.

    Returns:
        64 hexadecimal digits.

    Raises:
        TypeError: a value is not None, bool, int, float, str, a sequence or a mapping of such with
            str keys.
        ValueError: a float is NaN or infinite.
    """
    text = json.dumps(_plain(parts), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def encode(profile: StoredProfile) -> str:
    """Return a profile as JSON text, which `decode` turns back into an equal one.

    Raises:
        ValueError: it holds a value that `decode` would refuse.
    """
    body = asdict(profile) | {"mode": profile.mode.value, "version": FORMAT_VERSION}
    _profile_of(body)
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
    try:
        return _decoded(body)
    except (ArithmeticError, RecursionError) as error:  # numbers beyond floats, lists in lists
        raise ValueError(f"profile: not one of ours: {error}") from error


def _decoded(body: object) -> StoredProfile:
    if not isinstance(body, dict):
        raise ValueError("profile: not a JSON object")
    version = body.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(f"profile: version {_short(version)}, this program reads {FORMAT_VERSION}")
    digest = body.pop("digest", None)
    if digest != _digest(body):
        raise ValueError("profile: the digest does not fit, it was damaged or edited")
    return _profile_of(body)


def _digest(body: Mapping[str, object]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _profile_of(body: Mapping[str, object]) -> StoredProfile:
    names = {field.name for field in fields(StoredProfile)}
    _expect_keys(body, names | {"version"}, "profile")
    costs = body["costs"]
    if not isinstance(costs, dict):
        raise ValueError("profile: costs is not an object")
    _expect_keys(costs, {field.name for field in fields(Costs)}, "costs")
    mark = body["fingerprint"]
    if not (isinstance(mark, str) and len(mark) == 64 and set(mark) <= _HEX):
        raise ValueError(f"profile: {_short(mark)} is no fingerprint")
    if body["mode"] not in [mode.value for mode in Mode]:
        raise ValueError(f"profile: mode {_short(body['mode'])}")
    max_overhead = _seconds(body, "max_overhead")
    if not 0 < max_overhead <= 1:
        raise ValueError(f"profile: max_overhead {max_overhead} is outside (0, 1]")
    mtbf_s = None if body["mtbf_s"] is None else _seconds(body, "mtbf_s")
    if mtbf_s is not None:
        check_mtbf(mtbf_s)
    k = _whole(body, "interval_steps")
    if not 1 <= k <= MAX_INTERVAL_STEPS:
        raise ValueError(f"profile: interval_steps {k} is outside [1, {MAX_INTERVAL_STEPS}]")
    confirmed = body["confirmed"]
    if not isinstance(confirmed, bool):
        raise ValueError(f"profile: confirmed is {_short(confirmed)}, not true or false")
    mode = Mode(body["mode"])
    on_gpu = costs["snapshot_gpu_s"]
    if mode is Mode.GPU and on_gpu is None:
        raise ValueError("profile: mode gpu without snapshot_gpu_s")
    return StoredProfile(
        fingerprint=mark,
        costs=Costs(
            iteration_s=_seconds(costs, "iteration_s"),
            update_s=_seconds(costs, "update_s"),
            snapshot_gpu_s=None if on_gpu is None else _seconds(costs, "snapshot_gpu_s"),
            snapshot_cpu_s=_seconds(costs, "snapshot_cpu_s"),
            persist_s=_seconds(costs, "persist_s"),
            call_s=_seconds(costs, "call_s"),
            **{name: _whole(costs, name) for name in _BYTES},
        ),
        mode=mode,
        interval_steps=k,
        max_overhead=max_overhead,
        mtbf_s=mtbf_s,
        confirmed=confirmed,
    )


def _expect_keys(body: Mapping[str, object], wanted: set[str], what: str) -> None:
    if set(body) != wanted:
        odd = sorted(set(body) ^ wanted)
        raise ValueError(f"{what}: missing or unknown: {', '.join(map(_short, odd[:5]))}")


def _seconds(body: Mapping[str, object], name: str) -> float:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"profile: {name} is {_short(value)}, not a number")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"profile: {name} is {_short(value)}, not a finite number of at least 0")
    return float(value)


def _whole(body: Mapping[str, object], name: str) -> int:
    value = body[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"profile: {name} is {_short(value)}, not a whole number of at least 0")
    return value


def _short(value: object) -> str:
    return repr(value)[:80]


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a str")
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [_plain(inner) for inner in value]
    raise TypeError(f"{value!r} is not a plain value")
