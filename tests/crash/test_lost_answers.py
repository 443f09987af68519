"""Storage that fails or does not answer: what is certain is said, what is unknown is kept."""

import errno

import pytest
from crash_saves import load, newest, root_with_step_1, same_values, save, state_of, why
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq.errors import CheckpointExists, PublishUnknown, SaveFailed, WriteFailed
from dcp_checkfreq.testing import Fault, FaultyTier

pytestmark = pytest.mark.crash

STEP_2 = "step_00000002/"


@pytest.fixture(autouse=True)
def several_files(monkeypatch):
    """Small states are written to one file; the limit is lowered to see several."""
    monkeypatch.setattr("dcp_checkfreq.shards.assign.MIN_FILE_BYTES", 4096)


def fails(root, *plan):
    """Save on a tier that fails as planned; return the tier and the error as the user sees it."""
    tier = FaultyTier(root, plan)
    with pytest.raises(CheckpointException) as caught:
        save(tier, 2, threads=3)
    return tier, why(caught.value)[0]


def shards_of_step_2(root):
    return [path for path in root.files() if path.startswith(STEP_2) and ".distcp" in path]


def test_a_commit_whose_answer_is_lost_but_is_seen_to_be_there_is_a_success():
    root = root_with_step_1()
    lost = Fault(verb="create", name=".metadata", error=errno.ETIMEDOUT, lost_answer=True)
    tier = FaultyTier(root, [lost])
    save(tier, 2, threads=3)
    assert tier.struck == 1
    assert newest(root, depth="digest") == 2


def test_an_io_error_in_the_commit_is_unknown_although_the_record_is_seen():
    """Only a sync could tell that it is durable; after an I/O error its word is worth little."""
    root = root_with_step_1()
    tier, error = fails(root, Fault(verb="create", error=errno.EIO, lost_answer=True))
    assert type(error) is PublishUnknown
    assert "delete" not in {verb for verb, _ in tier.calls}
    assert newest(root, depth="digest") == 2


def test_a_commit_without_any_answer_is_unknown_and_nothing_is_deleted():
    root = root_with_step_1()
    tier, error = fails(
        root,
        Fault(verb="create", lost_answer=True),
        Fault(verb="read", name=".metadata", times="forever"),
    )
    assert type(error) is PublishUnknown
    assert "delete" not in {verb for verb, _ in tier.calls}
    assert len(shards_of_step_2(root)) == 3
    assert newest(root, depth="digest") == 2  # it had landed, and the next scan finds it


def test_a_commit_that_may_have_failed_is_unknown_and_nothing_is_deleted():
    root = root_with_step_1()
    tier, error = fails(root, Fault(verb="create", error=errno.EIO))
    assert type(error) is PublishUnknown
    assert "delete" not in {verb for verb, _ in tier.calls}
    assert len(shards_of_step_2(root)) == 3
    assert newest(root) == 1
    save(root, 2)
    assert newest(root, depth="digest") == 2


@pytest.mark.parametrize("lost", [True, False])
def test_an_overwrite_without_an_answer_keeps_the_files_of_both(lost):
    root = root_with_step_1()
    old_files = set(root.files())

    class Silent(FaultyTier):
        """Once the commit was tried, nobody can see what became of it."""

        def around(self, verb, name, call):
            if verb == "read" and ("replace", ".metadata") in self.calls:
                raise OSError(errno.EIO, "injected: no look at it either")
            return super().around(verb, name, call)

    with pytest.raises(CheckpointException) as caught:
        save(
            Silent(root, [Fault(verb="replace", lost_answer=lost)]),
            2,
            into=1,
            overwrite=True,
            threads=3,
        )
    assert type(why(caught.value)[0]) is PublishUnknown
    assert old_files < set(root.files())
    assert same_values(load(root, 1), state_of(2 if lost else 1))


def test_a_commit_that_was_refused_is_a_failure_and_leaves_no_files():
    root = root_with_step_1()
    before = root.files()
    _, error = fails(root, Fault(verb="create", error=errno.ENOSPC))
    assert isinstance(error, SaveFailed)
    assert not isinstance(error, PublishUnknown)
    assert root.files() == before
    assert newest(root) == 1


def test_losing_the_race_for_the_commit_leaves_the_winner_and_no_file_of_the_loser():
    root = root_with_step_1()

    won = {}

    class Late(FaultyTier):
        """Someone else commits the same step just before."""

        def around(self, verb, name, call):
            if verb == "create" and name == ".metadata":
                before = set(root.files())
                save(root, 2)
                won.update(
                    {path: data for path, data in root.files().items() if path not in before}
                )
            return super().around(verb, name, call)

    with pytest.raises(CheckpointException) as caught:
        save(Late(root, []), 2, threads=3)
    assert type(why(caught.value)[0]) is CheckpointExists
    assert {path: data for path, data in root.files().items() if path.startswith(STEP_2)} == won
    assert newest(root, depth="digest") == 2


@pytest.mark.parametrize("after_bytes", [None, 0, 1, 3000])
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_full_disk_in_any_shard_fails_the_save_and_leaves_no_file_of_it(nth, after_bytes):
    root = root_with_step_1()
    before = root.files()
    tier, error = fails(
        root, Fault(verb="write_shard", nth=nth, error=errno.ENOSPC, after_bytes=after_bytes)
    )
    assert type(error) is WriteFailed
    assert "space" in str(error)
    assert sum(verb == "write_shard" for verb, _ in tier.calls) == 3
    assert "create" not in {verb for verb, _ in tier.calls}
    assert root.files() == before
    assert newest(root) == 1
    save(root, 2)
    assert newest(root, depth="digest") == 2


@pytest.mark.parametrize("nth", range(3))
def test_a_disk_that_stays_full_fails_the_save_and_leaves_no_file_of_it(nth):
    root = root_with_step_1()
    before = root.files()
    _, error = fails(root, Fault(verb="write_shard", nth=nth, times="forever", error=errno.ENOSPC))
    assert type(error) is WriteFailed
    assert root.files() == before


@pytest.mark.parametrize("verb", ["make", "sync"])
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
def test_a_folder_that_cannot_be_made_or_synced_fails_the_save(verb, error):
    root = root_with_step_1()
    before = root.files()
    _, raised = fails(root, Fault(verb=verb, error=error))
    assert type(raised) is WriteFailed
    assert root.files() == before
    assert newest(root) == 1


def test_an_error_while_cleaning_up_does_not_hide_the_first_one():
    root = root_with_step_1()
    _, error = fails(
        root,
        Fault(verb="write_shard", nth=1, error=errno.ENOSPC),
        Fault(verb="delete", times="forever", error=errno.EACCES),
    )
    assert type(error) is WriteFailed
    assert "space" in str(error)
    assert newest(root) == 1


def test_old_files_that_cannot_be_deleted_do_not_fail_an_overwrite_that_is_published():
    root = root_with_step_1()
    tier = FaultyTier(root, [Fault(verb="delete", times="forever", error=errno.EACCES)])
    save(tier, 2, into=1, overwrite=True, threads=3)
    assert same_values(load(root, 1), state_of(2))
