"""A slow volume behind an fsspec URL, source files with known content, and looks at the disk."""

import os
import pathlib
import random
import subprocess
import sys
import time

import fsspec

from dcp_checkfreq.data.cache.byte_count import locked_byte_count
from dcp_checkfreq.data.cache.eviction import charge_bytes
from dcp_checkfreq.data.cache.file_cache import _boot
from dcp_checkfreq.runtime.clock import SystemClock

HERE = pathlib.Path(__file__).parent / "data" / "cache"


class SlowFile:
    def __init__(self, path, delay_s, fails):
        self._file = open(path, "rb")  # noqa: SIM115
        self._delay_s = delay_s
        self._fails = fails

    def read(self, count):
        if self._fails:
            raise ValueError("the volume lost its mind")
        time.sleep(self._delay_s)
        return self._file.read(min(count, 1 << 15))

    def close(self):
        self._file.close()


class SlowVolume(fsspec.AbstractFileSystem):
    """``slow:///path``: the local file, read in small delayed pieces.

    Options: ``delay_s`` for each piece; ``log``, a file that gets a line for each opening;
    ``says_bytes``, the size that is told (-1 for none); ``fails``, whether reads raise.
    """

    protocol = "slow"
    root_marker = "/"

    def __init__(self, delay_s=0.0, log=None, says_bytes=None, fails=False, **kwargs):
        super().__init__(**kwargs)
        self._delay_s, self._log, self._says_bytes, self._fails = delay_s, log, says_bytes, fails

    def info(self, path, **kwargs):
        size = os.stat(path).st_size if self._says_bytes is None else self._says_bytes
        return {"name": path, "size": None if size == -1 else size, "type": "file"}

    def open(self, path, mode="rb", **kwargs):
        path = self._strip_protocol(path)
        if self._log:
            with open(self._log, "a") as log:
                log.write(f"{path}\n")
        return SlowFile(path, self._delay_s, self._fails)


fsspec.register_implementation("slow", SlowVolume, clobber=True)


def content_of(index, size_bytes=None):
    rng = random.Random(index)
    return rng.randbytes(rng.randint(20_000, 300_000) if size_bytes is None else size_bytes)


def make_sources(folder, count, size_bytes=None):
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{index:04d}.bin" for index in range(count)]
    for index, path in enumerate(paths):
        path.write_bytes(content_of(index, size_bytes))
    return [str(path) for path in paths]


def partials_in(root):
    return sorted(os.listdir(pathlib.Path(root) / "partial"))


def whole_in(root):
    return sorted(path for path in (pathlib.Path(root) / "whole").rglob("*") if path.is_file())


def look(root):
    """Return (charged bytes on disk, what the byte count says, or None if it asks for a count)."""
    root = pathlib.Path(root)
    with locked_byte_count(str(root / "books"), _boot(), SystemClock(), 30.0) as byte_count:
        files = [*(root / "partial").iterdir(), *whole_in(root)]
        on_disk = sum(charge_bytes(file.stat().st_size) for file in files)
        return (
            on_disk,
            None if byte_count.must_count or byte_count.must_clear else byte_count.used_bytes,
        )


def start_child(script, *args, **kwargs):
    """Start a script of this folder, which imports neither pytest nor torch."""
    command = [sys.executable, str(HERE / script), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **kwargs)
