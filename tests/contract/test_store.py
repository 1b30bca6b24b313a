"""Each store of ours does what the contract says, on disk, on tmpfs, in memory, and wrapped."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.storage.directory import DirectoryStore
from forebay.storage.memory import MemoryStore
from forebay.storage.store import Store
from forebay.testing.faulty import open_faulty
from forebay.testing.store import StoreContract


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestDirectory(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return DirectoryStore(tmp_path / "run")


class TestDirectoryOnTmpfs(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        parent = Path("/dev/shm") / f"forebay-test-{secrets.token_hex(6)}"
        parent.mkdir(mode=0o700)
        try:
            yield DirectoryStore(parent / "run")
        finally:
            shutil.rmtree(parent)


class TestFaultyWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        script = tmp_path / "faults.json"
        script.write_text(json.dumps([]))
        return open_faulty(f"faulty+file://{tmp_path}/run?script={script}")
