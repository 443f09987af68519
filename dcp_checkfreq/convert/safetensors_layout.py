"""Which tensor goes into which safetensors file, and what these files begin with. Pure.

A file is: the length of the header (8 bytes, little-endian), the header (JSON, padded with
blanks), then the elements of the tensors one after the other, in C order. An index says which
file has which tensor. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

INDEX = "model.safetensors.index.json"
_MODEL_FILE = re.compile(r"model(-[0-9]+-of-[0-9]+)?\.safetensors", re.ASCII)
_ALIGN_BYTES = 8
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exporting:
    """A tensor as it will be written."""

    key: str  # in the checkpoint
    name: str  # in the file
    shape: tuple[int, ...]
    kind: str  # of its elements, as safetensors calls it

    @property
    def size_bytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.kind]


@dataclass(frozen=True, slots=True)
class File:
    """One safetensors file."""

    name: str
    header: bytes
    tensors: tuple[Exporting, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the whole file."""
        return len(self.header) + sum(one.size_bytes for one in self.tensors)


def files(tensors: Iterable[Exporting], max_file_bytes: int) -> list[File]:
    """Return the files for these tensors, in their order.

    Args:
        tensors: with names that differ.
        max_file_bytes: of elements in a file; a tensor that is larger has one of its own.
    """
    groups: list[list[Exporting]] = [[]]
    used_bytes = 0
    for one in tensors:
        if groups[-1] and used_bytes + one.size_bytes > max_file_bytes:
            groups.append([])
            used_bytes = 0
        groups[-1].append(one)
        used_bytes += one.size_bytes
    if len(groups) == 1:
        return [File("model.safetensors", _header(groups[0]), tuple(groups[0]))]
    return [
        File(f"model-{n:05d}-of-{len(groups):05d}.safetensors", _header(group), tuple(group))
        for n, group in enumerate(groups, 1)
    ]


def _header(tensors: Sequence[Exporting]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in tensors:
        start, end = end, end + one.size_bytes
        described[one.name] = {
            "dtype": one.kind,
            "shape": list(one.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def is_of_a_model(name: str) -> bool:
    """Tell whether Hugging Face's loaders would take a file of this name for one of a model."""
    return name == INDEX or _MODEL_FILE.fullmatch(name) is not None


def index(made: Sequence[File]) -> Mapping[str, object]:
    """Return what the index of several files holds."""
    return {
        "metadata": {"total_size": sum(one.size_bytes for file in made for one in file.tensors)},
        "weight_map": {one.name: file.name for file in made for one in file.tensors},
    }
