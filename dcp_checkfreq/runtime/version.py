"""The version of this package, as it is written into checkpoints."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _installed

import torch

try:
    __version__ = _installed("dcp-checkfreq")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0"

WRITTEN_BY = f"dcp_checkfreq {__version__}, torch {torch.__version__}"
