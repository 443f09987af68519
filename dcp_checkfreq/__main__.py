"""``python -m dcp_checkfreq COMMAND``, and ``torchrun -m dcp_checkfreq run train.py ARGS``.

Python asks for this file by this name. What it does is in `cli.app` and `dropin.command_line`.
"""

from __future__ import annotations

import sys

from dcp_checkfreq.dropin.command_line import run_asked

if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run_asked(sys.argv[1:])  # `run` needs nothing of the other commands
    else:
        from dcp_checkfreq.cli.app import main

        main()
