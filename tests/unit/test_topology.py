"""The place of a process, from what launchers leave in the environment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.capture.topology import SINGLE, Topology, from_environment
from forebay.errors import UsageError


def test_torchrun() -> None:
    env = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
    }
    assert from_environment(env) == Topology(
        rank=5, world_size=8, node=1, nodes=2, node_ranks=(4, 5, 6, 7)
    )


def test_a_user_s_rank_and_world_size_are_one_node() -> None:
    assert from_environment({"RANK": "1", "WORLD_SIZE": "3"}) == Topology(
        rank=1, world_size=3, node=0, nodes=1, node_ranks=(0, 1, 2)
    )


def test_slurm() -> None:
    env = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "6",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "2",
        "SLURM_NODEID": "1",
        "SLURM_NNODES": "2",
    }
    assert from_environment(env) == Topology(
        rank=6, world_size=8, node=1, nodes=2, node_ranks=(4, 5, 6, 7)
    )
    del env["SLURM_STEP_ID"]  # an allocation, but no step of it: not a job of many ranks
    assert from_environment(env) is None


def test_nothing_is_known() -> None:
    assert from_environment({}) is None
    assert from_environment({"RANK": "1"}) is None
    assert SINGLE.node_ranks == (0,)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"])
def test_what_is_no_number_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} should be an integer, found 'x'"):
        from_environment({"RANK": "0", "WORLD_SIZE": "1"} | {name: "x"})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rank": 2}, "rank 2 outside world size 2"),
        ({"rank": -1}, "rank -1"),
        ({"node": 1}, "node 1 of 1"),
        ({"node_ranks": (1,)}, "rank 0 not among"),
    ],
)
def test_impossible_places_are_refused(fields: dict[str, Any], why: str) -> None:
    good = {"rank": 0, "world_size": 2, "node": 0, "nodes": 1, "node_ranks": (0, 1)}
    with pytest.raises(UsageError, match=why):
        Topology(**(good | fields))


@given(st.integers(1, 6), st.integers(1, 8))
def test_nodes_divide_the_ranks(nodes: int, each: int) -> None:
    world = nodes * each
    seen: dict[int, tuple[int, ...]] = {}
    for rank in range(world):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank % each),
            "LOCAL_WORLD_SIZE": str(each),
        }
        found = from_environment(env)
        assert found is not None
        assert found.nodes == nodes
        assert seen.setdefault(found.node, found.node_ranks) == found.node_ranks
    assert sorted(rank for ranks in seen.values() for rank in ranks) == list(range(world))
