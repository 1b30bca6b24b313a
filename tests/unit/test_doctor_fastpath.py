"""GPUDirect, PCIe and fabric, as made-up trees of /proc and /sys show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.doctor import fastpath, links
from forebay.doctor.finding import Finding, Verdict

STATS = """GDS Version: 1.11.1.6
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.20.6)
Mellanox PeerDirect Supported: True
IO stats: Disabled, peer IO stats: Disabled
Logging level: info

Active Shadow-Buffer (MiB): 128
Active Process: 1
Batches                         : n=0 ok=0 err=0 Avg-Submit-Latency(usec)=0
Reads                           : n=0 ok=0 err=0 readMiB=0 io_state_err=0
Mmap                            : n={n} ok={n} err=0 munmap=0
Bar1-map                        : n={n} ok={ok} err={err} free=0 callbacks=0 active=0
Error                           : cpu-gpu-pages=0 sg-ext=0 dma-map=0 dma-ref=0
Ops                             : Read=0 Write=0 BatchIO=0
"""
CUFILE = """{
    // /etc/cufile.json, with comments as NVIDIA ships it
    "logging": {"dir": "http://not.a/comment", "level": "ERROR"},
    "properties": {
            // fall back to pread and pwrite
            "allow_compat_mode": %s, /* the default */
            "max_direct_io_size_kb": 16384
    }
}
"""
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue Feb 2024\n"


class Machine:
    """A tree of files as a kernel shows them: a node with all fast paths on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules("nvidia", "nvidia_uvm", "nvidia_fs", "nvidia_peermem", "mlx5_ib")
        self.put("proc/driver/nvidia/version", CLOSED_DRIVER)
        self.put("proc/driver/nvidia/params", "ResmanDebugLevel: 4294967295\n")
        self.put("proc/driver/nvidia-fs/stats", STATS.format(n=3, ok=3, err=0))
        self.put("proc/sys/kernel/osrelease", "5.15.0-91-generic\n")
        self.put("proc/cmdline", "BOOT_IMAGE=/vmlinuz ro iommu=pt\n")
        self.put("etc/cufile.json", CUFILE % "false")
        self.put("usr/local/cuda-12.4/lib64/libcufile.so.1.9.0", "")
        for number in range(8):
            self.pci(f"0000:{number:02x}:00.0", "0x030200", "0x10de", "32.0 GT/s PCIe", 16)
            self.port(f"mlx5_{number}")
        for number in range(8, 16):
            self.pci(f"0000:{number:02x}:00.0", "0x010802", "0x144d", "16.0 GT/s PCIe", 4)
        self.pci("0000:20:00.0", "0x020700", "0x15b3", "32.0 GT/s PCIe", 16)

    def put(self, path: str, text: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def remove(self, path: str) -> None:
        (self.root / path).unlink()

    def modules(self, *names: str) -> None:
        lines = (f"{name} 323584 0 - Live 0x0000000000000000 (OE)\n" for name in names)
        self.put("proc/modules", "".join(lines))

    def pci(
        self,
        address: str,
        code: str,
        vendor: str,
        speed: str,
        width: int,
        most: tuple[str, int] | None = None,
    ) -> None:
        most_speed, most_width = most or (speed, width)
        files = {
            "class": code,
            "vendor": vendor,
            "current_link_speed": speed,
            "current_link_width": width,
            "max_link_speed": most_speed,
            "max_link_width": most_width,
        }
        for name, text in files.items():
            self.put(f"sys/bus/pci/devices/{address}/{name}", f"{text}\n")

    def port(
        self,
        name: str,
        state: str = "4: ACTIVE",
        phys_state: str = "5: LinkUp",
        rate: str = "400 Gb/sec (4X NDR)",
        board: str = "MT_0000000838",
        link_layer: str = "InfiniBand",
    ) -> None:
        self.put(f"sys/class/infiniband/{name}/board_id", f"{board}\n")
        files = {"state": state, "phys_state": phys_state, "rate": rate, "link_layer": link_layer}
        for file, text in files.items():
            self.put(f"sys/class/infiniband/{name}/ports/1/{file}", f"{text}\n")

    def lines(self, *search: str, **environment: str) -> dict[str, Finding]:
        found = [*links.measure(self.root), *fastpath.measure(self.root, environment, search)]
        assert len({each.name for each in found}) == len(found)
        return {each.name: each for each in found}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def faults(lines: dict[str, Finding]) -> set[str]:
    """Names of lines that do not hold; each of them says what to do."""
    bad = [each for each in lines.values() if not each.verdict.holds]
    assert all(each.to_do for each in bad)
    return {each.name for each in bad}


def test_all_on(machine: Machine) -> None:
    lines = machine.lines()
    assert faults(lines) == set()
    assert {each.verdict for each in lines.values()} == {Verdict.GOOD}
    assert "nvidia_fs 2.20.6" in lines["GPUDirect Storage"].note
    assert "8 at 32 GT/s x16" in lines["PCIe of GPU"].note
    assert "8 at 400 Gbit/s" in lines["fabric ports"].note


def test_nothing_there(tmp_path: Path) -> None:
    found = [*links.measure(tmp_path), *fastpath.measure(tmp_path, {}, [])]
    assert {each.verdict for each in found} == {Verdict.NONE}


def without_the_module(machine: Machine) -> None:
    machine.modules("nvidia", "nvidia_peermem")
    machine.remove("proc/driver/nvidia-fs/stats")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("usr/src/nvidia-fs-2.20.6/dkms.conf", ""),
        ("lib/modules/5.15.0-91-generic/updates/dkms/nvidia-fs.ko", ""),
        ("etc/modules-load.d/gds.conf", "# at boot\nnvidia-fs\n"),
        ("etc/cufile.json", CUFILE % "false"),
        ("etc/cufile.json", '{"properties": {"use_pci_p2pdma": true}}'),
        ("etc/cufile.json", '{"properties": {"rdma_dev_addr_list": ["10.0.0.1"]}}'),
    ],
)
def test_the_module_is_missing(machine: Machine, path: str, text: str) -> None:
    """What shows that it was meant to be there makes one line off, not two."""
    without_the_module(machine)
    machine.put("etc/cufile.json", CUFILE % "true")
    machine.put(path, text)
    lines = machine.lines()
    assert faults(lines) == {"GPUDirect Storage"}
    assert "modprobe nvidia-fs" in lines["GPUDirect Storage"].to_do
    assert "cuFile compatibility mode" in lines


