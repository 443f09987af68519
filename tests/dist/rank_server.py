"""Forks ranks: importing torch takes seconds of a core, and each rank would do it anew.

`launch.start` runs it. Each line of its input is ``[ranks, arguments, environment, folder,
timeout_s]``; it answers with the pids, and with the exit codes once all have ended. A rank is a
process of its own that has run nothing yet: no thread, no operation of torch, no process group.
"""

import json
import os
import signal
import sys
import threading
import time

import worker


def serve():
    # blocked, so that it can be waited for
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for line in sys.stdin:
        ranks, arguments, environment, folder, timeout_s = json.loads(line)
        pids = [fork(rank, arguments, environment, folder) for rank in range(ranks)]
        tell(pids)
        tell(exit_codes(pids, timeout_s))


def tell(value):
    print(json.dumps(value), flush=True)


def fork(rank, arguments, environment, folder):
    assert threading.active_count() == 1, "a thread that a fork would leave behind"
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.environ.clear()
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        for fd, stands_for in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(fd, stands_for)
        sys.stdin = open(0)  # noqa: SIM115  the server's has lines of its own in its buffer
        sys.argv = [worker.__file__, *arguments]
        worker.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  shown in the log, as Python would
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


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
    serve()
