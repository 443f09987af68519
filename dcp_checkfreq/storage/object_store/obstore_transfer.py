"""Moves bytes to and from S3 with obstore: from the snapshot's memory, without the GIL.

Options and credentials are those of s3fs, which stays the one who knows them. Options that have no
counterpart here make `Store.fits` False; s3fs then moves the bytes too.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import importlib.util
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.storage.object_store.options import Options
from dcp_checkfreq.storage.object_store.parts import PARTS_IN_FLIGHT, fill

# A part that takes longer is sent again; 16 MiB in this time is 140 KiB/s.
_REQUEST_TIMEOUT_S = 120
_CREDENTIALS_FOR_S = 900.0  # then s3fs's session is asked again

_KNOWN = {
    "anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "password", "profile",
    "requester_pays", "s3_additional_kwargs", "secret", "token", "use_ssl", "username",
    # of s3fs itself, nothing to do with requests
    "cache_regions", "default_block_size", "default_cache_type", "default_fill_cache",
    "max_concurrency", "use_listings_cache",
}  # fmt: skip
_KNOWN_OF_CLIENT = {"endpoint_url", "region_name", "use_ssl", "verify"}
_KNOWN_OF_CONFIG = {"connect_timeout", "max_pool_connections", "read_timeout", "retries"}
_KNOWN_OF_REQUESTS = {"ServerSideEncryption", "SSEKMSKeyId"}

# obstore runs its threads from the first use on. A forked child has none of them and would wait
# for ever, so there s3fs moves the bytes.
_started_in = 0


def usable() -> bool:
    """Tell whether obstore is installed and can be used in this process."""
    return _started_in in (0, os.getpid()) and importlib.util.find_spec("obstore") is not None


class Store:
    """The buckets that one set of options opens."""

    def __init__(
        self, fs: Any, options: Options, retry_for_s: float, clock: Clock | None = None
    ) -> None:
        global _started_in
        _started_in = os.getpid()
        self._pid = os.getpid()
        self._fs = fs
        self._options = options.all()
        self._retry_for = datetime.timedelta(seconds=retry_for_s)
        self._clock = clock or SystemClock()
        self._buckets: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.fits = _fits(self._options)

    def pid_differs(self) -> bool:
        """Tell whether this was made before a fork."""
        return self._pid != os.getpid()

    def put(
        self, bucket: str, key: str, pieces: Iterable[memoryview], size_bytes: int, part: int
    ) -> None:
        """Upload an object from where its pieces lie: in one request, or in parts."""
        import obstore

        obstore.put(
            self.open(bucket),
            key,
            iter(pieces),
            use_multipart=size_bytes > part,
            chunk_size=part,
            max_concurrency=PARTS_IN_FLIGHT,
        )

    def get(self, bucket: str, key: str, offset: int, target: memoryview, etag: str) -> None:
        """Fill ``target`` from ``offset`` on; an error if the object is of another etag."""
        import obstore

        if len(target):
            end = offset + len(target)
            answer = obstore.get(
                self.open(bucket), key, options={"range": (offset, end), "if_match": etag}
            )
            fill(target, answer.buffer(), key)

    def open(self, bucket: str) -> Any:
        """Return obstore's own object for a bucket; on AWS the first time asks for its region."""
        with self._lock:
            if bucket not in self._buckets:
                self._buckets[bucket] = self._open(bucket)
            return self._buckets[bucket]

    def _open(self, bucket: str) -> Any:
        from obstore.store import S3Store

        meta = self._fs.s3.meta
        config: dict[str, Any] = {"unsigned_payload": True, "region": meta.region_name}
        if _is_aws(meta.endpoint_url):
            # obstore follows no redirects to another region.
            with contextlib.suppress(PermissionError):  # then it has to be the session's own
                answer = self._fs.call_s3("head_bucket", Bucket=bucket)
                headers = answer["ResponseMetadata"]["HTTPHeaders"]
                config["region"] = headers.get("x-amz-bucket-region", meta.region_name)
        else:
            config["endpoint"] = meta.endpoint_url
            config["region"] = meta.region_name or "us-east-1"
        more = self._options.get("s3_additional_kwargs", {})
        if "ServerSideEncryption" in more:
            config["server_side_encryption"] = more["ServerSideEncryption"]
        if "SSEKMSKeyId" in more:
            config["sse_kms_key_id"] = more["SSEKMSKeyId"]
        if self._options.get("requester_pays"):
            config["request_payer"] = True
        if self._options.get("anon"):
            config["skip_signature"] = True
        else:
            config["credential_provider"] = self._credentials
        return S3Store(
            bucket,
            client_options=self._client_options(meta.endpoint_url),
            retry_config={
                "max_retries": 100,  # the time is what bounds it
                "retry_timeout": self._retry_for,
                "backoff": {
                    "init_backoff": datetime.timedelta(seconds=0.1),
                    "max_backoff": datetime.timedelta(seconds=15),
                    "base": 2,
                },
            },
            **config,
        )

    def _client_options(self, endpoint: str) -> Any:
        client: dict[str, Any] = {
            "timeout": datetime.timedelta(seconds=_REQUEST_TIMEOUT_S),
            "connect_timeout": datetime.timedelta(seconds=10),
            "allow_http": endpoint.startswith("http://"),
        }
        verify = self._options.get("client_kwargs", {}).get("verify")
        if verify is None and self._fs.session is not None:
            verify = self._fs.session.get_config_variable("ca_bundle")
        if verify is False:
            client["allow_invalid_certificates"] = True
        elif isinstance(verify, str):
            client["root_certificate"] = Path(verify).read_bytes()
        return client

    def _credentials(self) -> dict[str, Any]:
        """Return what s3fs signs with now. Called by obstore, from a thread of its own."""
        until = datetime.datetime.fromtimestamp(
            self._clock.wall_s() + _CREDENTIALS_FOR_S, tz=datetime.timezone.utc
        )
        fs = self._fs
        if fs.key is not None:
            return _as_provided(fs.key, fs.secret, fs.token, until)
        from fsspec.asyn import sync

        async def frozen() -> Any:
            held = await fs.session.get_credentials()
            return None if held is None else await held.get_frozen_credentials()

        now = sync(fs.loop, frozen)
        if now is None:
            raise PermissionError(errno.EACCES, "no credentials were found")
        return _as_provided(now.access_key, now.secret_key, now.token, until)


def _as_provided(
    key: str, secret: str, token: str | None, until: datetime.datetime
) -> dict[str, Any]:
    return {
        "access_key_id": key,
        "secret_access_key": secret,
        "token": token,
        "expires_at": until,
    }


def _is_aws(endpoint: str) -> bool:
    host = endpoint.partition("://")[2].partition("/")[0].partition(":")[0]
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _fits(options: dict[str, Any]) -> bool:
    """Tell whether every option has a counterpart in obstore."""
    return (
        options.keys() <= _KNOWN
        and options.get("client_kwargs", {}).keys() <= _KNOWN_OF_CLIENT
        and options.get("config_kwargs", {}).keys() <= _KNOWN_OF_CONFIG
        and options.get("s3_additional_kwargs", {}).keys() <= _KNOWN_OF_REQUESTS
    )
