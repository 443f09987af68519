"""What the data arms load: photographs to decode and crop, and numbers that cost nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dcp_checkfreq.data import sample_rng
from PIL import Image
from torch.utils.data import Dataset

SIZE = (500, 375)  # width and height, about the mean of ImageNet
CROP = 224
PNG_EVERY = 8  # the others are JPEG
_MEAN, _STD = (
    torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)


def write_images(folder: Path, count: int) -> list[str]:
    """Write photograph-like files, about 80 KB as JPEG and 400 as PNG; return their paths."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    paths = []
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize(SIZE, Image.Resampling.BICUBIC), dtype=np.int16)
        grain = rng.normal(0, 6, smooth.shape).astype(np.int16)
        picture = Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))
        path = folder / f"{number:05}.{'png' if number % PNG_EVERY == 0 else 'jpg'}"
        picture.save(path, quality=90, compress_level=1)
        paths.append(str(path))
    return paths


def from_random() -> list[float]:
    """Return numbers in ``[0, 1)`` from the global generator, as transforms commonly do."""
    return [random.random() for _ in range(5)]


def from_sample_rng() -> list[float]:
    """Return numbers in ``[0, 1)`` from the generator of this sample."""
    numbers: list[float] = sample_rng().random(5).tolist()
    return numbers


def load_image(source: str | BytesIO, numbers: list[float]) -> torch.Tensor:
    """Decode, cut out a random part, resize it, flip it or not, normalise.

    Returns:
        [3, CROP, CROP], float32.
    """
    with Image.open(source) as file:
        picture = file.convert("RGB")
    width, height = picture.size
    share = (0.25 + 0.75 * numbers[0]) ** 0.5  # of each side: a quarter of the area or more
    w, h = width * share, height * share
    left, top = numbers[1] * (width - w), numbers[2] * (height - h)
    picture = picture.resize(
        (CROP, CROP), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h)
    )
    if numbers[3] < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    return (pixels.float() / 255 - _MEAN) / _STD


class Images(Dataset[Any]):
    """Image files; the random numbers come from ``draw``."""

    def __init__(self, paths: list[str], draw: Callable[[], list[float]]) -> None:
        self._paths = paths
        self._draw = draw

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return load_image(self._paths[index], self._draw()), index


class Numbers(Dataset[Any]):
    """Items that are their own index: all that is left is what the loader itself costs."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index
