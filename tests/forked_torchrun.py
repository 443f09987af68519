"""torchrun, and scripts that start it, without the imports: launcher and ranks are forks.

`ForkedRanks(SCRIPT, 1, arguments)` is `torchrun *arguments`, and `run_driver` runs a script that
starts jobs. What they start with this Python, be it torchrun, its ranks or a script, is a fork that
has imported torch; all else of them is as it is. Each saves 3 s of a core. New interpreters are
started by `test_elastic_shrinks.py` and the tests of the pages.
"""

import os
import random
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback

import torch.distributed.checkpoint  # noqa: F401  for the forks
from forked_ranks import ForkedRanks
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main as torchrun

from dcp_checkfreq import Checkpointer  # noqa: F401  for the forks

SCRIPT = __file__
DRIVER = "--driver"
TORCHRUN = ["-m", "torch.distributed.run"]
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")  # what `ForkedRanks` says
FIRST_FD = 3  # after stdin, stdout and stderr
new_interpreter = subprocess.Popen


def run_driver(folder, script, *arguments, timeout_s=280):
    """Run a script that starts jobs; return its exit code and what it said."""
    out = folder / "driver"
    out.mkdir()
    with ForkedRanks(SCRIPT, 1, [DRIVER, script, *arguments], out, timeout_s=timeout_s) as job:
        (code,) = job.wait()
    return code, (out / "0.out").read_text()


def popen(args, **how):
    """Do what `subprocess.Popen` does; what would run Python on a script is a fork."""
    arguments = [str(one) for one in args]
    if arguments[0] != sys.executable:
        return new_interpreter(args, **how)
    arguments = arguments[2:] if arguments[1] == "-u" else arguments[1:]
    return Fork(arguments, **how)


class Fork:
    """A fork of this process that has become a script, as a `Popen`."""

    def __init__(self, arguments, *, env, stdout=None, stderr=None, start_new_session=False):
        self.args, self.returncode = arguments, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            try:
                if start_new_session:
                    os.setsid()
                become(arguments, env, stdout, stderr)
            finally:
                os._exit(70)  # nothing returns to what this process was

    def poll(self):
        return self._wait(os.WNOHANG)

    def wait(self, timeout=None):
        if self.returncode is None and timeout is not None:
            ending = os.pidfd_open(self.pid)
            try:
                if not select.select([ending], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout)
            finally:
                os.close(ending)
        return self._wait(0)

    def _wait(self, options):
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def become(arguments, environment, stdout, stderr):
    """Run ``arguments`` of Python in this fork, and end as Python does."""
    for number in ENDS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for file, stands_for in ((stdout, 1), (stderr, 2)):
        if file is not None:
            os.dup2(file.fileno(), stands_for)
    os.closerange(FIRST_FD, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    code = run(arguments)
    threading._shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(arguments):
    """Run torchrun, or a script, as the main program; return the exit code."""
    try:
        if arguments[: len(TORCHRUN)] == TORCHRUN:
            start_by(popen)
            torchrun(arguments[len(TORCHRUN) :])
        elif arguments[0] == DRIVER:
            start_by(popen)
            for name in RANK:  # this is none
                os.environ.pop(name, None)
            run_script(*arguments[1:])
        else:
            start_by(new_interpreter)
            run_script(*arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  as at the top of any program
        traceback.print_exc()
        return 1
    return 0


def run_script(script, *arguments):
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


def start_by(how):
    subprocess.Popen = subprocess_handler.Popen = how


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:] if sys.argv[1] == DRIVER else [*TORCHRUN, *sys.argv[1:]]))
