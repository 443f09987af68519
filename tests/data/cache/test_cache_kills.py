"""Processes that fill, evict and pin, killed at any moment: what must hold at every moment does."""

import random
import signal
import time

import pytest
from cache_tools import content_of, look, make_sources, partials_in, start_child, whole_in

from dcp_checkfreq.data.cache.file_cache import FileCache

MAX_BYTES = 2_000_000


@pytest.mark.crash
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("policy", "enough_kills"), [("lru", 60), ("keep", 24)])
def test_kill_9_at_any_moment_leaves_right_content_the_bound_and_no_partials(
    tmp_path, policy, enough_kills
):
    root = tmp_path / "cache"
    sources = make_sources(tmp_path / "slow", 60)  # about 10 MB
    FileCache(root, MAX_BYTES, policy=policy)
    wrong, kills = tmp_path / "wrong", tmp_path / "kills"
    wrong.touch()
    kills.touch()

    def start(seed):
        return start_child("kill_child.py", root, MAX_BYTES, policy, seed, tmp_path)

    rng = random.Random(1)
    children = [start(seed) for seed in range(3)]
    looks = []
    trees_killed = 0
    try:
        # however long it takes; then the bound was near, and processes died before and after
        while (killed := len(kills.read_text())) < enough_kills or max(looks) <= 0.8 * MAX_BYTES:
            assert wrong.read_text() == ""
            assert all(child.poll() is None for child in children), "it ended by itself"
            on_disk, in_byte_count = look(root)
            looks.append(on_disk)
            assert on_disk <= MAX_BYTES
            assert in_byte_count in (None, on_disk)
            time.sleep(rng.uniform(0.001, 0.02))
            if killed >= enough_kills / 4 * (trees_killed + 1):  # its helpers are orphans
                trees_killed += 1
                stop(children.pop(0))
                children.append(start(100 + len(looks)))
    finally:
        for child in children:
            stop(child)
    time.sleep(0.2)  # orphans see that their parent is gone, and end
    assert wrong.read_text() == ""
    assert trees_killed >= 3

    cache = FileCache(root, MAX_BYTES, policy=policy)
    assert partials_in(root) == []
    on_disk, in_byte_count = look(root)
    assert on_disk == in_byte_count == cache.used_bytes()
    contents = {content_of(index) for index in range(len(sources))}
    assert whole_in(root)
    assert all(path.read_bytes() in contents for path in whole_in(root)), "hollow or mixed"
    for index, source in enumerate(sources):
        assert cache.read(f"slow://{source}") == content_of(index)
        assert cache.read(source) == content_of(index)
    assert look(root)[0] <= MAX_BYTES


def stop(child):
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
