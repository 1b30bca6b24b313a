"""Plans of simulated ranks of one job: together they store each tensor exactly once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay.capture.copy import digest_of
from forebay.capture.declare import per_rank
from forebay.capture.layout import Agreed, Plan, agree_on, agreement_marks, plan_layout
from forebay.capture.placement import Split
from forebay.capture.state import Spread, Walked
from forebay.capture.topology import Topology
from forebay.capture.walk import walk
from forebay.errors import StateError
from forebay.format.slices import Box, find_overlap, missing_elements

BUCKETS = 64


def topology(rank: int, world: int) -> Topology:
    return Topology(rank=rank, world_size=world, node=0, nodes=1, node_ranks=tuple(range(world)))


def sharded(walked: Walked, path: str, rank: int, world: int, shape: tuple[int, ...]) -> None:
    """Make a leaf look like this rank's part of a sharded tensor."""
    for number, leaf in enumerate(walked.leaves):
        if leaf.path == path:
            spread = Spread((Split(0, world, rank),), (rank,))
            walked.leaves[number] = leaf._replace(shape=shape, spread=spread)


def agreed_of(everyone: list[Walked]) -> list[Agreed]:
    """What ranks that exchange their marks agree on."""
    world = len(everyone)
    marks = [agreement_marks(w, topology(r, world), BUCKETS) for r, w in enumerate(everyone)]
    equal = {
        bucket
        for bucket in set().union(*marks)
        if len({m[bucket] for m in marks if bucket in m}) == 1
    }
    return [
        agree_on(w, topology(r, world), BUCKETS, equal & set(marks[r]))
        for r, w in enumerate(everyone)
    ]


def plans_of(everyone: list[Walked], agreed: list[Agreed], **options: Any) -> list[Plan]:
    settings: dict[str, Any] = {"check_always": False, "start_digest": None} | options
    return [
        plan_layout(w, topology(r, len(everyone)), run="/run", agreed=a, **settings)
        for r, (w, a) in enumerate(zip(everyone, agreed, strict=True))
    ]


def boxes_of(plans: list[Plan]) -> dict[tuple[str, int | None], list[Box]]:
    found: dict[tuple[str, int | None], list[Box]] = {}
    for plan in plans:
        for placed in plan.image.placed:
            key = placed.slice.key
            found.setdefault((key.fqn, key.rank), []).append(placed.slice.box)
    return found


def state(rank: int, world: int) -> dict[str, Any]:
    return {
        "model": {
            "large": torch.zeros(1024, 512),  # 2 MiB: cut among its holders
            "small": torch.zeros(3, 5),
            "scalar": torch.tensor(1.0),
            "empty": torch.zeros(0, 4),
            "shard": torch.zeros(8, 4),
        },
        "rng": per_rank({"seed": torch.zeros(16)}),
        "step": 3,
    }


def ranks(world: int) -> list[Walked]:
    everyone = []
    for rank in range(world):
        walked = walk(state(rank, world), rank)
        sharded(walked, "model/shard", rank, world, (8 * world, 4))
        everyone.append(walked)
    return everyone


@pytest.mark.parametrize("world", [2, 3, 4])
def test_agreed_ranks_cover_every_tensor_once(world: int) -> None:
    everyone = ranks(world)
    found = boxes_of(plans_of(everyone, agreed_of(everyone)))
    shapes: dict[tuple[str, int | None], tuple[int, ...]] = {
        ("model/large", None): (1024, 512),
        ("model/small", None): (3, 5),
        ("model/scalar", None): (),
        ("model/shard", None): (8 * world, 4),
    } | {("rng/seed", rank): (16,) for rank in range(world)}
    assert found.keys() == shapes.keys()
    for key, shape in shapes.items():
        assert find_overlap(found[key]) is None
        assert missing_elements(shape, found[key]) == 0
    assert len(found["model/large", None]) == world
    assert len(found["model/small", None]) == 1


def test_without_agreement_each_writes_the_whole() -> None:
    everyone = ranks(2)
    found = boxes_of(plans_of(everyone, [Agreed(), Agreed()]))
    assert found["model/large", None] == [Box.whole((1024, 512))] * 2
    assert found["model/small", None] == [Box.whole((3, 5))] * 2
    assert len(found["rng/seed", 0]) == 1
    assert missing_elements((16, 4), found["model/shard", None]) == 0


