"""A real mount that refuses what it is told to: a file system in memory, spoken to by the kernel.

The kernel's FUSE protocol, read from /dev/fuse without a library (linux/fuse.h), in a process of
its own. `fuse_mount` is for tests; run as a program it is the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

LOOKUP, FORGET, GETATTR, SETATTR, MKDIR, UNLINK, RMDIR = 1, 2, 3, 4, 9, 10, 11
RENAME, LINK, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC = 12, 13, 14, 15, 16, 17, 18, 20
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, ACCESS = 25, 26, 27, 28, 29, 30, 34
CREATE, INTERRUPT, DESTROY, BATCH_FORGET, FALLOCATE, RENAME2 = 35, 36, 38, 42, 43, 45
BY_NAME = {
    "link": LINK, "rename": RENAME, "rename2": RENAME2, "fsync": FSYNC, "fsyncdir": FSYNCDIR,
    "fallocate": FALLOCATE,
}  # fmt: skip
NO_ANSWER = {FORGET, BATCH_FORGET, INTERRUPT}

ALL_BUT_STREAMS = {
    "link": "EPERM",
    "rename": "ENOTSUP",
    "rename2": "EINVAL",
    "fsync": "EINVAL",
    "fsyncdir": "EINVAL",
    "fallocate": "EOPNOTSUPP",
    "direct": "EINVAL",
    "write_inside": "EINVAL",
    "open_again": "EPERM",
}


class Unavailable(Exception):
    """This machine mounts no FUSE; the text says why."""


@contextlib.contextmanager
def fuse_mount(folder: Path, refuse: dict[str, str], *, started=None):
    """Mount at ``folder``.

    ``refuse`` has names of calls (see `ALL_BUT_STREAMS`) to errno names; "direct_read": a file may
    be opened for direct I/O, and not be read. ``started`` is called with the server's process.
    """
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        raise Unavailable("a FUSE mount needs root and /dev/fuse")
    folder.mkdir()
    server = subprocess.Popen(
        [sys.executable, __file__, str(folder), json.dumps(refuse)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said = server.stdout.readline().strip()
        if said != "ready":
            raise Unavailable(said or "the server did not start")
        os.listdir(folder)  # waits for the server's first answer
        if started is not None:
            started(server)
        yield folder
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(folder), 2)
        server.kill()
        server.wait()
        server.stdout.close()


class Node:
    def __init__(self, mode: int) -> None:
        self.mode, self.links, self.mtime = mode, 1, time.time()
        self.data = bytearray()
        self.names: dict[bytes, int] = {}


class Server:
    def __init__(self, fd: int, refuse: dict[str, str]) -> None:
        self.fd = fd
        self.refuse = {name: getattr(errno, code) for name, code in refuse.items()}
        self.by_code = {BY_NAME[n]: code for n, code in self.refuse.items() if n in BY_NAME}
        self.nodes = {1: Node(stat.S_IFDIR | 0o755)}
        self.next = 2

    def run(self) -> None:
        while True:
            try:
                request = os.read(self.fd, 1 << 20)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return  # unmounted
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                raise
            _, code, unique, node = struct.unpack_from("<IIQQ", request)
            try:
                if code in self.by_code:
                    raise OSError(self.by_code[code], "refused")
                answer, failed = self.answer(code, node, request[40:]), 0
            except OSError as error:
                answer, failed = b"", -error.errno
            except KeyError:
                answer, failed = b"", -errno.ENOENT
            if code not in NO_ANSWER:
                head = struct.pack("<IiQ", 16 + len(answer), failed, unique)
                with contextlib.suppress(FileNotFoundError):  # it was interrupted
                    os.write(self.fd, head + answer)

    def attr(self, number: int) -> bytes:
        node = self.nodes[number]
        size, seconds = len(node.data), int(node.mtime)
        nanoseconds = int((node.mtime - seconds) * 1e9)
        return struct.pack(
            "<6Q10I", number, size, -(-size // 512), seconds, seconds, seconds,
            nanoseconds, nanoseconds, nanoseconds, node.mode, node.links, 0, 0, 0, 4096, 0,
        )  # fmt: skip

    def entry(self, number: int) -> bytes:
        return struct.pack("<4Q2I", number, 0, 0, 0, 0, 0) + self.attr(number)

    def make(self, folder: int, name: bytes, mode: int) -> int:
        names = self.nodes[folder].names
        if name in names:
            raise OSError(errno.EEXIST, "exists")
        number, self.next = self.next, self.next + 1
        self.nodes[number] = Node(mode)
        names[name] = number
        return number

    def check_open(self, flags: int, *, new: bool) -> None:
        if flags & os.O_DIRECT and "direct" in self.refuse:
            raise OSError(self.refuse["direct"], "direct")
        again = not new and flags & os.O_ACCMODE != os.O_RDONLY
        if again and "open_again" in self.refuse:
            raise OSError(self.refuse["open_again"], "open for writing again")

    def move(self, source: int, old: bytes, target: int, new: bytes, *, over: bool) -> None:
        if new in self.nodes[target].names and not over:
            raise OSError(errno.EEXIST, "exists")
        self.nodes[target].names[new] = self.nodes[source].names.pop(old)

    def answer(self, code: int, number: int, body: bytes) -> bytes:
        node = self.nodes.get(number)
        if code == INIT:
            return struct.pack(
                "<4I2H2I2HI7I", 7, 31, 1 << 17, (1 << 3) | (1 << 5), 12, 9, 1 << 17, 1, 32, 0, 0,
                *[0] * 7,
            )  # fmt: skip
        if code in (RELEASE, RELEASEDIR, FLUSH, FSYNC, FSYNCDIR, ACCESS, DESTROY) or node is None:
            return b""
        if code == LOOKUP:
            return self.entry(node.names[body[:-1]])
        if code == GETATTR:
            return struct.pack("<QII", 0, 0, 0) + self.attr(number)
        if code == SETATTR:
            valid, _, _, size = struct.unpack_from("<IIQQ", body)
            if valid & 1:
                node.mode = stat.S_IFMT(node.mode) | struct.unpack_from("<I", body, 68)[0] & 0o7777
            if valid & 8:
                node.data[:] = node.data[:size].ljust(size, b"\0")
            return struct.pack("<QII", 0, 0, 0) + self.attr(number)
        if code == MKDIR:
            (mode,) = struct.unpack_from("<I", body)
            return self.entry(self.make(number, body[8:-1], stat.S_IFDIR | mode))
        if code == CREATE:
            flags, mode = struct.unpack_from("<II", body)
            made = self.make(number, body[16:-1], mode)
            self.check_open(flags, new=True)
            return self.entry(made) + struct.pack("<QII", 0, 0, 0)
        if code == OPEN:
            (flags,) = struct.unpack_from("<I", body)
            self.check_open(flags, new=False)
            if flags & os.O_TRUNC:
                node.data.clear()
            return struct.pack("<QII", 0, 0, 0)
        if code == OPENDIR:
            return struct.pack("<QII", 0, 0, 0)
        if code in (UNLINK, RMDIR):
            doomed = node.names[body[:-1]]
            if code == RMDIR and self.nodes[doomed].names:
                raise OSError(errno.ENOTEMPTY, "not empty")
            del node.names[body[:-1]]
            self.nodes[doomed].links -= 1  # the node stays: it may be open
            return b""
        if code == LINK:
            (old,) = struct.unpack_from("<Q", body)
            if body[8:-1] in node.names:
                raise OSError(errno.EEXIST, "exists")
            node.names[body[8:-1]] = old
            self.nodes[old].links += 1
            return self.entry(old)
        if code in (RENAME, RENAME2):
            target, flags = struct.unpack_from("<QI", body)
            start = 8 if code == RENAME else 16
            old, new, _ = body[start:].split(b"\0", 2)
            self.move(number, old, target, new, over=code == RENAME or not flags & 1)
            return b""
        if code == READ:
            _, offset, size, _, _, flags = struct.unpack_from("<QQIIQI", body)
            if flags & os.O_DIRECT and "direct_read" in self.refuse:
                raise OSError(self.refuse["direct_read"], "direct read")
            return bytes(node.data[offset : offset + size])
        if code == WRITE:
            _, offset, size = struct.unpack_from("<QQI", body)
            if offset != len(node.data) and "write_inside" in self.refuse:
                raise OSError(self.refuse["write_inside"], "not a stream")
            node.data[len(node.data) :] = bytes(max(0, offset - len(node.data)))
            node.data[offset : offset + size] = body[40 : 40 + size]
            node.mtime = time.time()
            return struct.pack("<II", size, 0)
        if code == FALLOCATE:
            _, offset, length = struct.unpack_from("<QQQ", body)
            node.data.extend(bytes(max(0, offset + length - len(node.data))))
            return b""
        if code == READDIR:
            return self.listed(node, body)
        if code == STATFS:
            return struct.pack(
                "<5Q4I24x", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096, 0
            )
        raise OSError(errno.ENOSYS, "unknown")

    def listed(self, node: Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        out = b""
        for place, (name, number) in enumerate(list(node.names.items())[offset:], offset + 1):
            kind = stat.S_IFMT(self.nodes[number].mode) >> 12
            one = struct.pack("<QQII", number, place, len(name), kind) + name
            one += bytes(-len(one) % 8)
            if len(out) + len(one) > size:
                break
            out += one
        return out


def main() -> None:
    folder, refuse = sys.argv[1], json.loads(sys.argv[2])
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"checkfreq-test", os.fsencode(folder), b"fuse", 0, options):
        print(f"mount: {os.strerror(ctypes.get_errno())}", flush=True)
        return
    print("ready", flush=True)
    Server(fd, refuse).run()


if __name__ == "__main__":
    main()
