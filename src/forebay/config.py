"""Settings a user gives, frozen and cross-checked, one documented field each."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.errors import UsageError
from forebay.units import parse_seconds

RUNTIME_VARIABLE = "FOREBAY_RUNTIME_DIR"
LINGER_VARIABLE = "FOREBAY_AGENT_LINGER_S"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which committed checkpoints stay: the ``last`` newest, and multiples of ``every``.

    While a job runs that went back to an older step, also the ``last`` that it committed itself.
    """

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
        durable_every: every n-th snapshot goes to the durable tier, or one in so long a time
            (``"10min"``); the others stay near.
        keep: retention of committed checkpoints; None keeps all.
        drain_bytes_per_s: limit of the drain to the durable tier for this node; None for none.
        drain_requests_per_s: limit of this node's requests to an object store; None for none.
        stagger_s: window over which the nodes begin to upload, each at a time of its own by a hash
            of its name; None gives 5 ms a node, at most 30 s.
        queue: snapshots on the local tier that may wait behind the one that uploads; a newer one
            takes the place of the oldest of them, which then stays near.
        store_timeout_s: how long a tier that fails is tried again while nothing comes through.
        commit_mode: ``create`` needs a durable tier where exactly one of many creators wins;
            ``single-writer`` does without, and trusts that only one job ever writes to the run.
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
    durable_every: int | str = 1
    keep: Keep | None = None
    drain_bytes_per_s: float | None = None
    drain_requests_per_s: float | None = None
    stagger_s: float | None = None
    queue: int = 1
    store_timeout_s: float = 21600.0
    commit_mode: Literal["create", "single-writer"] = "create"
    gather_timeout_s: float = 1800.0
    check_replicas: Literal["sample", "always"] = "sample"
    agent: Literal["auto", "external"] = "auto"
    agent_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= 64:
            raise UsageError(f"slots: expected 1 to 64, found {self.slots}")
        if self.on_full not in ("skip", "wait"):
            raise UsageError(f"on_full: expected 'skip' or 'wait', found {self.on_full!r}")
        every_s = self.durable_every_s
        if (every_s is None and self.durable_every_count < 1) or every_s == 0:
            raise UsageError(
                "durable_every: expected a number of snapshots, or a time such as '10min', found "
                f"{self.durable_every!r}"
            )
        if self.durable_every != 1 and self.local is None:
            raise UsageError(
                "durable_every: a snapshot that is not durable needs the local tier: give local="
            )
        for name in ("drain_bytes_per_s", "drain_requests_per_s", "store_timeout_s"):
            given = getattr(self, name)
            if given is not None and not given > 0:
                raise UsageError(f"{name}: expected > 0, found {given}")
        if self.stagger_s is not None and not 0 <= self.stagger_s < math.inf:
            raise UsageError(f"stagger_s: expected 0 or more seconds, found {self.stagger_s}")
        if self.queue < 0:
            raise UsageError(f"queue: expected 0 or more, found {self.queue}")
        if self.commit_mode not in ("create", "single-writer"):
            raise UsageError(
                f"commit_mode: expected 'create' or 'single-writer', found {self.commit_mode!r}"
            )
        if self.check_replicas not in ("sample", "always"):
            raise UsageError(
                f"check_replicas: expected 'sample' or 'always', found {self.check_replicas!r}"
            )
        if self.agent not in ("auto", "external"):
            raise UsageError(f"agent: expected 'auto' or 'external', found {self.agent!r}")

    @property
    def durable_every_s(self) -> float | None:
        """The time between durable snapshots, in seconds, where that is how they are chosen."""
        return parse_seconds(self.durable_every) if isinstance(self.durable_every, str) else None

    @property
    def durable_every_count(self) -> int:
        """Every n-th snapshot of a rank is for the durable tier; 1 where a time decides."""
        return 1 if isinstance(self.durable_every, str) else self.durable_every


_STAGGER_S_PER_NODE, _LONGEST_STAGGER_S = 0.005, 30.0


def stagger_s(given: float | None, nodes: int) -> float:
    """The window over which ``nodes`` nodes begin to upload, in seconds."""
    if given is not None:
        return given
    return min(_LONGEST_STAGGER_S, _STAGGER_S_PER_NODE * (nodes - 1))


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
