"""What two nodes say to each other while the link between them is measured.

A session is a control connection, which sends back whatever comes; while it lives, data
connections may name it, each for one direction. A connection begins with three frames:

    listener  {"forebay": "doctor", "version": 1, "nonce": ...}
    caller    {"role": "control" | "up" | "down", "session": ..., "seconds": ..., "proof": ...}
    listener  {"ok": true, "session": ...}, or {"ok": false, "why": ...}

The proof is an HMAC of nonce and role under the token, which itself never crosses the link. Then,
of ``up``, the caller sends until it closes its side and hears {"bytes": ...}; of ``down``, it reads
until the listener closes. What is sent means nothing and is kept nowhere.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import socket
import struct
from typing import Any

from forebay.errors import StoreError, UsageError

VERSION = 1
BLOCK_BYTES = 2**20
ECHO_BYTES = 64
MOST_STREAMS = 64
_MOST_FRAME_BYTES = 4096
_MOST_NUMBER = 1e18
_LENGTH = struct.Struct("!I")


def send_frame(sock: socket.socket, **content: Any) -> None:
    """Send one frame. Raises OSError."""
    data = json.dumps(content).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def read_frame(sock: socket.socket) -> dict[str, Any]:
    """The next frame. Raises OSError, StoreError for what is none: bounded, whoever sends it."""
    (count,) = _LENGTH.unpack(read_block(sock, _LENGTH.size))
    if count > _MOST_FRAME_BYTES:
        raise StoreError("what answers is no forebay doctor --listen")
    try:
        found = json.loads(read_block(sock, count).decode())
    except (ValueError, RecursionError):
        raise StoreError("what answers is no forebay doctor --listen") from None
    if not isinstance(found, dict):
        raise StoreError("what answers is no forebay doctor --listen")
    return found


def text_of(found: dict[str, Any], name: str) -> str:
    """A text of a frame that can be encoded and shown on one line, "" where there is none."""
    value = found.get(name)
    if not isinstance(value, str):
        return ""
    return "".join(c for c in value if c.isprintable())


def number_of(found: dict[str, Any], name: str, default: float) -> float:
    """A number of a frame. Raises StoreError for what is none."""
    value = found.get(name, default)
    if type(value) not in (int, float) or not abs(value) < _MOST_NUMBER:
        raise StoreError(f"what answers says {name} where a number is expected")
    return float(value)


def read_block(sock: socket.socket, count: int) -> bytes:
    """So many bytes. Raises OSError, StoreError when the other side closes before."""
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise StoreError("the other side closed the connection")
        data += part
    return bytes(data)


def drain(sock: socket.socket) -> int:
    """Read and forget until the other side closes; how many bytes there were."""
    into, total = memoryview(bytearray(BLOCK_BYTES)), 0
    while count := sock.recv_into(into):
        total += count
    return total


def proof(token: str | None, nonce: str, role: str) -> str:
    """What shows that a caller knows the token."""
    return hmac.digest((token or "").encode(), f"{nonce} {role}".encode(), "sha256").hex()


def parse_address(text: str, flag: str, *, host: str | None = None) -> tuple[str, int]:
    """``HOST:PORT`` or ``[IPv6]:PORT``; ``host`` where only a port is given. Raises UsageError."""
    name, colon, port = text.rpartition(":")
    if not colon and host is not None:
        name = host
    name = name.removeprefix("[").removesuffix("]") if name.startswith("[") else name
    bare_ipv6 = ":" in name and not text.startswith("[")
    if not name or bare_ipv6 or not port.isascii() or not port.isdigit() or int(port) > 65535:
        form = "HOST:PORT" if host is None else "PORT or HOST:PORT"
        raise UsageError(
            f"{flag} {text!r}: expected {form}, an IPv6 address in brackets, as 10.0.0.1:7300"
        )
    return name, int(port)


def is_loopback(host: str) -> bool:
    """Whether everything that ``host`` stands for is this node alone. Raises UsageError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"host {host!r}: {error.strerror}: name one that is known") from None
    return all(
        ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found
    )


def close(sock: socket.socket) -> None:
    """Close for both sides, whichever thread waits on it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
