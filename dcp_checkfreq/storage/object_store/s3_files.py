"""Objects in S3, through the client that s3fs makes; their bytes through obstore where it can.

s3fs brings what it is good at: options, profiles, credentials, endpoints. Its requests are used one
by one, so that it is known what was asked and what was answered.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dcp_checkfreq.errors import BadLocation
from dcp_checkfreq.runtime.crew import Crew, Task
from dcp_checkfreq.storage.object_store import obstore_transfer
from dcp_checkfreq.storage.object_store.errors import (
    as_os_error,
    code_of,
    is_expired,
    is_unsupported,
    lacks_a_reason,
)
from dcp_checkfreq.storage.object_store.fsspec_files import (
    CLEANING_FOR_S,
    FsspecFiles,
    Head,
)
from dcp_checkfreq.storage.object_store.parts import (
    COPIED_PARTS_IN_FLIGHT,
    checked,
    fill,
    gathered,
    in_parts,
    part_bytes,
)
from dcp_checkfreq.storage.tier import LARGEST_SMALL_FILE_BYTES, Entry, StaleCredentials, check_size

_log = logging.getLogger(__name__)

_MARK = "checkfreq-write"  # metadata of what was written conditionally: which call it was


class S3Files(FsspecFiles):
    """See `FsspecFiles`. ``move_with`` is for tests and measurements."""

    has_folders = False
    move_with = "auto"  # or "s3fs"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._store: obstore_transfer.Store | None = None
        self._told = False

    def make_locks(self) -> None:
        """Make the locks of this object, also anew after a fork."""
        self._store_lock = threading.Lock()

    def _own_options(self) -> dict[str, Any]:
        # Trying again is decided in one place, `call`, and neither by botocore nor by s3fs.
        given = self.options.all()
        config = {
            "connect_timeout": 10,
            "read_timeout": 60,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": 32,
            **given.get("config_kwargs", {}),
        }
        return {**super()._own_options(), "config_kwargs": config}

    def _make(self) -> Any:
        given = self.options.all()
        for where in (given, given.get("client_kwargs", {})):
            if "@" in str(where.get("endpoint_url") or ""):  # no client takes it; it is not shown
                raise BadLocation("endpoint_url", "give credentials as key= and secret= instead")
        fs = super()._make()
        fs.retries = 1
        return fs

    def renew(self) -> None:
        """Make a new session, which reads profiles and environment again, at the next call."""
        super().renew()
        with self._store_lock:
            self._store = None

    def _reason(self, fs: Any, path: str) -> Exception | None:
        """Ask for one byte, or one name: the answer to HEAD has no body that could say why."""
        bucket, key, _ = fs.split_path(path)
        try:
            if key:
                _get(fs, path, Range="bytes=0-0")
            else:
                fs.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
        except Exception as error:  # noqa: BLE001  it is looked at, and raised by the caller
            if code_of(error)[1] in (301, 307, 400, 401, 403) and not lacks_a_reason(error):
                return error
        return None

    # --- small things ---

    def _head(self, fs: Any, path: str) -> Head:
        bucket, key, _ = fs.split_path(path)
        if not key:
            raise FileNotFoundError(errno.ENOENT, "a bucket is no file", path)
        answer = fs.call_s3("head_object", Bucket=bucket, Key=key)
        return Head(answer["ContentLength"], answer["ETag"])

    def _entries(self, fs: Any, path: str) -> list[Entry]:
        bucket, key, _ = fs.split_path(path)
        prefix = f"{key}/" if key else ""
        entries = []
        page: dict[str, Any] = {}
        more: dict[str, str] = {}
        while not page or page.get("IsTruncated"):
            page = fs.call_s3(
                "list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", **more
            )
            more = {"ContinuationToken": page.get("NextContinuationToken", "")}
            for folder in page.get("CommonPrefixes", []):
                name = folder["Prefix"][len(prefix) : -1]
                entries.append(Entry(name, True, 0, 0.0))
            for item in page.get("Contents", []):
                name = item["Key"][len(prefix) :]
                if name:  # an object named like the folder itself is how some tools mark it
                    modified_s = item["LastModified"].timestamp()
                    entries.append(Entry(name, False, item["Size"], modified_s))
        return entries

    def _read(self, fs: Any, path: str, at_most_bytes: int) -> bytes:
        return _get(fs, path, at_most_bytes)

    def _write(self, fs: Any, path: str, data: bytes, mark: str = "", **more: Any) -> object:
        bucket, key, _ = fs.split_path(path)
        if mark:
            more["Metadata"] = {_MARK: mark}
        return fs.call_s3("put_object", Bucket=bucket, Key=key, Body=data, **more).get("ETag")

    def _write_if_absent(self, fs: Any, path: str, data: bytes, mark: str) -> None:
        self._write(fs, path, data, mark, IfNoneMatch="*")

    def _write_if_same(
        self, fs: Any, path: str, data: bytes, mark: str, held: bytes, version: object
    ) -> None:
        if version is None:
            version = self._head(fs, path).version
            if (
                self._read(fs, path, LARGEST_SMALL_FILE_BYTES) != held
            ):  # if it changes after this, the version differs
                raise FileExistsError(errno.EEXIST, "holds something else by now", path)
        self._write(fs, path, data, mark, IfMatch=version)

    def _wrong_version(self) -> object:
        return f'"{"0" * 32}"'

    def _is_mine(self, fs: Any, path: str, data: bytes, mark: str) -> bool:
        bucket, key, _ = fs.split_path(path)
        answer = fs.call_s3("head_object", Bucket=bucket, Key=key)
        return bool(answer.get("Metadata", {}).get(_MARK) == mark)

    def _refuses(self, error: Exception) -> bool:
        return super()._refuses(error) or is_unsupported(error)

    def _delete(self, fs: Any, path: str) -> None:
        bucket, key, _ = fs.split_path(path)
        fs.call_s3("delete_object", Bucket=bucket, Key=key)

    def make_folder(self, path: str) -> None:
        """Do nothing: a folder is there when something is in it."""

    def remove_folder(self, path: str) -> None:
        """Remove the object that some tools and servers mark an empty folder with."""
        if not self.entries(path):
            self.delete(f"{path}/")

    # --- large ones ---

    def _mover(self) -> obstore_transfer.Store | None:
        """Return what moves bytes faster than s3fs does; None if it cannot be used here."""
        if self.move_with != "auto":
            return None
        why_not = "it is not installed, or was used before a fork"
        if obstore_transfer.usable():
            with self._store_lock:
                if self._store is None or self._store.pid_differs():
                    self._store = obstore_transfer.Store(self.fs, self.options, self.retry_for_s)
                if self._store.fits:
                    return self._store
            why_not = "an option has no counterpart there"
        if not self._told:
            self._told = True
            _log.info("s3fs moves the bytes, not obstore: %s", why_not)
        return None

    def upload(self, path: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Write a new object; after any error no object, and no upload, is left.

        Raises:
            StaleCredentials: they ran out on the way; new ones are asked for at the next call.
        """
        given = gathered(checked(pieces, size_bytes, path))
        bucket, key, _ = self.fs.split_path(path)
        failed: list[BaseException] = []

        def guarded() -> Iterator[memoryview]:
            try:
                yield from given
            except GeneratorExit:
                raise
            except BaseException as error:
                failed.append(error)
                raise

        try:
            store = self._mover()
            part = part_bytes(size_bytes)
            if store is not None:
                self.call(path, lambda fs: store.open(bucket))
                self._through(path, lambda: store.put(bucket, key, guarded(), size_bytes, part))
            elif size_bytes <= part:
                self.write(path, b"".join(guarded()))
            else:
                self._upload_parts(path, in_parts(guarded(), part))
        except BaseException as error:
            self._clear(path, bucket, key)
            if failed and error is not failed[0]:
                raise failed[0] from None
            raise

    def _through(self, path: str, work: Callable[[], None]) -> None:
        """Run what obstore does, which tries again by itself; never twice, the pieces are gone."""
        try:
            work()
        except Exception as error:
            if is_expired(error):
                self.renew()
                raise StaleCredentials(
                    errno.EACCES, "the credentials have expired", path
                ) from error
            translated = as_os_error(error, path, lost_secrets=self.options.lost_secrets)
            if translated is error:
                raise
            raise translated from error

    def _upload_parts(self, path: str, parts: Iterable[list[memoryview]]) -> None:
        bucket, key, _ = self.fs.split_path(path)
        made = self.call(
            path, lambda fs: fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        )
        upload = {"Bucket": bucket, "Key": key, "UploadId": made["UploadId"]}

        def send(number: int, data: bytes) -> dict[str, Any]:
            answer = self.call(
                path,
                lambda fs: fs.call_s3("upload_part", PartNumber=number, Body=data, **upload),
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        sent: list[Task[dict[str, Any]]] = []
        at_once = COPIED_PARTS_IN_FLIGHT
        with Crew(at_once, "checkfreq-part") as crew:
            try:
                for number, part in enumerate(parts, start=1):
                    if len(sent) >= at_once:
                        sent[-at_once].result()
                    sent.append(crew.start(functools.partial(send, number, b"".join(part))))
                done = [job.result() for job in sent]
            except BaseException:
                for job in sent:
                    job.cancel()
                raise
        self.call(
            path,
            lambda fs: fs.call_s3(
                "complete_multipart_upload", MultipartUpload={"Parts": done}, **upload
            ),
        )

    def _clear(self, path: str, bucket: str, key: str) -> None:
        """Take back an upload of unknown state. The name is this attempt's alone."""
        # Whatever fails here was failing already; it must not hide why.
        with contextlib.suppress(Exception):
            self._clear_once(path, bucket, key)
            return
        _log.warning(
            "%s: an upload that failed could not be taken back; the next restore, or the bucket's "
            "rule for incomplete uploads, removes it",
            path,
        )

    def _clear_once(self, path: str, bucket: str, key: str) -> None:
        def abort(fs: Any) -> None:
            found = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)
            for upload in found.get("Uploads", []):
                if upload["Key"] == key:
                    fs.call_s3(
                        "abort_multipart_upload",
                        Bucket=bucket,
                        Key=key,
                        UploadId=upload["UploadId"],
                    )

        self.call(path, abort, for_s=CLEANING_FOR_S)
        self.delete(path)

    def abort_uploads(
        self, path: str, is_ours: Callable[[str], bool], before_s: float
    ) -> list[str]:
        """Abort unfinished uploads below ``path`` that were begun before ``before_s``."""
        return self.call(path, lambda fs: _abort_below(fs, path, is_ours, before_s))

    def read_range(self, path: str, offset: int, target: memoryview, head: Head) -> None:
        """Fill ``target`` from ``offset`` on, from the version that ``head`` is of."""

        def get(fs: Any) -> None:
            bucket, key, _ = fs.split_path(path)
            store = self._mover()
            if store is not None:
                store.get(bucket, key, offset, target, str(head.version))
            else:
                span = f"bytes={offset}-{offset + len(target) - 1}"
                fill(target, _get(fs, path, Range=span, IfMatch=head.version), path)

        self.call(path, get)


