"""Parquet files for the tests, and jobs of several ranks over them."""

import pyarrow as pa
import pyarrow.parquet as pq

from dcp_checkfreq.data.loaders.parquet import ResumableParquetLoader


def table_of(ids):
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "half": pa.array([i / 2 for i in ids], pa.float32()),
            "even": pa.array([i % 2 == 0 for i in ids], pa.bool_()),
            "name": pa.array([f"row {i}" for i in ids], pa.string()),
        }
    )


def write_files(folder, files, open=open):
    """Write a file per list of row-group sizes; rows are numbered throughout. Return the rows."""
    first = 0
    for number, groups in enumerate(files):
        schema = table_of([]).schema
        with (
            open(f"{folder}/{number:03}.parquet", "wb") as file,
            pq.ParquetWriter(file, schema) as w,
        ):
            for rows in groups:
                w.write_table(table_of(range(first, first + rows)), row_group_size=max(rows, 1))
                first += rows
    return first


class Job:
    """All ranks of one launch, in one process."""

    def __init__(
        self, source, world, batch_size, state=None, loader=ResumableParquetLoader, **opts
    ):
        self.loaders = [
            loader(source, batch_size, rank=rank, world_size=world, **opts)
            for rank in range(world)
        ]  # fmt: skip
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(state)

    def run(self, steps=None, ids=lambda batch: batch["id"].tolist()):
        """Run so many steps, or the rest of the epoch; return (real samples per step, state)."""
        done, iterators = [], [iter(loader) for loader in self.loaders]
        while steps is None or len(done) < steps:
            try:
                batches = [next(iterator) for iterator in iterators]
            except StopIteration:
                break
            pairs = zip(self.loaders, batches, strict=True)
            done.append([i for loader, batch in pairs for i in ids(batch)[: loader.valid]])
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return done, states[0]


def flat(steps):
    return [item for step in steps for item in step]
