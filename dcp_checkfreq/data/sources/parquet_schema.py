"""Whether Parquet files can be read as one: columns that differ between them are judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

_SHOWN = 5


def check_schemas(files: Iterable[tuple[str, pa.Schema]], columns: Sequence[str] | None) -> None:
    """Raise ValueError if the rows of the files are not of one kind.

    The first file says what there is. What another one lacks would be nulls, what it has more would
    be left out, and what it has in another type might not fit: silently, or in the middle of
    an epoch.

    Args:
        files: path and schema of each.
        columns: that are read; None: all.
    """
    first: tuple[str, pa.Schema] | None = None
    for path, schema in files:
        if first is None:
            first = (path, schema)
            continue
        wrong = _differences(first[1], schema, columns)
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise ValueError(
                f"{path} has other columns than {first[0]}: {'; '.join(wrong[:_SHOWN])}{more}. "
                "Write the files alike, or pass columns= that all have"
            )


def _differences(first: pa.Schema, other: pa.Schema, columns: Sequence[str] | None) -> list[str]:
    wanted = set(first.names) | set(other.names) if columns is None else set(columns)
    wrong = []
    for name in sorted(wanted):
        if name not in first.names and name not in other.names:
            continue  # of a folder's name, or in none: reported elsewhere
        if name not in other.names:
            wrong.append(f"{name!r} is missing")
        elif name not in first.names:
            wrong.append(f"{name!r} is only here")
        elif not _is_read_as(other.field(name).type, first.field(name).type):
            wrong.append(f"{name!r} is {other.field(name).type}, not {first.field(name).type}")
    return wrong


def _is_read_as(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Tell whether all values of one type are read as the other, as they are."""
    if kind.equals(wanted) or pa.types.is_null(kind):
        return True
    for alike in (
        (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
    ):
        if any(check(kind) for check in alike) and any(check(wanted) for check in alike):
            return True
    if pa.types.is_integer(kind) and pa.types.is_integer(wanted):
        is_signed = pa.types.is_signed_integer
        if is_signed(kind) == is_signed(wanted):
            return bool(kind.bit_width <= wanted.bit_width)
        return bool(is_signed(wanted) and kind.bit_width < wanted.bit_width)
    if pa.types.is_floating(kind) and pa.types.is_floating(wanted):
        return bool(kind.bit_width <= wanted.bit_width)
    return False
