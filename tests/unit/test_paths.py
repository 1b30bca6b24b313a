"""Paths: written one to one, whatever the keys are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError, StateError
from forebay.format import paths

KEYS = st.one_of(
    st.text(), st.text(alphabet="/~#0123x"), st.integers(), st.floats(), st.booleans(), st.none()
)


def same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one.hex() == other.hex()
    return type(one) is type(other) and one == other


@given(KEYS)
def test_a_key_reads_back_as_it_was(key: paths.Key) -> None:
    part = paths.write_part(key)
    assert "/" not in part
    assert part
    assert same(paths.read_part(part), key)


@given(KEYS, KEYS)
def test_two_keys_never_share_a_part(one: paths.Key, other: paths.Key) -> None:
    assert (paths.write_part(one) == paths.write_part(other)) == same(one, other)


@pytest.mark.parametrize("key", ["a/b", "~", "~1", "#x", "#0", "#None", "", "0", "~2x", "~3"])
def test_awkward_names(key: str) -> None:
    assert paths.read_part(paths.write_part(key)) == key
    assert len(paths.split(paths.join("top", key))) == 2


def test_keys_that_look_alike_stay_apart() -> None:
    keys: list[object] = [0, "0", 0.0, -0.0, False, "False", None, "None", 1, True, 1.0, "#1", ""]
    assert len({paths.write_part(key) for key in keys}) == len(keys)


def test_a_position_is_its_decimal() -> None:
    assert paths.write_part(paths.Position(3)) == "3"
    assert paths.write_part(3) == "#3"


@given(st.lists(KEYS, min_size=1, max_size=5))
def test_join_and_split_undo_each_other(keys: list[paths.Key]) -> None:
    path = ""
    for key in keys:
        path = paths.join(path, key)
    parts = paths.split(path)
    assert len(parts) == len(keys)
    assert all(same(paths.read_part(p), k) for p, k in zip(parts, keys, strict=True))
    assert paths.component(path) == parts[0]
    assert paths.split(paths.parent_of(path)) == parts[:-1]


@pytest.mark.parametrize("key", [(1, 2), b"x", 1j, object()])
def test_other_keys_are_refused(key: object) -> None:
    with pytest.raises(StateError, match=type(key).__name__):
        paths.write_part(key)


@pytest.mark.parametrize("key", [type("Text", (str,), {})("a"), "\ud800"])
def test_text_that_cannot_be_stored_is_refused(key: object) -> None:
    with pytest.raises(StateError):
        paths.write_part(key)


@pytest.mark.parametrize("part", ["#x", "#", "#0x", "#0x1p999999", "#1.5"])
def test_a_part_nobody_wrote_is_refused(part: str) -> None:
    with pytest.raises(FormatError):
        paths.read_part(part)


def test_nan_is_a_key_too() -> None:
    found = paths.read_part(paths.write_part(math.nan))
    assert isinstance(found, float)
    assert math.isnan(found)


def test_the_root() -> None:
    assert (paths.split(""), paths.parent_of("model"), paths.component("")) == ([], "", "")
