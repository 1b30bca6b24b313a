"""Small valid inputs, made by the code itself: what a hostile one is nearly like."""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from pathlib import Path

import msgspec

from forebay.commit.catalog import pack_entries
from forebay.commit.gather import gather
from forebay.commit.publish import publish
from forebay.drain.cadence import Word
from forebay.drain.journal import Accepted, Began, Ended, Spilled, Uploaded
from forebay.format import names, tree
from forebay.format.manifest import read_manifest, write_manifest
from forebay.format.messages import AgentConfig, Phase, write_frame
from forebay.format.packed import unpack
from forebay.format.slot import (
    WORD_BYTES,
    Layout,
    SliceRow,
    SlotState,
    Stamp,
    StartDigest,
    WitnessRow,
    Words,
    plan_arena,
)
from forebay.storage.memory import MemoryStore
from forebay.storage.probe import Finding
from tests.build import ATTEMPT, STEP, put_nodes, two_nodes
from tests.unit.test_messages import EVERY

CORPUS = Path(__file__).with_name("corpus")
LIMIT = 2**30


@functools.cache
def store() -> MemoryStore:
    """A committed checkpoint of two nodes in memory."""
    made = MemoryStore()
    for step in (STEP, STEP + 1):
        put_nodes(made, two_nodes(step=step, names=["a", ("b", 1.5)], extra={"k": b"v"}), step=step)
        checked = gather(made, step, ATTEMPT, nodes=2, timeout_s=0.0)
        publish(made, checked, clock=lambda: 1.0)
    return made


def _object(key: str) -> bytes:
    return store().get(key, max_bytes=LIMIT)


def headers() -> list[bytes]:
    """The size of a shard and its header, without the padding."""
    found = []
    for node in (0, 1):
        data = _object(names.shard_key(STEP, ATTEMPT, node, node))
        size = 8 + int.from_bytes(data[:8], "little")
        text = data[8:size].rstrip()
        found.append((len(data) - size + 8 + len(text)).to_bytes(8, "little") + bytes(8) + text)
    return found


def records() -> list[bytes]:
    """Records, their JSON."""
    keys = (names.record_key(STEP, ATTEMPT, node) for node in (0, 1))
    return [unpack(_object(key), LIMIT, "seed") for key in keys]


def packed_records() -> list[bytes]:
    """Records as they are stored."""
    return [_object(names.record_key(STEP, ATTEMPT, node)) for node in (0, 1)]


def indexes() -> list[bytes]:
    """Indexes of two steps."""
    return [_object(names.index_key(step, ATTEMPT)) for step in (STEP, STEP + 1)]


def manifests() -> list[bytes]:
    """Manifests with their seal."""
    found = [read_manifest(_object(names.manifest_key(step))) for step in (STEP, STEP + 1)]
    return [write_manifest(msgspec.structs.replace(each, committer="seed")) for each in found]


def unsealed_manifests() -> list[bytes]:
    """Their JSON, without it."""
    return [msgspec.json.encode(read_manifest(data)) for data in manifests()]


def values() -> list[bytes]:
    """Values of each kind."""
    every = [1, -(2**70), 1.5, None, "text", b"bytes", 1j, [1, [2]], (1, ("a",)), {1, "b"}]
    every += [{"a": 1, 2: [3]}, OrderedDict(x=frozenset({1})), bytearray(b"x"), float("nan")]
    return [tree.encode_value(value, "seed") for value in every]


def trees() -> list[bytes]:
    """Trees of entries with every kind in them."""
    made: list[tree.Entry] = [tree.Container("", "dict", 3), tree.Container("m", "list", 1)]
    made += [tree.Tensor("m/0", "m/0", "float32", (2, 3), "cpu", True)]
    made += [tree.Value(f"v{n}/#1/~2x", value) for n, value in enumerate(values())]
    return [tree.write_tree(made), tree.write_tree(made[2:]), tree.write_tree([])]


def packed_trees() -> list[bytes]:
    """State objects."""
    return [pack_entries(tree.read_tree(data)) for data in trees()]


def ticket() -> tuple[Layout, Stamp]:
    """What stands in a slot's control area."""
    layout = Layout(
        run="/runs/one",
        rank=0,
        world_size=2,
        node=0,
        nodes=1,
        node_ranks=(0, 1),
        image_bytes=4196,
        header_bytes=4096,
        slices=[SliceRow("model/w", None, "uint8", (200,), (0,), (100,), 4096, 100)],
        witnesses=[WitnessRow("full", "model/seen", (0,), (8,), 4096, 8)],
        start_digests=[StartDigest("model/big", (0,), (4,), "ab" * 32)],
    )
    stamp = Stamp(
        step=7,
        attempt="a1",
        staged_s=1.0,
        pause_s=0.001,
        durable=True,
        tree=trees()[0],
        own=trees()[2],
    )
    return layout, stamp


def arenas() -> list[bytes]:
    """Arena files of one and of two slots, staged and free."""
    found = []
    layout, stamp = map(msgspec.msgpack.encode, ticket())
    for slots in (1, 2):
        size = len(layout) + len(stamp)
        head = plan_arena(slots=slots, ticket_bytes=size, image_bytes=8192, generation=3)
        data = bytearray(head.total_bytes)
        data[:4096] = head.write()
        for slot in range(slots):
            at = head.control_start(slot)
            words = Words(SlotState.STAGED, 1, len(layout), len(stamp)).write()
            data[at : at + len(words)] = words
            data[at + WORD_BYTES : at + WORD_BYTES + size] = layout + stamp
        found.append(bytes(data))
    return found


