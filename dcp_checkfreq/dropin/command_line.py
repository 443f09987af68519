"""``run [-m] SCRIPT ARGS``, as a command line has it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dcp_checkfreq.dropin.run import run


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what a command line that begins with "run" asks for; a wrong one ends the process."""
    parser = argparse.ArgumentParser("dcp-checkfreq")
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


def run_asked(arguments: Sequence[str]) -> None:
    """Run the script that a command line asks for."""
    asked = parsed(arguments)
    run(asked.script, asked.arguments, is_module=asked.is_module)