def test_a_toolkit_alone_is_not_off(machine: Machine) -> None:
    """Its library and its file of defaults come with every toolkit."""
    without_the_module(machine)
    machine.put("etc/cufile.json", CUFILE % "true")
    machine.put("etc/modules-load.d/other.conf", "br_netfilter\n")
    lines = machine.lines()
    assert faults(lines) == set()
    assert lines["GPUDirect Storage"].verdict is Verdict.NONE
    assert "libcufile.so.1.9.0 is there" in lines["GPUDirect Storage"].note
    assert "cuFile compatibility mode" not in lines
    machine.remove("etc/cufile.json")
    assert faults(machine.lines()) == set()
    assert faults(machine.lines(CUFILE_ALLOW_COMPAT_MODE="false")) == {"GPUDirect Storage"}


def test_the_module_is_loaded_and_not_in_the_container(machine: Machine) -> None:
    machine.remove("proc/driver/nvidia-fs/stats")
    lines = machine.lines()
    assert faults(lines) == {"GPUDirect Storage"}
    assert "container" in lines["GPUDirect Storage"].to_do


def test_every_mapping_failed(machine: Machine) -> None:
    machine.put("proc/driver/nvidia-fs/stats", STATS.format(n=7, ok=0, err=7))
    lines = machine.lines()
    assert faults(lines) == {"GPUDirect Storage"}
    assert "all 7 mappings" in lines["GPUDirect Storage"].note


def test_an_older_kernel_module_writes_its_version_with_colons(machine: Machine) -> None:
    old = STATS.format(n=0, ok=0, err=0).replace("(version: 2.20.6)", "(version: 2:3:1)")
    machine.put("proc/driver/nvidia-fs/stats", old)
    line = machine.lines()["GPUDirect Storage"]
    assert line.verdict is Verdict.GOOD
    assert "nvidia_fs 2.3.1" in line.note


