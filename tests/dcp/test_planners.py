"""`CheckFreqWriter` under DCP's planners and options, with plain `dcp.save` and `dcp.load`."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from behaviour_tools import blank, fails_with, files_in, load, same, save, some_state
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dcp_checkfreq import (
    CheckFreqLoadPlanner,
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
    CheckpointExists,
    ItemsMissing,
    StateMismatch,
    UnsupportedOption,
    UnsupportedState,
    find_latest_valid,
)

MODES = {
    "save": lambda state, **options: dcp.save(state, **options),
    "async_save": lambda state, **options: dcp.async_save(state, **options).result(),
}
both_modes = pytest.mark.parametrize("run", MODES.values(), ids=MODES.keys())
planners = pytest.mark.parametrize(
    "make_planner",
    [
        lambda: None,
        DefaultSavePlanner,
        lambda: DefaultSavePlanner(flatten_sharded_tensors=False),
        lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        lambda: DefaultSavePlanner(enable_plan_caching=True),
        CheckFreqSavePlanner,
    ],
    ids=["none", "default", "no flatten", "lowest rank", "stock cache", "ours"],
)


@both_modes
@planners
def test_every_planner_saves_what_every_planner_loads(tmp_path, run, make_planner):
    run(some_state(), storage_writer=CheckFreqWriter(tmp_path), planner=make_planner())
    for load_planner in (None, DefaultLoadPlanner(), CheckFreqLoadPlanner()):
        assert same(load(some_state(), tmp_path, planner=load_planner), some_state())


@both_modes
@planners
def test_a_kept_planner_saves_into_one_folder_after_another(tmp_path, run, make_planner):
    planner = make_planner()
    for step in range(1, 5):
        run(
            some_state(float(step)),
            storage_writer=CheckFreqWriter(tmp_path / f"step_{step}"),
            planner=planner,
        )
    for step in range(1, 5):
        found = load(some_state(), tmp_path / f"step_{step}")
        assert same(found, some_state(float(step))), step
    assert find_latest_valid(tmp_path, depth="digest").step == 4


@planners
def test_a_kept_planner_saves_into_folders_of_a_reused_writer(tmp_path, make_planner):
    planner, writer = make_planner(), CheckFreqWriter(tmp_path)
    for step in range(1, 4):
        dcp.save(
            some_state(float(step)),
            storage_writer=writer,
            planner=planner,
            checkpoint_id=tmp_path / f"step_{step}",
        )
    for step in range(1, 4):
        assert same(load(some_state(), tmp_path / f"step_{step}"), some_state(float(step)))


class CountsPlans(CheckFreqSavePlanner):
    """Counts how often DCP's own planning runs below the cache."""

    def __init__(self):
        super().__init__()
        self.made = 0

    def finish_plan(self, new_plan):
        self.made += bool(new_plan.items)
        return super().finish_plan(new_plan)


def test_plans_are_made_once_while_the_structure_is_unchanged(tmp_path):
    planner = CountsPlans()
    for step in range(1, 6):
        save(some_state(float(step)), tmp_path / f"step_{step}", planner=planner)
    assert planner.made == 1
    assert same(load(some_state(), tmp_path / "step_5"), some_state(5.0))


@pytest.mark.parametrize(
    "change",
    [
        {"weight": torch.ones(41, 3)},
        {"weight": torch.ones(40, 3, dtype=torch.float64)},
        {"weight": "text now"},
        {"note": torch.ones(2)},
        {"more": torch.ones(5)},
        {"nested": {"lr": 1.0}},
    ],
    ids=["shape", "dtype", "tensor to value", "value to tensor", "new key", "key gone"],
)
def test_a_changed_structure_is_planned_anew(tmp_path, change):
    planner = CountsPlans()
    save(some_state(), tmp_path / "1", planner=planner)
    changed = {**some_state(2.0), **change}
    save(changed, tmp_path / "2", planner=planner)
    save(some_state(3.0), tmp_path / "3", planner=planner)
    assert planner.made == 3
    assert same(load(changed, tmp_path / "2"), changed)
    assert same(load(some_state(), tmp_path / "3"), some_state(3.0))


@pytest.mark.parametrize("other", [{"a.b": torch.ones(3)}, {"a": [0, torch.ones(3)]}])
def test_a_kept_plan_does_not_fit_where_a_key_means_another_place(tmp_path, other):
    """Keys of tensors are the same, but what a stock tool makes of the checkpoint is not."""
    planner = CountsPlans()
    base = {"a": {"b": torch.ones(3)}} if "a.b" in other else {"a": {"0": 0, "1": torch.ones(3)}}
    for step, state in enumerate([base, other, base], start=1):
        save(state, tmp_path / f"{step}", planner=planner)
        dcp_to_torch_save(tmp_path / f"{step}", tmp_path / f"{step}.pt")
        assert same(torch.load(tmp_path / f"{step}.pt"), state)
    assert planner.made == 3


