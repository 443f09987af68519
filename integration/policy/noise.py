"""A second job on the same disk: writes large files, syncs them, removes them, until stdin closes.

``noise.py FOLDER WRITERS FILE_BYTES`` says "writing" when it is at it, at the end what it wrote.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHUNK_BYTES = 8 << 20


def main(folder: Path, writers: int, file_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    written = [0] * writers
    at_it = threading.Barrier(writers + 1)

    def write(number: int) -> None:
        chunk = mmap.mmap(-1, CHUNK_BYTES)  # aligned, as direct I/O wants it
        chunk.madvise(mmap.MADV_HUGEPAGE)
        chunk.write(os.urandom(1 << 20) * (CHUNK_BYTES >> 20))
        path = folder / f"noise_{number}"
        at_it.wait()
        while not stop.is_set():
            fd = _open_direct(path)
            try:
                for offset in range(0, file_bytes, CHUNK_BYTES):
                    if stop.is_set():
                        break
                    written[number] += os.pwrite(fd, chunk, offset)
                os.fsync(fd)
            finally:
                os.close(fd)
                path.unlink()

    threads = [threading.Thread(target=write, args=(n,), name=f"noise-{n}") for n in range(writers)]
    for thread in threads:
        thread.start()
    at_it.wait()
    print("writing", flush=True)
    began_s = time.monotonic()
    sys.stdin.read()  # until the parent closes it, or is gone
    stop.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"written_bytes": sum(written), "seconds": time.monotonic() - began_s}))


def _open_direct(path: Path) -> int:
    """Open past the page cache where the file system can: a load on the disk, not on the cores."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:
        return os.open(path, flags, 0o644)


@contextmanager
def noise(folder: Path, *, writers: int, file_bytes: int) -> Iterator[dict[str, Any]]:
    """Run a second job; what it wrote is in the yielded mapping afterwards."""
    told: dict[str, Any] = {}
    command = [sys.executable, __file__, str(folder), str(writers), str(file_bytes)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "writing\n":
            raise RuntimeError(f"the second job did not start: exit code {process.wait()}")
        yield told
    finally:
        out, _ = process.communicate()  # closes its stdin
    told.update(json.loads(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
