"""The code on the data page runs, from top to bottom."""

import pathlib
import re

import torch
from loader_tools import Ids
from torch.utils.data import IterableDataset

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "data.md"


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


def blocks():
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)


# Blocks for DALI, Parquet or a cache need more than is here; they are run where those are tested.
ELSEWHERE = ("DALI", "Parquet", "FileCache", "CachedFiles", "Shard")


def test_every_block_runs_after_those_before_it(tmp_path):
    model = torch.nn.Linear(1, 1)
    trained = []
    names = {
        "dataset": Ids(100),
        "stream": Stream(),
        "stateful_stream": StatefulStream(),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "root": tmp_path,
        "mesh": Mesh(),
        "train_step": trained.append,
    }
    run = [code for code in blocks() if not any(word in code for word in ELSEWHERE)]
    for code in run:
        exec(compile(code, str(PAGE), "exec"), names)
    assert len(run) >= 8
    assert len(torch.cat(trained)) == 4 * 100
