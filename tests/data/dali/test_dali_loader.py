"""`ResumableDALILoader`: every item once and the same pixels, whatever is cut or resized."""

import json
import logging

import numpy as np
import pytest
import torch
from dali_tools import (
    FILES,
    OUTPUTS,
    Job,
    augmented,
    build,
    build_with,
    loader_of,
    lost_and_repeated,
    samples_of,
    take,
    write_images,
)
from hypothesis import given
from hypothesis import strategies as st
from nvidia.dali import fn, pipeline_def
from property_examples import examples

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.data import DataStateError, ResumableDALILoader
from dcp_checkfreq.data.order.permutation import order


def position(loader):
    return loader.epoch, loader.samples


@pytest.fixture(scope="session")
def epochs(paths):
    """The samples of three uninterrupted epochs, on one rank with batches of 8."""
    loader = loader_of(paths, seed=3)
    return [take(loader) for _ in range(3)]


# --- exactly once, and the same pixels ---


def test_a_pipeline_reads_in_our_order_and_makes_each_sample_by_its_own_numbers(paths, epochs):
    for epoch, samples in enumerate(epochs):
        assert [sample[0] for sample in samples] == order(3, epoch, FILES).at(range(FILES))
    for name, part in (("images", 1), ("random numbers", 2)):
        first, second = ({sample[0]: sample[part] for sample in e} for e in epochs[:2])
        same = [index for index in range(FILES) if first[index] == second[index]]
        assert not same, f"{name} of {same} did not change from one epoch to the next"


@pytest.mark.parametrize("cut", [1, 5, 12, 13])
@pytest.mark.parametrize("dynamic", [False, True])
def test_after_a_cut_all_that_follows_is_as_if_nothing_had_been(paths, epochs, cut, dynamic):
    made = build_with(exec_dynamic=dynamic)
    first = loader_of(paths, seed=3, build=made)
    found = take(first, cut)
    second = loader_of(paths, seed=3, build=made)
    second.load_state_dict(first.state_dict())
    found += take(second) if cut < 13 else []
    assert found == epochs[0]
    assert take(second) == epochs[1]
    assert take(second) == epochs[2]


def test_on_other_ranks_batches_and_depths_every_pixel_is_the_same(paths, epochs):
    found, state = Job(1, paths, 8, seed=3).run()
    assert found == epochs[0]
    one, state = Job(2, paths, 8, state, seed=3).run(2)
    deep = build_with(prefetch_queue_depth=5, num_threads=2)
    two, state = Job(3, paths, 4, state, seed=3, build=deep).run(3)
    dynamic = build_with(exec_dynamic=True, prefetch_queue_depth=3)
    three, state = Job(1, paths, 32, state, seed=3, build=dynamic).run()
    assert lost_and_repeated(one + two + three) == ([], [])
    assert sorted(one + two + three) == sorted(epochs[1])
    assert json.loads(state["state"])["epoch"] == 2


no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    ("device_id", "decoder"), [(None, "cpu"), pytest.param(0, "mixed", marks=no_gpu)]
)
def test_order_and_random_numbers_are_the_same_on_other_ranks_on_any_device(
    paths, epochs, device_id, decoder
):
    @pipeline_def
    def images(source):
        path, label, u = source.inputs()
        image = fn.decoders.image(fn.io.file.read(path), device=decoder)
        return fn.resize(image, size=(12, 12)), label, u

    def made(source, most, **options):
        return images(source, batch_size=most, num_threads=1, device_id=device_id, **options)

    found, state = [], None
    for world, batch_size, steps in ((2, 8, 3), (3, 5, 2), (1, 16, None)):
        job = Job(world, paths, batch_size, state, seed=3, build=made, outputs=OUTPUTS[:3])
        samples, state = job.run(steps)
        found += samples
    assert sorted((s[0], s[2]) for s in found) == sorted((s[0], s[2]) for s in epochs[0])


