"""A pickle's opcodes, looked at before any of them is run: what is left cannot hash or call. Pure.

Python's unpickler obeys the file: a few bytes make it hash a tuple with 2**45 parts, take
gigabytes for a memo, or recurse until the process dies. So its input is rewritten first. Opcodes
that DCP's pickles never hold are refused, and those that fill dicts become those that fill lists::

    { 'a': 1, 'b': (2, 3) }    reads as    [ 'a', 1, 'b', (2, 3) ]

Then nothing is hashed, and each opcode costs about as much as any other. One regular expression
finds the opcodes, at 30 ns each, which Python code of ours takes 500 ns for.
"""

from __future__ import annotations

import re
import sys

# A stand-in for `find_class`: the first element of what was a dict, if ``tell_dicts`` asks for it.
DICT_MARK = ("dcp_checkfreq", "a dict")

_CONTAINER_PER_BYTES = 16  # an empty container takes 80 bytes; real ones come every 70 bytes
_FREE_CONTAINERS = 1000
_LONGEST_INT_BYTES = 16
_LONGEST_NAME = 100


class OddPickle(ValueError):
    """No pickle of DCP metadata; the text says why and is short."""


def _counted(opcode: bytes, longest: int, after: bytes = b"") -> bytes:
    """Match an opcode with a byte that counts what follows; a regular expression cannot count."""
    cases = (re.escape(bytes([n])) + after + b".{%d}" % n for n in range(longest + 1))
    return opcode + b"(?:" + b"|".join(cases) + b")"


# MEMOIZE MARK EMPTY_TUPLE NEWOBJ BUILD REDUCE TUPLE1-3 TUPLE NEWTRUE NEWFALSE NONE APPEND APPENDS
# STACK_GLOBAL: they are as cheap as they look.
_PLAIN = rb"[\x94()\x81bR\x85-\x87t\x88\x89Nae\x93]"
_WITH_ARGUMENT = b"|".join(
    [
        rb"[hKq].",  # BINGET BININT1 BINPUT
        rb"[jJ].{4}",  # LONG_BINGET BININT
        rb"M..",  # BININT2
        _counted(rb"\x8c", 255),  # SHORT_BINUNICODE
        _counted(rb"X", 255, rb"\x00{3}"),  # a short BINUNICODE
        _counted(rb"C", 255),  # SHORT_BINBYTES
        _counted(rb"\x8a", _LONGEST_INT_BYTES),  # LONG1
        rb"G.{8}",  # BINFLOAT
        rb"\x95.{8}",  # FRAME: all that is left in memory anyway, or an error
        rb"\x80.",  # PROTO
    ]
)


def next_opcode(*, possessive: bool) -> re.Pattern[bytes]:
    """Return what matches harmless opcodes and then the first byte of one to be looked at.

    Every alternative begins with another byte, so there is one way to match, and no way to get
    out of step. Possessive, which Python has from 3.11 on, no trail of the way is kept; without,
    a file of nothing but harmless opcodes takes 100 times its size.
    """
    keep = b"+" if possessive else b""
    steps = b"%s+%s|(?:%s)%s*%s" % (_PLAIN, keep, _WITH_ARGUMENT, _PLAIN, keep)
    return re.compile(b"(?:%s)*%s(.)" % (steps, keep), re.DOTALL)


_NEXT = next_opcode(possessive=sys.version_info >= (3, 11))
_GLOBAL = re.compile(rb"c[^\n]{1,%d}\n[^\n]{1,%d}\n" % (_LONGEST_NAME, _LONGEST_NAME))

_EMPTY_DICT, _EMPTY_LIST, _SETITEM, _SETITEMS, _STOP = b"}]su."
_LONG_TEXT, _LONG_BYTES, _LONG_PUT, _NAME = b"XBrc"
_APPENDS = b"e"[0]
_APPEND_PAIR = b"\x86a"  # for SETITEM
# The same for ``tell_dicts``: then a key may be a tuple, too.
_PUSH_MARK = b"c" + "\n".join(DICT_MARK).encode() + b"\n"
_APPEND_MARKED_PAIR = _PUSH_MARK + b"\x87a"
_MARK_LIST = b"]" + _PUSH_MARK + b"a"  # for EMPTY_DICT


def without_dicts(
    body: bytes, *, tell_dicts: bool = False, pattern: re.Pattern[bytes] = _NEXT
) -> bytes:
    """Return a pickle that makes lists of keys and values where ``body`` makes dicts.

    A key and value may also be one element, a tuple. With ``tell_dicts`` each such list begins
    with `DICT_MARK`, and each such tuple ends with it. The result ends with
    ``body``'s STOP; what follows that is left out.

    Raises:
        OddPickle: an opcode that no DCP metadata needs, or a size beyond the end of ``body``.
    """
    made = bytearray(body)
    longer: list[tuple[int, bytes]] = []  # where an opcode becomes several
    containers = 0
    allowed = _FREE_CONTAINERS + len(body) // _CONTAINER_PER_BYTES
    at = end = 0
    while True:
        for match in pattern.finditer(body, at):
            end = match.end()
            opcode = body[end - 1]
            if opcode == _SETITEMS:
                made[end - 1] = _APPENDS
            elif opcode == _EMPTY_DICT:
                containers += 1
                made[end - 1] = _EMPTY_LIST
                if tell_dicts:
                    longer.append((end, _MARK_LIST))
            elif opcode == _EMPTY_LIST:
                containers += 1
            elif opcode == _SETITEM:
                longer.append((end, _APPEND_MARKED_PAIR if tell_dicts else _APPEND_PAIR))
            else:
                break
        else:
            raise OddPickle("it is cut short")
        if containers > allowed:
            raise OddPickle(f"it holds more than {allowed} lists in {len(body)} bytes")
        if opcode == _STOP:
            return _framed(made, end, longer)
        at = _after(body, end)


def _after(body: bytes, end: int) -> int:
    """Return where the opcode stops whose first byte is the last before ``end``."""
    opcode = body[end - 1]
    if opcode in (_LONG_TEXT, _LONG_BYTES):
        stop = end + 4 + int.from_bytes(body[end : end + 4], "little")
    elif opcode == _LONG_PUT:
        stop = end + 4
        if int.from_bytes(body[end : end + 4], "little") > len(body):
            raise OddPickle("it numbers more objects than it can hold")
    elif opcode == _NAME and (name := _GLOBAL.match(body, end - 1)):
        stop = name.end()
    else:
        raise OddPickle(f"it holds opcode {body[end - 1 : end]!r}, which no DCP metadata needs")
    if stop > len(body):
        raise OddPickle("it is cut short")
    return stop


def _framed(made: bytearray, end: int, longer: list[tuple[int, bytes]]) -> bytes:
    pieces: list[bytes | memoryview] = []
    start = 0
    view = memoryview(made)
    for stop, opcodes in longer:
        pieces += [view[start : stop - 1], opcodes]
        start = stop
    pieces.append(view[start:end])
    size = sum(map(len, pieces))
    # In one frame: the unpickler takes all of it at once, rather than opcode by opcode.
    return b"".join([b"\x80\x04\x95", size.to_bytes(8, "little"), *pieces])
