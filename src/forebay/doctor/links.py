"""Links that may be up and slow: PCIe of GPUs, disks and network cards, and ports of the fabric.

Read from ``/sys`` below a root that is passed in. Nothing is written, no device is woken.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from forebay.doctor.finding import Finding, Verdict
from forebay.plan.figure import Kind

NVIDIA = "0x10de"
_HOP = "links"
_KINDS = (("0x0302", "GPU"), ("0x0300", "GPU"), ("0x0108", "NVMe"), ("0x02", "network card"))
"""Beginnings of a PCI class, and what they are; a GPU is looked at only if it is NVIDIA's."""

_RESTING_GT_S = 5.0
"""A GPU with nothing to do may lower its link to this, and raises it with the first copy."""

_GT = re.compile(r"([0-9.]+) GT/s")
_RATE = re.compile(r"([0-9.]+) Gb/sec(?: \((\d+)X ?([A-Z0-9]*)\))?")
_LANE_GBIT_S = {
    "SDR": 2.5,
    "DDR": 5.0,
    "QDR": 10.0,
    "FDR10": 10.0,
    "FDR": 14.0,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}


def text_of(path: Path) -> str:
    """What a file of the system says, stripped; empty where it is not there or not readable."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLink:
    """One device's link: speed in GT/s a lane, width in lanes, now and at most.

    The most is what the device and the bridge above it can both do.
    """

    address: str
    what: str
    speed: float
    width: int
    most_speed: float
    most_width: int
    own_speed: float
    """What the device alone could."""
    own_width: int

    @property
    def narrow(self) -> bool:
        """Whether lanes are missing."""
        return 0 < self.width < self.most_width

    @property
    def slow(self) -> bool:
        """Whether it runs at an older generation than it could."""
        return 0 < self.speed < self.most_speed

    @property
    def resting(self) -> bool:
        """Whether it may be slow only because nothing is asked of it."""
        return self.what == "GPU" and self.slow and self.speed <= _RESTING_GT_S

    @property
    def capped(self) -> bool:
        """Whether the device could more than the slot or the processor gives."""
        return (self.most_speed, self.most_width) != (self.own_speed, self.own_width)

    def __str__(self) -> str:
        return (
            f"{self.address}: {self.speed:g} GT/s x{self.width} of "
            f"{self.most_speed:g} GT/s x{self.most_width}"
        )


def pci_links(root: Path = Path("/")) -> list[PciLink]:
    """The links of GPUs, NVMe disks and network cards that have one; virtual functions do not."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        code = text_of(device / "class")
        what = next((word for begin, word in _KINDS if code.startswith(begin)), None)
        now, own = _link(device, "current"), _link(device, "max")
        if what is None or now is None or own is None or (device / "physfn").exists():
            continue
        if what == "GPU" and text_of(device / "vendor") != NVIDIA:
            continue
        bridge = _link(device.resolve().parent, "max") or own
        found.append(
            PciLink(
                address=device.name,
                what=what,
                speed=now[0],
                width=now[1],
                most_speed=min(own[0], bridge[0]),
                most_width=min(own[1], bridge[1]),
                own_speed=own[0],
                own_width=own[1],
            )
        )
    return found


def _link(device: Path, which: str) -> tuple[float, int] | None:
    """GT/s and lanes, ``current`` or ``max``; None where a device has no link or does not know."""
    speed = _GT.search(text_of(device / f"{which}_link_speed"))
    width = text_of(device / f"{which}_link_width")
    if speed is None or not width.isdigit() or not int(width):
        return None
    return float(speed[1]), int(width)


def measure(root: Path = Path("/")) -> list[Finding]:
    """One line for the devices of a kind, one for the ports of the fabric. Raises nothing."""
    links = pci_links(root)
    found = []
    for what in ("GPU", "NVMe", "network card"):
        of_kind = [link for link in links if link.what == what]
        found += [_judge(what, of_kind)] if of_kind else []
    if not found:
        note = "no GPU, NVMe disk or network card shows a PCIe link"
        found.append(_line("PCIe", Verdict.NONE, note))
    return [*found, _fabric(root)]


def _line(name: str, verdict: Verdict, note: str, advice: str = "") -> Finding:
    return Finding(name=name, hop=_HOP, kind=Kind.TEXT, verdict=verdict, note=note, advice=advice)


