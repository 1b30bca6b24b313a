"""Who reads what several ranks want, and who gets it from whom. Pure.

A tensor that is replicated over ranks is read from the durable tier by one of them, which gives it
to the others: readers are dealt out by a digest of the piece, so that each holder reads its share.
What every rank of the job wants is read by one and broadcast, small pieces together by rank 0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from forebay.format.digests import digest
from forebay.restore.reads import Want

SMALL_BYTES = 64 * 2**10

Holders = tuple[int, ...] | None
"""Global ranks that want the same piece, this one among them; None stands for every rank."""


@dataclass(slots=True, kw_only=True)
class Division:
    """What this rank reads, and what it gives and gets. Numbers are those of wants.

    ``given`` and ``taken`` are in the order of the pieces' names, which both sides know.
    ``broadcasts`` are ``(reader, wants)``, in the same order on every rank.
    """

    read: list[int] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)
    broadcasts: list[tuple[int, list[int]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


def name_of(want: Want) -> bytes:
    """32 bytes that are the same wherever the same piece is wanted."""
    key, box = want.key, want.box
    said = (key.fqn, key.rank, want.dtype, want.shape, box.offsets, box.sizes)
    return digest(repr(said).encode())


def pieces_of(wants: Sequence[Want]) -> dict[bytes, list[int]]:
    """The wants by name: a target may want a piece more than once."""
    found: dict[bytes, list[int]] = {}
    for number, want in enumerate(wants):
        found.setdefault(name_of(want), []).append(number)
    return found


def marks_for_all(wants: Sequence[Want], holders: Sequence[Holders], count: int) -> dict[int, int]:
    """A number for each of ``count`` buckets of what every rank may want; 0 where it is empty."""
    texts: dict[int, bytes] = {}
    for name, numbers in sorted(pieces_of(wants).items()):
        if holders[numbers[0]] is None and wants[numbers[0]].box.elements:
            bucket = _bucket(name, count)
            texts[bucket] = texts.get(bucket, b"") + name
    found = dict.fromkeys(range(count), 0)
    for bucket, text in texts.items():
        found[bucket] = 1 + int.from_bytes(digest(text)[:7], "little")
    return found


def marks_for_peers(
    wants: Sequence[Want], holders: Sequence[Holders], rank: int
) -> dict[int, bytes]:
    """For each other holder of a piece of this rank, what the two should agree on: 32 bytes."""
    texts: dict[int, bytes] = {}
    for name, numbers in sorted(pieces_of(wants).items()):
        ranks = holders[numbers[0]]
        if ranks is None or not wants[numbers[0]].box.elements:
            continue
        said = name + repr(sorted(ranks)).encode()
        for peer in ranks:
            if peer != rank:
                texts[peer] = texts.get(peer, b"") + said
    return {peer: digest(text) for peer, text in texts.items()}


def divide(
    wants: Sequence[Want],
    holders: Sequence[Holders],
    *,
    rank: int,
    world_size: int,
    count: int,
    agreed: Collection[int],
) -> Division:
    """The division of all pieces. Of ``count`` buckets, all ranks gave the ``agreed`` one mark."""
    found = Division()
    small: list[int] = []
    for name, numbers in sorted(pieces_of(wants).items()):
        first, want = numbers[0], wants[numbers[0]]
        ranks = holders[first]
        found.copies += [(first, number) for number in numbers[1:]]
        if not want.box.elements or (ranks is None and _bucket(name, count) not in agreed):
            found.read.append(first)
        elif ranks is None and want.nbytes <= SMALL_BYTES:
            small.append(first)
        elif ranks is None:
            reader = _pick(name, world_size)
            found.broadcasts.append((reader, [first]))
            if reader == rank:
                found.read.append(first)
        else:
            _between(found, sorted(ranks), name, first, rank)
    if small:
        found.broadcasts.insert(0, (0, small))
        if rank == 0:
            found.read += small
    return found


def _between(found: Division, ranks: list[int], name: bytes, number: int, rank: int) -> None:
    reader = ranks[_pick(name, len(ranks))] if ranks else rank
    if reader == rank:
        found.read.append(number)
        found.given += [(peer, number) for peer in ranks if peer != rank]
    else:
        found.taken.append((reader, number))


def _bucket(name: bytes, count: int) -> int:
    return int.from_bytes(name[:4], "little") % count


def _pick(name: bytes, count: int) -> int:
    return int.from_bytes(name[4:12], "little") % count