LAUNCHES = st.lists(
    st.tuples(
        st.integers(1, 4),  # ranks
        st.integers(1, 20),  # batch size
        st.integers(1, 4),  # prefetch depth
        st.integers(0, 4),  # steps before it is cut
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@examples(30)
@given(launches=LAUNCHES)
def test_over_any_history_of_launches_each_sample_comes_once_as_it_should(paths, epochs, launches):
    found, state = {0: [], 1: [], 2: []}, None
    for ranks, batch_size, depth, steps in [*launches, (1, 50, 2, None)]:
        made = build_with(prefetch_queue_depth=depth)
        job = Job(ranks, paths, batch_size, state, seed=3, build=made)
        epoch = job.loaders[0].epoch
        if epoch > 2:
            break
        samples, state = job.run(steps)
        found[epoch] += samples
    done = json.loads(state["state"])["epoch"]
    for epoch in range(done):
        assert lost_and_repeated(found[epoch]) == ([], [])
        assert sorted(found[epoch]) == sorted(epochs[epoch])


def test_what_the_pipeline_fetched_ahead_is_not_counted(paths):
    loader = loader_of(paths, build=build_with(prefetch_queue_depth=6))
    found = take(loader, 3)
    assert loader.samples == 24
    again = loader_of(paths)
    again.load_state_dict(loader.state_dict())
    assert lost_and_repeated(found + take(again)) == ([], [])


def test_a_loop_that_is_left_and_begun_again_goes_on_with_the_same_pipeline(paths, epochs):
    made = []

    def counting(source, max_batch_size, **options):
        made.append(max_batch_size)
        return build(source, max_batch_size, **options)

    loader = loader_of(paths, seed=3, build=counting)
    found = take(loader, 2) + take(loader, 3) + take(loader)
    assert found + take(loader) == epochs[0] + epochs[1]
    assert made == [9]


@pytest.mark.parametrize(
    ("last", "sizes", "valid"),
    [
        ("partial", [8, 8, 8, 8, 2], [8, 8, 8, 8, 2]),
        ("drop", [8, 8, 8, 8], [8, 8, 8, 8]),
        ("pad", [8, 8, 8, 8, 8], [8, 8, 8, 8, 2]),
    ],
)
def test_the_last_batch_is_what_the_policy_says_and_says_what_is_real(paths, last, sizes, valid):
    loader = loader_of(paths, last=last, rank=1, world_size=3)
    for epoch in range(2):  # the pipeline runs on from one to the next
        assert len(loader) == len(sizes)
        seen = [(len(batch["image"]), loader.valid) for batch in loader]
        assert seen == list(zip(sizes, valid, strict=True))
        assert position(loader) == (epoch + 1, 0)


def test_a_tail_smaller_than_the_ranks_joins_the_batch_before(paths):
    loader = loader_of(paths, 17, rank=0, world_size=6)  # 103 = 6 x 17 + 1
    assert [len(batch["image"]) for batch in loader] == [18]


def test_with_carry_batches_run_on_into_the_next_epoch(paths):
    loader = loader_of(paths, 20, last="carry", seed=2)
    first, second = (order(2, epoch, FILES).at(range(FILES)) for epoch in (0, 1))
    assert [sample[0] for sample in take(loader)] == first + second[:17]
    assert position(loader) == (1, 17)
    again = loader_of(paths, 20, last="carry", seed=2)
    again.load_state_dict(loader.state_dict())
    assert take(again) == take(loader)


def test_more_ranks_than_samples_left_give_repeats_that_do_not_count(paths):
    _, state = Job(1, paths, 20).run(5)
    job = Job(4, paths, 2, state)
    last, state = job.run()
    assert sorted(s[0] for s in last) == sorted(order(0, 0, FILES).at(range(100, FILES)))
    assert [loader.valid for loader in job.loaders] == [1, 1, 1, 0]


def test_len_is_the_whole_epoch_and_steps_left_is_the_rest(paths):
    loader = loader_of(paths)
    assert len(loader) == 13
    take(loader, 4)
    assert (len(loader), loader.steps_left) == (13, 9)


def test_labels_come_with_their_files_in_their_dtype_and_shape(paths):
    wide = np.arange(2 * FILES, dtype=np.float32).reshape(FILES, 2)
    for labels, dtype, shape in (
        (None, torch.int64, (8,)),
        (list(range(FILES)), torch.int64, (8,)),
        (np.arange(FILES, dtype=np.int32), torch.int32, (8,)),
        (wide, torch.float32, (8, 2)),
    ):
        batch = next(iter(loader_of(paths, labels=labels)))
        assert (batch["label"].dtype, tuple(batch["label"].shape)) == (dtype, shape)
        rows = order(0, 0, FILES).at(range(8))
        wanted = rows if labels is None else np.asarray(labels)[rows]
        assert np.array_equal(batch["label"].numpy(), wanted)


# --- states ---


def edited(state, **fields):
    return {"state": json.dumps(json.loads(state["state"]) | fields)}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"length": 99}, "99, now it is 103"),
        ({"order": "sequential"}, "'sequential', now it is 'shuffled-1'"),
        ({"dataset": "v1"}, "'v1', now it is '"),
        ({"last": "drop"}, "'drop', now it is 'partial'"),
        ({"seed": 1}, "was 1, now it is 0"),
        ({"samples": -4}, "-4"),
        ({"samples": 103}, "103 samples of 103"),
        ({"samples": 8.0}, "8.0"),
        ({"samples": True}, "True"),
        ({"format": 9}, "format 9"),
    ],
)
def test_a_state_that_does_not_fit_leaves_the_loader_as_it_was(paths, fields, said):
    loader = loader_of(paths)
    iterator = iter(loader)
    found = samples_of(next(iterator)) + samples_of(next(iterator))
    state = loader.state_dict()
    with pytest.raises(DataStateError, match=said):
        loader.load_state_dict(edited(state, **fields))
    assert loader.state_dict() == state
    for batch in iterator:  # not even the iterator has noticed
        found += samples_of(batch)
    assert lost_and_repeated(found) == ([], [])


