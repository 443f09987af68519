"""Every error of this package. Each says what became of the data and what to do next.

    CheckFreqError
    |-- BadLocation              the path or URL cannot be used; nothing was read or written
    |-- UnsupportedOption        a DCP option that would break a promise; nothing was written
    |-- UnsupportedState         the state holds what could not be loaded again; not written
    |-- SnapshotFailed           no snapshot buffer; nothing was written
    |-- RankFailed               one rank failed in what all do together; all ranks raise it
    |-- SaveFailed               this save is not published, earlier checkpoints are untouched
    |   |-- CheckpointExists     a whole checkpoint is there already and stays
    |   |-- WriteFailed          a shard file could not be written; it was removed
    |   |-- ItemsMissing         something planned was not written; not published
    |   |-- ReplicasDiffer       ranks hold different values under one key; not published
    |   |-- PlanCacheStale       ranks disagree about the cached plan; not published, plan again
    |   |-- PublishUnknown       the commit got no answer; nothing was deleted
    |   |-- LeftBehind           another run went on without this one, or made the root anew
    |   |-- RankLost             another rank did not answer; no further save is possible
    |   `-- TooManyFailures      several saves in a row failed
    |-- LoadFailed               nothing usable was loaded; the text says if targets were touched
    |   |-- BrokenMetadata       `.metadata` is missing, cut short, damaged or not a checkpoint's
    |   |-- NewerFormat          written by a newer version of this package
    |   |-- BrokenShard          a shard file is missing, short or fails its digest
    |   |-- DtypeDiffers         saved and wanted dtypes differ
    |   |-- UnsafePickle         a byte item needs code to unpickle; it was not run
    |   `-- StateMismatch        the checkpoint and the state to restore do not fit together
    |-- RecoveryFailed           no checkpoint was chosen; storage is untouched
    |   |-- StepNotFound         the step that was asked for is not there or not whole
    |   |-- NoValidCheckpoint    checkpoints are there, none is whole
    |   |-- StepsExist           a fresh run would write among another run's steps
    |   `-- RootDiffers          the ranks do not see the same root
    `-- DataStateError           a position or random state does not fit; nothing is changed

Ranks gather errors by pickle, so fields are positional and the text is made in ``__str__``.
"""

from __future__ import annotations

from collections.abc import Sequence


class CheckFreqError(Exception):
    """Base of all errors of this package. ``exit_code`` is what a command line tool returns."""

    exit_code = 10

    def of_rank(self, rank: int) -> CheckFreqError:
        """Return the same error, with the rank that ran into it in its text, if it has a reason."""
        fields = self.__reduce__()[1]
        assert isinstance(fields, tuple)
        why = getattr(self, "why", None)
        places = [place for place, field in enumerate(fields) if field is why]
        if why is None or not places or f"rank {rank}" in str(self):
            return self
        place = places[-1]
        return type(self)(*fields[:place], f"rank {rank}: {why}", *fields[place + 1 :])


class BadLocation(CheckFreqError):
    """The path or URL cannot be used. Nothing was read or written."""

    exit_code = 11

    def __init__(self, location: str, why: str) -> None:
        super().__init__(location, why)
        self.location, self.why = location, why

    def __str__(self) -> str:
        return f"{self.location!r}: {self.why}"


class UnsupportedOption(CheckFreqError):
    """An option that would break a promise of this storage. Nothing was written."""

    exit_code = 12

    def __init__(self, option: str, why: str) -> None:
        super().__init__(option, why)
        self.option, self.why = option, why

    def __str__(self) -> str:
        return f"{self.option} is not supported: {self.why}"


class UnsupportedState(CheckFreqError):
    """The state holds something that could not be loaded again. Nothing was published."""

    exit_code = 13

    def __init__(self, key: str, kind: str, why: str) -> None:
        super().__init__(key, kind, why)
        self.key, self.kind, self.why = key, kind, why

    def __str__(self) -> str:
        return f"{self.key!r} is a {self.kind}: {self.why}. Nothing was published"


class SnapshotFailed(CheckFreqError):
    """The state could not be copied into a snapshot buffer. Nothing was written."""

    exit_code = 14

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"no snapshot was taken: {self.why}"


class RankFailed(CheckFreqError):
    """One rank failed in a call that all ranks make together. All ranks raise this.

    On the rank itself the error that it ran into is the ``__cause__``. Nothing was published.
    """

    exit_code = 15

    def __init__(self, rank: int, doing: str, why: str) -> None:
        super().__init__(rank, doing, why)
        self.rank, self.doing, self.why = rank, doing, why

    def __str__(self) -> str:
        return f"rank {self.rank} failed while {self.doing}: {self.why}"


