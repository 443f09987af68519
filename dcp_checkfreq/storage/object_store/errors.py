"""What a remote storage's error means: try again, ask for new credentials, or give up, and why.

Clients raise errors of their own kinds. Here they become `OSError` with an errno and one line.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from dcp_checkfreq.errors import BadLocation

_PASSING = {
    "BandwidthLimitExceeded",
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_CLOCK = {"RequestTimeTooSkewed", "RequestInTheFuture"}
_OTHER_REGION = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
}
# What the codes of refusals mean, and what to do. Each refusal is of one whole request.
_ADVICE = {
    "AccessDenied": "the credentials are good, but their policy, or the bucket's, does not allow "
    "this request",
    "InvalidAccessKeyId": "the server does not know this access key: is it of another account, "
    "deleted, or of another endpoint",
    "InvalidToken": "the session token does not belong to the access key: give key, secret and "
    "token of one login",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key, or something "
    "between here and the server changes requests",
}
_NOTHING_DONE = "Nothing was read or written by this request"
_TAKEN = {"PreconditionFailed", "412"}
_DENIED_STATUS = {401, 403}
_NO_CREDENTIALS = {
    "CredentialRetrievalError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "TokenRetrievalError",
}
# Names, so that no client has to be imported to tell its errors: botocore, aiohttp, the builtins.
_BROKEN_LINE = {
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionError",
    "HTTPClientError",
    "IncompleteReadError",
    "ResponseParserError",
    "TimeoutError",
}
_OBSTORE_STATUS = re.compile(r"status code: (\d{3})")
_XML_FIELD = "<{0}>([^<]{{1,100}})</{0}>"
_XML_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_XML_MESSAGE = re.compile(r"<Message>([^<]{1,500})</Message>")


def code_of(error: BaseException) -> tuple[str, int]:
    """Return the server's error code and HTTP status; empty and 0 if it did not answer."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict) and "Error" in response:
            code = str(response["Error"].get("Code") or "")
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return code, int(status or (code if code.isdigit() else 0))
        if type(one).__module__.startswith("obstore") or _is_from_obstore(one):
            text = str(one)
            found, status_found = _XML_CODE.search(text), _OBSTORE_STATUS.search(text)
            return found[1] if found else "", int(status_found[1]) if status_found else 0
    return "", 0


def is_passing(error: BaseException) -> bool:
    """Tell whether the same call may work a little later: throttling, 5xx, a broken line."""
    code, status = code_of(error)
    if code in _PASSING or status in (408, 429) or (status >= 500 and status != 501):
        return True
    if code or status:
        return False
    if any(type(one).__name__ == "GenericError" for one in _chain(error)):
        return True  # obstore, without an answer of the server
    return any(kind.__name__ in _BROKEN_LINE for one in _chain(error) for kind in type(one).__mro__)


def is_expired(error: BaseException) -> bool:
    """Tell whether the credentials were good once and have run out, or may have.

    The answer to HEAD has no body, so it says 400 and no more.
    """
    return code_of(error)[0] in _EXPIRED or code_of(error)[0] == "400"


def is_taken(error: BaseException) -> bool:
    """Tell whether a conditional write found the name taken."""
    code, status = code_of(error)
    return isinstance(error, FileExistsError) or code in _TAKEN or status == 412


def is_unsupported(error: BaseException) -> bool:
    """Tell whether the server does not know what was asked for."""
    code, status = code_of(error)
    return status in (400, 501) or code in ("NotImplemented", "InvalidArgument")


