"""What each public option may be: one rule per option, checked before anything else is done. Pure.

A new option needs a rule here: `tests/test_options.py` compares the tables with the signatures.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must be, in words, and the tests of its type and of the value itself."""

    must_be: str
    is_type: Callable[[object], bool]
    is_right: Callable[[object], bool] = lambda _: True

    def or_none(self) -> Rule:
        """Return the rule that admits None as well."""
        return Rule(
            f"{self.must_be}, or None",
            lambda value: value is None or self.is_type(value),
            lambda value: value is None or self.is_right(value),
        )


Rules = Mapping[str, Rule]


def check(rules: Rules, given: Mapping[str, object]) -> None:
    """Check options by their rules.

    Args:
        rules: by name of the option; all of them are in ``given``.
        given: values by name, such as ``locals()`` at the start of a function.

    Raises:
        TypeError: an option has a wrong type. The text names it, as that of every error here.
        ValueError: an option has the right type and makes no sense.
    """
    for name, rule in rules.items():
        value = given[name]
        if not rule.is_type(value):
            raise TypeError(
                f"{name} must be {rule.must_be}, got {reprlib.repr(value)} ({type(value).__name__})"
            )
        if not rule.is_right(value):
            raise ValueError(f"{name} must be {rule.must_be}, got {reprlib.repr(value)}")


# --- kinds of rules ---


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def whole(at_least: int) -> Rule:
    """Whole numbers; no bools, which Python counts among them, and no floats."""
    return Rule(
        f"a whole number of at least {at_least}",
        _is_whole,
        lambda value: value >= at_least,  # type: ignore[operator]
    )


def number(*, above: float = 0, at_most: float = math.inf, unit: str = "") -> Rule:
    """Finite numbers in ``(above, at_most]``."""
    span = f"above {above:g}" if math.isinf(at_most) else f"in ({above:g}, {at_most:g}]"
    return Rule(
        f"a number{unit} {span}",
        lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool),
        lambda value: math.isfinite(value) and above < value <= at_most,  # type: ignore[arg-type, operator]
    )


def one_of(*names: str) -> Rule:
    """One of a few words."""
    return Rule(
        ", ".join(repr(name) for name in names[:-1]) + f" or {names[-1]!r}",
        lambda value: isinstance(value, str),
        lambda value: value in names,
    )


def having(must_be: str, *methods: str) -> Rule:
    """Objects that have these attributes; None of them is looked at any further here."""
    return Rule(must_be, lambda value: all(hasattr(value, method) for method in methods))


def _is_folder(value: object) -> bool:
    return isinstance(value, str) or hasattr(value, "__fspath__") or hasattr(value, "write_shard")


def _are_signals(value: object) -> bool:
    assert isinstance(value, Iterable)
    # A generator could be looked at only once.
    # SIGKILL (9) and SIGSTOP (19) reach nobody.
    return isinstance(value, Iterator) or all(
        _is_whole(one) and 0 < one < 65 and one not in (9, 19) for one in value
    )


def _are_optimizers(value: object) -> bool:
    assert isinstance(value, Iterable)
    return isinstance(value, Iterator) or all(hasattr(one, "param_groups") for one in value)


FLAG = Rule("True or False", lambda value: isinstance(value, bool))
ANYTHING = Rule("anything", lambda _: True)  # looked at where it is used, which names it
FOLDER = Rule("a path or a Tier", _is_folder)
OPTIONS = Rule(
    "a mapping of names to values",
    lambda value: isinstance(value, Mapping),
    lambda value: all(isinstance(name, str) for name in value),  # type: ignore[attr-defined]
)
CLOCK = having("a Clock", "monotonic_s", "wall_s", "sleep")
SIGNALS = Rule(
    "a list of numbers of signals that can be caught",
    lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes),
    _are_signals,
)
OPTIMIZERS = Rule(
    "a list of optimizers",
    lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping),
    _are_optimizers,
)

# --- which option may be what ---

DEPTH = one_of("size", "digest")
_SECONDS = number(at_most=1e9, unit=" of seconds")

_STAGING: Rules = {
    "staging_dir": FOLDER.or_none(),
    "storage_options": OPTIONS.or_none(),
}

CHECKPOINTER: Rules = {
    "root": ANYTHING,  # see `open_tier`
    "state": Rule("a dict", lambda value: isinstance(value, MutableMapping)),  # see `AppState`
    "max_overhead": number(at_most=1),
    "every": whole(1).or_none(),
    "steps_per_epoch": whole(1).or_none(),
    "mtbf_s": _SECONDS.or_none(),
    "snapshot": one_of("auto", "cpu", "gpu", "blocking"),
    "preempt_signals": SIGNALS,
    "grace_s": _SECONDS,
    "keep_last": whole(1),
    "keep_every": whole(1).or_none(),
    "keep_epochs": FLAG,
    "on_error": one_of("log", "raise"),
    "max_failures": whole(1),
    "threads": whole(1),
    "allow_pickle": FLAG,
    "share_reads": FLAG,
    **_STAGING,
    "staging_bytes": whole(1).or_none(),
    "timeout_s": _SECONDS,
    "clock": CLOCK.or_none(),
}
# Those of them that must be the same on all ranks, so that they decide alike.
ALIKE = (
    *("every", "max_overhead", "mtbf_s", "steps_per_epoch", "snapshot"),
    *("on_error", "max_failures", "share_reads"),
)