def test_not_installed_is_not_off(machine: Machine) -> None:
    machine.modules("nvidia", "nvidia_peermem")
    machine.remove("proc/driver/nvidia-fs/stats")
    machine.remove("etc/cufile.json")
    machine.remove("usr/local/cuda-12.4/lib64/libcufile.so.1.9.0")
    lines = machine.lines()
    assert faults(lines) == set()
    assert lines["GPUDirect Storage"].verdict is Verdict.NONE
    assert "cuFile compatibility mode" not in lines


def test_the_library_is_missing(machine: Machine) -> None:
    machine.remove("usr/local/cuda-12.4/lib64/libcufile.so.1.9.0")
    assert faults(machine.lines()) == {"GPUDirect Storage"}
    cache = b"glibc-ld.so.cache1.1\0libcufile.so.0\0/opt/gds/lib/libcufile.so.0\0/lib/libz.so\0"
    (machine.root / "etc/ld.so.cache").write_bytes(cache)
    assert faults(machine.lines()) == {"GPUDirect Storage"}  # the cache names what is gone
    assert "LD_LIBRARY_PATH" in machine.lines()["GPUDirect Storage"].note


@pytest.mark.parametrize(
    "place",
    [
        "opt/gds/lib/libcufile.so.0",
        "opt/own/libcufile.so",
        "venv/lib/python3.12/site-packages/nvidia/cufile/lib/libcufile.so.0",
        "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcufile.so.0",
    ],
)
def test_the_library_is_elsewhere(machine: Machine, place: str) -> None:
    machine.remove("usr/local/cuda-12.4/lib64/libcufile.so.1.9.0")
    machine.put(place, "")
    machine.put("etc/ld.so.cache", "cache\0/opt/gds/lib/libcufile.so.0\0")
    search = ("", "/usr/lib/python3.zip", "/venv/lib/python3.12/site-packages")
    lines = machine.lines(*search, LD_LIBRARY_PATH="/opt/none::/opt/own")
    assert faults(lines) == set()


def test_peer_to_peer_without_the_module(machine: Machine) -> None:
    machine.modules("nvidia", "nvidia_peermem")
    machine.put("proc/driver/nvidia/version", OPEN_DRIVER)
    registry = 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1"\n'
    machine.put("proc/driver/nvidia/params", registry)
    assert faults(machine.lines()) == {"GPUDirect Storage"}
    config = {"properties": {"use_pci_p2pdma": True, "allow_compat_mode": False}}
    machine.put("etc/cufile.json", json.dumps(config))
    assert faults(machine.lines()) == set()


def test_compatibility_mode(machine: Machine) -> None:
    """Allowed, it is a default that hides a fall back; forced, it is one."""
    machine.put("etc/cufile.json", CUFILE % "true")
    line = machine.lines()["cuFile compatibility mode"]
    assert line.verdict is Verdict.MEASURED
    assert "falls back" in line.note
    forced: dict[str, Any] = {"properties": {"force_compat_mode": True}}
    machine.put("etc/cufile.json", json.dumps(forced))
    assert faults(machine.lines()) == {"cuFile compatibility mode"}
    machine.put("etc/cufile.json", CUFILE % "false")
    assert faults(machine.lines(CUFILE_FORCE_COMPAT_MODE="true")) == {"cuFile compatibility mode"}
    assert faults(machine.lines(CUFILE_FORCE_COMPAT_MODE="false")) == set()


def test_another_file_by_the_variable(machine: Machine) -> None:
    machine.put("etc/cufile.json", CUFILE % "false")
    machine.put("home/own.json", '{"properties": {"force_compat_mode": true}}')
    lines = machine.lines(CUFILE_ENV_PATH_JSON="/home/own.json")
    assert faults(lines) == {"cuFile compatibility mode"}
    assert "/home/own.json" in lines["cuFile compatibility mode"].to_do


