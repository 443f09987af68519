"""DCP's `Metadata` to the bytes of ``.metadata`` and back, with our record in it. See `sealed`."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from dcp_checkfreq.format import dcp_forms, sealed
from dcp_checkfreq.format.index import Record, encode
from dcp_checkfreq.format.sealed import ATTRIBUTE, MAGIC, TRAILER_BYTES, is_ours, trailer

__all__ = ["ATTRIBUTE", "MAGIC", "TRAILER_BYTES", "dump", "is_ours", "load", "trailer"]

_FIELDS_OF_PROPERTIES = 5  # torch 2.15 writes a sixth, the strides: no torch before it reads that


def dump(metadata: Metadata, record: Record) -> bytes:
    """Return the content of ``.metadata``: ``metadata`` with ``record`` in it, and the trailer.

    Whatever torch writes it, every torch since 2.3 reads it.
    """
    metadata = copy.copy(metadata)  # planners keep theirs, and stock may write it the next time
    setattr(metadata, ATTRIBUTE, encode(record))
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=4)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _reduced}
    pickler.dump(metadata)
    body = out.getvalue()
    return body + trailer(body)


def _reduced(properties: TensorProperties) -> tuple[Any, ...]:
    """Return what pickle makes of it, as torch wrote it from 2.3 to 2.14."""
    state = properties.__getstate__()[:_FIELDS_OF_PROPERTIES]  # type: ignore[no-untyped-call]
    return copyreg.__newobj__, (type(properties),), state  # type: ignore[attr-defined]


def load(data: bytes, where: str) -> tuple[Metadata, Record | None]:
    """Return the metadata and our record, which is None for a checkpoint of stock DCP.

    Runs no code from ``data``. ``where`` is named in errors.

    Raises:
        NewerFormat: written by a newer version of this package.
        BrokenMetadata: cut short, damaged, or not a DCP checkpoint.
    """
    return sealed.load(data, where, dcp_forms.DCP)
