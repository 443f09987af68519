"""`open_checkpoint`: a mapping of keys to lazy tensors, of a checkpoint anywhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_checkfreq.dcp.read_metadata import read_metadata
from dcp_checkfreq.errors import BadLocation, BrokenMetadata
from dcp_checkfreq.format import names
from dcp_checkfreq.format.index import Record
from dcp_checkfreq.opened.lazy import LazyTensor, LazyValue
from dcp_checkfreq.opened.source import Source
from dcp_checkfreq.runtime import options
from dcp_checkfreq.state.saved import SavedState
from dcp_checkfreq.storage.open import Location, open_tier
from dcp_checkfreq.storage.tier import Tier


class OpenedCheckpoint(Mapping[str, LazyTensor | LazyValue]):
    """The tensors and values of a checkpoint by their flat keys, in the order of its metadata.

    Several threads may share it. Close it, or leave a ``with``, to give its files back.

    Attributes:
        location: of the checkpoint.
        step: that it holds; None where the writer has not told.
        world_size: ranks that wrote it; None for a checkpoint of stock DCP.
    """

    def __init__(self, source: Source, metadata: Metadata, record: Record | None) -> None:
        self._source = source
        self.location = source.location
        self.step = record.step if record else None
        self.world_size = record.world_size if record else None
        saved = SavedState(metadata, self.location)
        leaves = {leaf.key: leaf for part in saved.parts.values() for leaf in part}
        self._items = {
            key: (LazyTensor if leaves[key].is_tensor else LazyValue)(source, leaves[key])
            for key in metadata.state_dict_metadata
        }

    def __getitem__(self, key: str) -> LazyTensor | LazyValue:
        """Return a lazy tensor, or a lazy value. Nothing is read.

        Raises:
            KeyError: there is none of that name; it tells which ones are like it.
        """
        try:
            return self._items[key]
        except KeyError:
            near = difflib.get_close_matches(str(key), self._items, cutoff=0.5)
            hint = f"; near it are {', '.join(map(repr, near))}" if near else ""
            raise KeyError(f"{self.location} has no {key!r}{hint}") from None

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def tensors(self) -> dict[str, LazyTensor]:
        """Return those of them that are tensors."""
        return {key: one for key, one in self._items.items() if isinstance(one, LazyTensor)}

    def close(self) -> None:
        """Close the files; a read after it opens them again. Tensors that were read stay."""
        self._source.close()

    def __enter__(self) -> OpenedCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.location}: {len(self)} tensors and values>"


def open_checkpoint(
    path: Location,
    *,
    verify: bool = True,
    map_files: bool = True,
    threads: int = 2,
    storage_options: Mapping[str, Any] | None = None,
) -> OpenedCheckpoint:
    """Open a checkpoint of this package or of stock DCP, to look into it or to take tensors of it.

    Needs no process group and no GPU, writes nothing, and reads ``.metadata`` only.

    Args:
        path: of the checkpoint: path, URL, `Tier`, or what `find_latest_valid` returned.
        verify: check the digest of each block that is read. Stock checkpoints have none.
        map_files: hand out memory of the file itself where a local disk has a tensor in one piece.
            False: always a copy, as on a network mount where others may cut files.
        threads: reads at once for each tensor; more from a remote storage, which answers late.
        storage_options: for the file system of a URL; see `CheckFreqWriter`.

    Raises:
        BadLocation: there is no checkpoint, but a root that has some, or a path of None.
        BrokenMetadata: ``.metadata`` is missing, cut short, damaged, or not a checkpoint's.
        NewerFormat: written by a newer version of this package.
    """
    options.check(options.OPEN_CHECKPOINT, locals())
    if path is None:
        raise BadLocation("None", "`find_latest_valid` has found no whole checkpoint there")
    tier = open_tier(path, storage_options=storage_options)
    try:
        metadata, record = read_metadata(tier)
    except BrokenMetadata as error:
        if isinstance(error.__cause__, FileNotFoundError):
            _refuse_root(tier, error)
        raise
    source = Source(tier, metadata, record, verify=verify, map_files=map_files, threads=threads)
    return OpenedCheckpoint(source, metadata, record)


def _refuse_root(tier: Tier, error: BrokenMetadata) -> None:
    """Tell what to open instead where checkpoints lie in a folder, not in its place."""
    steps = [one.name for one in tier.list() if names.parse_step(one.name) is not None]
    if steps:
        raise BadLocation(
            tier.location,
            f"this is a root with {len(steps)} folders of steps, such as {steps[0]!r}: open one of "
            "them, or what `find_latest_valid` returns",
        ) from error
