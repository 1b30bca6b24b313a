"""What a restore did: which bytes came from where, and what was let pass."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SourceShare:
    """What one source gave: bytes, requests, seconds summed over threads."""

    bytes: int = 0
    reads: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """One rank's restore.

    Attributes:
        by_source: shares of ``memory``, ``local`` and ``durable``.
        bad_ranges: ranges that failed their digest or were cut and came from the next source.
        bytes_needed: size of the targets; ``bytes_read`` is what was read and verified for them.
        missing: entries of the target that the checkpoint lacks (strict=False).
        unused: entries of the checkpoint without a place in any target (strict=False).
        cast: tensors that were rounded into another dtype (allow_cast=True).
        skipped: per-rank entries that were left as they are (per_rank="skip").
    """

    step: int
    attempt: str
    seconds: float
    by_source: dict[str, SourceShare]
    bad_ranges: tuple[str, ...]
    bytes_needed: int
    bytes_read: int
    missing: tuple[str, ...] = field(default=())
    unused: tuple[str, ...] = field(default=())
    cast: tuple[str, ...] = field(default=())
    skipped: tuple[str, ...] = field(default=())
