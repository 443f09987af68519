"""What `FileCache` promises to whoever trains from it."""

import errno
import fcntl
import logging
import os
import pathlib
import pickle
import shutil
import threading

import pytest
from cache_tools import content_of, look, make_sources, partials_in, whole_in

from dcp_checkfreq.data.cache.file_cache import FileCache
from dcp_checkfreq.data.cache.stats import CacheStats, Fallback
from dcp_checkfreq.errors import BadLocation

KIB = 1024


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def sources(tmp_path):
    return make_sources(tmp_path / "slow", 10, 10 * KIB)


def cache_at(root, max_bytes=1 << 20, **kwargs):
    return FileCache(root, max_bytes, **kwargs)


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_second_request_does_not_touch_the_source(root, sources):
    cache = cache_at(root)
    assert cache.read(sources[0]) == content_of(0, 10 * KIB)
    os.unlink(sources[0])
    assert cache.read(sources[0]) == content_of(0, 10 * KIB)
    assert cache.stats() == CacheStats(
        hits=1, misses=1, hit_bytes=10 * KIB, filled_bytes=10 * KIB, fallbacks={}
    )
    assert cache.used_bytes() == 12 * KIB


def test_a_pin_is_a_local_copy_with_the_same_suffix(root, sources):
    with cache_at(root).pin(sources[3]) as path:
        assert pathlib.Path(path).is_relative_to(root)
        assert pathlib.Path(path).suffix == ".bin"
        assert pathlib.Path(path).read_bytes() == content_of(3, 10 * KIB)


def test_all_spellings_of_a_local_path_are_one_file(root, sources, monkeypatch):
    cache = cache_at(root)
    monkeypatch.chdir(pathlib.Path(sources[0]).parent)
    for spelling in (sources[0], pathlib.Path(sources[0]), f"file://{sources[0]}", "0000.bin"):
        cache.read(spelling)
    assert (cache.stats().hits, cache.stats().misses) == (3, 1)


def test_the_same_relative_path_in_two_folders_is_two_files(root, tmp_path, monkeypatch):
    cache = cache_at(root)
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        monkeypatch.chdir(tmp_path / name)
        assert cache.read("file") == name.encode()


def test_another_version_of_the_data_is_read_anew(root, sources):
    cache_at(root).read(sources[0])
    pathlib.Path(sources[0]).write_bytes(b"new")
    assert cache_at(root, version="2").read(sources[0]) == b"new"


def test_keep_serves_what_came_first_and_lru_what_was_used_last(root, sources):
    keep = cache_at(root / "keep", 60 * KIB)
    lru = cache_at(root / "lru", 60 * KIB, policy="lru", low=1.0)
    for cache in (keep, lru):
        for index, source in enumerate(sources):
            assert cache.read(source) == content_of(index, 10 * KIB)
        assert len(whole_in(cache.root)) == 5
    before = keep.stats().hits, lru.stats().hits
    for source in sources[:5]:
        keep.read(source)
    for source in sources[5:]:
        lru.read(source)
    assert (keep.stats().hits, lru.stats().hits) == (before[0] + 5, before[1] + 5)
    assert keep.stats().fallbacks == {Fallback.FULL: 5}
    assert lru.stats().fallbacks == {}


def test_a_file_larger_than_the_cache_is_read_from_the_source(root, sources, caplog):
    cache = cache_at(root, 8 * KIB)
    with cache.pin(sources[0]) as path:
        assert path == sources[0]
    assert cache.stats().fallbacks == {Fallback.TOO_LARGE: 1}
    assert look(root) == (0, 0)
    assert warnings_in(caplog) == []


