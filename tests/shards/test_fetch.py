"""Reading: whole or partly, in any number of threads; damaged bytes reach no target."""

import errno
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from dcp_checkfreq.errors import BrokenShard
from dcp_checkfreq.format.digest import digest
from dcp_checkfreq.shards.fetch import Fetcher
from dcp_checkfreq.shards.read_plan import Want, round_to_blocks
from dcp_checkfreq.storage.local.huge_pages import BOUNCE_BYTES
from dcp_checkfreq.testing import ForwardingTier, ManualClock, MemoryTier

BLOCK = 1000


class Gathered:
    """A target that keeps what it took, by where it belongs."""

    def __init__(self, size):
        self.data = bytearray(b"\xaa" * size)
        self.taken = 0
        self.lock = threading.Lock()

    def take(self, want, data):
        self.data[want.start : want.stop] = data
        with self.lock:
            self.taken += len(data)


def shard(payloads, seed=1):
    """Return a file with these payloads behind gaps, and where each starts."""
    content, starts = bytearray(), []
    rng = random.Random(seed)
    for payload in payloads:
        content += rng.randbytes(rng.choice([0, 1, 70, 5000]))
        starts.append(len(content))
        content += payload
    return bytes(content), starts


def digests_of(payload, block=BLOCK):
    return [digest(payload[at : at + block]) for at in range(0, len(payload), block)]


def fetch(tier, sizes, wants, payloads, *, threads=2, check=True):
    targets = [Gathered(len(payload)) for payload in payloads]
    digests = [digests_of(payload) if check else [] for payload in payloads]
    fetcher = Fetcher(tier, sizes, threads, clock=ManualClock())
    try:
        return targets, fetcher.fetch(wants, targets, digests)
    finally:
        fetcher.close()


@examples(60)
@given(data=st.data(), threads=st.integers(1, 4))
def test_what_is_wanted_arrives_and_nothing_else(data, threads):
    sizes = data.draw(st.lists(st.integers(0, 20_000), min_size=1, max_size=6))
    payloads = [random.Random(size).randbytes(size) for size in sizes]
    content, starts = shard(payloads)
    tier = MemoryTier.holding({"a": content})
    wants, spans = [], []
    for ticket, (payload, offset) in enumerate(zip(payloads, starts, strict=True)):
        start = data.draw(st.integers(0, len(payload)))
        stop = data.draw(st.integers(start, len(payload)))
        start, stop = round_to_blocks(start, stop, BLOCK, len(payload))
        wants.append(Want(ticket, "a", offset, start, stop, BLOCK))
        spans.append((start, stop))
    targets, _ = fetch(tier, {"a": len(content)}, wants, payloads, threads=threads)
    for target, payload, (start, stop) in zip(targets, payloads, spans, strict=True):
        expected = b"\xaa" * start + payload[start:stop] + b"\xaa" * (len(payload) - stop)
        assert target.data == expected
        assert target.taken == stop - start


def test_a_payload_of_several_windows_arrives_whole():
    payload = random.Random(2).randbytes(2 * BOUNCE_BYTES + 12_345)
    tier = MemoryTier.holding({"a": payload})
    wants = [Want(0, "a", 0, 0, len(payload), BLOCK)]
    targets, read_bytes = fetch(tier, {}, wants, [payload])
    assert bytes(targets[0].data) == payload
    assert len(payload) <= read_bytes < len(payload) + 100_000


@pytest.mark.parametrize("at", [0, 999, 1000, 4321, 9_999])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_damaged_block_is_named_and_reaches_no_target(at, threads):
    payload = random.Random(3).randbytes(10_000)
    content, (start,) = shard([payload])
    damaged = bytearray(content)
    damaged[start + at] ^= 1
    tier = MemoryTier.holding({"a": bytes(damaged)})
    targets = [Gathered(len(payload))]
    fetcher = Fetcher(tier, {"a": len(content)}, threads)
    with pytest.raises(BrokenShard, match=f"byte {start + at - at % BLOCK}"):
        fetcher.fetch([Want(0, "a", start, 0, 10_000, BLOCK)], targets, [digests_of(payload)])
    fetcher.close()
    block = slice(at - at % BLOCK, at - at % BLOCK + BLOCK)
    assert targets[0].data[block] == b"\xaa" * BLOCK


def test_damage_beside_what_is_wanted_is_not_looked_at():
    payload = random.Random(3).randbytes(10_000)
    damaged = bytearray(payload)
    damaged[9_000] ^= 1
    tier = MemoryTier.holding({"a": bytes(damaged)})
    targets, _ = fetch(tier, {}, [Want(0, "a", 0, 2000, 4000, BLOCK)], [payload])
    assert targets[0].data[2000:4000] == payload[2000:4000]


@pytest.mark.parametrize("size", [0, 1, 5000, 9_999])
def test_a_short_file_is_broken_whether_its_size_is_known_or_not(size):
    payload = random.Random(4).randbytes(10_000)
    tier = MemoryTier.holding({"a": payload[:size]})
    wants = [Want(0, "a", 0, 0, 10_000, BLOCK)]
    for sizes in ({"a": 10_000}, {}):
        with pytest.raises(BrokenShard, match="a "):
            fetch(tier, sizes, wants, [payload])


def test_a_longer_file_than_was_saved_is_broken():
    payload = bytes(5000)
    tier = MemoryTier.holding({"a": payload + b"x"})
    with pytest.raises(BrokenShard, match="5001 bytes"):
        fetch(tier, {"a": 5000}, [Want(0, "a", 0, 0, 5000, BLOCK)], [payload])


def test_a_missing_file_is_named():
    tier = MemoryTier.holding({"b": b"x"})
    with pytest.raises(BrokenShard, match="a is missing"):
        fetch(tier, {}, [Want(0, "a", 0, 0, 1, 0)], [b"x"])


class Failing(ForwardingTier):
    def around(self, verb, name, call):
        if verb == "read_into":
            raise OSError(errno.EIO, "the disk says no")
        return call()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_the_storage_is_not_lost_in_a_thread(threads):
    payload = bytes(3 * BOUNCE_BYTES)
    tier = Failing(MemoryTier.holding({"a": payload}))
    wants = [Want(0, "a", 0, 0, len(payload), 0)]
    with pytest.raises(BrokenShard, match="the disk says no"):
        fetch(tier, {}, wants, [payload], threads=threads, check=False)


def test_no_thread_is_left_when_it_returns():
    payload = bytes(3 * BOUNCE_BYTES)
    before = threading.active_count()
    wants = [Want(0, "a", 0, 0, len(payload), 0)]
    fetch(MemoryTier.holding({"a": payload}), {}, wants, [payload], threads=4, check=False)
    assert threading.active_count() == before
