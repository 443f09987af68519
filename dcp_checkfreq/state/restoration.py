"""One restore of the registered parts: all is loaded first, then put in place, or nothing is."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata

from dcp_checkfreq.errors import StateMismatch, UnsupportedOption
from dcp_checkfreq.state.differences import Differences, listed, refuse
from dcp_checkfreq.state.part import Fill, Part, Undo
from dcp_checkfreq.state.saved import Renames, SavedState
from dcp_checkfreq.state.value_part import AbsentFill
from dcp_checkfreq.state.wanted import Wanted

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a checkpoint is to be restored.

    Args:
        only: names of parts; the others keep what they have. None: all.
        optional: names of parts that keep what they have if the checkpoint lacks them.
        rename: what is called otherwise in the checkpoint; see `Renames`.
        strict: what is missing, more than wanted, or of another dtype is an error.
    """

    only: Collection[str] | None = None
    optional: Collection[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True

    def check(self, parts: Collection[str]) -> None:
        """Make sure that the names are those of registered parts.

        Raises:
            UnsupportedOption: one is not.
        """
        named = {
            "only": self.only or (),
            "optional": self.optional,
            "rename": [name.partition(".")[0] for name in self.rename],
        }
        for option, names in named.items():
            unknown = sorted(set(names) - set(parts))
            if unknown:
                raise UnsupportedOption(
                    f"{option}={getattr(self, option)!r}",
                    f"no part is called {listed(unknown)}; registered are {listed(sorted(parts))}",
                )


@dataclass(frozen=True, slots=True)
class Unexpected:
    """What of a checkpoint has no place in the live state.

    Attributes:
        keys: flat keys, by part.
        parts: of which nothing is restored.
    """

    keys: dict[str, list[str]]
    parts: list[str]

    @staticmethod
    def of_all(ranks: Sequence[Unexpected]) -> Unexpected:
        """Return what no rank has a place for: stages of a pipeline hold a part each."""
        keys: dict[str, list[str]] = {}
        for rank in ranks:
            for name, found in rank.keys.items():
                known = keys.get(name)
                mine = set(found)
                keys[name] = found if known is None else [key for key in known if key in mine]
        others = [set(rank.parts) for rank in ranks]
        return Unexpected(keys, [one for one in ranks[0].parts if all(one in x for x in others)])


class Restoration:
    """What has to be loaded, and the way into the live parts.

    Args:
        parts: to restore, by name.
        per_rank: names of those of which each rank has its own.
        metadata: of the checkpoint.
        where: it is.
        selection: what of it is wanted.

    Attributes:
        wanted: for the load planner.
        differences: by part, of those that have some.
        left_out: parts of the checkpoint that are not among those to restore.

    Raises:
        StateMismatch: they do not fit.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        per_rank: Collection[str],
        metadata: Metadata,
        where: str,
        selection: Selection,
    ) -> None:
        self._where, self._selection = where, selection
        self.wanted = Wanted()
        self.differences: dict[str, Differences] = {}
        self._fills: dict[str, Fill] = {}
        self._undo: dict[str, Undo] = {}
        saved = SavedState(metadata, where)
        held = {name.partition("/rank")[0] for name in saved.parts}
        renames = Renames(selection.rename)
        absent = [
            name
            for name, part in parts.items()
            if not _is_held(name, saved, held, name in per_rank, renames) and not part.is_empty()
        ]
        self.absent = [name for name in absent if name in selection.optional]
        missing = [name for name in absent if name not in selection.optional]
        if missing and selection.strict:
            raise StateMismatch(
                where,
                f"it has no {', '.join(map(repr, missing))}; it has {', '.join(sorted(held))}. "
                "Register the parts that were saved, name new ones in optional=, or save anew",
            )
        for name in missing:
            self.differences[name] = Differences(missing=[name])
        for name, part in parts.items():
            if name not in absent:
                self._fills[name], self.differences[name] = part.fill(saved, renames, self.wanted)
        used = {renames.saved_name(name)[0] for name in parts}
        used |= {name.partition(".")[0] for name in selection.rename.values()}
        self.left_out = sorted(held - used) if selection.only is None else []

    def unexpected(self) -> Unexpected:
        """Return what this rank has no place for; another one may have it."""
        claimed = set[str]().union(*(fill.claimed for fill in self._fills.values()))
        found = {
            name: [key for key in one.unexpected if key not in claimed]
            for name, one in self.differences.items()
        }
        return Unexpected(found, list(self.left_out))

    def settle(self, unexpected: Unexpected) -> None:
        """Take what no rank has a place for, as the differences that count.

        Raises:
            StateMismatch: there are differences, and none are allowed. Nothing was touched.
        """
        for name, one in self.differences.items():
            one.unexpected[:] = unexpected.keys.get(name, [])
        self.left_out = unexpected.parts
        if self._selection.strict:
            refuse(self._where, self.differences)

    def check(self) -> None:
        """Compare what was loaded with the live parts. Changes nothing.

        Raises:
            StateMismatch: it does not fit.
        """
        for fill in self._fills.values():
            fill.check()

    def put_where_it_may_fail(self, step: int) -> None:
        """Restore the parts that run code of the user, in the order of their names."""
        for name, fill in self._fills.items():
            if isinstance(fill, AbsentFill):
                fill.step = step
            if fill.may_fail:
                self._undo[name] = fill.keep()
                fill.put()

    def put_the_rest(self) -> None:
        """Restore the others."""
        self._undo.clear()
        for fill in self._fills.values():
            if not fill.may_fail:
                fill.put()

    @contextlib.contextmanager
    def undone_if_it_fails(self) -> Iterator[None]:
        """Run the body, which restores parts; if it fails, put back what was there before."""
        try:
            yield
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        """Put back the state before, of all parts that were restored so far.

        Raises nothing: the error that has led here is already being raised, on all ranks alike.
        """
        for name, undo in reversed(self._undo.items()):
            try:
                undo()
            except BaseException:  # noqa: BLE001  the others have to be put back, too
                _log.exception(
                    "%s: %r could not be put back as it was after a failed restore: make it anew",
                    *(self._where, name),
                )
        self._undo.clear()

    def tell(self) -> None:
        """Log what was not restored."""
        for name, found in self.differences.items():
            if found:
                _log.warning("%s: %s", self._where, found.described(name))
        if self.left_out:
            _log.warning(
                "%s: the checkpoint also holds %s, which are not registered; they are left alone",
                *(self._where, listed(self.left_out)),
            )
        if self.absent:
            _log.warning(
                "%s: the checkpoint has no %s, which keep what they have",
                *(self._where, listed(self.absent)),
            )


def _is_held(
    name: str, saved: SavedState, held: Collection[str], is_per_rank: bool, renames: Renames
) -> bool:
    if is_per_rank and renames.saved_name(name)[0] in held:
        return True
    return renames.saved_name(name)[0] in saved.parts or renames.reaches_into(name)
