"""Shard files in each layout, whose samples are numbered throughout."""

import io
import json
import tarfile

import numpy as np

from dcp_checkfreq.data.loaders.shards import ResumableStreamLoader
from dcp_checkfreq.data.sources.shard_readers import JsonLinesReader, NpyReader
from dcp_checkfreq.data.sources.tar_reader import TarReader


def jsonl_bytes(ids):
    return b"".join(json.dumps({"id": i, "text": f"line {i}"}).encode() + b"\n\n" for i in ids)


def npy_bytes(ids):
    file = io.BytesIO()
    np.save(file, np.array([[i, 2 * i] for i in ids], dtype=np.int32).reshape(-1, 2))
    return file.getvalue()


def tar_bytes(ids, folder="", mode="w"):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:
        for i in ids:
            for extension, data in (("json", b"%d" % i), ("img.bin", bytes([i % 256]) * (i % 700))):
                member = tarfile.TarInfo(f"{folder}{i:06}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def numbers_in_lines(file):
    """A reader that is only a function."""
    return (int(line) for line in file)


def lines_bytes(ids):
    return b"".join(b"%d\n" % i for i in ids)


# name: (suffix, bytes of a shard, reader, its sample to its number)
LAYOUTS = {
    "jsonl": ("jsonl", jsonl_bytes, JsonLinesReader(), lambda sample: sample["id"]),
    "npy": ("npy", npy_bytes, NpyReader(), lambda sample: int(sample[0])),
    "tar": ("tar", tar_bytes, TarReader(), lambda sample: int(sample["json"])),
    "function": ("txt", lines_bytes, numbers_in_lines, int),
}


def write_shards(folder, sizes, layout="jsonl"):
    """Write a shard per size; return their paths."""
    suffix, to_bytes, _, _ = LAYOUTS[layout]
    first, paths = 0, []
    for number, size in enumerate(sizes):
        paths.append(folder / f"shard-{number:03}.{suffix}")
        paths[-1].write_bytes(to_bytes(range(first, first + size)))
        first += size
    return paths


def as_list(samples):
    return list(samples)


class Job:
    """All ranks of one launch, in one process."""

    def __init__(self, source, world, batch_size, state=None, **options):
        options.setdefault("collate_fn", as_list)
        self.loaders = [
            ResumableStreamLoader(source, batch_size, rank=rank, world_size=world, **options)
            for rank in range(world)
        ]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(state)

    def run(self, steps=None):
        """Run so many steps, or the rest of the epoch; return (real samples per step, state)."""
        done, iterators = [], [iter(loader) for loader in self.loaders]
        while steps is None or len(done) < steps:
            try:
                batches = [next(iterator) for iterator in iterators]
            except StopIteration:
                break
            pairs = zip(self.loaders, batches, strict=True)
            done.append([sample for loader, batch in pairs for sample in batch[: loader.valid]])
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return done, states[0]


def flat(steps):
    return [sample for step in steps for sample in step]
