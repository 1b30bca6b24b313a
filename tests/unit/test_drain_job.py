"""States of a snapshot: the legal moves, and what follows from the states of its parts."""

from __future__ import annotations

from itertools import product

import pytest

from forebay.drain.job import PART_MOVES, PHASE_MOVES, Part, PartState, Snapshot, overtaken
from forebay.drain.status import progress_of, status_of
from forebay.format.messages import FINAL_PHASES, Phase
from forebay.format.slot import Layout, SliceRow, Stamp


def part(
    rank: int,
    *,
    step: int = 1,
    staged_s: float = 1.0,
    durable: bool = True,
    since_boot_s: float = 0.0,
) -> Part:
    rows = [SliceRow("model/w", None, "uint8", (4,), (0,), (4,), 4096, 4)]
    layout = Layout(
        run="/run",
        rank=rank,
        world_size=2,
        node=0,
        nodes=1,
        node_ranks=(0, 1),
        image_bytes=4100,
        header_bytes=4096,
        slices=rows,
        witnesses=[],
        start_digests=[],
    )
    stamp = Stamp(
        step=step,
        attempt="a",
        staged_s=staged_s,
        pause_s=0.0,
        durable=durable,
        tree=b"\x90",
        own=b"\x90",
        since_boot_s=since_boot_s,
    )
    return Part(layout=layout, stamp=stamp, arena=f"rank-{rank:05d}.0.arena", slot=0)


def snapshot(*parts: Part, step: int = 1, attempt: str = "a") -> Snapshot:
    made = Snapshot(step=step, attempt=attempt, node_ranks=(0, 1))
    made.parts = {p.layout.rank: p for p in parts}
    return made


@pytest.mark.parametrize(("old", "new"), list(product(PartState, PartState)))
def test_a_part_makes_only_legal_moves(old: PartState, new: PartState) -> None:
    moving = part(0)
    moving.state = old
    if new in PART_MOVES[old]:
        moving.move(new)
        assert moving.state is new
    else:
        with pytest.raises(AssertionError, match="rank 0"):
            moving.move(new)
        assert moving.state is old


@pytest.mark.parametrize(("old", "new"), list(product(Phase, Phase)))
def test_a_snapshot_makes_only_legal_moves(old: Phase, new: Phase) -> None:
    moving = snapshot()
    moving.phase = old
    if new in PHASE_MOVES[old]:
        moving.move(new, 5.0, detail="why")
        assert (moving.phase, moving.reached_s[new], moving.detail) == (new, 5.0, "why")
    else:
        with pytest.raises(AssertionError, match="step 1"):
            moving.move(new, 5.0)
        assert moving.phase is old


def test_no_move_leads_out_of_an_end_and_only_a_sealed_one_commits() -> None:
    assert all(not PHASE_MOVES[phase] for phase in FINAL_PHASES)
    assert [p for p in Phase if Phase.COMMITTED in PHASE_MOVES[p]] == [Phase.SEALED]


def test_drained_once_every_rank_is_in_its_last_tier() -> None:
    one, two = part(0), part(1)
    assert snapshot(one).missing_ranks == (1,)
    both = snapshot(one, two)
    one.move(PartState.LOCAL)
    assert (both.spilled, both.drained) == (False, False)
    two.move(PartState.UPLOADED)
    assert (both.spilled, both.drained) == (True, False)
    one.move(PartState.UPLOADED)
    assert both.drained
    assert not snapshot(one).drained


def test_a_rank_that_stays_near_keeps_the_whole_near() -> None:
    one, two = part(0, durable=False), part(1)
    two.move(PartState.UPLOADED)
    one.move(PartState.LOCAL)
    both = snapshot(one, two)
    assert both.near
    assert both.drained


def test_overtaken_goes_by_what_another_rank_saw_first() -> None:
    first = snapshot(part(0, step=1, staged_s=1.0), step=1)
    assert overtaken(first, [first, snapshot(part(0, step=2, staged_s=2.0), step=2)]) == set()
    later = snapshot(part(0, step=2, staged_s=2.0), part(1, step=2, staged_s=2.5), step=2)
    assert overtaken(first, [first, later]) == {1}
    before = snapshot(part(0, step=0, staged_s=0.5), part(1, step=0, staged_s=9.0), step=0)
    assert overtaken(first, [before]) == set()  # rank 1 was late there, and may still come
    other = snapshot(*later.parts.values(), step=2, attempt="b")
    assert overtaken(first, [other]) == set()


def test_a_clock_that_was_set_back_overtakes_nobody() -> None:
    before = snapshot(part(0, step=1, staged_s=90.0, since_boot_s=1.0), step=1)
    before.parts[1] = part(1, step=1, staged_s=90.0, since_boot_s=1.1)
    after = snapshot(part(0, step=2, staged_s=5.0, since_boot_s=2.0), step=2)
    assert overtaken(after, [before, after]) == set()
    del before.parts[1]
    after.parts[1] = part(1, step=2, staged_s=5.0, since_boot_s=2.1)
    assert overtaken(before, [before, after]) == {1}


def test_status_counts_what_left_and_how_fast() -> None:
    one, two = part(0), part(1)
    both = snapshot(one, two)
    both.reached_s[Phase.STAGED] = 10.0
    both.move(Phase.UPLOADING, 20.0)
    one.done_bytes, two.done_bytes = 4100, 900
    shown = status_of(both, 30.0)
    assert (shown.nbytes, shown.done_bytes, shown.bytes_per_s) == (8200, 5000, 500.0)
    assert (shown.staged_s, shown.local_s, shown.durable_s) == (10.0, 0.0, 0.0)
    both.move(Phase.FAILED, 25.0, kind="full", detail="no room")
    assert status_of(both, 99.0).bytes_per_s == 1000.0
    told = progress_of(both)
    assert (told.phase, told.at_s, told.kind, told.detail) == (
        Phase.FAILED,
        25.0,
        "full",
        "no room",
    )


def test_an_ended_part_is_slim() -> None:
    one = part(0)
    assert one.components == "model"
    one.slim()
    assert (one.layout.slices, one.stamp.tree, one.layout.image_bytes) == ([], b"", 4100)
    assert one.components == "nothing"
