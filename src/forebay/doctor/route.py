"""The interface that the way to a host takes, and what its link should give."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from forebay.doctor.links import text_of

_UP = 0x1
PAYLOAD = 0.94
"""Part of a link's rate that is left for TCP's payload at an MTU of 1500."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """``bits_per_s``: what the interface says of itself; None where it does not know."""

    interface: str
    bits_per_s: float | None

    @property
    def payload_bytes_per_s(self) -> float | None:
        """What TCP should get through it."""
        return None if self.bits_per_s is None else self.bits_per_s / 8 * PAYLOAD


def link_to(address: str, local: str, root: Path = Path("/")) -> Link | None:
    """The link by which ``address`` is reached from ``local``; None where the system says nothing.

    Both are numeric addresses.
    """
    to = ipaddress.ip_address(address.partition("%")[0])
    if to.is_loopback or address == local:
        return None
    if isinstance(to, ipaddress.IPv4Address):
        name = _route4(to, text_of(root / "proc/net/route"))
    else:
        name = _owner6(local.partition("%")[0], text_of(root / "proc/net/if_inet6"))
    if name is None:
        return None
    speed = text_of(root / "sys/class/net" / name / "speed")  # Mbit/s; -1 where it does not know
    known = speed.isdigit() and int(speed) > 0
    return Link(interface=name, bits_per_s=float(speed) * 1e6 if known else None)


def _route4(to: ipaddress.IPv4Address, table: str) -> str | None:
    """The interface of the narrowest route; the kernel writes addresses in the host's order."""
    best, found = (-1, 0), None
    for line in table.splitlines()[1:]:
        with contextlib.suppress(ValueError, IndexError):
            words = line.split()
            target, flags, mask = (int(words[at], 16) for at in (1, 3, 7))
            there = int.from_bytes(to.packed, "little")
            narrow = (mask.bit_count(), -int(words[6]))
            if flags & _UP and there & mask == target and narrow > best:
                best, found = narrow, words[0]
    return found


def _owner6(local: str, table: str) -> str | None:
    """The interface that has an address."""
    wanted = socket.inet_pton(socket.AF_INET6, local).hex()
    for line in table.splitlines():
        words = line.split()
        if words and words[0] == wanted:
            return words[-1]
    return None
