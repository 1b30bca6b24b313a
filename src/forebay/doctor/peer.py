"""The link to another node over TCP: a rate each way, and the round trip; or loopback alone."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from forebay.doctor.deadline import side_by_side
from forebay.doctor.finding import Expected, Finding, Told, Verdict, compare, failed
from forebay.doctor.frames import (
    ECHO_BYTES,
    VERSION,
    close,
    drain,
    is_loopback,
    number_of,
    parse_address,
    proof,
    read_block,
    read_frame,
    send_frame,
    text_of,
)
from forebay.doctor.listener import BUSY, LOOPBACK, WRONG_TOKEN, Listener, send_for
from forebay.doctor.route import Link, link_to
from forebay.doctor.samples import Samples, summarize
from forebay.doctor.starved import NO_THREAD, starved
from forebay.errors import DeadlineError, DeniedError, ForebayError, StoreError
from forebay.plan.figure import Figure, Kind
from forebay.units import show_rate, show_seconds

if TYPE_CHECKING:
    from typing_extensions import Self

STREAMS = 8
TIMEOUT_S = 30.0
_HOP = "peer"
_MOST_ECHOES = 2000


def measure(
    address: str | None,
    expected: Expected,
    *,
    token: str | None = None,
    seconds: float = 1.0,
    told: Told,
    streams: int = STREAMS,
    timeout_s: float = TIMEOUT_S,
) -> list[Finding]:
    """Rates to and from the listener at ``address``, and the round trip; loopback for None.

    What is expected is what the link of the route should give; the plan's ``cluster.peer`` where
    that is not known. Raises UsageError for an address that is none; trouble is a finding.
    """
    if address is None:
        return _loopback(seconds, told, streams, timeout_s)
    host, port = parse_address(address, "--peer")
    try:
        with _Session(host, port, token, seconds, timeout_s) as session:
            return _across(session, address, expected, told, streams)
    except (ForebayError, OSError) as error:
        return [failed(_HOP, "to the peer", Kind.RATE, str(error), _advice(error), "cluster.peer")]
    except (RuntimeError, MemoryError) as error:
        return [starved(_HOP, "to the peer", error)]


def expectation(planned: Figure | None, link: Link | None) -> Figure | None:
    """What this one link should give; the plan's rate where the link does not say its speed.

    The plan's rate is of all links of a node together, and streams to one address take one.
    """
    payload = None if link is None else link.payload_bytes_per_s
    if link is None or link.bits_per_s is None or payload is None:
        return planned
    source = f"{link.interface} says {link.bits_per_s / 1e9:g} Gbit/s, 94 % of it is payload"
    if planned is not None and float(planned.value) > payload:
        source += f"; the plan assumes more links together: {show_rate(float(planned.value))}"
    return Figure(value=payload, source=source)


def _across(
    session: _Session, address: str, expected: Expected, told: Told, streams: int
) -> list[Finding]:
    told(f"{_HOP}: round trips to {address}")
    trip = session.round_trips()
    told(f"{_HOP}: {streams} streams to {address}")
    up = session.rate("up", streams)
    told(f"{_HOP}: {streams} streams from {address}")
    down = session.rate("down", streams)
    link = session.link()
    here = session.is_here()
    wanted = None if here else expectation(expected.get("cluster.peer"), link)
    way = "" if link is None else f" by {link.interface}"
    if here:
        way = " of this node to itself, which is no link"
    line = partial(
        compare,
        hop=_HOP,
        kind=Kind.RATE,
        expected={} if wanted is None else {"cluster.peer": wanted},
        field="cluster.peer",
        note=f"{streams} TCP streams{way}",
        advice="see the link's speed, errors and MTU (ethtool, ethtool -S) and what else uses it; "
        "take more --streams where a core is the limit; RDMA gets more out of a fast link than TCP",
    )
    to, back = line(name="to the peer", measured=up), line(name="from the peer", measured=down)
    if here or down < up:  # the slower way is planned with, and none that is no link
        to = replace(to, field="")
    if here or up <= down:
        back = replace(back, field="")
    return [to, back, _trip("round trip", trip)]


def _loopback(seconds: float, told: Told, streams: int, timeout_s: float) -> list[Finding]:
    """This node to itself: the cost of TCP here, and no measure of a link."""
    told(f"{_HOP}: {streams} streams over loopback; --peer HOST:PORT measures another node")
    token = secrets.token_hex(16)
    listener = Listener(LOOPBACK, 0, token, lambda _: None)
    limit_s = 3 * (seconds + timeout_s)
    thread = threading.Thread(target=listener.serve, args=(limit_s,), name="listen", daemon=True)
    try:
        thread.start()
        with _Session(LOOPBACK, listener.port, token, seconds, timeout_s) as session:
            trip, rate = session.round_trips(), session.rate("up", streams)
    except (ForebayError, OSError) as error:
        if listener.starved:
            return [starved(_HOP, "loopback", RuntimeError(NO_THREAD))]
        advice = "see that loopback is up (ip link set lo up) and that no firewall holds it back"
        return [failed(_HOP, "loopback", Kind.RATE, str(error), advice)]
    except (RuntimeError, MemoryError) as error:
        return [starved(_HOP, "loopback", error)]
    finally:
        listener.close()
        if thread.ident is not None:
            thread.join()
    return [
        Finding(
            name="loopback",
            hop=_HOP,
            kind=Kind.RATE,
            verdict=Verdict.MEASURED,
            measured=rate,
            note=f"{streams} TCP streams of this node to itself, which is no link; "
            "--peer HOST:PORT measures one",
        ),
        _trip("loopback round trip", trip),
    ]


def _advice(error: Exception) -> str:
    """What to do on which node; a listener that answered runs already."""
    text = str(error)
    if BUSY in text:
        return "measure again when the other session has ended: one is served at a time"
    if WRONG_TOKEN in text:
        return "give both nodes the same word: --token, or FOREBAY_TOKEN"
    if isinstance(error, DeniedError):
        return "measure again; the listener has ended this session"
    return "on the other node: forebay doctor --listen HOST:PORT --token WORD, then again"


def _trip(name: str, seen: Samples) -> Finding:
    return Finding(
        name=name,
        hop=_HOP,
        kind=Kind.SECONDS,
        verdict=Verdict.MEASURED,
        measured=seen.median_s,
        note=f"median, {seen}, {ECHO_BYTES} B",
    )


class _Session:
    """One session with a listener, entered to begin it. Every wait has ``timeout_s``."""

    def __init__(
        self, host: str, port: int, token: str | None, seconds: float, timeout_s: float
    ) -> None:
        self._host, self._port, self._token = host, port, token
        self._seconds, self._timeout_s = seconds, timeout_s
        self._shown = f"{host}:{port}"
        self._id = ""

    def __enter__(self) -> Self:
        """Open the control connection. Raises StoreError, DeniedError, DeadlineError."""
        self._control, answer = self._connect("control")
        self._id = text_of(answer, "session")
        return self

    def __exit__(self, *_: object) -> None:
        """End the session."""
        close(self._control)

    def link(self) -> Link | None:
        """The link that the way to the listener takes."""
        return link_to(self._control.getpeername()[0], self._control.getsockname()[0])

    def is_here(self) -> bool:
        """Whether the listener is on this very node, which is no link."""
        there = str(self._control.getpeername()[0])
        return is_loopback(there) or there == self._control.getsockname()[0]

    def round_trips(self) -> Samples:
        """Times of small echoes, one after another."""
        block = secrets.token_bytes(ECHO_BYTES)
        times_s: list[float] = []
        ends_s = time.monotonic() + self._seconds / 2
        with self._told("an echo"):
            while not times_s or (time.monotonic() < ends_s and len(times_s) < _MOST_ECHOES):
                began_s = time.perf_counter()
                self._control.sendall(block)
                read_block(self._control, ECHO_BYTES)
                times_s.append(time.perf_counter() - began_s)
        return summarize(times_s)

    def rate(self, role: str, streams: int) -> float:
        """Bytes/s of all streams together until the last byte has arrived; ``up`` is from here."""
        lanes: list[socket.socket] = []
        try:
            for _ in range(streams):
                lanes.append(self._connect(role)[0])  # noqa: PERF401 - those open are closed
            call = self._send if role == "up" else drain
            calls: list[Callable[[], int]] = [partial(call, lane) for lane in lanes]
            began_s = time.perf_counter()
            with self._told("the end of a stream"):
                counts = side_by_side(
                    calls,
                    timeout_s=self._seconds + self._timeout_s,
                    what=f"{self._shown}: the end of {streams} streams",
                )
            return sum(counts) / max(time.perf_counter() - began_s, 1e-9)
        finally:
            for lane in lanes:
                close(lane)

    def _send(self, lane: socket.socket) -> int:
        """Send for the time given; the bytes that the other side has."""
        send_for(lane, self._seconds)
        return int(number_of(read_frame(lane), "bytes", 0))

    def _connect(self, role: str) -> tuple[socket.socket, dict[str, object]]:
        """A connection that has been let in, and what was answered."""
        with self._told("a connection"):
            lane = socket.create_connection((self._host, self._port), timeout=self._timeout_s)
        try:
            lane.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._told("a greeting"):
                hello = read_frame(lane)
                if hello.get("forebay") != "doctor" or hello.get("version") != VERSION:
                    raise StoreError(
                        f"{self._shown}: no forebay doctor --listen of this version answers there"
                    )
                shown = proof(self._token, text_of(hello, "nonce"), role)
                seconds = self._seconds
                send_frame(lane, role=role, session=self._id, seconds=seconds, proof=shown)
            with self._told("an answer to its greeting"):
                answer = read_frame(lane)
            if answer.get("ok") is not True:
                raise DeniedError(f"{self._shown}: refused: {text_of(answer, 'why')[:100]}")
        except BaseException:
            close(lane)
            raise
        return lane, answer

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Trouble inside, told with what was waited for."""
        try:
            yield
        except TimeoutError:
            raise DeadlineError(
                f"{self._shown}: waited {show_seconds(self._timeout_s)} for {what}"
            ) from None
        except ConnectionRefusedError:
            raise StoreError(f"{self._shown}: nobody listens there") from None
        except OSError as error:
            raise StoreError(f"{self._shown}: {what}: {error.strerror or error}") from None
        except DeadlineError:
            raise
        except StoreError as error:
            already = str(error).startswith(self._shown)
            raise error if already else StoreError(f"{self._shown}: {what}: {error}") from None
