"""An HTTP proxy before a real S3 server that fails on purpose, by a script and a seed.

A fake server fails in the ways its author thought of; here every byte comes from a real server and
is spoiled on the way. Without faults the proxy is transparent: headers, path and query go on as
they came (signatures stay valid), bodies are streamed, nothing is sent twice. A server that cannot
be reached, or dies half-way, is passed on as what it is: the client's connection is reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import random
import re
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, Literal
from urllib.parse import unquote

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

_CHUNK_BYTES = 64 * 2**10
_UPSTREAM_IDLE_S = 3.0  # less than servers wait: none is used while it is being closed
_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding")
_BOTH_SIDES: dict[str, Any] = {"auto_decompress": False, "read_bufsize": _CHUNK_BYTES}
_Request = web.BaseRequest
_Reply = web.StreamResponse
_Do = Literal[
    "status",
    "reset_request",
    "reset_reply",
    "lose_reply",
    "short",
    "corrupt",
    "slow",
    "hang",
    "stale_list",
    "unconditional",
    "count",
]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault: from the ``after``-th matching request on (1 is the first), ``times`` times.

    The first fault that is due is the one that is followed; those after it do not count the
    request. ``share`` hits that part of the due requests, drawn from the proxy's seed. ``do``:

        status         reply ``status`` with an S3 error ``code``; nothing is forwarded
        reset_request  reset after ``at_bytes`` of the request's body; nothing is forwarded
        reset_reply    forward, reset after ``at_bytes`` of the reply's body (0: before its head)
        lose_reply     forward, wait for the whole reply, reset: the write landed, nobody knows
        short          forward; the reply's body ends after ``at_bytes`` and says that this is all
        corrupt        forward; a bit of the reply's body differs, at ``at_bytes`` modulo its size
        slow           bodies of request and reply pass at ``bytes_per_s`` each
        hang           hold for ``seconds``, then forward; 0: until the proxy closes
        stale_list     a list gets the first reply ever seen for the same path and query
        unconditional  forward without If-None-Match, as to a store that does not know it (one
                       that checks signatures refuses that)
        count          pass, and be counted in ``FaultProxy.hits``
    """

    do: _Do
    method: str = ""
    match: str = ""
    after: int = 1
    times: int | None = None
    share: float = 1.0
    status: int = 503
    code: str = "SlowDown"
    at_bytes: int = 0
    bytes_per_s: float = 0
    seconds: float = 0

    def __post_init__(self) -> None:
        """Refuse what could never happen."""
        if (self.do == "slow") != (self.bytes_per_s > 0) or not 0 <= self.share <= 1:
            raise ValueError("slow, and only slow, has bytes_per_s above 0; share is from 0 to 1")
        re.compile(self.method)
        re.compile(self.match)


class Seen(msgspec.Struct, kw_only=True):
    """A request that came, listed on arrival; the rest is filled in as it goes on.

    ``status`` is what the client was told in full: None while under way, and when cut.
    ``upstream_status`` is what the server said, also where the client never heard of it.
    """

    method: str
    path: str
    query: str
    started_s: float
    fault: str = ""
    status: int | None = None
    upstream_status: int | None = None
    body_bytes: int = 0
    reply_bytes: int = 0
    ended_s: float | None = None

    @property
    def is_list(self) -> bool:
        """Whether this lists objects."""
        return self.method == "GET" and "list-type=2" in self.query.split("&")

    def done(self, status: int) -> None:
        """What is written next completes the reply; said before, for a client that looks here."""
        self.status, self.ended_s = status, time.monotonic()


def _piece_bytes(fault: Fault) -> int:
    """How much to read at once: at a slow rate a little, so that it goes on evenly."""
    return max(1, min(_CHUNK_BYTES, int(fault.bytes_per_s / 20) or _CHUNK_BYTES))


async def _pace(fault: Fault, since_s: float, nbytes: int) -> None:
    """Wait until ``nbytes`` may have passed since then."""
    if fault.bytes_per_s:
        await asyncio.sleep(max(0.0, since_s + nbytes / fault.bytes_per_s - time.monotonic()))


def _headers(came: Iterable[tuple[bytes, bytes]], *without: str) -> CIMultiDict[str]:
    """Headers with their names spelt as they came, which the parsed ones are not."""
    pairs = [(name.decode(), value.decode(errors="surrogateescape")) for name, value in came]
    return CIMultiDict((name, value) for name, value in pairs if name.lower() not in without)


def _cut(request: _Request, seen: Seen) -> _Reply:
    """Reset the client's connection; what is returned can no longer be sent."""
    seen.status = None
    if request.transport is not None:
        sock = request.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # closed by the other side meanwhile
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    return web.Response()


