"""Copies beside the training: what they hold, what tears them, and when memory is given back."""

import threading

import pytest
import torch

from dcp_checkfreq import SnapshotFailed
from dcp_checkfreq.snapshot.inventory import Survey
from dcp_checkfreq.snapshot.pool import BufferPool
from dcp_checkfreq.snapshot.stager import OVERLAP_FROM_BYTES, Stager


@pytest.fixture
def pool():
    return BufferPool(wait_s=5.0)


@pytest.fixture
def stager(pool):
    return Stager(pool, overlap_from_bytes=0)


def all_of(state):
    return {piece.address for piece in Survey(state).inventory.pieces}


def make_state():
    return {"a": torch.arange(5000.0), "deep": {"b": [torch.ones(3, 4), "text", {"n": [1]}]}}


def test_guarded_tensors_are_copied_after_begin_returns_and_hold_what_they_held_then(held, stager):
    state = make_state()
    held.hold()
    snapshot = stager.begin(stager.survey(state), guarded=all_of(state))
    assert held.begun.wait(10)
    assert not snapshot.is_done
    held.release()
    snapshot.before_update()
    assert snapshot.is_done
    state["a"].zero_()
    state["deep"]["b"][0].zero_()
    snapshot.wait()
    assert torch.equal(snapshot.state["a"], torch.arange(5000.0))
    assert torch.equal(snapshot.state["deep"]["b"][0], torch.ones(3, 4))
    assert snapshot.copied_bytes == snapshot.state_bytes == 4 * 5012


def test_all_else_is_copied_before_begin_returns(held, stager):
    state = make_state()
    held.hold()
    snapshot = stager.begin(stager.survey(state), guarded=all_of({"a": state["a"]}))
    state["deep"]["b"][0].zero_()
    state["deep"]["b"][2]["n"].append(2)
    state["deep"]["b"].append("more")
    state["new"] = 1
    held.release()
    snapshot.wait()
    (ones, text, tree) = snapshot.state["deep"]["b"]
    assert torch.equal(ones, torch.ones(3, 4))
    assert (text, tree) == ("text", {"n": [1]})
    assert snapshot.state.keys() == {"a", "deep"}


