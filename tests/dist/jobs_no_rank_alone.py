"""Jobs: one rank fails on its own, at every place of every call that ranks make together."""

import contextlib
import os
import threading
import time
from typing import ClassVar

import torch
import torch.distributed as dist
from jobs import job
from torch import nn

from dcp_checkfreq import CheckFreqError, Checkpointer
from dcp_checkfreq.data import ResumableBatchSampler
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import ForwardingTier

TIMEOUT_S = 25.0  # of the ranks; whoever waits for it has been left alone


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("boom")
        self.lock = threading.Lock()


class Unreadable(Exception):
    """Its pickle can be made, and not be read."""

    def __init__(self, here, there):
        super().__init__("boom")


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def dies(*_):
    os._exit(7)


KINDS = {
    "ordinary": lambda: ValueError("boom"),
    "unpicklable": Unpicklable,
    "unreadable": lambda: Unreadable(1, 2),
    "speechless": Speechless,
    "interrupt": KeyboardInterrupt,
    "system exit": lambda: SystemExit(3),
    "death": dies,
}


class Faults:
    """Raises at one place on one rank, as often as that is passed."""

    def __init__(self):
        self.place = self.make = None

    def arm(self, place, kind, rank):
        self.place, self.make = (place, KINDS[kind]) if rank == dist.get_rank() else (None, None)

    def disarm(self):
        self.place = self.make = None

    def pass_by(self, place):
        if self.place == place:
            raise self.make()


class Storage(ForwardingTier):
    PLACES: ClassVar[dict[tuple[str, str], str]] = {
        ("size", "probe"): "constructor: root",
        ("replace", "probe"): "constructor: root",
        ("write_shard", "__"): "writing",
        ("sync", "step"): "writing: sync",
        ("read_into", "__"): "reading",
        ("list", ""): "choosing",
    }

    def __init__(self, inner, faults):
        super().__init__(inner)
        self.faults = faults

    def around(self, verb, name, call):
        for (of, start), place in self.PLACES.items():
            if verb == of and name.startswith(start):
                self.faults.pass_by(place)
        return call()


class Parts(dict):
    def __init__(self, faults, **parts):
        super().__init__(**parts)
        self.faults = faults

    def items(self):
        self.faults.pass_by("constructor: state")
        return super().items()


class Model(nn.Linear):
    def __init__(self, faults):
        super().__init__(8, 8)
        self.faults = [faults]

    def named_buffers(self, *args, **kwargs):
        self.faults[0].pass_by("constructor: describing")
        return super().named_buffers(*args, **kwargs)


class Part:
    """A user's `Stateful`."""

    def __init__(self, faults):
        self.faults, self.value = faults, 0

    def state_dict(self):
        self.faults.pass_by("capture")
        self.faults.pass_by("targets")
        return {"value": self.value, "odd": Odd(self.faults)}

    def load_state_dict(self, state):
        self.faults.pass_by("restore of a part")
        self.value = state["value"]


class Odd:
    """A value that fails when it is copied, or when it is planned."""

    def __init__(self, faults):
        self.faults = faults

    def __deepcopy__(self, memo):
        self.faults.pass_by("copying")
        return self

    def __reduce__(self):
        self.faults.pass_by("planning")
        return (dict, ())


def make(root, faults, **options):
    torch.manual_seed(0)
    parts = Parts(
        faults,
        model=Model(faults),
        part=Part(faults),
        sampler=ResumableBatchSampler(64, batch_size=4),
    )
    options = {"every": 1, "on_error": "raise", "max_failures": 99} | options
    tier = Storage(LocalTier(root), faults)
    return Checkpointer(tier, parts, timeout_s=TIMEOUT_S, allow_pickle=True, **options), parts