def test_a_planner_that_saw_a_failed_save_plans_anew_and_goes_on(tmp_path):
    planner = CheckFreqSavePlanner()
    save(some_state(1.0), tmp_path / "1", planner=planner)
    save(some_state(2.0), tmp_path / "2", planner=planner)
    with fails_with(CheckpointExists):
        save(some_state(3.0), tmp_path / "2", planner=planner)
    for step in (3, 4):
        save(some_state(float(step)), tmp_path / f"{step}", planner=planner)
        assert same(load(some_state(), tmp_path / f"{step}"), some_state(float(step)))


class SavesAsHalf(DefaultSavePlanner):
    """Casts at the last moment, when the plan has long named another dtype."""

    def resolve_data(self, write_item):
        data = super().resolve_data(write_item)
        return data.half() if isinstance(data, torch.Tensor) else data


class SavesTransposed(DefaultSavePlanner):
    """Hands out memory that is not in C order."""

    def transform_object(self, write_item, object):
        object = super().transform_object(write_item, object)
        return object.t().contiguous().t() if isinstance(object, torch.Tensor) else object


def test_a_planner_may_cast_when_it_hands_out_the_data(tmp_path):
    state = {"w": torch.linspace(0, 1, 600).reshape(20, 30), "note": "x"}
    save(state, tmp_path, planner=SavesAsHalf())
    ours, stock = blank(state), blank(state)
    dcp.load(ours, storage_reader=CheckFreqReader(tmp_path))
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path))
    assert torch.equal(ours["w"], state["w"].half().float())
    assert torch.equal(stock["w"], ours["w"])


def test_a_planner_may_hand_out_memory_in_any_order(tmp_path):
    state = {"w": torch.arange(600.0).reshape(20, 30)}
    save(state, tmp_path, planner=SavesTransposed())
    assert same(load(state, tmp_path), state)


class LosesAnItem(DefaultSavePlanner):
    """Plans an item for all and then leaves it out: what a lost worker error looks like."""

    def finish_plan(self, new_plan):
        import dataclasses

        return dataclasses.replace(new_plan, items=new_plan.items[1:])


def test_a_planned_item_that_was_not_written_is_named_and_nothing_is_published(tmp_path):
    with fails_with(ItemsMissing, "weight"):
        save(some_state(), tmp_path, planner=LosesAnItem())
    assert not files_in(tmp_path)


@both_modes
def test_use_collectives_false_is_refused_and_nothing_is_written(tmp_path, run):
    with fails_with(UnsupportedOption, "use_collectives=False"):
        run(some_state(), storage_writer=CheckFreqWriter(tmp_path / "a"), use_collectives=False)
    assert not files_in(tmp_path)
    assert not (tmp_path / "a").exists()


@both_modes
def test_no_dist_saves_and_loads(tmp_path, run):
    run(some_state(), storage_writer=CheckFreqWriter(tmp_path), no_dist=True)
    target = blank(some_state())
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path), no_dist=True)
    assert same(target, some_state())


def test_async_save_returns_a_plain_future_of_the_metadata(tmp_path):
    from concurrent.futures import Future

    future = dcp.async_save(some_state(), storage_writer=CheckFreqWriter(tmp_path))
    assert type(future) is Future
    assert "weight" in future.result().state_dict_metadata


# --- write once, unless asked ---


@both_modes
def test_a_whole_checkpoint_is_not_overwritten(tmp_path, run):
    save(some_state(1.0), tmp_path)
    before = files_in(tmp_path)
    with fails_with(CheckpointExists, "overwrite=True"):
        run(some_state(2.0), storage_writer=CheckFreqWriter(tmp_path))
    assert files_in(tmp_path) == before
    assert same(load(some_state(), tmp_path), some_state(1.0))


@both_modes
def test_a_stock_checkpoint_is_not_overwritten(tmp_path, run):
    dcp.save(some_state(1.0), storage_writer=dcp.FileSystemWriter(tmp_path))
    with fails_with(CheckpointExists):
        run(some_state(2.0), storage_writer=CheckFreqWriter(tmp_path))
    assert same(load(some_state(), tmp_path), some_state(1.0))


@both_modes
@pytest.mark.parametrize("by", ["ours", "stock"])
def test_overwrite_replaces_the_checkpoint_and_removes_its_files(tmp_path, run, by):
    first = CheckFreqWriter if by == "ours" else dcp.FileSystemWriter
    dcp.save(some_state(1.0), storage_writer=first(tmp_path))
    old = {name for name in files_in(tmp_path) if name.endswith(".distcp")}
    run(some_state(2.0), storage_writer=CheckFreqWriter(tmp_path, overwrite=True))
    assert same(load(some_state(), tmp_path), some_state(2.0))
    left = set(files_in(tmp_path))
    assert not left & old
    assert len(left) == 2


def test_one_writer_may_overwrite_its_own_checkpoint_again_and_again(tmp_path):
    writer = CheckFreqWriter(tmp_path, overwrite=True)
    for value in (1.0, 2.0, 3.0):
        dcp.save(some_state(value), storage_writer=writer)
        assert same(load(some_state(), tmp_path), some_state(value))
        assert len(files_in(tmp_path)) == 2