class SaveFailed(CheckFreqError):
    """This save is not published. Earlier checkpoints are untouched."""

    exit_code = 20

    def __init__(self, where: str, why: str) -> None:
        super().__init__(where, why)
        self.where, self.why = where, why

    def __str__(self) -> str:
        return f"{self.where}: not saved: {self.why}"


class CheckpointExists(SaveFailed):
    """A checkpoint is there already. It stays; the new one was not published.

    Attributes:
        problem: why the one that is there cannot be loaded; empty: it is whole.
    """

    exit_code = 21

    def __init__(self, where: str, problem: str = "") -> None:
        super().__init__(where, "a checkpoint is there already")
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.where, self.problem)

    def __str__(self) -> str:
        if self.problem:
            return (
                f"Checkpoint already exists: {self.where} holds one that cannot be loaded "
                f"({self.problem}), which was left as it is. If nobody is to look into it, remove "
                "the folder, or pass overwrite=True to replace it; or save elsewhere"
            )
        return (
            f"Checkpoint already exists: {self.where} holds a whole checkpoint, which was left "
            "as it is. Save elsewhere, or pass overwrite=True to replace it atomically"
        )


class WriteFailed(SaveFailed):
    """A shard file could not be written. It was removed again."""

    exit_code = 22


class ItemsMissing(SaveFailed):
    """Something that was planned was not written, so nothing was published."""

    exit_code = 23

    def __init__(self, where: str, missing: Sequence[str]) -> None:
        super().__init__(where, f"{len(missing)} planned items were not written")
        self.missing = tuple(missing)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (self.where, self.missing)

    def __str__(self) -> str:
        shown = ", ".join(self.missing[:5]) + (" ..." if len(self.missing) > 5 else "")
        return f"{self.where}: not published, {len(self.missing)} items were not written: {shown}"


class ReplicasDiffer(SaveFailed):
    """Ranks hold different values under one key; saving would keep only one of them.

    Attributes:
        keys: flat keys of DCP's.
        ranks: for each key some ranks, no two of which hold the same.
        differences: inner paths at which values differ, as in ``trainer.hooks[2].lr``, each with
            what two ranks have there: ``(path, ((rank, text), (rank, text)))``. Empty with plain
            `dcp.save`, where DCP has taken values apart: the keys are the paths.
    """

    exit_code = 24

    def __init__(
        self,
        where: str,
        keys: Sequence[str],
        ranks: Sequence[Sequence[int]] = (),
        differences: Sequence[tuple[str, Sequence[tuple[int, str]]]] = (),
    ) -> None:
        super().__init__(where, f"{len(differences or keys)} keys differ between ranks")
        self.keys = tuple(keys)
        self.ranks = tuple(map(tuple, ranks))
        self.differences = tuple((path, tuple(map(tuple, held))) for path, held in differences)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.where, self.keys, self.ranks, self.differences)

    def __str__(self) -> str:
        names, most = list(self.keys), 5
        if self.differences:
            names, most = [], 10
            for path, held in self.differences[:most]:
                says = len({text for _, text in held}) > 1
                texts = ", ".join(f"rank {rank}: {text}" for rank, text in held)
                names.append(f"{path} ({texts})" if says else path)
        more = len(self.differences or self.keys) - most
        shown = ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
        return (
            f"{self.where}: not published, different ranks hold different values of {shown}; only "
            "one of them would be kept. Register what belongs to each rank as a part of its own, "
            "in PerRank (plain dcp.save: save it under a key for each rank), and make the ranks "
            "agree on the rest"
        )


class PlanCacheStale(SaveFailed):
    """The ranks disagree about the cached plan. Nothing was written; the next save plans anew."""

    exit_code = 25


class PublishUnknown(SaveFailed):
    """The commit got no clear answer: it may have landed or not. Nothing was deleted."""

    exit_code = 26

    def __str__(self) -> str:
        return (
            f"{self.where}: no clear answer while publishing ({self.why}). "
            "Nothing was deleted; the next scan tells whether it landed"
        )


class RankLost(SaveFailed):
    """Another rank did not answer within the timeout. The ranks cannot agree on saves any more.

    Earlier checkpoints are untouched. A save that was in flight may have been published or not.
    Raised whatever ``on_error`` says: restart the job.
    """

    exit_code = 28

    def __str__(self) -> str:
        return (
            f"{self.where}: {self.why}. Whole checkpoints are untouched; "
            "the next start finds a save that was in flight if it was published"
        )


