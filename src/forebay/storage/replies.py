"""What an object store answered, or did not, as one line that says what to do."""

from __future__ import annotations

import re

from forebay.errors import DeniedError, FullError, StoreError

_CODE = re.compile(r"<Code>\s*([A-Za-z0-9_.]+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,400})</Message>")
_STATUS = re.compile(r"status(?: code)?:? (\d{3})\b")
_NO_KEYS = re.compile(r"credential provider: DeniedError: (.*?)(?: Debug source:|$)")
_LONGEST_CAUSE = 240
_LONGEST_MESSAGE = 200
_LONGEST_BODY = 2**16  # of an error; what follows is not looked at

_THROTTLED = frozenset(
    {"SlowDown", "SlowDownWrite", "SlowDownRead", "ServiceUnavailable", "Throttling", "ServerBusy"}
    | {"ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "RequestThrottled"}
)
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"})
_KEYS = "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile"
_EXPIRED = "the session token is no longer good: renew the credentials"
_REGION = "the bucket is in another region: correct AWS_REGION, or ?region= in the URL"
_BUCKET = "make the bucket, or correct the URL"
_ACCESS = "let these keys read, write, list and delete below the run's prefix"

# Codes of the S3, GCS XML and Azure interfaces that no repetition mends.
_DENIED = {
    "InvalidAccessKeyId": f"the store does not know this access key: {_KEYS}",
    "SignatureDoesNotMatch": f"the secret key is not that of the access key: {_KEYS}",
    "AuthenticationFailed": "the account's key or token is wrong: correct the credentials",
    "AuthorizationFailure": _ACCESS,
    "AccessDenied": _ACCESS,
    "AllAccessDisabled": _ACCESS,
    "ExpiredToken": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestTimeTooSkewed": "this machine's clock and the store's are far apart: set the clock",
    "RequestExpired": "this machine's clock and the store's are far apart: set the clock",
    "NoSuchBucket": f"there is no such bucket: {_BUCKET}",
    "InvalidBucketName": f"no bucket can have this name: {_BUCKET}",
    "ContainerNotFound": f"there is no such container: {_BUCKET}",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "NotImplemented": "the store lacks this operation: use another store",
}
_UNREACHABLE = (
    (("dns", "resolve", "Name or service", "name resolution"), "its name cannot be resolved"),
    (("refused",), "nothing listens there"),
    (("unreachable", "No route"), "there is no route to it"),
    (("timed out", "timeout", "Timeout"), "it did not answer in time"),
    (("certificate", "SSL", "TLS"), "its certificate is not trusted"),
)


class ThrottledError(StoreError):
    """The store asks for less: 503, 429, SlowDown."""


def denied_without_keys(url: str) -> DeniedError:
    """No credentials anywhere."""
    return DeniedError(
        f"{url}: no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "AWS_PROFILE, or give the machine a role"
    )


def code_of(body: str) -> str:
    """The error code in an XML body, or ""."""
    found = _CODE.search(body[:_LONGEST_BODY])
    return found[1] if found else ""


def refused(what: str, status: int, body: str) -> StoreError:
    """The error that an HTTP answer other than success is; ``what`` names operation and object.

    ThrottledError and plain StoreError may pass by themselves; DeniedError and FullError do not.
    """
    code = code_of(body)
    message = _MESSAGE.search(body[:_LONGEST_BODY])
    said = _one_line(message[1])[:_LONGEST_MESSAGE] if message else ""
    cause = " ".join(filter(None, (str(status), code, f"({said})" if said else "")))
    if status == 507 or code in _FULL:
        return FullError(f"{what}: {cause}: free space there or enlarge it")
    if code in _DENIED:
        return DeniedError(f"{what}: {cause}: {_DENIED[code]}")
    if status in (429, 503) or code in _THROTTLED:
        return ThrottledError(f"{what}: {cause}: the store asks for fewer requests")
    if status in (401, 403):
        return DeniedError(f"{what}: {cause}: {_ACCESS}")
    if 300 <= status < 400:
        return DeniedError(f"{what}: {cause}: {_REGION}")
    return StoreError(f"{what}: {cause}")


def _one_line(text: str) -> str:
    """What a stranger says, without line ends and what a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def status_of(text: str) -> int | None:
    """The HTTP status that a client library's text tells of, if it does."""
    found = _STATUS.search(text)
    return None if found is None else int(found[1])


def is_mute_refusal(text: str) -> bool:
    """Whether a client library's text tells of a refusal that does not say why."""
    return status_of(text) in (301, 400, 401, 403) and not code_of(text)


def unreachable(what: str, cause: str) -> StoreError:
    """The error that no answer is."""
    for words, why in _UNREACHABLE:
        if any(word in cause for word in words):
            return StoreError(f"{what}: the store cannot be reached: {why} ({_short(cause)})")
    return StoreError(f"{what}: the store cannot be reached ({_short(cause)})")


def from_text(what: str, text: str) -> StoreError:
    """The error that a client library's text tells of."""
    flat = " ".join(text.split())
    denied = _NO_KEYS.search(flat)
    if denied is not None:
        return DeniedError(denied[1])
    status = status_of(flat)
    if status is None:
        return unreachable(what, flat)
    return refused(what, status, flat)


def _short(cause: str) -> str:
    """A cause without the chain that a debug print appends, and not too long."""
    head = cause.partition(" Debug source:")[0]
    return head if len(head) <= _LONGEST_CAUSE else head[: _LONGEST_CAUSE - 3] + "..."
