import hashlib
import os
import pathlib
import pickle
import zipfile

import fsspec
import pytest
from cache_tools import content_of, look, make_sources, whole_in
from torch.utils.data import DataLoader

from dcp_checkfreq.data.cache.dataset import CachedFiles
from dcp_checkfreq.data.cache.file_cache import FileCache
from dcp_checkfreq.data.cache.stats import Fallback

KIB = 1024


@pytest.fixture
def sources(tmp_path):
    return make_sources(tmp_path / "slow", 24, 10 * KIB)


@pytest.fixture
def cache(tmp_path):
    return FileCache(tmp_path / "cache", 1 << 20)


def digest_and_place(path):
    """Return what was read, and whether it was a cached copy; at the top level, to be spawned."""
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest(), "/cache/whole/" in path


def expected(count):
    return [hashlib.sha256(content_of(index, 10 * KIB)).hexdigest() for index in range(count)]


def test_items_are_the_bytes_or_what_load_makes_of_a_path(cache, sources):
    plain = CachedFiles(sources, cache)
    assert len(plain) == 24
    assert plain[5] == content_of(5, 10 * KIB)
    assert plain[-1] == content_of(23, 10 * KIB)
    assert CachedFiles(sources, cache, digest_and_place)[5] == (expected(6)[5], True)
    assert cache.stats().misses == 2
    assert plain.cache is cache


@pytest.mark.parametrize("index", [24, -25, 1 << 70])
def test_there_are_no_items_beyond_the_list(cache, sources, index):
    with pytest.raises(IndexError, match="of 24"):
        CachedFiles(sources, cache)[index]


def test_iterating_without_a_loader_ends(cache, sources):
    assert list(CachedFiles(sources[:3], cache)) == [content_of(i, 10 * KIB) for i in range(3)]


def test_the_id_names_the_list_of_paths(cache):
    def id_of(paths):
        return CachedFiles(paths, cache).dataset_id

    assert id_of(["a", "b"]) == hashlib.sha256(b"a\0b\0").hexdigest()
    assert id_of(["a", "b"]) == id_of(iter([pathlib.Path("a"), "b"]))
    different = [[], ["a"], ["ab"], ["a", "b"], ["b", "a"], ["a", "b", ""], ["", "a", "b"]]
    assert len({id_of(paths) for paths in different}) == len(different)


def test_any_path_comes_back_as_it_was_given(cache):
    paths = ["", "a", "ü/漢", os.fsdecode(b"\xff\xfe"), "s3://bucket/key with space", "a"]
    dataset = CachedFiles(paths, cache)
    assert [dataset.path(index) for index in range(len(paths))] == paths


@pytest.mark.parametrize(("path", "error"), [("a\0b", ValueError), (b"a", TypeError)])
def test_what_is_no_path_is_refused(cache, path, error):
    with pytest.raises(error):
        CachedFiles([path], cache)


def test_an_item_whose_source_is_gone_is_an_error_that_names_it(cache, sources):
    dataset = CachedFiles([*sources, "/nowhere/x"], cache)
    with pytest.raises(FileNotFoundError, match="/nowhere/x"):
        dataset[24]
    # torch raises a worker's error again with its text
    with pytest.raises(OSError, match="/nowhere/x"):
        list(DataLoader(dataset, batch_size=None, num_workers=1))


@pytest.mark.slow  # persistent workers take up to 5 s to end
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_two_workers_share_the_copies_of_two_epochs(cache, sources, start):
    loader = DataLoader(
        CachedFiles(sources, cache, digest_and_place),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=start,
        persistent_workers=True,
    )
    for _ in range(2):
        assert [item[0] for item in loader] == expected(24)
    del loader
    for source in sources:
        os.unlink(source)
    assert [CachedFiles(sources, cache, digest_and_place)[i] for i in range(24)] == [
        (digest, True) for digest in expected(24)
    ]
    assert cache.stats().hits == 24
    assert look(cache.root) == (24 * 12 * KIB, 24 * 12 * KIB)


def test_workers_evict_and_never_serve_anything_else(tmp_path, sources):
    cache = FileCache(tmp_path / "cache", 60 * KIB, policy="lru")
    dataset = CachedFiles(sources, cache, digest_and_place)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    for _ in range(3):
        assert [item[0] for item in loader] == expected(24)
    on_disk, in_byte_count = look(cache.root)
    assert on_disk == in_byte_count <= 60 * KIB
    assert whole_in(cache.root)


def test_a_remote_volume_in_memory_is_read_once(cache):
    volume = fsspec.filesystem("memory")
    urls = [f"memory://slow/{index}.bin" for index in range(4)]
    for index, url in enumerate(urls):
        volume.pipe(url, content_of(index, 10 * KIB))
    assert list(CachedFiles(urls, cache)) == [content_of(i, 10 * KIB) for i in range(4)]
    volume.rm("/slow", recursive=True)
    assert list(CachedFiles(urls, cache)) == [content_of(i, 10 * KIB) for i in range(4)]


def test_members_of_an_archive_reach_workers(tmp_path, cache, sources):
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as out:
        for source in sources:
            out.write(source, pathlib.Path(source).name)
    urls = [f"zip://{pathlib.Path(source).name}::file://{archive}" for source in sources]
    dataset = CachedFiles(urls, cache, digest_and_place)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert [tuple(item) for item in loader] == [(digest, True) for digest in expected(24)]
    archive.unlink()
    assert list(dataset) == [(digest, True) for digest in expected(24)]


def test_a_remote_file_larger_than_the_cache_is_loaded_from_a_copy_aside(tmp_path, sources):
    cache = FileCache(tmp_path / "cache", 4 * KIB)
    dataset = CachedFiles([f"slow://{source}" for source in sources], cache, digest_and_place)
    assert list(dataset) == [(digest, False) for digest in expected(24)]
    assert cache.stats().fallbacks == {Fallback.TOO_LARGE: 24}


def test_it_pickles_small(cache, sources):
    dataset = CachedFiles(sources, cache, digest_and_place)
    sent = pickle.dumps(dataset)
    assert len(sent) < 24 * (len(sources[0]) + 10) + 1000
    assert pickle.loads(sent).dataset_id == dataset.dataset_id
