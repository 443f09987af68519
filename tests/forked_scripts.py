"""Runs scripts as the main program of processes of their own, for the price of one import of torch.

Each is forked off one process that has imported everything and started nothing. It ends like any
script: by its last line and the whole shutdown of the interpreter.
"""

import json
from pathlib import Path

from forked_ranks import ForkedRanks

DRIVER = """
import json, os, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint, dcp_checkfreq, dcp_checkfreq.data, dcp_checkfreq.testing
torch.set_num_threads(1)
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
    del os.environ[name]
folder, at_most_s = sys.argv[1], float(sys.argv[2])
with open(folder + "/scripts.json") as file:
    scripts = json.load(file)
script, codes = "", {}
for name, text in scripts.items():
    pid = os.fork()
    if not pid:
        out = os.open(f"{folder}/{name}.out", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.argv = [name, f"{folder}/{name}"]
        script = text
        break
    end_s = time.monotonic() + at_most_s
    ended = 0
    while not ended and time.monotonic() < end_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if ended:
        codes[name] = os.waitstatus_to_exitcode(status)
    else:
        os.kill(pid, 9), os.waitpid(pid, 0)
        codes[name] = None
else:
    with open(folder + "/codes.json", "w") as file:
        json.dump(codes, file)
exec(compile(script, "script", "exec"))
"""


def run_scripts(scripts, folder, *, at_most_s=60):
    """Run ``{name: text}`` one after the other; return ``{name: (exit code, output)}``.

    A script finds a path for its files in ``sys.argv[1]``: ``folder/name``. An exit code of None
    is that of one that did not end.
    """
    folder = Path(folder)
    (folder / "scripts.json").write_text(json.dumps(scripts))
    (folder / "driver.py").write_text(DRIVER)
    out = folder / "driver"
    out.mkdir()
    timeout_s = 60 + at_most_s * len(scripts)
    arguments = [folder, at_most_s]
    with ForkedRanks(folder / "driver.py", 1, arguments, out, timeout_s=timeout_s) as driver:
        codes = driver.wait()
    assert codes == [0], (out / "0.out").read_text()
    codes = json.loads((folder / "codes.json").read_text())
    return {name: (codes[name], (folder / f"{name}.out").read_text()) for name in scripts}
