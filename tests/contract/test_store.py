"""Each store of ours does what the contract says, on disk, on tmpfs, in memory, and wrapped."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.servers import Place

from forebay.storage.directory import DirectoryStore
from forebay.storage.endpoint import RemoteUrl
from forebay.storage.memory import MemoryStore
from forebay.storage.remote import RemoteStore
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


class TestSharedFilesystem(StoreContract):
    """A directory that several machines mount: JuiceFS through FUSE, its data on the S3 server."""

    @pytest.fixture
    def store(self, shared_filesystem: Path) -> Store:
        return DirectoryStore(shared_filesystem / secrets.token_hex(6))


class TestS3OnSeaweed(StoreContract):
    @pytest.fixture
    def store(self, seaweed: Place) -> Store:
        return RemoteStore(seaweed.url(secrets.token_hex(6)))


class TestS3InParts(StoreContract):
    """Parts of 5 MiB, the smallest there are, so that the sizes of the contract need several."""

    @pytest.fixture
    def store(self, seaweed: Place) -> Store:
        return RemoteStore(seaweed.url(secrets.token_hex(6)), part_bytes=5 * 2**20)


class TestS3OnMoto(StoreContract):
    @pytest.fixture
    def store(self, moto: Place) -> Store:
        return RemoteStore(moto.url(secrets.token_hex(6)), part_bytes=5 * 2**20)


class TestS3SingleWriter(StoreContract):
    """No conditional requests: everything holds but the race, for which there is no protection."""

    test_create_race = None  # type: ignore[assignment]

    @pytest.fixture
    def store(self, seaweed: Place) -> Store:
        return RemoteStore(seaweed.url(secrets.token_hex(6)), conditional=False)


class TestAzure(StoreContract):
    """Microsoft's emulator; parts are obstore's own there, small ones so that there are several."""

    @pytest.fixture
    def store(self, azurite: Callable[[str], RemoteUrl]) -> Store:
        return RemoteStore(azurite(secrets.token_hex(6)), part_bytes=5 * 2**20)


class TestGoogle(StoreContract):
    """An S3 server that speaks Google's dialect; parts are obstore's own there as well."""

    @pytest.fixture
    def store(self, google: Callable[[str], RemoteUrl]) -> Store:
        return RemoteStore(google(secrets.token_hex(6)), part_bytes=5 * 2**20)
