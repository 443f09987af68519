"""Shard files in a bucket of a real S3 server (SeaweedFS): each sample once, little read."""

from __future__ import annotations

import io
import tarfile
import uuid

import pytest
from servers import BUCKET

from dcp_checkfreq.data import ResumableStreamLoader, ShardSource, TarReader

s3fs = pytest.importorskip("s3fs", reason="not installed: pip install -e '.[s3]'")

pytestmark = pytest.mark.slow

SHARDS, SAMPLES, SAMPLE_BYTES = 2, 600, 25_000


@pytest.fixture(scope="module")
def url(weed, tmp_path_factory):
    """Two shards of 15 MB, samples numbered throughout."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        with tarfile.open(folder / f"train-{shard}.tar", "w") as tar:
            for number in range(shard * SAMPLES, (shard + 1) * SAMPLES):
                member = tarfile.TarInfo(f"{number:06}.bin")
                member.size = SAMPLE_BYTES
                tar.addfile(member, io.BytesIO(bytes(SAMPLE_BYTES)))
    url = f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(**weed.options).put(f"{folder}/", url, recursive=True)
    return url


def number_of(sample):
    return int(sample["__key__"])


def source_of(url, server):
    return ShardSource(
        f"{url}/train-*.tar", TarReader(), index=f"{url}/train.index",
        storage_options=server.options, lanes=2, window=8,
    )  # fmt: skip


def test_the_rest_comes_once_on_other_ranks_and_shards_are_read_from_where_they_are_needed(
    url, weed, proxy
):
    source = source_of(url, weed)  # scans, and leaves the index in the bucket
    loader = ResumableStreamLoader(source, 50, seed=1, transform=number_of, num_workers=1)
    found = [int(i) for _, batch in zip(range(21), loader, strict=False) for i in batch]
    state = loader.state_dict()

    source = source_of(url, proxy)
    assert proxy.received_bytes < 1 << 20, "the index was not used"
    ranks = [
        ResumableStreamLoader(source, 20, seed=1, transform=number_of, rank=rank, world_size=2)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.load_state_dict(state)
    for batches in zip(*ranks, strict=True):
        for rank, batch in zip(ranks, batches, strict=True):
            found += batch[: rank.valid].tolist()
    assert sorted(found) == list(range(SHARDS * SAMPLES))
    # 525 of 600 are done in each shard. There is a mark at 512: what lies before is not fetched.
    left_bytes = 150 * SAMPLE_BYTES
    assert left_bytes < proxy.received_bytes < 1.5 * left_bytes
