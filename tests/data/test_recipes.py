"""The code on the data page runs, from top to bottom."""

import importlib.util
import json

import pytest
import torch
from loader_tools import Ids
from page_tools import parted
from torch.utils.data import IterableDataset

PAGE = "docs/data.md"
FILES, ROWS = 40, 50
LOADERS = (
    "ResumableLoader", "ResumableBatchSampler", "ResumableDALILoader", "ResumableParquetLoader",
    "ResumableStreamLoader",
)  # fmt: skip


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class StatefulStream(Stream):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Mesh:
    """What a device mesh of one process answers."""

    def get_local_rank(self, name):
        return 0

    def __getitem__(self, name):
        return self

    def size(self):
        return 1


def write_inputs(folder):
    """Write what the recipes read; return the names that the page takes for granted."""
    image = pytest.importorskip("PIL.Image")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = [folder / f"{number:03}.png" for number in range(FILES)]
    for number, path in enumerate(paths):
        image.new("RGB", (32, 32), (number, 0, 0)).save(path)
    for name in ("rows", "shards"):
        (folder / name).mkdir()
    for part in range(2):
        labels = list(range(part * ROWS, (part + 1) * ROWS))
        table = pa.table({"label": labels, "more": labels})
        pq.write_table(table, folder / "rows" / f"{part}.parquet", row_group_size=9)
        lines = [json.dumps({"label": label}) for label in labels]
        (folder / "shards" / f"{part}.jsonl").write_text("\n".join(lines))
    return {
        "paths": paths,
        "labels": list(range(FILES)),
        "folder": folder / "rows",
        "shards": folder / "shards",
        "cache_folder": folder / "cache",
    }


def test_every_block_runs_after_those_before_it(tmp_path):
    model, trained = torch.nn.Linear(1, 1), []
    names = write_inputs(tmp_path) | {
        "dataset": Ids(100),
        "stream": Stream(),
        "stateful_stream": StatefulStream(),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "root": tmp_path / "checkpoints",
        "mesh": Mesh(),
        "train_step": lambda batch: trained.extend(batch.flatten().tolist()),
    }
    found = {}  # what was trained, by what is in the block
    _script, blocks = parted(PAGE)  # the script runs in tests/test_readme.py
    for code in blocks:
        if "nvidia.dali" in code and importlib.util.find_spec("nvidia.dali") is None:
            continue  # an extra that is not installed
        trained.clear()
        exec(compile(code, PAGE, "exec"), names)
        for loader in LOADERS:
            if f"{loader}(" in code:
                found.setdefault(loader, sorted(trained))
        if "CachedFiles(" in code:
            files = sorted(data for batch in names["batches"] for data in batch)
            assert files == sorted(path.read_bytes() for path in names["paths"])
    assert found.pop("ResumableDALILoader", list(range(FILES))) == list(range(FILES))
    assert found == {
        "ResumableLoader": sorted([*range(100)] * 3),
        "ResumableBatchSampler": list(range(100)),
        "ResumableParquetLoader": list(range(2 * ROWS)),
        "ResumableStreamLoader": list(range(2 * ROWS)),
    }
