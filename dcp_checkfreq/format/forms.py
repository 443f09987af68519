"""Of which classes metadata is made: DCP's own, or plain ones, which need no torch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """One family of classes, whose fields have the names of DCP's.

    Attributes:
        metadata, tensor, value, chunk, properties, index, info, storage_meta: what DCP calls
            `Metadata`, `TensorStorageMetadata`, `BytesStorageMetadata`, `ChunkStorageMetadata`,
            `TensorProperties`, `MetadataIndex`, `_StorageInfo` and `StorageMeta`.
        size: makes a size or an offset of numbers.
        dtypes: by their names in torch.
        layouts: by what they are as text.
        encodings: of memory formats, by the number that a pickle has.
        memory_formats: by their encodings.
        has_strides: properties have a sixth field, since torch 2.15.
    """

    metadata: Callable[[dict[str, Any]], Any]
    tensor: Callable[..., Any]
    value: Callable[[], Any]
    chunk: Callable[..., Any]
    properties: Callable[..., Any]
    index: type
    info: Callable[..., Any]
    storage_meta: Callable[[], Any]
    size: Callable[[Any], Any]
    dtypes: Mapping[str, Any]
    layouts: Mapping[str, Any]
    encodings: Mapping[int, Any]
    memory_formats: Mapping[Any, Any]
    dtype_type: type
    layout_type: type
    encoding_type: type
    has_strides: bool = False


# --- plain ones ---


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype of torch, by its name and the bytes of an element."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of torch, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Encoding:
    """A memory format of torch, by its number."""

    number: int


@dataclass(slots=True)
class PlainChunk:
    """A box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(slots=True)
class PlainProperties:
    """What a tensor was."""

    dtype: Dtype
    layout: Layout
    requires_grad: bool
    memory_format: Encoding
    pin_memory: bool


@dataclass(slots=True)
class PlainTensor:
    """A tensor, and the chunks in which it was saved."""

    properties: PlainProperties
    size: tuple[int, ...]
    chunks: list[PlainChunk]


@dataclass(slots=True)
class PlainValue:
    """A value that is no tensor."""


@dataclass(frozen=True)
class PlainIndex:
    """A chunk of a tensor, or a value."""

    fqn: str
    offset: tuple[int, ...] | None = None
    index: int | None = field(hash=False, compare=False, default=None)


@dataclass(slots=True)
class PlainInfo:
    """Where an item is."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: list[str] | None = None


@dataclass(slots=True)
class PlainStorageMeta:
    """Who wrote a checkpoint and where."""

    checkpoint_id: str | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass
class PlainMetadata:
    """All of it."""

    state_dict_metadata: dict[str, PlainTensor | PlainValue]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: PlainStorageMeta | None = None
    version: str | None = None


_NAMES = {
    1: (
        "bit bits1x8 bits2x4 bits4x2 bits8 bool int8 uint8 qint8 quint8 quint2x4 quint4x2 "
        "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7 "
        "float4_e2m1fn_x2 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
        "float8_e8m0fnu"
    ),
    2: "bfloat16 bits16 float16 half int16 short uint16",
    4: "bcomplex32 chalf complex32 float float32 int int32 qint32 uint32",
    8: "cfloat complex64 double float64 int64 long uint64",
    16: "cdouble complex128",
}  # of torch 2.11 to 2.15
_LAYOUTS = (
    *("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"),
    *("_mkldnn", "jagged"),
)
_ENCODINGS = {number: Encoding(number) for number in range(3)}

PLAIN = Forms(
    metadata=PlainMetadata,
    tensor=PlainTensor,
    value=PlainValue,
    chunk=PlainChunk,
    properties=PlainProperties,
    index=PlainIndex,
    info=PlainInfo,
    storage_meta=PlainStorageMeta,
    size=tuple,
    dtypes={name: Dtype(name, size) for size, names in _NAMES.items() for name in names.split()},
    layouts={f"torch.{name}": Layout(name) for name in _LAYOUTS},
    encodings=_ENCODINGS,
    memory_formats={encoding: encoding for encoding in _ENCODINGS.values()},
    dtype_type=Dtype,
    layout_type=Layout,
    encoding_type=Encoding,
)
