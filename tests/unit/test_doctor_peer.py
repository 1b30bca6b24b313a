"""Two ends of a link on loopback: who is let in, who is waited for, and what is expected."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.doctor import peer
from forebay.doctor.deadline import side_by_side, within
from forebay.doctor.finding import Finding, Verdict
from forebay.doctor.frames import parse_address, proof, read_frame, send_frame
from forebay.doctor.listener import Listener, listen
from forebay.doctor.route import Link, link_to
from forebay.doctor.starved import NO_THREAD
from forebay.errors import StoreError, UsageError
from forebay.plan.figure import Figure

TOKEN = "a word"


def silent(_: str) -> None:
    pass


@contextlib.contextmanager
def listening(token: str | None = TOKEN) -> Iterator[Listener]:
    made = Listener("127.0.0.1", 0, token, silent)
    thread = threading.Thread(target=made.serve, args=(60.0,))
    thread.start()
    try:
        yield made
    finally:
        made.close()
        thread.join(10)
        assert not thread.is_alive()
        assert not [one for one in threading.enumerate() if one.name == "listen"]


def measure(address: str | None, token: str | None = TOKEN, **more: float) -> list[Finding]:
    given = {"seconds": 0.05, "timeout_s": 10.0} | more
    return peer.measure(address, {}, token=token, told=silent, streams=3, **given)  # type: ignore[arg-type]


def test_there_and_back() -> None:
    with listening() as listener:
        up, down, trip = measure(listener.shown)
        assert len(measure(listener.shown)) == 3
    assert (up.name, up.field) == ("to the peer", "")
    assert (down.name, down.field) == ("from the peer", "")
    assert (trip.name, trip.field) == ("round trip", "")
    assert all(each.measured for each in (up, down, trip))
    assert up.expected is None  # loopback has no link
    assert "no link" in up.note
    assert listener.sessions == 2


@pytest.mark.parametrize(
    ("up", "down", "written"), [(9e9, 3e9, "from the peer"), (3e9, 9e9, "to the peer")]
)
def test_the_slower_way_is_written(
    monkeypatch: pytest.MonkeyPatch, up: float, down: float, written: str
) -> None:
    monkeypatch.setattr(peer._Session, "is_here", lambda _: False)
    monkeypatch.setattr(peer._Session, "rate", lambda _, role, __: {"up": up, "down": down}[role])
    with listening() as listener:
        found = measure(listener.shown)
    assert {each.name: each.field for each in found if each.field} == {written: "cluster.peer"}


def test_the_plans_rate_is_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"cluster.peer": Figure(value=1e15, source="a dream")}
    monkeypatch.setattr(peer._Session, "is_here", lambda _: False)
    with listening() as listener:
        up, down, _ = peer.measure(
            listener.shown, expected, token=TOKEN, seconds=0.02, told=silent, streams=1
        )
    assert up.verdict is down.verdict is Verdict.SLOW
    assert up.source == "a dream"
    assert "ethtool" in up.to_do


def test_loopback_stands_for_no_peer() -> None:
    found = measure(None)
    assert [each.name for each in found] == ["loopback", "loopback round trip"]
    assert {each.verdict for each in found} == {Verdict.MEASURED}
    assert {each.field for each in found} == {""}
    assert not [one for one in threading.enumerate() if one.name == "listen"]


def starve(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Only so many threads are to be had from now on."""
    start, left = threading.Thread.start, [after]

    def refuse(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError(NO_THREAD)
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_no_threads_for_loopback(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    starve(monkeypatch, after)
    (found,) = measure(None)
    assert found.verdict is Verdict.FAILED
    assert "no thread" in found.note
    assert "pids" in found.to_do
    monkeypatch.undo()
    assert not [one for one in threading.enumerate() if one.name == "listen"]


def test_no_threads_to_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as listener:
        starve(monkeypatch, 5)  # the listener's for control and three streams, and one of ours
        (found,) = measure(listener.shown)
        monkeypatch.undo()
    assert found.verdict is Verdict.FAILED
    assert "pids" in found.to_do


def test_a_single_call_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is taken away even then."""
    starve(monkeypatch, 0)
    assert within(lambda: 7, timeout_s=1.0, what="any") == 7
    with pytest.raises(RuntimeError, match="pids"):
        side_by_side([lambda: 7, lambda: 8], timeout_s=1.0, what="any")


def test_loopback_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    (found,) = measure(None)
    assert found.verdict is Verdict.FAILED
    assert "ip link set lo up" in found.to_do


@pytest.mark.parametrize("token", ["another word", None, ""])
def test_a_wrong_token_is_refused(token: str | None) -> None:
    with listening() as listener:
        (found,) = measure(listener.shown, token=token)
        assert found.verdict is Verdict.FAILED
        assert "wrong token" in found.note
        assert "--token" in found.to_do
        assert "--listen" not in found.to_do
        assert len(measure(listener.shown)) == 3
    assert listener.sessions == 1


def test_a_token_crosses_as_a_proof_alone() -> None:
    seen = proof(TOKEN, "nonce", "up")
    assert TOKEN not in seen
    assert seen != proof(TOKEN, "nonce", "control")
    assert seen != proof(TOKEN, "another", "up")


def test_nobody_listens() -> None:
    with listening() as listener:
        address = listener.shown
    (found,) = measure(address)
    assert found.verdict is Verdict.FAILED
    assert "nobody listens" in found.note
    assert "--listen" in found.to_do


def test_a_silent_peer_is_waited_for_until_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as dumb:
        port = dumb.getsockname()[1]
        (found,) = measure(f"127.0.0.1:{port}", timeout_s=0.2)
    assert found.verdict is Verdict.FAILED
    assert found.note == f"127.0.0.1:{port}: waited 200 ms for a greeting"


@pytest.mark.parametrize(
    "says",
    [
        b"SSH-2.0-OpenSSH_9.2p1\r\n",
        struct.pack("!I", 5) + b"[1,2]",
        struct.pack("!I", 4) + b"\xff\xfe\x00\x01",
        b"",
    ],
)
def test_something_else_answers(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            caller, _ = other.accept()
            with caller:
                caller.sendall(says)

        thread = threading.Thread(target=answer)
        thread.start()
        (found,) = measure(f"127.0.0.1:{other.getsockname()[1]}", timeout_s=5.0)
        thread.join(10)
    assert found.verdict is Verdict.FAILED
    assert "forebay doctor" in found.note or "closed the connection" in found.note


def greet(listener: Listener, role: str, **more: object) -> tuple[socket.socket, dict[str, object]]:
    caller = socket.create_connection((listener.host, listener.port), timeout=10)
    hello = read_frame(caller)
    shown = proof(TOKEN, str(hello["nonce"]), role)
    send_frame(caller, **({"role": role, "session": "", "seconds": 1, "proof": shown} | more))
    return caller, read_frame(caller)


def test_one_session_at_a_time() -> None:
    with listening() as listener:
        first, answer = greet(listener, "control")
        assert answer["ok"] is True
        (found,) = measure(listener.shown)
        assert "busy" in found.note
        assert "when the other session has ended" in found.to_do
        first.close()
        assert len(measure(listener.shown)) == 3


@pytest.mark.parametrize("role", ["up", "down", "sideways", ""])
def test_data_without_a_session_is_refused(role: str) -> None:
    with listening() as listener:
        caller, answer = greet(listener, role, session=secrets.token_hex(8))
        caller.close()
    assert answer == {"ok": False, "why": "no such session"}


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 64,
        struct.pack("!I", 2**31),
        struct.pack("!I", 2) + b"{}",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 3) + b'{"a',
        struct.pack("!I", 14) + b'{"seconds":[]}',
        struct.pack("!I", 18) + b'{"seconds": "nan"}',
        b"",
    ],
)
def test_a_stranger_breaks_nothing(noise: bytes) -> None:
    with listening() as listener:
        with (
            socket.create_connection((listener.host, listener.port), timeout=10) as stranger,
            contextlib.suppress(OSError, StoreError, json.JSONDecodeError),
        ):  # it may be shown the door at any of these
            stranger.sendall(noise)
            stranger.shutdown(socket.SHUT_WR)
            while True:
                read_frame(stranger)
        assert len(measure(listener.shown)) == 3


def test_others_are_let_in_with_a_token_alone() -> None:
    for token in (None, ""):
        with pytest.raises(UsageError, match="give --token"):
            listen("0.0.0.0:0", token=token, timeout_s=1.0, told=silent)
    with pytest.raises(UsageError, match="give --token"):
        listen("[::]:0", token=None, timeout_s=1.0, told=silent)


def test_a_listener_ends_at_its_deadline() -> None:
    told: list[str] = []
    assert listen("0", token=None, timeout_s=0.1, told=told.append) == 0
    assert told[0].startswith("listening on 127.0.0.1:")


def test_a_port_that_is_taken() -> None:
    with listening() as listener, pytest.raises(UsageError, match="in use"):
        listen(listener.shown, token=None, timeout_s=1.0, told=silent)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.1:7300", ("10.0.0.1", 7300)),
        ("node-17:7300", ("node-17", 7300)),
        ("[fe80::1%eth0]:7300", ("fe80::1%eth0", 7300)),
    ],
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert parse_address(text, "--peer") == found


@pytest.mark.parametrize("text", ["", "7300", "host", "host:", ":1", "fe80::1:7300", "h:70000"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"--peer .*expected HOST:PORT"):
        parse_address(text, "--peer")


def test_a_port_alone_is_loopback() -> None:
    assert parse_address("7300", "--listen", host="127.0.0.1") == ("127.0.0.1", 7300)


ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010A000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
ib0\t00000A0A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
old\t00000A0A\t00000000\t0000\t0\t0\t0\t00FFFFFF\t0\t0\t0
bond0\t00010A0A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
eth9\t00010A0A\t00000000\t0001\t0\t0\t200\t00FFFFFF\t0\t0\t0
"""


def net(root: Path, **speeds: str) -> Path:
    (root / "proc/net").mkdir(parents=True)
    (root / "proc/net/route").write_text(ROUTES)
    inet6 = "fe800000000000000000000000000001 02 40 20 80   eth7\n"
    (root / "proc/net/if_inet6").write_text(inet6)
    for name, speed in speeds.items():
        (root / f"sys/class/net/{name}").mkdir(parents=True)
        (root / f"sys/class/net/{name}/speed").write_text(f"{speed}\n")
    return root


def test_the_link_of_a_route(tmp_path: Path) -> None:
    root = net(tmp_path, eth0="25000", bond0="400000", ib0="-1", eth7="100000")
    here = "10.10.1.2"
    assert link_to("10.10.1.7", here, root) == Link(interface="bond0", bits_per_s=400e9)
    assert link_to("10.10.9.7", here, root) == Link(interface="ib0", bits_per_s=None)
    assert link_to("192.168.1.1", here, root) == Link(interface="eth0", bits_per_s=25e9)
    assert link_to("fe80::2%eth7", "fe80::1%eth7", root) == Link(interface="eth7", bits_per_s=100e9)
    assert link_to("127.0.0.1", "127.0.0.1", root) is None
    assert link_to(here, here, root) is None
    assert link_to("10.10.1.7", here, tmp_path / "none") is None


def test_one_link_is_expected_of_one_link() -> None:
    fast = Link(interface="bond0", bits_per_s=400e9)
    unknown = Link(interface="ib0", bits_per_s=None)
    low = Figure(value=12e9, source="the plan")
    high = Figure(value=80e9, source="two links at 80 %")
    assert peer.expectation(high, unknown) is high
    assert peer.expectation(low, None) is low
    assert peer.expectation(None, unknown) is None
    for planned in (low, high, None):
        found = peer.expectation(planned, fast)
        assert found is not None
        assert found.value == pytest.approx(47e9)
        assert "400 Gbit/s" in found.source
        assert ("more links together: 80 GB/s" in found.source) == (planned is high)
