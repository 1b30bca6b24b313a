"""Records of all nodes: waited for, and refused unless they make one checkpoint."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from forebay.commit.gather import Checked, Gathered, Gathering, gather, read_one
from forebay.errors import ConflictError, DeadlineError, FormatError, IncompleteError
from forebay.format import names
from forebay.format.index import write_index
from forebay.format.manifest import Ref
from forebay.format.record import Record, table_of, write_record
from forebay.format.slices import Box
from forebay.storage.memory import MemoryStore
from tests.build import (
    ATTEMPT,
    STEP,
    B,
    Rank,
    W,
    entries_of,
    put_nodes,
    put_record,
    record_of,
    two_nodes,
)


def gathered(store: MemoryStore, nodes: int = 2) -> list[Gathered]:
    found = [read_one(store, STEP, ATTEMPT, node) for node in range(nodes)]
    assert None not in found
    return found  # type: ignore[return-value]


def check_records(store: MemoryStore, found: list[Gathered], nodes: int | None = None) -> Checked:
    gathering = Gathering(store, STEP, ATTEMPT, found[0].record.nodes if nodes is None else nodes)
    for one in found:
        gathering.take(one)
    return gathering.check()


def check(nodes: list[dict[int, Rank]]) -> Checked:
    store = MemoryStore()
    put_nodes(store, nodes)
    return check_records(store, gathered(store, len(nodes)))


def test_a_good_checkpoint() -> None:
    found = check(two_nodes())
    assert [entry.path for entry in found.entries] == ["", "w", "b", "step"]
    assert sorted((s.slice.key.fqn, s.rank) for s in found.stored) == [
        ("b", 0),
        ("w", 0),
        ("w", 1),
    ]
    assert (found.nodes, found.world_size, len(found.refs)) == (2, 2, 2)


class Clock:
    """Time that passes only in sleep; ``then`` runs when it does."""

    def __init__(self, then: dict[int, Any] | None = None) -> None:
        self.now, self.slept, self.then = 0.0, 0, then or {}

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.slept += 1
        self.then.get(self.slept, lambda: None)()


def wait(store: MemoryStore, clock: Clock, *, nodes: int, timeout_s: float) -> Checked:
    return gather(
        store,
        STEP,
        ATTEMPT,
        nodes=nodes,
        timeout_s=timeout_s,
        clock=clock.time,
        sleep=clock.sleep,
    )


def copy_shards(ready: MemoryStore, store: MemoryStore) -> None:
    for one in ready.list("data/"):
        if one.key.endswith(".safetensors"):
            store.put(one.key, ready.get(one.key, max_bytes=1 << 20))


def test_records_are_taken_as_they_arrive() -> None:
    store, ready = MemoryStore(), MemoryStore()
    records = put_nodes(ready, two_nodes())
    clock = Clock(
        {2: lambda: put_record(store, records[1]), 4: lambda: put_record(store, records[0])}
    )
    copy_shards(ready, store)
    found = wait(store, clock, nodes=2, timeout_s=60)
    assert [ref.key for ref in found.refs] == [names.record_key(STEP, ATTEMPT, n) for n in (0, 1)]
    assert clock.slept == 4


def test_a_missing_node_is_named_at_the_deadline() -> None:
    store, ready = MemoryStore(), MemoryStore()
    put_record(store, put_nodes(ready, two_nodes())[0])
    copy_shards(ready, store)
    clock = Clock()
    with pytest.raises(
        DeadlineError, match="step 7, attempt first: no record of nodes 1 after 30 s"
    ):
        wait(store, clock, nodes=2, timeout_s=30)
    assert clock.now == pytest.approx(30)
    with pytest.raises(DeadlineError, match="0, 1, 2, 3, 4, 5, 6, 7 and 12 more after 0 s"):
        wait(MemoryStore(), Clock(), nodes=20, timeout_s=0)


def test_a_record_in_another_s_place_is_refused() -> None:
    store = MemoryStore()
    record = put_nodes(MemoryStore(), two_nodes())[1]
    store.put(names.record_key(STEP, ATTEMPT, 0), write_record(record))
    with pytest.raises(ConflictError, match="belongs to another"):
        read_one(store, STEP, ATTEMPT, 0)
    store = MemoryStore()
    store.put(names.record_key(STEP, ATTEMPT, 0), b"nothing")
    with pytest.raises(FormatError):
        read_one(store, STEP, ATTEMPT, 0)


def changed(store: MemoryStore, node: int, **fields: Any) -> list[Gathered]:
    put_nodes(store, two_nodes())
    found = gathered(store)
    record = msgspec.structs.replace(found[node].record, **fields)
    found[node] = Gathered(ref=found[node].ref, record=record, table=found[node].table)
    return found


@pytest.mark.parametrize(
    ("what", "value"),
    [("run", "/other"), ("world_size", 3), ("nodes", 3), ("attempt", "b"), ("step", 8)],
)
def test_records_of_different_runs_conflict(what: str, value: object) -> None:
    store = MemoryStore()
    found = changed(store, 1, **{what: value})
    with pytest.raises(ConflictError, match=f"node 1 has {what}"):
        check_records(store, found)
    with pytest.raises(ConflictError, match=f"node 0 has {what}|node 1 is of 3, expected 2"):
        check_records(store, found[::-1], 2)


def test_the_order_in_which_records_come_makes_no_difference() -> None:
    store = MemoryStore()
    put_nodes(store, two_nodes())
    one, other = check_records(store, gathered(store)), check_records(store, gathered(store)[::-1])
    assert write_index(one.stored) == write_index(other.stored)
    assert (one.refs, one.entries, one.data_bytes) == (other.refs, other.entries, other.data_bytes)


def test_a_record_of_a_job_of_another_size_is_refused() -> None:
    store = MemoryStore()
    put_nodes(store, two_nodes())
    with pytest.raises(ConflictError, match="node 0 is of 2, expected 3"):
        check_records(store, gathered(store), 3)


def test_missing_nodes_are_named() -> None:
    store = MemoryStore()
    put_nodes(store, two_nodes())
    with pytest.raises(IncompleteError, match=r"records of nodes 1, expected all of 2"):
        check_records(store, gathered(store)[1:])


def as_gathered(records: list[Record]) -> list[Gathered]:
    ref = Ref("there", 1, "")
    return [Gathered(ref=ref, record=record, table=table_of(record)) for record in records]


def test_a_missing_rank_is_named() -> None:
    store = MemoryStore()
    record = record_of(two_nodes()[0] | two_nodes()[1], store=store, world_size=4)
    with pytest.raises(IncompleteError, match="world size 4, no shard of ranks 2, 3"):
        check_records(store, as_gathered([record]))


def test_a_rank_on_two_nodes_is_refused() -> None:
    store = MemoryStore()
    ranks = two_nodes()
    records = [
        record_of(r, store=store, node=n, nodes=2, world_size=2)
        for n, r in enumerate([ranks[0] | ranks[1], ranks[1]])
    ]
    with pytest.raises(IncompleteError, match="ranks 1 twice"):
        check_records(store, as_gathered(records))


def test_a_missing_shard_and_one_of_another_size() -> None:
    store = MemoryStore()
    put_nodes(store, two_nodes())
    key = names.shard_key(STEP, ATTEMPT, 1, 1)
    data = store.get(key, max_bytes=1 << 20)
    store.delete(key)
    with pytest.raises(IncompleteError, match=f"shard {key} of rank 1 is missing"):
        check_records(store, gathered(store))
    for wrong in (data[:-1], data + b"x"):
        store.put(key, wrong)
        with pytest.raises(IncompleteError, match=f"has {len(wrong)} bytes, its record says"):
            check_records(store, gathered(store))
        store.delete(key)
    store.put(key, data)
    check_records(store, gathered(store))


def test_a_rank_without_tensors_needs_no_shard() -> None:
    ranks = {
        0: Rank(entries=entries_of(("w", W))).part("w", W),
        1: Rank(entries=entries_of(("w", W))),
    }
    assert len(check([ranks]).stored) == 1


def test_values_that_differ_are_refused_over_nodes() -> None:
    nodes = two_nodes()
    nodes[1][1].entries = entries_of(("w", W), ("b", B), step=8)
    with pytest.raises(ConflictError, match=r"step: differs between rank 0 \(7\) and rank 1 \(8\)"):
        check(nodes)


def test_overlaps_and_holes_are_refused_over_nodes() -> None:
    nodes = two_nodes()
    nodes[1][1].parts[0] = ("w", W, Box((3, 0), (5, 4)), None)
    with pytest.raises(ConflictError, match=r"w: ranks \[0, 1\] stored overlapping"):
        check(nodes)
    nodes = two_nodes()
    nodes[1][1].parts[0] = ("w", W, Box((5, 0), (3, 4)), None)
    with pytest.raises(IncompleteError, match="w: 4 of 32 elements"):
        check(nodes)


def test_an_own_tensor_that_was_not_stored_is_refused() -> None:
    nodes = two_nodes()
    own = entries_of(("rng", B))
    nodes[1][1].own = own[1:]
    with pytest.raises(IncompleteError, match=r"rng \(rank 1\): 5 of 5"):
        check(nodes)
    nodes[1][1].part("rng", B, owner=1)
    assert len(check(nodes).stored) == 4


def test_replicas_that_differ_are_refused_whoever_wrote_them() -> None:
    nodes = two_nodes()
    nodes[1][1].part("b", B + 1)
    nodes[1][1].witnesses = []
    with pytest.raises(ConflictError, match="b: rank 0 and rank 1 stored different bytes"):
        check(nodes)
    nodes = two_nodes()
    nodes[1][1].witnesses[0] = msgspec.structs.replace(nodes[1][1].witnesses[0], digest="00" * 32)
    with pytest.raises(ConflictError, match="b: rank 0 and rank 1 hold different"):
        check(nodes)


class Flipping(MemoryStore):
    """Changes one bit of the first object that is read."""

    bit: int | None = None

    def get(self, key: str, *, max_bytes: int) -> bytes:
        data = bytearray(super().get(key, max_bytes=max_bytes))
        if self.bit is not None:
            data[self.bit // 8] ^= 1 << self.bit % 8
            self.bit = None
        return bytes(data)


def test_no_bit_of_a_record_can_change_on_its_way() -> None:
    """Neither what it says nor the digest that the manifest will have of it."""
    store = Flipping()
    put_nodes(store, two_nodes())
    right = read_one(store, STEP, ATTEMPT, 0)
    assert right is not None
    for bit in range(8 * right.ref.nbytes):
        store.bit = bit
        found = read_one(store, STEP, ATTEMPT, 0)
        assert found is not None
        assert (found.ref, found.record) == (right.ref, right.record), bit
    print(f"bits changed: {8 * right.ref.nbytes}, violations: 0")


def test_very_many_records_are_listed_and_read_side_by_side() -> None:
    """Forty nodes, half of them late: one listing a look, and no request for what it showed."""
    store, ready = MemoryStore(), MemoryStore()
    rows = np.arange(160, dtype=np.float32).reshape(40, 4)
    nodes = [
        {rank: Rank(entries=entries_of(("w", rows))).part("w", rows, Box((rank, 0), (1, 4)))}
        for rank in range(40)
    ]
    records = put_nodes(ready, nodes)
    copy_shards(ready, store)
    for record in records[1::2]:
        put_record(store, record)
    asked: list[str] = []
    store.head = lambda key: asked.append(key)  # type: ignore[method-assign,assign]
    clock = Clock({3: lambda: [put_record(store, record) for record in records[0::2]]})
    found = wait(store, clock, nodes=40, timeout_s=60)
    assert len(found.stored) == 40
    assert clock.slept == 3
    assert asked == []
