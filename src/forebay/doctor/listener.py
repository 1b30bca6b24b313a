"""The other end of a measured link: serves one session at a time, until its deadline."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time

from forebay.doctor.finding import Told
from forebay.doctor.frames import (
    BLOCK_BYTES,
    ECHO_BYTES,
    MOST_STREAMS,
    VERSION,
    close,
    drain,
    is_loopback,
    number_of,
    parse_address,
    proof,
    read_frame,
    send_frame,
    text_of,
)
from forebay.doctor.starved import ADVICE
from forebay.errors import ForebayError, UsageError
from forebay.units import show_seconds

LOOPBACK = "127.0.0.1"
WRONG_TOKEN, BUSY = "wrong token", "busy with another session"
"""Why a caller is refused; it gives advice by it."""

GREETING_S = 5.0
"""In so long a caller says who it is."""

_LOOK_S = 0.1
_TURN_S = 1.0  # the end of a session is noticed within it
_LONGEST_S = 60.0  # of one direction, whatever the caller asks
_IDLE_S = 30.0


def listen(address: str, *, token: str | None, timeout_s: float, told: Told) -> int:
    """Serve at ``[HOST:]PORT`` for ``timeout_s``; how many sessions there were.

    Raises UsageError for an address that cannot be bound, or that is not this node's alone while
    no token is given: anybody could fill the link then.
    """
    host, port = parse_address(address, "--listen", host=LOOPBACK)
    if not token and not is_loopback(host):
        raise UsageError(
            f"--listen {address}: others reach it: give --token, or FOREBAY_TOKEN, the same on both"
        )
    listener = Listener(host, port, token, told)
    try:
        told(
            f"listening on {listener.shown} for {show_seconds(timeout_s)}: "
            f"forebay doctor --peer {listener.shown}"
        )
        listener.serve(timeout_s)
    finally:
        listener.close()
    return listener.sessions


class Listener:
    """A listening socket and the connections it has taken. ``sessions`` counts those begun.

    ``starved``: a caller had to be sent away since the system gave no further thread.
    """

    def __init__(self, host: str, port: int, token: str | None, told: Told) -> None:
        self.sessions = 0
        self.starved = False
        self._token, self._told = token, told
        self._over = threading.Event()
        self._lock = threading.Condition()
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._session = ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise UsageError(
                f"--listen {host}:{port}: {error.strerror}: choose another port or address"
            ) from None
        self._socket.settimeout(_LOOK_S)
        name = self._socket.getsockname()
        self.host, self.port = str(name[0]), int(name[1])

    @property
    def shown(self) -> str:
        """Where it listens, as ``HOST:PORT``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def serve(self, timeout_s: float) -> None:
        """Take connections until the time is over or ``close`` is called."""
        ends_s = time.monotonic() + timeout_s
        while not self._over.is_set() and time.monotonic() < ends_s:
            try:
                caller, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._over.is_set():
                    return
                time.sleep(_LOOK_S)  # no descriptors left, perhaps
                continue
            with self._lock:
                crowded = len(self._open) > MOST_STREAMS + 8
                if not crowded:
                    self._open.add(caller)
            if crowded:
                close(caller)
                continue
            thread = threading.Thread(target=self._run, args=(caller,), name="listen", daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # it never ran, nobody may wait for it
                self.starved = True
                self._threads.discard(thread)
                with self._lock:
                    self._open.discard(caller)
                close(caller)
                self._told("a caller was sent away: no thread to be had: " + ADVICE)

    def close(self) -> None:
        """Take no more, end what there is."""
        self._over.set()
        close(self._socket)
        with self._lock:
            left = list(self._open)
        for sock in left:
            close(sock)
        for thread in list(self._threads):
            thread.join(GREETING_S)

    def _run(self, caller: socket.socket) -> None:
        """One connection; whatever a stranger sends, it ends that connection alone."""
        try:
            with contextlib.suppress(OSError, ForebayError, ValueError, TypeError):
                self._talk(caller)
        finally:
            with self._lock:
                self._open.discard(caller)
            close(caller)
            self._threads.discard(threading.current_thread())

    def _talk(self, caller: socket.socket) -> None:
        caller.settimeout(GREETING_S)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_hex(16)
        send_frame(caller, forebay="doctor", version=VERSION, nonce=nonce)
        hello = read_frame(caller)
        role, given = text_of(hello, "role"), text_of(hello, "session")
        seconds = min(max(number_of(hello, "seconds", 1.0), 0.0), _LONGEST_S)
        known = proof(self._token, nonce, role)
        if not hmac.compare_digest(known.encode(), text_of(hello, "proof").encode()):
            send_frame(caller, ok=False, why=WRONG_TOKEN)
            return
        caller.settimeout(_IDLE_S + 4 * seconds)
        if role == "control":
            self._control(caller)
            return
        with self._lock:
            of_session = bool(given) and given == self._session
        if role not in ("up", "down") or not of_session:
            send_frame(caller, ok=False, why="no such session")
            return
        send_frame(caller, ok=True, session=given)
        if role == "up":
            send_frame(caller, bytes=drain(caller))
        else:
            send_for(caller, seconds)

    def _control(self, caller: socket.socket) -> None:
        own = secrets.token_hex(8)
        with self._lock:
            free = self._lock.wait_for(lambda: not self._session, timeout=_TURN_S)
            if free:
                self._session = own
                self.sessions += 1
        if not free:
            send_frame(caller, ok=False, why=f"{BUSY}: try again later")
            return
        try:
            self._told(f"a session of {caller.getpeername()[0]}")
            send_frame(caller, ok=True, session=own)
            while data := caller.recv(ECHO_BYTES):
                caller.sendall(data)
        finally:
            with self._lock:
                self._session = ""
                self._lock.notify()


def send_for(sock: socket.socket, seconds: float) -> None:
    """Send for so long, then close this side. Raises OSError."""
    block = memoryview(secrets.token_bytes(BLOCK_BYTES))
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        sock.sendall(block)
    sock.shutdown(socket.SHUT_WR)
