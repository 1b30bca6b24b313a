"""What trainer and agent say to each other over the Unix socket, and where they meet on disk.

Frames are a 4-byte big-endian length and one msgpack message. The bytes of a snapshot and its
ticket never travel here: they lie in the arena (``format.slot``); a frame only rings the bell.
"""

from __future__ import annotations

import enum
import hashlib
from pathlib import Path
from typing import TypeAlias

import msgspec

from forebay.errors import FormatError

PROTOCOL = 1
MAX_FRAME_BYTES = 4 * 2**20

MOST_RANKS = 2**31 - 1
AGENT_SOCKET = "agent.sock"
AGENT_LOCK = "agent.lock"
AGENT_CONFIG = "agent.json"
AGENT_LOG = "agent.log"


class Phase(str, enum.Enum):
    """Where a node's part of a snapshot is. The last five are final."""

    STAGED = "staged"
    LOCAL = "local"
    UPLOADING = "uploading"
    SEALED = "sealed"
    COMMITTED = "committed"
    KEPT_NEAR = "kept_near"
    SKIPPED = "skipped"
    FAILED = "failed"
    ABANDONED = "abandoned"


FINAL_PHASES = frozenset(
    {Phase.COMMITTED, Phase.KEPT_NEAR, Phase.SKIPPED, Phase.FAILED, Phase.ABANDONED}
)


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent must know before the first trainer speaks; written beside its socket.

    Sizes in bytes, times in seconds; ``drain_bytes_per_s`` and ``drain_requests_per_s`` None mean
    as fast as the tier takes; ``durable_every_s`` None leaves it to the ranks which snapshots go to
    the durable tier. ``environment`` is a digest of what the tiers' keys come from.
    """

    run: str
    local: str | None
    node: int
    durable_every_s: float | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    drain_bytes_per_s: float | None = None
    drain_requests_per_s: float | None = None
    stagger_s: float = 0.0
    queue: int = 1
    store_timeout_s: float = 21600.0
    commit_mode: str = "create"
    environment: str = ""
    gather_timeout_s: float = 1800.0
    linger_s: float = 120.0

    def __post_init__(self) -> None:
        """Refuse what no trainer writes, whoever wrote it."""
        counts = {"node": self.node, "queue": self.queue}
        counts |= {"keep_last": self.keep_last or 0, "keep_every": self.keep_every or 0}
        for name, count in counts.items():
            if not 0 <= count <= MOST_RANKS:
                raise ValueError(f"{name} is out of range")
        if self.commit_mode not in ("create", "single-writer"):
            raise ValueError("commit_mode is neither create nor single-writer")


def read_agent_config(data: bytes, name: str) -> AgentConfig:
    """The config in a file's bytes. Raises FormatError."""
    try:
        return msgspec.json.decode(data, type=AgentConfig)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"{name}: not an agent's config: {error}") from None


def config_digest(config: AgentConfig) -> str:
    """Tells configs apart; the same for a config and for what its file is read back as."""
    read_back = msgspec.json.decode(msgspec.json.encode(config), type=AgentConfig)
    return hashlib.sha256(msgspec.json.encode(read_back)).hexdigest()[:16]


class Hello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """A trainer rank introduces itself; ``arenas`` are file names in the job's directory.

    ``config`` is the digest of the config that it would start an agent with, "" if it starts none.
    """

    protocol: int
    run: str
    attempt: str
    rank: int
    pid: int
    arenas: tuple[str, ...]
    config: str = ""


class Welcome(msgspec.Struct, tag="welcome", frozen=True, kw_only=True):
    """The agent accepts; ``pid`` is its own."""

    protocol: int
    version: str
    pid: int


class Refused(msgspec.Struct, tag="refused", frozen=True, kw_only=True):
    """The agent does not; ``kind`` is the error's kind."""

    kind: str
    text: str


class Ring(msgspec.Struct, tag="ring", frozen=True, kw_only=True):
    """A slot of this arena is STAGED: look."""

    arena: str


