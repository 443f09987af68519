"""The script on the page for object storage runs as it stands, but for the port of the server."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "object-storage.md"
SCRIPT = PAGE.read_text("utf-8").split("## A whole script\n")[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", SCRIPT, re.M | re.S)
CHECK = """
assert found.step == 10
assert find_latest_valid("s3://checkpoints/run4", depth="digest", storage_options=s3) is not None
"""


def test_the_example_saves_finds_and_loads(weed, tmp_path):
    (code,) = [code for code in BLOCKS if "s3://" in code]
    assert "http://127.0.0.1:8333" in code
    code = code.replace("http://127.0.0.1:8333", weed.endpoint) + CHECK
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
