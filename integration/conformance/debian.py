"""Debian's source package of pytorch, by `apt-get source` from where this machine gets packages."""

from __future__ import annotations

import re
import subprocess
import tarfile
from pathlib import Path

SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
WANTED = "/test/distributed/"


def fetch(folder: Path, suite: str) -> Path:
    """Return a folder with pytorch's tests of distributed; downloads 40 MB unless they are there.

    Raises:
        FileNotFoundError: this machine is not set up as Debian does it; give a folder.
    """
    unpacked = folder / "unpacked"
    if not unpacked.is_dir():
        _unpack(_download(folder, suite), unpacked)
    return next(unpacked.iterdir())


def _download(folder: Path, suite: str) -> Path:
    paragraph = SOURCES.read_text().strip().split("\n\n")[0]
    found = dict(re.findall(r"^(URIs|Signed-By): *(\S+)", paragraph, re.MULTILINE))
    for name in ("lists/partial", "cache/archives/partial", "sources.d"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "sources.d" / "source.sources").write_text(
        f"Types: deb-src\nURIs: {found['URIs']}\nSuites: {suite}\nComponents: main\n"
        f"Signed-By: {found['Signed-By']}\n"
    )
    options = [
        f"-oDir::Etc::SourceParts={folder / 'sources.d'}",
        "-oDir::Etc::SourceList=/dev/null",
        f"-oDir::State::Lists={folder / 'lists'}",
        f"-oDir::Cache={folder / 'cache'}",
        "-oAPT::Sandbox::User=root",
    ]
    for command in (["update"], ["source", "--tar-only", "pytorch"]):
        subprocess.run(["apt-get", "-q", *options, *command], cwd=folder, check=True)
    (archive,) = folder.glob("pytorch_*.orig.tar.*")
    return archive


def _unpack(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as tar:
        wanted = [one for one in tar if WANTED in one.name and one.isfile()]
        tar.extractall(target, wanted, filter="data")
