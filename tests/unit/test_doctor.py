"""What the doctor concludes, on made-up machines; what it measures, on this one."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import yaml

from forebay.doctor import disk, fastpath, limits, memory, peer
from forebay.doctor.finding import Expected, Finding, Verdict, compare
from forebay.doctor.report import document_of, file_of
from forebay.errors import UsageError
from forebay.plan.figure import Figure, Kind
from forebay.plan.resolve import read_file, resolve

EXPECTED: Expected = {"cluster.nvme": Figure(value=10e9, source="the data sheet")}


def silent(_line: str) -> None:
    """Progress that nobody reads."""


def judged(measured: float, *, expected: Expected = EXPECTED, more: bool = True) -> Finding:
    return compare(
        name="write",
        hop="disk",
        kind=Kind.RATE,
        measured=measured,
        expected=expected,
        field="cluster.nvme",
        advice="look",
        more_is_better=more,
    )


def test_a_rate_is_slow_below_four_fifths() -> None:
    assert judged(8.0e9).verdict is Verdict.GOOD
    slow = judged(7.9e9)
    assert (slow.verdict, slow.advice, slow.source) == (Verdict.SLOW, "look", "the data sheet")
    assert judged(7.9e9, more=False).verdict is Verdict.GOOD
    assert judged(20e9, more=False).verdict is Verdict.SLOW
    assert judged(1, expected={}).verdict is Verdict.MEASURED


def test_the_file_is_read_back_by_the_plan() -> None:
    values = {
        "cluster.nvme": 3.14159e9,
        "cluster.host_memory": 25.2761e9,
        "storage.per_node": 87.6e3,
    }
    findings = [
        Finding(
            name=name,
            hop="x",
            kind=Kind.BYTES if "memory" in name else Kind.RATE,
            verdict=Verdict.MEASURED,
            measured=value,
            field=name,
            note="a note: with a colon",
        )
        for name, value in values.items()
    ]
    findings.append(
        Finding(name="y", hop="x", kind=Kind.RATE, verdict=Verdict.GOOD, measured=1, field="link")
    )
    text = file_of(findings, where="node-1", when="2026-01-02 03:04")
    chosen, figures = read_file(yaml.safe_load(text), "f.yaml")
    assert chosen == {}
    assert {name: figure.value for name, figure in figures.items()} == pytest.approx(
        values, rel=0.005
    )
    assert "node-1" in figures["cluster.nvme"].source
    assert resolve(file=figures).cluster.nvme_bytes_per_s == pytest.approx(3.14159e9, rel=0.005)
    assert file_of([], where="x", when="y") == "{}\n"
    assert [row["field"] for row in document_of(findings)] == [*values, "link"]


# a machine in files


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def device(address: str, kind: str, *, speed: str = "32.0", width: str = "16") -> dict[str, str]:
    codes = {"gpu": "0x030200", "nvme": "0x010802", "nic": "0x020700"}
    base = f"sys/bus/pci/devices/0000:{address}:00.0"
    return {
        f"{base}/class": codes[kind],
        f"{base}/vendor": "0x10de" if kind == "gpu" else "0x15b3",
        f"{base}/current_link_speed": f"{speed} GT/s PCIe",
        f"{base}/max_link_speed": "32.0 GT/s PCIe",
        f"{base}/current_link_width": width,
        f"{base}/max_link_width": "16" if kind != "nvme" else "4",
    }


PORT = "sys/class/infiniband/mlx5_0/ports/1"
GOOD = {
    "proc/modules": "nvidia_fs 270336 0 - Live 0x0\nnvidia_peermem 16384 0 - Live 0x0",
    "proc/driver/nvidia-fs/stats": "GDS Version: 1.7",
    "etc/cufile.json": '{\n // "allow_compat_mode": true\n "allow_compat_mode": false\n}',
    f"{PORT}/state": "4: ACTIVE",
    f"{PORT}/rate": "400 Gb/sec (4X NDR)",
    **device("1a", "gpu"),
    **device("2b", "nvme", width="4"),
    **device("3c", "nic"),
}


def verdicts(root: Path) -> dict[str, Verdict]:
    return {each.name: each.verdict for each in fastpath.measure(root=root, told=silent)}


def test_a_machine_with_every_fast_path_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON", raising=False)
    found = verdicts(machine(tmp_path, GOOD))
    assert found == {
        "GPUDirect Storage": Verdict.GOOD,
        "RDMA port mlx5_0/1": Verdict.GOOD,
        "GPUDirect RDMA": Verdict.GOOD,
        "PCIe links": Verdict.GOOD,
    }
    assert fastpath.has_gpu(tmp_path)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"proc/modules": "nvidia_peermem 1 0 - Live 0x0"}, "GPUDirect Storage"),
        ({"proc/modules": "nvidia_fs 1 0 - Live 0x0"}, "GPUDirect RDMA"),
        ({"etc/cufile.json": '{"allow_compat_mode": true}'}, "GPUDirect Storage"),
        ({f"{PORT}/state": "1: DOWN"}, "RDMA port mlx5_0/1"),
        (device("1a", "gpu", width="8"), "PCIe link of GPU 0000:1a:00.0"),
        (device("3c", "nic", speed="16.0"), "PCIe link of NIC 0000:3c:00.0"),
        (device("2b", "nvme", width="2"), "PCIe link of NVMe drive 0000:2b:00.0"),
    ],
)
def test_one_fast_path_off_is_named_with_what_to_do(
    tmp_path: Path, change: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON", raising=False)
    root = machine(tmp_path, {**GOOD, **change})
    off = [each for each in fastpath.measure(root=root, told=silent) if not each.verdict.holds]
    assert [(each.name, each.verdict) for each in off] == [(name, Verdict.OFF)]
    assert off[0].advice


def test_an_idle_gpu_may_slow_its_link_down(tmp_path: Path) -> None:
    found = verdicts(machine(tmp_path, {**GOOD, **device("1a", "gpu", speed="2.5")}))
    assert found["PCIe links"] is Verdict.GOOD


def test_a_module_without_its_statistics_is_off(tmp_path: Path) -> None:
    files = {name: text for name, text in GOOD.items() if "nvidia-fs" not in name}
    assert verdicts(machine(tmp_path, files))["GPUDirect Storage"] is Verdict.OFF


def test_a_machine_with_nothing(tmp_path: Path) -> None:
    assert set(verdicts(tmp_path).values()) == {Verdict.NONE}


def made_up(**changes: int | None) -> limits.Limits:
    values: dict[str, int | None] = {
        "memlock_bytes": None,
        "open_files": 10**6,
        "shared_bytes": 10**12,
        "shared_free_bytes": 10**12,
        "memory_bytes": 2 * 10**12,
        "cgroup_bytes": None,
        "cores": 8,
        "cores_online": 8,
    }
    return limits.Limits(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, None),
        ({"memlock_bytes": 8 * 2**20}, "locked memory"),
        ({"open_files": 1024}, "open files"),
        ({"shared_free_bytes": 64 * 2**20}, "shared memory"),
        ({"shared_free_bytes": None}, "shared memory"),
        ({"cgroup_bytes": 10**11}, "host memory"),
    ],
)
def test_limits(changes: dict[str, int | None], name: str | None) -> None:
    expected = {"cluster.host_memory": Figure(value=2e12, source="data sheet")}
    rows = limits.judge(made_up(**changes), expected, arena_bytes=6.3e9, pins=True)
    short = [row for row in rows if not row.verdict.holds]
    assert [row.name for row in short] == ([] if name is None else [name])
    assert all(row.advice for row in short)


def test_the_limits_of_this_machine_and_of_a_cgroup(tmp_path: Path) -> None:
    here = limits.read_limits()
    assert here.memory_bytes > 2**28
    assert here.cores >= 1
    machine(
        tmp_path, {"proc/self/cgroup": "0::/pod/one", "sys/fs/cgroup/pod/one/memory.max": "4096000"}
    )
    assert limits.read_limits(tmp_path).cgroup_bytes == 4096000
    machine(tmp_path, {"sys/fs/cgroup/pod/one/memory.max": "max"})
    assert limits.read_limits(tmp_path).cgroup_bytes is None


def test_memory_is_measured() -> None:
    copy, *touches = memory.measure({}, seconds=0.1, size_bytes=2**24, told=silent)
    assert copy.field == "cluster.host_bandwidth"
    assert copy.measured
    assert len(touches) == 2
    assert all(each.measured for each in touches)


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("stays")
    found = {
        each.name: each
        for each in disk.measure(tmp_path, {}, seconds=0.1, size_bytes=2**23, told=silent)
    }
    assert {"cluster.nvme", "cluster.nvme_read", "cluster.nvme_capacity"} <= {
        each.field for each in found.values()
    }
    assert found["a small durable file"].measured
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(UsageError, match="expected a directory that is there"):
        disk.measure(tmp_path / "none", {}, told=silent)


def test_shared_memory_is_no_local_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "filesystem_of", lambda _directory: "tmpfs")
    found = disk.measure(tmp_path, EXPECTED, seconds=0.05, size_bytes=2**22, told=silent)
    write = next(each for each in found if each.name == "write, O_DIRECT")
    assert write.verdict is Verdict.FAILED
    assert "nothing survives a reboot" in write.note


def test_the_filesystem_of_a_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/a / ext4 rw 0 0\n/dev/b {tmp_path}/in xfs rw 0 0\nt /dev/shm tmpfs rw 0 0\n"
    )
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "inside").mkdir()
    assert disk.filesystem_of(tmp_path / "in" / "deep", mounts) == "xfs"
    assert disk.filesystem_of(tmp_path / "inside", mounts) == "ext4"


# the link


def test_loopback_is_measured_and_is_no_peer() -> None:
    rate, trip = peer.measure(None, EXPECTED, seconds=0.1, told=silent)
    assert rate.measured
    assert trip.measured
    assert rate.field == ""


@pytest.fixture
def listener() -> object:
    with socket.create_server(("127.0.0.1", 0)) as server:
        served = peer._Listener(server, "right", 1e18)
        thread = threading.Thread(target=served.serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        served.stop()
        thread.join()


def test_a_peer_with_the_right_token(listener: str) -> None:
    expected = {"cluster.peer": Figure(value=1e15, source="a dream")}
    found = peer.measure(listener, expected, token="right", seconds=0.1, told=silent)
    assert found[0].field == "cluster.peer"
    assert found[0].verdict is Verdict.SLOW
    assert found[0].advice


def test_a_peer_with_another_token(listener: str) -> None:
    (found,) = peer.measure(listener, {}, token="wrong", seconds=0.1, told=silent)
    assert found.verdict is Verdict.FAILED
    assert "another token" in found.note


def test_strangers_and_those_who_hang_up_end_nothing(listener: str) -> None:
    host, port = peer.split_address(listener, default=None)
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 1000):
        with socket.create_connection((host, port), timeout=5) as link:
            link.sendall(said)
    found = peer.measure(listener, {}, token="right", seconds=0.05, told=silent)
    assert found[0].measured


def test_a_peer_that_is_silent_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (found,) = peer.measure(address, {}, seconds=0.1, told=silent)
    assert found.verdict is Verdict.FAILED
    assert "no answer of a listener within" in found.note
    (gone,) = peer.measure(address, {}, seconds=0.1, told=silent)
    assert "refused" in gone.note


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:port", "host:99999"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        peer.measure(address, {}, told=silent)


def test_a_listener_for_others_needs_a_token() -> None:
    with pytest.raises(UsageError, match="expected --token"):
        peer.listen("0.0.0.0:0", told=silent)
    told: list[str] = []
    peer.listen("0", timeout_s=0.1, told=told.append)
    assert "listening on 127.0.0.1:" in told[0]


def test_the_link_of_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_address_of", lambda name: "10.0.0.1" if name == "lo" else "")
    (tmp_path / "lo").mkdir()
    (tmp_path / "lo" / "speed").write_text("100000\n")
    assert peer.link_of("10.0.0.1", tmp_path) == ("lo", 12.5e9)
    (tmp_path / "lo" / "speed").write_text("-1\n")
    assert peer.link_of("10.0.0.1", tmp_path) is None
    assert peer.link_of("10.9.9.9", tmp_path) is None
