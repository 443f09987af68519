import pytest
from dali_tools import write_images


@pytest.fixture(scope="session")
def paths(tmp_path_factory):
    """Image files, JPEG and PNG."""
    return write_images(tmp_path_factory.mktemp("images") / "files")
