"""What stores answer, as lines that say what to do; and which of them may pass by themselves."""

from __future__ import annotations

import pytest

from forebay.errors import DeniedError, FullError, StoreError
from forebay.storage.replies import ThrottledError, from_text, refused

XML = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>Said so.</Message></Error>"


@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (503, "SlowDown", ThrottledError, "asks for fewer requests"),
        (503, "", ThrottledError, "asks for fewer requests"),
        (429, "TooManyRequests", ThrottledError, "asks for fewer requests"),
        (400, "RequestLimitExceeded", ThrottledError, "asks for fewer requests"),
        (500, "InternalError", StoreError, "500 InternalError"),
        (400, "RequestTimeout", StoreError, "400 RequestTimeout"),
        (403, "InvalidAccessKeyId", DeniedError, "does not know this access key"),
        (403, "SignatureDoesNotMatch", DeniedError, "the secret key is not that of"),
        (403, "AccessDenied", DeniedError, "let these keys read, write, list and delete"),
        (403, "RequestTimeTooSkewed", DeniedError, "set the clock"),
        (400, "ExpiredToken", DeniedError, "renew the credentials"),
        (404, "NoSuchBucket", DeniedError, "make the bucket, or correct the URL"),
        (301, "PermanentRedirect", DeniedError, "correct AWS_REGION"),
        (307, "", DeniedError, "correct AWS_REGION"),
        (403, "", DeniedError, "let these keys"),
        (507, "", FullError, "free space there"),
        (403, "QuotaExceeded", FullError, "free space there"),
    ],
)
def test_answers(status: int, code: str, kind: type[StoreError], says: str) -> None:
    body = XML.format(code=code) if code else ""
    for error in (
        refused("s3://b/run/key: put", status, body),
        from_text(
            "s3://b/run/key: put",
            f"Generic S3 error: Server returned non-2xx status code: {status} Some: {body}\n\nx",
        ),
    ):
        assert type(error) is kind
        assert says in str(error)
        assert str(error).startswith("s3://b/run/key: put: ")
        assert "\n" not in str(error)
    if code:
        assert "(Said so.)" in str(error)


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        ("error sending request: Connection refused (os error 111)", "nothing listens there"),
        ("dns error: failed to lookup address", "its name cannot be resolved"),
        ("No route to host", "there is no route to it"),
        ("operation timed out", "it did not answer in time"),
        ("invalid peer certificate: UnknownIssuer", "its certificate is not trusted"),
        ("something else", "cannot be reached (something else)"),
    ],
)
def test_no_answer(cause: str, says: str) -> None:
    error = from_text("s3://b/run/key: get", cause)
    assert type(error) is StoreError
    assert says in str(error)


def test_a_long_cause_is_cut() -> None:
    assert len(str(from_text("x", "word " * 1000))) < 400
    assert "source" not in str(from_text("x", "it broke Debug source: Generic { source: ... }"))


def test_missing_keys_are_told_as_they_are() -> None:
    """However deep a client library wraps what its credential provider raised."""
    text = "lacked credentials: External AWS credential provider: DeniedError: x: none: set Y"
    error = from_text("s3://b/run/: list", text + " Debug source: Generic")
    assert type(error) is DeniedError
    assert str(error) == "x: none: set Y"
