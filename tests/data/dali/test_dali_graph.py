"""Every source of a DALI graph is accounted for: in step, exact, or refused with its name."""

import logging

import numpy as np
import pytest
from dali_tools import OUTPUTS, build, loader_of, take
from nvidia.dali import fn, pipeline_def

from dcp_checkfreq.data import ResumableDALILoader, ResumableDALIReader
from dcp_checkfreq.data.dali.graph import operators_of

IN_STEP = {"pad_last_batch": True, "random_shuffle": True, "initial_fill": 16, "seed": 5}


def reader_of(paths, second=None, *, first=None, seed=None, more=None, rank=0, world=1, **options):
    """A reader "Images" of 60 files, and maybe one "Masks", and what ``more`` makes."""
    named = IN_STEP | {"shard_id": rank, "num_shards": world} | (first or {})

    def make(**given):
        @pipeline_def(batch_size=8, num_threads=1, device_id=None, seed=seed, **given)
        def graph():
            file, label = fn.readers.file(files=paths[:60], name="Images", **named)
            other = label
            if second is not None:
                settings = (
                    IN_STEP | {"shard_id": rank, "num_shards": world, "name": "Masks"} | second
                )
                settings = {key: value for key, value in settings.items() if value != "none"}
                files = paths[: settings.pop("count", 60)]
                _, other = fn.readers.file(files=files, **settings)
            image = fn.resize(fn.decoders.image(file, device="cpu"), size=(4, 4))
            return image, label, other, label if more is None else more(label)

        return graph()

    return ResumableDALIReader(
        make, ["image", "label", "other", "more"], "Images", rank=rank, world_size=world, **options
    )


def pairs_of(reader, batches=None):
    found = []
    for number, batch in enumerate(reader, start=1):
        labels, others = (batch[key].flatten().tolist() for key in ("label", "other"))
        found += zip(labels, others, map(float, batch["more"].flatten()), strict=True)
        if number == batches:
            break
    return found


