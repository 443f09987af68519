"""Two actors on one storage, one of them stopped at any call, or both: every order is tried.

An actor is a function of a tier. It runs in a thread of its own, which has the storage to itself
between two of its calls, so a schedule says exactly what happens: the first actor makes ``m`` calls
and is stopped, the second makes ``n`` and is stopped, the first goes on to its end, then the second
does. That is what a process does that hangs, or is stopped by SIGSTOP, and comes back.
"""

import threading

from dcp_checkfreq.testing import ForwardingTier

TIMEOUT_S = 60
MORE_CALLS = 8  # than undisturbed: for what the other one has left behind so far


class _Held(ForwardingTier):
    """Stops before the call number ``stop_at``, once, until it is let go."""

    def __init__(self, inner, stop_at):
        super().__init__(inner)
        self.stop_at = stop_at
        self.calls = []
        self.stopped = threading.Event()
        self.go_on = threading.Event()

    def around(self, verb, name, call):
        if len(self.calls) == self.stop_at:
            self.stopped.set()
            assert self.go_on.wait(TIMEOUT_S), "nobody let it go on"
        self.calls.append((verb, name))
        return call()


class Actor:
    """Runs ``work(tier)`` up to a call, and later to its end. `result` is what it returned."""

    def __init__(self, work, storage, stop_at):
        self.tier = _Held(storage, stop_at)
        self.result = self.error = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self.result = self._work(self.tier)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self.tier.stopped.set()

    @property
    def has_ended(self):
        return not self._thread.is_alive()

    def start(self):
        self._thread.start()
        assert self.tier.stopped.wait(TIMEOUT_S)

    def finish(self):
        self.tier.go_on.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


def calls_of(work, storage):
    """Return how many calls an actor makes if nobody disturbs it."""
    actor = Actor(work, storage, stop_at=-1)
    actor.start()
    actor.finish()
    assert actor.error is None, actor.error
    return len(actor.tier.calls)


def every_order(first, second, make_storage):
    """Yield ``(schedule, storage, first, second)`` after every schedule of the two."""
    most = [calls_of(work, make_storage()) for work in (first, second)]
    for m in range(most[0] + 1):
        for n in range(most[1] + MORE_CALLS):
            storage = make_storage()
            one, other = Actor(first, storage, m), Actor(second, storage, n)
            one.start()
            other.start()
            one.finish()
            other.finish()
            yield (m, n), storage, one, other