def as_os_error(error: Exception, where: str, *, lost_secrets: bool = False) -> Exception:
    """Return the `OSError` for an error of a client, with one line of text.

    A missing bucket is a `BadLocation`; errors that are not the storage's are returned as they are.
    """
    code, status = code_of(error)
    if code == "NoSuchBucket":
        return BadLocation(where, "there is no such bucket")
    why = f"{code or status or type(error).__name__}: {_line(error)}"
    names = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    if code in _OTHER_REGION or status in (301, 307):
        return BadLocation(where, _told_region(error, why))
    if code in _CLOCK:
        return PermissionError(errno.EACCES, _told_clock(error, why), where)
    if code in _EXPIRED:
        return PermissionError(
            errno.EACCES,
            f"the credentials have expired, {why}. {_NOTHING_DONE}. Renew them: profile, "
            "environment and role are looked up again at the next call",
            where,
        )
    is_denied = code in _ADVICE or status in _DENIED_STATUS or isinstance(error, PermissionError)
    if names & _NO_CREDENTIALS or is_denied:
        if lost_secrets:
            why += (
                " (this was pickled into another process, without the keys in storage_options: "
                "give them there by a profile or the environment)"
            )
        if names & _NO_CREDENTIALS:
            why += (
                ". Give key= and secret= in storage_options, or a profile=, or set them in the "
                "environment; anon=True for a bucket that is open to all"
            )
        elif code in _ADVICE:
            why += f" ({_ADVICE[code]}). {_NOTHING_DONE}"
        return PermissionError(errno.EACCES, f"access denied, {why}", where)
    if isinstance(error, FileNotFoundError) or status == 404 or code == "NoSuchKey":
        return FileNotFoundError(errno.ENOENT, "no such object", where)
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, "is there already", where)
    if status == 412:
        return OSError(errno.ESTALE, "was replaced meanwhile", where)
    if names & {"TimeoutError", "ReadTimeoutError", "ConnectTimeoutError"}:
        return TimeoutError(errno.ETIMEDOUT, why, where)
    if isinstance(error, OSError) and error.errno and not code:
        return error
    # Never EIO: that says of a disk that what was written may be lost although a second try works.
    remote = errno.EBUSY if code in _PASSING else errno.EREMOTEIO
    if code or status or isinstance(error, OSError) or _is_of_a_client(error):
        return OSError(remote, why, where)
    return error


def lacks_a_reason(error: BaseException) -> bool:
    """Tell whether the server refused and has not said why: an answer to HEAD has no body."""
    code, status = code_of(error)
    return status in (301, 307, 400, 401, 403) and (not code or code.isdigit())


def _told_clock(error: BaseException, why: str) -> str:
    ours, theirs = field_of(error, "RequestTime"), field_of(error, "ServerTime")
    times = f" It was {ours} here and {theirs} there." if ours and theirs else ""
    return (
        f"the clock of this machine is wrong, {why}.{times} {_NOTHING_DONE}, and every other will "
        "be refused until the clock is set (NTP)"
    )


def _told_region(error: BaseException, why: str) -> str:
    region = field_of(error, "Region") or _header_of(error, "x-amz-bucket-region")
    endpoint = field_of(error, "Endpoint")
    where = f"region {region}" if region else "another region, or behind another endpoint"
    what = (
        f'client_kwargs={{"region_name": "{region}"}}' if region else "region_name in client_kwargs"
    )
    if endpoint:
        where += f", at {endpoint}"
    return f"the bucket is in {where} ({why}). {_NOTHING_DONE}. Give {what} in storage_options"


def field_of(error: BaseException, name: str) -> str:
    """Return a field of the server's error document; empty if it has none."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            return str(response["Error"].get(name) or "")
        found = re.search(_XML_FIELD.format(name), str(one))
        if found:
            return found[1]
    return ""


def _header_of(error: BaseException, name: str) -> str:
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            return str(headers.get(name) or "")
    return ""


def _is_from_obstore(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) and "Debug source" in str(error)


def _is_of_a_client(error: BaseException) -> bool:
    package = type(error).__module__.partition(".")[0]
    return package in ("aiobotocore", "aiohttp", "botocore", "fsspec", "obstore", "s3fs")


def _line(error: BaseException) -> str:
    """Return the server's own words, or the first line: obstore's text has a page of internals."""
    text = str(error)
    message = _XML_MESSAGE.search(text)
    if message:
        return message[1]
    return text.partition("\n")[0][:300]


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__
