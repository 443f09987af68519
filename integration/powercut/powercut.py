"""A real file system whose power can be cut: ext4 on a loop device, and its shutdown call.

The shutdown stops ext4 at once: dirty pages, and journal entries that were not committed, never
reach the device. After `restart` the journal is replayed, as after a power loss. What this does
not show is a disk that loses its own write cache: the loop device keeps whatever it was given.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from pathlib import Path

IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
NO_LOG_FLUSH = 2  # the journal is not written out either


class Unavailable(Exception):
    """This machine cannot make and cut such a disk; the text says why."""


class PowerCutDisk:
    """A mounted ext4 in an image file of its own. Use as a context manager.

    Raises:
        Unavailable: not root, no loop device, no ext4 tools, or no shutdown call.
    """

    def __init__(self, work: Path, *, size_mib: int = 512) -> None:
        self._image = work / "disk.img"
        self.mount = work / "disk"
        self._size_mib = size_mib
        self._mounted = False

    def __enter__(self) -> PowerCutDisk:
        if os.geteuid() != 0:
            raise Unavailable("mounting a loop device needs root")
        if not os.path.exists("/dev/loop-control"):
            raise Unavailable("no /dev/loop-control here")
        self.mount.mkdir()
        with open(self._image, "wb") as image:
            image.truncate(self._size_mib << 20)
        run("mkfs.ext4", "-q", "-F", str(self._image))
        self._mount()
        try:
            self._try_out()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._mounted:
            run("umount", str(self.mount))
            self._mounted = False
        self._image.unlink(missing_ok=True)

    def cut(self) -> None:
        """Cut the power now. Every later write to the disk fails until `restart`."""
        cut_power(self.mount)

    def restart(self) -> None:
        """Bring the machine up again: unmount what is dead, mount it and replay the journal.

        No process may have a file open on the disk.
        """
        run("umount", str(self.mount))
        self._mounted = False
        self._mount()

    def _mount(self) -> None:
        run("mount", "-t", "ext4", "-o", "loop", str(self._image), str(self.mount))
        self._mounted = True

    def _try_out(self) -> None:
        """Check that a cut loses what was not synced and keeps what was."""
        write(self.mount / "synced", sync=True)
        write(self.mount / "not synced", sync=False)
        try:
            self.cut()
        except OSError as error:
            raise Unavailable(f"no ext4 shutdown call here: {error}") from error
        self.restart()
        left = {name for name in os.listdir(self.mount) if name != "lost+found"}
        if left != {"synced"}:
            raise Unavailable(f"a cut does not act like a power loss here, it left {sorted(left)}")
        os.unlink(self.mount / "synced")


def cut_power(mount: Path | str) -> None:
    """Shut the ext4 at ``mount`` down without writing anything more, its journal included."""
    fd = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    finally:
        os.close(fd)


def write(path: Path, *, sync: bool) -> None:
    """Write a small file, and make it durable if asked to."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"content")
    if sync:
        os.fsync(fd)
    os.close(fd)
    if sync:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)


def run(*command: str) -> None:
    """Run a tool of the system."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise Unavailable(f"{command[0]} is not installed") from error
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()}")
