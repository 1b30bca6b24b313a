"""What only a remote store has: refusals in one line, parts that outlive the process, sweeps."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest
from tests.servers import Place

from forebay.errors import ConflictError, DeniedError, NotFoundError, StoreError
from forebay.storage import s3 as s3_module
from forebay.storage.address import open_store
from forebay.storage.endpoint import parse_remote
from forebay.storage.remote import RANGE_BYTES, RemoteStore
from forebay.storage.store import CreateOutcome
from forebay.testing.store import page_aligned

PART = 5 * 2**20


def opened(place: Place, **options: object) -> RemoteStore:
    return RemoteStore(place.url(secrets.token_hex(6)), part_bytes=PART, **options)  # type: ignore[arg-type]


class Log:
    """An upload's log that lives as long as the test."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, int]] = []
        self.told: list[str] = []

    def known(self) -> tuple[str, int] | None:
        return self.noted[-1] if self.noted else None

    def begun(self, upload_id: str, part_bytes: int) -> None:
        self.noted.append((upload_id, part_bytes))

    def trouble(self, why: str) -> None:
        self.told.append(why)


class CutError(Exception):
    """Stands for the death of the agent."""


def cut_after(nbytes: int) -> Callable[[int], None]:
    count = 0

    def told(more: int) -> None:
        nonlocal count
        count += more
        if count >= nbytes:
            raise CutError

    return told


CALLS: dict[str, Callable[[RemoteStore], object]] = {
    "get": lambda s: s.get("a", max_bytes=9),
    "read_into": lambda s: s.get_range("a", 0, 1),
    "list": lambda s: list(s.list("")),
    "put": lambda s: s.put("a", b"x"),
    "put_large": lambda s: s.put_large("b", page_aligned(10)),
    "put_large in parts": lambda s: s.put_large("c", page_aligned(2 * PART)),
    "create": lambda s: s.create("d", b"x"),
}


