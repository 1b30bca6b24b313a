"""The link to a peer: bytes a second both ways by several streams, and the round trip.

Plain TCP. Every connection begins with a challenge: the listener sends a nonce, the caller answers
with its HMAC under the token, which itself never crosses the link, and says what it wants.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from forebay.doctor.finding import Expected, Finding, Verdict, compare
from forebay.doctor.samples import Samples, summarize
from forebay.errors import DeadlineError, DeniedError, StoreError, UsageError
from forebay.plan.figure import Figure, Kind
from forebay.units import show_seconds

STREAMS = 4
_HOP = "peer"
_FIELD = "cluster.peer"
_LINK_SHARE = 0.8  # what TCP reaches of a link that is in order
_NONCE_BYTES, _MAC_BYTES, _ECHO_BYTES = 16, 32, 64
_BLOCK_BYTES = 2**20
_ECHO, _SINK, _FLOW = b"e", b"s", b"f"
_YES, _DENIED, _BUSY = b"y", b"d", b"b"
_MOST_CONNECTIONS = 16
_MOST_TRIPS = 500
_TIMEOUT_S = 10.0
_SIOCGIFADDR = 0x8915

Told = Callable[[str], None]


class _Listener:
    """Answers callers until its deadline. One caller's address at a time."""

    def __init__(self, server: socket.socket, token: str, deadline_s: float) -> None:
        self._server, self._token, self._deadline_s = server, token, deadline_s
        self._lock = threading.Lock()
        self._active: dict[str, int] = {}
        self._stop = threading.Event()

    def serve(self) -> None:
        """Accept until the deadline or ``stop``."""
        self._server.settimeout(0.2)
        while not self._stop.is_set() and time.monotonic() < self._deadline_s:
            try:
                caller, (host, *_) = self._server.accept()
            except TimeoutError:
                continue
            threading.Thread(target=self._answer, args=(caller, host), daemon=True).start()

    def stop(self) -> None:
        """End soon."""
        self._stop.set()

    def _answer(self, caller: socket.socket, host: str) -> None:
        with caller, contextlib.suppress(OSError):  # whoever hangs up ends only its own connection
            caller.settimeout(_TIMEOUT_S)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            caller.sendall(nonce)
            said = _receive(caller, _MAC_BYTES + 1)
            if not hmac.compare_digest(said[:_MAC_BYTES], _mac(self._token, nonce)):
                caller.sendall(_DENIED)
                return
            if not self._enter(host):
                caller.sendall(_BUSY)
                return
            try:
                caller.sendall(_YES)
                self._work(caller, said[_MAC_BYTES:])
            finally:
                self._leave(host)

    def _enter(self, host: str) -> bool:
        with self._lock:
            others = any(count for name, count in self._active.items() if name != host)
            if others or self._active.get(host, 0) >= _MOST_CONNECTIONS:
                return False
            self._active[host] = self._active.get(host, 0) + 1
            return True

    def _leave(self, host: str) -> None:
        with self._lock:
            self._active[host] -= 1

    def _work(self, caller: socket.socket, wanted: bytes) -> None:
        block = bytearray(_BLOCK_BYTES)
        if wanted == _ECHO:
            while not self._stop.is_set():
                caller.sendall(_receive(caller, _ECHO_BYTES))
        elif wanted == _SINK:
            count = 0
            while got := caller.recv_into(block):
                count += got
            caller.sendall(struct.pack("!Q", count))
        elif wanted == _FLOW:
            while not self._stop.is_set() and time.monotonic() < self._deadline_s:
                caller.sendall(block)


