import pytest


@pytest.fixture(scope="session")
def paths(tmp_path_factory):
    """Image files, JPEG and PNG."""
    from dali_tools import write_images  # skips where DALI is missing, which a conftest cannot

    return write_images(tmp_path_factory.mktemp("images") / "files")
