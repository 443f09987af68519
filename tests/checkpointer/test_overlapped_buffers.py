"""The buffer of overlapped saves, and going back while one is under way or has failed."""

import logging

import pytest
from overlap_tools import RECIPES, saved_differs, snapshot_of
from test_overlapped_saves import IN_PLACE, changed, checkpointer

from dcp_checkfreq import (
    SnapshotFailed,
    WriteFailed,
    find_latest_valid,
)
from dcp_checkfreq.testing import GatedTier, MemoryTier

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def root():
    return MemoryTier()


# --- one buffer: it is never rewritten while it is read (case 19) ---


def test_a_save_that_comes_while_the_last_one_is_written_waits_and_rewrites_nothing(root):
    from concurrent.futures import ThreadPoolExecutor

    recipe = RECIPES["adamw"]()
    tier = GatedTier(root, verbs=["write_shard"])
    recipe.iterate()
    wanted = {1: snapshot_of(recipe.parts)}
    with ThreadPoolExecutor(1) as threads, checkpointer(tier, recipe.parts) as ckpt:
        ckpt.after_step()
        tier.wait_until_held()
        recipe.iterate()
        wanted[2] = snapshot_of(recipe.parts)
        second = threads.submit(ckpt.after_step)
        with pytest.raises(TimeoutError):
            second.result(0.2)
        assert find_latest_valid(root) is None
        tier.release()
        second.result(60)
    assert [saved_differs(root, step, wanted[step]) for step in (1, 2)] == [[], []]


def test_a_write_that_fails_gives_the_buffer_to_the_next_save_only_after_the_copy(root, late):
    from checkpointer_tools import failing

    recipe = RECIPES["adamw"]()
    tier = failing(root, nth=1)
    with checkpointer(tier, recipe.parts) as ckpt:
        for _ in range(4):
            recipe.iterate()
            wanted = snapshot_of(recipe.parts)
            late.hold()
            ckpt.after_step()
        late.release()
    assert ckpt.last_saved_step == 4
    assert [record.error is None for record in ckpt.history] == [True, False, True, True]
    assert saved_differs(root, 4, wanted) == []


def test_a_training_that_ends_while_a_copy_is_held_still_saves_it_whole(root, late):
    recipe = RECIPES["adamw"]()
    ckpt = checkpointer(root, recipe.parts)
    recipe.iterate()
    wanted = snapshot_of(recipe.parts)
    late.hold()
    ckpt.after_step()
    late.release()
    ckpt.close()
    assert saved_differs(root, 1, wanted) == []
    recipe.iterate()  # the hooks are gone


def test_the_error_of_a_write_is_not_taken_for_one_of_the_snapshot(root, late):
    from checkpointer_tools import failing

    recipe = RECIPES["adamw"]()
    ckpt = checkpointer(failing(root), recipe.parts, on_error="raise")
    recipe.iterate()
    late.hold()
    ckpt.after_step()
    recipe.iterate()  # the copy is fine: nothing is raised here
    with pytest.raises(WriteFailed):
        ckpt.wait()
    ckpt.close()


# --- going back while a snapshot is under way, or has failed ---


def test_restore_waits_for_the_copy_before_it_writes_into_the_state(root, late):
    recipe = RECIPES["adamw"]()
    with checkpointer(root, recipe.parts) as ckpt:
        recipe.iterate()
        first = snapshot_of(recipe.parts)
        ckpt.after_step()
        recipe.iterate()
        second = snapshot_of(recipe.parts)
        late.hold()
        ckpt.after_step()
        late.release()
        assert ckpt.restore(1).step == 1
        assert saved_differs(root, 1, snapshot_of(recipe.parts)) == []
    assert saved_differs(root, 1, first) == []
    assert saved_differs(root, 2, second) == []


def test_restore_after_a_failed_snapshot_restores(root, held):
    ckpt, recipe, _ = changed(IN_PLACE["no_grad"], root, held)
    assert ckpt.failures_in_a_row == 1
    assert ckpt.restore().step == 1
    assert saved_differs(root, 1, snapshot_of(recipe.parts)) == []
    ckpt.close()


@pytest.mark.parametrize("logged", [True, False])
def test_a_value_that_cannot_be_copied_fails_the_save_like_any_other_snapshot(root, logged, caplog):
    class Stubborn:
        def __init__(self):
            self.willing = True

        def __deepcopy__(self, memo):
            if not self.willing:
                raise MemoryError("too large to copy")
            return self

        def __reduce__(self):
            return int, (5,)

    value = Stubborn()
    parts = {"x": {"value": value}}
    options = {"on_error": "log" if logged else "raise", "allow_pickle": True}
    with caplog.at_level(logging.ERROR), checkpointer(root, parts, **options) as ckpt:
        ckpt.after_step()
        ckpt.wait()
        value.willing = False
        if logged:
            ckpt.after_step()
            ckpt.wait()
            assert ckpt.failures_in_a_row == 1
            assert "too large to copy" in caplog.text
        else:
            ckpt.step += 1
            with pytest.raises(SnapshotFailed, match="too large to copy"):
                ckpt.save(wait=True)
        value.willing = True
        ckpt.after_step()
    assert ckpt.last_saved_step == ckpt.step