def frames() -> list[bytes]:
    """Each message in a frame, and all of them one after another."""
    every = [write_frame(message) for message in EVERY]
    return [*every, b"".join(every)]


def lines() -> list[bytes]:
    """Lines of a journal, each without its frame."""
    layout, stamp = ticket()
    sealed = {"header": b"h" * 32, "slices": (b"s" * 32,), "witnesses": (b"w" * 32,)}
    of = {"step": 7, "attempt": "a1"}
    every = [
        Accepted(arena="rank-00000.0.arena", slot=0, layout=layout, stamp=stamp),
        Spilled(**of, rank=0, blocks=((),), **sealed),  # type: ignore[arg-type]
        Uploaded(**of, rank=0, blocks=((b"b" * 32,),), **sealed),  # type: ignore[arg-type]
        Began(**of, rank=0, upload_id="u", part_bytes=2**20),  # type: ignore[arg-type]
        Ended(**of, phase=Phase.COMMITTED, at_s=1.5, node_ranks=(0, 1)),  # type: ignore[arg-type]
    ]
    return [msgspec.msgpack.encode(line) for line in every]


def configs() -> list[bytes]:
    """Configs of an agent."""
    bare = AgentConfig(run="/runs/one", local=None, node=0)
    full = AgentConfig(run="s3://b/run", local="/l", node=3, keep_last=2, drain_bytes_per_s=1e9)
    return [msgspec.json.encode(bare), msgspec.json.encode(full)]


def words() -> list[bytes]:
    """Node 0's word on a snapshot, and what a probe found."""
    found = Finding(
        url="/r",
        again="exists",
        kept=True,
        creators=16,
        winners=1,
        winner_kept=True,
        seconds=0.5,
        at_s=1.0,
    )
    return [msgspec.json.encode(Word(durable=True, staged_s=1.5)), msgspec.json.encode(found)]


def plans() -> list[bytes]:
    """Files for ``forebay plan``."""
    scale = b"preset: llama3-405b\ncluster: {gpus: 16384, d2h: 55GB/s}\nfailures:\n  mtbf: 3h\n"
    small = b"model: {params: 70B, content: 'weights=bf16,master=fp32'}\n"
    small += b"cluster:\n  gpus: {value: 64, source: a card}\n  host_memory: 2TB\n"
    small += b"checkpoint: {cadence: 30min, tail: normal, local: yes, goal: 3%}\n"
    store = b"storage: {filesystem: 1TB/s, budget: 0.5, part_bytes: 64MiB}\n"
    store += b"training: {tokens: 15.6T}\nlayout: {tp: 8, pp: 16, skew: 1.1}\n"
    return [scale, small, store + b"failures: {restart: 10min, share_memory: 20%}\n"]


def faults() -> list[bytes]:
    """Scripts of faults."""
    rules = [
        {"op": "put_large", "match": "rank-0+1", "do": "enospc", "times": 1},
        {"op": "create", "do": "delay", "seconds": 0.5, "after": 2},
        {"op": "put_large", "do": "partial", "at_bytes": 4096, "message": "full"},
    ]
    return [json.dumps(rules).encode(), json.dumps(rules[:1]).encode()]


def replies() -> list[bytes]:
    """Answers of a bucket: a first byte that chooses the status, then the body."""
    head = b'<?xml version="1.0" encoding="UTF-8"?>\n'
    space = b'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    part = b"<Part><PartNumber>%d</PartNumber><ETag>&quot;a&quot;</ETag><Size>5</Size></Part>"
    pages = b"<IsTruncated>true</IsTruncated><NextPartNumberMarker>2</NextPartNumberMarker>"
    upload = b"<Upload><Key>run/data/x</Key><UploadId>u1</UploadId>"
    upload += b"<Initiated>2026-01-01T00:00:00.000Z</Initiated></Upload>"
    more = b"<IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker>"
    error = b"<Error><Code>%s</Code><Message>Please  slow &lt; down</Message></Error>"
    return [
        b"\0"
        + head
        + b"<InitiateMultipartUploadResult %s><UploadId>u1</UploadId>" % space
        + b"</InitiateMultipartUploadResult>",
        b"\0" + head + b"<ListPartsResult>" + part % 1 + part % 2 + b"</ListPartsResult>",
        b"\0" + head + b"<ListPartsResult>" + part % 1 + pages + b"</ListPartsResult>",
        b"\0" + head + b"<ListMultipartUploadsResult>" + upload + b"</ListMultipartUploadsResult>",
        b"\0<ListMultipartUploadsResult>" + upload + more + b"</ListMultipartUploadsResult>",
        b"\1" + head + error % b"SlowDown",
        b"\2" + head + error % b"NoSuchUpload",
        b"\3" + head + error % b"AccessDenied",
        b"\0" + head + error % b"InternalError",
    ]


def callers() -> list[bytes]:
    """What one that measures a link says first."""
    return [
        json.dumps({"role": role, "session": "ab", "seconds": 0.0, "proof": "x"}).encode()
        for role in ("control", "up", "down")
    ]


def listeners() -> list[bytes]:
    """What the other end of a link says: greeting, answer, count."""
    hello = {"forebay": "doctor", "version": 1, "nonce": "00ff"}
    said = (hello, {"ok": True, "session": "ab"}, {"bytes": 5})
    texts = [json.dumps(each).encode() for each in said]
    return [b"".join(len(text).to_bytes(4, "big") + text for text in texts[:n]) for n in (1, 2, 3)]
