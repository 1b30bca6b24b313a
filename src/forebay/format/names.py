"""Object keys of a run: the only place that builds or parses one.

    manifests/<step:012d>.json
    data/<step:012d>/<attempt>/node-<n:05d>/rank-<r:05d>.safetensors
    data/<step:012d>/<attempt>/node-<n:05d>/record.json.zst
    data/<step:012d>/<attempt>/index.parquet
    data/<step:012d>/<attempt>/state.msgpack.zst
    cadence/<step:012d>-<attempt>.json
    probe/result.json, probe/<word>

All are relative to the run's prefix. An attempt never contains a slash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forebay.errors import FormatError, UsageError

MAX_STEP = 10**12 - 1
MANIFEST_PREFIX = "manifests/"
DATA_PREFIX = "data/"
PROBE_RESULT_KEY = "probe/result.json"

_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_=-]{0,79}(?:\.[0-9]{1,6})?")
_MANIFEST = re.compile(r"manifests/([0-9]{12})\.json")
_DATA = re.compile(
    r"data/(?P<step>[0-9]{12})/(?P<attempt>[^/]+)/"
    r"(?:node-(?P<node>[0-9]{5,10})/(?:rank-(?P<rank>[0-9]{5,10})\.safetensors|record\.json\.zst)"
    r"|index\.parquet|state\.msgpack\.zst)"
)


def check_step(step: int) -> int:
    """Return ``step`` when it is an int in 0 .. 10**12-1. Raises UsageError."""
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise UsageError(f"step: expected an integer from 0 to {MAX_STEP}, found {step!r}")
    return step


def check_attempt(attempt: str) -> str:
    """Return ``attempt`` when it may stand in a key. Raises UsageError."""
    if _ATTEMPT.fullmatch(attempt) is None:
        raise UsageError(
            f"attempt: expected letters, digits, '_', '-' or '=', at most 80, found {attempt!r}"
        )
    return attempt


def check_start(attempt: str) -> str:
    """Return ``attempt`` when it may name a start of a job. Raises UsageError.

    A dot is not for it: what follows one counts how often a start saved the same step.
    """
    if "." in attempt:
        raise UsageError(
            f"attempt: expected letters, digits, '_', '-' or '=', and no dot, found {attempt!r}"
        )
    return check_attempt(attempt)


def cadence_key(step: int, attempt: str) -> str:
    """Key of node 0's word on whether a snapshot goes to the durable tier."""
    return f"cadence/{check_step(step):012d}-{check_attempt(attempt)}.json"


def probe_key(word: str) -> str:
    """Key of an object that a probe of the store creates and deletes."""
    return f"probe/{word}"


def manifest_key(step: int) -> str:
    """Key of the commit point of ``step``."""
    return f"{MANIFEST_PREFIX}{check_step(step):012d}.json"


def step_prefix(step: int) -> str:
    """Prefix of everything but the manifest that was written for ``step``."""
    return f"{DATA_PREFIX}{check_step(step):012d}/"


def attempt_prefix(step: int, attempt: str) -> str:
    """Prefix of what one attempt wrote for ``step``."""
    return f"{step_prefix(step)}{check_attempt(attempt)}/"


def shard_key(step: int, attempt: str, node: int, rank: int) -> str:
    """Key of the image of one rank."""
    return f"{attempt_prefix(step, attempt)}node-{node:05d}/rank-{rank:05d}.safetensors"


def record_key(step: int, attempt: str, node: int) -> str:
    """Key of the record of one node."""
    return f"{attempt_prefix(step, attempt)}node-{node:05d}/record.json.zst"


def index_key(step: int, attempt: str) -> str:
    """Key of the index of all slices."""
    return f"{attempt_prefix(step, attempt)}index.parquet"


def state_key(step: int, attempt: str) -> str:
    """Key of the merged tree of the state's entries."""
    return f"{attempt_prefix(step, attempt)}state.msgpack.zst"


def parse_manifest_key(key: str) -> int | None:
    """The step of a manifest key; None for any other name."""
    found = _MANIFEST.fullmatch(key)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataName:
    """A parsed data key; ``node`` and ``rank`` are None where the object belongs to all."""

    step: int
    attempt: str
    node: int | None
    rank: int | None
    leaf: str


def parse_data_key(key: str) -> DataName | None:
    """Parse a key under ``data/``; None for a foreign name, which nobody of ours may touch."""
    found = _DATA.fullmatch(key)
    if found is None or _ATTEMPT.fullmatch(found["attempt"]) is None:
        return None
    return DataName(
        step=int(found["step"]),
        attempt=found["attempt"],
        node=None if found["node"] is None else int(found["node"]),
        rank=None if found["rank"] is None else int(found["rank"]),
        leaf=key.rpartition("/")[2],
    )


def require_within(key: str, step: int, attempt: str) -> str:
    """Return ``key`` when it is one that ``attempt`` may have written for ``step``.

    Raises FormatError: a manifest or record never names an object elsewhere (``../``, absolute,
    another step or attempt).
    """
    name = parse_data_key(key)
    if name is None or name.step != step or name.attempt != attempt:
        raise FormatError(
            f"object name {key!r} is not one of step {step}, attempt {attempt}: "
            "the file naming it is damaged or forged"
        )
    return key
