"""Which rank, of how many, on which node: read from the launcher's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from forebay.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Place of this process in the job. ``node_ranks`` are the global ranks on this node."""

    rank: int
    world_size: int
    node: int
    nodes: int
    node_ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"topology: rank {self.rank} outside world size {self.world_size}")
        if not 0 <= self.node < self.nodes:
            raise UsageError(f"topology: node {self.node} of {self.nodes} nodes")
        if self.rank not in self.node_ranks:
            raise UsageError(f"topology: rank {self.rank} not among {self.node_ranks} of its node")


SINGLE = Topology(rank=0, world_size=1, node=0, nodes=1, node_ranks=(0,))


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"environment: {name} should be an integer, found {text!r}") from None


def from_environment(environment: Mapping[str, str] | None = None) -> Topology | None:
    """The topology that torchrun, Slurm or a user's RANK and WORLD_SIZE describe; None for none.

    Ranks are numbered node by node, as torchrun and Slurm's block distribution do.
    """
    env = os.environ if environment is None else environment
    rank, world = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    local_rank, local_size = _integer(env, "LOCAL_RANK"), _integer(env, "LOCAL_WORLD_SIZE")
    node, nodes = _integer(env, "GROUP_RANK"), _integer(env, "GROUP_WORLD_SIZE")
    if rank is None or world is None:
        rank, world = _integer(env, "SLURM_PROCID"), _integer(env, "SLURM_NTASKS")
        local_rank, node = _integer(env, "SLURM_LOCALID"), _integer(env, "SLURM_NODEID")
        nodes = _integer(env, "SLURM_NNODES")
        local_size = None
        if rank is None or world is None or "SLURM_STEP_ID" not in env:
            return None
    return place(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
    )


def place(
    *,
    rank: int,
    world_size: int,
    local_rank: int | None,
    local_size: int | None,
    node: int | None,
    nodes: int | None,
) -> Topology:
    """Fill in what a launcher left out: without a local size, all ranks are on one node."""
    if local_size is None:
        local_size = world_size if nodes in (None, 1) else -(-world_size // (nodes or 1))
    if local_rank is None:
        local_rank = rank % local_size
    if nodes is None:
        nodes = -(-world_size // local_size)
    if node is None:
        node = (rank - local_rank) // local_size
    first = rank - local_rank
    last = min(first + local_size, world_size)
    return Topology(
        rank=rank,
        world_size=world_size,
        node=node,
        nodes=nodes,
        node_ranks=tuple(range(first, last)),
    )
