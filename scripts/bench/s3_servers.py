"""The servers of `integration/s3`, for the benchmark too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integration" / "s3"))

from servers import KEY, SECRET, Proxy, Weed, running_weed

__all__ = ["KEY", "SECRET", "Proxy", "Weed", "running_weed"]