def test_a_tensor_that_one_rank_lacks_is_not_divided() -> None:
    everyone = ranks(2)
    everyone[1].leaves = [leaf for leaf in everyone[1].leaves if leaf.path != "model/small"]
    found = boxes_of(plans_of(everyone, agreed_of(everyone)))
    assert found["model/small", None] == [Box.whole((3, 5))]
    assert missing_elements((1024, 512), set(found["model/large", None])) == 0


def test_what_is_held_but_not_written_is_witnessed() -> None:
    everyone = ranks(2)
    plans = plans_of(everyone, agreed_of(everyone))
    for plan in plans:
        written = {p.slice.key.fqn for p in plan.image.placed}
        full = {w.fqn for w in plan.layout.witnesses if w.scope == "full"}
        assert full == {"model/small", "model/scalar"} - written
        samples = [w for w in plan.layout.witnesses if w.scope == "sample"]
        assert [w.fqn for w in samples] == ["model/large"]
        assert 0 < samples[0].nbytes <= 4096
    assert not any(
        w.scope == "sample"
        for p in plans_of(everyone, agreed_of(everyone), check_always=True)
        for w in p.layout.witnesses
    )


def test_large_replicas_are_digested_when_the_attempt_begins() -> None:
    everyone = ranks(2)
    plans = plans_of(everyone, agreed_of(everyone), start_digest=lambda leaf: leaf.path)
    for plan in plans:
        assert [d.digest for d in plan.layout.start_digests] == ["model/large"]


def test_a_view_that_conjugates_or_negates_is_digested_as_it_reads() -> None:
    number = torch.randn(9, dtype=torch.complex64)
    views = {"a": number.conj(), "b": number.conj().imag}
    read = {"a": number.conj_physical(), "b": (-number.imag).contiguous()}
    found, wanted = ([digest_of(leaf) for leaf in walk(s, 0).leaves] for s in (views, read))
    assert found == wanted


@pytest.mark.parametrize("agree", [False, True])
def test_copies_fill_the_slot_without_touching_each_other(agree: bool) -> None:
    everyone = ranks(2)
    for plan in plans_of(everyone, agreed_of(everyone) if agree else [Agreed()] * 2):
        at = len(plan.image.header)
        for part in sorted(plan.parts, key=lambda p: p.start):
            assert part.start >= at
            at = part.start + part.nbytes
        assert at <= plan.slot_bytes
        assert plan.staged_bytes == sum(p.nbytes for p in plan.parts)
        assert plan.layout.header_bytes == len(plan.image.header)
        rows = {(r.fqn, r.start, r.nbytes) for r in plan.layout.slices}
        assert rows == {(p.slice.key.fqn, p.start, p.nbytes) for p in plan.image.placed}


def test_a_part_names_the_local_elements_of_its_slice() -> None:
    everyone = ranks(2)
    plan = plans_of(everyone, agreed_of(everyone))[1]
    by_start = {part.start: part for part in plan.parts}
    for placed in plan.image.placed:
        part = by_start[placed.start]
        leaf = everyone[1].leaves[part.leaf]
        assert leaf.path == placed.slice.key.fqn
        local = part.local or Box.whole(tuple(leaf.tensor.shape))
        assert local.sizes == placed.slice.box.sizes
        if leaf.path == "model/shard":
            assert (placed.slice.box.offsets, local.offsets) == ((8, 0), (0, 0))
        else:
            assert local.offsets == placed.slice.box.offsets


def test_a_rank_outside_the_holders_is_refused() -> None:
    walked = walk({"w": torch.zeros(2)}, 0)
    walked.leaves[0] = walked.leaves[0]._replace(spread=Spread((), (1, 2)))
    with pytest.raises(StateError, match="w: rank 0 is not among"):
        plans_of([walked], [Agreed()])


def test_optimizer_state_made_later_is_divided_like_its_parameter() -> None:
    """The agreement knows the parameter; its moments appear only at the first step."""
    everyone, after = [], []
    for rank in range(2):
        torch.manual_seed(0)
        model = torch.nn.Linear(512, 1024)
        optimizer = torch.optim.AdamW(model.parameters())
        full = {"model": model, "optimizer": optimizer}
        everyone.append(walk(full, rank))
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        after.append(walk(full, rank))
    found = boxes_of(plans_of(after, agreed_of(everyone)))
    moments = found["optimizer/state/weight/exp_avg", None]
    assert len(moments) == 2
    assert find_overlap(moments) is None
    assert missing_elements((1024, 512), moments) == 0
    for key, boxes in found.items():
        assert find_overlap(boxes) is None, key
