"""S3 requests that obstore has no call for: uploads in parts that outlive the process.

Signed by botocore, whose credential chain obstore is given too (environment, config files, SSO, web
identity, container and instance roles), and sent by urllib3 block by block, so that a body can be
paced, counted and cut off on its way. Payloads are signed: the store refuses what arrives changed.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, TypedDict
from urllib.parse import quote, urlencode
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import botocore.exceptions
import botocore.session
import urllib3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from forebay.errors import DeniedError, StoreError
from forebay.storage.endpoint import Endpoint, RemoteUrl, s3_endpoint
from forebay.storage.multipart import Gate
from forebay.storage.pace import Pace
from forebay.storage.replies import ThrottledError, denied_without_keys, refused, unreachable

_CONNECT_S = 10.0
_REPLY_S = 60.0
_HASH_BYTES = 2**20
_SEND_BYTES = 256 * 2**10
_RENEW = timedelta(minutes=5)
_RELOAD_S = 5.0
_LARGEST_REPLY_BYTES = 2**22  # a list of 1,000 uploads with the longest keys has half of that
_MOST_PAGES = 10_000


class Credentials:
    """Keys from wherever botocore finds them; read anew after the store has refused them."""

    def __init__(self, url: RemoteUrl, keys: tuple[str, str] | None = None) -> None:
        self._url = url
        self._given = keys
        self._profile = url.options.get("profile")
        self._session = botocore.session.Session(profile=self._profile)
        self._found: Any = None
        self._reloaded_s = 0.0
        self._lock = threading.Lock()

    def endpoint(self) -> Endpoint:
        """Where the bucket is. Raises UsageError."""
        try:
            scoped: Mapping[str, Any] = self._session.get_scoped_config()
            full: Mapping[str, Any] = self._session.full_config
        except botocore.exceptions.BotoCoreError as error:
            raise DeniedError(f"{self._url.shown}: {error}: correct the profile") from None
        service = full.get("services", {}).get(scoped.get("services", ""), {}).get("s3", {})
        return s3_endpoint(
            self._url,
            endpoint=_first(
                *("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
                otherwise=service.get("endpoint_url") or scoped.get("endpoint_url"),
            ),
            region=self._session.get_config_variable("region"),
        )

    def frozen(self) -> ReadOnlyCredentials:
        """The keys of now. Raises DeniedError when there are none."""
        if self._given is not None:
            return ReadOnlyCredentials(*self._given, None)
        try:
            with self._lock:
                if self._found is None:
                    self._found = self._session.get_credentials()
                found = self._found
            if found is None:
                raise denied_without_keys(self._url.shown)
            keys: ReadOnlyCredentials = found.get_frozen_credentials()
        except botocore.exceptions.BotoCoreError as error:
            raise DeniedError(f"{self._url.shown}: {error}: renew the credentials") from None
        return keys

    def renew(self) -> None:
        """Look for keys again at the next use: what refused them may have been mended by now."""
        with self._lock:
            if time.monotonic() - self._reloaded_s > _RELOAD_S:
                self._session = botocore.session.Session(profile=self._profile)
                self._found = None
                self._reloaded_s = time.monotonic()

    def __call__(self) -> S3Credential:
        """The keys as obstore wants them; it asks again when they have run out."""
        keys = self.frozen()
        return {
            "access_key_id": keys.access_key or "",
            "secret_access_key": keys.secret_key or "",
            "token": keys.token,
            "expires_at": datetime.now(timezone.utc) + _RENEW,
        }


def _first(*variables: str, otherwise: str | None) -> str | None:
    return next((os.environ[v] for v in variables if os.environ.get(v)), otherwise)


class _Signer(S3SigV4Auth):
    """Signs a request whose body is not at hand, only its digest."""

    def __init__(self, keys: ReadOnlyCredentials, region: str, body_sha256: str) -> None:
        super().__init__(keys, "s3", region)
        self._body_sha256 = body_sha256

    def payload(self, request: AWSRequest) -> str:
        """Hex SHA-256 of the body."""
        del request
        return self._body_sha256


class S3Credential(TypedDict):
    """Keys as obstore takes them."""

    access_key_id: str
    secret_access_key: str
    token: str | None
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Bytes on their way: ``sent`` hears of each block before it leaves, ``drop`` of each after.

    ``gate`` is passed while they are on the wire.
    """

    view: memoryview
    pace: Pace
    sent: Callable[[int], None]
    drop: Callable[[int, int], None]
    start: int = 0
    gate: Gate | None = None

    def digest(self) -> str:
        """Hex SHA-256; tells ``drop`` of each block, so that a mapped file stays small."""
        state = hashlib.sha256()
        for at in range(0, self.view.nbytes, _HASH_BYTES):
            block = self.view[at : at + _HASH_BYTES]
            self.sent(0)
            state.update(block)
            self.drop(self.start + at, block.nbytes)
        return state.hexdigest()

    def blocks(self) -> Iterator[memoryview]:
        """Blocks as the budget lets them go."""
        size = min(_SEND_BYTES, self.pace.grain_bytes)
        for at in range(0, self.view.nbytes, size):
            block = self.view[at : at + size]
            self.pace.take(block.nbytes)
            self.sent(block.nbytes)
            yield block
            self.drop(self.start + at, block.nbytes)


