"""Peers that need not be installed: mosaicml-streaming and DALI pipelines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from data_sets import CROP, from_random, load_image


def write_mds(folder: Path, paths: list[str] | None, count: int) -> None:
    """Write the format that mosaicml-streaming reads: the files as they are, or numbers."""
    from streaming import MDSWriter

    shutil.rmtree(folder, ignore_errors=True)
    column = {"file": "bytes", "label": "int"} if paths is not None else {"label": "int"}
    with MDSWriter(out=str(folder), columns=column) as writer:
        for number in range(count):
            item: dict[str, Any] = {"label": number}
            if paths is not None:
                item["file"] = Path(paths[number]).read_bytes()
            writer.write(item)


def streaming_loader(folder: Path, batch_size: int, workers: int) -> Any:
    """Return a `StreamingDataLoader` over what `write_mds` wrote."""
    from streaming import StreamingDataLoader, StreamingDataset

    class Streamed(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            item = super().__getitem__(at)
            if "file" not in item:
                return item["label"]
            return load_image(BytesIO(item["file"]), from_random()), item["label"]

    data = Streamed(local=str(folder), shuffle=True, batch_size=batch_size)
    return StreamingDataLoader(
        data, batch_size=batch_size, num_workers=workers, persistent_workers=workers > 0
    )


def _augmented(file: Any, u: list[Any]) -> Any:
    """Return DALI's operators for what `load_image` does."""
    from nvidia.dali import fn, types

    share = fn.cast(0.25 + 0.75 * u[0], dtype=types.FLOAT) ** 0.5
    anchor = fn.stack(u[1] * (1 - share), u[2] * (1 - share))
    part = fn.decoders.image_slice(file, anchor, fn.stack(share, share), axes=(0, 1), device="cpu")
    small = fn.resize(part, size=(CROP, CROP))
    return fn.crop_mirror_normalize(
        small, dtype=types.FLOAT, output_layout="CHW",
        mirror=fn.cast(u[3] < 0.5, dtype=types.INT32),
        mean=[255 * m for m in (0.485, 0.456, 0.406)], std=[255 * s for s in (0.229, 0.224, 0.225)],
    )  # fmt: skip


def build_fed(threads: int) -> Any:
    """Return ``build`` for `ResumableDALILoader`."""
    from nvidia.dali import pipeline_def

    @pipeline_def
    def fed(source: Any) -> Any:
        path, label, u = source.inputs()
        from nvidia.dali import fn

        return _augmented(fn.io.file.read(path), [u[i] for i in range(4)]), label

    return lambda source, max_batch_size, **options: fed(
        source, batch_size=max_batch_size, num_threads=threads, device_id=None, **options
    )


def build_native(paths: list[str], batch_size: int, threads: int) -> Any:
    """Return ``build`` for a pipeline with DALI's own reader and random numbers."""
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=batch_size, num_threads=threads, device_id=None)
    def native() -> Any:
        file, label = fn.readers.file(
            files=paths, pad_last_batch=True, random_shuffle=True, name="Reader"
        )
        return _augmented(file, [fn.random.uniform(range=[0.0, 1.0]) for _ in range(4)]), label

    return lambda **options: native(**options)


class NativeDALI:
    """DALI's own iterator, begun anew for each epoch."""

    def __init__(self, pipeline: Any) -> None:
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

        self._batches = DALIGenericIterator(
            [pipeline], ["image", "label"], reader_name="Reader", auto_reset=False,
            last_batch_policy=LastBatchPolicy.PARTIAL,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches
        self._batches.reset()
