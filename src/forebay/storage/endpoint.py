"""Where an object store is: what a URL, the environment and the usual config files say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from forebay.errors import UsageError
from forebay.storage.store import is_part
from forebay.units import parse_bytes

Scheme = Literal["s3", "gs", "az"]
_OPTIONS = {
    "s3": {"endpoint", "region", "path_style", "allow_http", "profile", "part_size"},
    "gs": {"endpoint", "allow_http", "part_size"},
    "az": {"endpoint", "account", "allow_http", "part_size"},
}
_MIB = 2**20
LEAST_PART_BYTES, MOST_PART_BYTES = 5 * _MIB, 5 * 2**30
_DEFAULT_REGION = "us-east-1"
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteUrl:
    """``scheme://bucket/prefix?options``. ``text`` names the run; ``shown`` is for people."""

    text: str
    scheme: Scheme
    bucket: str
    prefix: str
    options: Mapping[str, str]

    @property
    def shown(self) -> str:
        """The URL without its options."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    def part_bytes(self, otherwise: int) -> int:
        """The size of parts that ``part_size`` asks for, in whole MiB. Raises UsageError."""
        given = self.options.get("part_size")
        if given is None:
            return otherwise
        try:
            size = parse_bytes(given)
        except UsageError as error:
            raise UsageError(f"{self.shown}: ?part_size={given!r}: {error}") from None
        if not LEAST_PART_BYTES <= size <= MOST_PART_BYTES:
            raise UsageError(f"{self.shown}: ?part_size={given!r}: expected 5MiB to 5GiB")
        return -(-size // _MIB) * _MIB

    def flag(self, name: str) -> bool | None:
        """An option that is true or false; None if unsaid. Raises UsageError."""
        return _truth(f"{self.shown}: ?{name}=", self.options.get(name))


def _variable(name: str) -> bool | None:
    return _truth(f"{name}=", os.environ.get(name) or None)


def _truth(where: str, given: str | None) -> bool | None:
    if given is None:
        return None
    if given.lower() not in _TRUE | _FALSE:
        raise UsageError(f"{where}{given!r}: expected true or false")
    return given.lower() in _TRUE


def parse_remote(text: str) -> RemoteUrl:
    """Read a remote URL. Raises UsageError for one that has no bucket, no run, or odd options."""
    parts = urlsplit(text)
    scheme = parts.scheme
    if scheme not in _OPTIONS:
        raise UsageError(f"store: {text!r}: expected s3://, gs:// or az://")
    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc:
        raise UsageError(f"store: {text!r}: expected {scheme}://bucket/run")
    prefix = parts.path.strip("/")
    if not prefix:
        raise UsageError(
            f"store: {text!r}: a run needs a name below the bucket: {scheme}://{parts.netloc}/run"
        )
    if not all(map(is_part, prefix.split("/"))):
        raise UsageError(
            f"store: {text!r}: expected a run's name of letters, digits, '.', '_', '=', '-' and "
            "single '/', no part beginning with '.'"
        )
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    if len(pairs) > len(options):
        raise UsageError(f"store: {text!r}: an option stands there twice")
    odd = sorted(set(options) - _OPTIONS[scheme])
    if odd or parts.fragment:
        known = ", ".join(sorted(_OPTIONS[scheme]))
        raise UsageError(
            f"store: {text!r}: unknown option {', '.join(odd) or '#'}; known are {known}; keys "
            "come from the environment or the config files, never from the URL"
        )
    return RemoteUrl(
        text=text,
        scheme=scheme,  # type: ignore[arg-type]
        bucket=parts.netloc,
        prefix=prefix,
        options=options,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An S3 endpoint: ``bucket_url`` is what a key is appended to, after a slash."""

    bucket: str
    base_url: str
    bucket_url: str
    region: str
    path_style: bool
    allow_http: bool


def s3_endpoint(url: RemoteUrl, *, endpoint: str | None, region: str | None) -> Endpoint:
    """Put together what was given; ``endpoint`` and ``region`` come from the config files.

    A named endpoint is addressed by path unless ``path_style=false`` is said; AWS by host name.
    Plain http needs ``allow_http=true`` or ``AWS_ALLOW_HTTP=true``. Raises UsageError.
    """
    region = url.options.get("region") or os.environ.get("AWS_REGION") or region or _DEFAULT_REGION
    base = url.options.get("endpoint") or endpoint
    by_path = url.flag("path_style")
    if by_path is None:
        hosted = _variable("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
        by_path = not hosted if hosted is not None else (base is not None or "." in url.bucket)
    allow_http = http_allowed(url, "AWS_ALLOW_HTTP")
    if base is None:
        suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        base = f"https://s3.{region}.{suffix}"
    base = check_endpoint(url, base, allow_http=allow_http)
    scheme, _, host = base.partition("://")
    bucket_url = f"{base}/{url.bucket}" if by_path else f"{scheme}://{url.bucket}.{host}"
    return Endpoint(
        bucket=url.bucket,
        base_url=base,
        bucket_url=bucket_url,
        region=region,
        path_style=by_path,
        allow_http=allow_http,
    )


def http_allowed(url: RemoteUrl, variable: str) -> bool:
    """Whether the URL or the environment allows plain http. Raises UsageError."""
    said = url.flag("allow_http")
    return bool(_variable(variable) if said is None else said)


def check_endpoint(url: RemoteUrl, base: str, *, allow_http: bool) -> str:
    """An endpoint without its last slash. Raises UsageError for one that is not a plain URL."""
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise UsageError(f"{url.shown}: endpoint {base!r}: expected https://host[:port]")
    if parts.scheme == "http" and not allow_http:
        raise UsageError(
            f"{url.shown}: endpoint {base!r} is plain http, which anyone on the way can read and "
            "change: use https, or say allow_http=true in the URL or AWS_ALLOW_HTTP=true"
        )
    return base.rstrip("/")
