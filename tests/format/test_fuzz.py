"""Whatever bytes are read, only our errors come out, soon, and in little memory.

`fuzz.py` makes up ``.metadata`` (sealed and not), records, leases, profiles, root ids, byte items
and names. A few thousand of them here, from fixed seeds. For hours of them, from other seeds::

    DCP_CHECKFREQ_FUZZ_S=3600 DCP_CHECKFREQ_FUZZ_SEED=7 pytest -s tests/format/test_fuzz.py

They run in a process of their own, because what they look for can end it.
"""

import collections
import os
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import time

import pytest
import torch
from metadata_tools import FILE, small_metadata, small_record
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_checkfreq.errors import BrokenMetadata
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format.index import encode

HERE = pathlib.Path(__file__).parent
WHERE = "/runs/step_7"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for memory")
def test_any_bytes_are_taken_or_refused_by_name_soon_and_in_little_memory():
    seconds = os.environ.get("DCP_CHECKFREQ_FUZZ_S")
    seed = os.environ.get("DCP_CHECKFREQ_FUZZ_SEED", "1")
    how_many = f"{seconds}s" if seconds else "1500"
    package = HERE.parent.parent
    paths = os.pathsep.join([str(package), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(HERE / "fuzz.py"), seed, how_many],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=150 + float(seconds or 0),
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    tried = re.search(r"tried (\d+) inputs", done.stdout)
    assert tried is not None
    assert int(tried[1]) >= (1 if seconds else 1500)


# --- those that a person would think of ---


def sealed(body):
    return body + metadata_format.trailer(body)


def shared_key():
    """A key of 2**60 parts: hashed, it never ends."""
    content = b"\x80\x04)\x94" + b"".join(
        b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(60)
    )
    return content + b"}h" + bytes([60]) + b"Ns."


def deep_key():
    return b"\x80\x04})" + b"\x85" * 10**6 + b"Ns."


def with_planner_data(value):
    """Metadata that is right but for what its planner kept."""

    metadata = small_metadata()
    metadata.planner_data = value
    metadata.dcp_checkfreq = encode(small_record())
    return pickle.dumps(metadata, protocol=4)


def shared_lists(depth):
    inner = ["x"]
    for _ in range(depth):
        inner = [inner, inner]
    return inner


def colliding_offsets():
    """Offsets of two dimensions with one hash; see `tuplehash` of Python."""

    metadata = small_metadata()
    period = 2**61 - 1
    for n in range(4**5):
        offset = torch.Size([period * (n >> 2 * d & 3) for d in range(5)])
        metadata.storage_data[MetadataIndex("extra", offset)] = metadata.storage_data[
            MetadataIndex("extra")
        ]
    return pickle.dumps(metadata, protocol=4)


BOMBS = {
    "a key of 2**60 parts": shared_key,
    "a key 10**6 deep": deep_key,
    "a memo of 32 GiB": lambda: b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b".",
    "bytes of 8 EiB": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 2**63 - 1) + b".",
    "a planner's list of 2**60 parts": lambda: with_planner_data(shared_lists(60)),
    "a planner's dict of lists": lambda: with_planner_data({"w": shared_lists(45)}),
    "offsets that collide": colliding_offsets,
    "10**5 empty lists": lambda: b"\x80\x04" + b"]" * 10**5 + b".",
    "10**6 lists in lists": lambda: b"\x80\x04" + b"](" * 10**6 + b"." * 2,
}


@pytest.mark.parametrize("seal", [bytes, sealed], ids=["bare", "sealed"])
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_soon_with_a_short_text(name, seal):
    content = seal(BOMBS[name]())
    begun = time.process_time()
    with pytest.raises(BrokenMetadata) as caught:
        metadata_format.load(content, WHERE)
    assert time.process_time() - begun < 3
    assert len(str(caught.value)) < 500


def change(path, value):
    def changed(metadata):
        *folders, last = path
        target = metadata
        for step in folders:
            target = target[step] if isinstance(target, (dict, list)) else getattr(target, step)
        if isinstance(target, (dict, list)):
            target[last] = value
        else:
            object.__setattr__(target, last, value)

    return changed


