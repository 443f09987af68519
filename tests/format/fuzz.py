"""Makes up bytes for everything that is read, and tells what came of them. See `test_fuzz`.

    python tests/format/fuzz.py SEED INPUTS     # so many inputs
    python tests/format/fuzz.py SEED 3600s      # for so long

Prints one line per kind of input with counts. Ends with 1 at the first input that breaks a promise,
which is written to a file and named.
"""

import array
import collections
import contextlib
import decimal
import faulthandler
import fractions
import http
import io
import ipaddress
import json
import logging
import os
import pathlib
import pickle
import pickletools
import random
import re
import resource
import sys
import tempfile
import time
import uuid
import warnings
import zipfile
import zoneinfo

import torch
import torch.distributed.checkpoint as dcp
from metadata_tools import FILE, small_metadata, small_record

from dcp_checkfreq.errors import CheckFreqError, LoadFailed
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format import names
from dcp_checkfreq.format import sealed as sealed_format
from dcp_checkfreq.format.forms import PLAIN
from dcp_checkfreq.format.index import encode
from dcp_checkfreq.format.safe_bytes import load_object
from dcp_checkfreq.policy.costs import Costs
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.profile_file import ProfileFiles
from dcp_checkfreq.policy.stored_profile import StoredProfile
from dcp_checkfreq.policy.stored_profile import encode as encode_profile
from dcp_checkfreq.recovery.lease import LeaseFile
from dcp_checkfreq.recovery.root_id import read_root_id
from dcp_checkfreq.recovery.scan import check_digests, examine
from dcp_checkfreq.runtime.clock import SystemClock
from dcp_checkfreq.state.packed import MARK, TAGGED, pack
from dcp_checkfreq.state.unpacked import ALL_KINDS, check_loaded, unpacked_from
from dcp_checkfreq.testing import MemoryTier

MOST_CPU_S = 1.0  # of the processor, for an input of up to 100 KB
MOST_BYTES_PER_BYTE = 20
FREE_BYTES = 16 << 20
LONGEST_TEXT = 2000
FINGERPRINT = "0123456789abcdef" * 4

# --- the seeds ---


