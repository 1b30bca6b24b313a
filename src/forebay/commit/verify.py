"""Re-check everything that a manifest stands for, object by object and range by range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.commit.catalog import Catalog
from forebay.errors import DamagedError, ForebayError, NotFoundError
from forebay.format.digests import digest
from forebay.format.index import read_index
from forebay.format.manifest import Manifest
from forebay.format.record import Record, Shard, stored_slices
from forebay.format.shard import read_header
from forebay.format.stored import Stored
from forebay.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as it was written: the object, and what is wrong with it."""

    object: str
    what: str


def verify_step(
    catalog: Catalog, manifest: Manifest, *, index: int = 0, count: int = 1
) -> Iterator[Finding | int]:
    """Check share ``index`` of ``count`` of a checkpoint: findings, and bytes as they are checked.

    Share 0 also checks index and state. Nodes are dealt out one by one.
    """
    from_records: dict[tuple[str, int], Stored] = {}
    for node in range(index, manifest.nodes, count):
        try:
            record = catalog.record(manifest, node)
        except ForebayError as error:
            yield Finding(object=manifest.records[node].key, what=str(error))
            continue
        yield manifest.records[node].nbytes
        for stored in stored_slices(record):
            from_records[stored.key, stored.start] = stored
        yield from _verify_shards(catalog.store, record)
    if index == 0:
        yield from _verify_shared(catalog, manifest, from_records if count == 1 else None)


def _verify_shared(
    catalog: Catalog, manifest: Manifest, known: dict[tuple[str, int], Stored] | None
) -> Iterator[Finding | int]:
    try:
        catalog.entries(manifest)
        yield manifest.state.nbytes
    except ForebayError as error:
        yield Finding(object=manifest.state.key, what=str(error))
    try:
        data = catalog.checked(manifest.index, 1 << 34)
        for stored in read_index(data, None, f"{catalog.store.url}/{manifest.index.key}"):
            if known is not None and known.get((stored.key, stored.start)) != stored:
                what = f"{manifest.index.key}: {stored.slice.key} is not as its record has it"
                yield Finding(object=manifest.index.key, what=what)
        yield manifest.index.nbytes
    except ForebayError as error:
        yield Finding(object=manifest.index.key, what=str(error))


def _verify_shards(store: Store, record: Record) -> Iterator[Finding | int]:
    by_key: dict[str, list[Stored]] = {}
    for stored in stored_slices(record):
        by_key.setdefault(stored.key, []).append(stored)
    for shard in record.shards:
        if shard.key:
            yield from _verify_shard(store, shard, by_key.get(shard.key, []))


def _verify_shard(store: Store, shard: Shard, slices: list[Stored]) -> Iterator[Finding | int]:
    where = f"{store.url}/{shard.key}"
    info = store.head(shard.key)
    if info is None or info.size != shard.nbytes:
        found = "no such object" if info is None else f"found {info.size} bytes"
        yield Finding(object=shard.key, what=f"{where}: expected {shard.nbytes} bytes, {found}")
        if info is None:
            return
    try:
        header = store.get_range(shard.key, 0, shard.header_bytes)
        found_digest = digest(header).hex()
        if found_digest != shard.header_digest:
            raise DamagedError(
                f"{where}: header, bytes 0 to {shard.header_bytes}: expected digest "
                f"{shard.header_digest[:16]}, found {found_digest[:16]}"
            )
        read_header(header, shard.nbytes, where)
        yield len(header)
    except (DamagedError, NotFoundError) as error:
        yield Finding(object=shard.key, what=str(error))
    for stored in sorted(slices, key=lambda s: s.start):
        try:
            data = memoryview(bytearray(stored.nbytes))
            store.read_into(stored.key, stored.start, data)
            found_digest = digest(data).hex()
            if found_digest != stored.digest.hex():
                raise DamagedError(
                    f"{where}: {stored.slice.key}, bytes {stored.start} to "
                    f"{stored.start + stored.nbytes}: expected digest {stored.digest.hex()[:16]}, "
                    f"found {found_digest[:16]}"
                )
            yield stored.nbytes
        except (DamagedError, NotFoundError) as error:
            yield Finding(object=shard.key, what=str(error))
