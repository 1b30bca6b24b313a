"""Settings are checked together when they are given."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from forebay.config import (
    LINGER_VARIABLE,
    RUNTIME_VARIABLE,
    Keep,
    Settings,
    linger_s,
    runtime_directory,
)
from forebay.errors import UsageError


def test_defaults_are_good_and_frozen() -> None:
    settings = Settings()
    assert (settings.slots, settings.on_full, settings.durable_every) == (2, "skip", 1)
    with pytest.raises(FrozenInstanceError):
        settings.slots = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"slots": 0}, "slots"),
        ({"slots": 65}, "slots"),
        ({"on_full": "drop"}, "on_full.*'drop'"),
        ({"durable_every": 0}, "durable_every"),
        ({"durable_every": "0s", "local": Path("/x")}, "durable_every"),
        ({"durable_every": "soon", "local": Path("/x")}, "expected a number with a unit"),
        ({"durable_every": "10min"}, "needs the local tier"),
        ({"drain_requests_per_s": 0}, "drain_requests_per_s: expected > 0"),
        ({"store_timeout_s": -1}, "store_timeout_s: expected > 0"),
        ({"stagger_s": -1}, "stagger_s: expected 0 or more"),
        ({"queue": -1}, "queue: expected 0 or more"),
        ({"commit_mode": "any"}, "commit_mode: expected 'create' or 'single-writer'"),
        ({"durable_every": 2}, "durable_every.*local="),
        ({"drain_bytes_per_s": 0}, "drain_bytes_per_s"),
        ({"drain_bytes_per_s": -1.0}, "drain_bytes_per_s"),
        ({"check_replicas": "never"}, "check_replicas.*'never'"),
        ({"agent": "none"}, "agent.*'none'"),
    ],
)
def test_settings_that_are_wrong_name_the_field(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Settings(**fields)


def test_settings_at_their_bounds() -> None:
    Settings(slots=1)
    Settings(slots=64, durable_every=10, local=Path("/nvme"), drain_bytes_per_s=1.0)


@pytest.mark.parametrize("fields", [{"last": 0}, {"last": -1}, {"every": 0}])
def test_keep_that_is_wrong(fields: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"keep: {next(iter(fields))}"):
        Keep(**fields)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUNTIME_VARIABLE, raising=False)
    assert runtime_directory() == Path(f"/dev/shm/forebay-{os.getuid()}")
    monkeypatch.setenv(RUNTIME_VARIABLE, "/run/x")
    assert runtime_directory() == Path("/run/x")
    monkeypatch.delenv(LINGER_VARIABLE, raising=False)
    assert linger_s() == 120.0
    monkeypatch.setenv(LINGER_VARIABLE, "1.5")
    assert linger_s() == 1.5
    monkeypatch.setenv(LINGER_VARIABLE, "soon")
    with pytest.raises(UsageError, match=f"{LINGER_VARIABLE}.*'soon'"):
        linger_s()