@pytest.mark.parametrize("state", [{}, {"samples": 3}, {"state": None}, {"state": "{"}, None, "x"])
def test_what_is_no_state_is_refused(paths, state):
    loader = loader_of(paths)
    with pytest.raises(DataStateError, match="ResumableDALILoader: the saved state"):
        loader.load_state_dict(state)
    assert position(loader) == (0, 0)


def test_a_list_of_files_in_another_order_is_other_data_and_a_moved_folder_is_not(paths, tmp_path):
    loader = loader_of(paths)
    take(loader, 1)
    with pytest.raises(DataStateError, match="dataset_id"):
        loader_of(paths[::-1]).load_state_dict(loader.state_dict())
    moved = [str(tmp_path / path.rpartition("/")[2]) for path in paths]
    loader_of(moved).load_state_dict(loader.state_dict())


def test_grown_data_is_fine_between_epochs_and_starts_the_epoch_anew_if_asked(paths, caplog):
    loader, grown = loader_of(paths[:40]), loader_of(paths)
    take(loader)
    grown.load_state_dict(loader.state_dict())
    assert "was 40, now it is 103" in caplog.text
    assert position(grown) == (1, 0)
    take(loader, 2)
    grown.load_state_dict(loader.state_dict(), on_mismatch="restart_epoch")
    assert position(grown) == (1, 0)
    assert "16 samples of it were consumed" in caplog.text
    assert len(take(grown)) == FILES


def test_another_number_of_samples_per_step_is_told(paths, caplog):
    caplog.set_level(logging.WARNING)
    loader_of(paths, 4).load_state_dict(loader_of(paths, 8).state_dict())
    assert "a step took 8 samples, now it takes 4" in caplog.text


def test_an_iterator_from_before_a_load_is_stale(paths, epochs):
    loader = loader_of(paths, seed=3)
    iterator = iter(loader)
    found = samples_of(next(iterator))
    loader.load_state_dict(loader.state_dict())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stale"):
            next(iterator)
    assert found + take(loader) == epochs[0]


def test_of_two_iterators_the_older_is_stale(paths):
    loader = loader_of(paths)
    older = iter(loader)
    found = samples_of(next(older)) + take(loader)
    with pytest.raises(RuntimeError, match="stale"):
        next(older)
    assert lost_and_repeated(found) == ([], [])


def test_an_iterator_that_is_done_stays_done(paths):
    loader = loader_of(paths)
    iterator = iter(loader)
    assert len(list(iterator)) == 13
    take(loader, 2)
    assert list(iterator) == []


def test_the_position_saved_with_a_step_is_the_one_after_it(paths, epochs, tmp_path):
    loader = loader_of(paths, seed=3)
    with Checkpointer(tmp_path, {"data": loader}, every=3, keep_last=100) as ckpt:
        ckpt.restore()
        for _ in loader:
            ckpt.after_step()
    for step in (3, 6, 9, 12):
        again = loader_of(paths, 5, seed=3)
        with Checkpointer(tmp_path, {"data": again}, every=1000) as ckpt:
            ckpt.restore(step)
        assert again.samples == 8 * step
        assert take(again) == epochs[0][8 * step :]


