"""What pickles of numpy's arrays and dtypes may say. Pure.

Numpy believes the states that it is given: a dtype whose elements are larger than its type, or
pointers, reads and frees memory that is not its own. So a state has to be what numpy itself writes
for plain arrays, to the last field. Records (dtypes with named fields) are not among them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from dcp_checkfreq.format.opcodes import OddPickle


class NotPlain(OddPickle):
    """It may be right, but cannot be distinguished from what would harm."""


_NAME = re.compile(r"[<>=|]?([biufcmMOSUV?])([0-9]{0,9})", re.ASCII)
_UNIT_BYTES = {"S": 1, "V": 1, "U": 4}  # per count of the name; all others have a fixed size
_OBJECT_FLAGS, _FLAGS_OF_OBJECTS = 0b111, 63
_LARGEST_DIM = 1 << 40


def check_dtype_name(name: object) -> str:
    """Return the name that a dtype is made from.

    Raises:
        NotPlain: it is not of one of numpy's plain types.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise NotPlain("it has an array that is not of plain numbers, texts, dates or objects")
    return name


def check_dtype_state(name: str, state: Sequence[object]) -> None:
    """Refuse a state that this dtype does not have.

    Args:
        name: of the dtype.
        state: version, byte order, subtype, names, fields, size, alignment, flags; dates have
            their unit behind that.

    Raises:
        NotPlain: it is another.
    """
    match = _NAME.fullmatch(name)
    assert match is not None
    kind, count = match[1], int(match[2] or 0)
    is_date = kind in "mM"
    if len(state) != (9 if is_date and len(state) == 9 else 8):
        raise NotPlain("it has a dtype with another state")
    version, order, subtype, fields, by_name, size, alignment, flags = state[:8]
    plain = version in (3, 4) and order in ("<", ">", "|", "=")
    if not plain or not (subtype is fields is by_name is None):
        raise NotPlain("it has a dtype with fields")
    unit = _UNIT_BYTES.get(kind)
    if size != (-1 if unit is None else unit * count) or alignment not in (-1, 1, 4):
        raise NotPlain("it has a dtype of another size")
    is_object = kind == "O"
    if type(flags) is not int or (
        flags != _FLAGS_OF_OBJECTS if is_object else flags & _OBJECT_FLAGS
    ):
        raise NotPlain("it has a dtype of pointers")


def check_shape(shape: Sequence[object]) -> int:
    """Return the number of elements of an array.

    Raises:
        NotPlain: no array has this shape.
    """
    dims = [dim for dim in shape if type(dim) is int and 0 <= dim <= _LARGEST_DIM]
    if len(dims) != len(shape) or len(dims) > 64 or math.prod(dims) > _LARGEST_DIM:
        raise NotPlain("it has an array of an impossible shape")
    return math.prod(dims)
