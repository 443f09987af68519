"""The tier suite on a real S3 server, with either way to move bytes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import BUCKET

from dcp_checkfreq.storage.object_store.fsspec_files import FsspecFiles
from dcp_checkfreq.storage.object_store.options import Options
from dcp_checkfreq.storage.object_store.tier import RemoteTier
from dcp_checkfreq.testing import TierSuite

pytestmark = pytest.mark.slow


class _OnS3(TierSuite):
    keeps_empty_folders = False
    move_with = "auto"
    turns = 4

    @pytest.fixture(autouse=True)
    def _on(self, weed, root, boto, uploads, monkeypatch):
        self.url, self.options, self.boto, self.uploads = root, weed.options, boto, uploads
        from dcp_checkfreq.storage.object_store.s3_files import S3Files

        monkeypatch.setattr(S3Files, "move_with", self.move_with)
        yield
        assert uploads(root) == []

    def make_tier(self, tmp_path):
        return RemoteTier(f"{self.url}/root", self.options)

    def test_of_eight_creators_exactly_one_wins(self, tmp_path):
        """Fewer turns than the suite's own: SeaweedFS takes a second or two for one."""
        tier = self.made(tmp_path)
        for turn in range(4):
            datas = [f"{turn} by {who}".encode() * (1 + 997 * who) for who in range(8)]
            with ThreadPoolExecutor(8) as pool:
                jobs = [
                    pool.submit(tier.create, f"turn {turn}", data, scratch=f"{turn} {who}")
                    for who, data in enumerate(datas)
                ]
            errors = [job.exception() for job in jobs]
            (winner,) = [who for who, error in enumerate(errors) if error is None]
            assert sum(isinstance(error, FileExistsError) for error in errors) == 7, errors
            assert self.raw_files(tier, tmp_path)[f"turn {turn}"] == datas[winner]

    def raw_files(self, tier, tmp_path):
        assert self.uploads(self.url) == []
        prefix = tier.location.removeprefix(f"s3://{BUCKET}/") + "/"
        found = self.boto.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {
            item["Key"][len(prefix) :]: self.boto.get_object(Bucket=BUCKET, Key=item["Key"])[
                "Body"
            ].read()
            for page in found
            for item in page.get("Contents", [])
        }


class TestWithObstore(_OnS3):
    def test_obstore_is_what_moves_the_bytes(self, tmp_path):
        assert self.make_tier(tmp_path)._files._mover() is not None


class TestAsAnyOtherFileSystem(_OnS3):
    """The way of ``gs://``, ``az://`` and the rest: fsspec's calls only, with s3fs behind them."""

    def make_tier(self, tmp_path):
        tier = RemoteTier(f"{self.url}/root")
        tier._files = FsspecFiles("s3", Options(self.options))
        return tier

    def test_remove_takes_only_an_empty_folder(self, tmp_path):
        """Not the empty folder: SeaweedFS lists one, and s3fs can remove nothing but buckets."""
        below = self.made(tmp_path).child("below")
        below.create("f", b"x", scratch="s")
        below.remove()
        assert below.read("f") == b"x"


class TestWithS3fsAlone(_OnS3):
    move_with = "s3fs"
    test_of_eight_creators_exactly_one_wins = None  # no other code than with obstore

    def test_s3fs_is_what_moves_the_bytes(self, tmp_path):
        assert self.make_tier(tmp_path)._files._mover() is None