def _judge(what: str, links: list[PciLink]) -> Finding:
    name = f"PCIe of {what}"
    bad = [link for link in links if link.narrow or (link.slow and not link.resting)]
    if bad:
        lost = "lanes are missing" if any(link.narrow for link in bad) else "an older generation"
        return _line(
            name,
            Verdict.OFF,
            f"{len(bad)} of {len(links)} below what they can ({lost}): {'; '.join(map(str, bad))}",
            "reseat the card or riser, see that the slot and BIOS give its lanes and generation, "
            "and look for AER errors in dmesg",
        )
    resting = [link for link in links if link.resting]
    capped = [link for link in links if link.capped]
    notes = []
    if resting:
        notes.append(
            f"all lanes; {len(resting)} of {len(links)} rest at a lower speed ({resting[0]}): the "
            "rate of device to host above says whether they rise"
        )
    if capped:
        one = capped[0]
        notes.append(
            f"{len(capped)} of {len(links)} can more than the bridge above them gives ({one}, "
            f"alone {one.own_speed:g} GT/s x{one.own_width}): the board is the limit"
        )
    if notes:
        return _line(name, Verdict.MEASURED, "; ".join(notes))
    seen = Counter(f"{link.speed:g} GT/s x{link.width}" for link in links)
    text = ", ".join(f"{count} at {shown}" for shown, count in seen.most_common())
    return _line(name, Verdict.GOOD, f"{text}: all they can")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Port:
    name: str
    board: str
    layer: str
    state: str
    phys_state: str
    gbit_s: float
    lanes: int
    lane: str

    def fault(self, ports: list[_Port]) -> str:
        """What is wrong with it, empty for nothing; cards of one make have one speed."""
        if self.state != "ACTIVE":
            return f"{self.name} is {self.state} ({self.phys_state})"
        full = _LANE_GBIT_S.get(self.lane, 0.0) * self.lanes
        shown = f"{self.gbit_s:g} Gbit/s" + (f" ({self.lanes}X {self.lane})" if self.lanes else "")
        alike = [port for port in ports if self.board and port.board == self.board]
        most = max((port.lanes for port in alike), default=0)
        # A cable of InfiniBand has four lanes or two; Ethernet of 10, 25 or 50 Gbit/s has one.
        if self.lanes == 1 and (self.layer == "InfiniBand" or most > 1):
            return f"{self.name} has one lane: {shown}"
        if self.gbit_s < 0.9 * full:
            return f"{self.name}: {shown}, its lanes can {full:g}"
        best = max((port.gbit_s for port in alike), default=0.0)
        if self.gbit_s < best:
            return f"{self.name}: {shown}, another card like it has {best:g}"
        return ""


def _ports(root: Path) -> list[_Port]:
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate = _RATE.search(text_of(port / "rate"))
        found.append(
            _Port(
                name=f"{port.parents[1].name} port {port.name}",
                board=text_of(port.parents[1] / "board_id"),
                layer=text_of(port / "link_layer"),
                state=text_of(port / "state").rpartition(": ")[2] or "unknown",
                phys_state=text_of(port / "phys_state").rpartition(": ")[2] or "unknown",
                gbit_s=float(rate[1]) if rate else 0.0,
                lanes=int(rate[2] or 0) if rate else 0,
                lane=(rate[3] or "") if rate else "",
            )
        )
    return found


def has_fabric(root: Path = Path("/")) -> bool:
    """Whether there is a port of InfiniBand or RoCE."""
    return bool(_ports(root))


def _fabric(root: Path) -> Finding:
    name = "fabric ports"
    ports = _ports(root)
    used = [port for port in ports if port.phys_state != "Disabled"]
    if not ports:
        return _line(name, Verdict.NONE, "no InfiniBand or RoCE device here")
    active = [port for port in used if port.state == "ACTIVE"]
    faults = [fault for port in used if (fault := port.fault(active))]
    if faults:
        return _line(
            name,
            Verdict.OFF,
            "; ".join(faults),
            "reseat or change cable and transceiver (mlxlink -d DEVICE shows which end), see that "
            "a subnet manager runs for INIT, and disable a port that is not meant to be used",
        )
    seen = Counter(f"{port.gbit_s:g} Gbit/s" for port in used)
    text = ", ".join(f"{count} at {shown}" for shown, count in seen.most_common())
    return _line(name, Verdict.GOOD, f"{text or 'all disabled'}, active")
