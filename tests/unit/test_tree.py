"""The tree of a state: values come back as they were, and nothing else is let in."""

from __future__ import annotations

import collections
import math
from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError, StateError
from forebay.format.tree import (
    Container,
    Entry,
    Named,
    Tensor,
    Value,
    decode_value,
    encode_value,
    read_tree,
    write_tree,
)


def trip(value: object) -> Any:
    return decode_value(encode_value(value, "v"), "v")


def same(one: Any, other: Any) -> bool:
    """Equal with equal types all the way down; NaN equals itself, order counts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one.hex() == other.hex()
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and {(type(i), i) for i in one} == {
            (type(i), i) for i in other
        }
    return bool(one == other)


KEYS = st.one_of(
    st.text(max_size=5),
    st.integers(),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(), st.text(max_size=3)),
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(2**200), 2**200),
        st.floats(),
        st.complex_numbers(allow_nan=True),
        st.text(max_size=10),
        st.binary(max_size=10),
        st.binary(max_size=10).map(bytearray),
        st.frozensets(st.integers()),
        st.sets(st.text(max_size=3)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=15,
)


@given(VALUES)
def test_a_value_comes_back_as_it_was(value: object) -> None:
    assert same(trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {"a": {1: "x", "1": "y", (2, "z"): [1.5, None]}},
        math.nan,
        -math.inf,
        2**63,
        -(2**63) - 1,
        10**3000,
        b"\x00\xff",
        {1, "1", (2,)},
        frozenset({frozenset({1}), 2}),
        complex(-0.0, math.inf),
        OrderedDict([("b", 1), ("a", 2)]),
        [[], (), {}, set(), OrderedDict()],
        ["int", "5"],
        ["dict", []],
    ],
    ids=lambda v: repr(v)[:30],
)
def test_chosen_values(value: object) -> None:
    assert same(trip(value), value)


def test_equal_sets_have_equal_bytes() -> None:
    one, other = {8 * i for i in range(50)}, {8 * (49 - i) for i in range(50)}
    assert list(one) != sorted(one) or list(other) != sorted(other)  # they do have an order
    assert encode_value(one, "v") == encode_value(other, "v")


def test_constants_of_torch_go_by_name() -> None:
    data = encode_value([torch.float32, torch.device("cpu"), torch.Size((2, 3))], "v")
    assert decode_value(data, "v") == [
        Named("torch.dtype", "torch.float32"),
        Named("torch.device", "cpu"),
        Named("torch.Size", "2,3"),
    ]
    assert decode_value(data, "v", lambda n: n.text) == ["torch.float32", "cpu", "2,3"]


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    "value",
    [
        object(),
        print,
        lambda: None,
        Point(1),
        collections.Counter("ab"),
        collections.defaultdict(int),
        type("Text", (str,), {})("a"),
        range(3),
        int,
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_has_no_place_is_refused_with_its_path(value: object) -> None:
    with pytest.raises(StateError, match=r"^args/list/2/deep: "):
        encode_value([0, 1, {"deep": value}], "args/list")


@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**4200), "\ud800", ["ok", {"\udfff": 1}]],
    ids=["huge", "long", "surrogate", "inner"],
)
def test_what_could_not_be_read_back_is_not_written(value: object) -> None:
    with pytest.raises(StateError, match=r"^here"):
        encode_value(value, "here")


def test_a_list_in_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(StateError, match="reference to itself"):
        encode_value(endless, "loop")
    deep: object = 0
    for _ in range(60):
        deep = {"k": deep}
    assert same(trip(deep), deep)


@given(st.binary(max_size=64))
def test_random_bytes_are_a_value_or_a_format_error(data: bytes) -> None:
    try:
        found = decode_value(data, "v")
    except FormatError:
        return
    encode_value(found, "v")  # what was let in is of the kinds that go out


RAW = st.recursive(
    st.one_of(
        st.none(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.sampled_from(["int", "complex", "bytearray", "list", "set", "dict", "odict", "named"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)


@given(RAW)
def test_random_structures_are_a_value_or_a_format_error(raw: object) -> None:
    try:
        decode_value(msgspec.msgpack.encode(raw), "v")
    except FormatError as error:
        assert "v: " in str(error)  # noqa: PT017 - both ends are right


@pytest.mark.parametrize(
    "raw",
    [
        [],
        ["int"],
        ["int", 5],
        ["int", "x"],
        ["int", "9" * 5000],
        ["complex", 1.0],
        ["bytearray", 2**40],
        ["list", 3],
        ["set", [["list", []]]],
        ["dict", [[1]]],
        ["dict", [[["list", []], 1]]],
        ["named", "os.system", "x"],
        ["named", ["list"], "x"],
        ["unknown", 1],
        {"a": 1},
        msgspec.msgpack.Ext(5, b"x"),
    ],
    ids=lambda raw: repr(raw)[:30].partition(" object")[0],
)
def test_bad_encodings_are_refused(raw: object) -> None:
    with pytest.raises(FormatError, match=r"^here: "):
        decode_value(msgspec.msgpack.encode(raw), "here")


def test_a_deep_encoding_is_refused() -> None:
    with pytest.raises(FormatError):
        decode_value(b"\x92\xa4list\x91" * 5000 + b"\xc0", "v")
    with pytest.raises(FormatError):
        read_tree(b"\x91" * 100_000)


ENTRIES: list[Entry] = [
    Container("", "dict", 2),
    Tensor("w", "w", "float32", (2, 3), "cpu", False),
    Value("n", encode_value(7, "n")),
]


def test_a_tree_comes_back() -> None:
    assert read_tree(write_tree(ENTRIES)) == ENTRIES
    assert write_tree(ENTRIES) == write_tree(iter(ENTRIES))


def test_a_path_named_twice_is_refused() -> None:
    with pytest.raises(FormatError, match="'n' stands twice"):
        read_tree(write_tree([*ENTRIES, Container("n", "list", 0)]), "x")


@given(st.binary(max_size=100))
def test_random_bytes_are_a_tree_or_a_format_error(data: bytes) -> None:
    try:
        read_tree(data)
    except FormatError as error:
        assert str(error).startswith("tree: ")  # noqa: PT017


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_another_tree_or_refused(at: int, flip: int) -> None:
    data = bytearray(write_tree(ENTRIES))
    data[at % len(data)] ^= flip
    try:
        assert read_tree(bytes(data)) != ENTRIES
    except FormatError:
        return
