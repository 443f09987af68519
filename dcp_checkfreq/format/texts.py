"""Values of a checkpoint in messages: short, printable, whatever they are. Pure."""

from __future__ import annotations

_LONGEST = 120


def shown(value: object) -> str:
    """Return a value as a message may show it: its type where its text could be long."""
    if isinstance(value, str):
        return clipped(repr(value[: _LONGEST + 1]))
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 128 else f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)) and len(value) <= 8 and all(type(v) is int for v in value):
        return f"[{', '.join(map(shown, value))}]"
    return f"a {type(value).__name__}"


def clipped(text: str, longest: int = _LONGEST) -> str:
    """Return a text, or the beginning of a long one."""
    return text if len(text) <= longest else text[:longest] + "..."


def name_of(kind: type) -> str:
    """Return module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def plain(text: str) -> str:
    """Return a text that files and messages can hold: halves of surrogate pairs are spelled out.

    Names of files that are not UTF-8 have them (`os.fsdecode`).
    """
    return text.encode(errors="backslashreplace").decode()


def is_text(value: object) -> bool:
    """Tell whether a value is a text that files, logs and messages can hold."""
    if not isinstance(value, str):
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
