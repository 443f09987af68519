"""What every tier promises of folders and names, each as one test. A part of `TierSuite`."""

from __future__ import annotations

from pathlib import Path

from dcp_checkfreq.testing.tier_tests import (
    ODD_NAMES,
    TierTests,
    at_once,
    expect,
)


class FolderSuite(TierTests):
    """Folders are made and removed; names are listed, looked up and deleted."""

    # --- folders -------------------------------------------------------------------------

    def test_a_missing_folder_lists_as_empty(self, tmp_path: Path) -> None:
        """`list` of what was never made."""
        assert self.make_tier(tmp_path).child("never made").list() == []

    def test_child_touches_nothing(self, tmp_path: Path) -> None:
        """`child` alone makes no folder."""
        tier = self.made(tmp_path)
        tier.child("below").child("further")
        assert tier.list() == []

    def test_make_makes_the_parents_and_may_be_repeated(self, tmp_path: Path) -> None:
        """`make` two levels down, twice."""
        tier = self.make_tier(tmp_path)
        below = tier.child("a").child("b c")
        below.make()
        below.make()
        below.write_shard("f", [memoryview(b"x")], 1)
        assert self.raw_files(tier, tmp_path) == {"a/b c/f": b"x"}
        (entry,) = tier.list()
        assert (entry.name, entry.is_folder, entry.size_bytes) == ("a", True, 0)

    def test_several_threads_may_make_one_folder(self, tmp_path: Path) -> None:
        """`make` by eight at once."""
        tier = self.make_tier(tmp_path)
        results = at_once(8, lambda _: tier.child("a").child("b").make())
        assert results == [None] * 8, results

    def test_make_refuses_the_name_of_a_file(self, tmp_path: Path) -> None:
        """`make` where a file is."""
        tier = self.made(tmp_path)
        tier.write_shard("taken", [memoryview(b"x")], 1)
        expect(OSError, tier.child("taken").make)
        assert self.raw_files(tier, tmp_path) == {"taken": b"x"}

    def test_children_with_odd_names_are_apart(self, tmp_path: Path) -> None:
        """One folder for each odd name, one file in each."""
        tier = self.made(tmp_path)
        for number, name in enumerate(ODD_NAMES):
            tier.child(name).make()
            tier.child(name).create("f", str(number).encode(), scratch="s")
        assert self.raw_files(tier, tmp_path) == {
            f"{name}/f": str(number).encode() for number, name in enumerate(ODD_NAMES)
        }
        assert {e.name for e in tier.list() if e.is_folder} == set(ODD_NAMES)

    def test_remove_takes_only_an_empty_folder(self, tmp_path: Path) -> None:
        """`remove` with a file, with a folder, empty, and missing."""
        tier = self.made(tmp_path)
        below = tier.child("below")
        below.child("deep").make()
        below.remove()
        assert [e.name for e in below.list()] == ["deep"] * self.keeps_empty_folders
        below.child("deep").remove()
        below.create("f", b"x", scratch="s")
        below.remove()
        assert self.raw_files(tier, tmp_path) == {"below/f": b"x"}
        below.delete("f")
        below.sync()
        below.remove()
        assert tier.list() == []
        below.remove()

    def test_location_is_text_that_tells_children_apart(self, tmp_path: Path) -> None:
        """`location` of two children."""
        tier = self.make_tier(tmp_path)
        places = [tier.location, tier.child("a").location, tier.child("b").location]
        assert all(places)
        assert len(set(places)) == 3

    # --- list, size, read, delete --------------------------------------------------------

    def test_list_tells_every_name_and_size(self, tmp_path: Path) -> None:
        """Odd names of different sizes."""
        tier = self.made(tmp_path)
        for size_bytes, name in enumerate(ODD_NAMES):
            tier.write_shard(name, [memoryview(bytes(size_bytes))], size_bytes)
        tier.sync()
        listed = {entry.name: entry for entry in tier.list()}
        assert {name: e.size_bytes for name, e in listed.items()} == {
            name: size_bytes for size_bytes, name in enumerate(ODD_NAMES)
        }
        assert not any(entry.is_folder for entry in listed.values())
        assert all(entry.modified_s > 0 for entry in listed.values())
        assert {name: tier.size(name) for name in ODD_NAMES} == {
            name: entry.size_bytes for name, entry in listed.items()
        }

    def test_every_call_asks_the_storage(self, tmp_path: Path) -> None:
        """Two tiers of one folder see each other's writes at once."""
        tier = self.made(tmp_path)
        one, other = tier.child("x"), tier.child("x")
        assert other.list() == []
        one.make()
        one.create("f", b"1", scratch="s")
        assert [entry.name for entry in other.list()] == ["f"]
        assert (other.read("f"), other.size("f")) == (b"1", 1)
        one.replace("f", b"22", scratch="s")
        assert (other.read("f"), other.size("f")) == (b"22", 2)
        one.delete("f")
        expect(FileNotFoundError, other.read, "f")
        assert other.list() == []

    def test_missing_names_raise_and_make_nothing(self, tmp_path: Path) -> None:
        """`size`, `read` and `open` of a missing name, in a folder and in none."""
        tier = self.made(tmp_path)
        for folder in (tier, tier.child("missing")):
            expect(FileNotFoundError, folder.size, "no")
            expect(FileNotFoundError, folder.read, "no")
            expect(FileNotFoundError, folder.open, "no")
        assert tier.list() == []

    def test_delete_removes_one_file_and_forgives_a_missing_one(self, tmp_path: Path) -> None:
        """`delete` of a file, again, and in a missing folder."""
        tier = self.made(tmp_path)
        tier.create("a", b"1", scratch="s")
        tier.create("ab", b"2", scratch="s")
        tier.delete("a")
        tier.delete("a")
        tier.sync()
        tier.child("missing").delete("a")
        assert self.raw_files(tier, tmp_path) == {"ab": b"2"}
