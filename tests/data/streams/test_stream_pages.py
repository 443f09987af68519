"""The code on the pages for Parquet and streams runs, from top to bottom."""

import io
import pathlib
import re
import tarfile

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import torch

DOCS = pathlib.Path(__file__).parents[3] / "docs"


def run(page, names):
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.M | re.S)
    for code in blocks:
        exec(compile(code, page, "exec"), names)
    return len(blocks)


def test_the_page_on_parquet(tmp_path):
    tokens = pa.array([[i] * 8 for i in range(50)], pa.list_(pa.int32(), 8))
    table = pa.table({"tokens": tokens, "label": list(range(50))})
    memory, trained = fsspec.filesystem("memory"), []
    memory.makedirs("/train")
    for number in (0, 1):
        pq.write_table(table, tmp_path / f"part-{number}.parquet", row_group_size=9)
        memory.put(str(tmp_path / f"part-{number}.parquet"), f"/train/part-{number}.parquet")
    names = {"folder": tmp_path, "train_step": trained.append, "torch": torch}
    assert run("data-parquet.md", names) == 3
    memory.rm("/train", recursive=True)
    for batches in (trained, names["batches"]):
        assert sorted(torch.cat([b["label"] for b in batches]).tolist()) == sorted([*range(50)] * 2)
        assert all(b["tokens"].shape[1] == 8 for b in batches)
        assert all((b["tokens"][:, 0] == b["label"]).all() for b in batches)


def test_the_page_on_streams(tmp_path):
    for shard in range(3):
        with tarfile.open(tmp_path / f"train-{shard}.tar", "w") as tar:
            for i in range(20):
                for extension, data in (("bin", bytes([i] * 4)), ("cls", b"%d" % i)):
                    member = tarfile.TarInfo(f"{i:06}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        (tmp_path / f"{shard}.raw").write_bytes(
            b"".join(i.to_bytes(4, "little") for i in range(shard * 15, shard * 15 + 15))
        )
    trained = []
    names = {"folder": tmp_path, "train_step": trained.append, "torch": torch}
    assert run("data-streams.md", names) == 2
    assert sorted(torch.cat([labels for _, labels in trained]).tolist()) == sorted([*range(20)] * 3)
    assert sorted(torch.cat(names["batches"]).tolist()) == list(range(45))
