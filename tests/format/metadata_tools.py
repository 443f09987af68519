"""Small checkpoints' metadata, and pickles that a hostile or older writer could have left."""

import io
import pickle
import struct

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_checkfreq.format.index import Columns, Lineage, Record

FILE = "__0_0_0123456789ab.distcp"


def small_metadata(file=FILE):
    """Return metadata of two chunks of one tensor and one byte item."""
    chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3])),
        ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([1, 3])),
    ]
    weight = TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16), torch.Size([3, 3]), chunks
    )
    weight.chunks = chunks
    return Metadata(
        state_dict_metadata={"model.weight": weight, "extra": BytesStorageMetadata()},
        planner_data={"model.weight": ("model", "weight"), "extra": ("extra",)},
        storage_data={
            MetadataIndex("model.weight", torch.Size([0, 0]), 0): _StorageInfo(file, 0, 100),
            MetadataIndex("model.weight", torch.Size([2, 0]), 1): _StorageInfo(file, 100, 90),
            MetadataIndex("extra"): _StorageInfo(file, 190, 10),
        },
        storage_meta=StorageMeta(checkpoint_id="/runs/step_7", save_id="0123456789ab"),
    )


def small_record(file=FILE):
    """Return the record that goes with `small_metadata`."""
    return Record(
        attempt="0123456789ab",
        world_size=2,
        files={file: 200},
        columns=Columns(
            payload_offset=[64, 164, 190],
            payload_bytes=[12, 6, 10],
            block_bytes=[16384] * 3,
            digests=[2**64 - 1, 2, 3],
        ),
        step=7,
        lineage=Lineage(run_id="run a", parent_step=3, abandons={"run b": 4}),
        written_by="a test",
    )


class Calls:
    """Pickles as a call: ``Calls(os.system, "x")`` runs it when an ordinary unpickler reads it."""

    def __init__(self, function, *args):
        self._reduced = function, args

    def __reduce__(self):
        return self._reduced


def sets_attribute_of_class(module, name, attribute, value):
    """Return a pickle that sets an attribute of a class (or function) by the BUILD opcode."""
    out = io.BytesIO()
    out.write(b"\x80\x04")
    out.write(f"c{module}\n{name}\n".encode())
    out.write(b"N}")  # (None, {attribute: value}): a state with slots
    for text in (attribute, value):
        out.write(b"X" + struct.pack("<I", len(text)) + text.encode())
    out.write(b"s\x86b.")
    return out.getvalue()


def ordinary_unpickles(data):
    """Prove that a hostile pickle is one: the ordinary unpickler takes it."""
    return pickle.loads(data)
