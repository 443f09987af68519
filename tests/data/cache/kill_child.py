"""Uses a cache from forked helpers, which it kills and replaces at random moments, for ever.

What is wrong is appended to the file ``wrong``; each kill adds a byte to the file ``kills``.
"""

import os
import pathlib
import random
import signal
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[2]))
import cache_tools  # noqa: F401  the slow volume

from dcp_checkfreq.data.cache.file_cache import FileCache

root, max_bytes, policy, seed, folder = sys.argv[1:6]
sources = sorted(str(path) for path in (pathlib.Path(folder) / "slow").glob("*.bin"))
cache = FileCache(root, int(max_bytes), policy=policy, low=0.8, storage_options={"delay_s": 0.0005})


def note(name, text):
    fd = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, text.encode())
    os.close(fd)


def check(rng):
    source = rng.choice(sources)
    due = pathlib.Path(source).read_bytes()
    asked = f"slow://{source}" if rng.random() < 0.7 else source  # slow: killed while copying
    how = rng.random()
    try:
        if how < 0.5:
            if cache.read(asked) != due:
                note("wrong", f"read {asked}\n")
            return
        with cache.pin(asked) as path:
            for _ in range(3 if how < 0.9 else 30):
                if pathlib.Path(path).read_bytes() != due:
                    note("wrong", f"pin {asked}\n")
                time.sleep(0.001)
    except BaseException as error:
        note("wrong", f"{type(error).__name__}: {error}\n")
        raise


def start_helper(number):
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        rng = random.Random(f"{seed} {number}")
        while os.getppid() == parent:
            check(rng)
    finally:
        os._exit(1)


rng = random.Random(seed)
helpers = [start_helper(number) for number in range(3)]
number = len(helpers)
for _ in range(100_000):
    time.sleep(rng.uniform(0.01, 0.08))
    check(rng)
    victim = rng.randrange(len(helpers))
    os.kill(helpers[victim], signal.SIGKILL)
    os.waitpid(helpers[victim], 0)
    note("kills", "x")
    helpers[victim] = start_helper(number)
    number += 1
