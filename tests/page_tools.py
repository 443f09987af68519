"""The Python code on a page: whole scripts, and parts that build on each other."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = "## A whole script"


def blocks_of(text):
    """Return the Python blocks of a text, in their order."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def parted(page):
    """Return the blocks that are whole scripts, by their heading, and the others."""
    before, heading, after = (ROOT / page).read_text("utf-8").partition(f"{SCRIPT}\n")
    script, following, rest = after.partition("\n## ")
    assert not heading or len(blocks_of(script)) == 1, page
    return blocks_of(script), blocks_of(before + following + rest)
