"""Holds overlapped snapshot copies at a chosen moment. The copying itself is the real one.

What is copied late shows every change that was made before: a snapshot that training runs into is
torn for certain, not by luck.
"""

import contextlib
import threading

from dcp_checkfreq.snapshot import background_copy


class HeldCopies:
    """Copies of the lane's thread wait, before or in the middle of copying, while `hold` is on.

    Attributes:
        error: raised by the next overlapped copy instead of copying.
        begun: set when an overlapped copy has arrived at the hold.
    """

    def __init__(self, copy, timeout_s=30.0):
        self._copy, self._timeout_s = copy, timeout_s
        self._go = threading.Event()
        self._go.set()
        self.begun = threading.Event()
        self.halfway = False
        self.error = None
        self.copies = 0  # overlapped ones that were made

    def hold(self, *, halfway=False):
        self.halfway = halfway
        self.begun.clear()
        self._go.clear()

    def release(self):
        self._go.set()

    def __call__(self, *lists):  # sources, targets and where the sources were
        if not threading.current_thread().name.startswith("checkfreq-snapshot"):
            return self._copy(*lists)
        first = len(lists[0]) // 2 if self.halfway else 0
        self._copy(*(one[:first] for one in lists))
        self.begun.set()
        if not self._go.wait(self._timeout_s):
            raise TimeoutError("nobody released the copy")
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.copies += 1
        return self._copy(*(one[first:] for one in lists))


@contextlib.contextmanager
def held_copies(monkeypatch):
    """Yield `HeldCopies` in place of the lanes' copying; whatever is held at the end is let go."""
    held = HeldCopies(background_copy.copy_tensors)
    monkeypatch.setattr(background_copy, "copy_tensors", held)
    try:
        yield held
    finally:
        held.release()


def let_go_when_waited_for(held, monkeypatch):
    """Let a copy begin only when someone waits for it: the last moment at which it still can."""
    for name in ("before_update", "wait"):
        original = getattr(background_copy._ThreadCopy, name)

        def waiting(self, original=original):
            if threading.current_thread() is threading.main_thread() and not self.is_done:
                held.release()
            return original(self)

        monkeypatch.setattr(background_copy._ThreadCopy, name, waiting)
