"""`TarReader`: samples in tar files. What a scan can see, it judges."""

from __future__ import annotations

import posixpath
import tarfile
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from dcp_checkfreq.data.sources.shard_readers import MARK_EVERY, Layout, seek_mark

_BLOCK = tarfile.BLOCKSIZE
_PIECE_BYTES = 1 << 20
_MAX_LINKS = 8  # from one to the next


class TarReader:
    """Samples of a tar file, as WebDataset has them.

    Neighbouring files whose paths are equal up to the first dot of the name are one sample: a dict
    of ``__key__`` and, per file, what follows that dot to its bytes. Names that begin with a dot
    (``._1.jpg`` of macOS, ``.DS_Store``) and folders are passed over. Links to files in the same
    archive are read as those.
    """

    def scan(self, file: IO[bytes]) -> Layout:
        """Count the samples; reads headers, not contents, if the file can seek.

        Raises:
            ValueError: a name is there twice, the files of a sample are not next to each other, a
                link leads to nothing in the archive, or there is something behind its end.
            tarfile.ReadError: it is cut short, damaged, or no tar file.
        """
        seen, last = _Seen(), _LastRead(file)
        with tarfile.open(fileobj=last, mode="r:") as tar:  # type: ignore[call-overload]
            for member in _members(tar):
                seen.take(member)
            end = tar.offset
        return seen.layout(end, is_marked=_check_end(last, end))

    def read(self, file: IO[bytes], start: int, marks: tuple[int, ...]) -> Iterator[dict[str, Any]]:
        """Yield the samples from number ``start`` on."""
        passed = seek_mark(file, start, marks)
        sample: dict[str, Any] = {}
        key = None
        links: dict[str, tarfile.TarInfo] | None = None
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in _members(tar):
                if not _counts(member):
                    continue
                found, extension = _key_of(member)
                if found != key:
                    if sample:
                        yield sample
                    if key is not None and passed:
                        passed -= 1
                    key, sample = found, {}
                if not passed:
                    if not member.isreg() and links is None:
                        links = _all_by_name(file)
                    content = tar.extractfile(_target(member, links or {}))
                    assert content is not None  # it is a regular file
                    sample["__key__"] = found
                    sample[extension] = content.read()
            if sample:
                yield sample

    def decode(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the sample: bytes are for a transform to decode."""
        return sample


class _Seen:
    """What a scan has seen so far."""

    def __init__(self) -> None:
        self._marks: list[int] = []
        self._keys: dict[str, int] = {}  # to the number of the sample
        self._key: str | None = None
        self._files: set[str] = set()
        self._links: dict[str, tarfile.TarInfo] = {}
        self._extensions: set[str] = set()
        self._kinds: Counter[tuple[str, ...]] = Counter()
        self._first_of_kind: dict[tuple[str, ...], str] = {}

    def take(self, member: tarfile.TarInfo) -> None:
        name = posixpath.normpath(member.name)
        is_again = name in self._files or name in self._links
        if member.isreg():
            self._files.add(name)
        if not _counts(member):
            return
        if is_again:
            raise ValueError(f"{member.name} is in it twice")
        if not member.isreg():
            self._links[name] = member
        key, extension = _key_of(member)
        if key != self._key:
            self._end_sample()
            if key in self._keys:
                raise ValueError(
                    f"{member.name} lies apart from the other files of its sample (number "
                    f"{self._keys[key]}): pack them next to each other, as tar --sort=name does"
                )
            if len(self._keys) % MARK_EVERY == 0:
                self._marks.append(member.offset)
            self._keys[key] = len(self._keys)
            self._key = key
        elif extension in self._extensions:  # "./a.jpg" and "a.jpg" are not the same key
            raise ValueError(f"{member.name} is in it twice")
        self._extensions.add(extension)

    def _end_sample(self) -> None:
        if self._key is not None:
            kind = tuple(sorted(self._extensions))
            self._kinds[kind] += 1
            self._first_of_kind.setdefault(kind, self._key)
        self._extensions = set()

    def layout(self, end: int, *, is_marked: bool) -> Layout:
        self._end_sample()
        for member in self._links.values():
            name = _linked(member)
            for _ in range(_MAX_LINKS):
                if name in self._links:
                    name = _linked(self._links[name])
            if name not in self._files:
                raise ValueError(
                    f"{member.name} is a link to {member.linkname}, which is no file in it: pack "
                    "the files themselves, as tar --dereference --hard-dereference does"
                )
        notes = [] if is_marked else [
            f"it ends at byte {end} without the mark of an end: was its writer stopped, or "
            "is it cut short?"
        ]  # fmt: skip
        if len(self._kinds) > 1:
            (most, count), *others = self._kinds.most_common()
            key = self._first_of_kind[others[0][0]]
            notes.append(
                f"{count} of {len(self._keys)} samples have {_shown(most)}, the others have not: "
                f"{key} has {_shown(others[0][0])}"
            )
        return Layout(len(self._keys), tuple(self._marks), tuple(notes))


def _shown(extensions: tuple[str, ...]) -> str:
    return ", ".join(extension or "no extension" for extension in extensions)


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield what comes next."""
    while (member := tar.next()) is not None:
        # Else it would keep a record of each file that it has seen.
        tar.members = []  # type: ignore[attr-defined]
        yield member


def _counts(member: tarfile.TarInfo) -> bool:
    """Tell whether it is of a sample."""
    is_file = member.isreg() or member.islnk() or member.issym()
    return is_file and not posixpath.basename(member.name).startswith(".")


class _LastRead:
    """An open file that keeps what was read from it last.

    To read the end of a compressed file once more would be to decompress all of it once more.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell = file.seek, file.tell
        self._read = file.read
        self.data, self.at = b"", 0

    def read(self, size: int = -1) -> bytes:
        self.at = self.tell()
        self.data = self._read(size)
        return self.data


def _check_end(file: _LastRead, end: int) -> bool:
    """Look at what follows the last member; return whether that is the mark of an end.

    `tarfile` takes whatever is no header for it, and what was behind a damaged one would be lost.
    """
    if (file.at, len(file.data)) != (end, _BLOCK):
        file.seek(end)
        file.read(_BLOCK)
    piece = file.data
    if not piece:
        return False
    if len(piece) < _BLOCK or any(piece):
        raise tarfile.ReadError(f"at byte {end} there should be a header, and is none: damaged")
    at = end + _BLOCK
    while piece := file.read(_PIECE_BYTES):
        if any(piece):
            raise ValueError(
                f"there is more behind its end, from byte {at} on: archives that were put one "
                "after the other? Pack them anew, or as shards of their own"
            )
        at += len(piece)
    return True


def _all_by_name(file: IO[bytes]) -> dict[str, tarfile.TarInfo]:
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        return {posixpath.normpath(member.name): member for member in _members(tar)}


def _linked(member: tarfile.TarInfo) -> str:
    """Return the name that a link leads to: that of a symbolic one begins at its folder."""
    folder = posixpath.dirname(member.name) if member.issym() else ""
    return posixpath.normpath(posixpath.join(folder, member.linkname))


def _target(member: tarfile.TarInfo, by_name: dict[str, tarfile.TarInfo]) -> tarfile.TarInfo:
    for _ in range(_MAX_LINKS):
        if member.isreg():
            return member
        name = _linked(member)
        if name not in by_name:
            break
        member = by_name[name]
    raise tarfile.ReadError(f"{member.name} is a link to {member.linkname}, which is not there")


def _key_of(member: tarfile.TarInfo) -> tuple[str, str]:
    folder, name = posixpath.split(member.name)
    stem, _, extension = name.partition(".")
    return posixpath.join(folder, stem), extension
