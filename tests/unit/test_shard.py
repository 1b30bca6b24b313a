"""The image: what safetensors itself opens, and what the reader refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load

from forebay.errors import FormatError
from forebay.format import shard
from forebay.format.dtypes import ELEMENT_TYPES, element_type
from forebay.format.shard import header_bytes_of, plan_image, read_header
from forebay.format.slices import Box, Slice, TensorKey


def whole(fqn: str, dtype: str, shape: tuple[int, ...]) -> Slice:
    return Slice(TensorKey(fqn), dtype, shape, Box.whole(shape))


def file_of(image: shard.Image, data: dict[str, bytes]) -> bytes:
    made = bytearray(image.header).ljust(image.total_bytes, b"\0")
    for placed in image.placed:
        assert len(data[placed.name]) == placed.nbytes
        made[placed.start : placed.start + placed.nbytes] = data[placed.name]
    return bytes(made)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_safetensors_opens_every_type_with_its_values(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensors = {
        "f32": torch.randn(3, 5),
        "bf16": torch.randn(7).to(torch.bfloat16),
        "f16": torch.randn(3).to(torch.float16),
        "f8a": torch.randn(5).to(torch.float8_e4m3fn),
        "f8b": torch.randn(5).to(torch.float8_e5m2),
        "bool": torch.tensor([True, False, True]),
        "i64": torch.arange(4),
        "u8": torch.arange(9, dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    raw = {
        "c64": torch.randn(2, 3, dtype=torch.complex64),
        "c128": torch.randn(3, dtype=torch.complex128),
        "c128.scalar": torch.tensor(1 + 2j, dtype=torch.complex128),
        "f8c": torch.randn(3).to(torch.float8_e4m3fnuz),
    }
    every = tensors | raw
    image = plan_image(
        [whole(k, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for k, t in every.items()],
        {"format": "forebay", "rank": "0"},
    )
    data = file_of(image, {k: bytes_of(t) for k, t in every.items()})
    loaded = load(data)
    assert loaded.keys() == every.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert bytes_of(loaded[name]) == bytes_of(tensor)
    for name, tensor in raw.items():
        assert loaded[name].dtype == torch.uint8
        assert bytes_of(loaded[name]) == bytes_of(tensor)
    assert loaded["c64"].shape == (2, 24)
    assert loaded["c128.scalar"].shape == (16,)
    (tmp_path / "x.safetensors").write_bytes(data)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "forebay", "rank": "0"}
    assert {e.name for e in read_header(image.header, image.total_bytes)} == every.keys()


PIECES = st.lists(
    st.tuples(
        st.sampled_from(sorted(ELEMENT_TYPES)), st.lists(st.integers(0, 4), max_size=3).map(tuple)
    ),
    max_size=12,
)


@given(PIECES)
def test_data_starts_at_a_page_and_every_tensor_is_aligned(
    kinds: list[tuple[str, tuple[int, ...]]],
) -> None:
    pieces = [whole(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(kinds)]
    image = plan_image(pieces, {"rank": "0"})
    assert len(image.header) % 4096 == 0
    assert image == plan_image(reversed(pieces), {"rank": "0"})
    assert {p.slice for p in image.placed} == {p for p in pieces if p.nbytes}
    at = len(image.header)
    for placed in image.placed:
        assert placed.start == at
        assert placed.start % element_type(placed.slice.dtype).item_bytes == 0
        at += placed.nbytes
    assert at == image.total_bytes
    entries = read_header(image.header, image.total_bytes)
    assert [(e.name, e.start, e.nbytes) for e in entries] == [
        (p.name, p.start, p.nbytes) for p in image.placed
    ]


def test_parts_of_one_tensor_have_names_of_their_own() -> None:
    key = TensorKey("w")
    parts = [Slice(key, "int8", (4, 4), Box((at, 0), (2, 4))) for at in (0, 2)]
    assert [p.name for p in plan_image(parts, {}).placed] == ["w@0,0", "w@2,0"]
    beside = plan_image([*parts, whole("w@0,0", "int8", (1,))], {}).placed
    assert len({placed.name for placed in beside}) == 3


def test_an_image_of_nothing() -> None:
    image = plan_image([whole("empty", "float32", (0, 3))], {})
    assert image.placed == ()
    assert read_header(image.header, image.total_bytes) == []


def header(entries: dict[str, object]) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


GOOD = {"a": entry("F32", [2], 0, 8), "b": entry("U8", [3], 8, 11)}


def test_the_hand_made_header_is_good() -> None:
    made = header(GOOD)
    assert [e.name for e in read_header(made, len(made) + 11)] == ["a", "b"]


@pytest.mark.parametrize(
    ("entries", "extra", "why"),
    [
        (GOOD, 10, "tensors end"),
        (GOOD, 12, "tensors end"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("U8", [3], 9, 12)}, 12, "expected"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("U8", [3], 7, 10)}, 10, "expected"),
        ({"a": entry("F32", [2], 4, 12)}, 12, "expected"),
        ({"a": entry("F3", [2], 0, 8)}, 8, "'F3'"),
        ({"a": entry("F32", [-2], 0, 8)}, 8, "-2"),
        ({"a": entry("F32", [2], -8, 0)}, 0, "'a'"),
        ({"a": entry("F32", [3], 0, 8)}, 8, "needs 12"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "'a'"),
        ({"a": entry("F32", [2], 0, 8) | {"more": 1}}, 8, "'a'"),
        ({"a": {"dtype": 3, "shape": [2], "data_offsets": [0, 8]}}, 8, "'a'"),
        ({"a": 7}, 8, "not the JSON"),
    ],
)
def test_headers_that_lie_are_refused(entries: dict[str, object], extra: int, why: str) -> None:
    made = header(entries)
    with pytest.raises(FormatError, match=why):
        read_header(made, len(made) + extra)


def test_short_long_and_huge_headers_are_refused() -> None:
    made = header(GOOD)
    size = len(made) + 11
    for cut in (0, 7, 8, len(made) - 1):
        with pytest.raises(FormatError, match=r"short|cut"):
            read_header(made[:cut], size)
    with pytest.raises(FormatError, match="claims"):
        header_bytes_of((size - 7).to_bytes(8, "little"), size)
    over = shard.MAX_HEADER_BYTES + 1
    with pytest.raises(FormatError, match="limit"):
        header_bytes_of(over.to_bytes(8, "little"), 10 * over)


def test_a_deep_header_is_refused() -> None:
    body = b'{"a":{"b":' + b"[" * 50_000
    with pytest.raises(FormatError):
        read_header(len(body).to_bytes(8, "little") + body, 8 + len(body))


def test_a_header_above_the_bound_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "MAX_HEADER_BYTES", 4000)
    with pytest.raises(FormatError, match="4000"):
        plan_image([whole("a", "int8", (1,))], {})


@given(st.binary(max_size=200), st.integers(0, 300))
def test_garbage_is_refused(body: bytes, more: int) -> None:
    data = len(body).to_bytes(8, "little") + body
    try:
        found = read_header(data, len(data) + more)
    except FormatError:
        return
    assert sum(e.nbytes for e in found) == more


def test_names_that_would_meet_are_told_apart() -> None:
    def piece(fqn: str, offset: int) -> Slice:
        return Slice(TensorKey(fqn), "float32", (4,), Box((offset,), (2,)))

    whole = Slice(TensorKey("w@0"), "float32", (2,), Box((0,), (2,)))
    reserved = Slice(TensorKey("__metadata__"), "float32", (2,), Box((0,), (2,)))
    image = plan_image([piece("w", 0), piece("w", 2), whole, reserved], {})
    assert len({placed.name for placed in image.placed} - {"__metadata__"}) == 4
    assert len(read_header(image.header, image.total_bytes)) == 4
