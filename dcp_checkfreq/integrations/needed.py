"""One line for who has not installed a framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(framework: str) -> Iterator[None]:
    """Import ``framework`` in the block; if it is not there, say what installs it.

    Raises:
        ImportError: with that line. Other errors of the import come out as they are.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != framework:
            raise
        raise ImportError(
            f"dcp_checkfreq.integrations.{framework} needs {framework}, which is not installed: "
            f"pip install 'dcp-checkfreq[{framework}]'",
            name=framework,
        ) from error
