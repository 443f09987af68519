"""Real images: scikit-learn's handwritten digits as PNG files, and the DALI pipelines over them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from PIL import Image
from sklearn.datasets import load_digits

SIDE = 16  # of what the network gets; the files are 32 x 32
OUTPUTS = ["image", "index"]
_TRAINED = 1437  # of 1797; the rest, by other writers, is for the test


@dataclass(frozen=True, slots=True)
class Digits:
    """Files and classes of one part."""

    paths: list[str]
    classes: torch.Tensor  # [files], int64


def write_digits(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, image in enumerate(load_digits().images):
        pixels = Image.fromarray(np.uint8(image * 255 / 16))
        pixels.resize((32, 32), Image.Resampling.NEAREST).save(folder / f"{number:04}.png")


def read_digits(folder: Path, limit: int | None = None) -> tuple[Digits, Digits]:
    """Return what is trained (at most ``limit`` files) and what is tested."""
    paths = sorted(os.path.join(folder, name) for name in os.listdir(folder))
    classes = torch.from_numpy(load_digits().target).long()
    trained = slice(0, min(limit or _TRAINED, _TRAINED))
    tested = slice(_TRAINED, None)
    return Digits(paths[trained], classes[trained]), Digits(paths[tested], classes[tested])


def augmented(file: Any, u: Any) -> Any:
    """Decode a random crop; change contrast and brightness.

    Args:
        file: encoded.
        u: [6] float32 in [0, 1): the random numbers of the sample.
    """
    share = 0.75 + 0.25 * u[0]
    anchor = fn.stack(u[1] * (1 - share), u[2] * (1 - share))
    image = fn.decoders.image_slice(
        file, anchor, fn.stack(share, share), axes=(0, 1), output_type=types.GRAY, device="cpu"
    )
    image = fn.brightness_contrast(image, brightness=0.8 + 0.4 * u[3], contrast=0.7 + 0.6 * u[4])
    image = fn.resize(image, size=(SIDE, SIDE))
    return fn.crop_mirror_normalize(image, std=[255.0], dtype=types.FLOAT, output_layout="CHW")


@pipeline_def(num_threads=1, device_id=None)
def fed(source: Any) -> Any:
    """Ours: order and random numbers come from the loader."""
    path, index, u = source.inputs()
    return augmented(fn.io.file.read(path), u), index


def build_fed(source: Any, max_batch_size: int, **options: Any) -> Any:
    return fed(source, batch_size=max_batch_size, **options)


@pipeline_def(num_threads=1, device_id=None)
def ordinary(paths: list[str]) -> Any:
    """A native reader that shuffles the whole epoch, and DALI's random numbers.

    Padded, because unpadded it would lose items even if nothing went wrong.
    """
    file, index = fn.readers.file(
        files=paths, labels=list(range(len(paths))), random_shuffle=True, pad_last_batch=True,
        initial_fill=len(paths), name="Files",
    )  # fmt: skip
    return augmented(file, fn.random.uniform(range=[0.0, 1.0], shape=[6])), fn.squeeze(
        index, axes=0
    )


@pipeline_def(num_threads=1, device_id=None)
def whole(paths: list[str]) -> Any:
    """The images as they are, for the test."""
    file, _ = fn.readers.file(files=paths)
    return augmented(file, types.Constant(np.float32([1.0, 0.0, 0.0, 0.5, 0.5, 0.0])))


def test_images(digits: Digits) -> torch.Tensor:
    """Return [files, 1, SIDE, SIDE], float32."""
    pipeline = whole(digits.paths, batch_size=len(digits.paths))
    (images,) = pipeline.run()
    return torch.from_numpy(images.as_array().copy())