@pytest.mark.parametrize("call", CALLS)
def test_wrong_keys(seaweed: Place, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = opened(seaweed)
    with pytest.raises(DeniedError, match=r"secret key is not that of the access key") as caught:
        CALLS[call](store)
    assert str(caught.value).startswith(store.url)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(DeniedError, match=r"does not know this access key"):
        CALLS[call](opened(seaweed))


def test_no_keys_at_all(seaweed: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", f"{tmp_path}/none")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(DeniedError, match="no credentials found: set AWS_ACCESS_KEY_ID"):
        opened(seaweed).put_large("a", page_aligned(10))
    with pytest.raises(DeniedError, match=r"no credentials found.*or give the machine a role$"):
        opened(seaweed, patience_s=0.5).get("a", max_bytes=1)


def test_keys_from_the_config_files(
    seaweed: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """A profile's keys, region and endpoint; and keys that are mended while the process lives."""
    keys = [seaweed.environment[n] for n in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    for name in seaweed.environment:
        monkeypatch.delenv(name)
    credentials, config = f"{tmp_path}/credentials", f"{tmp_path}/config"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", credentials)
    monkeypatch.setenv("AWS_CONFIG_FILE", config)
    monkeypatch.setattr(s3_module, "_RELOAD_S", 0.0)

    def write(secret: str) -> None:
        with open(credentials, "w") as file:  # noqa: PTH123
            file.write(f"[lab]\naws_access_key_id={keys[0]}\naws_secret_access_key={secret}\n")

    with open(config, "w") as file:  # noqa: PTH123
        file.write(f"[profile lab]\nregion=eu-west-7\nendpoint_url={seaweed.endpoint}\n")
    write("old")
    run = secrets.token_hex(6)
    store = open_store(f"s3://ckpt/{run}?profile=lab&allow_http=true")
    for call in (lambda: store.put("a", b"x"), lambda: store.put_large("b", page_aligned(10))):
        with pytest.raises(DeniedError, match="secret key"):
            call()
    write(keys[1])
    store.put("a", b"x")
    store.put_large("b", page_aligned(10))
    assert [info.key for info in store.list("")] == ["a", "b"]


@pytest.mark.parametrize("call", CALLS)
def test_missing_bucket(seaweed: Place, call: str) -> None:
    url = parse_remote(f"s3://nosuch/run?endpoint={seaweed.endpoint}&allow_http=true")
    with pytest.raises(DeniedError, match="no such bucket: make the bucket, or correct the URL"):
        CALLS[call](RemoteStore(url, part_bytes=PART))


@pytest.mark.parametrize("call", CALLS)
def test_no_route(seaweed: Place, call: str) -> None:
    url = parse_remote("s3://ckpt/run?endpoint=http://127.0.0.1:9&allow_http=true")
    store = RemoteStore(url, part_bytes=PART, patience_s=0.3)
    if call == "create":
        assert store.create("d", b"x") is CreateOutcome.UNKNOWN
        return
    with pytest.raises(StoreError, match="cannot be reached: nothing listens there") as caught:
        CALLS[call](store)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_clock_that_is_off(seaweed: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real server refuses a signature of an hour ago."""
    import botocore.auth

    late = datetime.now(timezone.utc) - timedelta(hours=1)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: late.replace(tzinfo=None))
    with pytest.raises(DeniedError, match="set the clock"):
        opened(seaweed).put_large("a", page_aligned(10))


def test_parts_that_arrived_are_not_sent_again(seaweed: Place) -> None:
    """Cut off in the middle, gone on with by another store object, as after an agent's death."""
    first, view, log = opened(seaweed), page_aligned(8 * PART + 17), Log()
    assert first._s3 is not None

    def cut_once_one_is_there(more: int) -> None:
        # Bytes that have left say nothing: they may be halves of parts, side by side.
        if log.noted and first._s3.parts("a", log.noted[0][0], first.pace):
            raise CutError

    with pytest.raises(CutError):
        first.put_large("a", view, on_progress=cut_once_one_is_there, log=log)
    assert first.head("a") is None
    again, told = RemoteStore(first._remote, part_bytes=PART), list[int]()
    again.put_large("a", view, on_progress=told.append, log=log)
    assert len(log.noted) == 1
    assert sum(told) == view.nbytes
    assert told[0] == PART, "what is there is told at once"
    into = page_aligned(view.nbytes)
    again.read_into("a", 0, into)
    assert into == view


def test_an_upload_that_the_store_dropped_is_begun_anew(seaweed: Place) -> None:
    store, view, log = opened(seaweed), page_aligned(3 * PART), Log()
    with pytest.raises(CutError):
        store.put_large("a", view, on_progress=cut_after(PART), log=log)
    assert store.sweep("", older_than_s=3600) == 0, "it is young"
    assert store.sweep("other/", older_than_s=0) == 0, "it is elsewhere"
    assert store.sweep("", older_than_s=0) == 1
    assert store.sweep("", older_than_s=0) == 0
    store.put_large("a", view, log=log)
    assert len(log.noted) == 2
    assert store.head("a") is not None


def test_parts_of_an_object_that_exists(seaweed: Place) -> None:
    """Refused at its completion; nothing of it stays."""
    store, view = opened(seaweed), page_aligned(3 * PART)
    store.put("a", b"there before")
    with pytest.raises(ConflictError, match="a: exists"):
        store.put_large("a", view)
    assert store.get("a", max_bytes=100) == b"there before"
    assert store.sweep("", older_than_s=0) == 0


def test_a_large_read_is_many_ranges(seaweed: Place) -> None:
    store = opened(seaweed)
    view = page_aligned(3 * RANGE_BYTES + 5)
    store.put_large("a", view)
    into = page_aligned(view.nbytes - 3)
    into[:] = bytes(into.nbytes)
    store.read_into("a", 3, into)
    assert into == view[3:]
    with pytest.raises(NotFoundError):
        store.read_into("b", 0, into)


def test_single_writer_looks_before_it_writes(seaweed: Place) -> None:
    store = opened(seaweed, conditional=False)
    assert not store.capabilities.create_if_absent
    assert store.create("a", b"first") is CreateOutcome.COMMITTED
    assert store.create("a", b"second") is CreateOutcome.EXISTS
    assert store.get("a", max_bytes=9) == b"first"


def test_uploads_leave_no_threads(seaweed: Place) -> None:
    store = opened(seaweed)
    store.put_large("a", page_aligned(6 * PART))
    for thread in threading.enumerate():
        if thread.name.startswith("part"):
            thread.join(10)
            assert not thread.is_alive()
