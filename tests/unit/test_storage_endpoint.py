"""What a remote URL and the environment say of where a bucket is."""

from __future__ import annotations

import pytest

from forebay.errors import UsageError
from forebay.storage.address import resolve_url
from forebay.storage.endpoint import Endpoint, parse_remote, s3_endpoint


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_ALLOW_HTTP", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"):
        monkeypatch.delenv(name, raising=False)


def at(url: str, endpoint: str | None = None, region: str | None = None) -> Endpoint:
    return s3_endpoint(parse_remote(url), endpoint=endpoint, region=region)


def test_parts_of_a_url() -> None:
    url = parse_remote("s3://bucket/runs/llama/?region=eu-west-1")
    assert (url.scheme, url.bucket, url.prefix) == ("s3", "bucket", "runs/llama")
    assert url.options == {"region": "eu-west-1"}
    assert url.shown == "s3://bucket/runs/llama"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://bucket", "a run needs a name below the bucket"),
        ("s3://bucket/", "a run needs a name below the bucket"),
        ("s3:///run", "expected s3://bucket/run"),
        ("s3://key:secret@bucket/run", "expected s3://bucket/run"),
        ("s3://host:9000/run", "expected s3://bucket/run"),
        ("s3://bucket/a//b", "expected a run's name"),
        ("s3://bucket/a b", "expected a run's name"),
        ("s3://bucket/../b", "expected a run's name"),
        ("s3://bucket/run?secret_access_key=x", "unknown option secret_access_key.*never from"),
        ("s3://bucket/run?region=a&region=b", "an option stands there twice"),
        ("s3://bucket/run#x", "unknown option #"),
        ("gs://bucket/run?region=x", "unknown option region"),
        ("ftp://bucket/run", "expected s3://, gs:// or az://"),
    ],
)
def test_bad_urls(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_remote(url)
    assert "\n" not in str(caught.value)


def test_one_run_has_one_name() -> None:
    assert resolve_url("s3://bucket/run/") == resolve_url("s3://bucket/run") == "s3://bucket/run"
    assert resolve_url("s3://bucket/run/?region=x") == "s3://bucket/run?region=x"


def test_aws_is_addressed_by_host() -> None:
    found = at("s3://bucket/run", region="eu-west-1")
    assert found.bucket_url == "https://bucket.s3.eu-west-1.amazonaws.com"
    assert not found.path_style
    assert at("s3://bucket/run").region == "us-east-1"
    assert at("s3://bucket/run", region="cn-north-1").base_url.endswith(".amazonaws.com.cn")


def test_a_bucket_with_dots_is_addressed_by_path() -> None:
    """Its name would not be covered by the certificate."""
    found = at("s3://my.bucket/run")
    assert found.bucket_url == "https://s3.us-east-1.amazonaws.com/my.bucket"


def test_a_named_endpoint_is_addressed_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    found = at("s3://bucket/run", endpoint="https://store.example/")
    assert found.bucket_url == "https://store.example/bucket"
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    found = at("s3://bucket/run", endpoint="https://store.example")
    assert found.bucket_url == "https://bucket.store.example"
    found = at("s3://bucket/run?path_style=true", endpoint="https://store.example")
    assert found.bucket_url == "https://store.example/bucket"


def test_the_url_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "from-environment")
    assert at("s3://bucket/run", region="from-file").region == "from-environment"
    assert at("s3://bucket/run?region=from-url", region="from-file").region == "from-url"
    found = at("s3://b/run?endpoint=https://from-url", endpoint="https://from-file")
    assert found.base_url == "https://from-url"


def test_plain_http_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"plain http.*use https, or say allow_http=true"):
        at("s3://b/run?endpoint=http://127.0.0.1:9")
    assert at("s3://b/run?endpoint=http://127.0.0.1:9&allow_http=true").allow_http
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert at("s3://b/run?endpoint=http://127.0.0.1:9").allow_http
    with pytest.raises(UsageError, match="plain http"):
        at("s3://b/run?endpoint=http://127.0.0.1:9&allow_http=false")


@pytest.mark.parametrize("endpoint", ["store.example", "ftp://x", "https://", "https://h?x=1"])
def test_bad_endpoints(endpoint: str) -> None:
    with pytest.raises(UsageError, match="expected https://host"):
        at("s3://bucket/run", endpoint=endpoint)


def test_bad_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"\?path_style='maybe': expected true or false"):
        at("s3://bucket/run?path_style=maybe")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "sure")
    with pytest.raises(UsageError, match="AWS_ALLOW_HTTP='sure': expected true or false"):
        at("s3://bucket/run")


@pytest.mark.parametrize(
    ("given", "size"), [("5MiB", 5 * 2**20), ("6MB", 6 * 2**20), ("5242881", 6 * 2**20)]
)
def test_parts_are_whole_mebibytes(given: str, size: int) -> None:
    """Whole pages, so that what was sent can be dropped from a mapped file."""
    assert parse_remote(f"s3://bucket/run?part_size={given}").part_bytes(1) == size


@pytest.mark.parametrize("given", ["1MiB", "6GiB", "abc"])
def test_bad_part_sizes(given: str) -> None:
    with pytest.raises(UsageError, match=rf"s3://bucket/run: \?part_size='{given}'"):
        parse_remote(f"s3://bucket/run?part_size={given}").part_bytes(1)