def test_the_random_state_of_the_training_is_not_touched(paths):
    torch.manual_seed(1), np.random.seed(1)
    wanted = torch.rand(3).tolist(), np.random.rand(3).tolist()
    torch.manual_seed(1), np.random.seed(1)
    take(loader_of(paths))
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist()) == wanted


# --- failures ---


def test_a_file_that_cannot_be_read_is_not_counted_and_comes_again(tmp_path):
    files = write_images(tmp_path / "files", 40)
    victim = tmp_path / "files" / files[order(0, 0, 40)(21)].rpartition("/")[2]
    content = victim.read_bytes()
    victim.unlink()
    loader, found = loader_of(files, 4), []
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match=victim.name):
        found.extend(sample for batch in iterator for sample in samples_of(batch))
    with pytest.raises(RuntimeError, match="stale"):
        next(iterator)
    assert loader.samples == len(found) < 40
    victim.write_bytes(content)
    assert lost_and_repeated(found + take(loader), 40) == ([], [])


def build_losing(source, max_batch_size, **options):
    """A pipeline whose batches are not those that it was given."""

    @pipeline_def(batch_size=max_batch_size, num_threads=1, device_id=None, **options)
    def losing():
        _, label, _ = fn.external_source(
            source=lambda info: tuple(part[:2] for part in source(info)),
            num_outputs=3,
            batch=True,
            batch_info=True,
        )
        return label

    return losing()


def test_a_pipeline_that_loses_samples_is_noticed(paths):
    loader = loader_of(paths, build=build_losing, outputs=["label"])
    with pytest.raises(RuntimeError, match="'label' has 2 samples, the pipeline was given 8"):
        next(iter(loader))
    assert position(loader) == (0, 0)


def build_native(source, max_batch_size, **options):
    files = source._paths

    @pipeline_def(batch_size=max_batch_size, num_threads=1, device_id=None, **options)
    def native():
        file, label = fn.readers.file(files=files, name="Reader")
        return fn.resize(fn.decoders.image(file), size=(8, 8)), label

    return native()


def test_a_pipeline_that_reads_in_an_order_of_its_own_is_refused(paths):
    loader = loader_of(paths, build=build_native, outputs=["image", "label"])
    with pytest.raises(ValueError, match=r"readers of its own \(Reader\)"):
        iter(loader)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": None}, ValueError, "batch_size"),
        ({"seed": -1}, ValueError, "seed"),
        ({"last": "keep"}, ValueError, "last"),
        ({"nrand": 0}, ValueError, "nrand"),
        ({"rank": 0}, ValueError, "both"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank"),
        ({"on_mismatch": "yes"}, ValueError, "on_mismatch"),
        ({"paths": []}, ValueError, "length"),
        ({"paths": "file.png"}, TypeError, "list of paths"),
        ({"labels": [1, 2]}, ValueError, "103 paths"),
        ({"labels": ["cat"] * FILES}, TypeError, "numbers"),
    ],
)
def test_what_would_break_the_promise_is_refused_at_construction(paths, options, error, said):
    arguments = {"paths": paths, "labels": None, "batch_size": 8} | options
    with pytest.raises(error, match=said):
        ResumableDALILoader(build, OUTPUTS, **arguments)


def test_the_pipeline_gets_one_more_than_the_batch_size_only_where_a_tail_may_join(paths):
    seen = {}
    for last in ("partial", "carry", "drop", "pad"):

        def noting(source, max_batch_size, last=last, **options):
            seen[last] = (max_batch_size, options)
            return augmented(
                source, batch_size=max_batch_size, num_threads=1, device_id=None, **options
            )

        take(loader_of(paths, build=noting, last=last), 1)
    assert seen == {"partial": (9, {}), "carry": (8, {}), "drop": (8, {}), "pad": (8, {})}


def test_batches_are_tensors_by_the_names_of_the_output_map(paths):
    batch = next(iter(loader_of(paths)))
    assert list(batch) == OUTPUTS
    assert batch["image"].dtype == torch.uint8
    assert tuple(batch["image"].shape) == (8, 12, 12, 3)
