"""Fast paths that fall back without a word: GPUDirect Storage and GPUDirect RDMA.

Both end in host memory when a module is missing, at about half the speed and with no error. What
``/proc`` and ``/sys`` say is read below a root that is passed in; nothing is loaded or changed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.doctor.finding import Finding, Verdict
from forebay.doctor.links import NVIDIA, has_fabric, text_of
from forebay.plan.figure import Kind

_HOP = "fast paths"
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
_DMA_BUF_KERNEL = (5, 12)
_LIBRARIES = (
    "usr/local/cuda*/lib64/libcufile.so*",
    "usr/local/cuda*/targets/*/lib/libcufile.so*",
    "usr/lib/*/libcufile.so*",
    "usr/lib64/libcufile.so*",
)
_WHEELS = ("nvidia/cufile/lib/libcufile.so*", "nvidia/cu[0-9]*/lib/libcufile.so*")
"""Below a directory of ``sys.path``."""
_CACHED = re.compile(rb"/[^\0]*/libcufile\.so[^\0]*")
_BUILT = (
    "lib/modules/*/extra/**/nvidia-fs.ko*",
    "lib/modules/*/updates/**/nvidia-fs.ko*",
    "lib/modules/*/kernel/drivers/nvidia-fs/nvidia-fs.ko*",
    "usr/src/nvidia-fs-*",
    "var/lib/dkms/nvidia-fs",
)
"""What the module's package or its build leaves: the library alone comes with any toolkit."""
_LOADED_AT_BOOT = re.compile(r"^\s*nvidia[-_]fs\b", re.MULTILINE)
_BAR1 = re.compile(r"^Bar1-map\s*:\s*n=(\d+) ok=(\d+) err=(\d+)", re.MULTILINE)
_VERSION = re.compile(r"NVFS Driver\(version: ?([0-9.:]+)\)")
# Strings first, so that what looks like a comment inside one stays.
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_PASSTHROUGH = re.compile(r"\biommu(\.passthrough)?=(pt|1)\b")
_TRUE = {"1", "true", "yes", "on"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """What the system says.

    ``config`` is cuFile's; None where there is no such file. ``set_up`` is the file that shows that
    ``nvidia_fs`` was installed or is to be loaded, empty for none.
    """

    gpu: bool
    modules: frozenset[str]
    open_driver: bool
    static_bar1: bool
    kernel: tuple[int, ...]
    nvfs_stats: str
    library: str
    set_up: str
    config: Mapping[str, Any] | None
    config_path: str
    config_error: str
    environment: Mapping[str, str]
    fabric: bool
    iommu: bool
    passthrough: bool

    def property_of(self, name: str, variable: str, otherwise: bool) -> bool:
        """A property of cuFile: the variable goes before the file, the file before the default."""
        if variable in self.environment:
            return self.environment[variable].lower() in _TRUE
        section = (self.config or {}).get("properties")
        value = section.get(name, otherwise) if isinstance(section, Mapping) else otherwise
        return value if isinstance(value, bool) else str(value).lower() in _TRUE

    @property
    def asked_by(self) -> str:
        """What asks for GPUDirect Storage, empty for nothing: neither library nor defaults do."""
        if self.set_up:
            return self.set_up
        if not self.property_of("allow_compat_mode", "CUFILE_ALLOW_COMPAT_MODE", True):
            return "allow_compat_mode false"
        if self.property_of("use_pci_p2pdma", "CUFILE_USE_PCIP2PDMA", False):
            return "use_pci_p2pdma true"
        section = (self.config or {}).get("properties")
        listed = isinstance(section, Mapping) and section.get("rdma_dev_addr_list")
        return "rdma_dev_addr_list" if listed else ""


def read_paths(
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    search: Sequence[str] = sys.path,
) -> Paths:
    """What the system below ``root`` says; ``search`` is where packages are. Raises nothing."""
    given = environment.get("CUFILE_ENV_PATH_JSON", "/etc/cufile.json")
    config, error = _config(root / given.lstrip("/"))
    kernel = re.match(r"(\d+)\.(\d+)", text_of(root / "proc/sys/kernel/osrelease"))
    return Paths(
        gpu=_has_gpu(root),
        modules=frozenset(
            line.split(" ", 1)[0] for line in text_of(root / "proc/modules").splitlines()
        ),
        open_driver="Open Kernel Module" in text_of(root / "proc/driver/nvidia/version"),
        static_bar1="RMForceStaticBar1=1" in text_of(root / "proc/driver/nvidia/params"),
        kernel=(int(kernel[1]), int(kernel[2])) if kernel else (),
        nvfs_stats=text_of(root / "proc/driver/nvidia-fs/stats"),
        library=next(_libraries(root, environment, search), ""),
        set_up=next(_set_up(root), ""),
        config=config,
        config_path=given,
        config_error=error,
        environment=dict(environment),
        fabric=has_fabric(root),
        iommu=any((root / "sys/class/iommu").glob("*")),
        passthrough=_PASSTHROUGH.search(text_of(root / "proc/cmdline")) is not None,
    )


def measure(
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    search: Sequence[str] = sys.path,
) -> list[Finding]:
    """A line for each fast path."""
    return judge(read_paths(root, environment, search))


def judge(found: Paths) -> list[Finding]:
    """Lines for what the system says. Pure."""
    if not found.gpu:
        note = "no NVIDIA GPU here"
        return [
            _line("GPUDirect Storage", Verdict.NONE, note),
            _line("GPUDirect RDMA", Verdict.NONE, note),
        ]
    lines = [_storage(found)]
    if lines[0].verdict is not Verdict.NONE or found.config_error:
        lines.append(_compat(found, direct=lines[0].verdict is Verdict.GOOD))
    lines.append(_rdma(found))
    if found.iommu:
        lines.append(_iommu(found))
    return lines


def _storage(found: Paths) -> Finding:
    name = "GPUDirect Storage"
    peer_to_peer = found.static_bar1 and found.property_of(
        "use_pci_p2pdma", "CUFILE_USE_PCIP2PDMA", False
    )
    if "nvidia_fs" not in found.modules:
        if peer_to_peer and found.open_driver:
            note = "by the kernel's peer-to-peer DMA (use_pci_p2pdma), local NVMe only"
            return _line(name, Verdict.GOOD, note)
        if not found.asked_by:
            there = f"not set up, though {found.library} is there" if found.library else ""
            note = f"{there or 'not installed'}; Forebay copies through host memory"
            return _line(name, Verdict.NONE, note)
        return _line(
            name,
            Verdict.OFF,
            f"asked for ({found.asked_by}), the module nvidia_fs is not loaded: no transfer goes "
            "directly",
            "modprobe nvidia-fs, and name it in /etc/modules-load.d; rebuild it (dkms) after a new "
            "driver or kernel; gdscheck -p must then say 'NVMe : Supported'",
        )
    if not found.nvfs_stats:
        return _line(
            name,
            Verdict.OFF,
            "nvidia_fs is loaded, /proc/driver/nvidia-fs/stats is not there",
            "in a container, mount /proc/driver/nvidia-fs and /dev/nvidia-fs*; else load it again",
        )
    version = _VERSION.search(found.nvfs_stats)
    shown = f"nvidia_fs {version[1].replace(':', '.')}" if version else "nvidia_fs"
    maps = _BAR1.search(found.nvfs_stats)
    if maps is not None and int(maps[3]) and not int(maps[2]):
        return _line(
            name,
            Verdict.OFF,
            f"{shown}: all {maps[3]} mappings of GPU memory failed: every transfer goes through "
            "host memory",
            "see dmesg for nvidia-fs, and install the version that goes with driver and kernel",
        )
    if not found.library:
        return _line(
            name,
            Verdict.OFF,
            f"{shown} is loaded, libcufile is neither in the usual places, in LD_LIBRARY_PATH, in "
            "the loader's cache, nor among Python's packages",
            "install it (libcufile, gds-tools), or put it in the library path",
        )
    used = f", {maps[2]} mappings of GPU memory so far" if maps is not None else ""
    return _line(name, Verdict.GOOD, f"{shown} loaded, libcufile there{used}")


def _compat(found: Paths, *, direct: bool) -> Finding:
    name = "cuFile compatibility mode"
    if found.config_error:
        return _line(
            name,
            Verdict.OFF,
            f"{found.config_path}: {found.config_error}: cuFile takes its defaults",
            "correct the file: JSON with // comments",
        )
    if found.property_of("force_compat_mode", "CUFILE_FORCE_COMPAT_MODE", False):
        return _line(
            name,
            Verdict.OFF,
            "forced: every transfer goes through host memory",
            f"set force_compat_mode to false in {found.config_path}, and unset "
            "CUFILE_FORCE_COMPAT_MODE",
        )
    if not found.property_of("allow_compat_mode", "CUFILE_ALLOW_COMPAT_MODE", True):
        return _line(name, Verdict.GOOD, "not allowed: what cannot go directly fails and says so")
    if direct:
        return _line(
            name,
            Verdict.MEASURED,
            "allowed: what cannot go directly falls back without a word; with allow_compat_mode "
            f"false in {found.config_path} it would say so",
        )
    # Why there is none, the line of GPUDirect Storage says: one cause, one line that is off.
    return _line(
        name,
        Verdict.MEASURED,
        "allowed, and there is no direct path: cuFile works, at the speed of host memory",
    )


def _rdma(found: Paths) -> Finding:
    name = "GPUDirect RDMA"
    if not found.fabric:
        return _line(name, Verdict.NONE, "no InfiniBand or RoCE device here")
    loaded = [module for module in _PEER_MODULES if module in found.modules]
    if loaded:
        return _line(name, Verdict.GOOD, f"{loaded[0]} is loaded")
    if found.open_driver and found.kernel >= _DMA_BUF_KERNEL:
        return _line(
            name,
            Verdict.GOOD,
            "by DMA-BUF: open driver, kernel "
            f"{'.'.join(map(str, found.kernel))}; a library that asks for nvidia_peermem lacks it",
        )
    return _line(
        name,
        Verdict.OFF,
        "neither nvidia_peermem nor DMA-BUF: the network card reaches GPU memory through the host",
        "modprobe nvidia-peermem (EFA: efa_nv_peermem), and name it in /etc/modules-load.d; it "
        "must load after the drivers of GPU and network card",
    )


def _iommu(found: Paths) -> Finding:
    if found.passthrough:
        return _line("IOMMU", Verdict.MEASURED, "on, passing through (iommu=pt)")
    return _line(
        "IOMMU",
        Verdict.MEASURED,
        "on and translating: transfers between devices may go up to the processor; iommu=pt, or "
        "off, where guests do not need it",
    )


def _line(name: str, verdict: Verdict, note: str, advice: str = "") -> Finding:
    return Finding(name=name, hop=_HOP, kind=Kind.TEXT, verdict=verdict, note=note, advice=advice)


def _has_gpu(root: Path) -> bool:
    if (root / "proc/driver/nvidia/version").exists():
        return True
    return any(
        text_of(device / "vendor") == NVIDIA and text_of(device / "class").startswith("0x03")
        for device in (root / "sys/bus/pci/devices").glob("*")
    )


def _libraries(root: Path, environment: Mapping[str, str], search: Sequence[str]) -> Iterator[str]:
    """Where libcufile lies: the usual places first, then those of the loader and of Python."""

    def below(directory: str, pattern: str) -> Iterator[str]:
        place = root / directory.lstrip("/")
        yield from (f"/{path.relative_to(root)}" for path in sorted(place.glob(pattern)))

    for pattern in _LIBRARIES:
        yield from below("", pattern)
    for entry in environment.get("LD_LIBRARY_PATH", "").split(":"):
        if entry.startswith("/"):
            yield from below(entry, "libcufile.so*")
    for entry in search:
        for pattern in _WHEELS if entry.startswith("/") else ():
            yield from below(entry, pattern)
    for seen in _CACHED.findall(_bytes_of(root / "etc/ld.so.cache")):
        name = os.fsdecode(seen)
        if (root / name.lstrip("/")).exists():  # the cache may be older than what is installed
            yield name


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _set_up(root: Path) -> Iterator[str]:
    """Files that show that the module was meant to be here."""
    for pattern in ("etc/modules", "etc/modules-load.d/*.conf"):
        for path in sorted(root.glob(pattern)):
            if _LOADED_AT_BOOT.search(text_of(path)):
                yield f"/{path.relative_to(root)}"
    for pattern in _BUILT:
        yield from (f"/{path.relative_to(root)}" for path in sorted(root.glob(pattern)))


def _config(path: Path) -> tuple[Mapping[str, Any] | None, str]:
    """CuFile's settings, and what is wrong with the file."""
    text = text_of(path)
    if not text:
        return None, ""
    try:
        found = json.loads(_COMMENT.sub(lambda seen: seen[1] or "", text))
    except (ValueError, RecursionError) as error:
        return None, f"no JSON: {error}"
    return (found, "") if isinstance(found, dict) else (None, "no JSON object")