@pytest.mark.parametrize("text", ['{"properties": {', "[1, 2]", "allow_compat_mode = true"])
def test_a_file_that_cufile_cannot_read(machine: Machine, text: str) -> None:
    machine.put("etc/cufile.json", text)
    lines = machine.lines()
    assert faults(lines) == {"cuFile compatibility mode"}
    assert "no JSON" in lines["cuFile compatibility mode"].note


@pytest.mark.parametrize("properties", [{"allow_compat_mode": "yes"}, None, 3, []])
def test_odd_settings_do_not_stop_it(machine: Machine, properties: Any) -> None:
    machine.put("etc/cufile.json", json.dumps({"properties": properties}))
    assert machine.lines()["cuFile compatibility mode"].verdict is Verdict.MEASURED


def test_peer_memory(machine: Machine) -> None:
    for module in ("nv_peer_mem", "efa_nv_peermem"):  # an older name, and the one of EFA
        machine.modules("nvidia", "nvidia_fs", module)
        assert faults(machine.lines()) == set()
    machine.modules("nvidia", "nvidia_fs")
    lines = machine.lines()
    assert faults(lines) == {"GPUDirect RDMA"}
    assert "modprobe nvidia-peermem" in lines["GPUDirect RDMA"].to_do
    machine.put("proc/driver/nvidia/version", OPEN_DRIVER)
    line = machine.lines()["GPUDirect RDMA"]
    assert line.verdict is Verdict.GOOD
    assert "DMA-BUF" in line.note
    machine.put("proc/sys/kernel/osrelease", "5.4.0-170-generic\n")
    assert faults(machine.lines()) == {"GPUDirect RDMA"}


@pytest.mark.parametrize(
    ("port", "says"),
    [
        ({"state": "1: DOWN", "phys_state": "2: Polling"}, "is DOWN (Polling)"),
        ({"state": "2: INIT"}, "is INIT"),
        ({"rate": "100 Gb/sec (2X NDR)"}, "its lanes can 200"),
        ({"rate": "100 Gb/sec (1X NDR)"}, "one lane"),
        ({"rate": "25 Gb/sec (1X EDR)", "link_layer": "Ethernet"}, "one lane"),  # of a make with 4
        ({"rate": "25 Gb/sec (1X EDR)", "board": "MT_0000000012"}, "one lane"),  # InfiniBand
        ({"rate": "200 Gb/sec (4X HDR)"}, "another card like it has 400"),
        ({"state": "", "rate": ""}, "unknown"),
    ],
)
def test_a_port_of_the_fabric(machine: Machine, port: dict[str, str], says: str) -> None:
    machine.port("mlx5_3", **port)
    lines = machine.lines()
    assert faults(lines) == {"fabric ports"}
    assert "mlx5_3 port 1" in lines["fabric ports"].note
    assert says in lines["fabric ports"].note


@pytest.mark.parametrize(
    "port",
    [
        {"state": "1: DOWN", "phys_state": "3: Disabled", "rate": "10 Gb/sec (4X SDR)"},
        {"rate": "100 Gb/sec (4X EDR)", "board": "MT_0000000359"},  # a card of another make
        {"rate": "25 Gb/sec (1X EDR)", "board": "MT_0000000080", "link_layer": "Ethernet"},
        {"rate": "10 Gb/sec (1X QDR)", "board": "", "link_layer": "Ethernet"},
    ],
)
def test_ports_that_are_as_they_should_be(machine: Machine, port: dict[str, str]) -> None:
    machine.port("mlx5_9", **port)
    assert faults(machine.lines()) == set()


def test_lanes_are_missing(machine: Machine) -> None:
    most = ("32.0 GT/s PCIe", 16)
    machine.pci("0000:03:00.0", "0x030200", "0x10de", "32.0 GT/s PCIe", 8, most)
    lines = machine.lines()
    assert faults(lines) == {"PCIe of GPU"}
    assert "0000:03:00.0: 32 GT/s x8 of 32 GT/s x16" in lines["PCIe of GPU"].note
    assert "1 of 8" in lines["PCIe of GPU"].note


