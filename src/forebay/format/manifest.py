"""The manifest: the one object whose existence makes a checkpoint exist.

JSON whose last member is the BLAKE3 digest of all bytes before it, so that a flipped bit is seen.
It names every record and the index with size and digest; shards are named by the records.
"""

from __future__ import annotations

import re

import msgspec

from forebay.errors import FormatError, UsageError
from forebay.format import names
from forebay.format.digests import digest
from forebay.format.packed import require_readable

MANIFEST_VERSION = 1
FEATURES: tuple[str, ...] = ()
MAX_MANIFEST_BYTES = 16 * 2**20

_SEAL = re.compile(rb',"digest":"([0-9a-f]{64})"\}')
_SEAL_BYTES = len(b',"digest":""}') + 64


class Ref(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object by key, with the size in bytes and digest (hex) it must have."""

    key: str
    nbytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One committed checkpoint. ``data_bytes`` sums the images; ``committed_s`` is Unix time.

    ``committer`` names the process and the try that wrote it: who finds it knows whether it is
    his own, also when the reply to its creation was lost.
    """

    version: int
    features: list[str]
    forebay: str
    run: str
    step: int
    attempt: str
    committed_s: float
    committer: str
    world_size: int
    nodes: int
    data_bytes: int
    tensors: int
    slices: int
    index: Ref
    state: Ref
    records: list[Ref]


def write_manifest(manifest: Manifest) -> bytes:
    """The manifest as sealed JSON, under 1 MB at 2,048 nodes."""
    body = msgspec.json.encode(manifest)
    return body[:-1] + b',"digest":"' + digest(body[:-1]).hex().encode() + b'"}'


def read_manifest(data: bytes, name: str = "manifest") -> Manifest:
    """Parse and check a manifest. Raises FormatError naming ``name`` and what is wrong."""
    seal = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if len(data) > MAX_MANIFEST_BYTES or seal is None:
        raise FormatError(
            f"{name}: {len(data)} bytes that do not end in a digest: cut short, or not a manifest"
        )
    body = data[:-_SEAL_BYTES]
    found = digest(body).hex()
    if found != seal[1].decode():
        raise FormatError(
            f"{name}: expected digest {seal[1].decode()[:16]}, found {found[:16]}: "
            "damaged; restore an older step or copy it back from a backup"
        )
    try:
        require_readable(body + b"}", MANIFEST_VERSION, FEATURES, name)
        manifest = msgspec.json.decode(body + b"}", type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"{name}: not a manifest: {error}") from None
    _check(manifest, name)
    return manifest


def _check(manifest: Manifest, name: str) -> None:
    step, attempt = manifest.step, manifest.attempt
    try:
        names.attempt_prefix(step, attempt)
    except UsageError as error:
        raise FormatError(f"{name}: {error}") from None
    if manifest.nodes != len(manifest.records):
        raise FormatError(f"{name}: its records are not one for each of {manifest.nodes} nodes")
    expected = [names.record_key(step, attempt, node) for node in range(manifest.nodes)]
    if [ref.key for ref in manifest.records] != expected:
        raise FormatError(f"{name}: its records are not one for each of {manifest.nodes} nodes")
    if manifest.index.key != names.index_key(step, attempt):
        raise FormatError(f"{name}: names a foreign index {manifest.index.key!r}")
    if manifest.state.key != names.state_key(step, attempt):
        raise FormatError(f"{name}: names a foreign state {manifest.state.key!r}")
    if manifest.world_size < manifest.nodes or manifest.nodes < 1:
        raise FormatError(f"{name}: {manifest.world_size} ranks on {manifest.nodes} nodes")
