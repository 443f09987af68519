"""The tests that every tier must pass. Subclass `TierSuite` in a test module of your own.

    class TestMyTier(TierSuite):
        def make_tier(self, tmp_path): return MyTier(tmp_path / "root")
        def raw_files(self, tier, tmp_path): ...  # what is really there, read without the tier

Methods take pytest's ``tmp_path``; nothing else of pytest is needed.
"""

from __future__ import annotations

from dcp_checkfreq.testing.folder_suite import FolderSuite
from dcp_checkfreq.testing.record_suite import RecordSuite
from dcp_checkfreq.testing.shard_suite import ShardSuite


class TierSuite(FolderSuite, RecordSuite, ShardSuite):
    """The promises of `Tier`, each as one test. Reads what was written without the tier."""
