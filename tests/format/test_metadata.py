"""``.metadata`` is read whole or not at all, and reading it never runs code of whoever wrote it."""

import copy
import io
import os
import pathlib
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from metadata_tools import (
    FILE,
    Calls,
    ordinary_unpickles,
    sets_attribute_of_class,
    small_metadata,
    small_record,
)
from property_examples import examples
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties

from dcp_checkfreq.errors import BrokenMetadata, LoadFailed, NewerFormat
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format.index import FORMAT_VERSION, encode

WHERE = "/runs/step_7"


def dumped():
    return metadata_format.dump(small_metadata(), small_record())


def stock(value, protocol=pickle.DEFAULT_PROTOCOL):
    return pickle.dumps(value, protocol=protocol)


# --- what was written is read ---


def test_what_was_dumped_is_loaded():
    metadata, record = metadata_format.load(dumped(), WHERE)
    expected = small_metadata()
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert metadata.planner_data == expected.planner_data
    assert metadata.storage_data == expected.storage_data
    assert list(metadata.storage_data) == list(expected.storage_data)
    assert metadata.storage_meta == expected.storage_meta
    assert encode(record) == encode(small_record())


def test_it_is_stock_classes_that_are_loaded():
    metadata, _ = metadata_format.load(dumped(), WHERE)
    properties = metadata.state_dict_metadata["model.weight"].properties
    assert type(metadata) is Metadata
    assert type(properties) is TensorProperties
    assert pickle.loads(pickle.dumps(metadata)).storage_data == metadata.storage_data


def test_stock_pickle_reads_it_and_stops_before_the_trailer():
    stream = io.BytesIO(dumped())
    metadata = pickle.load(stream)
    assert metadata.storage_data == small_metadata().storage_data
    assert len(stream.read()) == metadata_format.TRAILER_BYTES


def test_no_name_of_this_package_is_needed_to_read_it():
    seen = set()

    class Listing(pickle.Unpickler):
        def find_class(self, module, name):
            seen.add(module)
            return super().find_class(module, name)

    Listing(io.BytesIO(dumped())).load()
    assert seen
    assert not any("checkfreq" in module for module in seen)


def test_what_was_loaded_can_be_dumped_and_loaded_again():
    metadata, record = metadata_format.load(dumped(), WHERE)
    again, record_again = metadata_format.load(metadata_format.dump(metadata, record), WHERE)
    assert again.storage_data == metadata.storage_data
    assert encode(record_again) == encode(record)


# --- damage ---


def test_cut_at_any_length_it_never_loads():
    content = dumped()
    for length in range(len(content)):
        with pytest.raises(BrokenMetadata):
            metadata_format.load(content[:length], WHERE)


def test_one_more_byte_is_damage():
    with pytest.raises(BrokenMetadata):
        metadata_format.load(dumped() + b"\0", WHERE)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_with_any_byte_changed_it_never_loads(mask):
    content = bytearray(dumped())
    for at in range(len(content)):
        content[at] ^= mask
        with pytest.raises((BrokenMetadata, NewerFormat)):
            metadata_format.load(bytes(content), WHERE)
        content[at] ^= mask


@examples(300)
@given(data=st.data())
def test_with_any_span_overwritten_it_never_loads(data):
    content = bytearray(dumped())
    start = data.draw(st.integers(0, len(content) - 1))
    span = data.draw(st.binary(min_size=1, max_size=40))
    before = bytes(content)
    content[start : start + len(span)] = span
    if bytes(content) == before:
        return
    with pytest.raises((BrokenMetadata, NewerFormat)):
        metadata_format.load(bytes(content), WHERE)


@examples(300)
@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused_as_broken(content):
    with pytest.raises(BrokenMetadata):
        metadata_format.load(content, WHERE)


@pytest.mark.parametrize("value", [None, 1, "x", [], {}, {"a": 1}, torch.Size([1])], ids=repr)
def test_a_pickle_of_something_else_is_no_metadata(value):
    with pytest.raises(BrokenMetadata):
        metadata_format.load(stock(value), WHERE)