class _NoDoctype(ElementTree.TreeBuilder):
    """Refuses what declares entities: expanded, a small reply would fill the memory."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        """No reply of a store has one."""
        del pubid, system
        raise ValueError(f"a document type {name!r} has no place there")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer: HTTP status, headers with lower-case names, and the whole body."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    def root(self, what: str) -> ElementTree.Element:
        """The XML document in the body, names without namespace. Raises StoreError."""
        # Of one encoding, so that none is looked for by a name that the reply chooses.
        parser = ElementTree.XMLParser(target=_NoDoctype(), encoding="utf-8")  # noqa: S314
        try:
            parser.feed(self.data)
            root: ElementTree.Element = parser.close()
        except (ElementTree.ParseError, ValueError) as error:
            raise StoreError(f"{what}: the reply is no XML: {error}") from None
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
        return root


class S3:
    """One bucket: single puts and uploads in parts. Used by any thread."""

    def __init__(self, url: RemoteUrl, keys: tuple[str, str] | None = None) -> None:
        """``keys`` are id and secret, where they shall not be looked for."""
        self.url = url
        self.credentials = Credentials(url, keys)
        self.endpoint = self.credentials.endpoint()
        self._pool = urllib3.PoolManager(
            maxsize=32, retries=False, timeout=urllib3.Timeout(connect=_CONNECT_S, read=_REPLY_S)
        )

    def name(self, key: str) -> str:
        """How a key is called in messages."""
        return f"{self.url.shown}/{key}"

    def send(
        self,
        method: str,
        key: str | None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | Body = b"",
        pace: Pace,
    ) -> Reply:
        """Send one request and read its answer whole. No answer is StoreError; any answer returns.

        ``key`` None addresses the bucket. Blocks at most for the connect, each block, the reply.
        """
        path = "" if key is None else "/" + quote(f"{self.url.prefix}/{key}", safe="/-_.~")
        target = self.endpoint.bucket_url + path
        if query:
            target += "?" + urlencode(sorted(query.items()), quote_via=quote, safe="-_.~")
        digest = body.digest() if isinstance(body, Body) else hashlib.sha256(body).hexdigest()
        nbytes = body.view.nbytes if isinstance(body, Body) else len(body)
        pace.ask()
        what = f"{self.url.shown if key is None else self.name(key)}: {method}"
        ended_s = time.monotonic()
        gate = body.gate if isinstance(body, Body) else None

        def on_the_wire(body: Body) -> Iterator[memoryview]:
            nonlocal ended_s, gate
            for block in body.blocks():
                yield block
                ended_s = time.monotonic()
            if gate is not None:
                gate.leave()
                gate = None

        if gate is not None:
            gate.enter()
        try:
            # Signed at the last moment: a signature is good for some minutes only.
            request = AWSRequest(
                method=method,
                url=target,
                headers={"Content-Length": str(nbytes), **(headers or {})},
            )
            _Signer(self.credentials.frozen(), self.endpoint.region, digest).add_auth(request)
            answer = self._pool.request(
                method,
                target,
                body=on_the_wire(body) if isinstance(body, Body) else body,  # type: ignore[arg-type]
                headers=dict(request.headers.items()),
                redirect=False,
                preload_content=False,
            )
            try:
                data = answer.read(_LARGEST_REPLY_BYTES)
            finally:
                answer.release_conn()
        except urllib3.exceptions.HTTPError as error:
            if isinstance(error, urllib3.exceptions.TimeoutError):
                pace.pushed_back()  # as late as can be
            raise unreachable(what, f"{self.endpoint.base_url}: {error}") from error
        finally:
            if gate is not None:
                gate.leave()
        if isinstance(body, Body):
            pace.replied(time.monotonic() - ended_s)
        lower = {name.lower(): value for name, value in answer.headers.items()}
        return Reply(status=answer.status, headers=lower, data=data)

    def expect(self, reply: Reply, what: str, pace: Pace) -> Reply:
        """The reply of a success. Raises the error that any other is; slows down when asked to."""
        if reply.status in (200, 201, 204):
            return reply
        error = refused(what, reply.status, reply.data.decode(errors="replace"))
        if isinstance(error, ThrottledError):
            pace.pushed_back()
        if isinstance(error, DeniedError):
            self.credentials.renew()
        raise error

    # -- uploads in parts ------------------------------------------------------------------------

    def begin(self, key: str, pace: Pace) -> str:
        """Open an upload; its id stays good until it is completed or aborted."""
        what = f"{self.name(key)}: begin of an upload"
        reply = self.expect(self.send("POST", key, query={"uploads": ""}, pace=pace), what, pace)
        return _text(reply.root(what), "UploadId", what)

    def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        """Send one part, numbered from 1; returns its tag, which says that the store has it."""
        query = {"partNumber": str(number), "uploadId": upload_id}
        what = f"{self.name(key)}: part {number}"
        reply = self.send("PUT", key, query=query, body=body, pace=body.pace)
        tag = self.expect(reply, what, body.pace).headers.get("etag")
        if not tag:
            raise StoreError(f"{what}: the reply has no ETag")
        return tag

    def parts(self, key: str, upload_id: str, pace: Pace) -> dict[int, tuple[str, int]] | None:
        """Tag and size of each part that the store has; None when it knows no such upload."""
        what = f"{self.name(key)}: list of the parts sent"
        found: dict[int, tuple[str, int]] = {}
        marker = "0"
        for _ in range(_MOST_PAGES):
            query = {"uploadId": upload_id, "part-number-marker": marker}
            reply = self.send("GET", key, query=query, pace=pace)
            if reply.status == 404 and b"NoSuchUpload" in reply.data:
                return None
            root = self.expect(reply, what, pace).root(what)
            for part in root.findall("Part"):
                number = _count(part, "PartNumber", what)
                found[number] = (_text(part, "ETag", what), _count(part, "Size", what))
            before, marker = marker, root.findtext("NextPartNumberMarker") or ""
            if root.findtext("IsTruncated") != "true" or not marker:
                return found
            if marker == before:
                break
        raise StoreError(f"{what}: the store's list has no end")

    def complete(
        self, key: str, upload_id: str, tags: Mapping[int, str], pace: Pace, *, create: bool
    ) -> Reply:
        """Make the object of its parts; with ``create`` it must not exist: 412, or 409 in a race.

        An answer of 200 may hold an error; it is returned with that error's status.
        """
        rows = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
            for number, tag in sorted(tags.items())
        )
        reply = self.send(
            "POST",
            key,
            query={"uploadId": upload_id},
            headers={
                "Content-Type": "application/xml",
                **({"If-None-Match": "*"} if create else {}),
            },
            body=f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode(),
            pace=pace,
        )
        if reply.status == 200 and b"<Error>" in reply.data:
            return Reply(status=500, headers=reply.headers, data=reply.data)
        return reply

    def abort(self, key: str, upload_id: str, pace: Pace) -> None:
        """Drop an upload and its parts; one that is gone already is fine."""
        reply = self.send("DELETE", key, query={"uploadId": upload_id}, pace=pace)
        if reply.status != 404:
            self.expect(reply, f"{self.name(key)}: abort of an upload", pace)

    def uploads(self, prefix: str, pace: Pace) -> Iterator[tuple[str, str, float]]:
        """Key, id and Unix time of each upload below a prefix that was begun and has no end."""
        what = f"{self.name(prefix)}: list of unfinished uploads"
        head = f"{self.url.prefix}/"
        query = {"uploads": "", "prefix": head + prefix}
        for _ in range(_MOST_PAGES):
            reply = self.send("GET", None, query=query, pace=pace)
            root = self.expect(reply, what, pace).root(what)
            for row in root.findall("Upload"):
                begun = _text(row, "Initiated", what).replace("Z", "+00:00")
                try:
                    at_s = datetime.fromisoformat(begun).timestamp()
                except (ValueError, OverflowError):
                    raise StoreError(f"{what}: {begun[:40]!r} is no time") from None
                yield _text(row, "Key", what).removeprefix(head), _text(row, "UploadId", what), at_s
            after = root.findtext("NextKeyMarker") or ""
            if root.findtext("IsTruncated") != "true" or not after:
                return
            marks = {
                "key-marker": after,
                "upload-id-marker": root.findtext("NextUploadIdMarker") or "",
            }
            if marks.items() <= query.items():
                break
            query |= marks
        raise StoreError(f"{what}: the store's list has no end")


def _count(element: ElementTree.Element, name: str, what: str) -> int:
    text = _text(element, name, what)
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise StoreError(f"{what}: {name} is {text[:40]!r}, expected a number")
    return int(text)


def _text(element: ElementTree.Element, name: str, what: str) -> str:
    found = element.findtext(name)
    if not found:
        raise StoreError(f"{what}: the reply has no {name}")
    return found
