"""What users may import is exactly this, and importing the package alone costs nothing."""

import subprocess
import sys

import pytest

import dcp_checkfreq
from dcp_checkfreq import errors

PUBLIC = {
    "Checkpointer",
    "Restored",
    "MemoryForecast",
    "SaveRecord",
    "PerRank",
    "CheckFreqWriter",
    "CheckFreqReader",
    "CheckFreqSavePlanner",
    "CheckFreqLoadPlanner",
    "find_latest_valid",
    "load_part",
    "export_safetensors",
    "export_torch_save",
    "Exported",
    "import_files",
    "open_checkpoint",
    "OpenedCheckpoint",
    "LazyTensor",
    "LazyValue",
    "Found",
    # the error tree
    "CheckFreqError",
    "BadLocation",
    "UnsupportedOption",
    "UnsupportedState",
    "SnapshotFailed",
    "SaveFailed",
    "CheckpointExists",
    "WriteFailed",
    "ItemsMissing",
    "ReplicasDiffer",
    "PlanCacheStale",
    "PublishUnknown",
    "LeftBehind",
    "RankFailed",
    "RankLost",
    "TooManyFailures",
    "LoadFailed",
    "BrokenMetadata",
    "NewerFormat",
    "BrokenShard",
    "DtypeDiffers",
    "UnsafePickle",
    "StateMismatch",
    "RecoveryFailed",
    "StepNotFound",
    "NoValidCheckpoint",
    "StepsExist",
    "RootDiffers",
    "DataStateError",
}


def test_the_public_names_are_these():
    assert set(dcp_checkfreq.__all__) == PUBLIC
    assert len(dcp_checkfreq.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there_and_says_what_it_is(name):
    thing = getattr(dcp_checkfreq, name)
    assert thing.__name__ == {"SaveRecord": "SaveTimings"}.get(name, name)
    assert thing.__doc__


def test_star_import_brings_all_of_them():
    names = {}
    exec("from dcp_checkfreq import *", names)
    assert set(names) >= PUBLIC


def test_every_error_is_public():
    kinds = {name for name, value in vars(errors).items() if _is_error(value)}
    assert kinds <= PUBLIC


def _is_error(value):
    return isinstance(value, type) and issubclass(value, errors.CheckFreqError)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="attribute Chekpointer"):
        dcp_checkfreq.Chekpointer  # noqa: B018


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys; before = set(sys.modules); import dcp_checkfreq; import dcp_checkfreq.errors;"
        "dcp_checkfreq.BrokenShard; dcp_checkfreq.__all__;"
        "heavy = {'torch', 'numpy', 'fsspec', 'xxhash', 'asyncio'};"
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