def test_threads_that_want_the_same_file_copy_it_once(root, sources, tmp_path):
    cache = cache_at(root, storage_options={"delay_s": 0.02, "log": str(tmp_path / "log")})
    got = []
    threads = [
        threading.Thread(target=lambda: got.append(cache.read(f"slow://{sources[0]}")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [content_of(0, 10 * KIB)] * 8
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert (cache.stats().hits, cache.stats().misses) == (7, 1)


def test_a_pickled_cache_takes_its_settings_along_and_nothing_else(root, sources):
    cache = cache_at(root, policy="lru", low=0.5, version="v")
    cache.read(sources[0])
    copy = pickle.loads(pickle.dumps(cache))
    assert (copy.root, copy.max_bytes, copy.policy, copy.low) == (str(root), 1 << 20, "lru", 0.5)
    assert copy.stats() == CacheStats()
    copy.read(sources[0])
    assert copy.stats().hits == 1
    assert pickle.loads(pickle.dumps(cache.stats())) == cache.stats()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # Python 3.12
def test_a_forked_child_counts_for_itself(root, sources):
    cache = cache_at(root)
    cache.read(sources[0])
    child = os.fork()
    if not child:
        cache.read(sources[0])
        stats = cache.stats()
        os._exit(0 if (stats.hits, stats.misses) == (1, 0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.stats().hits == 0


# Errors of the source


def test_a_missing_source_is_an_error_that_names_it(root, tmp_path):
    cache = cache_at(root)
    for name in (str(tmp_path / "gone"), "memory://gone", f"slow://{tmp_path}/gone"):
        for ask in (cache.read, lambda name: cache.load(name, len), lambda n: pinned(cache, n)):
            with pytest.raises(FileNotFoundError, match="gone") as caught:
                ask(name)
            assert caught.value.filename == name
    assert cache.stats() == CacheStats()
    assert look(root) == (0, 0)


def pinned(cache, name):
    with cache.pin(name) as path:
        return pathlib.Path(path).read_bytes()


def test_what_a_remote_library_raises_becomes_an_os_error_with_the_name_and_the_cause(
    root, sources
):
    cache = cache_at(root, storage_options={"fails": True})
    with pytest.raises(OSError, match="ValueError: the volume lost its mind") as caught:
        cache.read(f"slow://{sources[0]}")
    assert caught.value.filename == f"slow://{sources[0]}"
    assert isinstance(caught.value.__cause__, ValueError)
    assert partials_in(root) == []
    assert look(root) == (0, 0)


@pytest.mark.parametrize("off_by_bytes", [-1, 1, -10 * KIB, 5 * KIB])
def test_a_source_that_changes_while_it_is_copied_is_an_error_and_not_kept(
    root, sources, off_by_bytes
):
    options = {"says_bytes": 10 * KIB + off_by_bytes}
    cache = cache_at(root, storage_options=options)
    with pytest.raises(OSError, match="size changed") as caught:
        cache.read(f"slow://{sources[0]}")
    assert caught.value.errno == errno.EIO
    assert look(root) == (0, 0)


def test_an_error_of_the_training_code_passes_through_a_pin(root, sources):
    cache = cache_at(root, 20 * KIB, policy="lru")
    for source in sources[:2]:  # a pin left behind would make the second one fall back
        with pytest.raises(ZeroDivisionError), cache.pin(source):
            _ = 1 / 0
    assert cache.stats().fallbacks == {}


# Trouble of the cache


def test_a_source_that_does_not_tell_its_size_is_read_directly(root, sources, caplog):
    cache = cache_at(root, storage_options={"says_bytes": -1})
    with cache.pin(f"slow://{sources[0]}") as path:
        assert pathlib.Path(path).suffix == ".bin"
        assert pathlib.Path(path).read_bytes() == content_of(0, 10 * KIB)
    assert not os.path.exists(path)
    assert cache.read(f"slow://{sources[0]}") == content_of(0, 10 * KIB)
    assert cache.stats().fallbacks == {Fallback.UNKNOWN_SIZE: 2}
    assert len(warnings_in(caplog)) == 1


def test_a_root_that_cannot_be_made_costs_one_warning(tmp_path, sources, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = cache_at(tmp_path / "file" / "cache")
    for index, source in enumerate(sources):
        assert cache.read(source) == content_of(index, 10 * KIB)
        with cache.pin(source) as path:
            assert path == source
    assert cache.stats() == CacheStats(fallbacks={Fallback.IO_ERROR: 20})
    assert len(warnings_in(caplog)) == 1
    assert "Not a directory" in warnings_in(caplog)[0]


def test_a_cache_removed_while_in_use_is_made_anew(root, sources, caplog):
    cache = cache_at(root)
    cache.read(sources[0])
    shutil.rmtree(root)
    for _ in range(3):
        assert cache.read(sources[0]) == content_of(0, 10 * KIB)
    assert cache.stats().fallbacks == {Fallback.IO_ERROR: 1}
    assert (cache.stats().misses, cache.stats().hits) == (2, 1)
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("name", ["books", "partial", "whole"])
def test_a_part_of_the_folder_that_is_something_else_only_costs_the_cache(
    root, sources, name, caplog
):
    cache = cache_at(root)
    shutil.rmtree(root)
    root.mkdir()
    if name == "books":
        (root / name).mkdir()
    else:
        (root / name).write_text("a file")
    fresh = cache_at(root)
    for anyone in (cache, fresh):
        for index, source in enumerate(sources):
            assert anyone.read(source) == content_of(index, 10 * KIB)
        assert sum(anyone.stats().fallbacks.values()) == len(sources)
    assert len(warnings_in(caplog)) == 2, "one for each cache"


def test_a_stray_folder_among_the_partials_only_costs_the_cache(root, sources):
    cache = cache_at(root)
    (root / "partial" / "stray").mkdir()
    assert cache.read(sources[0]) == content_of(0, 10 * KIB)


def test_a_copy_that_vanishes_or_cannot_be_loaded_is_loaded_from_the_source(root, sources, caplog):
    cache = cache_at(root)

    def load(path):
        if path != sources[0]:
            os.unlink(path)
        return pathlib.Path(path).read_bytes()

    assert cache.load(sources[0], load) == content_of(0, 10 * KIB)
    assert cache.stats().fallbacks == {Fallback.UNREADABLE: 1}
    assert len(warnings_in(caplog)) == 1


def test_a_root_where_flock_does_nothing_is_refused(root, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    with pytest.raises(BadLocation, match="flock does nothing there"):
        cache_at(root)


def test_a_worker_on_a_node_where_flock_does_nothing_reads_the_source(
    root, sources, monkeypatch, caplog
):
    sent = pickle.dumps(cache_at(root))
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    cache = pickle.loads(sent)
    for source in sources:
        with cache.pin(source) as path:
            assert path == source
    assert cache.stats().fallbacks == {Fallback.NO_FLOCK: 10}
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"max_bytes": 0}, ValueError),
        ({"max_bytes": -1}, ValueError),
        ({"max_bytes": 1e9}, TypeError),
        ({"policy": "fifo"}, ValueError),
        ({"low": 0.0}, ValueError),
        ({"low": 1.1}, ValueError),
        ({"root": "s3://bucket/cache"}, BadLocation),
        ({"root": b"/tmp/x"}, TypeError),
    ],
)
def test_arguments_that_make_no_sense_are_refused(root, kwargs, error):
    with pytest.raises(error):
        FileCache(**({"root": root, "max_bytes": 1 << 20} | kwargs))