def tried(action):
    """Return how it ended, and after how many seconds."""
    begun_s = time.monotonic()
    try:
        action()
    except BaseException as error:  # noqa: BLE001  the test looks at it
        cause = error.__cause__
        return {
            "kind": type(error).__name__,
            "text": str(error),
            "cause": cause and type(cause).__name__,
            "seconds": time.monotonic() - begun_s,
        }
    return {"kind": None, "text": "", "cause": None, "seconds": time.monotonic() - begun_s}


def in_constructor(root, faults, arm):
    options = {"every": None} if arm[0] == "constructor: describing" else {}
    faults.arm(*arm)
    said = tried(lambda: make(root, faults, **options))
    faults.disarm()
    if said["kind"] == "RankLost":
        return said, False
    ckpt, parts = make(root, faults)
    with ckpt:
        ckpt.restore()
        return said, went_on(ckpt, parts)


def went_on(ckpt, parts):
    parts["part"].value = ckpt.step + 1
    wanted = ckpt.step + 1
    ckpt.after_step()
    ckpt.wait()
    parts["part"].value = -1
    restored = ckpt.restore()
    return restored is not None and restored.step == wanted == parts["part"].value


def in_save(root, faults, arm):
    ckpt, parts = make(root, faults)
    with ckpt:
        ckpt.restore()
        ckpt.after_step()
        ckpt.wait()
        faults.arm(*arm)

        def save():
            ckpt.step += 1
            ckpt.save(wait=True)

        said = tried(save)
        return after_save(ckpt, parts, faults, said)


def after_save(ckpt, parts, faults, said):
    with contextlib.suppress(CheckFreqError):
        ckpt.wait()  # whoever was interrupted did not hear how the save has ended
    faults.disarm()
    if said["kind"] == "RankLost":
        return said, False
    return said, went_on(ckpt, parts)


def in_first_save(root, faults, arm):
    ckpt, parts = make(root, faults)
    with ckpt:
        ckpt.restore()
        faults.arm(*arm)
        said = tried(lambda: ckpt.save(wait=True))
        return after_save(ckpt, parts, faults, said)


def in_restore(root, faults, arm):
    ckpt, parts = make(root, faults)
    with ckpt:
        ckpt.restore()
        for _ in range(2):
            ckpt.after_step()
        ckpt.wait()
        faults.arm(*arm)
        said = tried(ckpt.restore)
        faults.disarm()
        if said["kind"] == "RankLost":
            return said, False
        ckpt.restore()
        return said, went_on(ckpt, parts)


def in_close(root, faults, arm):
    """The last save fails on one rank only; all hear of it when they close."""
    ckpt, _ = make(root, faults)
    ckpt.restore()
    faults.arm(*("writing", *arm[1:]))
    ckpt.after_step()
    said = tried(ckpt.close)
    faults.disarm()
    if said["kind"] == "RankLost":
        return said, False
    ckpt, parts = make(root, faults)
    with ckpt:
        ckpt.restore()
        return said, went_on(ckpt, parts)


PLACES = {
    "constructor: state": in_constructor,
    "constructor: root": in_constructor,
    "constructor: describing": in_constructor,
    "capture": in_save,
    "copying": in_save,
    "planning": in_first_save,
    "writing": in_save,
    "writing: sync": in_save,
    "choosing": in_restore,
    "targets": in_restore,
    "reading": in_restore,
    "restore of a part": in_restore,
    "close": in_close,
}
ONLY_ON_RANK_0 = {"choosing"}
EVERYWHERE = ("ordinary", "unpicklable", "interrupt")
HERE_AND_THERE = ("unreadable", "speechless", "system exit")
SOME_PLACES = ("constructor: state", "planning", "writing", "restore of a part")


def ranks_of(place):
    return (0,) if place in ONLY_ON_RANK_0 else (0, 1)


def cells():
    """Return the table but for ranks that die: place, kind and rank."""
    return [
        (place, kind, rank)
        for place in PLACES
        for kind in EVERYWHERE + (HERE_AND_THERE if place in SOME_PLACES else ())
        for rank in ranks_of(place)
    ]


