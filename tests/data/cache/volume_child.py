"""Reads through a cache on a small file system that fills up, then turns read-only.

Runs in a mount namespace of its own (`unshare -m`), so that nothing stays mounted. Prints JSON.
"""

import json
import logging
import os
import pathlib
import subprocess
import sys

from dcp_checkfreq.data.cache.file_cache import FileCache

mount, policy, sources = sys.argv[1], sys.argv[2], sys.argv[3:]
warned = []
handler = logging.Handler()
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger().addHandler(handler)

subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], check=True)


def read_all(cache):
    """Return how many requests gave wrong content."""
    wrong = 0
    for source in sources:
        due = pathlib.Path(source).read_bytes()
        with cache.pin(source) as path:
            wrong += pathlib.Path(path).read_bytes() != due
        wrong += cache.read(f"file://{source}") != due
    return wrong


def result(cache, wrong):
    stats = cache.stats()
    return {
        "wrong": wrong,
        "hits": stats.hits,
        "misses": stats.misses,
        "fallbacks": {kind.value: count for kind, count in stats.fallbacks.items()},
        "partials": len(os.listdir(f"{mount}/cache/partial")),
        "warned": [warned.pop() for _ in range(len(warned))],
    }


results = {}
cache = FileCache(f"{mount}/cache", 64 << 20, policy=policy)  # more than there is room for
results["full"] = result(cache, read_all(cache) + read_all(cache))

os.unlink(next(path for path in pathlib.Path(f"{mount}/cache/whole").rglob("*.bin")))
cache = FileCache(f"{mount}/cache", 64 << 20, policy=policy)
subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
results["read-only"] = result(cache, read_all(cache))

fresh = FileCache(f"{mount}/cache", 64 << 20, policy=policy)
results["fresh on read-only"] = result(fresh, read_all(fresh))
print(json.dumps(results))
