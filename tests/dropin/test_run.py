"""``python -m dcp_checkfreq run``: the script sees what it sees without, and its saves are ours."""

import os
import subprocess
import sys

import pytest
from forked_scripts import run_scripts

from dcp_checkfreq.dropin.command_line import parsed

pytestmark = pytest.mark.slow  # processes that import torch

TRAIN = """
import os, sys
assert "torch" not in sys.modules
os.environ["BEFORE_TORCH"] = "1"
import warnings
warnings.simplefilter("ignore")
import helper
import torch
import torch.distributed.checkpoint as dcp

class OfMain:
    number = 3

if __name__ == "__main__":
    print(sys.argv, __name__, __file__, os.path.basename(sys.path[0]), __package__, flush=True)
    dcp.async_save({"w": torch.arange(4), "value": OfMain()}, checkpoint_id=sys.argv[1])
    helper.end(sys.argv[2])
"""
HELPER = """
import sys

def end(how):
    if how == "raise":
        raise ValueError("of the script")
    if how != "":
        sys.exit(int(how))
"""


@pytest.fixture
def folder(tmp_path):
    project = tmp_path / "project"
    (project / "pack").mkdir(parents=True)
    (project / "train.py").write_text(TRAIN)
    (project / "pack" / "__init__.py").touch()
    (project / "pack" / "__main__.py").write_text(
        TRAIN.replace("import helper", "from . import helper")
    )
    for home in (project, project / "pack"):
        (home / "helper.py").write_text(HELPER)
    return project


def python(*arguments, cwd):
    paths = [os.getcwd(), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        capture_output=True,
        text=True,
        check=False,
    )


def run(*arguments, cwd):
    return python("-m", "dcp_checkfreq", "run", *arguments, cwd=cwd)


def is_ours(step):
    return b"dcp_checkfreq" in (step / ".metadata").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("7", 7), ("raise", 1)])
def test_a_script_runs_as_with_python_and_its_last_save_is_ours(folder, how, code):
    plain = python("train.py", str(folder / "stock"), how, "--x", cwd=folder)
    ours = run("train.py", str(folder / "ours"), how, "--x", cwd=folder)
    assert plain.returncode == ours.returncode == code, ours.stderr
    assert ours.stdout == plain.stdout.replace("stock", "ours")
    assert is_ours(folder / "ours")
    assert not is_ours(folder / "stock")
    lines = ours.stderr.splitlines()
    assert lines[0].startswith("dcp_checkfreq: drop-in is on")
    assert lines[-1:] == (["ValueError: of the script"] if how == "raise" else lines[:1])
    if how == "raise":
        assert [line for line in ours.stderr.splitlines() if "project" in line] == [
            line for line in plain.stderr.splitlines() if "project" in line
        ]


@pytest.mark.slow
def test_a_module_runs_as_with_python(folder):
    plain = python("-m", "pack", str(folder / "stock"), "7", cwd=folder)
    ours = run("-m", "pack", str(folder / "ours"), "7", cwd=folder)
    assert plain.returncode == ours.returncode == 7, ours.stderr
    assert ours.stdout == plain.stdout.replace("stock", "ours")
    assert is_ours(folder / "ours")


@pytest.mark.parametrize(
    "given", [["--", "x"], ["a", "--", "-m", "--"], ["-m", "b", "--help"], ["run", "-h"]]
)
def test_the_script_gets_its_arguments_as_they_are(given):
    assert parsed(["run", "train.py", *given]).arguments == given
    of_module = parsed(["run", "-m", "package.train", *given])
    assert [of_module.script, *of_module.arguments] == ["package.train", *given]
    assert of_module.is_module


def test_what_is_not_there_is_said(folder):
    missing = run("nothing.py", cwd=folder)
    assert missing.returncode == 1
    assert "nothing.py" in missing.stderr.splitlines()[-1]
    missing = run("-m", "nothing", cwd=folder)
    assert missing.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: there is no module nothing to run"
    )
    bare = python("-m", "dcp_checkfreq", cwd=folder)
    assert bare.returncode == 2
    assert "Usage: python -m dcp_checkfreq" in bare.stderr


@pytest.mark.slow
def test_every_rank_of_torchrun_runs_it(folder):
    script = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp\n"
        "dist.init_process_group('gloo')\n"
        "state = {'w': torch.arange(4), f'own.{dist.get_rank()}': dist.get_rank()}\n"
        "dcp.save(state, checkpoint_id=sys.argv[1])\n"
        "dist.destroy_process_group()\n"
    )
    (folder / "two.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = python(*torchrun, "-m", "dcp_checkfreq", "run", "two.py", str(folder / "2"), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert is_ours(folder / "2")
    assert done.stderr.count("drop-in is on") == 1


FAILS_LAST = """
import concurrent.futures, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from dcp_checkfreq import dropin

if __name__ == "__main__":
    folder, process_group, by_writer, use_install = sys.argv[1], *map(int, sys.argv[3:])
    asked = sys.argv[2]
    if use_install:
        dropin.install()
    if process_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dcp.async_save({"w": torch.arange(4)}, checkpoint_id=folder + "-first").result()
    open(folder + "-file", "w").close()
    there = folder + "-file/step"
    where = {"checkpoint_id": there}
    if by_writer:
        where = {"storage_writer": dcp.FileSystemWriter(there)}
    pending = dcp.async_save({"w": torch.arange(4)}, **where)
    if asked != "no":
        try:
            pending.result() if asked == "heard" else concurrent.futures.wait([pending])
        except BaseException:  # as DCP's is
            print("heard", flush=True)
    print("last line", flush=True)
"""


BY_RUN = [("000", "no")]
BY_INSTALL = [("101", "no"), ("011", "no"), ("001", "ended")]
HEARD = ("001", "heard")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Give the exit code, the output and the path of each that installs by itself."""
    folder = tmp_path_factory.mktemp("installed")
    scripts = {
        " ".join(way): f"import sys; sys.argv += {[way[1], *way[0]]}\n{FAILS_LAST}"
        for way in (*BY_INSTALL, HEARD)
    }
    said = run_scripts(scripts, folder)
    return {name: (*said[name], folder / name) for name in scripts}


def last_of(folder, how, asked):
    """Return what `installed` gives, of one that `python -m dcp_checkfreq run` runs."""
    (folder / "last.py").write_text(FAILS_LAST)
    done = run("last.py", str(folder / "last"), asked, *how, cwd=folder)
    return done.returncode, done.stdout + done.stderr, folder / "last"


def printed(said):
    return [line for line in said.splitlines() if line in ("heard", "last line")]


@pytest.mark.parametrize(("how", "asked"), [*BY_RUN, *BY_INSTALL])
def test_a_last_save_in_the_background_that_failed_is_seen_in_the_exit_code(
    folder, installed, how, asked
):
    is_run = (how, asked) in BY_RUN
    code, said, path = last_of(folder, how, asked) if is_run else installed[f"{how} {asked}"]
    assert printed(said) == ["last line"], said
    assert code not in (0, None), said
    assert "this process ends, and something was not saved" in said
    assert f"{path.name}-file" in said
    assert is_ours(path.with_name(f"{path.name}-first"))


def test_one_whose_error_the_script_has_heard_is_the_scripts_matter(installed):
    code, said, _ = installed[" ".join(HEARD)]
    assert printed(said) == ["heard", "last line"], said
    assert code == 0, said
