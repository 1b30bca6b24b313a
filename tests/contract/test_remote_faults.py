"""A store behind the fault proxy: all that it must do, whatever the requests of the moment."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import pytest

from forebay.errors import DamagedError, StoreError
from forebay.storage.address import open_store
from forebay.storage.endpoint import parse_remote
from forebay.storage.remote import RemoteStore
from forebay.storage.reread import TRIES, read_checked
from forebay.storage.store import Store
from forebay.testing.proxy import Fault, FaultProxy
from forebay.testing.store import StoreContract, page_aligned

PART = 5 * 2**20


def opened(proxy: FaultProxy, patience_s: float = 30.0) -> RemoteStore:
    url = f"s3://ckpt/{secrets.token_hex(6)}?endpoint={proxy.url}&allow_http=true"
    return RemoteStore(parse_remote(url), part_bytes=PART, patience_s=patience_s)


class TestThroughTheProxy(StoreContract):
    """Without faults nobody can tell."""

    @pytest.fixture
    def store(self, proxy: FaultProxy) -> Store:
        return opened(proxy)


class TestWhileOneInFiveFails(StoreContract):
    """A store does all that it must, whatever the requests of the moment."""

    @pytest.fixture
    def store(self, proxy: FaultProxy) -> Store:
        proxy.set_faults(
            [
                Fault(do="status", share=0.07, status=503),
                Fault(do="status", share=0.07, status=500, code="InternalError"),
                Fault(do="reset_request", share=0.07, at_bytes=1000),
            ]
        )
        return opened(proxy)


def count(proxy: FaultProxy, method: str, fault: str | None = None) -> int:
    return sum(one.method == method and fault in (None, one.fault) for one in list(proxy.requests))


def test_status(proxy: FaultProxy) -> None:
    store = opened(proxy)
    proxy.set_faults([Fault(do="status", method="PUT", times=2)])
    store.put_large("a", page_aligned(10))
    assert [one.status for one in proxy.requests if one.method == "PUT"] == [503, 503, 200]
    assert store.pace.share < 1.0, "the store was asked for less"


@pytest.mark.parametrize("at_bytes", [0, 1, 100_000, PART - 1])
def test_reset_request(proxy: FaultProxy, at_bytes: int) -> None:
    store, view = opened(proxy), page_aligned(2 * PART + 1)
    proxy.set_faults(
        [Fault(do="reset_request", method="PUT", match="partNumber=2", times=2, at_bytes=at_bytes)]
    )
    store.put_large("a", view)
    assert count(proxy, "PUT", "reset_request") == 2
    into = page_aligned(view.nbytes)
    store.read_into("a", 0, into)
    assert into == view


def test_reset_reply(proxy: FaultProxy) -> None:
    store, view = opened(proxy), page_aligned(PART)
    store.put_large("a", view)
    proxy.set_faults([Fault(do="reset_reply", method="GET", times=3, at_bytes=1_000_000)])
    into = page_aligned(view.nbytes)
    store.read_into("a", 0, into)
    assert into == view
    assert count(proxy, "GET") == 4


def test_lost_replies_have_landed(proxy: FaultProxy) -> None:
    store = opened(proxy, patience_s=0.3)
    proxy.set_faults([Fault(do="lose_reply", method="PUT")])
    with pytest.raises(StoreError):
        store.put_large("a", page_aligned(10)) or store.put_large("b", page_aligned(10))
    proxy.set_faults([])
    assert store.head("a") is not None


def test_stale_list(proxy: FaultProxy) -> None:
    store = opened(proxy)
    store.put("a/1", b"x")
    assert len(list(store.list("a/"))) == 1
    store.put("a/2", b"x")
    proxy.set_faults([Fault(do="stale_list")])
    assert len(list(store.list("a/"))) == 1
    assert store.head("a/2") is not None
    proxy.set_faults([])
    assert len(list(store.list("a/"))) == 2


# -- replies that are lost, settled by reading back ----------------------------------------------

WRITES: dict[str, Callable[[Store], object]] = {
    "put": lambda s: s.put("a", b"x" * 100),
    "put_large whole": lambda s: s.put_large("a", page_aligned(100)),
    "put_large in parts": lambda s: s.put_large("a", page_aligned(2 * PART)),
}


@pytest.mark.parametrize("times", [1, 2])
def test_a_create_whose_reply_was_lost_is_ours(proxy: FaultProxy, times: int) -> None:
    from forebay.storage.store import CreateOutcome

    store = opened(proxy)
    proxy.set_faults([Fault(do="lose_reply", method="PUT", times=times)])
    assert store.create("m", b"mine") is CreateOutcome.COMMITTED
    assert store.create("m", b"yours") is CreateOutcome.EXISTS
    assert store.create("m", b"mine") is CreateOutcome.EXISTS
    assert store.get("m", max_bytes=9) == b"mine"


def test_a_create_that_another_won_meanwhile_is_not_ours(proxy: FaultProxy) -> None:
    from forebay.storage.store import CreateOutcome

    store = opened(proxy)
    open_store(store._remote.text).put("m", b"theirs")
    proxy.set_faults([Fault(do="status", method="PUT", status=500, times=1)])
    assert store.create("m", b"mine") is CreateOutcome.EXISTS


def test_conflict_while_another_create_is_under_way(proxy: FaultProxy) -> None:
    """409 says neither: there is no object yet, so the create is tried again."""
    from forebay.storage.store import CreateOutcome

    store = opened(proxy)
    busy = Fault(do="status", method="PUT", status=409, code="ConditionalRequestConflict", times=2)
    proxy.set_faults([busy])
    assert store.create("m", b"mine") is CreateOutcome.COMMITTED
    assert [one.status for one in proxy.requests if one.method == "PUT"] == [409, 409, 200]


def test_unknown_when_nothing_answers_any_more(proxy: FaultProxy) -> None:
    from forebay.storage.store import CreateOutcome

    store = opened(proxy, patience_s=0.5)
    proxy.set_faults(
        [Fault(do="lose_reply", method="PUT", times=1), Fault(do="status", status=500)]
    )
    assert store.create("m", b"mine") is CreateOutcome.UNKNOWN
    proxy.set_faults([])
    assert store.get("m", max_bytes=9) == b"mine"


def test_a_completion_whose_reply_was_lost_is_ours(proxy: FaultProxy) -> None:
    store, view = opened(proxy), page_aligned(3 * PART)
    proxy.set_faults([Fault(do="lose_reply", method="POST", match="uploadId=", times=1)])
    store.put_large("a", view)
    into = page_aligned(view.nbytes)
    store.read_into("a", 0, into)
    assert into == view
    assert sum("partNumber=1&" in one.query for one in proxy.requests) == 1


@pytest.mark.parametrize("status", [409, 404])
def test_a_completion_that_must_start_over(proxy: FaultProxy, status: int) -> None:
    """S3 says so with 409 when another write was under way: every part goes again."""
    store, view, told = opened(proxy), page_aligned(2 * PART), list[int]()
    code = {409: "ConditionalRequestConflict", 404: "NoSuchUpload"}[status]
    fault = Fault(do="status", method="POST", match="uploadId=", status=status, code=code, times=1)
    proxy.set_faults([fault])
    store.put_large("a", view, on_progress=told.append)
    assert sum("partNumber=1&" in one.query for one in proxy.requests) == 2
    assert store.sweep("", older_than_s=0) == 0, "the first upload was aborted"
    assert sum(told) == view.nbytes
    assert store.head("a") is not None


def test_a_completion_that_fails_inside_a_success(proxy: FaultProxy) -> None:
    """Status 200 with an error in the body, which S3 documents for long completions."""
    store, view = opened(proxy), page_aligned(2 * PART)
    fault = Fault(
        do="status", method="POST", match="uploadId=", status=200, code="InternalError", times=1
    )
    proxy.set_faults([fault])
    store.put_large("a", view)
    assert store.head("a") is not None


def test_a_request_that_is_stuck_does_not_hold_the_others(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second part hangs on its way; all others pass it, then it goes again."""
    from forebay.storage import s3

    monkeypatch.setattr(s3, "_CONNECT_S", 1.0)
    monkeypatch.setattr(s3, "_REPLY_S", 1.0)
    store, view = opened(proxy), page_aligned(8 * PART)
    proxy.set_faults([Fault(do="hang", method="PUT", match="partNumber=2&", times=1)])
    store.put_large("a", view)
    numbers = [
        int(one.query.partition("partNumber=")[2].partition("&")[0])
        for one in sorted(proxy.requests, key=lambda one: one.started_s)
        if "partNumber=" in one.query
    ]
    assert sorted(numbers) == [1, 2, 2, 3, 4, 5, 6, 7, 8]
    assert numbers.index(5) < len(numbers) - 1 - numbers[::-1].index(2)