WEIGHT = ("state_dict_metadata", "model.weight")
EXTRA = ("storage_data", MetadataIndex("extra"))
CHANGES = {
    "a negative size": change((*WEIGHT, "size"), (-1, 3)),
    "a size of 2**70": change((*WEIGHT, "size"), (2**70, 3)),
    "a size that is a text": change((*WEIGHT, "size"), "33"),
    "a size of other sizes": change((*WEIGHT, "size"), ((3, 3), 3)),
    "a tensor of 2**80 elements": change((*WEIGHT, "size"), (2**40, 2**40)),
    "no chunks": change((*WEIGHT, "chunks"), None),
    "a chunk that is a number": change((*WEIGHT, "chunks", 0), 5),
    "a chunk outside of its tensor": change((*WEIGHT, "chunks", 1, "offsets"), torch.Size([3, 0])),
    "a chunk of other dimensions": change((*WEIGHT, "chunks", 1, "sizes"), torch.Size([1])),
    "a dtype that is none": change((*WEIGHT, "properties", "dtype"), torch.strided),
    "a layout that is none": change((*WEIGHT, "properties", "layout"), torch.float32),
    "no properties": change((*WEIGHT, "properties"), None),
    "a tensor that is a number": change(WEIGHT, 7),
    "a key that is half a character": change(("state_dict_metadata", "\ud800"), 7),
    "no keys": change(("state_dict_metadata",), None),
    "an offset of 2**63": change((*EXTRA, "offset"), 2**63),
    "a negative offset": change((*EXTRA, "offset"), -1),
    "a length that is true": change((*EXTRA, "length"), True),
    "an item beyond its file": change((*EXTRA, "length"), 11),
    "an item in no file of the record": change(
        (*EXTRA, "relative_path"), FILE.replace("0_0", "1_0")
    ),
    "a file name that is half a character": change((*EXTRA, "relative_path"), "\udc80"),
    "a file name of 300 letters": change((*EXTRA, "relative_path"), "x" * 300),
    "an entry that is none": change(EXTRA, None),
    "an id that is a list": change(("storage_meta", "checkpoint_id"), ["x"]),
    "a record that is a list": change(("dcp_checkfreq",), [1]),
    "a record of a file elsewhere": change(("dcp_checkfreq", "files"), {FILE: 200, "../x": 1}),
    "a record of one digest more": change(("dcp_checkfreq", "digests"), bytes(32)),
    "a record of bytes before its item": change(
        ("dcp_checkfreq", "payload_offset"), struct.pack("<3Q", 64, 64, 190)
    ),
    "a record of bytes beyond its item": change(
        ("dcp_checkfreq", "payload_bytes"), struct.pack("<3Q", 12, 6, 16000)
    ),
    "a record whose step is a text": change(("dcp_checkfreq", "step"), "7"),
    "a record whose step is endless": change(("dcp_checkfreq", "step"), 10**5000),
    "a record that abandons a list": change(("dcp_checkfreq", "abandons"), {"run b": [4]}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_sealed_metadata_that_is_not_right_is_refused(name):

    metadata = small_metadata()
    metadata.dcp_checkfreq = encode(small_record())
    assert metadata_format.load(sealed(pickle.dumps(metadata)), WHERE)[1] is not None
    CHANGES[name](metadata)
    with pytest.raises(BrokenMetadata) as caught:
        metadata_format.load(sealed(pickle.dumps(metadata)), WHERE)
    assert len(str(caught.value)) < 500


def test_what_another_planner_keeps_is_kept_if_it_is_plain():

    kept = {
        "w": ["a", ("b", 1)],
        "n": {"one": 1, 2: None, (3, "x"): 1.5},
        "o": collections.OrderedDict(a=torch.Size([1, 2])),
        "e": [],
        "d": {},
    }
    metadata = small_metadata()
    metadata.planner_data = kept
    metadata.mcore_data = {"shape": (1, 2)}  # as Megatron's planner does
    loaded, _ = metadata_format.load(pickle.dumps(metadata), WHERE)
    assert loaded.planner_data == kept
    assert loaded.mcore_data == {"shape": (1, 2)}


def test_tensor_properties_of_the_module_of_old_torch_are_read():

    metadata = small_metadata()
    content = pickle.dumps(metadata, protocol=2)
    new = b"torch.distributed.checkpoint.metadata\n"
    old = b"torch.distributed._shard.sharded_tensor.metadata\n"
    content = content.replace(new + b"TensorProperties\n", old + b"TensorProperties\n")
    content = content.replace(new + b"_MEM_FORMAT_ENCODING\n", old + b"MEM_FORMAT_ENCODING\n")
    assert content.count(old) == 2
    loaded, _ = metadata_format.load(content, WHERE)
    assert loaded.state_dict_metadata == metadata.state_dict_metadata
