"""The commit lands whole or not at all, and what became of it is told truly."""

import errno
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter
from dcp_checkfreq.commit.assemble import assemble
from dcp_checkfreq.commit.publish import publish, reserve
from dcp_checkfreq.errors import (
    CheckFreqError,
    CheckpointExists,
    ItemsMissing,
    PublishUnknown,
    SaveFailed,
)
from dcp_checkfreq.format import names
from dcp_checkfreq.shards.layout import RankReport
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import ForwardingTier, ManualClock, MemoryTier

ATTEMPT = "0123456789ab"
RECORD = b"record"


def folder(content=None):
    root = MemoryTier.holding({"step_1/": b""} | ({"step_1/.metadata": content} if content else {}))
    return root, root.child("step_1")


def commit(tier, record, *, overwrite, files=None):
    return publish(
        tier,
        record,
        reservation=reserve(tier, ATTEMPT),
        files=files or {},
        may_replace=(lambda: True) if overwrite else None,
        clock=ManualClock(),
    )


def committed(files):
    """Return what is there but for reservations: who has made one cancels it."""
    return {path: data for path, data in files.items() if not path.endswith(".tmp")}


def test_the_record_is_there_when_it_returns():
    root, tier = folder()
    commit(tier, RECORD, overwrite=False)
    assert root.files() == {"step_1/.metadata": RECORD}


def test_a_checkpoint_that_is_there_stays():
    root, tier = folder(b"old")
    with pytest.raises(CheckpointExists):
        commit(tier, RECORD, overwrite=False)
    assert committed(root.files()) == {"step_1/.metadata": b"old"}


def test_a_checkpoint_that_is_there_is_replaced_when_asked():
    root, tier = folder(b"old")
    commit(tier, RECORD, overwrite=True)
    assert root.files() == {"step_1/.metadata": RECORD}


class Refusing(ForwardingTier):
    """Fails the commit without carrying it out, and optionally the second look."""

    def __init__(self, inner, error, second=None):
        super().__init__(inner)
        self.error, self.second = error, second

    def around(self, verb, name, call):
        if name == names.METADATA and verb in ("create", "replace"):
            raise self.error
        if name == names.METADATA and verb == "read" and self.second:
            raise self.second
        return call()


REFUSALS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES]


@pytest.mark.parametrize("code", REFUSALS, ids=errno.errorcode.get)
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_storage_that_surely_refused_is_a_failed_save(code, old):
    root, _ = folder(old)
    before = root.files()
    tier = Refusing(root, OSError(code, "no")).child("step_1")
    with pytest.raises(SaveFailed) as raised:
        commit(tier, RECORD, overwrite=bool(old))
    assert not isinstance(raised.value, PublishUnknown)
    assert committed(root.files()) == before


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, None])
def test_an_error_that_says_nothing_is_unknown(code):
    root, _ = folder()
    tier = Refusing(root, OSError(code, "?")).child("step_1")
    with pytest.raises(PublishUnknown):
        commit(tier, RECORD, overwrite=False)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ETIMEDOUT])
def test_without_a_second_look_it_is_unknown(code):
    root, _ = folder()
    tier = Refusing(root, OSError(code, "?"), second=OSError(errno.EIO, "again")).child("step_1")
    with pytest.raises(PublishUnknown, match="again"):
        commit(tier, RECORD, overwrite=False)


class StruckAfterTheCommit(ForwardingTier):
    """Carries out the commit, and then the process is interrupted before it can return."""

    def __init__(self, inner, strike):
        super().__init__(inner)
        self.strike = strike

    def around(self, verb, name, call):
        result = call()
        if verb in ("create", "replace") and name == names.METADATA:
            raise self.strike
        return result


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("strike", [OSError("lost answer"), TimeoutError("lost answer")])
def test_a_commit_that_landed_is_published_whatever_the_answer_was(overwrite, strike):
    inner = MemoryTier.holding({"step_1/": b""})
    commit(StruckAfterTheCommit(inner, strike).child("step_1"), b"record", overwrite=overwrite)
    assert inner.files() == {"step_1/.metadata": b"record"}


def test_after_an_io_error_a_commit_that_seems_to_have_landed_stays_unknown():
    """A later fsync may succeed although the failed one has lost the data."""
    inner = MemoryTier.holding({"step_1/": b""})
    tier = StruckAfterTheCommit(inner, OSError(errno.EIO, "fsync failed")).child("step_1")
    with pytest.raises(PublishUnknown):
        commit(tier, RECORD, overwrite=False)
    assert inner.files() == {"step_1/.metadata": RECORD}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("strike", [KeyboardInterrupt(), SystemExit(1), MemoryError()])
