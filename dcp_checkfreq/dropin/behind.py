"""What of ours is behind one writer or reader of stock's."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Any, TypeVar

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from dcp_checkfreq.dcp.reader import CheckFreqReader
from dcp_checkfreq.dcp.writer import CheckFreqWriter
from dcp_checkfreq.dropin.fitting import Options, Place, StaysStock, options_of, place_of, tell_once
from dcp_checkfreq.errors import BadLocation

_log = logging.getLogger(__name__)

_NAME = "_dcp_checkfreq"  # of the attribute
_saving: dict[int, weakref.ref[BehindWriter]] = {}


class Switch:
    """Whether new saves and loads of this process are ours."""

    is_on = False


class Behind:
    """Goes nowhere with the object: in a pickle or a copy there is nothing behind it.

    Attributes:
        is_carried: it came from a process in which the drop-in is on.
    """

    def __init__(self) -> None:
        self.is_carried = False

    def __reduce__(self) -> tuple[type[Behind], tuple[()]]:
        return type(self), ()

    @property
    def may_be_ours(self) -> bool:
        """Whether the drop-in is on for this object."""
        return Switch.is_on or self.is_carried


class BehindWriter(Behind):
    """Our writer behind one of stock's, made when it is first needed.

    Attributes:
        saving: our writer while a save is under way that it has begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saving: CheckFreqWriter | None = None
        self.worker: threading.Thread | None = None
        self._ours: CheckFreqWriter | None = None
        self._made_of: tuple[Place, Options] | None = None

    def ours(self, stock: FileSystemWriter) -> CheckFreqWriter | None:
        """Return our writer, for the folder that ``stock`` has now; None: stock's own code does it.

        The snapshot that the one before holds goes over to a new one.
        """
        if not self.may_be_ours:
            return None
        try:
            place, options = place_of(stock), options_of(stock)
            ours = self._writer_for(place, options)
        except StaysStock as why:
            tell_once(str(why))
            return None
        except BadLocation as why:
            tell_once(f"this place is left to stock's classes: {why}")
            return None
        stock.save_id = ours.save_id
        return ours

    def _writer_for(self, place: Place, options: Options) -> CheckFreqWriter:
        """Return ours for this place. If it cannot be, ours is for no place, not for the last."""
        known, self._made_of = self._made_of, None
        made_for = None if known is None else (known[1], known[0].storage_options)
        if self._ours is None or made_for != (options, place.storage_options):
            self._ours = _made(place, options, self._ours)
        elif known is not None and known[0] != place:
            self._ours.reset(place.path)
        self._made_of = place, options
        return self._ours

    def begin(self, ours: CheckFreqWriter) -> None:
        """Say that this thread begins a save by our writer."""
        self.saving, self.worker = ours, threading.current_thread()
        number = id(self)
        _saving[number] = weakref.ref(self, lambda _: _saving.pop(number, None))

    def end(self) -> None:
        """Say that this rank's part of the save is over."""
        self.saving = self.worker = None
        _saving.pop(id(self), None)

    def let_go(self) -> None:
        """Let go of a snapshot that stock's own code has written."""
        if self._ours is not None:
            self._ours.stager.release()


class BehindReader(Behind):
    """Our reader behind one of stock's.

    Attributes:
        ours: of the load under way; None: stock's own code does it.
        metadata: that it has read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ours: CheckFreqReader | None = None
        self.metadata: Metadata | None = None

    def begin(self, stock: FileSystemReader) -> CheckFreqReader | None:
        """Begin a load; return our reader, or None."""
        self.ours = self.metadata = None
        place = self.place(stock)
        if place is None:
            return None
        self.ours = CheckFreqReader(
            place.path,
            allow_pickle=True,
            allow_dtype_cast=True,
            storage_options=place.storage_options or None,
        )
        return self.ours

    def place(self, stock: FileSystemReader) -> Place | None:
        """Return where it loads from; None: stock's own code does it, which is said once."""
        if not self.may_be_ours:
            return None
        try:
            return place_of(stock)
        except StaysStock as why:
            tell_once(str(why))
            return None


def behind_writer(stock: FileSystemWriter) -> BehindWriter:
    """Return what is behind a writer."""
    return _behind(stock, BehindWriter)


def behind_reader(stock: FileSystemReader) -> BehindReader:
    """Return what is behind a reader."""
    return _behind(stock, BehindReader)


def saves_under_way() -> list[threading.Thread]:
    """Return the threads, other than this one, that may be in the middle of a save of ours."""
    found = [one() for one in list(_saving.values())]
    workers = {one.worker for one in found if one is not None and one.worker is not None}
    return [one for one in workers if one.is_alive() and one is not threading.current_thread()]


T = TypeVar("T", bound=Behind)


def _behind(stock: Any, kind: type[T]) -> T:
    there = vars(stock).get(_NAME)
    if not isinstance(there, kind):
        there = kind()
        vars(stock)[_NAME] = there
    return there


def _made(place: Place, options: Options, before: CheckFreqWriter | None) -> CheckFreqWriter:
    made = CheckFreqWriter(
        place.path,
        overwrite=options.overwrite,
        threads=options.threads,
        allow_pickle=True,
        storage_options=place.storage_options or None,
        _file_for_each=options.file_for_each,
    )
    if before is not None:
        made.stager, made.in_flight = before.stager, before.in_flight
    return made


def _in_child() -> None:
    _saving.clear()


os.register_at_fork(after_in_child=_in_child)
