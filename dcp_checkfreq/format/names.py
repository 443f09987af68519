"""Every name that this package gives to something on storage: how it is built and how it is read.

Pure. The names are part of the format: `parse_*` of a foreign name is None, never an error, so
that a folder may hold whatever else people keep next to their checkpoints.
"""

from __future__ import annotations

import re
import uuid

METADATA = ".metadata"  # DCP's own name; its presence is the commit
RUN_FOLDER = ".checkfreq"
LEASE = "lease.json"
ROOT_ID = "root-id"

# Bounded, so that no name makes a number that Python or a record cannot hold.
LARGEST_STEP = 10**37 - 1
_STEP = re.compile(r"step[_-](0{0,200}[0-9]{1,37})", re.ASCII)
_SHARD = re.compile(r"__([0-9]{1,20})_([0-9]{1,20})_([0-9a-f]{12})\.distcp", re.ASCII)
_SCRATCH = re.compile(r"\.metadata\.([0-9a-f]{12})\.tmp", re.ASCII)
# What is there for a moment while a file of the run folder is written, or a root looked at.
_RUN_SCRATCH = re.compile(
    r"(lease\.json|root-id|profile-[0-9a-f]+\.json)\.[0-9a-f]{12}(\.tmp)?"
    r"|probe-[0-9a-f]{12}(\.tmp)?",
    re.ASCII,
)


_LONGEST_FILE_BYTES = 255  # of a name, on every file system and object store


def is_file_name(name: str) -> bool:
    """Tell whether this can be the name of a file in a folder, and of no other place."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(name.encode()) <= _LONGEST_FILE_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def new_attempt() -> str:
    """Return an id for one attempt of one rank to save: 12 hexadecimal digits."""
    return uuid.uuid4().hex[:12]


def step_folder(step: int) -> str:
    """Return the folder name of a step, zero-padded so that text order is step order."""
    if step < 0:
        raise ValueError(f"a step must not be negative, got {step}")
    if step > LARGEST_STEP:
        raise ValueError(f"a step of {step.bit_length()} bits is too large for a name")
    return f"step_{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step of a folder name (``step_10``, ``step-10``, any padding), or None."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def shard_file(rank: int, number: int, attempt: str) -> str:
    """Return the name of a rank's ``number``-th shard file of an attempt."""
    return f"__{rank}_{number}_{attempt}.distcp"


def parse_shard(name: str) -> tuple[int, int, str] | None:
    """Return ``(rank, number, attempt)`` of one of our shard names, or None."""
    match = _SHARD.fullmatch(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def scratch_metadata(attempt: str) -> str:
    """Return the temporary name under which the commit record is written before it is linked."""
    return f"{METADATA}.{attempt}.tmp"


def parse_scratch(name: str) -> str | None:
    """Return the attempt of a temporary commit record, or None."""
    match = _SCRATCH.fullmatch(name)
    return match[1] if match else None


def profile_file(fingerprint: str) -> str:
    """Return the name of the stored profile of the job with this fingerprint."""
    return f"profile-{fingerprint[:16]}.json"


def longest_in_step() -> str:
    """Return the longest name that a save may give in the folder of its step."""
    return max(shard_file(999_999, 999, "0" * 12), scratch_metadata("0" * 12), key=len)


def longest_in_staged_step() -> str:
    """Return the longest name that a staged save may give on the local disk."""
    return f"{shard_file(999_999, 999, '0' * 12)}.up.{'0' * 12}.tmp"


def longest_in_root(in_step: str) -> str:
    """Return the longest path below a root, if ``in_step`` is the longest in a step's folder."""
    return max(
        f"{step_folder(10**12)}/{in_step}",
        f"{RUN_FOLDER}/{profile_file('0' * 16)}.{'0' * 12}",
        key=len,
    )


def is_scratch_of_run(name: str) -> bool:
    """Tell whether a name in the run folder is one that stays only if a process dies."""
    return _RUN_SCRATCH.fullmatch(name) is not None
