"""The way of the bytes: how many each hop carries, at what rate, for how long."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.plan.inputs import Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of one checkpoint, and how they lie. Of a node and of a GPU: of those that write."""

    checkpoint_bytes: float
    writers: int
    writing_nodes: int
    writers_per_node: int
    bytes_per_node: float
    bytes_per_gpu: float
    largest_gpu_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """``nbytes`` at ``bytes_per_s`` take ``seconds``; ``of`` says whose bytes these are."""

    name: str
    of: str
    nbytes: float
    bytes_per_s: float
    seconds: float
    requests_per_s: float
    bound: str
    """What sets the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What a checkpoint asks of the store: objects it leaves, and requests that write."""

    objects: int
    requests: int
    limit_per_s: float | None
    floor_s: float
    """Requests at the store's limit, in seconds; 0 without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """The way to the durable tier in the background, under its budget."""

    seconds: float
    wanted_bytes_per_s: float
    """What budget or setting ask for, before links and limits."""
    paced_bytes_per_s: float
    per_node_bytes_per_s: float
    average_bytes_per_s: float
    """Bytes of a checkpoint over the durable cadence: what the filesystem sees on average."""
    average_share: float | None
    paced_share: float | None
    fits_cadence: bool
    exposure_s: float
    """Mean work lost when only the durable tier survives: half its cadence and the drain."""
    requests_per_s: float


def sizes_of(inputs: Inputs) -> Sizes:
    """Parameters times bytes, divided by who writes."""
    cluster, layout = inputs.cluster, inputs.layout
    total = inputs.model.params * inputs.model.bytes_per_param
    if layout.writers == "every":
        writers = cluster.gpus
    else:
        writers = layout.tp * layout.pp
    per_node = min(cluster.gpus_per_node, writers)
    writing_nodes = -(-writers // per_node)
    mean = total / writers
    return Sizes(
        checkpoint_bytes=total,
        writers=writers,
        writing_nodes=writing_nodes,
        writers_per_node=per_node,
        bytes_per_node=total / writing_nodes,
        bytes_per_gpu=mean,
        largest_gpu_bytes=mean * layout.skew,
    )


def copy_rate(inputs: Inputs, sizes: Sizes) -> tuple[float, str]:
    """Bytes/s of one GPU's copy to host memory, when all of its node copy at once."""
    cluster = inputs.cluster
    link = cluster.d2h_bytes_per_s if cluster.pinned else cluster.d2h_pageable_bytes_per_s
    share = cluster.host_bandwidth_bytes_per_s / sizes.writers_per_node
    if share < link:
        return share, f"host memory shared by {sizes.writers_per_node} copies"
    return link, "device link, pinned" if cluster.pinned else "device link, pageable"


def store_rate(inputs: Inputs, sizes: Sizes) -> tuple[float, str]:
    """Bytes/s that the durable tier takes from all nodes at once, and what bounds it."""
    storage = inputs.storage
    bounds = [(storage.per_node_bytes_per_s * sizes.writing_nodes, "links of the nodes")]
    if storage.filesystem_bytes_per_s is not None:
        bounds.append((storage.filesystem_bytes_per_s, "filesystem"))
    asked = requests_of(inputs, sizes)
    if asked.floor_s > 0:
        bounds.append((sizes.checkpoint_bytes / asked.floor_s, "requests of the store"))
    return min(bounds)


def requests_of(inputs: Inputs, sizes: Sizes) -> Requests:
    """An object a writing rank, in parts where the store has them; a record a node; two more.

    An object of one part is one request; of p parts p + 2, for the begin and the end of the upload.
    """
    storage, parts = inputs.storage, _parts(inputs, sizes)
    each = parts if parts == 1 else parts + 2
    around = sizes.writing_nodes + 2  # records, index, manifest
    requests = sizes.writers * each + around
    limit = storage.put_limit_per_s
    return Requests(
        objects=sizes.writers + around,
        requests=requests,
        limit_per_s=None if limit is None else limit * storage.prefixes,
        floor_s=0.0 if limit is None else requests / (limit * storage.prefixes),
    )


