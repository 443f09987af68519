"""Every public option has a rule; a wrong value is refused by name before anything is done."""

import inspect
import math
import signal

import numpy as np
import pytest
import torch

from dcp_checkfreq import (
    CheckFreqReader,
    CheckFreqWriter,
    Checkpointer,
    export_safetensors,
    export_torch_save,
    find_latest_valid,
    import_files,
    load_part,
    open_checkpoint,
)
from dcp_checkfreq.runtime import options
from dcp_checkfreq.testing import ManualClock, MemoryTier

TABLES = {
    Checkpointer.__init__: options.CHECKPOINTER,
    Checkpointer.restore: options.RESTORE,
    Checkpointer.save: options.SAVE,
    Checkpointer.after_step: options.AFTER_STEP,
    CheckFreqWriter.__init__: options.WRITER,
    CheckFreqReader.__init__: options.READER,
    find_latest_valid: options.FIND_LATEST_VALID,
    load_part: options.LOAD_PART,
    open_checkpoint: options.OPEN_CHECKPOINT,
    export_safetensors: options.EXPORT_SAFETENSORS,
    export_torch_save: options.EXPORT_TORCH_SAVE,
    import_files: options.IMPORT_FILES,
}
CALLS = {
    "Checkpointer": (
        options.CHECKPOINTER,
        lambda root, **given: Checkpointer(
            **{"root": root, "state": {"w": torch.ones(1)}, "every": 1} | given
        ),
    ),
    "writer": (options.WRITER, lambda root, **given: CheckFreqWriter(**{"path": root} | given)),
    "reader": (options.READER, lambda root, **given: CheckFreqReader(**{"path": root} | given)),
    "find_latest_valid": (
        options.FIND_LATEST_VALID,
        lambda root, **given: find_latest_valid(**{"root": root} | given),
    ),
    "load_part": (
        options.LOAD_PART,
        lambda root, **given: load_part(
            **{"path": root, "name": "w", "into": torch.nn.Linear(1, 1)} | given
        ),
    ),
    "export_safetensors": (
        options.EXPORT_SAFETENSORS,
        lambda root, **given: export_safetensors(**{"path": root, "to": "x"} | given),
    ),
    "export_torch_save": (
        options.EXPORT_TORCH_SAVE,
        lambda root, **given: export_torch_save(**{"path": root, "to": "x"} | given),
    ),
    "import_files": (
        options.IMPORT_FILES,
        lambda root, **given: import_files(**{"source": "x", "to": root} | given),
    ),
    "open_checkpoint": (
        options.OPEN_CHECKPOINT,
        lambda root, **given: open_checkpoint(**{"path": root} | given),
    ),
}
OTHER = object()
NAN, INF = math.nan, math.inf
WHOLE = ["100", 2.0, True, -1, NAN, [1], OTHER, b"1", 1j]
NUMBER = ["5%", "0.1", True, NAN, INF, -INF, -1, 0, [0.1], OTHER, 1j]
FLAG = ["yes", 1, 0, 0.0, OTHER, "False", [True]]
WORD = ["", "AUTO", 1, True, OTHER, ["auto"], b"auto"]
FOLDER = [7, True, b"bytes", OTHER, ["a"], 1.5]
# One of each is tried at the real call. None is wrong too, unless it is the default.
BAD = {
    "max_overhead": [*NUMBER, 1.1, 5],
    "every": [*WHOLE, 0],
    "steps_per_epoch": [*WHOLE, 0],
    "mtbf_s": NUMBER,
    "snapshot": [*WORD, "host"],
    "preempt_signals": [15, "TERM", [9], [True], [0], [99], ["15"], OTHER, {15.0}],
    "grace_s": [*NUMBER, 1e12],
    "keep_last": [*WHOLE, 0],
    "keep_every": [*WHOLE, 0],
    "keep_epochs": FLAG,
    "on_error": [*WORD, "ignore"],
    "max_failures": [*WHOLE, 0],
    "threads": [*WHOLE, 0],
    "allow_pickle": FLAG,
    "allow_dtype_cast": FLAG,
    "share_reads": FLAG,
    "staging_dir": FOLDER,
    "staging_bytes": [*WHOLE, 0, "10GB", 1e9],
    "storage_options": ["key=1", [("key", 1)], {1: 2}, OTHER, 7],
    "timeout_s": [*NUMBER, 1e12],
    "clock": [1, "now", OTHER],
    "state": [None, [1], "w", OTHER, torch.nn.Linear(1, 1)],
    "overwrite": FLAG,
    "direct_io": FLAG,
    "overlap": [7, "adam", [torch.nn.Linear(1, 1)], [None], {"a": 1}, OTHER],
    "verify": FLAG,
    "map_files": FLAG,
    "prefix": [None, 7, b"model.", OTHER],
    "part": [None, 7, b"model", OTHER],
    "dtype": ["float32", 7, OTHER],
    "max_file_bytes": [*WHOLE, 0, "5GB"],
    "source": [None, 7, b"bytes", OTHER],
    "to": [None, 7, b"bytes", OTHER],
    "known": ["x", [1, 2], (1,), OTHER],
    "agreement": [True, OTHER],
    "depth": [*WORD, "sizes"],
    "no_dist": FLAG,
    "step": ["3", 2.0, True, -1, NAN, OTHER],
    "fresh_start": FLAG,
    "only": ["model", b"model", [1], {"model": 1, 2: 3}, OTHER],
    "optional": ["model", b"model", [1], OTHER],
    "rename": ["model", ["model"], {"model": 1}, {1: "model"}, OTHER],
    "strict": FLAG,
    "name": [None, 7, b"model", OTHER],
    "into": [None, 7, "model", {"weight": torch.ones(1)}, OTHER],
    "wait": FLAG,
    "check_replicas": FLAG,
}
GOOD = {
    "max_overhead": [1, 0.5, np.float32(0.25), np.float64(1e-9)],
    "every": [1, np.int64(7), 10**9],
    "keep_last": [1, np.int32(3)],
    "timeout_s": [1, 0.5, np.float32(3)],
    "mtbf_s": [None, 3600],
    "preempt_signals": [[], (), {signal.SIGTERM}, [signal.SIGUSR1, 12], (s for s in [15])],
    "staging_bytes": [None, 1, np.int64(5)],
    "storage_options": [None, {}, {"key": object()}],
    "clock": [None, ManualClock()],
    "overlap": [(), []],
    "known": [None],
    "step": [None, 0, np.int64(3)],
}


