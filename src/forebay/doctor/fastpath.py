"""Whether the fast paths are really on: GPUDirect Storage, RDMA to GPUs, full PCIe links.

When one is silently off, everything still works, at half the speed. Read from ``/proc`` and
``/sys`` below a root, so that a made-up tree can stand for a machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from forebay.doctor.finding import Finding, Verdict
from forebay.plan.figure import Kind

_HOP = "fast path"
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
_CUFILE_VARIABLE = "CUFILE_ENV_PATH_JSON"
_COMPAT = re.compile(r'"allow_compat_mode"\s*:\s*(true|false)')
_COMMENT = re.compile(r"^\s*//.*$", re.MULTILINE)
_NVIDIA, _GPU_CLASS, _NVME_CLASS, _NIC_CLASS = "0x10de", "0x03", "0x0108", "0x02"

Told = Callable[[str], None]


def measure(*, root: Path = Path("/"), told: Told) -> list[Finding]:
    """All fast paths of the machine below ``root``."""
    told(_HOP)
    gpus = [device for device in _devices(root) if _is_gpu(device)]
    modules = _modules(root)
    found = [*_storage(root, modules, bool(gpus)), *_rdma(root, modules, bool(gpus))]
    return [*found, *_links(root)]


def has_gpu(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA GPU is on the machine's PCIe bus."""
    return any(_is_gpu(device) for device in _devices(root))


def _storage(root: Path, modules: set[str], gpus: bool) -> list[Finding]:
    """GPUDirect Storage: the kernel module, and cuFile not in compatibility mode."""
    if not gpus:
        return [_say("GPUDirect Storage", Verdict.NONE, "no NVIDIA GPU here")]
    if "nvidia_fs" not in modules:
        return [
            _say(
                "GPUDirect Storage",
                Verdict.OFF,
                "the module nvidia_fs is not loaded: reads and writes bounce through host memory",
                "modprobe nvidia-fs (package nvidia-gds), then gdscheck -p",
            )
        ]
    if not (root / "proc/driver/nvidia-fs/stats").exists():
        note = "nvidia_fs is loaded and shows no /proc/driver/nvidia-fs/stats"
        return [_say("GPUDirect Storage", Verdict.OFF, note, "see the kernel's log for nvidia-fs")]
    path = root / os.environ.get(_CUFILE_VARIABLE, "/etc/cufile.json").lstrip("/")
    try:
        text = _COMMENT.sub("", path.read_text())
    except OSError:
        note = f"nvidia_fs is loaded; no {path.name}: cuFile's defaults allow compatibility mode"
        return [_say("GPUDirect Storage", Verdict.MEASURED, note)]
    mode = _COMPAT.search(text)
    if mode is not None and mode[1] == "true":
        return [
            _say(
                "GPUDirect Storage",
                Verdict.OFF,
                f"{path.name} allows compatibility mode: cuFile goes by host memory in silence",
                f'set "allow_compat_mode": false in {path.name}, so that a fallback is an error',
            )
        ]
    return [_say("GPUDirect Storage", Verdict.GOOD, "nvidia_fs is loaded, no compatibility mode")]


def _rdma(root: Path, modules: set[str], gpus: bool) -> list[Finding]:
    """Every RDMA port, and the module that lets NICs reach the GPUs' memory."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    found = []
    for port in ports:
        name = f"RDMA port {port.parent.parent.name}/{port.name}"
        state, rate = _text(port / "state"), _text(port / "rate")
        if "ACTIVE" in state:
            found.append(_say(name, Verdict.GOOD, f"{state}, {rate}"))
        else:
            advice = "check cable, switch and subnet manager (ibstat, ibdiagnet)"
            found.append(_say(name, Verdict.OFF, f"{state or 'no state'}, {rate}", advice))
    if not ports:
        return [_say("RDMA", Verdict.NONE, "no RDMA port here")]
    if gpus and not modules & set(_PEER_MODULES):
        found.append(
            _say(
                "GPUDirect RDMA",
                Verdict.OFF,
                "no nvidia_peermem: unless NCCL uses dma-buf, transfers bounce through host memory",
                "modprobe nvidia-peermem, or check dma-buf in NCCL's log (NCCL_DEBUG=INFO)",
            )
        )
    elif gpus:
        found.append(_say("GPUDirect RDMA", Verdict.GOOD, "nvidia_peermem is loaded"))
    return found


def _links(root: Path) -> list[Finding]:
    """PCIe links that run below what both ends can: GPUs, NVMe drives, NICs."""
    found = []
    whole = 0
    for device in _devices(root):
        kind = _kind(device)
        speed, most = _number(device / "current_link_speed"), _number(device / "max_link_speed")
        width, widest = _number(device / "current_link_width"), _number(device / "max_link_width")
        if not kind or not most or not widest or not width:
            continue
        if width < widest or (speed < most and kind != "GPU"):
            found.append(
                _say(
                    f"PCIe link of {kind} {device.name}",
                    Verdict.OFF,
                    f"x{width:g} at {speed:g} GT/s, could be x{widest:g} at {most:g} GT/s",
                    "reseat it, check slot and riser; a switch or slot of an older generation "
                    "limits it for good",
                )
            )
        else:  # an idle GPU slows its link down: its speed is no fault
            whole += 1
    if whole:
        note = f"{whole} of {whole + len(found)} links of GPUs, NVMe drives and NICs at full width"
        found.append(_say("PCIe links", Verdict.GOOD, note))
    return found or [_say("PCIe links", Verdict.NONE, "no GPU, NVMe drive or NIC with a PCIe link")]


def _devices(root: Path) -> Iterator[Path]:
    yield from sorted((root / "sys/bus/pci/devices").glob("*"))


def _is_gpu(device: Path) -> bool:
    return _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_GPU_CLASS)


def _kind(device: Path) -> str:
    code = _text(device / "class")
    if _is_gpu(device):
        return "GPU"
    if code.startswith(_NVME_CLASS):
        return "NVMe drive"
    return "NIC" if code.startswith(_NIC_CLASS) else ""


def _modules(root: Path) -> set[str]:
    lines = _text(root / "proc/modules").splitlines()
    return {line.split(" ", 1)[0].replace("-", "_") for line in lines}


def _number(path: Path) -> float:
    """The number at the beginning of a file, as of ``16.0 GT/s PCIe``; 0 where there is none."""
    found = re.match(r"[0-9.]+", _text(path))
    return float(found[0]) if found else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _say(name: str, verdict: Verdict, note: str, advice: str = "") -> Finding:
    return Finding(name=name, hop=_HOP, kind=Kind.TEXT, verdict=verdict, note=note, advice=advice)
