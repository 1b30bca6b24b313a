"""The fault proxy: transparent to a real S3 server and its signatures, and every fault as told."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store
from tests.servers import Place

from forebay.testing.proxy import Fault, FaultProxy
from forebay.testing.s3 import BUCKET, free_ports


def client(url: str, timeout: str = "20s") -> S3Store:
    return S3Store(
        BUCKET,
        endpoint=url,
        aws_access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": timeout, "connect_timeout": "5s"},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=30)},
    )


@pytest.fixture
def server(seaweed: Place) -> str:
    """A real S3 server; its url."""
    return seaweed.endpoint


@pytest.fixture
def proxy(server: str) -> Iterator[FaultProxy]:
    with FaultProxy(server, seed=7) as proxy:
        yield proxy


@contextmanager
def scripted(reply: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server of one reply for each connection: its url, and the bytes of what came."""
    came: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    data = b""
                    while b"\r\n\r\n" not in data:
                        data += sock.recv(65536)
                    came.append(data)
                    sock.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", came
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def exchange(url: str, request: bytes) -> tuple[bytes, BaseException | None]:
    """Send bytes, return all that comes back and how it ended."""
    host, port = url.removeprefix("http://").split(":")
    data = b""
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(request)
        try:
            while piece := sock.recv(65536):
                data += piece
        except OSError as error:
            return data, error
    return data, None


def keys(store: S3Store, prefix: str) -> list[str]:
    return [found["path"] for batch in obstore.list(store, prefix) for found in batch]


def content(store: S3Store, key: str) -> bytes:
    return bytes(obstore.get(store, key).bytes())


def test_it_is_transparent_to_a_signing_client(proxy: FaultProxy) -> None:
    store = client(proxy.url)
    name = "t/with space+plus%25=&ü/x"
    obstore.put(store, name, b"hello world")
    assert content(store, name) == b"hello world"
    assert bytes(obstore.get_range(store, name, start=2, end=7)) == b"llo w"
    assert obstore.head(store, name)["size"] == 11
    assert keys(store, "t/") == [name]
    large = os.urandom(20 * 2**20)
    obstore.put(store, "t/large", large, chunk_size=5 * 2**20, use_multipart=True)
    assert content(store, "t/large") == large
    obstore.put(store, "t/once", b"first", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "t/once", b"second", mode="create")
    assert content(store, "t/once") == b"first"
    obstore.put(store, "t/empty", b"")
    assert content(store, "t/empty") == b""
    obstore.delete(store, name)
    with pytest.raises(FileNotFoundError):
        obstore.head(store, name)
    assert proxy.requests[0].method == "PUT"
    assert proxy.requests[0].path == f"/{BUCKET}/{name}"
    assert proxy.requests[0].body_bytes == 11
    assert all(seen.status == seen.upstream_status for seen in proxy.requests)
    assert all(seen.status is not None and seen.ended_s is not None for seen in proxy.requests)
    assert sum(seen.query == "" and seen.method == "HEAD" for seen in proxy.requests) == 2
    parts = [seen.body_bytes for seen in proxy.requests if "partNumber" in seen.query]
    assert sorted(parts) == [5 * 2**20] * 4
    assert sum(nbytes for _, nbytes in proxy.arrivals) >= 20 * 2**20
    assert max(nbytes for _, nbytes in proxy.arrivals) <= 64 * 2**10
    assert 0 < proxy.busiest_second() <= sum(nbytes for _, nbytes in proxy.arrivals)


def test_what_goes_on_is_what_came_byte_for_byte() -> None:
    head = (
        b"DELETE /a%2Fb//c%20d/../+?uploads&x=%2B+y&E=%7e HTTP/1.1\r\nHost: example:1\r\n"
        b"x-amz-Date: 1\r\nAUTHORIZATION: AWS4 a=b,  c\r\nx-twice: 1\r\nx-twice: 2\r\n"
        b"Content-Length: 0\r\n\r\n"
    )
    body = b"\x1f\x8bnot really gzip"
    reply = b'HTTP/1.1 207 Odd Words\r\nContent-Encoding: gzip\r\nETag: "x"\r\nContent-Length: 17'
    with scripted(reply + b"\r\n\r\n" + body) as (url, came), FaultProxy(url) as proxy:
        back, _ = exchange(proxy.url, head.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n"))
        assert came == [head]
        assert back.startswith(b'HTTP/1.0 207 Odd Words\r\nContent-Encoding: gzip\r\nETag: "x"\r\n')
        assert back.endswith(b"\r\n\r\n" + body)


@pytest.mark.parametrize("status", [b"200 OK", b"204 No Content", b"304 Not Modified"])
def test_a_reply_without_a_body_ends_at_once(status: bytes) -> None:
    reply = b"HTTP/1.1 %s\r\nContent-Length: 12345\r\n\r\n" % status
    method = "HEAD" if status == b"200 OK" else "GET"
    with scripted(reply) as (url, _), FaultProxy(url) as proxy:
        connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=20)
        connection.request(method, "/x")
        back = connection.getresponse()
        assert back.status == int(status[:3])
        assert back.getheader("Content-Length") == ("12345" if method == "HEAD" else None)
        assert back.read() == b""
        connection.close()