@job
def no_rank_alone(shared):
    """Return how each cell of the table ended."""
    said = {}
    for number, (place, kind, rank) in enumerate(cells()):
        faults = Faults()
        ended, worked = PLACES[place](shared / f"cell-{number}", faults, (place, kind, rank))
        said[f"{place}|{kind}|{rank}"] = {**ended, "worked": worked}
    return said


@job
def options_that_differ(shared):
    """One rank gets an option that is wrong, or another one than the others."""
    rank, said = dist.get_rank(), {}
    for name, mine, others in (
        ("keep_last", 0, 2),
        ("timeout_s", -1, 30.0),
        ("timeout_s", "soon", 30.0),
        ("every", 7, 5),
        ("every", 0, 5),
        ("on_error", "raise", "log"),
        ("max_overhead", 3, 0.1),
    ):
        for odd in (0, 1):
            given = {"every": 5, "timeout_s": 30.0} | {name: mine if rank == odd else others}

            def construct(given=given):
                Checkpointer(shared / "options", {"x": 1}, **given)

            said[f"{name}={mine!r}|{odd}"] = tried(construct)
    said["all the same"] = tried(lambda: Checkpointer(shared / "options", {"x": 1}, every=0))
    with Checkpointer(shared / "options", {"x": 1}, every=1) as ckpt:
        ckpt.restore()
        said["arguments"] = tried(lambda: ckpt.restore(step=5 if rank else None))
        said["calls"] = tried(ckpt.restore if rank else ckpt.save)
        ckpt.restore()
        ckpt.after_step()
        ckpt.wait()
        said["at last"] = ckpt.last_saved_step
    return said


@job
def data_that_does_not_fit(shared):
    """One rank resumes with another data set: its own error is one of ours, told by name."""
    rank, said = dist.get_rank(), {}
    for odd in (0, 1):
        root = shared / f"data-{odd}"
        for run in range(2):
            samples = 60 if run and rank == odd else 64
            sampler = ResumableBatchSampler(samples, batch_size=4, rank=rank, world_size=2)
            with Checkpointer(root, {"sampler": sampler}, every=1, timeout_s=TIMEOUT_S) as ckpt:
                said[f"{odd}|{run}"] = ended = tried(ckpt.restore)
                if ended["kind"] is None:
                    next(iter(sampler))
                    sampler.advance()
                    ckpt.after_step()
                    ckpt.wait()
    return said


class CallsBack(Part):
    """A part whose methods call the `Checkpointer` that they are asked by."""

    def __init__(self, faults):
        super().__init__(faults)
        self.saving = self.loading = None

    def state_dict(self):
        if self.saving is not None:
            self.saving()
        return super().state_dict()

    def load_state_dict(self, state):
        if self.loading is not None:
            self.loading()
        super().load_state_dict(state)


@job
def calls_from_within(shared):
    """A part calls back on one rank, or on both."""
    rank, said = dist.get_rank(), {}
    for odd in ("0", "1", "both"):
        for inner in ("save", "restore", "after_step", "close"):
            ckpt, parts = make(shared / f"within-{odd}-{inner}", Faults())
            part = parts["part"] = CallsBack(Faults())
            ckpt.close()
            ckpt = Checkpointer(
                shared / f"within-{odd}-{inner}",
                parts,
                every=1,
                on_error="raise",
                max_failures=99,
                timeout_s=TIMEOUT_S,
                allow_pickle=True,
            )
            with ckpt:
                ckpt.restore()
                ckpt.after_step()
                ckpt.wait()
                is_it = odd in (str(rank), "both")
                part.saving = getattr(ckpt, inner) if is_it else None
                said[f"{odd}|{inner}|saving"] = tried(ckpt.after_step)
                part.saving, part.loading = None, getattr(ckpt, inner) if is_it else None
                said[f"{odd}|{inner}|loading"] = tried(ckpt.restore)
                part.loading = None
                ckpt.restore()
                said[f"{odd}|{inner}|worked"] = went_on(ckpt, parts)
    return said
