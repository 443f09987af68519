"""The commands, as a user gives them: what they print, and with which code they end."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_checkfreq import CheckFreqWriter, Checkpointer, errors
from dcp_checkfreq.cli import app, shows

CODES = {
    kind.__name__: kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")
}


@pytest.fixture
def cli(capfd):
    """Run a command in this process; return its code, what it printed, and its errors."""

    def run(*arguments):
        capfd.readouterr()
        code = 0
        try:
            app.main([str(one) for one in arguments])
        except SystemExit as end:
            code = end.code or 0
        return code, *capfd.readouterr()

    return run


def state(value):
    return {"w": torch.full((300, 200), value), "half": torch.ones(4, dtype=torch.bfloat16), "n": 3}


def save(folder, value=1.0):
    dcp.save(state(value), storage_writer=CheckFreqWriter(folder))


@pytest.fixture
def root(tmp_path):
    """Steps 1 to 5: 2 lacks its `.metadata`, a tensor of 4 is damaged, a file of 5 is cut."""
    for step in range(1, 6):
        save(tmp_path / f"step_{step:08d}", float(step))
    (tmp_path / "step_00000002" / ".metadata").unlink()
    (shard,) = (tmp_path / "step_00000004").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[content.index(state(4.0)["w"][:50].numpy().tobytes())] ^= 1
    shard.write_bytes(content)
    (shard,) = (tmp_path / "step_00000005").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])
    (tmp_path / "notes.txt").write_text("of somebody")
    return tmp_path


def test_list_tells_of_each_step_what_it_is(cli, root):
    code, out, _ = cli("list", root, "--json")
    assert code == 0
    found = {one["step"]: one for one in json.loads(out)}
    assert list(found) == [5, 4, 3, 2, 1]
    assert [one["state"] for one in found.values()] == [
        "broken", "newest", "whole", "unpublished", "whole",
    ]  # fmt: skip
    assert "it was saved with" in found[5]["why"]
    assert found[3]["ranks"] == 1
    folder = root / "step_00000003"
    assert found[3]["size_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert found[3]["saved_s"] == pytest.approx((folder / ".metadata").stat().st_mtime)
    assert found[2]["saved_s"] is None
    code, out, _ = cli("list", root)
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 6
    assert "step_00000002" in lines[4]
    assert "unpublished" in lines[4]
    assert "ago" in lines[2]


def test_latest_and_plan_tell_what_a_restart_takes(cli, root):
    assert cli("latest", root) == (0, f"{root}/step_00000004\n", "")
    code, out, _ = cli("latest", root, "--digests", "--json")
    assert (code, json.loads(out)) == (0, {"path": f"{root}/step_00000003"})
    code, out, _ = cli("plan", root, "--digests")
    assert code == 0
    assert out.splitlines()[-1] == f"resumes from {root}/step_00000003"
    assert "passes over step_00000004: __0_0_" in out
    assert "fails its digest" in out
    code, out, _ = cli("plan", root, "--json")
    assert json.loads(out)["step"] == 4
    for shard in root.glob("*/*.distcp"):
        shard.unlink()
    code, _, err = cli("latest", root)
    assert code == CODES["NoValidCheckpoint"]
    assert err.startswith("dcp-checkfreq: ")
    code, out, _ = cli("plan", root)
    assert code == 0
    assert "no checkpoint is whole" in out


def test_verify_names_what_is_damaged_and_says_so_by_its_code(cli, root):
    code, out, _ = cli("verify", root, "--json")
    assert code == CODES["BrokenShard"]
    problems = {one["name"]: one["problem"] for one in json.loads(out)}
    assert list(problems) == [f"step_0000000{n}" for n in (1, 3, 4, 5)]
    assert problems["step_00000001"] is None
    assert "'w'" in problems["step_00000004"]
    assert "block" in problems["step_00000004"]
    assert cli("verify", root / "step_00000003") == (0, "step_00000003: all digests match\n", "")
    assert cli("verify", root / "step_00000004", "--no-digests") == (
        0, "step_00000004: sizes are right\n", "",
    )  # fmt: skip
    code, out, _ = cli("verify", root / "step_00000005")
    assert code == CODES["BrokenShard"]
    assert "it was saved with" in out


def test_inspect_shows_what_is_in_a_checkpoint(cli, root, tmp_path):
    code, out, _ = cli("inspect", root / "step_00000003", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["ranks"] == 1
    assert [item["key"] for item in found["items"]] == ["w", "half", "n"]
    assert found["items"][0] == {
        "key": "w", "shape": [300, 200], "dtype": "torch.float32", "size_bytes": 240_000,
        "chunks": 1,
    }  # fmt: skip
    assert found["items"][2]["shape"] is None
    code, out, _ = cli("inspect", root / "step_00000003")
    assert "[300, 200]" in out
    assert "bfloat16" in out
    dcp.save({"w": torch.ones(7)}, checkpoint_id=tmp_path / "stock")
    code, out, _ = cli("inspect", tmp_path / "stock")
    assert code == 0
    assert "stock DCP" in out
    assert "28 B" in out


def test_only_so_many_items_are_shown(cli, tmp_path):
    many = {f"k{n:03d}": torch.ones(1) for n in range(150)}
    dcp.save(many, storage_writer=CheckFreqWriter(tmp_path))
    _, out, _ = cli("inspect", tmp_path)
    assert "k099" in out
    assert "k100" not in out
    assert "and 50 more" in out
    assert "k149" in cli("inspect", tmp_path, "--all")[1]


@pytest.mark.parametrize("command", ["list", "latest", "plan", "verify", "inspect"])
def test_a_wrong_place_is_one_line_and_the_code_of_the_error(cli, root, command, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data.csv").write_text("1")
    wrong = [tmp_path / "nothing", tmp_path / "empty", tmp_path / "other", "nosuch://x/y"]
    wrong.append(root if command == "inspect" else root / "step_00000003")
    for place in wrong[: -1 if command == "verify" else None]:
        code, out, err = cli(command, place)
        assert code in (CODES["BadLocation"], CODES["BrokenMetadata"]), place
        assert out == ""
        assert err.startswith("dcp-checkfreq: ")
        assert err.count("\n") == 1


def test_damaged_metadata_and_unknown_commands_are_one_line_too(cli, root):
    record = root / "step_00000003" / ".metadata"
    record.write_bytes(record.read_bytes()[:-40])
    code, _, err = cli("inspect", root / "step_00000003")
    assert code == CODES["BrokenMetadata"]
    assert "cut short" in err
    code, _, err = cli("frob")
    assert code == 2
    assert "No such command" in err
    assert cli("verify", root, "--threads", "0")[0] == 2


def test_export_and_import_bring_a_model_there_and_back(cli, root, tmp_path, caplog):
    step, files, again = root / "step_00000003", tmp_path / "hf", tmp_path / "again"
    code, out, _ = cli("export", step, files, "--dtype", "float16")
    assert code == 0
    assert out == f"{files}: 2 tensors, 1 files, 120 kB\n"
    assert "not tensors, so not exported: n" in caplog.text
    assert cli("import", files, again, "--part", "m")[:2] == (0, f"{again}\n")
    _, out, _ = cli("inspect", again, "--json")
    assert {item["key"] for item in json.loads(out)["items"]} == {"m.w", "m.half"}
    code, out, _ = cli("export", step, tmp_path / "all.pt", "--format", "torch-save")
    assert (code, out) == (0, f"{tmp_path}/all.pt: 3 tensors and values\n")
    assert torch.load(tmp_path / "all.pt")["n"] == 3
    code, _, err = cli("export", step, files)
    assert code == CODES["BadLocation"]
    assert "another model is there" in err
    assert cli("export", step, tmp_path / "x", "--format", "zip")[0] == 2
    assert cli("export", step, tmp_path / "x", "--dtype", "float7")[0] == 2
    assert cli("import", tmp_path / "nothing", tmp_path / "x")[0] == CODES["BadLocation"]


def test_what_a_checkpointer_left_behind_is_told_apart(cli, tmp_path):
    for step in (None, 1):
        with Checkpointer(tmp_path, {"w": torch.ones(3)}, every=1, keep_last=9) as ckpt:
            ckpt.restore(step)
            for _ in range(2):
                ckpt.after_step()
                ckpt.wait()
            if step is None:
                ckpt.after_step()
    _, out, _ = cli("list", tmp_path, "--json")
    found = {one["step"]: one for one in json.loads(out)}
    assert found[3]["state"] == "newest"
    assert len({one["run_id"] for one in found.values()}) == 2


@pytest.mark.parametrize("command", ["list", "latest", "plan", "verify", "inspect"])
def test_looking_needs_no_torch(root, command):
    script = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from dcp_checkfreq.cli.app import main; main(sys.argv[1:])"
    )
    place = root / "step_00000003" if command == "inspect" else root
    done = subprocess.run(
        [sys.executable, "-c", script, command, place], capture_output=True, text=True, check=False
    )
    assert done.returncode == (CODES["BrokenShard"] if command == "verify" else 0), done.stderr
    assert done.stdout


@pytest.mark.slow
def test_the_module_is_the_same_command_and_a_pipe_that_closes_is_no_error(root):
    command = [sys.executable, "-m", "dcp_checkfreq", "list", root, "--json"]
    whole = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(json.loads(whole.stdout)) == 5
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_567, "1.23 MB"), (999_600, "1 MB"),
     (123_456_789, "123 MB"), (1_710_000_000, "1.71 GB"), (5 * 10**15, "5000 TB")],
)  # fmt: skip
def test_sizes_are_said_as_people_say_them(size_bytes, text):
    assert shows.size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("age_s", "text"),
    [(-3, "0 s"), (0.4, "0 s"), (59, "59 s"), (61, "1 min"), (7300, "2 h"),
     (86400 * 2 + 3600 * 4, "2 d 4 h"), (86400, "1 d")],
)  # fmt: skip
def test_ages_are_said_in_their_largest_unit(age_s, text):
    assert shows.age_text(age_s) == text
