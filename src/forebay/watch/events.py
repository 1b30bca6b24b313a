"""Typed events. Anyone may emit one; nobody is imported from below.

An event goes to the ``forebay`` logger as one line, its fields as ``extra={"forebay": {...}}``, and
to every function that was added with ``listen``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

LOGGER = logging.getLogger("forebay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened: ``name`` is stable, ``fields`` are numbers and short texts."""

    name: str
    at_s: float
    level: int
    fields: dict[str, object] = field(default_factory=dict)

    def line(self) -> str:
        """One line for people."""
        return self.name + "".join(f" {key}={value}" for key, value in self.fields.items())


_LISTENERS: list[Callable[[Event], None]] = []


def listen(function: Callable[[Event], None]) -> Callable[[], None]:
    """Call ``function`` with every event from now on; returns what ends that."""
    _LISTENERS.append(function)
    return lambda: _LISTENERS.remove(function)


def emit(name: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Record an event. Never raises: watching must not harm what is watched."""
    event = Event(name=name, at_s=time.time(), level=level, fields=fields)
    LOGGER.log(level, "%s", event.line(), extra={"forebay": fields})
    for function in tuple(_LISTENERS):
        try:
            function(event)
        except Exception:
            LOGGER.exception("a listener of forebay events failed")
