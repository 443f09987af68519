"""A folder behind an fsspec URL keeps the promises of a tier, and gives no secret away."""

import fsspec

from dcp_checkfreq.storage.remote import RemoteTier
from dcp_checkfreq.testing import TierSuite


class TestMemoryUrl(TierSuite):
    def make_tier(self, tmp_path):
        return RemoteTier(f"memory://{tmp_path.name}/root")

    def raw_files(self, tier, tmp_path):
        fs = fsspec.filesystem("memory")
        base = f"/{tmp_path.name}/root"
        return {path[len(base) + 1 :]: fs.cat_file(path) for path in fs.find(base)}