_NAMES = Rule(
    "a list of names",
    lambda value: isinstance(value, Collection) and not isinstance(value, str | bytes),
    lambda value: all(isinstance(name, str) for name in value),  # type: ignore[attr-defined]
)
_RENAME = Rule(
    "a mapping of names here to names in the checkpoint",
    lambda value: isinstance(value, Mapping),
    lambda value: all(isinstance(one, str) for pair in value.items() for one in pair),  # type: ignore[attr-defined]
)

RESTORE: Rules = {
    "step": whole(0).or_none(),
    "depth": DEPTH,
    "fresh_start": FLAG,
    "only": _NAMES.or_none(),
    "optional": _NAMES,
    "rename": _RENAME.or_none(),
    "strict": FLAG,
}
LOAD_PART: Rules = {
    "path": ANYTHING,  # see `open_tier`
    "name": Rule("the name of a part", lambda value: isinstance(value, str)),
    "into": having("a module or an object with state_dict", "state_dict", "load_state_dict"),
    "strict": FLAG,
    "rename": _RENAME.or_none(),
    "allow_pickle": FLAG,
    "threads": whole(1),
    "storage_options": OPTIONS.or_none(),
}


def _renames(pair: tuple[object, object]) -> bool:
    name, new = pair
    return isinstance(name, str) and (new is None or isinstance(new, str))


_TEXT = Rule("a text", lambda value: isinstance(value, str))
_PATH = Rule("a path", lambda value: isinstance(value, str) or hasattr(value, "__fspath__"))
_RENAME_EACH = Rule(
    "a mapping of names to names, or a function of a name",
    lambda value: isinstance(value, Mapping) or callable(value),
    lambda value: callable(value) or all(map(_renames, value.items())),  # type: ignore[attr-defined]
).or_none()
EXPORT_SAFETENSORS: Rules = {
    "path": ANYTHING,  # see `open_tier`
    "to": FOLDER,
    "prefix": _TEXT,
    "rename": _RENAME_EACH,
    "dtype": having("a floating-point dtype", "is_floating_point", "itemsize").or_none(),
    "max_file_bytes": whole(1),
    "threads": whole(1),
    "storage_options": OPTIONS.or_none(),
}
EXPORT_TORCH_SAVE: Rules = {
    "path": ANYTHING,
    "to": _PATH,
    "prefix": _TEXT,
    "rename": _RENAME_EACH,
    "allow_pickle": FLAG,
    "storage_options": OPTIONS.or_none(),
}
IMPORT_FILES: Rules = {
    "source": _PATH,
    "to": FOLDER,
    "part": _TEXT,
    "rename": _RENAME_EACH,
    "allow_pickle": FLAG,
    "threads": whole(1),
    "storage_options": OPTIONS.or_none(),
}
OPEN_CHECKPOINT: Rules = {
    "path": ANYTHING,  # see `open_tier`
    "verify": FLAG,
    "map_files": FLAG,
    "threads": whole(1),
    "storage_options": OPTIONS.or_none(),
}
SAVE: Rules = {"wait": FLAG, "check_replicas": FLAG}
AFTER_STEP: Rules = {"step": whole(0).or_none()}

WRITER: Rules = {
    "path": ANYTHING,  # see `open_tier`
    "overwrite": FLAG,
    "threads": whole(1),
    "direct_io": FLAG.or_none(),
    "allow_pickle": FLAG,
    "overlap": OPTIMIZERS,
    **_STAGING,
    "staging_bytes": whole(1).or_none(),
    "clock": CLOCK.or_none(),
}

READER: Rules = {
    "path": ANYTHING,  # see `open_tier`
    "verify": FLAG,
    "allow_pickle": FLAG,
    "allow_dtype_cast": FLAG,
    "threads": whole(1),
    "known": Rule(
        "what format.metadata.load has returned",
        lambda value: isinstance(value, tuple),
        lambda value: len(value) == 2,  # type: ignore[arg-type]
    ).or_none(),
    "direct_io": FLAG.or_none(),
    "share_reads": FLAG,
    "agreement": having("Ranks", "on_rank_0", "all_gather").or_none(),
    **_STAGING,
}

FIND_LATEST_VALID: Rules = {
    "root": ANYTHING,  # see `open_tier`
    "depth": DEPTH,
    "no_dist": FLAG,
    **_STAGING,
}