def _unsent(transport: asyncio.Transport) -> bool:
    return fcntl.ioctl(transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4)) != bytes(4)


async def _once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
    """Keep aiohttp from sending a request twice, as it does by itself for these two errors."""
    try:
        return await handler(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise aiohttp.ClientPayloadError(str(error)) from error


class FaultProxy:
    """Stands before ``upstream`` ("http://127.0.0.1:PORT"), in a thread with its own event loop.

    Listens on a free port of ``host``.

    ``requests`` lists what came, ``arrivals`` the pieces of request bodies as they were read, in
    monotonic seconds and bytes; ``hits`` counts for each fault how often it was applied.
    """

    def __init__(self, upstream: str, *, seed: int = 0, host: str = "127.0.0.1") -> None:
        self.url = ""
        self._host = host
        self.requests: list[Seen] = []
        self.arrivals: list[tuple[float, int]] = []
        self._upstream = upstream.rstrip("/")
        self._seed = seed
        self._lock = threading.Lock()
        self._lists: dict[str, tuple[CIMultiDict[str], bytes]] = {}
        self._thread: threading.Thread | None = None
        self.set_faults([])

    def start(self) -> None:
        """Listen; ``url`` is known afterwards."""
        assert self._thread is None, "the proxy is running already"
        listener = socket.socket()
        # Inherited by what it accepts. Small, so that a client feels at once that nobody reads.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _CHUNK_BYTES)
        listener.bind((self._host, 0))
        listener.listen(1024)
        self.url = f"http://{self._host}:{listener.getsockname()[1]}"
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(listener, ready)), name="fault-proxy", daemon=True
        )
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        """Reset every connection and end the thread; nothing happens when it is not running."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._loop.call_soon_threadsafe(self._closing.set)
        thread.join(10.0)
        assert not thread.is_alive(), "the proxy's thread did not end"

    def __enter__(self) -> FaultProxy:  # noqa: PYI034
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_faults(self, faults: list[Fault]) -> None:
        """Replace all faults, at any moment; counts and draws start anew."""
        with self._lock:
            self._faults = list(faults)
            self._matched = [0] * len(faults)
            self.hits = [0] * len(faults)
            # one generator each, so that a fault's draws do not depend on the faults around it
            self._dice = [random.Random(f"{self._seed}/{n}") for n in range(len(faults))]  # noqa: S311

    def busiest_second(self) -> int:
        """The most request body bytes within any one second, to hold against a rate limit."""
        arrivals = list(self.arrivals)
        most = within = first = 0
        for now_s, nbytes in arrivals:
            within += nbytes
            while arrivals[first][0] <= now_s - 1.0:
                within -= arrivals[first][1]
                first += 1
            most = max(most, within)
        return most

    def _due(self, seen: Seen, url: str) -> Fault:
        """The fault for this request, or one that does nothing."""
        with self._lock:
            for number, fault in enumerate(self._faults):
                if not re.fullmatch(fault.method or ".*", seen.method):
                    continue
                other = fault.do == "stale_list" and not seen.is_list
                if other or not re.search(fault.match, url):
                    continue
                self._matched[number] += 1
                left = fault.times is None or self.hits[number] < fault.times
                due = left and self._matched[number] >= fault.after
                if due and self._dice[number].random() < fault.share:
                    self.hits[number] += 1
                    seen.fault = fault.do
                    return fault
        return Fault(do="count")

    async def _main(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        # cancellation: a client that goes away is gone for the server too
        server = web.Server(self._handle, handler_cancellation=True, access_log=None, **_BOTH_SIDES)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_UPSTREAM_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            middlewares=[_once],
            **_BOTH_SIDES,
        ) as self._session:
            listening = await self._loop.create_server(server, sock=listener, backlog=1024)
            await self._closing.wait()
            self._loop.remove_reader(listener)  # accepts no more; asyncio loses what it just did,
            await asyncio.sleep(0.05)  # unless it is a connection before the listener closes
            listening.close()
            for transport in filter(None, [one.transport for one in server.connections]):
                transport.abort()
            await server.shutdown(1.0)

    async def _handle(self, request: _Request) -> _Reply:
        path, _, query = map(unquote, request.raw_path.partition("?"))
        seen = Seen(method=request.method, path=path, query=query, started_s=time.monotonic())
        fault = self._due(seen, unquote(request.raw_path))
        self.requests.append(seen)
        try:
            return await self._serve(request, seen, fault)
        except (OSError, aiohttp.ClientError, web.RequestPayloadError):  # one of the two is gone
            return _cut(request, seen)
        finally:
            if seen.status is None:
                seen.ended_s = time.monotonic()

    async def _serve(self, request: _Request, seen: Seen, fault: Fault) -> _Reply:
        """Do what comes before the request is forwarded, or instead of it."""
        if fault.do == "hang":
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), fault.seconds or None)
                return _cut(request, seen)
        if fault.do in {"reset_request", "status"}:
            # to the end before a status, else a client that is still sending may not see it
            async for _ in self._body(request, seen, fault):
                pass
            if fault.do == "reset_request":
                return _cut(request, seen)
            error = f"<Error><Code>{fault.code}</Code><Message>on purpose</Message></Error>"
            seen.done(fault.status)
            return web.Response(status=fault.status, text=error, content_type="application/xml")
        if fault.do == "stale_list" and request.raw_path in self._lists:
            headers, body = self._lists[request.raw_path]
            seen.done(200)
            return web.Response(headers=headers.copy(), body=body)
        return await self._forward(request, seen, fault)

    async def _body(self, request: _Request, seen: Seen, fault: Fault) -> AsyncIterator[bytes]:
        """The request's body as it comes in."""
        at_most = fault.at_bytes if fault.do == "reset_request" else sys.maxsize
        if "Expect" in request.headers and request.transport is not None and at_most:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        since_s, most = time.monotonic(), _piece_bytes(fault)
        while data := await request.content.read(min(most, at_most - seen.body_bytes)):
            self.arrivals.append((time.monotonic(), len(data)))
            seen.body_bytes += len(data)
            await _pace(fault, since_s, seen.body_bytes)
            yield data

    def translate(self, headers: CIMultiDict[str]) -> None:
        """Change the headers of a request before it is forwarded; to be overridden."""

    async def _spoilt(self, upstream: aiohttp.ClientResponse, seen: Seen, fault: Fault) -> _Reply:
        """A reply that is whole by its length, and not what the server said."""
        body = bytearray(await upstream.read())
        if fault.do == "short":
            del body[fault.at_bytes :]
        elif body:
            body[fault.at_bytes % len(body)] ^= 1
        headers = _headers(upstream.raw_headers, *_HOP_BY_HOP, "content-length")
        seen.done(upstream.status)
        return web.Response(status=upstream.status, headers=headers, body=bytes(body))

    async def _forward(self, request: _Request, seen: Seen, fault: Fault) -> _Reply:
        """Send the request on, and the reply back."""
        given = _headers(request.raw_headers, "transfer-encoding")
        if fault.do == "unconditional":
            given.popall("If-None-Match", None)
        self.translate(given)
        upstream = await self._session.request(
            request.method,
            URL(self._upstream + request.raw_path, encoded=True),
            headers=given,
            data=self._body(request, seen, fault) if request.body_exists else None,
            chunked=True if "Transfer-Encoding" in request.headers else None,
            allow_redirects=False,
        )
        try:
            seen.upstream_status = upstream.status
            cut_at = {"lose_reply": 0, "reset_reply": fault.at_bytes}.get(fault.do, sys.maxsize)
            if fault.do == "lose_reply":
                await upstream.read()
            if cut_at == 0:
                return _cut(request, seen)
            if fault.do in {"short", "corrupt"} and request.method != "HEAD":
                return await self._spoilt(upstream, seen, fault)
            headers = _headers(upstream.raw_headers, *_HOP_BY_HOP)
            reply = _Reply(status=upstream.status, reason=upstream.reason, headers=headers)
            if not request.content.at_eof():  # answered early: what is left is not the next request
                reply.force_close()
            size = upstream.content_length
            if request.method == "HEAD" or upstream.status in {204, 304} or size == 0:
                seen.done(upstream.status)
            await reply.prepare(request)
            since_s, sent, whole = time.monotonic(), 0, b""
            async for data in upstream.content.iter_chunked(_piece_bytes(fault)):
                piece = data[: cut_at - sent]
                sent += len(piece)
                seen.reply_bytes = sent
                await _pace(fault, since_s, sent)
                whole += piece if seen.is_list else b""
                if sent == size:
                    seen.done(upstream.status)
                await reply.write(piece)
                if sent == cut_at:
                    break
            if fault.do == "reset_reply":
                # a reset throws away what has not got through to the client's kernel
                while request.transport is not None and _unsent(request.transport):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                return _cut(request, seen)
            if seen.is_list and upstream.status == 200:
                headers = _headers(upstream.raw_headers, *_HOP_BY_HOP, "content-length")
                self._lists.setdefault(request.raw_path, (headers, whole))
            seen.done(upstream.status)
            return reply
        finally:
            upstream.close()  # back in the pool already, if it was read to its end
