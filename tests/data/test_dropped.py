"""Workers of a loader that is dropped in the middle of an epoch end by themselves, and at once.

Left to torch, the collector waits 5 s for each of them, and kills it.
"""

import gc
import multiprocessing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loader_tools import Fails, Ids
from torch.utils.data import DataLoader

from dcp_checkfreq.data import (
    ParquetSource,
    ResumableIterator,
    ResumableLoader,
    ResumableParquetLoader,
)


def own(_, dataset):
    return ResumableLoader(dataset, 2, num_workers=2)


def wrapped(_, dataset):
    return ResumableIterator(DataLoader(dataset, 2, num_workers=2))


def wrapped_and_persistent(_, dataset):
    return ResumableIterator(DataLoader(dataset, 2, num_workers=2, persistent_workers=True))


def parquet(folder, dataset):
    pq.write_table(pa.table({"x": list(range(len(dataset)))}), folder / "a.parquet")
    return ResumableParquetLoader(ParquetSource(folder / "a.parquet"), 2, num_workers=2)


class Trainer:
    """Knows its parts, and they it."""

    def __init__(self, batches):
        self.batches, self.callback = batches, [self]


@pytest.fixture
def workers(monkeypatch):
    """A function that tells which began in this test. None of them is killed at its end."""
    killed, kill = [], multiprocessing.process.BaseProcess.terminate

    def noted(worker):
        killed.append(worker.name)
        kill(worker)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "terminate", noted)
    gc.collect()
    gc.disable()
    before = set(multiprocessing.active_children())
    yield lambda: set(multiprocessing.active_children()) - before
    gc.enable()
    assert killed == []


@pytest.mark.parametrize("kind", [own, wrapped, wrapped_and_persistent, parquet])
def test_a_trainer_that_is_dropped_in_an_epoch_holds_up_nobody(tmp_path, workers, kind):
    trainer = Trainer(iter(kind(tmp_path, Ids(50))))
    next(trainer.batches)
    began = workers()
    assert len(began) == 2
    del trainer
    gc.collect()
    assert [one.exitcode for one in began] == [0, 0]


@pytest.mark.parametrize("kind", [own, wrapped, wrapped_and_persistent])
def test_nor_does_one_whose_error_was_caught(tmp_path, workers, kind):
    batches = iter(kind(tmp_path, Fails(50, 7, OSError("bad file"))))
    with pytest.raises(OSError, match="bad file"):
        list(batches)
    began = workers()
    assert len(began) == 2
    del batches
    gc.collect()
    assert [one.exitcode for one in began] == [0, 0]
