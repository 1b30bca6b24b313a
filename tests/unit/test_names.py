"""Object keys: built in one place, and nothing foreign is taken for ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError, UsageError
from forebay.format import names

STEPS = st.integers(0, names.MAX_STEP)
ATTEMPTS = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_=-]{0,79}(\.[0-9]{1,6})?\Z")


@given(STEPS, ATTEMPTS, st.integers(0, 200_000), st.integers(0, 2_000_000))
def test_a_built_key_parses_to_what_it_was_built_from(
    step: int, attempt: str, node: int, rank: int
) -> None:
    assert names.parse_manifest_key(names.manifest_key(step)) == step
    keys = {
        names.shard_key(step, attempt, node, rank): (node, rank, f"rank-{rank:05d}.safetensors"),
        names.record_key(step, attempt, node): (node, None, "record.json.zst"),
        names.index_key(step, attempt): (None, None, "index.parquet"),
        names.state_key(step, attempt): (None, None, "state.msgpack.zst"),
    }
    for key, (n, r, leaf) in keys.items():
        found = names.parse_data_key(key)
        assert found == names.DataName(step=step, attempt=attempt, node=n, rank=r, leaf=leaf)
        assert key.startswith(names.attempt_prefix(step, attempt))
        assert names.require_within(key, step, attempt) == key


def test_keys_are_as_documented() -> None:
    assert names.manifest_key(50) == "manifests/000000000050.json"
    assert (
        names.shard_key(50, "a", 2, 17) == "data/000000000050/a/node-00002/rank-00017.safetensors"
    )


@pytest.mark.parametrize("step", [-1, 10**12, True, 1.0, "1", None])
def test_steps_that_are_none(step: object) -> None:
    with pytest.raises(UsageError, match="step"):
        names.manifest_key(step)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "attempt", ["", "../x", "a/b", ".a", "-a", "a b", "a.b", "a.1234567", "ä", "a\n", "a" * 81]
)
def test_attempts_that_are_none(attempt: str) -> None:
    with pytest.raises(UsageError, match="attempt"):
        names.check_attempt(attempt)


def test_a_dot_counts_repeated_steps_and_names_no_start() -> None:
    assert names.check_attempt("12345.2") == "12345.2"
    assert names.check_start("12345-2") == "12345-2"
    with pytest.raises(UsageError, match=r"no dot, found '12345\.2'"):
        names.check_start("12345.2")


@pytest.mark.parametrize(
    "key",
    [
        "manifests/step-50.backup",
        "manifests/50.json",
        "manifests/000000000050.json.bak",
        "manifests/000000000050.json\n",
        "manifests/../000000000050.json",
        "other/000000000050.json",
        "manifests/\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0665\u0660.json",
    ],
)
def test_foreign_manifest_names(key: str) -> None:
    assert names.parse_manifest_key(key) is None


FOREIGN = [
    "../data/000000000050/a/index.parquet",
    "/data/000000000050/a/index.parquet",
    "data/000000000050/../a/index.parquet",
    "data/000000000050/../index.parquet",
    "data/000000000050/a/../index.parquet",
    "data/000000000050/a/step-50.backup",
    "data/000000000050/a/node-00000/rank-00000.safetensors.bak",
    "data/000000000050/a/node-00000/notes.txt",
    "data/000000000050/a/node-0/record.json.zst",
    "data/50/a/index.parquet",
    "data/000000000050/a b/index.parquet",
    "data/000000000050/a/index.parquet\n",
    "/etc/passwd",
    "",
]


@pytest.mark.parametrize("key", FOREIGN)
def test_foreign_data_names(key: str) -> None:
    assert names.parse_data_key(key) is None
    with pytest.raises(FormatError, match="damaged or forged"):
        names.require_within(key, 50, "a")


def test_another_step_or_attempt_is_not_within() -> None:
    key = names.index_key(50, "a")
    for step, attempt in ((51, "a"), (50, "b"), (50, "a.1")):
        with pytest.raises(FormatError, match="damaged or forged"):
            names.require_within(key, step, attempt)


@given(st.text())
def test_any_text_parses_or_does_not(key: str) -> None:
    assert names.parse_manifest_key(key) is None
    assert names.parse_data_key(key) is None
