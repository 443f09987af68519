"""Real image files and real pipelines for the tests of DALI."""

import os

import numpy as np
import pytest

# DALI is an optional extra; without it there is nothing to test here.
pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install -e '.[dali]'")

from nvidia.dali import fn, pipeline_def, types
from PIL import Image

from dcp_checkfreq.data import ResumableDALILoader

FILES = 103


def write_images(folder, count=FILES):
    """Write small images of several sizes, PNG and JPEG; return their paths."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    paths = []
    for number in range(count):
        pixels = rng.integers(0, 256, (20 + number % 7, 16 + number % 5, 3), dtype=np.uint8)
        paths.append(os.path.join(folder, f"{number:04}.{'png' if number % 2 else 'jpg'}"))
        Image.fromarray(pixels).save(paths[-1])
    return paths


@pipeline_def
def augmented(source):
    """Read, decode a random crop, flip, resize; all by the sample's own random numbers."""
    path, label, u = source.inputs()
    file = fn.io.file.read(path)
    shape = fn.cast(fn.peek_image_shape(file), dtype=types.FLOAT)
    share = 0.5 + 0.5 * u[0]
    anchor = fn.stack(u[1] * (1 - share), u[2] * (1 - share))
    image = fn.decoders.image_slice(file, anchor, fn.stack(share, share), axes=(0, 1), device="cpu")
    image = fn.flip(image, horizontal=fn.cast(u[3] < 0.5, dtype=types.INT32))
    image = fn.resize(image, size=(12, 12))
    return image, label, u, fn.cast(shape[0], dtype=types.INT32)


OUTPUTS = ["image", "label", "u", "height"]


def build(source, max_batch_size, **options):
    return augmented(source, batch_size=max_batch_size, num_threads=1, device_id=None, **options)


def build_with(**ours):
    """Return a ``build`` with other settings of the pipeline."""

    def build_other(source, max_batch_size, **options):
        settings = {"num_threads": 1, "device_id": None, **ours, **options}
        return augmented(source, batch_size=max_batch_size, **settings)

    return build_other


def loader_of(paths, batch_size=8, *, build=build, outputs=OUTPUTS, labels=None, **options):
    return ResumableDALILoader(build, outputs, paths, labels, batch_size, **options)


def samples_of(batch, valid=None):
    """Return the real samples of a batch as (label, bytes of the image, random numbers)."""
    count = len(batch["label"]) if valid is None else valid
    return [
        (
            int(batch["label"][i]),
            batch["image"][i].cpu().numpy().tobytes(),
            tuple(batch["u"][i].tolist()),
        )
        for i in range(count)
    ]


def take(loader, batches=None):
    """Return the real samples of the next batches, or of the rest of the epoch."""
    found = []
    for number, batch in enumerate(loader, start=1):
        found += samples_of(batch, loader.valid)
        if number == batches:
            break
    return found


class Job:
    """All ranks of one launch of a job, in one process: each has its loader."""

    def __init__(self, world, paths, batch_size, state=None, **options):
        self.loaders = [
            loader_of(paths, batch_size, rank=rank, world_size=world, **options)
            for rank in range(world)
        ]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(state)

    def run(self, steps=None):
        """Run so many steps, or the rest of the epoch; return (the real samples, state)."""
        found, done, iterators = [], 0, [iter(loader) for loader in self.loaders]
        while steps is None or done < steps:
            try:
                batches = [next(iterator) for iterator in iterators]
            except StopIteration:
                break
            done += 1
            for loader, batch in zip(self.loaders, batches, strict=True):
                found += samples_of(batch, loader.valid)
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return found, states[0]


def lost_and_repeated(samples, length=FILES):
    seen = [sample[0] for sample in samples]
    lost = [index for index in range(length) if index not in seen]
    return lost, sorted({index for index in seen if seen.count(index) > 1})
