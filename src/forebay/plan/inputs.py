"""What the plan is about: seven sections, one field a figure, each with unit and bounds.

The same names are keys of the file and, with dashes, flags. Presets and their sources stand in
``presets.py``; ``resolve.py`` lays presets, file and flags over each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from forebay.plan.figure import Given, Kind, Value

TIERS = ("memory", "local", "peer", "durable")
"""From the nearest; each has a share of the failures and a restart of its own."""
SHAPE = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "experts", "tied")
"""What parameters may follow from."""
WRITERS = ("every", "replica")
TAILS = ("none", "normal", "lognormal", "exponential")
WINDOWS = ("busy", "drain")


def _given(key: str, kind: Kind, text: str, **more: Any) -> Any:
    """A field that may be given."""
    return field(metadata={"given": Given(key=key, kind=kind, help=text, **more)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained and what of it is kept."""

    params: float = _given("params", Kind.COUNT, "Parameters, as 405e9 or 405B.")
    bytes_per_param: float = _given(
        "bytes_per_param", Kind.NUMBER, "Checkpoint bytes a parameter; --content says of what."
    )
    content: str = _given(
        "content", Kind.TEXT, "What is kept, as weights=bf16,master=fp32,moments=2*fp32."
    )
    layers: int | None = _given("layers", Kind.WHOLE, "Layers; with the shape, params follow.")
    hidden: int | None = _given("hidden", Kind.WHOLE, "Width of the model.")
    ffn: int | None = _given("ffn", Kind.WHOLE, "Width of the gated feed-forward layers.")
    heads: int | None = _given("heads", Kind.WHOLE, "Attention heads.")
    kv_heads: int | None = _given(
        "kv_heads", Kind.WHOLE, "Key-value heads; as many as heads if not given."
    )
    vocab: int | None = _given("vocab", Kind.WHOLE, "Vocabulary.")
    experts: int | None = _given("experts", Kind.WHOLE, "Experts a layer; 1 for a dense model.")
    tied: bool | None = _given("tied", Kind.YES_NO, "Input and output embedding are one.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the state lies on the GPUs and who writes it."""

    tp: int = _given("tp", Kind.WHOLE, "Tensor parallel.")
    pp: int = _given("pp", Kind.WHOLE, "Pipeline parallel.")
    cp: int = _given("cp", Kind.WHOLE, "Context parallel.")
    dp: int = _given("dp", Kind.WHOLE, "Data parallel; follows from the others if not given.")
    ep: int = _given("ep", Kind.WHOLE, "Expert parallel, within the data-parallel ranks.")
    writers: str = _given(
        "writers",
        Kind.TEXT,
        "every: each rank its shard; replica: one data-parallel replica.",
        choices=WRITERS,
    )
    skew: float = _given("skew", Kind.NUMBER, "Largest shard against the mean.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The nodes and their hops. Rates in bytes/s, of a node unless said otherwise."""

    gpus: int = _given("gpus", Kind.WHOLE, "GPUs of the job.")
    gpus_per_node: int = _given("gpus_per_node", Kind.WHOLE, "GPUs of a node.")
    pinned: bool = _given("pinned", Kind.YES_NO, "The copy's target is pinned memory.")
    d2h_bytes_per_s: float = _given("d2h", Kind.RATE, "Device to pinned host memory, a GPU.")
    d2h_pageable_bytes_per_s: float = _given(
        "d2h_pageable", Kind.RATE, "Device to pageable host memory, a GPU."
    )
    host_bandwidth_bytes_per_s: float = _given(
        "host_bandwidth", Kind.RATE, "What a node's memory takes from all copies together."
    )
    host_memory_bytes: float = _given("host_memory", Kind.BYTES, "Host memory of a node.")
    host_share: float = _given("host_share", Kind.FRACTION, "Part of it that arenas may take.")
    nvme_bytes_per_s: float = _given("nvme", Kind.RATE, "Write of a node's local disks.")
    nvme_read_bytes_per_s: float = _given("nvme_read", Kind.RATE, "Read of a node's local disks.")
    nvme_capacity_bytes: float = _given(
        "nvme_capacity", Kind.BYTES, "Room on a node's local disks."
    )
    peer_bytes_per_s: float = _given("peer", Kind.RATE, "A node to the disk of its peer.")
    peak_flops: float = _given("peak_flops", Kind.FLOPS, "Peak of a GPU in the training's dtype.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The durable tier. Rates in bytes/s."""

    filesystem_bytes_per_s: float | None = _given(
        "filesystem", Kind.RATE, "Write of the shared filesystem or bucket, all together."
    )
    filesystem_read_bytes_per_s: float | None = _given(
        "filesystem_read", Kind.RATE, "Read of it, all together."
    )
    per_node_bytes_per_s: float = _given("per_node", Kind.RATE, "What one node can write to it.")
    per_node_read_bytes_per_s: float = _given("per_node_read", Kind.RATE, "What one node can read.")
    budget: float = _given(
        "budget", Kind.FRACTION, "Part of the filesystem that the drain may ask for."
    )
    drain_bytes_per_s: float | None = _given(
        "drain_rate", Kind.RATE, "Rate of the drain, all nodes together; else the budget sets it."
    )
    put_limit_per_s: float | None = _given(
        "put_limit", Kind.PER_S, "Write requests a second that a prefix takes."
    )
    get_limit_per_s: float | None = _given(
        "get_limit", Kind.PER_S, "Read requests a second that a prefix takes."
    )
    prefixes: int = _given("prefixes", Kind.WHOLE, "Prefixes that share the objects.")
    part_bytes: float | None = _given(
        "part_bytes", Kind.BYTES, "Part size of an upload; none for files."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """How it is written. Times in seconds."""

    cadence_s: float = _given("cadence", Kind.SECONDS, "Time between checkpoints.")
    peer_cadence_s: float = _given(
        "peer_cadence", Kind.SECONDS, "Time between those that go to a peer; else the cadence."
    )
    durable_cadence_s: float = _given(
        "durable_cadence", Kind.SECONDS, "Time between those that become durable; else the cadence."
    )
    local: bool = _given("local", Kind.YES_NO, "There is a node-local tier.")
    mirror: bool = _given("mirror", Kind.YES_NO, "A copy goes to a peer node.")
    slots: int = _given("slots", Kind.WHOLE, "Images a rank may have in memory.")
    local_keep: int = _given("local_keep", Kind.WHOLE, "Complete checkpoints kept on local disks.")
    fixed_s: float = _given("fixed", Kind.SECONDS, "Part of the pause that is not copy.", zero=True)
    pause_s: float | None = _given("pause", Kind.SECONDS, "The pause, where it is known.")
    tail: str = _given("tail", Kind.TEXT, "Distribution of a rank's copy time.", choices=TAILS)
    spread: float = _given(
        "spread", Kind.FRACTION, "Its width: deviation of the (log) copy time.", zero=True
    )
    quantile: float = _given("quantile", Kind.FRACTION, "Part of the pauses that the tail covers.")
    pause_limit_s: float = _given("pause_limit", Kind.SECONDS, "Longest pause that is acceptable.")
    goal: float = _given("goal", Kind.FRACTION, "Part of the run that checkpoints may cost.")
    interference: float = _given(
        "interference",
        Kind.FRACTION,
        "How much longer a step takes while its node drains.",
        zero=True,
    )
    interference_window: str = _given(
        "interference_window",
        Kind.TEXT,
        "busy: a paced drain disturbs in proportion; drain: for all of its time.",
        choices=WINDOWS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """What stops the job, what survives it, and how long it takes to go on. Times in seconds."""

    mtbf_s: float = _given("mtbf", Kind.SECONDS, "Mean time between interruptions of the job.")
    per_node_day: float = _given(
        "node_failures", Kind.NUMBER, "Interruptions a node and day; the job's MTBF follows."
    )
    share_memory: float = _given(
        "share_memory", Kind.FRACTION, "Part that leaves host memory.", zero=True
    )
    share_local: float = _given(
        "share_local", Kind.FRACTION, "Part that leaves the local disks.", zero=True
    )
    share_peer: float = _given(
        "share_peer", Kind.FRACTION, "Part that leaves the peers' copies.", zero=True
    )
    share_durable: float = _given(
        "share_durable", Kind.FRACTION, "Part that leaves the durable tier.", zero=True
    )
    restart_memory_s: float = _given("restart_memory", Kind.SECONDS, "Restart from memory.")
    restart_local_s: float = _given("restart_local", Kind.SECONDS, "Restart from local disks.")
    restart_peer_s: float = _given("restart_peer", Kind.SECONDS, "Restart with a replaced node.")
    restart_durable_s: float = _given(
        "restart_durable", Kind.SECONDS, "Restart from the durable tier."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The run as a whole. Times in seconds."""

    run_s: float = _given("run", Kind.SECONDS, "Length of the run, for GPU-hours.")
    tokens: float = _given("tokens", Kind.COUNT, "Tokens to train on.")
    mfu: float = _given("mfu", Kind.FRACTION, "Model FLOPs utilisation without checkpoints.")
    flops_per_param_token: float = _given(
        "flops_per_param_token", Kind.NUMBER, "Floating-point operations a parameter and token."
    )
    deadline_s: float | None = _given("deadline", Kind.SECONDS, "When it must be trained.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All that the plan is worked from; ``sources``: where each ``section.key`` is from."""

    title: str
    model: Model
    layout: Layout
    cluster: Cluster
    storage: Storage
    checkpoint: Checkpoint
    failures: Failures
    training: Training
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return self.cluster.gpus // self.cluster.gpus_per_node


SECTIONS: dict[str, type[Any]] = {
    "model": Model,
    "layout": Layout,
    "cluster": Cluster,
    "storage": Storage,
    "checkpoint": Checkpoint,
    "failures": Failures,
    "training": Training,
}


def _fields() -> dict[str, tuple[str, Given]]:
    return {
        f"{section}.{given.key}": (each.name, given)
        for section, kind in SECTIONS.items()
        for each in fields(kind)
        for given in (each.metadata["given"],)
    }


FIELDS: dict[str, tuple[str, Given]] = _fields()
"""``section.key`` -> the attribute's name in its section, and what may be given for it."""


def value_of(inputs: Inputs, name: str) -> Value | None:
    """The value of a field by its ``section.key``."""
    section = name.partition(".")[0]
    value: Value | None = getattr(getattr(inputs, section), FIELDS[name][0])
    return value
