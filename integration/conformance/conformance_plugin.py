"""A pytest plugin for pytorch's tests: the drop-in, the CPU for the GPU, one line for each result.

Told by the environment: CONFORMANCE_ARM is "stock" or "ours", CONFORMANCE_RESULTS and
CONFORMANCE_USED are files.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Put our classes in place, if it is their turn. Ranks are forked, and have it too."""
    if importlib.util.find_spec("expecttest") is not None:  # torch's test library wants it
        import on_cpu

        on_cpu.patch_torch()
    if os.environ["CONFORMANCE_ARM"] == "ours":
        from dcp_checkfreq import CheckFreqReader, CheckFreqWriter, dropin

        _count(CheckFreqWriter, "writer")
        _count(CheckFreqReader, "reader")
        dropin.install()


def _count(kind: type, name: str) -> None:
    """Let each object that is made write a line: a run in which none is proves nothing."""
    stock = kind.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        _append("CONFORMANCE_USED", name)

    kind.__init__ = init  # type: ignore[misc]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write how a part of a test ended, at once: a test may take the process with it."""
    why = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        why = report.longrepr[2]
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message if crash is not None else str(report.longrepr)
    name = report.nodeid.split("::", 1)[-1]
    _append("CONFORMANCE_RESULTS", json.dumps([name, report.when, report.outcome, why[-2000:]]))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write that a file could not be read."""
    if report.failed:
        line = json.dumps(["(import)", "call", "failed", str(report.longrepr)[-2000:]])
        _append("CONFORMANCE_RESULTS", line)


def _append(variable: str, line: str) -> None:
    with open(os.environ[variable], "a") as file:
        file.write(line + "\n")