class LeftBehind(SaveFailed):
    """What this run saves would not be restored, so it is not saved. Storage is untouched.

    Another run has gone back to an earlier step in the same root and has saved since; or the root
    was removed, and another job has made a new one in its place.
    """

    exit_code = 29


class TooManyFailures(SaveFailed):
    """Several saves in a row failed. The last published checkpoint is untouched."""

    exit_code = 27


class LoadFailed(CheckFreqError):
    """The checkpoint could not be loaded."""

    exit_code = 30

    def __init__(self, where: str, why: str) -> None:
        super().__init__(where, why)
        self.where, self.why = where, why

    def __str__(self) -> str:
        return f"{self.where}: not loaded: {self.why}"


class BrokenMetadata(LoadFailed):
    """``.metadata`` is missing, cut short, damaged or not a checkpoint's. No target was touched."""

    exit_code = 31

    def __str__(self) -> str:
        named = self.why if ".metadata" in self.why else f".metadata: {self.why}"
        return f"{self.where}: not loaded: {named}"


class NewerFormat(LoadFailed):
    """Written by a newer version of this package. No target was touched."""

    exit_code = 32


class BrokenShard(LoadFailed):
    """A shard file is missing, short or fails its digest.

    The bytes that failed never reach a target. `Checkpointer`, `load_part` and `open_checkpoint`
    read into memory of their own, so that the state is as it was. `dcp.load` reads into the state:
    targets loaded before keep their new values (``is_state_touched``), so initialise the state
    again, or restore an older checkpoint into all of it.
    """

    exit_code = 33

    def __init__(self, where: str, why: str, is_state_touched: bool = True) -> None:
        super().__init__(where, why)
        self.args = (where, why, is_state_touched)
        self.is_state_touched = is_state_touched

    def before_the_state(self) -> BrokenShard:
        """Return the same error, of a read into memory of its own."""
        return BrokenShard(self.where, self.why, False)

    def __str__(self) -> str:
        if not self.is_state_touched:
            return f"{self.where}: {self.why}. Nothing was loaded"
        return (
            f"{self.where}: {self.why}. The damaged bytes were not loaded, but part of the state "
            "may hold the checkpoint's values: restore an older checkpoint, or start it afresh"
        )


class DtypeDiffers(LoadFailed):
    """Saved and wanted dtypes differ. No target was touched."""

    exit_code = 34

    def __init__(self, where: str, pairs: Sequence[str]) -> None:
        super().__init__(where, f"{len(pairs)} dtypes differ")
        self.pairs = tuple(pairs)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (self.where, self.pairs)

    def of_rank(self, rank: int) -> DtypeDiffers:
        """Return the same error, with the rank that ran into it in its text."""
        return type(self)(self.where, [f"rank {rank}: {pair}" for pair in self.pairs])

    def __str__(self) -> str:
        shown = "; ".join(self.pairs[:5]) + (" ..." if len(self.pairs) > 5 else "")
        return (
            f"{self.where}: nothing was loaded, {len(self.pairs)} tensors were saved with another "
            f"dtype: {shown}. Pass allow_dtype_cast=True to convert while loading"
        )


class UnsafePickle(LoadFailed):
    """A byte item needs arbitrary code to unpickle. The code was not run."""

    exit_code = 35

    def __str__(self) -> str:
        return (
            f"{self.where}: {self.why}. Its code was not run. If you trust the author of this "
            "checkpoint, pass allow_pickle=True"
        )


class StateMismatch(LoadFailed):
    """The checkpoint and the state to restore do not fit together. No target was touched."""

    exit_code = 36


class RecoveryFailed(CheckFreqError):
    """No checkpoint was chosen. Storage is untouched."""

    exit_code = 40

    def __init__(self, root: str, why: str) -> None:
        super().__init__(root, why)
        self.root, self.why = root, why

    def __str__(self) -> str:
        return f"{self.root}: {self.why}"


class StepNotFound(RecoveryFailed):
    """The step that was asked for is not there or not whole."""

    exit_code = 41


class NoValidCheckpoint(RecoveryFailed):
    """Checkpoints are there, but none is whole. Starting afresh must be asked for."""

    exit_code = 42


class StepsExist(RecoveryFailed):
    """A run that did not restore would write among the steps of another run."""

    exit_code = 43


class RootDiffers(RecoveryFailed):
    """The ranks do not see the same root, so no checkpoint of theirs could ever be whole."""

    exit_code = 44


class DataStateError(CheckFreqError, ValueError):
    """A saved data position or random state does not fit what is there. Nothing was changed."""

    exit_code = 50

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what, self.why = what, why

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. Nothing was changed"
