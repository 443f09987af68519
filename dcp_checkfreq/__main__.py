"""``python -m dcp_checkfreq run train.py ARGS``, or ``torchrun -m dcp_checkfreq run ...``.

Python asks for this file by this name. What it does is in `dropin.run`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dcp_checkfreq.dropin.run import run


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what the command line asks for; on a wrong one the process ends, with 2."""
    parser = argparse.ArgumentParser("python -m dcp_checkfreq", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser(
        "run", help="run a training script: stock DCP saves and loads through dcp_checkfreq"
    )
    running.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    running.add_argument("script", metavar="SCRIPT")
    running.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    # argparse would take a `--` of the script's for its own
    end = next((at for at, text in enumerate(arguments) if at and not text.startswith("-")), None)
    end = len(arguments) if end is None else end + 1
    asked = parser.parse_args(arguments[:end])
    asked.arguments = list(arguments[end:])
    return asked


if __name__ == "__main__":
    asked = parsed(sys.argv[1:])
    run(asked.script, asked.arguments, is_module=asked.is_module)
