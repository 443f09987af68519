"""The S3 server, and what it has stored, as another client sees it."""

import sys
import uuid
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "tests"))  # stock_fsspec

from server_fixtures import proxy, weed
from servers import BUCKET, KEY, SECRET

__all__ = ["proxy", "weed"]  # fixtures


@pytest.fixture
def root():
    """A URL that nobody has used before."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def boto(weed):
    """The storage as it is, seen by another client, past the proxy."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=weed.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )


@pytest.fixture
def stored(boto):
    """Return what lies under a URL: sizes by relative key. No upload may be unfinished there."""

    def look(url):
        prefix = url.removeprefix(f"s3://{BUCKET}/").rstrip("/") + "/"
        pages = boto.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {
            item["Key"][len(prefix) :]: item["Size"]
            for page in pages
            for item in page.get("Contents", [])
        }

    return look


@pytest.fixture
def uploads(boto):
    """Return the keys of unfinished uploads under a URL."""

    def look(url):
        prefix = url.removeprefix(f"s3://{BUCKET}/")
        found = boto.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [upload["Key"] for upload in found if upload["Key"].startswith(prefix)]

    return look
