"""The tier suite on a real S3 server, with either way to move bytes."""

import pytest
from servers import BUCKET

from dcp_checkfreq.storage.remote import RemoteTier
from dcp_checkfreq.storage.remote_files import FsspecFiles
from dcp_checkfreq.storage.remote_options import Options
from dcp_checkfreq.testing import TierSuite

pytestmark = pytest.mark.slow


class _OnS3(TierSuite):
    keeps_empty_folders = False
    move_with = "auto"

    @pytest.fixture(autouse=True)
    def _on(self, weed, root, boto, uploads, monkeypatch):
        self.url, self.options, self.boto, self.uploads = root, weed.options, boto, uploads
        from dcp_checkfreq.storage.remote_s3 import S3Files

        monkeypatch.setattr(S3Files, "move_with", self.move_with)
        yield
        assert uploads(root) == []

    def make_tier(self, tmp_path):
        return RemoteTier(f"{self.url}/root", self.options)

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

    def test_s3fs_is_what_moves_the_bytes(self, tmp_path):
        assert self.make_tier(tmp_path)._files._mover() is None
