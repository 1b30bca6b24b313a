"""A proxy before a real S3 server that fails on purpose, scripted and seeded.

    with FaultProxy(server.endpoint, seed=7) as proxy:
        proxy.set_faults([Fault(do="status", method="PUT", match="partNumber", times=3)])
        ... a client that uses proxy.url ...

Without faults it is transparent: headers, path and query pass as they came, so that signatures stay
good, and bodies stream both ways. What came is kept in ``requests`` and, by the block, in
``arrivals``. Needs aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from forebay.errors import DeadlineError

if TYPE_CHECKING:
    from typing_extensions import Self

_BLOCK_BYTES = 64 * 2**10
_LIMIT_S = 20.0
_OF_THE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade"}
_ERROR = (
    "<?xml version='1.0' encoding='UTF-8'?>"
    "<Error><Code>{code}</Code><Message>a fault by script</Message></Error>"
)


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault: from the ``after``-th matching request on (1 is the first), ``times`` times.

    ``method`` must match whole, ``match`` is searched in the decoded path and query; ``share`` of
    the requests that are due are hit, drawn by the proxy's seed. ``do``:

        status         answer ``status`` and ``code`` at once, forward nothing
        reset_request  cut the connection after ``at_bytes`` of the request's body
        reset_reply    forward, then cut the connection after ``at_bytes`` of the answer's body
        lose_reply     forward, wait for the answer, cut the connection instead of passing it on
        slow           pass bodies at ``bytes_per_s``
        hang           hold the request for ``seconds`` before it is forwarded; 0 is for good
        stale_list     answer a listing as the same listing was answered first
        unconditional  forward without If-None-Match, as to a store that does not know it (one that
                       checks signatures refuses that)
    """

    do: Literal[
        "status",
        "reset_request",
        "reset_reply",
        "lose_reply",
        "slow",
        "hang",
        "stale_list",
        "unconditional",
    ]
    method: str = ""
    match: str = ""
    after: int = 1
    times: int | None = None
    share: float = 1.0
    status: int = 503
    code: str = "SlowDown"
    at_bytes: int = 0
    bytes_per_s: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what could never happen."""
        re.compile(self.method)
        re.compile(self.match)
        if self.do == "slow" and self.bytes_per_s <= 0:
            raise ValueError("slow goes with bytes_per_s")


@dataclass(slots=True, kw_only=True)
class Seen:
    """One request. ``status`` is None until it is answered, and for good when it was cut off."""

    method: str
    path: str
    query: str
    fault: str
    started_s: float
    status: int | None = None
    nbytes: int = 0
    ended_s: float = 0.0


class FaultProxy:
    """Listens on a free port of ``host``, in a thread of its own. Used from any thread."""

    def __init__(self, upstream: str, *, seed: int = 0, host: str = "127.0.0.1") -> None:
        self.upstream = upstream
        self.host = host
        self.url = ""
        self.requests: list[Seen] = []
        self.arrivals: list[tuple[float, int]] = []
        self._faults: list[Fault] = []
        self._calls: dict[int, int] = {}
        self._random = random.Random(seed)  # noqa: S311 - faults, not secrets
        self._lists: dict[str, tuple[int, CIMultiDict[str], bytes]] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._client: aiohttp.ClientSession | None = None

    def set_faults(self, faults: list[Fault]) -> None:
        """Follow these faults from now on; counting starts anew."""
        with self._lock:
            self._faults, self._calls = list(faults), {}

    def busiest_second(self) -> int:
        """Bytes of request bodies that arrived in the busiest window of a second."""
        arrivals = list(self.arrivals)
        most = inside = first = 0
        for at_s, nbytes in arrivals:
            inside += nbytes
            while arrivals[first][0] <= at_s - 1.0:
                inside -= arrivals[first][1]
                first += 1
            most = max(most, inside)
        return most

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen. Raises DeadlineError."""
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()
        if not self._ready.wait(_LIMIT_S) or not self.url:
            raise DeadlineError(f"fault proxy: not listening after {_LIMIT_S:g} s")

    def close(self) -> None:
        """Cut all connections and end the thread."""
        loop, closing, thread = self._loop, self._closing, self._thread
        if loop is not None and closing is not None and thread is not None and thread.is_alive():
            loop.call_soon_threadsafe(closing.set)
            thread.join(_LIMIT_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, connect=_LIMIT_S)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=["User-Agent", "Accept", "Accept-Encoding", "Content-Type"],
        ) as self._client:
            server = web.Server(self._handle, read_bufsize=_BLOCK_BYTES, access_log=None)
            runner = web.ServerRunner(server, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, self.host, 0)
            await site.start()
            self.url = f"http://{self.host}:{runner.addresses[0][1]}"
            self._ready.set()
            await self._closing.wait()
            for connection in server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    # -- one request -----------------------------------------------------------------------------

    def _due(self, method: str, target: str) -> Fault | None:
        with self._lock:
            for number, fault in enumerate(self._faults):
                if fault.method and not re.fullmatch(fault.method, method):
                    continue
                if not re.search(fault.match, target):
                    continue
                if fault.do == "stale_list" and "list-type=2" not in target:
                    continue
                count = self._calls[number] = self._calls.get(number, 0) + 1
                last = None if fault.times is None else fault.after + fault.times
                due = count >= fault.after and (last is None or count < last)
                if due and self._random.random() < fault.share:
                    return fault
        return None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        target = unquote(request.raw_path)
        fault = self._due(request.method, target)
        path, _, query = request.raw_path.partition("?")
        seen = Seen(
            method=request.method,
            path=path,
            query=query,
            fault="" if fault is None else fault.do,
            started_s=time.monotonic(),
        )
        self.requests.append(seen)
        try:
            return await self._answer(request, fault, seen)
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return _cut(request)  # the server is down: as it would be without us
        finally:
            seen.ended_s = time.monotonic()

    async def _answer(
        self, request: web.BaseRequest, fault: Fault | None, seen: Seen
    ) -> web.StreamResponse:
        do = "" if fault is None else fault.do
        if fault is not None and do == "status":
            async for _ in self._body(request, seen, 0.0):
                pass
            seen.status = fault.status
            body = "" if request.method == "HEAD" else _ERROR.format(code=fault.code)
            return web.Response(status=fault.status, text=body, content_type="application/xml")
        if fault is not None and do == "reset_request":
            async for _ in self._body(request, seen, 0.0):
                if seen.nbytes >= fault.at_bytes:
                    break
            return _cut(request)
        if fault is not None and do == "hang":
            await self._hold(fault.seconds)
            if not fault.seconds:
                return _cut(request)
        if do == "stale_list" and request.raw_path in self._lists:
            status, headers, data = self._lists[request.raw_path]
            seen.status = status
            return web.Response(status=status, headers=headers, body=data)
        return await self._forward(request, fault, seen)

    async def _forward(
        self, request: web.BaseRequest, fault: Fault | None, seen: Seen
    ) -> web.StreamResponse:
        assert self._client is not None
        do = "" if fault is None else fault.do
        rate = fault.bytes_per_s if fault is not None and do == "slow" else 0.0
        given = _passed(request.headers)
        if do == "unconditional":
            given.popall("If-None-Match", None)
        self.translate(given)
        url = URL(self.upstream + request.raw_path, encoded=True)
        async with self._client.request(
            request.method,
            url,
            headers=given,
            data=self._body(request, seen, rate) if request.body_exists else None,
            allow_redirects=False,
        ) as answer:
            if do == "lose_reply":
                await answer.read()
                return _cut(request)
            headers = _passed(answer.headers)
            if "list-type=2" in seen.query:
                data = await answer.read()
                self._lists.setdefault(request.raw_path, (answer.status, headers, data))
            reply = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
            await reply.prepare(request)
            sent = 0
            if "list-type=2" in seen.query:
                await reply.write(data)
            async for block in answer.content.iter_chunked(_BLOCK_BYTES):
                if fault is not None and do == "reset_reply" and sent + len(block) > fault.at_bytes:
                    await reply.write(block[: fault.at_bytes - sent])
                    return _cut(request)
                await reply.write(block)
                sent += len(block)
                if rate:
                    await self._hold(len(block) / rate)
            await reply.write_eof()
            seen.status = answer.status
            return reply

    def translate(self, headers: CIMultiDict[str]) -> None:
        """Change the headers of a request before it is forwarded; to be overridden."""

    async def _body(
        self, request: web.BaseRequest, seen: Seen, rate: float
    ) -> AsyncIterator[bytes]:
        async for block in request.content.iter_chunked(_BLOCK_BYTES):
            self.arrivals.append((time.monotonic(), len(block)))
            seen.nbytes += len(block)
            yield block
            if rate:
                await self._hold(len(block) / rate)

    async def _hold(self, seconds: float) -> None:
        """Wait, or until the proxy closes; 0 is for good."""
        assert self._closing is not None
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds or None)


def _passed(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers of the message, without those of the connection."""
    found: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in _OF_THE_CONNECTION:
            found.add(name, value)
    return found


def _cut(request: web.BaseRequest) -> web.StreamResponse:
    """End the connection as a dead server would: with a reset and no answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)
