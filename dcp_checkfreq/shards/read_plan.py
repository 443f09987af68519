"""Which few large reads bring a set of byte ranges, each with its digest blocks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcp_checkfreq.shards.assign import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Want:
    """Bytes ``[start, stop)`` of one payload, rounded out to digest blocks where it has any."""

    ticket: int  # whose these bytes are
    file: str
    payload_offset: int  # of the payload in the file
    start: int  # in the payload
    stop: int
    block: int  # digest block in bytes; 0: no digests, any cut will do


@dataclass(frozen=True, slots=True)
class Window:
    """One read of ``[start, stop)`` of a file, and the wants that it brings whole."""

    file: str
    start: int
    stop: int
    wants: tuple[Want, ...]


def round_to_blocks(start: int, stop: int, block: int, payload_bytes: int) -> tuple[int, int]:
    """Widen ``[start, stop)`` to whole blocks, the last one ending with the payload."""
    if not block or start == stop:
        return start, stop
    return start - start % block, min(-(-stop // block) * block, payload_bytes)


def split(want: Want, max_bytes: int) -> Iterable[Want]:
    """Cut a want into parts of at most ``max_bytes``, at block borders."""
    unit = want.block or PAGE_BYTES
    step = max(max_bytes // unit, 1) * unit
    for start in range(want.start, want.stop, step):
        yield Want(
            want.ticket,
            want.file,
            want.payload_offset,
            start,
            min(start + step, want.stop),
            want.block,
        )


def windows(wants: Sequence[Want], *, max_bytes: int, max_gap_bytes: int) -> list[Window]:
    """Join wants that lie close together in a file into reads of at most ``max_bytes``.

    Reads start and end at page borders. A want of more than ``max_bytes`` less two pages is cut.
    Every byte of every want is in exactly one window.
    """
    room = max_bytes - 2 * PAGE_BYTES
    parts: list[Want] = []
    for want in wants:
        if 0 < want.stop - want.start <= room:
            parts.append(want)
        else:
            parts += split(want, room)
    parts.sort(key=lambda p: (p.file, p.payload_offset + p.start, p.payload_offset + p.stop))
    made: list[Window] = []
    group: list[Want] = []
    file, start, stop = "", 0, 0
    for part in parts:
        begin = part.payload_offset + part.start
        end = part.payload_offset + part.stop
        joins = (
            group
            and part.file == file
            and begin - stop <= max_gap_bytes
            and _page_up(max(end, stop)) - _page_down(start) <= max_bytes
        )
        if not joins:
            if group:
                made.append(Window(file, _page_down(start), _page_up(stop), tuple(group)))
            group, file, start, stop = [], part.file, begin, end
        group.append(part)
        stop = max(stop, end)
    if group:
        made.append(Window(file, _page_down(start), _page_up(stop), tuple(group)))
    return made


def _page_down(at: int) -> int:
    return at - at % PAGE_BYTES


def _page_up(at: int) -> int:
    return -(-at // PAGE_BYTES) * PAGE_BYTES