def test_a_record_for_other_items_is_damage():
    metadata = small_metadata()
    metadata.storage_data.popitem()
    with pytest.raises(BrokenMetadata, match="2 items"):
        metadata_format.load(metadata_format.dump(metadata, small_record()), WHERE)


def sealed(metadata):
    body = pickle.dumps(metadata, protocol=4)
    return body + metadata_format.trailer(body)


def test_a_newer_format_is_named_as_such():
    metadata = small_metadata()
    metadata.dcp_checkfreq = {"format": FORMAT_VERSION + 1, "written_by": "dcp_checkfreq 9.9"}
    with pytest.raises(NewerFormat, match=r"dcp_checkfreq 9\.9"):
        metadata_format.load(sealed(metadata), WHERE)


@pytest.mark.parametrize("raw", [{}, {"format": 1}, [], "x"], ids=repr)
def test_a_sealed_file_with_a_broken_record_is_broken(raw):
    metadata = small_metadata()
    metadata.dcp_checkfreq = raw
    with pytest.raises(BrokenMetadata):
        metadata_format.load(sealed(metadata), WHERE)


def test_a_sealed_file_without_a_record_is_broken():
    with pytest.raises(BrokenMetadata):
        metadata_format.load(sealed(small_metadata()), WHERE)


# --- no code ---


@pytest.fixture
def flag(tmp_path):
    return tmp_path / "the code ran"


@pytest.mark.parametrize("where", ["alone", "inside", "sealed"])
def test_code_in_it_is_refused_and_not_run(flag, where):
    bomb = Calls(os.system, f"touch '{flag}'")
    metadata = small_metadata()
    metadata.planner_data = bomb
    if where == "sealed":
        metadata.dcp_checkfreq = encode(small_record())
    content = {"alone": stock(bomb), "inside": stock(metadata), "sealed": sealed(metadata)}[where]
    with pytest.raises(BrokenMetadata):
        metadata_format.load(content, WHERE)
    assert not flag.exists()
    ordinary_unpickles(content)
    assert flag.exists(), "the test proves nothing: this pickle runs no code at all"


@pytest.mark.parametrize(
    "function",
    [eval, exec, open, __import__, getattr, setattr, print, os.system, subprocess.Popen,
     torch.load, torch.hub.load, torch.save, pickle.loads, pathlib.Path.unlink, copy.deepcopy],
    ids=lambda function: getattr(function, "__qualname__", str(function)),
)  # fmt: skip
def test_no_function_is_reached(function):
    with pytest.raises(BrokenMetadata):
        metadata_format.load(stock(Calls(function, "x")), WHERE)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("torch", "load"),
        ("torch", "os.system"),
        ("torch", "_C"),
        ("torch", "serialization"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties.create_from_tensor"),
        ("torch.distributed.checkpoint.filesystem", "os"),
        ("torch.distributed.checkpoint.filesystem", "FileSystem.rm_file"),
        ("pathlib", "Path.unlink"),
        ("builtins", "getattr"),
        ("builtins", "eval"),
        ("builtins", "dict.__class__"),
        ("collections", "OrderedDict.__init__"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_names_outside_of_the_list_are_refused(module, name, protocol):
    head = bytes([0x80, protocol])
    if protocol == 2:
        body = head + f"c{module}\n{name}\n.".encode()
    else:
        body = head + b"".join(
            b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)
        )
        body += b"\x93."
    with pytest.raises(BrokenMetadata, match="names"):
        metadata_format.load(body, WHERE)


def test_an_unknown_class_anywhere_is_refused():
    metadata = small_metadata()
    metadata.planner_data = {"key": pathlib.PurePosixPath("fine"), "other": Unknown()}
    with pytest.raises(BrokenMetadata, match="test_metadata"):
        metadata_format.load(stock(metadata), WHERE)


class Unknown:
    pass


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("collections", "ChainMap"),
        ("torch.serialization", "_get_layout"),
    ],
)
def test_reading_it_leaves_no_mark_on_the_classes_of_this_process(module, name):
    hostile = sets_attribute_of_class(module, name, "a_mark", "x")
    cls = getattr(sys.modules[module], name)
    try:
        with pytest.raises(BrokenMetadata):
            metadata_format.load(hostile, WHERE)
        assert not hasattr(cls, "a_mark")
    finally:
        if hasattr(cls, "a_mark"):
            del cls.a_mark


