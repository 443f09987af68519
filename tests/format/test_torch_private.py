"""Notices when torch drops or changes a private name that the format cannot do without."""

import inspect
import pickle
import socket
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from dcp_checkfreq.format import torch_private


def test_every_private_name_is_where_it_was():
    for name in torch_private.__all__:
        assert getattr(torch_private, name) is not None
    assert torch_private.StorageInfo.__qualname__ == "_StorageInfo"
    assert torch_private.StoragePrefix.__qualname__ == "_StoragePrefix"
    assert torch_private.MemoryFormat.__qualname__ == "_MEM_FORMAT_ENCODING"
    assert torch_private.get_layout.__qualname__ == "_get_layout"
    assert torch_private.get_default_store.__qualname__ == "_get_default_store"


def test_executors_of_async_save_start_it_in_the_method_that_is_replaced():
    for kind in (torch_private.ThreadExecutor, torch_private.ProcessExecutor):
        taken = inspect.signature(vars(kind)["execute_save"]).parameters
        assert list(taken)[1] == "staging_future_or_state_dict"
        assert {"checkpoint_id", "storage_writer", "process_group", "no_dist"} <= set(taken)


def test_stocks_classes_for_urls_are_there_with_their_file_system():
    home = torch_private.fsspec_storage()
    writer, reader = home.FsspecWriter("memory://x", a=1), home.FsspecReader("memory://x", a=1)
    assert issubclass(home.FsspecWriter, dcp.FileSystemWriter)
    assert issubclass(home.FsspecReader, dcp.FileSystemReader)
    for stock in (writer, reader):
        assert type(stock.fs) is torch_private.fsspec_file_system()
        assert stock.fs.fs.storage_options == {"a": 1}
        assert stock.path == "memory://x"


def test_stocks_writer_keeps_what_it_was_told_where_the_drop_in_looks(tmp_path):
    writer = dcp.FileSystemWriter(
        tmp_path, single_file_per_rank=False, thread_count=3, overwrite=False
    )
    assert (writer.single_file_per_rank, writer.thread_count, writer.overwrite) == (False, 3, False)
    assert writer.path == dcp.FileSystemReader(tmp_path).path == tmp_path
    assert list(writer.transforms.extensions) == []
    assert writer.serialization_format.value == "torch_save"
    assert writer.save_id


def test_workers_that_persist_are_new_ones_after_they_were_ended():
    from torch.utils.data import DataLoader

    loader = DataLoader(range(2), num_workers=1, persistent_workers=True, worker_init_fn=_greet)
    first, same = iter(loader), iter(loader)
    assert first is same
    torch_private.end_workers(loader)
    assert iter(loader) is not first


def _greet(worker):
    pass


@pytest.fixture(params=[False, True], ids=["private", "public"])
def gone(request, monkeypatch):
    """Tell whether this torch has the functions behind `save` and `load` no more."""
    if request.param:
        monkeypatch.delattr(state_dict_saver, "_save_state_dict")
        monkeypatch.delattr(state_dict_loader, "_load_state_dict")
    return request.param


def test_saving_and_loading_alone_warn_only_if_torch_has_no_way_round_it(
    tmp_path, gone, monkeypatch
):
    if gone:  # the public ones call what was taken away
        called = []
        monkeypatch.setattr(state_dict_saver, "save", lambda *_, **named: called.append(named))
        monkeypatch.setattr(state_dict_loader, "load", lambda *_, **named: called.append(named))
    state = {"a": torch.arange(3), "b": [1, {"c": 2}]}
    alone = {"process_group": None, "no_dist": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_private.dcp_save(
            state,
            storage_writer=dcp.FileSystemWriter(tmp_path),
            planner=dcp.DefaultSavePlanner(),
            **alone,
        )
        loaded = {"a": torch.zeros(3, dtype=torch.int64), "b": [0, {"c": 0}]}
        torch_private.dcp_load(
            loaded,
            storage_reader=dcp.FileSystemReader(tmp_path),
            planner=dcp.DefaultLoadPlanner(),
            **alone,
        )
    if gone:
        assert [named["no_dist"] for named in called] == [True, True]
        return
    assert loaded["a"].tolist() == [0, 1, 2]
    assert loaded["b"] == [1, {"c": 2}]


def test_the_public_ones_warn_still(tmp_path):
    """When they do no more, the private ones are needed no more."""
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"a": 1}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)


def test_storage_info_has_the_fields_that_are_used():
    info = torch_private.StorageInfo("file", 3, 4)
    assert (info.relative_path, info.offset, info.length) == ("file", 3, 4)
    assert not info.transform_descriptors


def test_the_layout_function_gives_the_layout():
    assert torch_private.get_layout(str(torch.strided)) is torch.strided


@pytest.fixture(params=["tcp", "file"])
def group_of_one(request, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    urls = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/store"}
    dist.init_process_group("gloo", init_method=urls[request.param], rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_default_store_is_the_groups_own_through_another_connection(group_of_one):
    ours, theirs = torch_private.default_store(), torch_private.get_default_store()
    assert ours is not theirs
    ours.set("ours", "1")
    assert theirs.get("ours") == b"1"
    assert not ours.check(["theirs"])
    theirs.set("theirs", "2")
    assert theirs.check(["theirs"])  # nobody answers a `set`: it may be under way before this
    assert ours.check(["ours", "theirs"])


def test_of_two_that_set_a_key_of_the_default_store_the_first_one_counts(group_of_one):
    store = torch_private.default_store()
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "", "second") == b"first"
    assert store.get("key") == b"first"


def test_a_blocked_connection_does_not_keep_the_other_one_waiting(group_of_one):
    ours, theirs = torch_private.default_store(), torch_private.get_default_store()
    waiting = threading.Thread(target=theirs.get, args=["late"])
    waiting.start()
    assert not ours.check(["other"])
    assert waiting.is_alive()
    ours.set("late", "now")
    waiting.join(20)
    assert not waiting.is_alive()


def test_without_a_process_group_there_is_no_default_store():
    with pytest.raises(ValueError, match="process group"):
        torch_private.default_store()


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


def test_in_place_changes_raise_the_version_also_of_detached_views():
    parameter, other = torch.nn.Parameter(torch.zeros(3)), torch.zeros(2)
    seen = [parameter.detach(), other]
    before = torch_private.versions_of(seen)
    with torch.no_grad():
        parameter.add_(1)
    after = torch_private.versions_of(seen)
    assert after[0] > before[0]
    assert after[1] == before[1]


def test_a_tensor_of_inference_mode_has_no_version():
    other = torch.zeros(2).add_(1)
    with torch.inference_mode():
        assert torch_private.versions_of([torch.zeros(2), other]) == [0, other._version]
    assert other._version == 1
