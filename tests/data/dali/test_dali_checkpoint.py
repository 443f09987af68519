"""DALI's own random operators: they go on as well, where all is as it was; refused elsewhere."""

import base64
import json

import pytest
from dali_tools import OUTPUTS, Job, build_with, loader_of, samples_of, take, write_images
from nvidia.dali import fn, pipeline_def

from dcp_checkfreq import Checkpointer, PerRank
from dcp_checkfreq.data import DataStateError
from dcp_checkfreq.data.order.permutation import order


def build_random(seed=11, graph="", **ours):
    """Return a ``build`` whose pipeline draws from DALI's operators, and not from our numbers."""

    def build(source, max_batch_size, **options):
        settings = {"num_threads": 1, "device_id": None, "seed": seed, **ours, **options}

        @pipeline_def(batch_size=max_batch_size, **settings)
        def random():
            path, label, _ = source.inputs()
            noise = fn.random.uniform(range=[0.0, 1.0], shape=[4])
            if graph:
                noise = noise + fn.random.normal(shape=[4])
            image = fn.decoders.image_random_crop(fn.io.file.read(path), device="cpu")
            image = fn.flip(image, horizontal=fn.random.coin_flip())
            return fn.resize(image, size=(12, 12)), label, noise, label

        return random()

    return build


def rng_loader(paths, batch_size=8, *, build=None, **options):
    made = build_random() if build is None else build
    return loader_of(paths, batch_size, build=made, seed=3, dali_rng=True, **options)


@pytest.mark.parametrize("cut", [0, 1, 7, 13])
@pytest.mark.parametrize(
    "ours", [{}, {"exec_dynamic": True}, {"prefetch_queue_depth": 4}], ids=["", "dynamic", "deep"]
)
def test_at_equal_topology_dalis_numbers_go_on_too(paths, cut, ours):
    whole = rng_loader(paths, build=build_random(**ours))
    wanted = [take(whole) for _ in range(3)]
    assert wanted[0] != wanted[1]
    first = rng_loader(paths, build=build_random(**ours))
    found = take(first, cut) if cut else []
    state = first.state_dict()
    second = rng_loader(paths, build=build_random(**ours))
    second.load_state_dict(state)
    assert second.state_dict() == state
    found += take(second) if cut < 13 else []
    assert [found, take(second), take(second)] == wanted
    assert len(state["state"]) < 1000


def test_each_rank_goes_on_with_its_own(paths, tmp_path):
    def launch(root, stop=None):
        found = []
        for rank in range(2):
            made = build_random(seed=rank)
            loader = rng_loader(paths, rank=rank, world_size=2, build=made)
            parts = {"data": PerRank(loader)}
            with Checkpointer(root / str(rank), parts, every=2) as ckpt:
                ckpt.restore()
                for batch in loader:
                    found += samples_of(batch)
                    ckpt.after_step()
                    if ckpt.step == stop:
                        break
        return found

    wanted = launch(tmp_path / "whole")
    assert sorted(launch(tmp_path / "cut", 4) + launch(tmp_path / "cut")) == sorted(wanted)


def test_a_failure_does_not_lose_dalis_numbers(paths, tmp_path):
    files = write_images(tmp_path / "files", 40)
    wanted = take(rng_loader(files, 4))
    victim = tmp_path / "files" / files[order(3, 0, 40)(21)].rpartition("/")[2]
    content = victim.read_bytes()
    victim.unlink()
    loader, found = rng_loader(files, 4), []
    with pytest.raises(RuntimeError, match=victim.name):
        found.extend(sample for batch in loader for sample in samples_of(batch))
    victim.write_bytes(content)
    assert found + take(loader) == wanted


def with_dali(state, **fields):
    whole = json.loads(state["state"])
    whole["dali"] |= fields
    return {"state": json.dumps(whole)}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"version": "1.0"}, "the version of DALI was 1.0"),
        ({"rank": 1}, "the rank was 1, now it is 0"),
        ({"world_size": 2}, "the number of ranks was 2, now it is 1"),
        ({"batch_size": 4}, "the batch size was 4, now it is 8"),
        ({"rank": -1}, "'rank'"),
        ({"checkpoint": "?"}, "base64"),
        ({"checkpoint": 7}, "'checkpoint'"),
        ({"checkpoint": base64.b64encode(b"nonsense").decode()}, "does not take its checkpoint"),
    ],
)
def test_dalis_checkpoint_is_refused_elsewhere_and_the_loader_goes_on(paths, fields, said):
    wanted = take(rng_loader(paths))
    loader = rng_loader(paths)
    iterator = iter(loader)
    found = samples_of(next(iterator))
    state = loader.state_dict()
    with pytest.raises(DataStateError, match=said):
        loader.load_state_dict(with_dali(state, **fields))
    assert loader.state_dict() == state
    found.extend(sample for batch in iterator for sample in samples_of(batch))
    assert found == wanted


def test_on_other_ranks_it_is_refused_and_without_it_the_order_goes_on(paths):
    saved = rng_loader(paths, rank=0, world_size=2)
    take(saved, 2)
    other = rng_loader(paths, 4, rank=0, world_size=3)
    with pytest.raises(DataStateError, match="number of ranks was 2, now it is 3"):
        other.load_state_dict(saved.state_dict())
    assert other.samples == 0
    job = Job(3, paths, 4, saved.state_dict(), build=build_random(), seed=3)
    rest, _ = job.run()
    assert sorted(sample[0] for sample in rest) == sorted(order(3, 0, 103).at(range(32, 103)))


def test_a_state_without_dalis_checkpoint_is_refused(paths):
    saved = loader_of(paths, seed=3)
    take(saved, 1)
    with pytest.raises(DataStateError, match="without DALI's checkpoint"):
        rng_loader(paths).load_state_dict(saved.state_dict())


def test_the_checkpoint_of_another_graph_is_refused(paths):
    saved = rng_loader(paths)
    take(saved, 1)
    other = rng_loader(paths, build=build_random(graph="more"))
    with pytest.raises(DataStateError, match="does not take its checkpoint"):
        other.load_state_dict(saved.state_dict())
    assert (other.samples, len(take(other))) == (0, 103)


def test_other_data_is_refused_before_anything_changes(paths):
    saved = rng_loader(paths)
    take(saved, 1)
    other = rng_loader(paths[:90])
    with pytest.raises(DataStateError, match="was 103, now it is 90"):
        other.load_state_dict(saved.state_dict())
    assert other.samples == 0
    other.load_state_dict(saved.state_dict(), on_mismatch="restart_epoch")
    assert [s[0] for s in take(other)] == order(3, 0, 90).at(range(90))


def test_our_numbers_need_no_checkpoint_of_dali(paths):
    loader = loader_of(paths, outputs=OUTPUTS, build=build_with())
    take(loader, 1)
    assert "dali" not in json.loads(loader.state_dict()["state"])