@pytest.mark.parametrize("file", ["../outside", "/etc/passwd", "a/../../b", "..", "", "a\0b"])
def test_an_item_in_a_file_outside_of_the_folder_is_refused(file):
    for content in (
        stock(small_metadata(file)),
        metadata_format.dump(small_metadata(file), small_record(file)),
    ):
        with pytest.raises(LoadFailed):
            metadata_format.load(content, WHERE)


# --- checkpoints of others ---


def test_a_checkpoint_of_stock_dcp_loads_without_a_record(tmp_path):
    state = {
        "w": torch.arange(6.0).reshape(2, 3),
        "h": torch.ones(2, dtype=torch.bfloat16),
        "nested": {"list": [torch.zeros(()), 1, "two"], "n": None},
    }
    dcp.save(state, checkpoint_id=tmp_path)  # a Path: stock keeps it as one in `.metadata`
    content = (tmp_path / ".metadata").read_bytes()
    assert b"PosixPath" in content
    metadata, record = metadata_format.load(content, WHERE)
    expected = pickle.loads(content)
    assert record is None
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert metadata.storage_data == expected.storage_data
    assert metadata.planner_data == expected.planner_data
    assert str(metadata.storage_meta.checkpoint_id) == str(tmp_path)


@pytest.mark.parametrize("kind", [pathlib.PosixPath, pathlib.PurePosixPath, str])
def test_a_checkpoint_id_of_any_kind_of_path_becomes_text(kind):
    metadata = small_metadata()
    metadata.storage_meta = StorageMeta(checkpoint_id=kind("/runs/ä b/step_7"))
    loaded, _ = metadata_format.load(stock(metadata), WHERE)
    assert loaded.storage_meta.checkpoint_id == "/runs/ä b/step_7"


def test_the_path_class_of_python_3_13_is_a_path_too():
    metadata = small_metadata()
    metadata.storage_meta = StorageMeta(checkpoint_id=pathlib.PosixPath("/runs/step_7"))
    content = stock(metadata, protocol=2).replace(
        b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n"
    )
    assert b"pathlib._local" in content
    loaded, _ = metadata_format.load(content, WHERE)
    assert loaded.storage_meta.checkpoint_id == "/runs/step_7"


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_is_read(protocol):
    loaded, record = metadata_format.load(stock(small_metadata(), protocol), WHERE)
    assert record is None
    assert loaded.storage_data == small_metadata().storage_data


def test_tensor_properties_of_torch_2_15_with_a_sixth_field_load(monkeypatch):
    five = TensorProperties.__getstate__
    six = lambda self: (*five(self)[:5], "new")  # noqa: E731
    monkeypatch.setattr(TensorProperties, "__getstate__", six)
    content = stock(small_metadata())
    monkeypatch.undo()
    metadata, _ = metadata_format.load(content, WHERE)
    assert metadata.state_dict_metadata == small_metadata().state_dict_metadata
    assert type(metadata.state_dict_metadata["model.weight"].properties) is TensorProperties


DTYPES = sorted({value for value in vars(torch).values() if type(value) is torch.dtype}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_torch_is_read(dtype):
    metadata = small_metadata()
    metadata.state_dict_metadata["model.weight"].properties.dtype = dtype
    loaded, _ = metadata_format.load(stock(metadata), WHERE)
    assert loaded.state_dict_metadata["model.weight"].properties.dtype is dtype


def test_the_file_of_the_small_checkpoint_is_a_plain_name():
    assert os.path.basename(FILE) == FILE