@pytest.mark.parametrize("size_bytes", [OVERLAP_FROM_BYTES - 4, OVERLAP_FROM_BYTES])
def test_little_is_copied_at_once(held, pool, size_bytes):
    state = {"w": torch.zeros(size_bytes // 4), "large": torch.ones(2 * OVERLAP_FROM_BYTES)}
    held.hold()
    stager = Stager(pool)
    snapshot = stager.begin(stager.survey(state), guarded=all_of({"w": state["w"]}))
    assert snapshot.is_done == (size_bytes < OVERLAP_FROM_BYTES)
    held.release()
    snapshot.wait()


CHANGES = {
    "in place": lambda t: t.add_(1),
    "through a view": lambda t: t.view(-1)[3:4].zero_(),
    "through an alias": lambda t: t.detach().zero_(),
    "copy_": lambda t: t.copy_(torch.ones_like(t)),
    "foreach": lambda t: torch._foreach_add_([t], 1.0),
    "out": lambda t: torch.add(t, 1, out=t),
    "index": lambda t: t.__setitem__(0, 7.0),
    "resize": lambda t: t.resize_(2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_before_the_update_is_noticed_on_both_sides_and_stays_noticed(
    held, stager, change
):
    state = make_state()
    held.hold()
    snapshot = stager.begin(stager.survey(state), guarded=all_of(state))
    held.begun.wait(10)
    change(state["a"])
    held.release()
    for look in (snapshot.wait, snapshot.before_update, snapshot.wait):
        with pytest.raises(SnapshotFailed, match="'a' was changed"):
            look()


def test_a_change_after_the_copy_but_before_the_update_is_no_harm_or_is_noticed(held, stager):
    state = make_state()
    snapshot = stager.begin(stager.survey(state), guarded=all_of(state))
    snapshot.wait()
    state["a"].zero_()
    try:
        snapshot.wait()
    except SnapshotFailed:
        return
    assert torch.equal(snapshot.state["a"], torch.arange(5000.0))


def test_replaced_tensors_leave_the_copy_as_it_was(held, stager):
    state = make_state()
    held.hold()
    snapshot = stager.begin(stager.survey(state), guarded=all_of(state))
    state["a"].data = torch.zeros(3)
    state["deep"]["b"][0] = torch.zeros(3)
    del state["deep"]
    held.release()
    snapshot.before_update()
    assert torch.equal(snapshot.state["a"], torch.arange(5000.0))
    assert torch.equal(snapshot.state["deep"]["b"][0], torch.ones(3, 4))


@pytest.mark.parametrize("error", [MemoryError("room"), RuntimeError("x"), OSError(28, "full")])
def test_a_copy_that_fails_is_told_to_whoever_waits_and_the_next_one_works(held, stager, error):
    state = make_state()
    held.hold()
    held.error = error
    snapshot = stager.begin(stager.survey(state), guarded=all_of(state))
    held.release()
    for look in (snapshot.before_update, snapshot.wait):
        with pytest.raises(SnapshotFailed, match="copying failed"):
            look()
    stager.release()
    snapshot = stager.begin(stager.survey(state), guarded=all_of(state))
    snapshot.wait()
    assert torch.equal(snapshot.state["a"], state["a"])


# --- memory ---


def test_memory_is_not_given_back_while_a_copy_writes_into_it(held, pool, stager):
    state = make_state()
    held.hold()
    snapshot = stager.begin(stager.survey(state), guarded=all_of(state))
    held.begun.wait(10)
    releasing = threading.Thread(target=stager.release)
    releasing.start()
    pool._wait_s = 0.1
    with pytest.raises(SnapshotFailed, match="still being written"):
        pool.lease(10)
    assert releasing.is_alive()
    held.release()
    releasing.join(10)
    pool.lease(10).release()
    assert snapshot.is_done


def test_a_second_snapshot_waits_until_the_first_is_released(held, pool, stager):
    first = make_state()
    snapshot = stager.begin(stager.survey(first), guarded=all_of(first))
    done = []

    def second():
        other = {"a": torch.zeros(5000), "deep": {"b": [torch.zeros(3, 4)]}}
        another = Stager(pool, overlap_from_bytes=0)
        another.begin(another.survey(other), guarded=all_of(other)).wait()
        done.append(True)

    waiting = threading.Thread(target=second)
    waiting.start()
    waiting.join(0.2)
    assert not done
    snapshot.wait()
    assert torch.equal(snapshot.state["a"], torch.arange(5000.0))
    stager.release()
    waiting.join(10)
    assert done


def test_a_snapshot_that_nobody_holds_gives_its_memory_back(held, pool):
    import gc

    state = make_state()
    stager = Stager(pool, overlap_from_bytes=0)
    snapshot = stager.begin(stager.survey(state), guarded=all_of(state))
    snapshot.wait()
    del snapshot, stager
    gc.collect()
    pool.lease(10).release()


def test_an_error_while_copying_the_rest_gives_the_memory_back(held, pool, stager):
    class Stubborn:
        def __deepcopy__(self, memo):
            raise MemoryError("mine")

    state = make_state() | {"x": Stubborn()}
    with pytest.raises(SnapshotFailed, match="mine"):
        stager.begin(stager.survey(state), guarded=all_of({"a": state["a"]}))
    pool.lease(10).release()


# --- parts ---


def test_only_what_is_asked_for_is_copied_and_the_rest_is_meta_of_the_same_kind(held, stager):
    state = make_state()
    snapshot = stager.begin(
        stager.survey(state), only=frozenset({"deep.b.0"}), guarded=all_of(state)
    )
    snapshot.wait()
    assert (snapshot.copied_bytes, snapshot.state_bytes) == (48, 4 * 5012)
    absent = snapshot.state["a"]
    assert absent.is_meta
    assert (absent.shape, absent.dtype) == (state["a"].shape, state["a"].dtype)
    assert torch.equal(snapshot.state["deep"]["b"][0], torch.ones(3, 4))


def test_a_tied_tensor_is_copied_if_any_of_its_names_is_written(stager):
    shared = torch.arange(20.0)
    state = {"a": shared, "b": shared.detach(), "c": {"d": shared.view(4, 5)}}
    snapshot = stager.begin(stager.survey(state), only=frozenset({"c.d"}))
    snapshot.wait()
    assert snapshot.copied_bytes == 80
    assert torch.equal(snapshot.state["c"]["d"], shared.view(4, 5))


def test_nothing_to_write_copies_nothing(stager):
    state = make_state()
    snapshot = stager.begin(stager.survey(state), only=frozenset(), guarded=all_of(state))
    snapshot.wait()
    assert snapshot.copied_bytes == 0


@pytest.mark.parametrize("odd", ["transposed", "channels last", "strided", "conjugated"])
def test_guarded_tensors_of_every_layout_are_copied_late_and_right(late, stager, odd):
    source = {
        "transposed": lambda: torch.randn(50, 70).t(),
        "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "strided": lambda: torch.randn(100)[::3],
        "conjugated": lambda: torch.randn(30, dtype=torch.complex64).conj(),
    }[odd]()
    wanted = source.clone()
    state = {"t": source}
    late.hold()
    snapshot = stager.begin(stager.survey(state), guarded=all_of(state))
    assert not snapshot.is_done
    snapshot.before_update()
    source.zero_()
    snapshot.wait()
    assert torch.equal(snapshot.state["t"], wanted)


# --- limits: what shows in no version ---


def test_limit_a_change_of_a_few_elements_through_data_is_not_noticed(held, stager):
    state = make_state()
    held.hold()
    snapshot = stager.begin(stager.survey(state), guarded=all_of(state))
    held.begun.wait(10)
    state["a"].data[1000:1003].zero_()  # between the samples
    held.release()
    snapshot.before_update()
    assert not torch.equal(snapshot.state["a"], torch.arange(5000.0))