@pytest.mark.parametrize("call", TABLES, ids=lambda call: call.__qualname__)
def test_every_option_has_a_rule_and_bad_values_to_try(call):
    names = {name for name in inspect.signature(call).parameters if name[0] != "_"} - {"self"}
    assert set(TABLES[call]) == names
    for name in names:
        assert TABLES[call][name] is options.ANYTHING or BAD[name], name


@pytest.mark.parametrize("call", TABLES, ids=lambda call: call.__qualname__)
def test_every_default_is_right_and_none_is_only_where_it_is_the_default(call):
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.default is inspect.Parameter.empty or name[0] == "_":
            continue
        options.check({name: TABLES[call][name]}, {name: parameter.default})
        if parameter.default is not None:
            with pytest.raises(TypeError, match=f"^{name} must be"):
                options.check({name: TABLES[call][name]}, {name: None})


@pytest.mark.parametrize("kind", CALLS)
def test_a_wrong_value_is_refused_by_name_before_anything_is_done(kind, tmp_path):
    rules, call = CALLS[kind]
    tried = 0
    for name in rules:
        for value in BAD.get(name, []):
            root = MemoryTier()
            with pytest.raises((TypeError, ValueError)) as caught:
                call(root, **{name: value})
            assert str(caught.value).startswith(f"{name} must be "), (name, value)
            assert "got" in str(caught.value)
            assert len(str(caught.value)) < 300
            assert root.files() == {}
            tried += 1
    assert tried > 15


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in GOOD.items() for v in values])
def test_right_values_are_taken_also_those_of_numpy(name, value):
    for rules in TABLES.values():
        if name in rules:
            options.check({name: rules[name]}, {name: value})


def test_a_wrong_type_is_a_type_error_and_a_wrong_value_a_value_error():
    for value in ("3", 2.0, True, None):
        with pytest.raises(
            TypeError, match=r"^keep_last must be a whole number of at least 1, got"
        ):
            Checkpointer(MemoryTier(), {}, keep_last=value)
    for value in (0, -5):
        with pytest.raises(ValueError, match=f"keep_last must be .*, got {value}$"):
            Checkpointer(MemoryTier(), {}, keep_last=value)
    with pytest.raises(ValueError, match=r"max_overhead must be a number in \(0, 1\], got nan"):
        Checkpointer(MemoryTier(), {}, max_overhead=NAN)
    with pytest.raises(ValueError, match="'auto', 'cpu', 'gpu' or 'blocking', got 'host'"):
        Checkpointer(MemoryTier(), {}, snapshot="host")


@pytest.mark.parametrize("call", ["restore", "save", "after_step"])
def test_a_wrong_argument_of_a_call_is_refused_and_the_run_goes_on(call):
    root = MemoryTier()
    with Checkpointer(root, {"w": torch.ones(1)}, every=1) as ckpt:
        ckpt.restore()
        for name in TABLES[getattr(Checkpointer, call)]:
            for value in BAD[name]:
                with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
                    getattr(ckpt, call)(**{name: value})
        ckpt.after_step(np.int64(1))
        ckpt.wait()
    assert find_latest_valid(root).step == 1


def test_a_huge_value_makes_a_short_text():
    with pytest.raises(TypeError) as caught:
        CheckFreqWriter(MemoryTier(), threads="9" * 10**6)
    assert len(str(caught.value)) < 300
