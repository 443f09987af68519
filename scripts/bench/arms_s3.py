"""The ways to save to and load from an S3 server, and what plain HTTP reaches on it."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch.distributed.checkpoint as dcp

from harness import Ranks
from limits import huge_buffers
from s3_servers import KEY, SECRET
from states import State, local_bytes, nested
from stock_fsspec import FsspecReader, FsspecWriter

PART_BYTES = 16 << 20
READ_BYTES = 8 << 20
HTTP_THREADS = 2
BOTO_THREADS = 4
REGION = "us-east-1"

Counts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Place:
    """A folder in a bucket of a server."""

    endpoint: str
    bucket: str
    key: str = ""

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}".rstrip("/")

    @property
    def options(self) -> dict[str, Any]:
        return {"endpoint_url": self.endpoint, "key": KEY, "secret": SECRET}

    def below(self, name: str) -> Place:
        return Place(self.endpoint, self.bucket, f"{self.key}/{name}".strip("/"))

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id=KEY,
            aws_secret_access_key=SECRET, region_name=REGION,
        )  # fmt: skip

    def dump(self) -> str:
        return json.dumps([self.endpoint, self.bucket, self.key])

    @staticmethod
    def load(text: str) -> Place:
        return Place(*json.loads(text))


def set_environment(endpoint: str) -> None:
    """Say where the server is to those that take it from the environment only."""
    os.environ.update(
        AWS_ENDPOINT_URL=endpoint, AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET,
        AWS_REGION=REGION, AWS_EC2_METADATA_DISABLED="true",
    )  # fmt: skip


# --- saves -----------------------------------------------------------------------------------


def _save_ours(state: State, place: Place, ranks: Ranks) -> None:
    from dcp_checkfreq import CheckFreqWriter

    _dcp_save(state, CheckFreqWriter(place.url, storage_options=place.options))


def _save_ours_s3fs(state: State, place: Place, ranks: Ranks) -> None:
    from dcp_checkfreq.storage.object_store.s3_files import S3Files

    S3Files.move_with = "s3fs"
    try:
        _save_ours(state, place, ranks)
    finally:
        S3Files.move_with = "auto"


def _save_fsspec(state: State, place: Place, ranks: Ranks) -> None:
    _dcp_save(state, FsspecWriter(place.url, **place.options))


def _save_s3torch(state: State, place: Place, ranks: Ranks) -> None:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageWriter

    config = S3ClientConfig(force_path_style=True)
    _dcp_save(state, S3StorageWriter(region=REGION, path=place.url, s3client_config=config))


def _save_boto3(state: State, place: Place, ranks: Ranks) -> None:
    client = place.client()
    key = place.below(f"rank{ranks.rank}.raw").key
    upload = _begin(client, place, key)
    source = huge_buffers()[0]

    def send(number: int, size: int) -> dict[str, Any]:
        body = bytes(source) * (size // len(source)) + bytes(source[: size % len(source)])
        answer = client.upload_part(PartNumber=number, Body=body, **upload)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    with ThreadPoolExecutor(BOTO_THREADS, thread_name_prefix="bench-boto3") as pool:
        parts = list(pool.map(send, *_parts(local_bytes(state))))
    client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **upload)


def _save_http(state: State, place: Place, ranks: Ranks) -> None:
    client = place.client()
    key = place.below(f"rank{ranks.rank}.raw").key
    upload = _begin(client, place, key)
    source = huge_buffers()[0]
    lines = _Lines(place.endpoint)

    def send(number: int, size: int) -> dict[str, Any]:
        url = client.generate_presigned_url("upload_part", {"PartNumber": number, **upload})
        body = [source[: min(len(source), size - at)] for at in range(0, size, len(source))]
        answer = lines.ask("PUT", url, body, {"Content-Length": str(size)})
        answer.read()
        if answer.status != 200:
            raise OSError(f"{answer.status} for part {number}")
        return {"PartNumber": number, "ETag": answer.headers["ETag"]}

    with ThreadPoolExecutor(HTTP_THREADS, thread_name_prefix="bench-http") as pool:
        parts = list(pool.map(send, *_parts(local_bytes(state))))
    client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **upload)


def _begin(client: Any, place: Place, key: str) -> dict[str, str]:
    made = client.create_multipart_upload(Bucket=place.bucket, Key=key)
    return {"Bucket": place.bucket, "Key": key, "UploadId": made["UploadId"]}


def _parts(size_bytes: int) -> tuple[list[int], list[int]]:
    sizes = [min(PART_BYTES, size_bytes - at) for at in range(0, size_bytes, PART_BYTES)]
    return list(range(1, len(sizes) + 1)), sizes


class _Lines:
    """One connection per thread."""

    def __init__(self, endpoint: str) -> None:
        self._host = urlsplit(endpoint).netloc
        self._own = threading.local()

    def ask(self, method: str, url: str, body: Any, headers: dict[str, str]) -> Any:
        if not hasattr(self._own, "line"):
            self._own.line = http.client.HTTPConnection(self._host)
        parts = urlsplit(url)
        self._own.line.request(method, f"{parts.path}?{parts.query}", body, headers)
        return self._own.line.getresponse()


def _dcp_save(state: State, writer: dcp.StorageWriter) -> None:
    dcp.save(nested(state), storage_writer=writer)


# --- loads -----------------------------------------------------------------------------------


def _load_ours(state: State, place: Place, ranks: Ranks) -> Counts:
    from dcp_checkfreq import CheckFreqReader

    reader = CheckFreqReader(place.url, storage_options=place.options)
    dcp.load(nested(state), storage_reader=reader)
    return {"counted_read_bytes": reader.bytes_read, "counted_needed_bytes": reader.bytes_needed}


def _load_ours_s3fs(state: State, place: Place, ranks: Ranks) -> Counts:
    from dcp_checkfreq.storage.object_store.s3_files import S3Files

    S3Files.move_with = "s3fs"
    try:
        return _load_ours(state, place, ranks)
    finally:
        S3Files.move_with = "auto"


def _load_fsspec(state: State, place: Place, ranks: Ranks) -> Counts:
    dcp.load(nested(state), storage_reader=FsspecReader(place.url, **place.options))
    return {}


def _load_s3torch(state: State, place: Place, ranks: Ranks) -> Counts:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader

    config = S3ClientConfig(force_path_style=True)
    reader = S3StorageReader(region=REGION, path=place.url, s3client_config=config)
    dcp.load(nested(state), storage_reader=reader)
    return {}


def _load_boto3(state: State, place: Place, ranks: Ranks) -> Counts:
    client = place.client()
    key = place.below(f"rank{ranks.rank}.raw").key

    def get(at: int, size: int) -> None:
        ask = f"bytes={at}-{at + size - 1}"
        body = client.get_object(Bucket=place.bucket, Key=key, Range=ask)["Body"].read()
        if len(body) != size:
            raise EOFError(f"{len(body)} of {size} bytes")

    with ThreadPoolExecutor(BOTO_THREADS, thread_name_prefix="bench-boto3") as pool:
        list(pool.map(get, *_ranges(local_bytes(state))))
    return {}


def _load_http(state: State, place: Place, ranks: Ranks) -> Counts:
    client = place.client()
    key = place.below(f"rank{ranks.rank}.raw").key
    lines = _Lines(place.endpoint)
    buffers, free = huge_buffers(), list(range(HTTP_THREADS))

    def get(at: int, size: int) -> None:
        number = free.pop()
        url = client.generate_presigned_url("get_object", {"Bucket": place.bucket, "Key": key})
        answer = lines.ask("GET", url, None, {"Range": f"bytes={at}-{at + size - 1}"})
        target, done = buffers[number][:size], 0
        while done < size:
            got = answer.readinto(target[done:])
            if not got:
                raise EOFError(f"{done} of {size} bytes")
            done += got
        answer.read()
        free.append(number)

    with ThreadPoolExecutor(HTTP_THREADS, thread_name_prefix="bench-http") as pool:
        list(pool.map(get, *_ranges(local_bytes(state))))
    return {}


def _ranges(size_bytes: int) -> tuple[list[int], list[int]]:
    starts = list(range(0, size_bytes, READ_BYTES))
    return starts, [min(READ_BYTES, size_bytes - at) for at in starts]


@dataclass(frozen=True, slots=True)
class S3LoadArm:
    """One way to load, and whose objects it reads."""

    load: Callable[[State, Place, Ranks], Counts]
    saved_by: str
    reshards: bool = True
    is_limit: bool = False


S3_SAVE_ARMS: dict[str, Callable[[State, Place, Ranks], None]] = {
    "ours": _save_ours,
    "ours_s3fs": _save_ours_s3fs,
    "stock_fsspec": _save_fsspec,
    "s3torch": _save_s3torch,
    "boto3": _save_boto3,
    "limit_http": _save_http,
}
S3_LOAD_ARMS: dict[str, S3LoadArm] = {
    "ours": S3LoadArm(_load_ours, "ours"),
    "ours_s3fs": S3LoadArm(_load_ours_s3fs, "ours"),
    "stock_fsspec": S3LoadArm(_load_fsspec, "stock_fsspec"),
    "s3torch": S3LoadArm(_load_s3torch, "s3torch"),
    "boto3": S3LoadArm(_load_boto3, "limit_http", reshards=False, is_limit=True),
    "limit_http": S3LoadArm(_load_http, "limit_http", reshards=False, is_limit=True),
}