def test_a_client_that_waits_for_100_continue_is_asked_for_its_body(proxy: FaultProxy) -> None:
    text = b"PUT /ckpt/x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n"
    proxy.set_faults([Fault(do="status")])
    back, _ = exchange(proxy.url, text + b"Connection: close\r\n\r\nabc")
    assert back.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 ")


def test_nothing_is_sent_twice_when_the_server_dies() -> None:
    with scripted(b"") as (url, came), FaultProxy(url) as proxy:
        _, error = exchange(proxy.url, b"DELETE /x HTTP/1.1\r\nHost: x\r\n\r\n")
        assert isinstance(error, ConnectionResetError)
        assert len(came) == 1
        assert proxy.requests[0].status is proxy.requests[0].upstream_status is None


def test_a_server_that_is_down_is_a_reset() -> None:
    with FaultProxy(f"http://127.0.0.1:{free_ports(1)[0]}") as proxy:
        back, error = exchange(proxy.url, b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (back, type(error)) == (b"", ConnectionResetError)


def test_status(proxy: FaultProxy, server: str) -> None:
    store = client(proxy.url)
    proxy.set_faults([Fault(do="status", method="PUT", match="status/a", after=2, times=1)])
    obstore.put(store, "status/a1", b"1")
    obstore.put(store, "status/b", b"1")
    with pytest.raises(BaseError, match="SlowDown"):
        obstore.put(store, "status/a2", bytes(2**20))
    obstore.put(store, "status/a3", b"1")
    assert content(store, "status/a1") == b"1"
    assert keys(client(server), "status/") == ["status/a1", "status/a3", "status/b"]
    assert [seen.status for seen in proxy.requests[:4]] == [200, 200, 503, 200]
    assert proxy.requests[2].body_bytes == 2**20
    assert proxy.requests[2].upstream_status is None
    assert proxy.hits == [1]


def test_reset_request(proxy: FaultProxy, server: str) -> None:
    proxy.set_faults([Fault(do="reset_request", at_bytes=100_000)])
    with pytest.raises(BaseError):
        obstore.put(client(proxy.url), "cut", bytes(8 * 2**20), use_multipart=False)
    assert [seen.body_bytes for seen in proxy.requests] == [100_000]
    assert proxy.requests[0].status is None
    assert keys(client(server), "cut") == []


@pytest.mark.parametrize("at_bytes", [0, 1, 70_000])
def test_reset_reply(proxy: FaultProxy, server: str, at_bytes: int) -> None:
    obstore.put(client(server), "whole", bytes(2**20))
    proxy.set_faults([Fault(do="reset_reply", at_bytes=at_bytes)])
    with pytest.raises(BaseError):
        content(client(proxy.url), "whole")
    assert [(seen.status, seen.upstream_status) for seen in proxy.requests] == [(None, 200)]
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n" + bytes(2**20)
    with scripted(reply) as (url, _), FaultProxy(url) as other:
        other.set_faults([Fault(do="reset_reply", at_bytes=at_bytes)])
        back, error = exchange(other.url, b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
    assert len(back.partition(b"\r\n\r\n")[2]) == at_bytes
    assert (back == b"") == (at_bytes == 0)
    assert isinstance(error, ConnectionResetError)


def test_lose_reply(proxy: FaultProxy, server: str) -> None:
    proxy.set_faults([Fault(do="lose_reply", method="PUT", times=1)])
    store = client(proxy.url)
    with pytest.raises(BaseError) as failed:
        obstore.put(store, "lost", b"landed", mode="create")
    assert not isinstance(failed.value, AlreadyExistsError)
    assert (proxy.requests[0].status, proxy.requests[0].upstream_status) == (None, 200)
    assert content(client(server), "lost") == b"landed"
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "lost", b"again", mode="create")


def test_slow(proxy: FaultProxy) -> None:
    proxy.set_faults([Fault(do="slow", bytes_per_s=2**20)])
    store, data = client(proxy.url), os.urandom(2 * 2**20)
    began = time.monotonic()
    obstore.put(store, "slow", data, use_multipart=False)
    middle = time.monotonic()
    assert content(store, "slow") == data
    ended = time.monotonic()
    assert 1.8 < middle - began < 15
    assert 1.8 < ended - middle < 15
    assert 0.5 * 2**20 < proxy.busiest_second() < 1.3 * 2**20


def test_hang_for_a_while_then_forward(proxy: FaultProxy) -> None:
    proxy.set_faults([Fault(do="hang", seconds=1.0, times=1)])
    began = time.monotonic()
    obstore.put(client(proxy.url), "held", b"1")
    assert 0.9 < time.monotonic() - began < 15
    assert proxy.requests[0].status == 200


def test_a_client_that_gives_up_is_seen_to_go(proxy: FaultProxy, server: str) -> None:
    proxy.set_faults([Fault(do="hang")])
    with pytest.raises(BaseError):
        obstore.put(client(proxy.url, timeout="500ms"), "given up", b"1")
    deadline = time.monotonic() + 10
    while proxy.requests[0].ended_s is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert proxy.requests[0].ended_s is not None
    assert keys(client(server), "given up") == []


def test_stale_list(proxy: FaultProxy) -> None:
    store = client(proxy.url)
    obstore.put(store, "stale/1", b"1")
    assert keys(store, "stale/") == ["stale/1"]
    obstore.put(store, "stale/2", b"1")
    proxy.set_faults([Fault(do="stale_list", match="stale")])
    assert keys(store, "stale/") == ["stale/1"]
    assert keys(store, "stale/") == ["stale/1"]
    assert content(store, "stale/2") == b"1"
    assert proxy.hits == [2]
    proxy.set_faults([])
    assert keys(store, "stale/") == ["stale/1", "stale/2"]


def test_the_first_due_fault_wins_and_count_lets_pass(proxy: FaultProxy) -> None:
    proxy.set_faults([Fault(do="count", method="PUT", times=2), Fault(do="status", method="P.T")])
    store = client(proxy.url)
    obstore.put(store, "first", b"1")
    obstore.put(store, "first", b"1")
    with pytest.raises(BaseError):
        obstore.put(store, "first", b"1")
    assert [seen.fault for seen in proxy.requests] == ["count", "count", "status"]
    assert proxy.hits == [2, 1]


def test_a_share_is_drawn_from_the_seed(server: str) -> None:
    def drawn(seed: int, faults: list[Fault]) -> list[str]:
        with FaultProxy(server, seed=seed) as proxy:
            proxy.set_faults(faults)
            for _ in range(40):
                exchange(proxy.url, b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return [seen.fault for seen in proxy.requests]

    share = [Fault(do="status", share=0.5)]
    first = drawn(1, share)
    assert first == drawn(1, share)
    assert first != drawn(2, share)
    assert 5 < first.count("status") < 35
    assert drawn(1, [Fault(do="status", share=0.0)]) == [""] * 40


@pytest.mark.parametrize(
    "wrong", [{"do": "slow"}, {"do": "status", "share": 2}, {"do": "hang", "match": "("}]
)
def test_a_fault_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"share is|missing \)"):
        Fault(**wrong)


def test_many_at_once(proxy: FaultProxy) -> None:
    store = client(proxy.url)

    def there_and_back(number: int) -> bool:
        data = os.urandom(300_000)
        obstore.put(store, f"many/{number}", data)
        return content(store, f"many/{number}") == data

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(there_and_back, range(100)))
    assert len(proxy.requests) == 200


def test_close_leaves_nothing(server: str) -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "fault-proxy" in thread.name]

    files = len(list(Path("/proc/self/fd").iterdir()))
    proxy = FaultProxy(server)
    proxy.close()
    proxy.start()
    assert threads() == ["fault-proxy"]
    proxy.set_faults([Fault(do="hang", method="PUT"), Fault(do="slow", bytes_per_s=1)])
    requests = [
        b"PUT /h HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
        b"GET /s HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(exchange, proxy.url, request) for request in [*requests, b"GET"]]
        deadline = time.monotonic() + 10
        while len(proxy.requests) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
        proxy.close()
        assert time.monotonic() - began < 5
        for end in ends:
            end.result(timeout=10)
    assert [seen.status for seen in proxy.requests] == [None, None]
    assert threads() == []
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    with pytest.raises(OSError):
        exchange(proxy.url, b"")
