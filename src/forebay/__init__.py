"""Forebay: the checkpoint write path for very large PyTorch training runs.

Importing this package imports neither torch nor anything that stores bytes; the names below load
their modules when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from forebay.capture.declare import per_rank, rng, value
    from forebay.checkpointer import Checkpointer
    from forebay.config import Keep
    from forebay.errors import (
        AgentError,
        BusyError,
        ConflictError,
        DamagedError,
        DeadlineError,
        DeniedError,
        ForebayError,
        FormatError,
        FullError,
        IncompleteError,
        MismatchError,
        NotFoundError,
        StateError,
        StoreError,
        UsageError,
    )
    from forebay.reader import open  # noqa: A004 - the public name
    from forebay.snapshot import Snapshot

_HOMES = {
    "Checkpointer": "forebay.checkpointer",
    "Keep": "forebay.config",
    "Snapshot": "forebay.snapshot",
    "open": "forebay.reader",
    "per_rank": "forebay.capture.declare",
    "rng": "forebay.capture.declare",
    "value": "forebay.capture.declare",
    **dict.fromkeys(
        (
            "AgentError",
            "BusyError",
            "ConflictError",
            "DamagedError",
            "DeadlineError",
            "DeniedError",
            "ForebayError",
            "FormatError",
            "FullError",
            "IncompleteError",
            "MismatchError",
            "NotFoundError",
            "StateError",
            "StoreError",
            "UsageError",
        ),
        "forebay.errors",
    ),
}

__all__ = [
    "AgentError",
    "BusyError",
    "Checkpointer",
    "ConflictError",
    "DamagedError",
    "DeadlineError",
    "DeniedError",
    "ForebayError",
    "FormatError",
    "FullError",
    "IncompleteError",
    "Keep",
    "MismatchError",
    "NotFoundError",
    "Snapshot",
    "StateError",
    "StoreError",
    "UsageError",
    "open",
    "per_rank",
    "rng",
    "value",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    found = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