def _parts(inputs: Inputs, sizes: Sizes) -> int:
    """Parts of the largest object."""
    part_bytes = inputs.storage.part_bytes
    if part_bytes is None:
        return 1
    return max(1, -(-round(sizes.largest_gpu_bytes) // round(part_bytes)))


def hops_of(inputs: Inputs, sizes: Sizes) -> tuple[Hop, ...]:
    """Every hop at its own rate, as if it had nothing else to do."""
    cluster, checkpoint = inputs.cluster, inputs.checkpoint
    rate, bound = copy_rate(inputs, sizes)
    hops = [_hop("d2h", "a GPU", sizes.largest_gpu_bytes, rate, bound)]
    if checkpoint.local:
        disks = "local disks of a node"
        hops.append(_hop("nvme", "a node", sizes.bytes_per_node, cluster.nvme_bytes_per_s, disks))
    if checkpoint.mirror:
        link = min(
            (cluster.peer_bytes_per_s, "link to the peer"),
            (cluster.nvme_bytes_per_s, "disks of the peer"),
        )
        hops.append(_hop("peer", "a node", sizes.bytes_per_node, *link))
    total, limit = store_rate(inputs, sizes)
    asked = requests_of(inputs, sizes).requests
    hops.append(_hop("durable", "the job", sizes.checkpoint_bytes, total, limit, asked))
    return tuple(hops)


def drain_of(inputs: Inputs, sizes: Sizes) -> Drain:
    """The drain under its budget: a part of the filesystem, or a rate that was given."""
    storage, cadence_s = inputs.storage, inputs.checkpoint.durable_cadence_s
    total = storage.filesystem_bytes_per_s
    most, _ = store_rate(inputs, sizes)
    wanted = storage.drain_bytes_per_s
    if wanted is None:
        wanted = (most if total is None else total) * storage.budget
    rate = min(wanted, most)
    seconds = sizes.checkpoint_bytes / rate
    average = sizes.checkpoint_bytes / cadence_s
    return Drain(
        seconds=seconds,
        wanted_bytes_per_s=wanted,
        paced_bytes_per_s=rate,
        per_node_bytes_per_s=rate / sizes.writing_nodes,
        average_bytes_per_s=average,
        average_share=None if total is None else average / total,
        paced_share=None if total is None else rate / total,
        fits_cadence=seconds <= cadence_s,
        exposure_s=cadence_s / 2 + seconds,
        requests_per_s=requests_of(inputs, sizes).requests / seconds,
    )


def shortest_cadence_s(inputs: Inputs, sizes: Sizes, drain: Drain) -> float:
    """The cadence below which slots, disks or the link to the peer no longer keep up, in seconds.

    A slot has ``slots`` cadences until its next turn; disks and link take every checkpoint.
    """
    checkpoint = inputs.checkpoint
    near = [hop.seconds for hop in hops_of(inputs, sizes) if hop.name in ("nvme", "peer")]
    if not near:
        return drain.seconds / checkpoint.slots
    disks_s = len(near) * sizes.bytes_per_node / inputs.cluster.nvme_bytes_per_s
    return max(sum(near) / checkpoint.slots, disks_s, *near)


def read_s(inputs: Inputs, sizes: Sizes, node_bytes: float) -> float:
    """Seconds in which all nodes read ``node_bytes`` each from the durable tier, side by side."""
    storage = inputs.storage
    rate = storage.per_node_read_bytes_per_s
    if storage.filesystem_read_bytes_per_s is not None:
        rate = min(rate, storage.filesystem_read_bytes_per_s / inputs.nodes)
    seconds = node_bytes / rate
    if storage.get_limit_per_s is not None:
        reads = sizes.writers * _parts(inputs, sizes)
        seconds = max(seconds, reads / (storage.get_limit_per_s * storage.prefixes))
    return seconds


def busy_of(inputs: Inputs, sizes: Sizes, drain: Drain) -> dict[str, float]:
    """Seconds in which a step is disturbed at full strength, by the tier the bytes go to.

    ``busy``: the time that a node's bytes take at the node's own rates; pacing makes the drain
    longer and its disturbance weaker by the same factor. ``drain``: all of the drain.
    """
    tiers = {"nvme": "local", "peer": "peer"}
    found = {tiers[hop.name]: hop.seconds for hop in hops_of(inputs, sizes) if hop.name in tiers}
    whole = inputs.checkpoint.interference_window == "drain"
    alone_s = sizes.bytes_per_node / inputs.storage.per_node_bytes_per_s
    return {**found, "durable": drain.seconds if whole else alone_s}


def _hop(
    name: str, of: str, nbytes: float, bytes_per_s: float, bound: str, requests: int = 0
) -> Hop:
    seconds = nbytes / bytes_per_s
    return Hop(
        name=name,
        of=of,
        nbytes=nbytes,
        bytes_per_s=bytes_per_s,
        seconds=seconds,
        requests_per_s=requests / seconds,
        bound=bound,
    )
