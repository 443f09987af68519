"""Forks the ranks of a job off one process that has imported torch, dcp_checkfreq and the jobs."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

SERVER = Path(__file__).parent / "dist" / "rank_server.py"
_servers = []  # the one that is running, if there is one


class ForkedRanks:
    """A script that runs on some ranks: each a process that has imported what it needs.

    For a ``with`` block, at whose end no rank is left. Output is in ``folder/RANK.out``. Ranks that
    run after ``timeout_s`` are killed. There is one such job at a time.
    """

    def __init__(self, script, ranks, arguments, folder, *, timeout_s=150, **environment):
        environment = os.environ | {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self.codes, self._server = None, the_server()
        try:
            arguments = list(map(str, arguments))
            asked = [str(script), ranks, arguments, environment, str(folder), timeout_s]
            self._server.stdin.write(json.dumps(asked) + "\n")
            self._server.stdin.flush()
            self.pids = json.loads(self._server.stdout.readline())
        except BaseException:
            end_server()
            raise

    def wait(self):
        """Wait for all; return their exit codes. A death is minus its signal."""
        if self.codes is None:
            self.codes = json.loads(self._server.stdout.readline())
        return self.codes

    def is_running(self):
        """Whether any of them runs."""
        return self.codes is None and any(map(self._is_there, self.pids))

    def kill(self):
        """Kill all that run."""
        for pid in filter(self._is_there, self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_there(self, pid):
        """Whether it runs, and is not another process that got its number."""
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        return int(status.rpartition(")")[2].split()[1]) == self._server.pid

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.codes is not None:
            return
        self.kill()
        end_server()  # what it would say belongs to nobody


def the_server():
    if not _servers:
        # what libraries read when they are imported is as it is for the ranks
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        _servers.append(
            subprocess.Popen([sys.executable, str(SERVER)], env=environment, text=True, **pipes)
        )
        atexit.register(end_server)
    return _servers[0]


def end_server():
    while _servers:
        server = _servers.pop()
        server.stdin.close()
        server.kill()
        server.wait()
        server.stdout.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]