def went_on(make, batches=3):
    """What one reader gives, and what it gives with a restart in the second epoch."""
    whole = make()
    wanted = [pairs_of(whole) for _ in range(3)]
    first = make()
    found = [pairs_of(first), pairs_of(first, batches)]
    second = make()
    second.load_state_dict(first.state_dict())
    found[1] += pairs_of(second)
    return wanted, [*found, pairs_of(second)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"random_shuffle": False, "seed": "x"}, {"random_shuffle": False, "seed": "x"}),
        (
            {"random_shuffle": False, "shuffle_after_epoch": True},
            {"random_shuffle": False, "shuffle_after_epoch": True, "seed": 9},
        ),
    ],
)
def test_readers_of_one_order_stay_in_step_through_a_restart(paths, first, second):
    first, second = ({k: v for k, v in s.items() if v != "x"} for s in (first, second))
    wanted, found = went_on(lambda: reader_of(paths, second, first=first))
    assert found == wanted
    assert all(label == other for epoch in found for label, other, _ in epoch)
    assert [sorted(label for label, *_ in epoch) for epoch in found] == [list(range(60))] * 3


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"pad_last_batch": False}, "reader 'Masks' loses and repeats items"),
        ({"pad_last_batch": False, "name": "none"}, "reader '__File_.*' loses and repeats items"),
        ({"num_shards": 2}, "reader 'Masks' reads shard 0 of 2, this is rank 0 of 1"),
        ({"count": 59}, "reader 'Masks' has 59 items, 'Images' has 60"),
        ({"seed": 6}, "reader 'Masks' has seed=6, 'Images' has seed=5"),
        ({"seed": "none"}, "reader 'Masks' has seed=None"),
        ({"seed": -1}, "reader 'Masks' has seed=-1"),
        ({"random_shuffle": False}, "reader 'Masks' has random_shuffle=False"),
        ({"initial_fill": 32}, "reader 'Masks' has initial_fill=32, 'Images' has initial_fill=16"),
        (
            {"random_shuffle": False, "shuffle_after_epoch": True},
            "has random_shuffle=False, 'Images' has random_shuffle=True",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The use of negative seed")
def test_a_second_reader_that_would_drift_apart_is_refused_by_name(paths, second, said):
    with pytest.raises(ValueError, match=said):
        reader_of(paths, second)


def test_readers_that_are_both_shuffled_without_a_seed_are_not_in_step(paths):
    first = {key: value for key, value in IN_STEP.items() if key != "seed"}

    def make(**given):
        @pipeline_def(batch_size=8, num_threads=1, device_id=None, seed=3, **given)
        def graph():
            _, one = fn.readers.file(files=paths, name="A", **first)
            _, two = fn.readers.file(files=paths, name="B", **first)
            return one, two

        return graph()

    with pytest.raises(ValueError, match="'B' has seed=None, 'A' has seed=None"):
        ResumableDALIReader(make, ["one", "two"], "A")


@pytest.mark.parametrize("second", [{"count": 23}, {"seed": 6}, {"random_shuffle": False}])
def test_readers_of_other_data_are_exact_if_it_is_said(paths, second):
    wanted, found = went_on(lambda: reader_of(paths, second, independent=["Masks"]))
    assert found == wanted
    with pytest.raises(ValueError, match="loses and repeats"):
        reader_of(paths, second | {"pad_last_batch": False}, independent=["Masks"])


@pytest.mark.parametrize("name", ["Mask", "Images"])
def test_a_name_of_no_other_reader_is_refused(paths, name):
    with pytest.raises(ValueError, match="no other sources"):
        reader_of(paths, {}, independent=[name])


@pytest.mark.filterwarnings("ignore:Checkpointing enabled in a pipeline with external source")
@pytest.mark.parametrize("named", [{"name": "Weights"}, {}])
def test_an_external_source_beside_a_reader_is_refused_by_name(paths, named):
    def weights(_):
        return fn.external_source(source=lambda: np.zeros((8, 1)), **named)

    said = r"external_source '(Weights|__ExternalSource_\d+)' next to the reader"
    with pytest.raises(ValueError, match=said):
        reader_of(paths, more=weights)


def by_sample(_):
    return fn.external_source(
        source=lambda info: np.array([info.idx_in_epoch]), batch=False, name="Extra"
    )


def by_batch(_):
    return fn.external_source(
        source=lambda info: np.full((8, 1), info.iteration), batch_info=True, name="Extra"
    )


@pytest.mark.parametrize("extra", [by_sample, by_batch])
def test_an_external_source_that_is_a_function_of_its_number_is_exact_if_it_is_said(paths, extra):
    with pytest.raises(ValueError, match=r"'Extra' next to the reader .*independent=\['Extra'\]"):
        reader_of(paths, more=extra)
    wanted, found = went_on(lambda: reader_of(paths, more=extra, independent=["Extra"]))
    assert found == wanted


@pytest.mark.filterwarnings("ignore:Checkpointing enabled in a pipeline with external source")
def test_one_that_is_no_such_function_is_refused_whatever_is_said(paths):
    def counted(_):
        return fn.external_source(source=lambda: np.zeros((8, 1)), name="Extra")

    with pytest.raises(ValueError, match=r"'Extra' next to the reader .* are in step$"):
        reader_of(paths, more=counted, independent=["Extra"])


@pytest.mark.parametrize("seed", [None, 11])
def test_random_operators_go_on_with_and_without_seeds(paths, seed):
    """DALI's checkpoint has their states, whatever they were seeded with."""

    def noise(_):
        return fn.random.uniform(range=[0.0, 1.0], shape=[1])

    first = reader_of(paths, more=noise, seed=seed)
    pairs_of(first)
    found = pairs_of(first, 3)
    state = first.state_dict()
    wanted = [pairs_of(first), pairs_of(first)]
    second = reader_of(paths, more=noise, seed=seed)
    second.load_state_dict(state)
    assert [pairs_of(second), pairs_of(second)] == wanted
    assert len(found) == 24


def test_the_operators_of_a_graph_are_told_as_they_were_written(paths):
    @pipeline_def(batch_size=4, num_threads=1, device_id=None)
    def graph():
        file, label = fn.readers.file(files=paths, name="Images")
        image = fn.decoders.image_random_crop(file, device="cpu", name="Crop")
        return fn.resize(image, size=(4, 4)), label, fn.random.coin_flip(name="Coin")

    pipeline = graph()
    pipeline.build()
    found = {operator.name: operator for operator in operators_of(pipeline)}
    assert str(found["Images"]) == "readers.file 'Images'" or "file" in str(found["Images"])
    assert {name for name, operator in found.items() if operator.is_random} == {"Crop", "Coin"}
    assert not any(operator.is_external for operator in found.values())


# --- the pipelines that are fed ---


def fed(more):
    def make(source, max_batch_size, **options):
        @pipeline_def(batch_size=max_batch_size, num_threads=1, device_id=None, **options)
        def graph():
            path, label, u = source.inputs()
            return fn.io.file.read(path), label, u, more(label)

        return graph()

    return make


def loader_with(paths, more, **options):
    return ResumableDALILoader(fed(more), OUTPUTS, paths, None, 8, rank=0, world_size=1, **options)


def test_an_external_source_beside_the_inputs_is_refused_by_name(paths):
    def weights(_):
        return fn.external_source(source=lambda: np.zeros((9, 1)), name="Weights")

    with pytest.raises(ValueError, match=r"external_source 'Weights' next to source\.inputs"):
        iter(loader_with(paths, weights))


def test_random_operators_of_dali_are_told_unless_they_are_saved(paths, caplog):
    def noise(label):
        return fn.random.uniform(shape=[1], name="Noise")

    caplog.set_level(logging.WARNING)
    iter(loader_with(paths, noise, dali_rng=True))
    take(loader_of(paths, build=build), 1)
    assert not caplog.records
    loader = loader_with(paths, noise)
    iter(loader)
    loader.load_state_dict(loader.state_dict())
    iter(loader)
    (record,) = caplog.records
    assert "uniform 'Noise' would begin anew" in record.message
