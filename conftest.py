"""Two lanes of tests: `--fast` is the two-minute loop, without it all of them run.

What a test needs is told by the folder it is in and by the fixtures it takes: the rules are below,
and give it a marker. Only what is slow for a reason of its own is marked by hand, with `slow`. The
fast lane leaves out tests with a marker of `NOT_FAST`, tries few examples of each property, and
fails a test that takes more than `LIMIT_S`: it is made quick, or marked.
"""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.strategies import text

NOT_FAST = ("slow", "long", "dist", "crash", "bench", "server")
BY_FOLDER = {
    "tests/bench": "bench",
    "tests/crash": "crash",
    "tests/dist": "dist",
    "integration/data": "server",
    "integration/frameworks": "dist",
    "integration/gpu": "slow",
    "integration/policy": "bench",
    "integration/powercut": "crash",
    "integration/s3": "server",
}
BY_FIXTURE = {
    "ended": "slow",  # scripts, each to its end
    "proxy": "server",
    "weed": "server",
}
LIMIT_S = 1.0
NEED_BYTES = 3 << 30  # on the disk of temporary files
BUSY = 3  # load for each core: then what a test waits for says nothing of the test

# By default the same examples every time, so that a change is judged by the change and not by
# luck. `HYPOTHESIS_PROFILE=search pytest tests` looks for new ones, and tries twice as many.
PATIENT: dict[str, Any] = {  # a busy machine is no reason to fail
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "print_blob": True,
}
SAME: dict[str, Any] = {"derandomize": True, "database": None, "max_examples": 50}
settings.register_profile("same", **SAME, **PATIENT)
settings.register_profile("search", **PATIENT)
settings.register_profile("fast", settings.get_profile("same"), max_examples=10)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--fast`."""
    parser.addoption(
        "--fast",
        action="store_true",
        help=f"leave out {', '.join(NOT_FAST)}; fail what takes more than {LIMIT_S:g} s",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples of a property are tried, before any module of tests is read."""
    lane = "fast" if config.option.fast else "same"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", lane))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say at once that the disk is too full: tests of the staged tier would fail, one by one."""
    disk = shutil.disk_usage(tempfile.gettempdir())
    need_bytes = min(disk.total // 20, 10 << 30) + NEED_BYTES
    if disk.free < need_bytes and not hasattr(session.config, "workerinput"):
        pytest.exit(
            f"{tempfile.gettempdir()} has {disk.free >> 20} MiB free, and the tests need "
            f"{need_bytes >> 20}: 5 % (at most 10 GiB) that staged saves leave free, and "
            f"{NEED_BYTES >> 20} for themselves. Make room, or set TMPDIR",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In the fast lane, do not even read a folder that is left out: imports take seconds."""
    folders = {config.rootpath / folder for folder in BY_FOLDER}
    return True if config.option.fast and collection_path in folders else None


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test by the rules; in the fast lane, leave those out that are marked."""
    for item in items:
        for marker in _markers(item, config.rootpath):
            item.add_marker(marker)
    # Files that take long come first, so that at the end no worker waits for another one's.
    long_ones = {item.path for item in items if any(map(item.get_closest_marker, NOT_FAST))}
    items.sort(key=lambda item: item.path not in long_ones)
    if config.option.fast:
        left_out = [item for item in items if any(map(item.get_closest_marker, NOT_FAST))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """Take what is there now from the collector: each full collection looked at all of torch."""
    text().validate()  # reads the table of characters, and in a new tree makes it: 1.2 s of a test
    gc.collect()
    gc.freeze()


def _markers(item: pytest.Item, root: Path) -> set[str]:
    place = item.path.relative_to(root).as_posix()
    folders = {marker for folder, marker in BY_FOLDER.items() if place.startswith(folder + "/")}
    fixtures = getattr(item, "fixturenames", ())
    return folders | {marker for name, marker in BY_FIXTURE.items() if name in fixtures}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note when a test began."""
    item.stash[_began] = _Took.up_to_now()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail what took too long for the fast lane, with its set-up, although it passed."""
    report = yield
    if item.config.option.fast and call.when == "call" and report.passed:
        took_s = _Took.up_to_now().since(item.stash[_began])
        if took_s > LIMIT_S:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {took_s:.1f} s, and at most {LIMIT_S:g} s is quick: "
                "make it quicker, or mark it slow"
            )
    return report


@pytest.fixture(scope="session", autouse=True)
def _what_processes_leave_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep temporary files of this process and its children in one folder, and remove it.

    Launchers, processes that are killed and servers leave folders and sockets behind. The name is
    short: the path of a socket has 108 bytes.
    """
    folder = tmp_path_factory.getbasetemp() / "t"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)  # looked up anew
        yield
    # After multiprocessing has removed its own (at -100); a process may be at its last file.
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


class _Took(NamedTuple):
    """What was used so far: by the clock, less what this thread has waited for a core; of cores."""

    own_s: float
    cpu_s: float

    @classmethod
    def up_to_now(cls) -> _Took:
        try:
            waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
        except OSError:  # a kernel that does not tell
            waited_ns = 0
        return cls(time.monotonic() - waited_ns / 1e9, sum(os.times()[:4]))

    def since(self, began: _Took) -> float:
        """Return the seconds of a test. On a machine that others keep busy only cores count."""
        cpu_s = self.cpu_s - began.cpu_s
        is_busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
        return cpu_s if is_busy else max(cpu_s, self.own_s - began.own_s)


_began = pytest.StashKey[_Took]()
