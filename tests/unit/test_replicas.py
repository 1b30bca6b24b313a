"""Who reads what several ranks want: each piece once, and everybody gets what it wants."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DamagedError
from forebay.format.digests import digest
from forebay.format.slices import Box, TensorKey
from forebay.restore.passing import pass_on
from forebay.restore.reads import Want
from forebay.restore.replicas import (
    Holders,
    divide,
    marks_for_all,
    marks_for_peers,
    name_of,
)

COUNT = 64


def want(name: str, elements: int = 4) -> Want:
    return Want(TensorKey(name), "uint8", (elements,), Box((0,), (elements,)))


def content(one: Want) -> bytes:
    return random.Random(name_of(one)).randbytes(one.nbytes)


class Job:
    """Ranks that speak through memory: all wants and holders by rank."""

    def __init__(self, ranks: list[list[tuple[Want, Holders]]]) -> None:
        self.wants = [[one for one, _ in mine] for mine in ranks]
        self.holders = [[holders for _, holders in mine] for mine in ranks]
        marks = [
            marks_for_all(wants, holders, COUNT)
            for wants, holders in zip(self.wants, self.holders, strict=True)
        ]
        self.agreed = {b for b in range(COUNT) if len({mark[b] for mark in marks}) == 1}
        self.divisions = [
            divide(
                wants,
                holders,
                rank=rank,
                world_size=len(ranks),
                count=COUNT,
                agreed=self.agreed,
            )
            for rank, (wants, holders) in enumerate(zip(self.wants, self.holders, strict=True))
        ]
        self.buffers = [[memoryview(bytearray(w.nbytes)) for w in mine] for mine in self.wants]
        for rank, division in enumerate(self.divisions):
            for number in division.read:
                self.buffers[rank][number][:] = content(self.wants[rank][number])


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(["own", "pair", "all", "some"]), st.integers(1, 9))),
    st.randoms(use_true_random=False),
)
def test_each_piece_is_read_once_by_one_that_wants_it(
    world: int, made: list[tuple[str, int]], seed: random.Random
) -> None:
    ranks: list[list[tuple[Want, Holders]]] = [[] for _ in range(world)]
    for number, (kind, elements) in enumerate(made):
        one = want(f"t{number}", elements)
        if kind == "own":
            ranks[seed.randrange(world)].append((one, ()))
        elif kind == "all":
            for mine in ranks:
                mine.append((one, None))
        else:
            some = tuple(sorted(seed.sample(range(world), seed.randint(1, world))))
            for rank in some:
                ranks[rank].append((one, some if kind == "pair" else None))
    for mine in ranks:
        seed.shuffle(mine)
    job = Job(ranks)
    readers = Counter(
        job.wants[rank][number].key.fqn
        for rank, division in enumerate(job.divisions)
        for number in division.read
    )
    for number, (kind, _) in enumerate(made):
        name = f"t{number}"
        holders = sum(any(w.key.fqn == name for w in mine) for mine in job.wants)
        once = kind != "some" or holders == world
        # Buckets in which ranks want different things are read by each.
        alone = kind in ("all", "some") and readers[name] == holders
        assert readers[name] == 1 or alone or not once, (name, kind, readers[name], holders)
        assert readers[name] >= 1
    for division in job.divisions:
        assert len(set(division.read)) == len(division.read)
    _everybody_gets(job)


def _everybody_gets(job: Job) -> None:
    """Carry everything over by hand, in the order in which both sides name it."""
    mail: dict[tuple[int, int], list[bytes]] = {}
    for rank, division in enumerate(job.divisions):
        for peer, number in division.given:
            mail.setdefault((rank, peer), []).append(bytes(job.buffers[rank][number]))
    said = [
        [(reader, [job.wants[r][n].key.fqn for n in numbers]) for reader, numbers in d.broadcasts]
        for r, d in enumerate(job.divisions)
    ]
    assert all(one == said[0] for one in said)
    for rank, division in enumerate(job.divisions):
        for peer, number in division.taken:
            job.buffers[rank][number][:] = mail[peer, rank].pop(0)
        for reader, numbers in division.broadcasts:
            there = {w.key.fqn: n for n, w in enumerate(job.wants[reader])}
            for number in numbers:
                name = job.wants[rank][number].key.fqn
                job.buffers[rank][number][:] = job.buffers[reader][there[name]]
        for first, number in division.copies:
            job.buffers[rank][number][:] = job.buffers[rank][first]
    assert not any(mail.values())
    for rank, wants in enumerate(job.wants):
        for number, one in enumerate(wants):
            assert bytes(job.buffers[rank][number]) == content(one), (rank, one)


def test_readers_are_dealt_out_evenly() -> None:
    pieces = [(want(f"layers.{n}.weight"), (0, 1, 2, 3)) for n in range(400)]
    job = Job([list(pieces) for _ in range(4)])
    assert all(70 < len(division.read) < 130 for division in job.divisions)


def test_a_piece_wanted_twice_by_one_rank_is_read_once_and_copied() -> None:
    one = want("tied")
    job = Job([[(one, (0, 1)), (one, (0, 1))], [(one, (0, 1))]])
    assert sum(len(division.read) for division in job.divisions) == 1
    _everybody_gets(job)


def test_holders_that_want_different_things_do_not_agree() -> None:
    one, other = want("w"), want("w", 8)
    said = marks_for_peers([one], [(0, 1)], 0)
    assert said == {1: marks_for_peers([one], [(0, 1)], 1)[0]}
    assert said != {1: marks_for_peers([other], [(0, 1)], 1)[0]}
    assert said != {1: marks_for_peers([one], [(0, 1, 2)], 1)[0]}
    assert marks_for_peers([want("e", 0), one], [(0, 1), None], 0) == {}


class OneWay:
    """Hands this rank what it is told to, whoever is asked."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = list(messages)

    def pass_on(self, given, taken) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        for _, view in taken:
            view[:] = self._messages.pop(0)

    def broadcast(self, view: memoryview, reader: int) -> None:
        view[:] = self._messages.pop(0)


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("holders", [(0, 1), None])
def test_what_arrives_with_another_digest_is_refused(damaged: bool, holders: Holders) -> None:
    """Taken by the rank that does not read it."""
    one = want("w", 100_000)
    job = Job([[(one, holders)], [(one, holders)]])
    taker = next(r for r, division in enumerate(job.divisions) if not division.read)
    data = content(one)
    arrives = data[:-1] + bytes([data[-1] ^ 1]) if damaged else data
    peers, buffers = OneWay(digest(data), arrives), job.buffers[taker]
    if damaged:
        with pytest.raises(DamagedError, match=f"what rank {1 - taker} read"):
            pass_on(job.divisions[taker], buffers, peers, taker)  # type: ignore[arg-type]
        return
    share = pass_on(job.divisions[taker], buffers, peers, taker)  # type: ignore[arg-type]
    assert bytes(buffers[0]) == data
    assert (share.bytes, share.reads) == (100_000, 1)
