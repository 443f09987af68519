"""The bytes that torch.save puts before and after a tensor's own bytes.

They depend on dtype and shape only, so they are made once with torch's own writer and kept. An
item is ``prefix + payload + suffix`` and reads back with plain `torch.load`. The CRC field of the
payload stays empty: torch does not check it, and `dcp_checkfreq.format.digest` does the work.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import torch
from torch.serialization import skip_data
from torch.utils.serialization import config

PAYLOAD_ALIGN_BYTES = 64  # torch's own; prefixes are a multiple of it


@dataclass(frozen=True, slots=True)
class Envelope:
    """What surrounds a payload of ``payload_bytes``."""

    prefix: bytes
    payload_bytes: int
    suffix: bytes

    @property
    def item_bytes(self) -> int:
        """Size of the whole item."""
        return len(self.prefix) + self.payload_bytes + len(self.suffix)


class _Sink(io.RawIOBase):
    """Takes what torch.save writes, and leaves a hole where it seeks over the payload."""

    def __init__(self) -> None:
        self._at = 0
        self.written: list[tuple[int, bytes]] = []

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.written.append((self._at, bytes(data)))
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset if whence == io.SEEK_SET else self._at + offset
        return self._at

    def tell(self) -> int:
        return self._at


def make_envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
    """Make the envelope of a contiguous CPU tensor. About 0.2 ms; see `Envelopes` for a cache.

    Raises:
        RuntimeError: this torch writes archives in a way that has no room for a payload.
    """
    model = torch.empty(shape, dtype=dtype)
    sink = _Sink()
    # mypy does not see the `patch` that torch gives its config modules.
    patch = config.patch  # type: ignore[attr-defined]
    with patch({"save.storage_alignment": PAYLOAD_ALIGN_BYTES}), skip_data():
        torch.save(model, cast(BinaryIO, sink))
    prefix, suffix = bytearray(), bytearray()
    for at, data in sink.written:
        if at == len(prefix):
            prefix += data
        elif at == len(prefix) + model.nbytes + len(suffix):
            suffix += data
        else:
            raise RuntimeError(
                f"torch {torch.__version__} wrote {len(data)} bytes at {at} of an archive for "
                f"{dtype} {shape}: the envelope cannot be cut around the payload"
            )
    if model.nbytes and (not suffix or len(prefix) % PAYLOAD_ALIGN_BYTES):
        raise RuntimeError(f"torch {torch.__version__} does not align payloads to 64 bytes")
    return Envelope(bytes(prefix), model.nbytes, bytes(suffix))


class Envelopes:
    """A cache of envelopes. May be shared by threads: at worst one is made twice."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.dtype, tuple[int, ...]], Envelope] = {}

    def get(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
        """Return the envelope for a contiguous tensor of this dtype and shape."""
        key = (dtype, shape)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = make_envelope(dtype, shape)
        return made
