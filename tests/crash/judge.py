"""What must hold of a run's directory after a power cut, whatever the cut has left of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forebay.commit.catalog import Catalog
from forebay.commit.publish import commit_step, finish
from forebay.commit.reclaim import apply_keep
from forebay.commit.verify import Finding, verify_step
from forebay.config import Keep
from forebay.drain.spill import write_image
from forebay.errors import ConflictError, ForebayError
from forebay.format import names
from forebay.format.record import MAX_RECORD_BYTES, Record, read_record
from forebay.format.slices import Box
from forebay.storage.directory import DirectoryStore
from tests.build import Rank, entries_of, put_record, record_of

NODES, RANKS_OF_NODE = 2, 2
COMMITTED, DELETING = "committed", "deleting"

Shards = dict[str, bytes]
"""Keys of images, and their bytes as they were handed over."""


class Kept(DirectoryStore):
    """Remembers the images that are put into it."""

    def __init__(self, root: Path, shards: Shards) -> None:
        super().__init__(root)
        self.shards = shards

    def put(self, key: str, data: bytes | memoryview) -> None:
        if key.endswith(".safetensors"):
            self.shards[key] = bytes(data)
            write_image(self, key, memoryview(data), on_progress=lambda _: None)
        else:
            super().put(key, data)


def ranks_of(step: int, attempt: str) -> list[dict[int, Rank]]:
    """A checkpoint of four ranks on two nodes, whose bytes are those of no other."""
    world = NODES * RANKS_OF_NODE
    seed = step * 1000 + sum(attempt.encode())
    w = np.random.default_rng(seed).integers(0, 255, (world * 2, 300), dtype=np.uint8)
    nodes = []
    for node in range(NODES):
        made = {}
        for rank in range(node * RANKS_OF_NODE, (node + 1) * RANKS_OF_NODE):
            one = Rank(entries=entries_of(("w", w), step=step))
            made[rank] = one.part("w", w, Box((2 * rank, 0), (2, 300)))
        nodes.append(made)
    return nodes


def seal(store: DirectoryStore, node: int, step: int, attempt: str) -> None:
    """What a node does for a step: the images of its ranks, then its record."""
    put_record(
        store,
        record_of(
            ranks_of(step, attempt)[node],
            store=store,
            node=node,
            nodes=NODES,
            world_size=NODES * RANKS_OF_NODE,
            step=step,
            attempt=attempt,
        ),
    )


def save(store: DirectoryStore, step: int, attempt: str) -> None:
    """Both nodes, one after the other, and the commit."""
    for node in range(NODES):
        seal(store, node, step, attempt)
    commit_step(store, step, attempt, nodes=NODES, timeout_s=0.0)


def is_whole(store: DirectoryStore, shards: Shards) -> list[str]:
    """What is wrong with the steps that are listed: all of each must be there, bit-equal."""
    wrong = []
    catalog = Catalog(store)
    for step in catalog.steps():
        try:
            manifest = catalog.manifest(step)
            wrong += [
                f"step {step}: {found.object}: {found.what}"
                for found in verify_step(catalog, manifest)
                if isinstance(found, Finding)
            ]
            for node in range(manifest.nodes):
                wrong += _bytes_of(store, catalog.record(manifest, node), shards)
        except ForebayError as error:
            wrong.append(f"step {step}: listed, and {error}")
    return wrong


def _bytes_of(store: DirectoryStore, record: Record, shards: Shards) -> list[str]:
    return [
        f"{shard.key}: not the bytes that were saved"
        for shard in record.shards
        if shard.key and store.get(shard.key, max_bytes=1 << 30) != shards[shard.key]
    ]


def records_have_bytes(store: DirectoryStore, shards: Shards) -> list[str]:
    """What is wrong with the records that are there, committed or not."""
    wrong = []
    for info in store.list(names.DATA_PREFIX):
        if not info.key.endswith("record.json.zst"):
            continue
        try:
            data = store.get(info.key, max_bytes=MAX_RECORD_BYTES)
            wrong += _bytes_of(store, read_record(data, info.key), shards)
        except ForebayError as error:
            wrong.append(f"{info.key}: a record, and {error}")
    return wrong


def promised(marks: Sequence[str]) -> set[int]:
    """Steps of which somebody was told that they are committed, and that nobody has deleted."""
    steps = set()
    for mark in marks:
        word, _, step = mark.partition(" ")
        if word == COMMITTED:
            steps.add(int(step))
        elif word == DELETING:
            steps.discard(int(step))
    return steps


def goes_on(store: DirectoryStore) -> list[str]:
    """What the next start does with what others left: as ``Finisher.finish_others``."""
    catalog = Catalog(store)
    newest = catalog.latest()
    wrong = []
    for left in catalog.unfinished():
        if left.complete and left.step > (-1 if newest is None else newest):
            try:
                finish(store, left.step, left.attempt)
            except ConflictError as error:
                if left.step not in Catalog(store).steps():  # else another attempt has it
                    wrong.append(f"step {left.step}: complete, and {error}")
            except ForebayError as error:
                wrong.append(f"step {left.step}: complete, and {error}")
    return wrong


def saves_again(
    store: DirectoryStore, again: Sequence[tuple[int, str]], next_step: int
) -> list[str]:
    """What is wrong with repeating the saves that were cut short, and with a new one."""
    wrong = []
    for step, attempt in (*again, (next_step, "next")):
        try:
            save(store, step, attempt)
        except ForebayError as error:
            wrong.append(f"step {step}, attempt {attempt}: cannot be saved: {error}")
        if step not in Catalog(store).steps():
            wrong.append(f"step {step}: saved, and not listed")
    return wrong


def is_swept(store: DirectoryStore) -> list[str]:
    """What is left that nobody can name, once retention and the sweep have been here."""
    apply_keep(store, Keep(last=1))
    store.sweep("", older_than_s=-1.0)
    known = re.compile(r"(manifests|data)(/.*)?")
    wrong = [
        f"{path}: litter"
        for path in store.root.rglob("*")
        if path.name.startswith(".") or not known.fullmatch(str(path.relative_to(store.root)))
    ]
    if len(Catalog(store).steps()) != 1:
        wrong.append("retention has not left one step")
    return wrong


def is_held(store: DirectoryStore, marks: Sequence[str], shards: Shards) -> list[str]:
    """What is wrong with what the power cut has left, before anybody has cleaned up."""
    wrong = is_whole(store, shards) + records_have_bytes(store, shards)
    lost = promised(marks) - set(Catalog(store).steps())
    return wrong + [f"step {step}: was promised, and is gone" for step in sorted(lost)]


def is_mended(
    store: DirectoryStore, shards: Shards, again: Sequence[tuple[int, str]], next_step: int
) -> list[str]:
    """What is wrong once the next start went on: commits, the saves ``again`` and one more, sweep.

    Of the saves ``again`` those are made of which the step is not committed then.
    """
    wrong = goes_on(store)
    there = Catalog(store).steps()
    wrong += saves_again(store, [one for one in again if one[0] not in there], next_step)
    wrong += is_whole(store, shards) + records_have_bytes(store, shards)
    return wrong + is_swept(store) + is_whole(store, shards)