def test_an_older_generation(machine: Machine) -> None:
    machine.pci("0000:03:00.0", "0x030200", "0x10de", "16.0 GT/s PCIe", 16, ("32.0 GT/s PCIe", 16))
    machine.pci("0000:09:00.0", "0x010802", "0x144d", "8.0 GT/s PCIe", 4, ("16.0 GT/s PCIe", 4))
    machine.pci("0000:20:00.0", "0x020700", "0x15b3", "16.0 GT/s PCIe", 16, ("32.0 GT/s PCIe", 16))
    lines = machine.lines()
    assert faults(lines) == {"PCIe of GPU", "PCIe of NVMe", "PCIe of network card"}
    assert "older generation" in lines["PCIe of NVMe"].note


def test_a_gpu_with_nothing_to_do_rests(machine: Machine) -> None:
    machine.pci("0000:03:00.0", "0x030200", "0x10de", "2.5 GT/s PCIe", 16, ("32.0 GT/s PCIe", 16))
    line = machine.lines()["PCIe of GPU"]
    assert line.verdict is Verdict.MEASURED
    assert "rest" in line.note


@pytest.mark.parametrize(
    ("now", "bridge", "verdict"),
    [
        (("16.0 GT/s PCIe", 16), ("16.0 GT/s PCIe", 16), Verdict.MEASURED),  # an older host
        (("32.0 GT/s PCIe", 8), ("32.0 GT/s PCIe", 8), Verdict.MEASURED),  # a slot of eight lanes
        (("2.5 GT/s PCIe", 16), ("16.0 GT/s PCIe", 16), Verdict.MEASURED),  # and it rests
        (("16.0 GT/s PCIe", 8), ("16.0 GT/s PCIe", 16), Verdict.OFF),
        (("8.0 GT/s PCIe", 16), ("16.0 GT/s PCIe", 16), Verdict.OFF),
        (("16.0 GT/s PCIe", 16), ("64.0 GT/s PCIe", 16), Verdict.OFF),  # the card is the limit
        (("16.0 GT/s PCIe", 16), ("Unknown", 255), Verdict.OFF),
    ],
)
def test_what_the_bridge_does_not_give_is_not_missing(
    machine: Machine, now: tuple[str, int], bridge: tuple[str, int], verdict: Verdict
) -> None:
    machine.pci("0000:03:00.0", "0x030200", "0x10de", *now, ("32.0 GT/s PCIe", 16))
    place = machine.root / "sys/bus/pci/devices/0000:03:00.0"
    above = machine.root / "sys/devices/pci0000:00/0000:00:01.0"
    above.mkdir(parents=True)
    (above / "max_link_speed").write_text(f"{bridge[0]}\n")
    (above / "max_link_width").write_text(f"{bridge[1]}\n")
    place.rename(above / place.name)
    place.symlink_to(above / place.name)
    line = machine.lines()["PCIe of GPU"]
    assert line.verdict is verdict
    if verdict is Verdict.MEASURED:
        assert "the board is the limit" in line.note
        assert "alone 32 GT/s x16" in line.note
        assert ("rest at" in line.note) == (now[0] == "2.5 GT/s PCIe")


def test_devices_without_a_link_of_their_own(machine: Machine) -> None:
    """Another maker's display, a virtual function, and one whose link is not known."""
    most = ("32.0 GT/s PCIe", 16)
    machine.pci("0000:40:00.0", "0x030000", "0x1a03", "2.5 GT/s PCIe", 1, most)
    machine.pci("0000:41:00.1", "0x020000", "0x15b3", "2.5 GT/s PCIe", 1, most)
    (machine.root / "sys/bus/pci/devices/0000:41:00.1/physfn").mkdir()
    machine.pci("0000:42:00.0", "0x020000", "0x15b3", "Unknown", 0, ("Unknown", 255))
    assert faults(machine.lines()) == set()


def test_a_translating_iommu_is_told(machine: Machine) -> None:
    (machine.root / "sys/class/iommu/dmar0").mkdir(parents=True)
    assert "passing through" in machine.lines()["IOMMU"].note
    machine.put("proc/cmdline", "BOOT_IMAGE=/vmlinuz ro\n")
    assert "iommu=pt" in machine.lines()["IOMMU"].note
