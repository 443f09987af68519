"""The pages say what the code says, and their links lead somewhere."""

import ast
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

from dcp_checkfreq import errors
from dcp_checkfreq.format.index import Columns, Record, encode
from dcp_checkfreq.format.metadata import MAGIC

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
FOLDERS = sorted(path.parent for path in (ROOT / "dcp_checkfreq").glob("**/__init__.py"))[1:]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
ERRORS = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)
          if cls.__module__ == errors.__name__]  # fmt: skip


def text_of(page):
    return page.read_text("utf-8")


def prose_of(page):
    """Return the text without its blocks of code, in which brackets are no links."""
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)


def anchors_of(page):
    """Return the anchors that GitHub gives to the headings of a page."""
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", prose_of(page), re.M):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        anchors.add(plain.replace(" ", "-"))
    return anchors


def sections_of(page):
    """Return heading to text, for the headings of the second level."""
    parts = re.split(r"^## (.*)$", text_of(page), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def named(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target}: there is no such file"
        assert found.is_relative_to(ROOT), f"{target} leads out of the repository"
        if anchor:
            assert anchor in anchors_of(found), f"{target}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_line_has_one_sentence(page):
    for line in prose_of(page).splitlines():
        if line.startswith(("|", "    ")):
            continue
        plain = re.sub(r"`[^`]*`|\]\([^)]*\)|^\W*\d+\. |^\W*\*+[^*]*[.?]\*+ ", "]", line)
        outside = re.sub(r"\([^()]*\)", "", plain)
        assert not re.search(r"\w\w[\])]?[.?!] +[\[*]*[A-Z\]]", outside), f"split it: {line}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_path_that_is_named_exists(page):
    known = r"`((?:tests|integration|scripts|dcp_checkfreq|docs)/[\w./-]*)`"
    for path in re.findall(known, prose_of(page)):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("cls", ERRORS)
def test_every_error_has_a_heading_with_its_exit_code(cls):
    section = sections_of(DOCS / "troubleshooting.md").get(cls.__name__)
    assert section is not None, "docs/troubleshooting.md has no heading for it"
    assert re.findall(r"Exit code (\d+)", section) == [str(cls.exit_code)]


def test_no_heading_is_for_an_error_that_is_gone():
    assert set(sections_of(DOCS / "troubleshooting.md")) == {cls.__name__ for cls in ERRORS}


def test_the_format_page_names_every_key_of_the_record_and_the_magic():
    page = text_of(DOCS / "format.md")
    columns = Columns(payload_offset=[], payload_bytes=[], block_bytes=[], digests=[])
    keys = encode(Record(attempt="", world_size=1, files={}, columns=columns))
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == set(keys)
    assert MAGIC.hex(" ") in page


def test_the_architecture_page_gives_each_folder_its_level():
    levels = loaded("test_layers", ROOT / "tests" / "test_layers.py").LEVELS
    rows = re.findall(r"^\| (\d+) \| \[`(\w+)`\]", text_of(DOCS / "architecture.md"), re.M)
    assert {name: int(level) for level, name in rows} == levels


@pytest.mark.parametrize("folder", FOLDERS, ids=named)
def test_a_folder_says_what_its_files_are(folder):
    said = ast.get_docstring(ast.parse(text_of(folder / "__init__.py"))) or ""
    inside = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    inside |= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert inside <= set(re.findall(r"`([\w.]+)`", said))


def test_every_page_is_in_the_index():
    index = text_of(DOCS / "index.md")
    for page in DOCS.glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index, page.name


def test_every_name_in_the_code_that_the_glossary_gives_a_symbol_is_one():
    names = re.findall(r"^\| [\w, ]+ \| ([^|]*`[^|]*) \|", text_of(DOCS / "glossary.md"), re.M)
    code = "".join(path.read_text("utf-8") for path in (ROOT / "dcp_checkfreq").rglob("*.py"))
    known = [name for cell in names for name in re.findall(r"`(\w+)`", cell)]
    assert len(known) >= 10
    assert [name for name in known if not re.search(rf"\b{name}\b", code)] == []


def test_every_decision_is_in_the_index():
    index = text_of(DOCS / "index.md")
    for page in DOCS.glob("decisions/*.md"):
        assert f"decisions/{page.name}" in index
        body = text_of(page)
        for part in ("Question", "Choice", "Rejected", "Measured", "What would change our mind"):
            assert f"**{part}.**" in body, f"{page.name} lacks {part}"


def test_what_a_decision_says_its_code_prints_is_what_it_prints():
    pattern = r"^```python\n(.*?)^```$.*?^```text\n(.*?)^```$"
    found = 0
    for page in DOCS.glob("decisions/*.md"):
        for code, output in re.findall(pattern, text_of(page), re.M | re.S):
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            )
            assert done.stdout == output, page.name
            found += 1
    assert found


def test_the_benchmark_page_has_every_goal_with_its_bound():
    goals = loaded("goals", ROOT / "scripts" / "bench" / "goals.py")
    page = text_of(DOCS / "benchmarks.md")
    row = r"^\| ([^|]+) \| (\w+) \| (\w+), ([^|]+) \| (at \w+ [^|]+) \|"
    rows = re.findall(row, page, re.M)
    assert rows == [
        (goal.text, goal.bench, goal.state, goal.ranks,
         f"{'at least' if goal.at_least else 'at most'} {goal.bound:,}")
        for goal in goals.GOALS
    ]  # fmt: skip


def loaded(name, path):
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_test_docs", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module