def listen(address: str, *, token: str = "", timeout_s: float = 600.0, told: Told) -> None:
    """Answer ``measure`` of another node until ``timeout_s`` is over.

    ``address`` is ``PORT`` on loopback or ``HOST:PORT``; a host other than loopback needs a token.
    Raises UsageError, and StoreError where the port cannot be had.
    """
    host, port = split_address(address, default="127.0.0.1")
    if not token and not _is_loopback(host):
        raise UsageError(f"--listen {address}: expected --token for a host other than loopback")
    try:
        server = socket.create_server((host, port), backlog=_MOST_CONNECTIONS)
    except OSError as error:
        raise StoreError(f"--listen {address}: {error.strerror}: choose another port") from None
    with server:
        bound = server.getsockname()
        told(f"listening on {bound[0]}:{bound[1]} for {show_seconds(timeout_s)}")
        _Listener(server, token, time.monotonic() + timeout_s).serve()


def measure(
    address: str | None, expected: Expected, *, token: str = "", seconds: float = 1.0, told: Told
) -> list[Finding]:
    """Rates to and from the listener at ``address``, and the round trip; of loopback without one.

    Raises UsageError for an address that is none; trouble with the peer is a finding.
    """
    if address is None:
        with _own_listener() as (own, secret):
            return _measure(own, {}, secret, seconds, told, name="loopback", field="")
    split_address(address, default=None)
    try:
        return _measure(address, expected, token, seconds, told, name="peer", field=_FIELD)
    except (OSError, DeadlineError, DeniedError) as error:
        text = str(error) if not isinstance(error, OSError) else f"{address}: {error}"
        return [
            Finding(
                name="peer",
                hop=_HOP,
                kind=Kind.RATE,
                verdict=Verdict.FAILED,
                field=_FIELD,
                note=text,
                advice="run `forebay doctor --listen HOST:PORT --token ...` on the peer, and open "
                "the port between the two",
            )
        ]


def _measure(
    address: str,
    expected: Expected,
    token: str,
    seconds: float,
    told: Told,
    *,
    name: str,
    field: str,
) -> list[Finding]:
    told(f"{_HOP}: round trip to {address}")
    trips, own_address = _round_trips(address, token, seconds)
    told(f"{_HOP}: to {address}")
    out = _rate(address, token, _SINK, seconds)
    told(f"{_HOP}: from {address}")
    back = _rate(address, token, _FLOW, seconds)
    advice = "compare with iperf3; check the MTU, the route (the right interface?) and the link"
    found = [
        compare(
            name=f"to the {name}" if name == "peer" else name,
            hop=_HOP,
            kind=Kind.RATE,
            measured=out,
            expected=expected,
            field=field,
            note=f"{STREAMS} TCP streams; the other way {Kind.RATE.show(back)}",
            advice=advice,
        ),
        Finding(
            name=f"round trip, {name}",
            hop=_HOP,
            kind=Kind.SECONDS,
            verdict=Verdict.MEASURED,
            measured=trips.median_s,
            note=f"median; {trips}",
        ),
    ]
    link = link_of(own_address) if name == "peer" else None
    if link is not None:
        wanted = Figure(value=link[1] * _LINK_SHARE, source=f"80 % of the link {link[0]}")
        found.append(
            compare(
                name="of the link",
                hop=_HOP,
                kind=Kind.RATE,
                measured=out,
                expected={"link": wanted},
                field="link",
                note=f"{link[0]} runs at {Kind.RATE.show(link[1])}",
                advice=advice,
            )
        )
    return found


def _round_trips(address: str, token: str, seconds: float) -> tuple[Samples, str]:
    """Times of messages there and back, and this end's own address."""
    message = bytes(_ECHO_BYTES)
    times: list[float] = []
    with _call(address, token, _ECHO) as link:
        end_s = time.perf_counter() + seconds
        while not times or (time.perf_counter() < end_s and len(times) < _MOST_TRIPS):
            began_s = time.perf_counter()
            link.sendall(message)
            _receive(link, _ECHO_BYTES)
            times.append(time.perf_counter() - began_s)
        return summarize(times), str(link.getsockname()[0])


