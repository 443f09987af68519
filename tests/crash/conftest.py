import pytest


@pytest.fixture(autouse=True)
def _dead_processes(nothing_is_remembered):
    """The process dies with the power."""
