"""From a load plan to what is read, where its bytes go, and what is done when they are there."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_checkfreq.dcp.covered import check_covered
from dcp_checkfreq.dcp.load_planner import CheckFreqLoadPlanner
from dcp_checkfreq.errors import BrokenMetadata, DtypeDiffers, StateMismatch
from dcp_checkfreq.format.index import Record, digest_starts
from dcp_checkfreq.format.safe_bytes import load_object, load_tensor
from dcp_checkfreq.format.torch_private import StorageInfo
from dcp_checkfreq.shards.byte_spans import span_of
from dcp_checkfreq.shards.read_plan import Want, round_to_blocks
from dcp_checkfreq.shards.targets import BytesTarget, Target, TensorTarget


@dataclass(slots=True)
class ItemRead:
    """One item to read: where its bytes go, and what is left to do when they are there."""

    request: ReadItem
    target: Target
    want: Want
    digests: Sequence[int]
    tensor: torch.Tensor | None = None  # in the live state
    archive: bool = False  # the bytes are a torch.save archive to unpack into `tensor`

    @property
    def key(self) -> str:
        """What a user calls it."""
        return self.request.storage_index.fqn


class ItemReads:
    """The reads of one checkpoint. Several threads may plan.

    Args:
        metadata: of DCP.
        record: ours; None for a checkpoint of stock DCP.
        where: the checkpoint is, for errors.
        verify: compare digests.
        allow_pickle: byte items may run code when they are unpickled.
        allow_dtype_cast: tensors may have another dtype than was saved.

    Attributes:
        bytes_needed: of all that was planned so far.
    """

    def __init__(
        self,
        metadata: Metadata,
        record: Record | None,
        where: str,
        *,
        verify: bool,
        allow_pickle: bool,
        allow_dtype_cast: bool,
    ) -> None:
        self._metadata = metadata
        self._record = record
        self._where = where
        self._verify = verify
        self._allow_pickle = allow_pickle
        self._allow_dtype_cast = allow_dtype_cast
        self.bytes_needed = 0

    def planned(self, plan: LoadPlan, planner: LoadPlanner) -> list[ItemRead]:
        """Return the reads of a plan, into the targets that the planner names.

        Raises:
            BrokenMetadata: it does not say where an item is.
            StateMismatch: an item cannot be read into its target.
            DtypeDiffers: targets have other dtypes.
        """
        places, starts = self._places, self._starts
        if not isinstance(planner, CheckFreqLoadPlanner):  # which has checked its plan
            check_covered(plan, planner, self._metadata, self._where)
        jobs: list[ItemRead] = []
        differing: list[str] = []
        for request in plan.items:
            place = places.get(request.storage_index)
            if place is None:
                raise BrokenMetadata(
                    self._where, f"it does not say where {request.storage_index} is"
                )
            number, info = place
            payload = (info.offset, info.length, 0)
            digests: Sequence[int] = ()
            if self._record is not None:
                columns = self._record.columns
                payload = (
                    columns.payload_offset[number],
                    columns.payload_bytes[number],
                    columns.block_bytes[number] if self._verify else 0,
                )
                if self._verify:
                    digests = columns.digests[starts[number] : starts[number + 1]]
            elif info.transform_descriptors:
                raise StateMismatch(
                    self._where,
                    f"{request.storage_index.fqn!r} was written through stream transforms "
                    f"{list(info.transform_descriptors)}: load it with the reader that knows them",
                )
            ticket = len(jobs)
            if request.type is LoadItemType.BYTE_IO:
                jobs.append(_byte_job(ticket, request, info, payload, digests))
                self.bytes_needed += payload[1]
                continue
            kept = self._metadata.state_dict_metadata.get(request.storage_index.fqn)
            if not isinstance(kept, TensorStorageMetadata):
                raise StateMismatch(
                    self._where,
                    f"{request.dest_index.fqn!r} is a tensor, {request.storage_index.fqn!r} was "
                    "not saved as one",
                )
            tensor = planner.resolve_tensor(request)
            if tensor.dtype != kept.properties.dtype:
                differing.append(
                    f"{request.dest_index.fqn}: saved {kept.properties.dtype}, "
                    f"wanted {tensor.dtype}"
                )
            jobs.append(self._tensor_job(ticket, request, info, payload, digests, kept, tensor))
        if differing and not self._allow_dtype_cast:
            raise DtypeDiffers(self._where, differing)
        return jobs

    @functools.cached_property
    def _places(self) -> dict[MetadataIndex, tuple[int, StorageInfo]]:
        """Number and place of each item, by its index."""
        entries: dict[MetadataIndex, StorageInfo] = self._metadata.storage_data
        return dict(zip(entries, enumerate(entries.values()), strict=True))

    @functools.cached_property
    def _starts(self) -> list[int]:
        return digest_starts(self._record.columns) if self._record else []

    def _tensor_job(
        self,
        ticket: int,
        request: ReadItem,
        info: StorageInfo,
        payload: tuple[int, int, int],
        digests: Sequence[int],
        kept: TensorStorageMetadata,
        tensor: torch.Tensor,
    ) -> ItemRead:
        if tensor.shape != request.lengths:
            raise StateMismatch(
                self._where,
                f"{request.dest_index.fqn!r}: {list(request.lengths)} was planned, the planner "
                f"gave a target of {list(tensor.shape)}",
            )
        offset, payload_bytes, block = payload
        dtype = kept.properties.dtype
        self.bytes_needed += tensor.numel() * dtype.itemsize
        shape = _chunk_shape(kept, request.storage_index)
        if self._record is None or payload_bytes != shape.numel() * dtype.itemsize:
            # Only the archive itself says what is in it: stock wrote it, or a planner of the
            # user's gave another dtype than it had planned.
            job = _byte_job(ticket, request, info, (info.offset, info.length, 0), ())
            job.tensor, job.archive = tensor, True
            return job
        span = span_of(shape, request.storage_offsets, request.lengths)
        start, stop = round_to_blocks(
            span.start * dtype.itemsize, span.stop * dtype.itemsize, block, payload_bytes
        )
        target = TensorTarget(tensor, tuple(shape), dtype, span)
        want = Want(ticket, info.relative_path, offset, start, stop, block)
        return ItemRead(request, target, want, digests, tensor)

    def hand_over(self, job: ItemRead, planner: LoadPlanner) -> None:
        """Give the planner what was read and checked.

        Raises:
            UnsafePickle: a byte item needs code.
        """
        if job.tensor is None:
            assert isinstance(job.target, BytesTarget)
            self._check_bytes(job, planner)
            planner.load_bytes(job.request, io.BytesIO(job.target.data))
            return
        if job.archive:
            assert isinstance(job.target, BytesTarget)
            self._unpack(job, job.tensor, job.target.data)
        planner.commit_tensor(job.request, job.tensor)

    def _check_bytes(self, job: ItemRead, planner: LoadPlanner) -> None:
        """Refuse what other planners would unpickle without a second look."""
        if self._allow_pickle or isinstance(planner, CheckFreqLoadPlanner):
            return
        assert isinstance(job.target, BytesTarget)
        load_object(
            io.BytesIO(job.target.data),
            job.request.storage_index.fqn,
            self._where,
            allow_pickle=False,
        )

    def _unpack(self, job: ItemRead, tensor: torch.Tensor, archive: bytearray) -> None:
        kept = self._metadata.state_dict_metadata[job.request.storage_index.fqn]
        assert isinstance(kept, TensorStorageMetadata)
        size = _chunk_shape(kept, job.request.storage_index)
        saved = load_tensor(archive, size, job.request.storage_index.fqn, self._where)
        for dim, (start, length) in enumerate(
            zip(job.request.storage_offsets, job.request.lengths, strict=True)
        ):
            saved = saved.narrow(dim, start, length)
        tensor.detach().copy_(saved)


def _byte_job(
    ticket: int,
    request: ReadItem,
    info: StorageInfo,
    payload: tuple[int, int, int],
    digests: Sequence[int],
) -> ItemRead:
    offset, size, block = payload
    want = Want(ticket, info.relative_path, offset, 0, size, block)
    return ItemRead(request, BytesTarget(size), want, digests)


def _chunk_shape(kept: TensorStorageMetadata, index: MetadataIndex) -> torch.Size:
    if index.index is not None and index.index < len(kept.chunks):
        chunk = kept.chunks[index.index]
        if index.offset is None or chunk.offsets == index.offset:
            return chunk.sizes
    for chunk in kept.chunks:
        if chunk.offsets == index.offset:
            return chunk.sizes
    raise KeyError(index)