def _rate(address: str, token: str, way: bytes, seconds: float) -> float:
    """Bytes/s of all streams together. Raises OSError, DeadlineError, DeniedError."""
    links: list[socket.socket] = []
    counts = [0] * STREAMS
    errors: list[BaseException] = []
    begin = threading.Barrier(STREAMS + 1)

    def work(number: int) -> None:
        block = bytearray(_BLOCK_BYTES)
        try:
            begin.wait()
            end_s = time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                if way == _FLOW:
                    got = links[number].recv_into(block)
                    if not got:
                        raise ConnectionError("the peer hung up")
                    counts[number] += got
                else:
                    links[number].sendall(block)
            if way == _SINK:  # what arrived counts, not what was handed to the kernel
                links[number].shutdown(socket.SHUT_WR)
                (counts[number],) = struct.unpack("!Q", _receive(links[number], 8))
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            errors.append(error)

    try:
        for _ in range(STREAMS):  # one by one: those that are open are closed if one fails
            link = _call(address, token, way)
            links.append(link)
        workers = [threading.Thread(target=work, args=(number,)) for number in range(STREAMS)]
        for worker in workers:
            worker.start()
        begin.wait()
        began_s = time.perf_counter()
        for worker in workers:
            worker.join()
        took_s = time.perf_counter() - began_s
    finally:
        for link in links:
            link.close()
    if errors:
        raise errors[0]
    return sum(counts) / took_s


def _call(address: str, token: str, wanted: bytes) -> socket.socket:
    """A connection that was let in. Raises OSError, DeadlineError, DeniedError."""
    host, port = split_address(address, default=None)
    link = socket.create_connection((host, port), timeout=_TIMEOUT_S)
    try:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = _receive(link, _NONCE_BYTES)
        link.sendall(_mac(token, nonce) + wanted)
        answer = _receive(link, 1)
    except TimeoutError:
        link.close()
        text = f"{address}: no answer of a listener within {show_seconds(_TIMEOUT_S)}"
        raise DeadlineError(text) from None
    except BaseException:
        link.close()
        raise
    if answer != _YES:
        link.close()
        if answer == _DENIED:
            raise DeniedError(f"{address}: the listener has another token: give --token its token")
        raise DeniedError(f"{address}: the listener is busy with another node: try again later")
    return link


def _receive(link: socket.socket, count: int) -> bytes:
    """Exactly so many bytes. Raises ConnectionError when the other end hangs up before."""
    data = bytearray()
    while len(data) < count:
        got = link.recv(count - len(data))
        if not got:
            raise ConnectionError("the other end hung up")
        data += got
    return bytes(data)


def _mac(token: str, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), nonce, "sha256")


@contextlib.contextmanager
def _own_listener() -> Iterator[tuple[str, str]]:
    """A listener on loopback, for as long as the block runs: its address and token."""
    secret = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0), backlog=_MOST_CONNECTIONS) as server:
        listener = _Listener(server, secret, time.monotonic() + 600)
        thread = threading.Thread(target=listener.serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}", secret
        finally:
            listener.stop()
            thread.join()


def split_address(address: str, *, default: str | None) -> tuple[str, int]:
    """``HOST:PORT``, or ``PORT`` alone where there is a default host. Raises UsageError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or default or ""
    if not host or not port.isdigit() or not 0 <= int(port) < 2**16:
        raise UsageError(f"peer {address!r}: expected HOST:PORT, a port of 0 to 65535")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address_of(name: str) -> str:
    """The IPv4 address of an interface; empty where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            packed = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, packed)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def link_of(own_address: str, net: Path = Path("/sys/class/net")) -> tuple[str, float] | None:
    """Name and rate in bytes/s of the interface that has this address; None where not known."""
    for _, name in socket.if_nameindex():
        if _address_of(name) == own_address:
            with contextlib.suppress(OSError, ValueError):
                megabits = int((net / name / "speed").read_text())
                return (name, megabits * 1e6 / 8) if megabits > 0 else None
    return None
