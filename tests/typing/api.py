"""How the public API is used and what it gives back, for the type checker. Checked, never run.

`tests/test_typing.py` runs mypy in strict mode on it. An ``assert_type`` that fails, or an
``ignore`` that is not needed any more, is a change of the public types.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from typing_extensions import assert_type

from dcp_checkfreq import (
    BrokenShard,
    CheckFreqError,
    CheckFreqLoadPlanner,
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
    Checkpointer,
    CheckpointExists,
    DtypeDiffers,
    Exported,
    Found,
    ItemsMissing,
    LazyTensor,
    LazyValue,
    LoadFailed,
    OpenedCheckpoint,
    PerRank,
    RecoveryFailed,
    ReplicasDiffer,
    Restored,
    SaveFailed,
    UnsupportedState,
    export_safetensors,
    export_torch_save,
    find_latest_valid,
    import_files,
    open_checkpoint,
)
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.storage.tier import RangeReader, Tier
from dcp_checkfreq.testing import CrashTier, ManualClock, MemoryTier


def save_with_plain_dcp(state: dict[str, Any], path: Path) -> None:
    save(state, storage_writer=CheckFreqWriter(path))
    save(state, storage_writer=CheckFreqWriter(f"file://{path}", overwrite=True, threads=4))
    planner = CheckFreqSavePlanner()
    planner.check_tensors_once()
    writer = CheckFreqWriter(str(path), direct_io=False)
    save(state, checkpoint_id=path / "next", storage_writer=writer, planner=planner)
    stager: AsyncStager = writer
    background = async_save(state, storage_writer=writer)
    assert isinstance(background, Future)
    background.result()
    assert_type(writer.checkpoint_id, str)
    assert_type(CheckFreqWriter.validate_checkpoint_id(path), bool)
    assert_type(writer.close(), None)
    del stager


def load_with_plain_dcp(state: dict[str, Any], path: str) -> None:
    reader = CheckFreqReader(path, threads=1, direct_io=True, verify=True, allow_dtype_cast=True)
    planner = CheckFreqLoadPlanner(allow_partial_load=True, allow_pickle=False)
    load(state, storage_reader=reader, planner=planner)
    assert_type(reader.bytes_read, int)
    assert_type(reader.bytes_needed, int)
    assert_type(reader.checkpoint_id, str)


def newest(root: str) -> CheckFreqReader | None:
    found = find_latest_valid(root, depth="digest")
    assert_type(found, Found | None)
    if found is None:
        return None
    assert_type(found.step, int)
    assert_type(found.path, str)
    assert_type(found.attempt, str)
    assert_type(found.run_id, str)
    assert_type(found.world_size, int)
    for passed in found.rejected:
        assert_type(passed.name, str)
        assert_type(passed.reason, str)
    path: os.PathLike[str] = found
    del path
    return CheckFreqReader(found)


def look_into(path: Path) -> torch.Tensor:
    with open_checkpoint(path, verify=True, map_files=False, threads=4) as opened:
        assert_type(opened, OpenedCheckpoint)
        assert_type(opened.step, int | None)
        for key, one in opened.items():
            assert_type(key, str)
            if isinstance(one, LazyValue):
                del key
            else:
                assert_type(one, LazyTensor)
                assert_type(one.shape, torch.Size)
                assert_type(one[3, ..., 1:2], torch.Tensor)
        return opened.tensors()["w"].tensor()


def convert(path: Path) -> None:
    made = export_safetensors(path, "to", rename=lambda name: None, dtype=torch.bfloat16)
    assert_type(made, Exported)
    assert_type(made.left_out, tuple[str, ...])
    assert_type(export_torch_save(path, Path("x.pt"), rename={"a": "b"}), int)
    import_files("x.pt", path, part="")


def train(
    root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, clock: Clock
) -> int:
    state: dict[str, Any] = {
        "model": model,
        "optim": optimizer,
        "rng": PerRank(torch.get_rng_state()),
        "note": "a plain value",
    }
    with Checkpointer(
        root,
        state,
        every=50,
        keep_last=2,
        keep_every=1000,
        on_error="raise",
        max_failures=3,
        threads=2,
        timeout_s=60.0,
        clock=clock,
    ) as checkpointer:
        assert_type(checkpointer, Checkpointer)
        restored = checkpointer.restore()
        assert_type(restored, Restored | None)
        if restored is not None:
            assert_type(restored.step, int)
            assert_type(restored.path, str)
            assert_type(restored.seconds, float)
            assert_type(restored.world_size, int)
            assert_type(restored.passed_over, tuple[str, ...])
        checkpointer.restore(300, depth="digest")
        checkpointer.restore(fresh_start=True)
        for _ in range(100):
            assert_type(checkpointer.after_step(), None)
        checkpointer.after_step(1000)
        checkpointer.save(wait=True)
        checkpointer.wait()
        assert_type(checkpointer.last_saved_step, int | None)
        return checkpointer.step


def tiers_fit_wherever_a_path_does(state: dict[str, Any]) -> None:
    memory: Tier = MemoryTier()
    crash: Tier = CrashTier()
    local: Tier = LocalTier("/tmp", direct_io=False)
    for tier in (memory, crash, local):
        save(state, storage_writer=CheckFreqWriter(tier.child("step_1")))
        find_latest_valid(tier)
        reader = tier.open("a file")
        assert_type(reader, RangeReader)
    clocks: list[Clock] = [SystemClock(), ManualClock()]
    del clocks


def errors_tell_what_became_of_the_data() -> None:
    try:
        raise SaveFailed("/runs", "why")
    except CheckpointExists as error:
        assert_type(error.where, str)
    except ItemsMissing as error:
        assert_type(error.missing, tuple[str, ...])
    except ReplicasDiffer as error:
        assert_type(error.keys, tuple[str, ...])
    except DtypeDiffers as error:
        assert_type(error.pairs, tuple[str, ...])
    except (BrokenShard, LoadFailed, SaveFailed) as error:
        assert_type(error.why, str)
    except RecoveryFailed as error:
        assert_type(error.root, str)
    except UnsupportedState as error:
        assert_type(error.key, str)
    except CheckFreqError as error:
        assert_type(error.exit_code, int)


def mistakes_are_found(state: dict[str, Any]) -> None:
    CheckFreqWriter(5)  # type: ignore[arg-type]
    CheckFreqWriter("/runs", True)  # type: ignore[call-arg]
    CheckFreqReader("/runs", verfy=True)  # type: ignore[call-arg]
    find_latest_valid("/runs", depth="deep")  # type: ignore[arg-type]
    Checkpointer("/runs", state, every="epoch")  # type: ignore[arg-type]
    Checkpointer("/runs", state, snapshot="disk")  # type: ignore[arg-type]
    Checkpointer("/runs", state, every=5, on_error="ignore")  # type: ignore[arg-type]
