"""`ResumableDALIReader`: native readers go on where all is as it was, and nowhere else."""

import json

import pytest
from dali_tools import FILES, lost_and_repeated, write_images
from nvidia.dali import fn, pipeline_def

from dcp_checkfreq.data import DataStateError, ResumableDALIReader

BATCH = 16


def build_reader(
    paths, *, rank=0, world=1, batch_size=BATCH, pad=True, extra=False, threads=1, **reader
):
    """Return a ``build`` of a pipeline with a native reader."""
    settings = {"random_shuffle": True, "initial_fill": 32, "seed": 5} | reader

    def build(**options):
        @pipeline_def(batch_size=batch_size, num_threads=threads, device_id=None, **options)
        def native():
            file, label = fn.readers.file(
                files=paths, shard_id=rank, num_shards=world, pad_last_batch=pad, name="Files",
                **settings,
            )  # fmt: skip
            image = fn.decoders.image_random_crop(file, device="cpu", seed=7)
            if extra:
                image = fn.flip(image, horizontal=1)
            return fn.resize(image, size=(12, 12)), label

        return native()

    return build


def reader_of(paths, *, rank=0, world=1, dataset_id="", **options):
    return ResumableDALIReader(
        build_reader(paths, rank=rank, world=world, **options), ["image", "label"], "Files",
        rank=rank, world_size=world, dataset_id=dataset_id,
    )  # fmt: skip


def take(reader, batches=None):
    found = []
    for number, batch in enumerate(reader, start=1):
        for image, label in zip(batch["image"], batch["label"], strict=True):
            found.append((int(label), image.numpy().tobytes()))
        if number == batches:
            break
    return found


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
@pytest.mark.parametrize("reader", [{}, {"random_shuffle": False, "shuffle_after_epoch": True}])
def test_where_all_is_as_it_was_the_batches_are_those_that_would_have_come(paths, cut, reader):
    whole = reader_of(paths, **reader)
    wanted = [take(whole) for _ in range(3)]
    assert all(lost_and_repeated(epoch) == ([], []) for epoch in wanted)
    first = reader_of(paths, **reader)
    found = take(first, cut) if cut else []
    state = first.state_dict()
    second = reader_of(paths, **reader)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert (second.epoch, second.batches) == ((1, 0) if cut == 7 else (0, cut))
    found += take(second) if cut < 7 else []
    assert [found, take(second), take(second)] == wanted
    assert len(state["state"]) < 1000


def test_over_three_ranks_each_item_comes_once_in_every_epoch(paths):
    readers = [reader_of(paths, rank=rank, world=3) for rank in range(3)]
    for _ in range(2):
        found = [sample for reader in readers for sample in take(reader, 2)]
        states = [reader.state_dict() for reader in readers]
        readers = [reader_of(paths, rank=rank, world=3) for rank in range(3)]
        for reader, state in zip(readers, states, strict=True):
            reader.load_state_dict(state)
            found += take(reader)
        assert lost_and_repeated(found) == ([], [])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pad": False}, "pad_last_batch=True"),
        ({"rank": 1, "world": 3}, "shard 1 of 3, this is rank 0 of 1"),
        ({"name": "Other"}, "no reader 'Other', only .'Files'."),
    ],
)
def test_a_reader_that_would_lose_items_is_refused(paths, options, said):
    name = options.pop("name", "Files")
    with pytest.raises(ValueError, match=said):
        ResumableDALIReader(
            build_reader(paths, **options), ["image", "label"], name, rank=0, world_size=1
        )


def test_the_unpadded_reader_that_is_refused_does_lose_items(paths):
    """The reason of the check: if DALI changes this, the check may go."""
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    batches = DALIGenericIterator(
        [build_reader(paths, pad=False)()], ["image", "label"], reader_name="Files",
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )  # fmt: skip
    lost = []
    for _ in range(3):
        found = [(int(label), b"") for batch in batches for label in batch[0]["label"]]
        lost.append(len(lost_and_repeated(found)[0]))
        batches.reset()
    assert lost[0] == 0
    assert max(lost) > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"world": 2}, "number of ranks was 1, now it is 2"),
        ({"batch_size": 8}, "batch size was 16, now it is 8"),
        ({"initial_fill": 64}, "graph"),
        ({"extra": True}, "graph"),
        ({"dataset_id": "v2"}, "dataset_id was '', now it is 'v2'"),
        ({"files": 90}, "number of items was 103, now it is 90"),
    ],
)
def test_a_change_is_refused_and_the_reader_goes_on_as_it_was(paths, options, said):
    saved = reader_of(paths)
    take(saved, 2)
    files = paths[: options.pop("files", FILES)]
    wanted = take(reader_of(files, **options))
    other = reader_of(files, **options)
    found = take(other, 1)
    with pytest.raises(DataStateError, match=said):
        other.load_state_dict(saved.state_dict())
    assert found + take(other) == wanted


@pytest.mark.parametrize("state", [{}, {"state": None}, {"state": "{}"}, None])
def test_what_is_no_state_is_refused(paths, state):
    with pytest.raises(DataStateError, match="ResumableDALIReader: the saved state"):
        reader_of(paths).load_state_dict(state)


def test_a_broken_checkpoint_of_dali_is_refused(paths):
    reader = reader_of(paths)
    whole = json.loads(reader.state_dict()["state"])
    whole["dali"]["checkpoint"] = "bm9uc2Vuc2U="
    with pytest.raises(DataStateError, match="does not take its checkpoint"):
        reader.load_state_dict({"state": json.dumps(whole)})


def test_an_iterator_from_before_is_stale(paths):
    reader = reader_of(paths)
    older = iter(reader)
    next(older)
    reader.load_state_dict(reader.state_dict())
    with pytest.raises(RuntimeError, match="stale"):
        next(older)
    assert (len(reader), reader.steps_left) == (7, 6)


def test_a_file_that_cannot_be_read_is_not_counted_and_comes_again(tmp_path):
    files = write_images(tmp_path / "files", 60)
    ordered = {"random_shuffle": False, "batch_size": 8}
    wanted = take(reader_of(files, **ordered))
    victim = tmp_path / "files" / "0037.png"
    content = victim.read_bytes()
    victim.write_bytes(b"no image")
    reader, found = reader_of(files, **ordered), []
    iterator = iter(reader)
    with pytest.raises(RuntimeError, match="image_random_crop"):
        found.extend(label for batch in iterator for label in batch["label"])
    with pytest.raises(RuntimeError, match="stale"):
        next(iterator)
    assert len(found) == 8 * reader.batches < 60
    victim.write_bytes(content)
    rest = take(reader)
    assert rest == wanted[len(found) :]
    assert (reader.epoch, reader.batches) == (1, 0)
