"""A look into the root before a save is kept: cheap, and nothing that others do escapes it."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_checkfreq import CheckFreqWriter, LeftBehind, WriteFailed
from dcp_checkfreq.dcp.rank_save import OfRun
from dcp_checkfreq.format import names
from dcp_checkfreq.format.index import Lineage
from dcp_checkfreq.recovery.plan import begin_history
from dcp_checkfreq.recovery.root_id import id_of_root, make_root_id
from dcp_checkfreq.recovery.root_watch import RootWatch
from dcp_checkfreq.recovery.scan import scan
from dcp_checkfreq.staging.staged_tier import noted
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.storage.tier import disk_of
from dcp_checkfreq.testing import Fault, FaultyTier, ForwardingTier, MemoryTier


@pytest.fixture(params=["memory", "disk"])
def root(request, tmp_path):
    return MemoryTier() if request.param == "memory" else LocalTier(tmp_path / "run")


def save(root, step, lineage=None, *, overwrite=False):
    folder = root.child(names.step_folder(step))
    writer = CheckFreqWriter(folder, _of_run=OfRun(lineage, may_replace=lambda: overwrite))
    dcp.save({"w": torch.ones(4)}, storage_writer=writer)


def watching(root):
    watch = RootWatch(root)
    watch.begin(make_root_id(root), scan(root))
    return watch


def run_of(root, run_id, step=None):
    """Begin a history in ``root`` that goes on from ``step``."""
    records = scan(root)
    resumed = next((record for record in records if record.step == step), None)
    return begin_history(run_id, resumed, records)


def test_alone_in_a_root_nothing_is_in_the_way(root):
    watch, own = watching(root), Lineage(run_id="a")
    for step in range(1, 9):
        watch.check(own, step)
        save(root, step, own)
    watch.check(own, 9)


@pytest.mark.parametrize("back_to", [1, 2, 3, None])
def test_a_run_that_another_one_has_left_is_told_once_the_other_has_saved(root, back_to):
    watch, own = watching(root), Lineage(run_id="a")
    for step in (1, 2, 3):
        save(root, step, own)
        watch.check(own, step + 1)
    other = run_of(root, "b", back_to)
    watch.check(own, 4)
    save(root, 7, other)
    told = f"went on from step {back_to}" if back_to else "started afresh"
    with pytest.raises(LeftBehind, match=rf"run \(b\) {told} .*step_00000007") as raised:
        watch.check(own, 4)
    assert "step 4" in str(raised.value)
    new = run_of(root, "c", 3)
    watch.begin(id_of_root(root), scan(root))
    watch.check(new, 4)


@pytest.mark.parametrize("others", [0, 3, 30])
def test_a_known_folder_that_another_run_replaced_is_found_again(root, others):
    watch, own = watching(root), Lineage(run_id="a")
    for step in range(1, 4 + others):
        save(root, step, own)
    watch.check(own, 100)
    other = run_of(root, "b", 1)
    save(root, 2, other, overwrite=True)

    def look_a_few_times():  # at some of those that are known each time
        for _ in range(2 + others):
            watch.check(own, 100)

    with pytest.raises(LeftBehind, match="step_00000002"):
        look_a_few_times()


def test_where_folders_have_times_one_look_finds_what_was_replaced_among_many(tmp_path):
    root, own = LocalTier(tmp_path), Lineage(run_id="a")
    for step in range(1, 31):
        save(root, step, own)
    watch = watching(root)
    watch.check(own, 100)
    save(root, 17, run_of(root, "b", 1), overwrite=True)
    with pytest.raises(LeftBehind, match="step_00000017"):
        watch.check(own, 100)


def test_a_step_of_stock_dcp_leaves_nobody(tmp_path):
    root = LocalTier(tmp_path)
    watch, own = watching(root), Lineage(run_id="a")
    save(root, 1, own)
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "step_5000")
    watch.check(own, 2)


def test_a_broken_step_of_another_run_has_no_say(root):
    watch, own = watching(root), Lineage(run_id="a")
    save(root, 1, own)
    save(root, 2, run_of(root, "b"))
    (shard,) = [e.name for e in root.child("step_00000002").list() if e.name.startswith("__")]
    root.child("step_00000002").delete(shard)
    watch.check(own, 2)


def test_a_look_decodes_nothing_twice_and_lists_few_folders_however_many_there_are():
    inner = MemoryTier()
    own = Lineage(run_id="a")
    for step in range(1, 41):
        save(inner, step, own)
    root = FaultyTier(inner, [])
    watch = watching(root)
    for _ in range(15):  # every folder had its turn
        watch.check(own, 41)
    root.calls.clear()
    watch.check(own, 41)
    assert [call for call in root.calls if call[0] == "read"] == [("read", names.ROOT_ID)]
    assert len(root.calls) <= 6


def test_what_a_run_has_published_itself_is_known_without_decoding_it(root):
    inner = FaultyTier(root, [])
    watch, own = watching(inner), Lineage(run_id="a")
    save(root, 1, own)
    (record,) = scan(root)
    watch.saved(own, 1, record.identity)
    inner.calls.clear()
    watch.check(own, 2)
    watch.check(own, 2)
    assert [name for verb, name in inner.calls if verb == "read"].count(names.METADATA) == 1


# --- the root itself ---


def test_a_root_that_was_made_anew_by_another_job_is_not_saved_into(root):
    watch = watching(root)
    was = id_of_root(root)
    root.child(names.RUN_FOLDER).delete(names.ROOT_ID)
    now = make_root_id(root)
    assert now != was
    with pytest.raises(LeftBehind, match=f"{now}, it was {was}"):
        watch.check(Lineage(run_id="a"), 1)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"id", b"A" * 32, b"0" * 33])
def test_an_id_that_is_gone_or_makes_no_sense_is_made_again_and_told(root, content, caplog):
    watch = watching(root)
    was = id_of_root(root)
    folder = root.child(names.RUN_FOLDER)
    folder.delete(names.ROOT_ID)
    if content is not None:
        folder.replace(names.ROOT_ID, content, scratch="x.tmp")
    watch.check(Lineage(run_id="a"), 1)
    assert id_of_root(root) == was
    assert "root-id is gone and is made again" in caplog.text
    caplog.clear()
    watch.check(Lineage(run_id="a"), 1)
    assert not caplog.text


class OnADisk(ForwardingTier):
    """Holds what it is told, on the disk that it is told."""

    number = 7

    def disk(self):
        return self.number


@pytest.mark.parametrize("restored", [True, False])
def test_an_id_that_is_gone_with_its_disk_fails_the_save_until_the_disk_is_back(caplog, restored):
    root = OnADisk(MemoryTier())
    assert disk_of(noted(root, moved=lambda: None)) == 7
    watch, own = (watching(root) if restored else RootWatch(root)), Lineage(run_id="a")
    if not restored:
        watch.check(own, 1)
    there, root.inner = root.inner, MemoryTier()
    root.number = 8
    for step in (2, 3):
        with pytest.raises(WriteFailed, match="on another disk than before"):
            watch.check(own, step)
    assert root.inner.files() == {}
    assert not caplog.text
    root.inner, root.number = there, 9  # the same one, mounted again
    watch.check(own, 4)
    root.child(names.RUN_FOLDER).delete(names.ROOT_ID)
    watch.check(own, 5)
    assert "root-id is gone and is made again" in caplog.text


def test_a_root_whose_id_was_not_known_takes_the_one_that_is_there(root, caplog):
    watch = RootWatch(root)
    watch.begin(None, [])
    watch.check(Lineage(run_id="a"), 1)
    assert id_of_root(root) is not None
    assert not caplog.text
    root.child(names.RUN_FOLDER).delete(names.ROOT_ID)
    make_root_id(root)
    with pytest.raises(LeftBehind):
        watch.check(Lineage(run_id="a"), 2)


def test_every_root_has_an_id_of_its_own_which_stays(root, tmp_path):
    first = make_root_id(root)
    assert make_root_id(root) == first
    assert make_root_id(LocalTier(tmp_path / "other")) != first


# --- a storage that fails ---


@pytest.mark.parametrize("fault", [{"verb": "list", "name": ""}, {"verb": "read", "name": "root*"}])
def test_a_root_that_cannot_be_looked_at_is_a_failed_save(fault):
    root = FaultyTier(MemoryTier(), [])
    watch = watching(root)
    bad = FaultyTier(root, [Fault(**fault, times="forever")])
    watch._root = bad
    with pytest.raises(WriteFailed, match="cannot be looked at"):
        watch.check(Lineage(run_id="a"), 1)


def test_a_folder_that_cannot_be_read_stops_no_save_and_is_looked_at_again(tmp_path):
    inner = MemoryTier()
    own = Lineage(run_id="a")
    save(inner, 1, own)
    save(inner, 2, run_of(inner, "b"))
    root = FaultyTier(inner, [Fault(verb="read", name=names.METADATA, nth=nth) for nth in (0, 1)])
    watch = RootWatch(root)
    watch.begin(make_root_id(inner), [])
    watch.check(own, 2)
    with pytest.raises(LeftBehind):
        watch.check(own, 2)


def test_files_and_links_that_are_named_like_steps_are_nothing_to_a_look(tmp_path):
    watch = watching(LocalTier(tmp_path))
    (tmp_path / "step_9").write_text("a file")
    (tmp_path / "step_10").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step_11").symlink_to("step_11")
    watch.check(Lineage(run_id="a"), 1)
