"""`scripts/gpu_check` where there is no GPU: it says so, its dry run works, its rules are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parents[1] / "scripts" / "gpu_check"
sys.path.append(str(HERE))

from gpu_laps import Laps, Saving, stall_of  # noqa: E402
from gpu_report import FAILED, OK, SKIPPED, Report, Skipped, file_name  # noqa: E402
from gpu_site import differing, flat, frozen, mapped, must_equal, room_for  # noqa: E402


def gpu_check(*arguments: object, hide_gpus: bool = True) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHON=sys.executable)
    if hide_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        [SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def test_without_a_gpu_it_says_so_and_succeeds(tmp_path):
    done = gpu_check("--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torch sees no GPU here; nothing was checked" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_dry_run_keeps_every_promise_and_writes_its_report(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    done = gpu_check("--device", "cpu", "--quick", "--out", tmp_path, "--folder", work)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(work.iterdir()) == [], "checkpoints were left"
    report = json.loads((tmp_path / "gpu-cpu-dry-run.json").read_text())
    assert report["schema"] == "dcp_checkfreq.gpu/1"
    assert report["finished"]
    assert report["exit_code"] == 0
    assert report["versions"]["torch"] == torch.__version__
    checks = {one["name"]: one["outcome"] for one in report["checks"]}
    for name in ("stream order", "never torn", "unguarded state", "equal modes", "FSDP2"):
        assert checks[name] == OK, name
    assert checks["out of GPU memory"] == SKIPPED
    measured = {one["name"]: one for one in report["measurements"]}
    assert measured["pinning"]["outcome"] == SKIPPED
    for name in ("copies", "disk", "stall", "overhead", "stock"):
        assert measured[name]["outcome"] == OK, measured[name]["text"]
    assert measured["stall"]["facts"]["cpu"]["loaded_iterations"] >= 1
    assert measured["overhead"]["facts"]["saves_in_window"] >= 1


def test_only_what_was_asked_for_is_run():
    done = gpu_check("--device", "cpu", "--quick", "--only", "disk")
    assert done.returncode == 0, done.stderr
    assert "checks: 0 ok" in done.stdout
    assert "measurements: 1 ok" in done.stdout


def test_the_file_is_named_for_the_device():
    assert file_name("NVIDIA H200") == "gpu-nvidia-h200.json"
    assert file_name("Tesla V100-SXM2 (32GB)") == "gpu-tesla-v100-sxm2-32gb.json"


def broken():
    raise AssertionError("torn")


def impossible():
    raise Skipped("needs two GPUs")


def test_a_broken_promise_is_kept_with_its_text_and_the_rest_still_runs(tmp_path):
    path = tmp_path / "report.json"
    report = Report({"quick": True}, path, 60.0)
    report.check("one", "holds", broken)
    assert json.loads(path.read_text())["checks"][0]["outcome"] == FAILED  # at once
    report.check("two", "holds", lambda: {"seen": 3})
    report.check("three", "holds", impossible)
    report.write(finished=True)
    kept = json.loads(path.read_text())
    assert [one["outcome"] for one in kept["checks"]] == [FAILED, OK, SKIPPED]
    assert [one["text"] for one in kept["checks"]] == [
        "AssertionError: torn",
        "",
        "needs two GPUs",
    ]
    assert kept["checks"][1]["facts"] == {"seen": 3}
    assert kept["exit_code"] == report.exit_code == 1
    assert "FAILED  one: AssertionError: torn" in report.summary()


def test_a_measurement_that_fails_breaks_no_promise():
    report = Report({}, None, 60.0)
    report.measure("one", "a cost", broken, 0.0)
    assert report.measurements[0].outcome == FAILED
    assert report.exit_code == 0


def test_measurements_that_do_not_fit_the_budget_are_skipped_and_say_so():
    report = Report({}, None, 60.0)
    report.measure("long", "a cost", broken, 1000.0)
    (skipped,) = report.measurements
    assert skipped.outcome == SKIPPED
    assert "it needs about 1000 s" in skipped.text


def test_states_are_compared_bit_for_bit():
    state = {"a": [torch.tensor([0.0, 1.0])], "b": (torch.tensor(float("nan")), 7)}
    kept = frozen(state)
    must_equal(state, kept, "NaN equals itself here")
    state["a"][0][0] = -0.0
    assert differing(state, kept) == [".a.0"]
    assert differing({"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.float64)}) == [".a"]
    assert differing({"a": torch.ones(2)}, {}) == [".a"]
    with pytest.raises(AssertionError, match="1 of 2 tensors differ"):
        must_equal(state, kept, "changed")


def test_room_for_a_state_never_equals_it():
    state = {"a": torch.zeros(3, dtype=torch.bfloat16), "n": [torch.tensor(0)], "plain": "x"}
    room = room_for(state)
    assert room["plain"] == "x"
    assert differing(state, room) == [".a", ".n.0"]


def test_lazy_conjugation_is_part_of_the_value():
    lazy = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert not frozen(lazy).is_conj()
    assert differing({"c": lazy}, {"c": torch.tensor([1 - 2j, 3 + 4j])}) == []


def test_every_tensor_of_a_nesting_is_found_and_changed():
    state = {"a": {"b": [torch.ones(1)]}, "c": (torch.ones(2), "text")}
    assert list(flat(state)) == [".a.b.0", ".c.0"]
    assert mapped(state, lambda tensor: tensor.numel()) == {"a": {"b": [1]}, "c": (2, "text")}


class ToldLaps(Laps):
    """Laps that take what they are told."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.first = []

    def run(self, count, after_step=None, *, first=None, **_):
        self.first.append(first)
        return self._answers.pop(0)


def test_the_stall_is_what_iterations_beside_a_save_take_more_than_others():
    warm, unloaded = [9.0, 9.0], [1.0, 1.1, 0.9]
    laps = ToldLaps(warm, unloaded, [1.5, 1.25], unloaded, [1.25, 1.0], unloaded, [3.0, 1.0])
    saving = Saving(begin=lambda: None, done=lambda: True)
    found = stall_of(laps, saving, saves=3)
    assert found["iteration_s"] == 1.0
    assert found["stalls_s"] == pytest.approx([0.75, 0.25, 2.0])
    assert found["stall_s"] == pytest.approx(0.75)
    assert found["first_iteration_s"] == pytest.approx(0.5)
    assert found["loaded_iterations"] == 2
    assert laps.first == [None, *[None, saving.begin] * 3]