def test_a_range_whose_answer_is_cut_short_is_read_again(proxy: FaultProxy) -> None:
    """And an object that is short is damaged, which a second read does not mend."""
    store = opened(proxy)
    store.put("a", b"0123456789")
    proxy.set_faults([Fault(do="short", method="GET", at_bytes=3, times=2)])
    assert store.get_range("a", 0, 10) == b"0123456789"
    proxy.set_faults([])
    with pytest.raises(DamagedError, match="expected at least 11 bytes, found 10"):
        store.get_range("a", 0, 11)


@pytest.mark.parametrize("times", [1, TRIES - 1])
def test_an_object_that_is_changed_on_its_way_is_read_again(proxy: FaultProxy, times: int) -> None:
    def check(data: bytes) -> bytes:
        if data != b"0123456789":
            raise DamagedError("a: other bytes")
        return data

    store = opened(proxy)
    store.put("a", b"0123456789")
    proxy.set_faults([Fault(do="corrupt", method="GET", at_bytes=13, times=times)])
    assert read_checked(store, "a", 10, check) == b"0123456789"
    proxy.set_faults([Fault(do="corrupt", method="GET")])
    with pytest.raises(DamagedError, match="other bytes"):
        read_checked(store, "a", 10, check)
    assert proxy.hits == [TRIES]