def test_an_interrupt_during_the_commit_deletes_no_file_of_what_landed(overwrite, strike):
    inner = MemoryTier()
    folder = StruckAfterTheCommit(inner, strike).child("step_1")
    state = {"w": torch.arange(10.0)}
    with pytest.raises((CheckpointException, CheckFreqError, type(strike))):
        dcp.save(state, storage_writer=CheckFreqWriter(folder, overwrite=overwrite), no_dist=True)
    assert "step_1/.metadata" in inner.files(), "the test proves nothing: nothing was committed"
    loaded = {"w": torch.zeros(10)}
    dcp.load(loaded, storage_reader=CheckFreqReader(inner.child("step_1")), no_dist=True)
    assert torch.equal(loaded["w"], state["w"])


def test_overwriting_deletes_nothing_outside_of_the_folder(tmp_path):
    """Whatever a ``.metadata`` of someone else names as its files."""
    precious = tmp_path / "precious"
    precious.write_text("x")
    step = tmp_path / "step_1"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=step, no_dist=True)
    metadata = pickle.loads((step / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../precious"
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    writer = CheckFreqWriter(LocalTier(step), overwrite=True)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    assert precious.exists()


# --- what must be there before the commit ---


def two_chunks():
    chunks = [
        ChunkStorageMetadata(torch.Size([0]), torch.Size([2])),
        ChunkStorageMetadata(torch.Size([2]), torch.Size([1])),
    ]
    weight = TensorStorageMetadata(TensorProperties(), torch.Size([3]), chunks)
    return Metadata({"w": weight, "n": BytesStorageMetadata()})


INDICES = [
    MetadataIndex("w", torch.Size([0]), 0),
    MetadataIndex("w", torch.Size([2]), 1),
    MetadataIndex("n"),
]


def rank_report(file, indices):
    count = len(indices)
    return RankReport(
        files={file: 100 * count},
        indices=indices,
        file_name=[file] * count,
        start=[100 * n for n in range(count)],
        item_bytes=[90 + n for n in range(count)],
        payload_offset=[100 * n + 64 for n in range(count)],
        payload_bytes=[8] * count,
        block_bytes=[16384] * count,
        digests=[[hash(index) % 1000] for index in indices],
    )


def test_every_rank_s_items_are_in_the_metadata_and_the_columns_run_beside_them():
    metadata = two_chunks()
    reports = [rank_report("a", INDICES[:1]), rank_report("b", INDICES[1:])]
    columns = assemble(metadata, reports, "/runs/step_1")
    assert list(metadata.storage_data) == INDICES
    places = [(i.relative_path, i.offset, i.length) for i in metadata.storage_data.values()]
    assert places == [("a", 0, 90), ("b", 0, 90), ("b", 100, 91)]
    assert list(columns.payload_offset) == [64, 64, 164]
    assert list(columns.digests) == [hash(index) % 1000 for index in INDICES]


@pytest.mark.parametrize("lost", range(3))
def test_an_item_that_no_rank_wrote_is_named(lost):
    written = INDICES[:lost] + INDICES[lost + 1 :]
    with pytest.raises(ItemsMissing) as raised:
        assemble(two_chunks(), [rank_report("a", written)], "/runs/step_1")
    assert len(raised.value.missing) == 1
    assert raised.value.missing[0].startswith(INDICES[lost].fqn)


def test_a_rank_without_items_is_fine():
    metadata = two_chunks()
    assemble(metadata, [rank_report("a", []), rank_report("b", INDICES)], "/runs/step_1")
    assert len(metadata.storage_data) == 3


def test_an_item_that_is_written_twice_counts_once_and_its_columns_stay_in_step():
    """A planner may let two ranks write a replicated item, or one rank write it twice."""
    w0, w2, n = INDICES
    reports = [rank_report("a", [w0, n, n]), rank_report("b", [n, w2]), rank_report("c", [w2, w0])]
    metadata = two_chunks()
    columns = assemble(metadata, reports, "here")
    assert list(metadata.storage_data) == [w0, n, w2]
    assert [info.relative_path for info in metadata.storage_data.values()] == ["a", "a", "b"]
    assert [info.offset for info in metadata.storage_data.values()] == [0, 100, 100]
    assert list(columns.payload_offset) == [64, 164, 164]
    assert list(columns.digests) == [hash(index) % 1000 for index in (w0, n, w2)]