def test_overwrite_into_an_empty_folder_is_an_ordinary_save(tmp_path):
    save(some_state(), tmp_path, overwrite=True)
    assert same(load(some_state(), tmp_path), some_state())


# --- state that cannot come back is refused at save ---


@both_modes
@pytest.mark.parametrize("planner", [None, CheckFreqLoadPlanner()], ids=["default", "ours"])
def test_an_empty_state_and_a_state_of_empty_tensors_round_trip(tmp_path, run, planner):
    run({}, storage_writer=CheckFreqWriter(tmp_path / "none"))
    dcp.load({}, storage_reader=CheckFreqReader(tmp_path / "none"), planner=planner)
    state = {"e": torch.zeros(0), "f": torch.zeros(3, 0, 2, dtype=torch.int64)}
    run(state, storage_writer=CheckFreqWriter(tmp_path / "empty"))
    assert same(load(state, tmp_path / "empty", planner=planner), state)


@both_modes
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo tensor"),
        (lambda: torch.empty(3, device="meta"), "meta tensor"),
        (lambda: torch._empty_affine_quantized([3], scale=0.1, dtype=torch.qint8), "quantized"),
    ],
    ids=["sparse", "meta", "quantized"],
)
@pytest.mark.filterwarnings("ignore:.*quantiz.*:UserWarning")
def test_tensors_that_have_no_plain_bytes_are_refused_by_key(tmp_path, run, make, kind):
    state = {"fine": torch.ones(3), "layer": {"odd": make()}}
    with fails_with(UnsupportedState, f"'layer.odd' is a {kind}"):
        run(state, storage_writer=CheckFreqWriter(tmp_path))
    assert not files_in(tmp_path)


@pytest.mark.parametrize(
    "state",
    [{0: torch.ones(1), "0": torch.zeros(1)}, {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}],
    ids=["0 and '0'", "a.b and a->b"],
)
@pytest.mark.parametrize("planner", [None, CheckFreqSavePlanner()], ids=["default", "ours"])
def test_keys_that_collide_are_rejected_at_save(tmp_path, state, planner):
    with pytest.raises(BaseException, match="duplicat"):
        save({"part": state}, tmp_path, planner=planner)
    assert not files_in(tmp_path)


def test_a_key_that_the_checkpoint_lacks_is_named(tmp_path):
    save({"w": torch.ones(2)}, tmp_path)
    with fails_with(StateMismatch, "brand_new"):
        load({"w": torch.ones(2), "brand_new": torch.ones(2)}, tmp_path,
             planner=CheckFreqLoadPlanner())  # fmt: skip


def test_keys_may_be_missing_when_a_partial_load_is_asked_for(tmp_path):
    save({"w": torch.ones(2)}, tmp_path)
    target = {"w": torch.zeros(2), "brand_new": torch.full((2,), 7.0)}
    dcp.load(
        target,
        storage_reader=CheckFreqReader(tmp_path),
        planner=CheckFreqLoadPlanner(allow_partial_load=True),
    )
    assert target["w"].tolist() == [1, 1]
    assert target["brand_new"].tolist() == [7, 7]


@pytest.mark.parametrize("planner", [None, CheckFreqLoadPlanner()], ids=["default", "ours"])
def test_another_shape_is_an_error_that_names_the_key_and_touches_nothing(tmp_path, planner):
    save({"a": torch.ones(2), "w": torch.ones(3)}, tmp_path)
    target = {"a": torch.zeros(2), "w": torch.zeros(4)}
    with pytest.raises(BaseException, match="w"):
        dcp.load(target, storage_reader=CheckFreqReader(tmp_path), planner=planner)
    assert not target["a"].any()


# --- case 29: another dtype ---


@pytest.mark.parametrize("planner", [None, CheckFreqLoadPlanner()], ids=["default", "ours"])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.int64, torch.float64])
def test_another_dtype_is_an_error_that_names_both_and_touches_nothing(tmp_path, planner, wanted):
    from dcp_checkfreq import DtypeDiffers

    save({"a": torch.ones(2), "w": torch.tensor([1.2345678, 3.9])}, tmp_path)
    target = {"a": torch.zeros(2), "w": torch.zeros(2, dtype=wanted)}
    with fails_with(DtypeDiffers, f"w: saved torch.float32, wanted {wanted}"):
        dcp.load(target, storage_reader=CheckFreqReader(tmp_path), planner=planner)
    assert not target["a"].any()
    assert not target["w"].any()


def test_a_cast_must_be_asked_for(tmp_path):
    save({"w": torch.tensor([1.2345678, 3.9])}, tmp_path)
    target = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path, allow_dtype_cast=True))
    assert torch.equal(target["w"], torch.tensor([1.2345678, 3.9]).bfloat16())


def test_another_dtype_in_a_stock_checkpoint_is_an_error_too(tmp_path):
    from dcp_checkfreq import DtypeDiffers

    dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    with fails_with(DtypeDiffers, "w"):
        dcp.load({"w": torch.zeros(2).half()}, storage_reader=CheckFreqReader(tmp_path))
