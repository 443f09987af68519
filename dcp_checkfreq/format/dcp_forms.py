"""Metadata made of DCP's own classes."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_checkfreq.format.forms import Forms
from dcp_checkfreq.format.torch_private import MemoryFormat, StorageInfo

DCP = Forms(
    metadata=Metadata,
    tensor=TensorStorageMetadata,
    value=BytesStorageMetadata,
    chunk=ChunkStorageMetadata,
    properties=TensorProperties,
    index=MetadataIndex,
    info=StorageInfo,
    storage_meta=StorageMeta,
    size=torch.Size,
    dtypes={name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)},
    layouts={str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.layout)},
    encodings={kind.value: kind for kind in MemoryFormat},
    memory_formats={
        MemoryFormat.TORCH_CONTIGUOUS_FORMAT: torch.contiguous_format,
        MemoryFormat.TORCH_CHANNELS_LAST: torch.channels_last,
        MemoryFormat.TORCH_PRESERVE_FORMAT: torch.preserve_format,
    },
    dtype_type=torch.dtype,
    layout_type=torch.layout,
    encoding_type=MemoryFormat,
    has_strides="strides" in {field.name for field in dataclasses.fields(TensorProperties)},
)
