"""Forks ranks: importing torch takes seconds of a core, and each rank would do it anew.

`forked_ranks` runs it. Each line of its input is ``[script, ranks, arguments, environment, folder,
timeout_s]``; it answers with the pids, and with the exit codes once all have ended. A rank is a
process of its own that has run nothing yet: no thread, no process group.
It runs the script as its main program, and ends as every script does.
"""

import gc
import json
import os
import random
import signal
import sys
import threading
import time

import torch
import worker  # noqa: F401  and with it all that ranks import


def serve():
    """Fork ranks until there is no more input. Return the script to run: in a rank, that is."""
    # blocked, so that it can be waited for
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for line in sys.stdin:
        script, ranks, arguments, environment, folder, timeout_s = json.loads(line)
        pids = []
        for rank in range(ranks):
            assert threading.active_count() == 1, "a thread that a fork would leave behind"
            pids.append(os.fork())
            if not pids[-1]:
                become(rank, environment, folder)
                sys.argv = [script, *arguments]
                return script
        tell(pids)
        tell(exit_codes(pids, timeout_s))
    return None


def tell(value):
    print(json.dumps(value), flush=True)


def become(rank, environment, folder):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    random.seed()  # as in any new process
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    nothing = os.open(os.devnull, os.O_RDONLY)
    out = os.open(f"{folder}/{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for fd, stands_for in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(fd, stands_for)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  the server's has lines of its own in its buffer


def exit_codes(pids, timeout_s):
    """Wait for all, and kill what runs after ``timeout_s``. A death is minus its signal."""
    codes = {}
    end_s = time.monotonic() + timeout_s
    while True:
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end_s:
                os.kill(pid, signal.SIGKILL)
        if len(codes) == len(pids):
            return [codes[pid] for pid in pids]
        signal.sigtimedwait({signal.SIGCHLD}, max(1.0, end_s - time.monotonic()))


if __name__ == "__main__":
    # An optimizer imports 200 modules at its first step: 0.6 s of a core in each rank.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()
    gc.freeze()  # nor do ranks look at what was imported, again and again
    script = serve()
    if script is not None:
        __file__ = script
        sys.path.insert(0, os.path.dirname(script))
        with open(script) as file:
            text = file.read()
        exec(compile(text, script, "exec"))
