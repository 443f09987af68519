"""Notices when torch drops or changes a private name that the format cannot do without."""

import pickle
import warnings

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor

from dcp_checkfreq.format import torch_private


def test_every_private_name_is_where_it_was():
    for name in torch_private.__all__:
        assert getattr(torch_private, name) is not None
    assert torch_private.StorageInfo.__qualname__ == "_StorageInfo"
    assert torch_private.StoragePrefix.__qualname__ == "_StoragePrefix"
    assert torch_private.MemoryFormat.__qualname__ == "_MEM_FORMAT_ENCODING"
    assert torch_private.get_layout.__qualname__ == "_get_layout"


def test_storage_info_has_the_fields_that_are_used():
    info = torch_private.StorageInfo("file", 3, 4)
    assert (info.relative_path, info.offset, info.length) == ("file", 3, 4)
    assert not info.transform_descriptors


def test_the_layout_function_gives_the_layout():
    assert torch_private.get_layout(str(torch.strided)) is torch.strided


def test_sharded_tensors_are_known_by_methods_that_they_have():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed._shard.sharded_tensor import ShardedTensor
    assert callable(ShardedTensor.local_shards)
    assert callable(ShardedTensor.metadata)
    assert not hasattr(torch.Tensor, "local_shards")
    assert not hasattr(torch.distributed.tensor.DTensor, "local_shards")


def test_no_other_private_name_is_in_what_stock_dcp_writes(tmp_path):
    dcp.save({"w": torch.ones(2), "n": 1}, checkpoint_id=tmp_path)
    named = set()

    class Listing(pickle.Unpickler):
        def find_class(self, module, name):
            named.add((module, name))
            return super().find_class(module, name)

    with open(tmp_path / ".metadata", "rb") as file:
        Listing(file).load()
    private = {
        name for module, name in named if name.startswith("_") and module.startswith("torch")
    }
    assert private <= {"_StorageInfo", "_StoragePrefix", "_MEM_FORMAT_ENCODING", "_get_layout"}
