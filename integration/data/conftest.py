"""The S3 server of `integration/s3`, for data in a bucket."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "s3"))

from server_fixtures import proxy, weed

__all__ = ["proxy", "weed"]  # fixtures
