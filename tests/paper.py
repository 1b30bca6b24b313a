"""A save and a restore of many ranks in one process: all of the product but its agent.

The walk, the layout, the copy, the record, the commit and the restore are the real ones; what is
left out is shared memory, sockets and disks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from forebay.capture import layout
from forebay.capture.agree import BUCKETS
from forebay.capture.copy import Copier, digest_of
from forebay.capture.state import Walked
from forebay.capture.topology import Topology
from forebay.capture.walk import walk
from forebay.commit.publish import Verdict, commit_step
from forebay.drain.job import Part, Snapshot
from forebay.drain.seal import build_record, put_record
from forebay.drain.spill import hash_slot
from forebay.format import names, tree
from forebay.format.manifest import Manifest
from forebay.format.slot import Stamp
from forebay.restore.session import Session
from forebay.storage.store import Store

State = dict[Any, Any]
ATTEMPT = "a1"


def topology_of(rank: int, world: int, nodes: int) -> Topology:
    """Ranks in blocks on nodes."""
    share = -(-world // nodes)
    node = rank // share
    members = tuple(r for r in range(world) if r // share == node)
    return Topology(
        rank=rank, world_size=world, node=node, nodes=-(-world // share), node_ranks=members
    )


def exchange(walks: Sequence[Walked], places: Sequence[Topology]) -> set[int]:
    """Buckets of replicas that all who hold them agree upon, as the exchange at start finds."""
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for walked, place in zip(walks, places, strict=True):
        for bucket, mark in layout.agreement_marks(walked, place, BUCKETS).items():
            low[bucket] = min(mark, low.get(bucket, mark))
            high[bucket] = max(mark, high.get(bucket, mark))
    return {bucket for bucket in low if low[bucket] == high[bucket]}


def save(
    store: Store, states: Sequence[State], step: int, *, nodes: int = 1, agree: bool = True
) -> Manifest:
    """Save what each rank holds and commit it. With ``agree`` the ranks divide their replicas."""
    places = [topology_of(rank, len(states), nodes) for rank in range(len(states))]
    walks = [walk(state, rank) for rank, state in enumerate(states)]
    buckets = exchange(walks, places) if agree and len(states) > 1 else set()
    parts: dict[int, dict[int, Part]] = {}
    for walked, place in zip(walks, places, strict=True):
        part = _stage(store, walked, place, step, buckets)
        parts.setdefault(place.node, {})[place.rank] = part
    for node, held in parts.items():
        members = places[min(held)].node_ranks
        snapshot = Snapshot(step=step, attempt=ATTEMPT, node_ranks=members)
        snapshot.parts = held
        assert not snapshot.missing_ranks, node
        put_record(store, build_record(snapshot, 1.0))
    verdict, manifest = commit_step(store, step, ATTEMPT, nodes=len(parts), timeout_s=0.0)
    assert verdict is Verdict.COMMITTED
    return manifest


def _stage(store: Store, walked: Walked, place: Topology, step: int, buckets: set[int]) -> Part:
    plan = layout.plan_layout(
        walked,
        place,
        run=store.url,
        agreed=layout.agree_on(walked, place, BUCKETS, buckets),
        check_always=False,
        start_digest=digest_of,
    )
    slot = torch.full((max(plan.slot_bytes, 1),), 0x5A, dtype=torch.uint8)
    pages: Any = SimpleNamespace(base=slot, starts=[0], stream=None)
    Copier(pages, plan).copy(0, walked.leaves, step)
    area = memoryview(slot.numpy().data)
    area[: len(plan.image.header)] = plan.image.header
    stamp = Stamp(
        step=step,
        attempt=ATTEMPT,
        staged_s=1.0,
        pause_s=0.0,
        durable=True,
        tree=tree.write_tree(walked.common),
        own=tree.write_tree(walked.own),
    )
    part = Part(layout=plan.layout, stamp=stamp, arena="", slot=0)
    part.digests = hash_slot(area, plan.layout)
    if plan.layout.slices:
        key = names.shard_key(step, ATTEMPT, place.node, place.rank)
        store.put(key, area[: plan.layout.image_bytes])
    return part


def restore(
    store: Store,
    manifest: Manifest,
    states: Sequence[State],
    *,
    strict: bool = True,
    per_rank: Any = "require",
    before: Callable[[Session], None] = lambda _: None,
) -> None:
    """Restore into what each rank holds, all ranks together. ``before`` is called per session."""
    sessions = []
    marks: list[bytes] = []
    for rank, state in enumerate(states):
        session = Session(
            store=store,
            manifest=manifest,
            rank=rank,
            world_size=len(states),
            node=0,
            job_directory=Path("/nowhere"),
            local=None,
            strict=strict,
            allow_cast=False,
            per_rank=per_rank,
        )
        marks.append(session.bind(state))
        sessions.append(session)
    used = bytes(max(column) for column in zip(*marks, strict=True))
    for session in sessions:
        session.check_unused(used)
        session.fetch()
        before(session)
    for session in sessions:
        session.apply()