class Skip(msgspec.Struct, tag="skip", frozen=True, kw_only=True):
    """This rank took no snapshot of the step: no free slot."""

    rank: int
    step: int
    attempt: str
    reason: str


class Bye(msgspec.Struct, tag="bye", frozen=True, kw_only=True):
    """The rank is done; its arenas may go once they are drained."""

    rank: int


class AskStatus(msgspec.Struct, tag="ask_status", frozen=True, kw_only=True):
    """Ask for a StatusReply now."""


class AskSettled(msgspec.Struct, tag="ask_settled", frozen=True, kw_only=True):
    """Ask for a StatusReply once nothing drains and no commit is under way, or at the deadline.

    The reply gives ``question`` back: one that is asked again may be answered twice.
    """

    timeout_s: float
    question: int = 0


class Progress(msgspec.Struct, tag="progress", frozen=True, kw_only=True):
    """A snapshot moved on; sent to every rank of the node, once a second while it uploads.

    ``detail`` says why when it failed, ``trouble`` what the durable tier said while it is tried
    again; ``durable_in_s`` is when it will be durable, None while that cannot be told.
    """

    step: int
    attempt: str
    phase: Phase
    at_s: float
    nbytes: int = 0
    done_bytes: int = 0
    bytes_per_s: float = 0.0
    durable_in_s: float | None = None
    trouble: str = ""
    detail: str = ""
    kind: str = ""


class SnapshotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot on this node: times are Unix seconds, 0 where not reached.

    ``bytes_per_s`` is the rate of its upload, ``durable_in_s`` as in Progress.
    """

    step: int
    attempt: str
    phase: Phase
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    nbytes: int
    done_bytes: int
    bytes_per_s: float
    staged_s: float
    local_s: float
    durable_s: float
    durable_in_s: float | None = None
    trouble: str = ""
    detail: str = ""
    kind: str = ""


class StatusReply(msgspec.Struct, tag="status", frozen=True, kw_only=True):
    """What the agent is doing; ``settled`` is False when a deadline cut the wait short.

    ``share`` is how much of its budget the drain uses now: below 1.0 the store has asked for less.
    ``limit_bytes_per_s`` is what that comes to, None without a limit. ``question`` is the number of
    the AskSettled that it answers, 0 of none.
    """

    pid: int
    version: str
    run: str
    node: int
    trainers: tuple[int, ...]
    settled: bool
    snapshots: list[SnapshotStatus]
    committed: int
    failed: int
    skipped: int
    replaced: int = 0
    share: float = 1.0
    limit_bytes_per_s: float | None = None
    last_committed_step: int | None = None
    question: int = 0


Message: TypeAlias = (
    Hello | Welcome | Refused | Ring | Skip | Bye | AskStatus | AskSettled | Progress | StatusReply
)

_DECODER = msgspec.msgpack.Decoder(Message)


def write_frame(message: Message) -> bytes:
    """Length and message, ready for the socket."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FormatError(f"message: {len(body)} bytes, limit {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


def frame_bytes(head: bytes) -> int:
    """Length of the message after a 4-byte head. Raises FormatError when insane."""
    length = int.from_bytes(head, "big")
    if len(head) != 4 or not 0 < length <= MAX_FRAME_BYTES:
        raise FormatError(f"message: frame of {length} bytes, limit {MAX_FRAME_BYTES}")
    return length


def read_message(body: bytes) -> Message:
    """Parse one message. Raises FormatError."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"message: {error}") from None


def job_name(run: str, node: int) -> str:
    """Directory name of a job on a node: two runs never share one, nor two nodes of one run."""
    return f"{hashlib.sha256(run.encode()).hexdigest()[:16]}-node-{node:05d}"


def job_directory(runtime: Path, run: str, node: int) -> Path:
    """Where the arenas, the socket and the agent's config of a job lie."""
    return runtime / job_name(run, node)
