"""A process that imports once and forks for each task, which is killed by SIGKILL on the way.

The test calls `killer`, the script that it starts calls `serve`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch

KILLED = -signal.SIGKILL


@contextlib.contextmanager
def killer(script):
    """Yield a function that has ``script``, a file here, carry out one task, a line of text.

    It returns the exit status, and what the process was about to do, or had done, when it died.
    """
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def carry_out(task):
        process.stdin.write(f"{task}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, "the child died itself"
        code, moment = line.rstrip("\n").split(" ", 1)
        return int(code), moment

    with process:  # closes its stdin and waits, so it ends by itself
        assert process.stdout.readline() == "ready\n"
        yield carry_out
    assert process.returncode == 0


def serve(run):
    """Call ``run(task, die)`` in a fork for each line of stdin; ``die(moment)`` kills the fork."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as note:
            pid = os.fork()
            if pid == 0:
                _run(run, line.rstrip("\n"), note.fileno())
            _, status = os.waitpid(pid, 0)
            note.seek(0)
            print(os.waitstatus_to_exitcode(status), note.read().decode() or "-", flush=True)


def _run(run, task, note):
    def die(moment):
        os.write(note, moment.encode())
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        run(task, die)
    except BaseException:  # noqa: BLE001 - a forked child must not return into the loop
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
