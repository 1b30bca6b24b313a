"""``forebay doctor`` as a person runs it: its exit status, words and file, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from forebay.plan.resolve import read_file
from forebay.storage.address import open_store
from forebay.testing.s3 import S3Server
from tests.process.conftest import Said, poll
from tests.servers import Place

QUICK = ("--seconds", "50ms", "--size", "8MiB")
Cli = Callable[..., Said]


def lines(said: Said) -> dict[str, dict[str, Any]]:
    found = said.document["findings"]
    assert len({each["name"] for each in found}) == len(found)
    return {each["name"]: each for each in found}


def test_everything_on_this_node(cli: Cli, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    file = tmp_path / "cluster.yaml"
    said = cli("doctor", tmp_path / "run", "--local", local, "--write", file, "--json", *QUICK)
    assert said.code == 0, said.out + said.err
    found = lines(said)
    hops = {each["hop"] for each in found.values()}
    assert hops == {
        *("device to host", "memory", "local disk", "store", "peer", "limits", "links"),
        "fast paths",
    }
    assert said.document["holds"] is True
    assert said.document["file"] == file.read_text()
    assert "memory: copies by" in said.err
    assert "store: put rate" in said.err
    chosen, figures = read_file(yaml.safe_load(file.read_text()), str(file))
    assert chosen == {}
    measured = {each["field"]: each["measured"] for each in found.values() if each["field"]}
    assert set(figures) == {name for name, value in measured.items() if value}
    assert {"cluster.nvme", "cluster.host_memory", "storage.per_node"} <= set(figures)
    for name, figure in figures.items():
        assert figure.value == pytest.approx(measured[name], rel=1e-4)
        assert "measured by forebay doctor" in figure.source
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yaml", "local"]
    assert list(local.iterdir()) == []

    planned = cli("plan", "--file", file, "--json")
    assert planned.code in (0, 6)
    seen = planned.document["inputs"]["cluster.nvme"]
    assert seen["value"] == figures["cluster.nvme"].value
    assert "forebay doctor" in seen["source"]


def test_without_store_disk_and_peer_it_says_how(cli: Cli) -> None:
    said = cli("doctor", *QUICK)
    assert said.code == 0, said.out + said.err
    for words in ("no URL was given", "--local DIR", "nothing is expected"):
        assert words in said.out
    (head,) = [line for line in said.out.splitlines() if "how, and what to do" in line]
    column = head.index("how, and what to do")
    notes = " ".join(line[column:].strip() for line in said.out.splitlines())
    assert "--local DIR measures the disk it lies on" in notes  # nothing is cut off
    assert max(map(len, said.out.splitlines())) <= 80
    assert "--peer HOST:PORT measures another node" in said.err


def test_what_is_slower_than_the_plan_is_status_6(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    dream = {"cluster": {"nvme": {"value": "900 TB/s", "source": "a dream"}, "nvme_read": "1 B/s"}}
    file.write_text(yaml.safe_dump(dream))
    said = cli("doctor", "--local", tmp_path, "--file", file, "--json", *QUICK)
    assert said.code == 6
    found = lines(said)
    write, read = found["write, O_DIRECT"], found["read, O_DIRECT"]
    assert (write["verdict"], write["expected_source"]) == ("slow", "a dream")
    assert write["to_do"]
    assert (read["verdict"], read["to_do"]) == ("good", None)
    assert said.document["holds"] is False


def test_a_real_s3_server(cli: Cli, seaweed: Place) -> None:
    run = f"doctor-{secrets.token_hex(4)}"
    url = seaweed.url(run).text
    said = cli("doctor", url, "--json", "--seconds", "0.1", "--size", "48MiB")
    assert said.code == 0, said.out + said.err
    found = lines(said)
    assert found["store put rate"]["measured"] > 0
    assert found["store get rate"]["measured"] > 0
    assert found["store head latency"]["measured"] > 0
    assert found["store exclusive create"]["verdict"] == "good"
    assert "per_node:" in said.document["file"]
    assert list(open_store(url).list("")) == []


def test_a_store_that_hangs_meets_its_deadline(cli: Cli, weed: S3Server, seaweed: Place) -> None:
    weed.suspend()
    try:
        said = cli("doctor", seaweed.url("hangs").text, "--timeout", "1s", "--json", *QUICK)
    finally:
        weed.resume()
    assert said.code == 6
    found = lines(said)["store"]
    assert found["verdict"] == "failed"
    assert "no answer within 1 s" in found["note"]
    assert lines(said)["host copy"]["measured"] > 0


def test_a_store_that_refuses(cli: Cli, seaweed: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    said = cli("doctor", seaweed.url("refused").text, "--json", *QUICK)
    assert said.code == 6
    failed = [each for each in lines(said).values() if each["verdict"] == "failed"]
    assert failed
    assert all(each["hop"] == "store" for each in failed)
    assert "correct AWS_ACCESS_KEY_ID" in failed[0]["note"]  # which says what to do
    assert failed[0]["to_do"] is None


@pytest.mark.parametrize(
    "words",
    [
        ("--local", "/nowhere/at/all"),
        ("--seconds", "soon"),
        ("--listen", "0.0.0.0:7300"),
    ],
)
def test_bad_input_is_one_line_and_status_2(cli: Cli, words: tuple[str, ...]) -> None:
    said = cli("doctor", *words, *(() if words[0] in ("--seconds", "--size") else QUICK))
    assert said.code == 2
    assert said.out == ""
    line = said.err.splitlines()[-1]
    assert line.startswith("forebay: ")
    assert "bug" not in line


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals, status: int) -> None:
    # Who was started in the background inherits that SIGINT is ignored, as the tests may have been.
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{hears}; from forebay.cli import main; main()",
            "doctor",
            "--local",
            str(tmp_path),
            "--seconds",
            "0.5",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        poll(lambda: list(tmp_path.iterdir()), "the disk to be written to", 60)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait(30)
    assert process.returncode == status, said
    assert list(tmp_path.iterdir()) == []


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a link of 200 Mbit/s; 10.231.9.1 and 10.231.9.2."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need root and iproute2")
    mark = secrets.token_hex(3)
    made = f"fbd{mark}a", f"fbd{mark}b"
    with contextlib.ExitStack() as stack:
        for name in made:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("-n", made[0], "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", made[1])
        for number, name in enumerate(made, 1):
            ip("-n", name, "addr", "add", f"10.231.9.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            shape = ["root", "tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape], check=True)
        yield made


@contextlib.contextmanager
def on_node(name: str, *words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-m", "forebay.cli", "doctor", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def first_line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


def test_a_peer_across_a_slow_link(nodes: tuple[str, str]) -> None:
    here, there = nodes
    words = ("--peer", "10.231.9.2:7300", "--json", "--seconds", "500ms", "--size", "4MiB")
    with on_node(there, "--listen", "10.231.9.2:7300", FOREBAY_TOKEN="secret") as listener:
        assert "listening on 10.231.9.2:7300" in first_line(listener.stderr)
        with on_node(here, *words, "--token", "secret", "--streams", "2") as caller:
            out, err = caller.communicate(timeout=60)
        assert caller.returncode == 6, err  # veth says 10 Gbit/s, the shaper gives 200 Mbit/s
        found = lines(Said(6, out, err))
        up, down, trip = found["to the peer"], found["from the peer"], found["round trip"]
        for each in (up, down):
            assert each["verdict"] == "slow"
            assert 200e6 / 8 * 0.5 < each["measured"] < 200e6 / 8 * 1.2
            assert each["expected"] == pytest.approx(10e9 / 8 * 0.94)
            assert "eth0 says 10 Gbit/s" in each["expected_source"]
        assert trip["measured"] > 0
        assert "peer:" in Said(6, out, err).document["file"]

        with on_node(here, *words, "--token", "wrong") as caller:
            out, err = caller.communicate(timeout=60)
        assert caller.returncode == 6
        refused = lines(Said(6, out, err))["to the peer"]
        assert refused["verdict"] == "failed"
        assert "wrong token" in refused["note"]


def test_a_peer_that_is_cut_off_meets_the_deadline(nodes: tuple[str, str]) -> None:
    here, there = nodes
    ip("-n", there, "link", "set", "eth0", "down")
    words = ("--peer", "10.231.9.2:7300", "--timeout", "500ms", "--json", *QUICK)
    with on_node(here, *words) as caller:
        out, err = caller.communicate(timeout=60)
    assert caller.returncode == 6
    found = lines(Said(6, out, err))["to the peer"]
    assert found["verdict"] == "failed"
    assert "10.231.9.2:7300: " in found["note"]
    assert "a connection" in found["note"]


def test_a_listener_tells_how_many_came(cli: Cli) -> None:
    said = cli("doctor", "--listen", "0", "--listen-for", "200ms", "--json")
    assert said.code == 0
    assert said.document == {"listened": "0", "sessions": 0}
