"""The manifest: sealed, so that one flipped bit is seen; strict in what it may name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError
from forebay.format import names
from forebay.format.digests import digest
from forebay.format.manifest import Manifest, Ref, read_manifest, write_manifest

SEAL = "ab" * 32


def good(nodes: int = 2) -> Manifest:
    return Manifest(
        committer="host-1-abcdef",
        version=1,
        features=[],
        forebay="0.1.0",
        run="/runs/one",
        step=50,
        attempt="a",
        committed_s=1.5,
        world_size=4,
        nodes=nodes,
        data_bytes=100,
        tensors=2,
        slices=3,
        index=Ref(names.index_key(50, "a"), 10, SEAL),
        state=Ref(names.state_key(50, "a"), 10, SEAL),
        records=[Ref(names.record_key(50, "a", node), 10, SEAL) for node in range(nodes)],
    )


def sealed(raw: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(raw)[:-1]
    return body + b',"digest":"' + digest(body).hex().encode() + b'"}'


def test_a_manifest_comes_back_and_is_plain_json() -> None:
    data = write_manifest(good())
    assert read_manifest(data) == good()
    assert msgspec.json.decode(data)["step"] == 50


def test_every_flipped_bit_is_refused() -> None:
    data = write_manifest(good())
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError, match=r"^x: "):
            read_manifest(bytes(damaged), "x")


def test_every_cut_and_every_addition_is_refused() -> None:
    data = write_manifest(good())
    for cut in range(len(data)):
        with pytest.raises(FormatError):
            read_manifest(data[:cut])
    for more in (b"\n", b" ", b"}", data):
        with pytest.raises(FormatError):
            read_manifest(data + more)


@given(st.binary(max_size=200))
def test_garbage_is_refused_sealed_or_not(body: bytes) -> None:
    with pytest.raises(FormatError):
        read_manifest(body)
    with pytest.raises(FormatError):
        read_manifest(body + b',"digest":"' + digest(body).hex().encode() + b'"}')


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"version": 2}, "version 2.*upgrade"),
        ({"features": ["sparse"]}, "sparse.*upgrade"),
        ({"extra": 1}, "extra"),
        ({"step": 51}, "not one for each"),
        ({"step": -1}, "step"),
        ({"step": 10**12}, "step"),
        ({"attempt": "b"}, "not one for each"),
        ({"attempt": "../b"}, "attempt"),
        ({"nodes": 3}, "not one for each"),
        ({"nodes": 10**15}, "not one for each"),
        ({"nodes": 0, "records": []}, "0 nodes"),
        ({"nodes": -1, "records": []}, "nodes"),
        ({"world_size": 1}, "1 ranks on 2 nodes"),
        ({"records": []}, "not one for each"),
        ({"index": {"key": "../index.parquet", "nbytes": 1, "digest": SEAL}}, "foreign index"),
        ({"state": {"key": "/etc/passwd", "nbytes": 1, "digest": SEAL}}, "foreign state"),
        ({"run": None}, "not a manifest"),
    ],
)
def test_sealed_but_senseless(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(FormatError, match=why):
        read_manifest(sealed(msgspec.to_builtins(good()) | fields), "x")


def test_records_in_another_order_or_elsewhere_are_refused() -> None:
    refs = good().records
    elsewhere = Ref("data/000000000050/b/node-00001/record.json.zst", 10, SEAL)
    for records in (refs[::-1], [refs[0], refs[0]], [refs[0], elsewhere]):
        data = write_manifest(msgspec.structs.replace(good(), records=records))
        with pytest.raises(FormatError, match="not one for each"):
            read_manifest(data)


def test_it_stays_small_at_2048_nodes() -> None:
    big = msgspec.structs.replace(good(2048), world_size=16384)
    data = write_manifest(big)
    assert len(data) < 10**6
    assert read_manifest(data) == big
