"""A small real file system in an image file: one that gets full, runs out of inodes, or is ro."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from powercut import Unavailable, run


@contextlib.contextmanager
def small_disk(work: Path, *, size_mib: int = 24, inodes: int = 0) -> Iterator[Path]:
    """Mount a new ext4. Yields where.

    Raises:
        Unavailable: not root, no loop device, or no tools for it.
    """
    if os.geteuid() != 0 or not os.path.exists("/dev/loop-control"):
        raise Unavailable("mounting a loop device needs root")
    image, mount = work / "small.img", work / "small"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(size_mib << 20)
    run("mkfs.ext4", "-q", "-F", "-m", "0", *(["-N", str(inodes)] if inodes else []), str(image))
    run("mount", "-o", "loop", str(image), str(mount))
    try:
        yield mount
    finally:
        run("umount", str(mount))
        image.unlink()


def fill(folder: Path) -> None:
    """Take the last byte that is free."""
    for number, piece in enumerate((1 << 20, 4096, 1)):
        with contextlib.suppress(OSError), open(folder / f"filler-{number}", "wb", 0) as file:
            while True:
                file.write(bytes(piece))


def take_all_inodes(folder: Path) -> None:
    """Make files until there is no inode left."""
    with contextlib.suppress(OSError):
        for number in range(100_000):
            (folder / f"inode-{number}").touch()