def stock_metadata():
    with tempfile.TemporaryDirectory() as folder:
        state = {"w": torch.ones(3, 4), "b": [torch.zeros(()), 1, "x"], "n": {"deep": 2.5}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        with open(os.path.join(folder, ".metadata"), "rb") as file:
            return file.read()


def saved(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


OURS = metadata_format.dump(small_metadata(), small_record())
STOCK = stock_metadata()
ITEMS = [
    saved(value)
    for value in (
        {"a": 1, "b": [1.5, None, "text", b"bytes"], (1, 2): {3, 4}},
        torch.arange(6.0).reshape(2, 3),
        {"generator": random.Random(1).getstate(), "list": [torch.ones(2)] * 3},
        io.BytesIO(b"raw"),
    )
]
# Trees with tags in them, as `pack` makes them: see `state/packed`.
ITEMS += [
    saved(pack(value)["tree"])
    for value in (
        {"a": collections.deque([1], 2), pathlib.PurePath("x"): {1, "a", (2,)}},
        [decimal.Decimal("1.5"), fractions.Fraction(1, 3), 1 << 3000, {http.HTTPStatus.OK: ...}],
        [random.Random(1), torch.Generator(), array.array("d", [1.5]), re.I | re.M],
        [torch.eye(3).to_sparse(), torch.nn.Parameter(torch.ones(2)), bytearray(b"x")],
        collections.ChainMap({"z": zoneinfo.ZoneInfo("UTC")}, collections.defaultdict(list, a=1)),
        [uuid.UUID(int=3), ipaddress.ip_network("10.0.0.0/8"), torch.strided],
    )
]
try:
    import numpy as np

    ITEMS.append(saved(pack([np.random.default_rng(1), np.random.RandomState(1)])["tree"]))
    ITEMS.append(saved(pack(np.random.Generator(np.random.Philox(1)))["tree"]))
    ITEMS.append(saved({"a": np.arange(3.0), "s": np.float32(1), "t": np.array(["ab"])}))
except ImportError:
    pass
LEASE = json.dumps(
    {"run_id": "run", "host": "host", "pid": 17, "renewed_s": 1.5, "started": "boot 5"}
).encode()
PROFILE = encode_profile(
    StoredProfile(
        fingerprint=FINGERPRINT,
        costs=Costs(
            iteration_s=0.1, update_s=0.01, snapshot_gpu_s=None, snapshot_cpu_s=0.02,
            persist_s=1.0, call_s=0.001, state_bytes=1, gpu_used_bytes=0, gpu_total_bytes=0,
        ),
        mode=Mode.CPU, interval_steps=3, max_overhead=0.035, mtbf_s=None, confirmed=True,
    )
).encode()  # fmt: skip


def sealed(body):
    return body + metadata_format.trailer(body)


# --- making inputs ---

ODD_NUMBERS = (
    -1, 0, 1, 255, 256, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 2**100,
    -(2**63), 10**5000, -(2**200), 1.5, float("nan"), float("inf"), True,
)  # fmt: skip
ODD_TEXTS = ("", ".", "..", "a/b", "a\0b", "\ud800", "x" * 300, "ä" * 100, "__0_0_" + "9" * 5000)


def odd_value(rng, depth=0):
    kind = rng.randrange(12)
    if kind < 3:
        return rng.choice(ODD_NUMBERS)
    if kind < 5:
        return rng.choice(ODD_TEXTS)
    if kind == 5:
        return rng.choice([None, b"", b"\xff" * rng.randrange(40), torch.float32, torch.strided])
    if kind == 6:
        return torch.Size([rng.choice([0, 1, 7, 2**40]) for _ in range(rng.randrange(4))])
    if kind == 7:  # what is small in the file and endless to walk
        inner = rng.choice([(), [], ("x",), ["x"], {"k": 1}])
        for _ in range(rng.randrange(60)):
            inner = rng.choice([(inner, inner), [inner, inner], {"a": inner, "b": inner}])
        return inner
    if kind == 8:
        inner = []
        for _ in range(rng.randrange(150)):
            inner = rng.choice([(inner,), [inner], {"n": inner}])
        return inner
    if depth > 3:
        return None
    if kind == 9:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 10:
        return tuple(odd_value(rng, depth + 1) for _ in range(rng.randrange(4)))
    return {rng.choice(ODD_TEXTS): odd_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def places_in(value, path=()):
    """Yield every place of an object tree where another value could be."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, ("item", key))
            yield from places_in(inner, (*path, ("item", key)))
    elif isinstance(value, list):
        for n, inner in enumerate(value):
            yield (*path, ("item", n))
            yield from places_in(inner, (*path, ("item", n)))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for name, inner in vars(value).items():
            yield (*path, ("attribute", name))
            yield from places_in(inner, (*path, ("attribute", name)))


def put(root, path, value):
    for kind, name in path[:-1]:
        root = root[name] if kind == "item" else getattr(root, name)
    kind, name = path[-1]
    if kind == "item":
        root[name] = value
    else:
        object.__setattr__(root, name, value)


def odd_metadata(rng):
    """Metadata with some parts replaced, as a pickle."""
    metadata = small_metadata()
    metadata.dcp_checkfreq = encode(small_record())
    # Torch puts a memory format that it does not know into a message when it is pickled.
    places = [path for path in places_in(metadata) if path[-1] != ("attribute", "memory_format")]
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        try:
            put(metadata, rng.choice(places), odd_value(rng))
        except (LookupError, AttributeError, TypeError):
            continue
    if rng.random() < 0.2:
        del metadata.dcp_checkfreq
    try:
        return pickle.dumps(metadata, protocol=rng.choice([2, 4, 4, 5]))
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, pickle.PickleError):
        return OURS[: -metadata_format.TRAILER_BYTES]


def opcodes_of(content):
    """Cut a pickle at its opcodes."""
    starts = []
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        starts.extend(at for _, _, at in pickletools.genops(content))
    return [content[a:b] for a, b in zip(starts, [*starts[1:], len(content)], strict=True)]


def odd_opcode(rng):
    code = bytes(
        [
            rng.choice(
                b"()].}eabustR\x81\x85\x86\x87\x88\x89\x8a\x8c\x93\x94\x95NKMJhjqrcXBC2"
                b"01QPIFLSVGgpiod\x82\x8b\x8d\x8e\x8f\x90\x91\x92\x96\x97\x98"
            )
        ]
    )
    return code + rng.randbytes(rng.choice([0, 0, 0, 1, 2, 4, 8, 9]))


def odd_opcodes(rng, content):
    """A pickle with some opcodes left out, doubled, swapped, or made up."""
    codes = opcodes_of(content)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at = rng.randrange(len(codes))
        what = rng.randrange(6)
        if what == 0:
            del codes[at : at + rng.choice([1, 2, 8])]
        elif what == 1:
            codes[at:at] = codes[at : at + rng.choice([1, 3, 20])] * rng.choice([1, 2, 500])
        elif what == 2:
            other = rng.randrange(len(codes))
            codes[at], codes[other] = codes[other], codes[at]
        elif what == 3:
            codes[at] = odd_opcode(rng)
        elif what == 4:
            codes.insert(at, odd_opcode(rng))
        else:
            part = rng.choice([b"]\x94", b")\x85", b"h\x05h\x05\x86\x94", b"(", b"}(", b"K\x01"])
            codes.insert(at, part * rng.choice([2, 30, 5000]))
        if not codes:
            codes = [b"."]
    return b"".join(codes)[:100_000]


def odd_bytes(rng, content):
    """Bytes with some of them changed, cut out, doubled, or put in."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 3, 10])):
        at = rng.randrange(len(data) + 1)
        what = rng.randrange(6)
        if what == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            data[at : at + rng.choice([1, 4, 8])] = rng.randbytes(rng.choice([1, 4, 8]))
        elif what == 2:
            del data[at : at + rng.choice([1, 2, 30, 1000])]
        elif what == 3:
            data[at:at] = data[at : at + rng.choice([1, 30, 1000])] * rng.choice([1, 2, 50])
        elif what == 4:
            size = rng.choice([1, 2, 4, 8])
            data[at : at + size] = rng.choice([b"\xff", b"\x7f", b"\x00", b"\x80"]) * size
        else:
            del data[at:]
        data = data[:100_000] or bytearray(b"\0")
    return bytes(data)


def made_metadata(rng):
    body = OURS[: -metadata_format.TRAILER_BYTES]
    seed = rng.choice([body, body, STOCK, odd_metadata(rng)])
    way = rng.randrange(4)
    if way == 0:
        content = odd_metadata(rng)
    elif way == 1:
        content = odd_opcodes(rng, seed)
    elif way == 2:
        content = odd_bytes(rng, seed)
    else:
        content = rng.randbytes(rng.randrange(300))
    return sealed(content) if rng.random() < 0.6 else content


def made_item(rng):
    seed = rng.choice(ITEMS)
    if rng.random() < 0.3:
        return odd_bytes(rng, seed)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(seed)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith("data.pkl"):
                way = rng.randrange(4)
                if way == 0:
                    content = odd_opcodes(rng, content)
                elif way == 1:
                    content = odd_bytes(rng, content)
                elif way == 2:
                    try:
                        content = pickle.dumps(odd_value(rng), protocol=2)
                    except (RuntimeError, ValueError, TypeError):
                        content = b"N."
            elif rng.random() < 0.1:
                content = odd_bytes(rng, content or b"\0")
            kind = zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
            new.writestr(entry.filename, content, kind)
    return out.getvalue()


def made_json(rng, content):
    if rng.random() < 0.5:
        return odd_bytes(rng, content)
    fields = json.loads(content)
    for _ in range(rng.choice([1, 1, 2])):
        fields[rng.choice([*fields, "more"])] = rng.choice(
            [odd_json(rng), odd_json(rng), {"a": odd_json(rng)}]
        )
    text = json.dumps(fields)
    return text.replace('"endless"', "[" * rng.choice([1, 2000, 20_000])).encode()


def odd_json(rng):
    numbers = [n for n in ODD_NUMBERS if not isinstance(n, int) or abs(n) < 10**4000]
    return rng.choice([*numbers, *ODD_TEXTS, None, [], {}, "endless", [1, [2]], 10**400])


def made_name(rng):
    seed = rng.choice(
        ["step_00000007", "step-7", "__0_1_0123456789ab.distcp", ".metadata.0123456789ab.tmp", FILE]
    )
    text = odd_bytes(rng, seed.encode()).decode(errors=rng.choice(["surrogateescape", "replace"]))
    digits = rng.choice(["", "", "9" * rng.choice([5, 40, 5000]), "0" * 5000])
    return text.replace("7", digits + "7").replace("__0", "__0" + digits)


# --- reading them ---


def read_metadata(data):
    plain = judged(sealed_format.load, data, "/runs/step_7", PLAIN)
    assert plain == judged(metadata_format.load, data, "/runs/step_7"), "torch changes the verdict"
    metadata, _ = metadata_format.load(data, "/runs/step_7")
    # What was taken can be walked, shown and stored: nothing endless is left in it.
    assert len(repr(metadata)) < 1000 + 100 * len(data), "it is endless when it is shown"
    pickle.dumps(metadata)


def judged(load, *arguments):
    """Return which error it is, or what both families of classes have in common, and the record."""
    try:
        metadata, record = load(*arguments)
    except LoadFailed as error:
        return type(error)
    pickle.dumps(metadata)
    kept = metadata.state_dict_metadata
    return (
        record,
        {
            key: [
                (tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in getattr(one, "chunks", [])
            ]
            for key, one in kept.items()
        },
        [
            (index.fqn, index.offset, info.relative_path, info.offset, info.length)
            for index, info in (metadata.storage_data or {}).items()
        ],
    )


def read_folder(data):
    tier = MemoryTier.holding({"step_7/.metadata": data, f"step_7/{FILE}": bytes(200)})
    folder = tier.child("step_7")
    record = examine(folder, "step_7", 7)
    assert record.problem is None or len(record.problem) < LONGEST_TEXT
    problem = check_digests(folder)
    assert problem is None or len(problem) < LONGEST_TEXT


def read_item(data):
    value = load_object(io.BytesIO(data), "a key", "/runs/step_7", allow_pickle=False)
    tree = value if type(value) is tuple and len(value) == 2 else (value, TAGGED)
    tree = (tree[0], TAGGED)
    check_loaded(tree, "a key", "/runs/step_7")
    made = unpacked_from({"tree": tree, "tensors": [torch.ones(2)]}, "a key", "/runs/step_7")
    draw_from(made)


def draw_from(value):
    """A generator that was made reads no memory but its own."""
    for one in value if type(value) is list else [value]:
        if isinstance(one, (np.random.Generator, np.random.RandomState)):
            one.normal(size=3)
            one.bytes(10)


def made_tag(rng):
    """Any content in any kind of tag."""
    kinds = sorted(ALL_KINDS)
    value = odd_value(rng)
    for _ in range(rng.randrange(1, 4)):
        content = [odd_content(rng) for _ in range(rng.randrange(4))]
        content.insert(rng.randrange(len(content) + 1), value)
        value = (MARK, rng.choice(kinds), *content)
        if rng.random() < 0.2:
            value = rng.choice([[value, value], {"a": value}, {value: 1} if is_key(value) else {}])
    try:
        return saved((value, TAGGED))
    except (RuntimeError, ValueError, TypeError, RecursionError):
        return b""


def is_key(value):
    try:
        hash(value)
    except TypeError:
        return False
    return type(value[-1]) is not tuple


def odd_content(rng):
    if rng.random() < 0.5:
        return odd_value(rng)
    name = rng.choice(["http", "builtins", "signal", "enum", "zoo", "os", "PCG64", "PurePosixPath"])
    return rng.choice(
        [name, "HTTPStatus", "system", {"a": 1}, {}, (), (1, 2), [torch.ones(2)], "list", "cpu",
         ("__dcp_checkfreq_tensor__", 0), "sparse_csr", True, "UTC", "u", 4, b"abcd", "ab12"]
    )  # fmt: skip


def read_lease(data):
    root = MemoryTier.holding({".checkfreq/lease.json": data})
    lease = LeaseFile(root, "another run", SystemClock())
    lease.held_by_other()
    lease.release()


def read_profile(data):
    name = names.profile_file(FINGERPRINT)
    ProfileFiles(MemoryTier.holding({f".checkfreq/{name}": data})).load(FINGERPRINT)


def read_id(data):
    read_root_id(MemoryTier.holding({"root-id": data}))


def read_name(text):
    for parse in (names.parse_step, names.parse_shard, names.parse_scratch, names.is_file_name):
        parse(text)


KINDS = {
    "metadata": (made_metadata, read_metadata, 6),
    "folder": (made_metadata, read_folder, 3),
    "item": (made_item, read_item, 4),
    "tag": (made_tag, read_item, 3),
    "lease": (lambda rng: made_json(rng, LEASE), read_lease, 1),
    "profile": (lambda rng: made_json(rng, PROFILE), read_profile, 1),
    "root id": (lambda rng: odd_bytes(rng, b"0123456789abcdef"), read_id, 1),
    "name": (made_name, read_name, 1),
}


def peak_bytes():
    """Return the most memory that this process held since `forget_peak`."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]) << 10


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak_bytes()


def tried(kind, data):
    """Read one input; return what came of it. Raise if a promise is broken."""
    before = forget_peak()
    begun = time.process_time()
    outcome, text = "taken", ""
    try:
        KINDS[kind][1](data)
    except CheckFreqError as error:
        outcome, text = type(error).__name__, str(error)
        pickle.loads(pickle.dumps(error))
    seconds = time.process_time() - begun
    taken = peak_bytes() - before
    assert len(text) < LONGEST_TEXT, f"a text of {len(text)} characters"
    assert seconds < MOST_CPU_S, f"it took {seconds:.1f} s"
    assert taken < FREE_BYTES + MOST_BYTES_PER_BYTE * len(data), f"it took {taken} bytes"
    return outcome


def run(seed, inputs, seconds):
    rng = random.Random(seed)
    limit = 6 << 30  # a bomb that is missed ends this process and not the machine
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    logging.disable()
    warnings.simplefilter("ignore")
    counts = {kind: {} for kind in KINDS}
    until = time.monotonic() + seconds
    weights = [weight for _, _, weight in KINDS.values()]
    number = 0
    current = os.path.join(tempfile.gettempdir(), f"fuzz-{seed}-{os.getpid()}")
    while number < inputs and time.monotonic() < until:
        kind = rng.choices(list(KINDS), weights)[0]
        data = KINDS[kind][0](rng)
        with open(current, "wb") as file:  # for inputs that end the process, or never end
            file.write(data if isinstance(data, bytes) else repr(data).encode())
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            outcome = tried(kind, data)
        except BaseException as error:
            print(f"BROKEN {kind}, input {number} of seed {seed}, in {current}: {error!r}"[:3000])
            raise
        counts[kind][outcome] = counts[kind].get(outcome, 0) + 1
        number += 1
    faulthandler.cancel_dump_traceback_later()
    os.unlink(current)
    for kind, outcomes in counts.items():
        print(f"{kind}: {sum(outcomes.values())} {dict(sorted(outcomes.items()))}")
    print(f"tried {number} inputs of seed {seed}")


if __name__ == "__main__":
    how_many = sys.argv[2]
    if how_many.endswith("s"):
        run(int(sys.argv[1]), sys.maxsize, float(how_many[:-1]))
    else:
        run(int(sys.argv[1]), int(how_many), 1e9)
