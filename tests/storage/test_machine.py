"""Any sequence of calls: a tier and a plain dict tell the same story."""

import itertools
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from property_examples import examples

from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import CrashTier, MemoryTier

FOLDERS = st.sampled_from([(), ("a",), ("a", "b"), ("ä [1]",)])
NAMES = st.sampled_from(["f", "g h", ".metadata", "[x]"])
DATA = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda size, byte: bytes([byte]) * size, st.integers(4090, 4100), st.integers(0, 255)
    ),
)


class TierMachine(RuleBasedStateMachine):
    """The model: a set of folders, and content by (folder, name)."""

    def __init__(self):
        super().__init__()
        self.folders = {()}
        self.files = {}
        self.scratches = 0

    def make_tier(self):
        raise NotImplementedError

    @initialize()
    def start(self):
        self.root = self.make_tier()
        self.root.make()

    def at(self, folder):
        tier = self.root
        for name in folder:
            tier = tier.child(name)
        return tier

    def scratch(self):
        self.scratches += 1
        return f"scratch {self.scratches}"

    def expected(self, folder, name, *, exclusive):
        """Return the error that a write must raise, or None."""
        if folder not in self.folders:
            return FileNotFoundError
        if exclusive and (folder, name) in self.files:
            return FileExistsError
        return None

    def do(self, error, call):
        if error is None:
            call()
            return True
        with pytest.raises(error):
            call()
        return False

    @rule(folder=FOLDERS)
    def make(self, folder):
        self.at(folder).make()
        self.folders |= {folder[:depth] for depth in range(len(folder) + 1)}

    @rule(folder=FOLDERS)
    def remove(self, folder):
        if not folder:
            return
        self.at(folder).remove()
        if not self.names_in(folder):
            self.folders.discard(folder)

    @rule(folder=FOLDERS, name=NAMES, data=DATA)
    def create(self, folder, name, data):
        error = self.expected(folder, name, exclusive=True)
        if self.do(error, lambda: self.at(folder).create(name, data, scratch=self.scratch())):
            self.files[folder, name] = data

    @rule(folder=FOLDERS, name=NAMES, data=DATA)
    def replace(self, folder, name, data):
        error = self.expected(folder, name, exclusive=False)
        if self.do(error, lambda: self.at(folder).replace(name, data, scratch=self.scratch())):
            self.files[folder, name] = data

    @rule(folder=FOLDERS, name=NAMES, data=DATA, cuts=st.lists(st.integers(0, 50), max_size=3))
    def write_shard(self, folder, name, data, cuts):
        edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        pieces = [memoryview(data)[start:stop] for start, stop in itertools.pairwise(edges)]
        error = self.expected(folder, name, exclusive=True)
        if self.do(error, lambda: self.at(folder).write_shard(name, pieces, len(data))):
            self.files[folder, name] = data

    @rule(folder=FOLDERS, name=NAMES)
    def fail_a_shard(self, folder, name):
        def pieces():
            yield memoryview(b"some")
            raise ValueError("no more")

        with pytest.raises((ValueError, FileNotFoundError, FileExistsError)):
            self.at(folder).write_shard(name, pieces(), 10)

    @rule(folder=FOLDERS, name=NAMES)
    def delete(self, folder, name):
        self.at(folder).delete(name)
        self.files.pop((folder, name), None)

    @rule(folder=FOLDERS, name=NAMES, start=st.integers(0, 50), length=st.integers(0, 50))
    def read_a_range(self, folder, name, start, length):
        if (folder, name) not in self.files:
            with pytest.raises(FileNotFoundError):
                self.at(folder).open(name)
            return
        data = self.files[folder, name]
        reader = self.at(folder).open(name)
        got = bytearray(length)
        try:
            if start + length > len(data) and length:
                with pytest.raises(EOFError):
                    reader.read_into(start, memoryview(got))
            elif start + length <= len(data):
                reader.read_into(start, memoryview(got))
                assert got == data[start : start + length]
        finally:
            reader.close()

    def names_in(self, folder):
        files = {
            name: (False, len(data))
            for (where, name), data in self.files.items()
            if where == folder
        }
        below = {
            path[len(folder)]: (True, 0)
            for path in self.folders
            if len(path) == len(folder) + 1 and path[:-1] == folder
        }
        return files | below

    @invariant()
    def every_folder_lists_what_the_model_holds(self):
        for folder in [(), ("a",), ("a", "b"), ("ä [1]",)]:
            tier = self.at(folder)
            listed = {entry.name: (entry.is_folder, entry.size_bytes) for entry in tier.list()}
            assert listed == self.names_in(folder)
        for (folder, name), data in self.files.items():
            assert self.at(folder).read(name) == data
            assert self.at(folder).size(name) == len(data)


class MemoryMachine(TierMachine):
    def make_tier(self):
        return MemoryTier()


class CrashMachine(TierMachine):
    """Also: what was synced is there after any loss, with the content that was given."""

    def make_tier(self):
        return CrashTier()

    def teardown(self):
        for folder in self.folders:
            self.at(folder).make()
            self.at(folder).sync()
        wanted = {"/".join((*folder, name)): data for (folder, name), data in self.files.items()}
        for keep in ("none", "all", 0, 1):
            assert self.root.after_power_loss(keep=keep).files() == wanted


class LocalMachine(TierMachine):
    def make_tier(self):
        self.path = tempfile.mkdtemp(prefix="checkfreq-machine-")
        return LocalTier(self.path)

    def teardown(self):
        shutil.rmtree(self.path)


def run(machine, number, steps):
    run_state_machine_as_test(
        machine,
        settings=settings(
            examples(number),
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_memory_tier_agrees_with_a_dict():
    run(MemoryMachine, 60, 40)


def test_the_crash_tier_agrees_with_a_dict_and_keeps_what_was_synced():
    run(CrashMachine, 60, 40)


def test_the_local_tier_agrees_with_a_dict():
    run(LocalMachine, 25, 20)
