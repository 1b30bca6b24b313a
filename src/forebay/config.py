"""Settings a user gives, frozen and cross-checked, one documented field each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.errors import UsageError

RUNTIME_VARIABLE = "FOREBAY_RUNTIME_DIR"
LINGER_VARIABLE = "FOREBAY_AGENT_LINGER_S"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which committed checkpoints stay: the ``last`` newest, and multiples of ``every``."""

    last: int = 3
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise UsageError(f"keep: last must be at least 1, found {self.last}")
        if self.every is not None and self.every < 1:
            raise UsageError(f"keep: every must be at least 1, found {self.every}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one run checkpoints. Times in seconds, rates in bytes per second.

    Attributes:
        local: directory of the node-local tier (NVMe), or None for none.
        slots: images a rank may have in memory at once.
        on_full: a save that finds no free slot is skipped and counted, or waits for one.
        full_timeout_s: how long ``on_full="wait"`` waits before the save is skipped after all.
        durable_every: every n-th snapshot goes to the durable tier; the others stay near.
        keep: retention of committed checkpoints; None keeps all.
        drain_bytes_per_s: limit of the drain to the durable tier for this node; None for none.
        gather_timeout_s: how long a commit waits for the records of all nodes.
        check_replicas: compare replicas above 64 KiB in full once an attempt and by a sample at
            each save, or in full at ``always``, which stages and hashes every replica each time.
        agent: ``auto`` starts a node agent when none listens; ``external`` expects one.
        agent_timeout_s: how long set-up waits for an agent to answer.
    """

    local: Path | None = None
    slots: int = 2
    on_full: Literal["skip", "wait"] = "skip"
    full_timeout_s: float = 600.0
    durable_every: int = 1
    keep: Keep | None = None
    drain_bytes_per_s: float | None = None
    gather_timeout_s: float = 1800.0
    check_replicas: Literal["sample", "always"] = "sample"
    agent: Literal["auto", "external"] = "auto"
    agent_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= 64:
            raise UsageError(f"slots: expected 1 to 64, found {self.slots}")
        if self.on_full not in ("skip", "wait"):
            raise UsageError(f"on_full: expected 'skip' or 'wait', found {self.on_full!r}")
        if self.durable_every < 1:
            raise UsageError(f"durable_every: expected at least 1, found {self.durable_every}")
        if self.durable_every > 1 and self.local is None:
            raise UsageError(
                "durable_every: a snapshot that is not durable needs the local tier: give local="
            )
        if self.drain_bytes_per_s is not None and self.drain_bytes_per_s <= 0:
            raise UsageError(f"drain_bytes_per_s: expected > 0, found {self.drain_bytes_per_s}")
        if self.check_replicas not in ("sample", "always"):
            raise UsageError(
                f"check_replicas: expected 'sample' or 'always', found {self.check_replicas!r}"
            )
        if self.agent not in ("auto", "external"):
            raise UsageError(f"agent: expected 'auto' or 'external', found {self.agent!r}")


def runtime_directory() -> Path:
    """Where jobs meet their agents: ``$FOREBAY_RUNTIME_DIR``, else shared memory, one a user."""
    given = os.environ.get(RUNTIME_VARIABLE)
    return Path(given) if given else Path(f"/dev/shm/forebay-{os.getuid()}")  # noqa: S108 - ours, 0700


def linger_s() -> float:
    """How long an agent outlives trainers that died; ``$FOREBAY_AGENT_LINGER_S``, else 120 s."""
    given = os.environ.get(LINGER_VARIABLE, "120")
    try:
        return float(given)
    except ValueError:
        raise UsageError(f"{LINGER_VARIABLE}: expected seconds, found {given!r}") from None