def _get(fs: Any, path: str, at_most_bytes: int = LARGEST_SMALL_FILE_BYTES, **more: Any) -> bytes:
    """Return an object or a part of it, in one request."""
    from fsspec.asyn import sync

    bucket, key, _ = fs.split_path(path)
    answer = fs.call_s3("get_object", Bucket=bucket, Key=key, **more)

    async def content() -> bytes:
        async with answer["Body"] as body:  # closes the line if it broke
            check_size(answer["ContentLength"], at_most_bytes, path)
            return bytes(await body.read())

    return bytes(sync(fs.loop, content))


def _abort_below(fs: Any, path: str, is_ours: Callable[[str], bool], before_s: float) -> list[str]:
    bucket, key, _ = fs.split_path(path)
    prefix = f"{key}/" if key else ""
    found: list[dict[str, Any]] = []
    page: dict[str, Any] = {}
    more: dict[str, str] = {}
    while not page or page.get("IsTruncated"):
        page = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
        more = {
            "KeyMarker": page.get("NextKeyMarker", ""),
            "UploadIdMarker": page.get("NextUploadIdMarker", ""),
        }
        found += page.get("Uploads", [])
    aborted = []
    for upload in found:
        below = upload["Key"][len(prefix) :]
        if upload["Initiated"].timestamp() < before_s and is_ours(below):
            with contextlib.suppress(FileNotFoundError):  # finished, or aborted by another
                fs.call_s3(
                    "abort_multipart_upload",
                    Bucket=bucket,
                    Key=upload["Key"],
                    UploadId=upload["UploadId"],
                )
            aborted.append(below)
    return aborted
