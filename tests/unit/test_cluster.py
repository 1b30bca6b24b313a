"""The made-up job is the one that torch and the product would make; its checkpoint commits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from forebay.capture.placement import held_boxes
from forebay.commit.catalog import Catalog
from forebay.commit.gather import gather
from forebay.commit.publish import publish
from forebay.drain.seal import build_record
from forebay.errors import StoreError, UsageError
from forebay.format import names
from forebay.format.record import stored_slices, write_record
from forebay.restore.reads import plan_reads, touched
from forebay.storage.memory import MemoryStore
from forebay.testing.cluster import Cluster, Mesh
from forebay.testing.hollow import HollowStore
from forebay.testing.llama import STATES, Llama, Weight

SMALL = Llama(layers=5, width=64, hidden=208, heads=8, kv_heads=2, vocabulary=501)
MESHES = [Mesh(2, 2, 8), Mesh(1, 1, 32), Mesh(4, 2, 6), Mesh(1, 2, 16)]


def placements(mesh: Mesh, weight: Weight) -> tuple[Any, ...]:
    if weight.cut == "none":
        return Shard(0), Replicate()
    if weight.cut == "rows":
        return Shard(0), Shard(1)
    return _StridedShard(0, split_factor=mesh.tp), Shard(0)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_boxes_are_torch_s_own(mesh: Mesh) -> None:
    """Of every weight on every rank, by the arithmetic that DTensor itself uses."""
    boxes = 0
    for rank in range(mesh.ranks):
        _, dp, tp = mesh.place(rank)
        for weight in SMALL.stage(0, 1):
            shape, start = _compute_local_shape_and_global_offset(
                weight.shape,
                (mesh.dp, mesh.tp),
                lambda d, at=(dp, tp): at[d],
                placements(mesh, weight),
            )
            held = held_boxes(weight.shape, mesh.splits(weight, rank))
            assert sum(box.elements for box, _ in held) == math.prod(shape)
            if math.prod(shape):
                ((box, _),) = held
                assert (box.offsets, box.sizes) == (tuple(start), tuple(shape))
                boxes += 1
    print(f"{mesh}: {boxes} boxes, violations: 0")
    assert boxes > 100


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_node_that_was_moved_is_the_one_that_is_laid_out(mesh: Mesh) -> None:
    cluster, kinds = Cluster(mesh, SMALL, run="r"), set()
    for node in range(cluster.nodes):
        moved, made = cluster.record(node), build_record(cluster.snapshot(node), 0.0)
        made = cluster._with_steps(made, node)
        assert set(stored_slices(moved)) == set(stored_slices(made))
        assert (moved.node, moved.shards) == (made.node, made.shards)
        assert sorted(moved.witnesses, key=repr) == sorted(made.witnesses, key=repr)
        kinds.add(cluster._kind(node))
    assert len(kinds) <= cluster.nodes


@pytest.mark.parametrize("mesh", [*MESHES, Mesh(8, 2, 4)], ids=str)
def test_the_job_commits_and_another_restores(mesh: Mesh) -> None:
    cluster, inner = Cluster(mesh, SMALL, run="r"), MemoryStore()
    shards: dict[str, int] = {}
    for record in cluster.records():
        shards |= {shard.key: shard.nbytes for shard in record.shards if shard.key}
        inner.put(names.record_key(1, "a1", record.node), write_record(record))
    store = HollowStore(inner, shards)
    checked = gather(store, 1, "a1", nodes=cluster.nodes, timeout_s=0.0)
    _, manifest = publish(store, checked)
    steps = 4 * len(SMALL.stage(0, 1))
    a_number = sum(torch.empty(0, dtype=getattr(torch, dtype)).itemsize for _, dtype, _ in STATES)
    assert sum(s.nbytes for s in checked.stored) == SMALL.parameters * a_number + steps
    assert manifest.slices == len(list(Catalog(store).slices(manifest)))
    other = Cluster(Mesh(2, 1, 20), SMALL, run="r")
    for rank in (0, 3, 9):
        wants = other.wants(rank)
        fqns = sorted({want.key.fqn for want in wants})
        tables = Catalog(store).tables(manifest, fqns, lambda table, w=wants: touched(w, table))
        plan = plan_reads(wants, (row for table in tables for row in table))
        assert plan.bytes_needed == sum(want.nbytes for want in wants)
    with pytest.raises(StoreError, match="has a size and no bytes"):
        store.get(plan.batches[0].key, max_bytes=1 << 40)


def test_the_model_is_llama_3_405b() -> None:
    assert Llama().parameters == 405_853_388_800
    stages = [Llama().stage(number, 16) for number in range(16)]
    assert sum(map(len, stages)) == 126 * 9 + 3


def test_a_node_of_two_stages_is_refused() -> None:
    with pytest.raises(UsageError, match="of one pipeline stage"):
        Cluster(Mesh(4, 2, 3), SMALL, run="r")
