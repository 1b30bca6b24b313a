"""Figures that are known, each with its source; what no source has is called assumed.

A preset fills fields by ``section.key``. Sources: NVIDIA DGX H100/H200/B200 data sheets and
DGX SuperPOD H100 reference architecture (Table 6); Llama 3 (arXiv 2407.21783); the ML Engineering
book's measurements (S. Bekman); DeepSpeed's DeepNVMe report (2025-06); AWS and Google documentation
of request rates; MLPerf Storage v3.0 result files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from forebay.errors import UsageError
from forebay.plan.content import CONTENTS
from forebay.plan.figure import Figure, Value

Preset = Mapping[str, Figure]

_LLAMA = "Llama 3, arXiv 2407.21783, Table 3"
_LLAMA_FAILURES = "Llama 3, arXiv 2407.21783, Table 5"
_MLPERF = "MLPerf Storage v2.0 guidelines, Table 2"
_ASSUMED = "assumed"


_NODE_FAILURES = 419 / (54 * 2048)
_NODE_FAILURES_FROM = "Llama 3, section 3.3.4: 419 in 54 days on 2,048 nodes = one in 3.09 h"


def _preset(**sections: dict[str, tuple[Value, str]]) -> Preset:
    return {
        f"{section}.{key}": Figure(value=value, source=source)
        for section, figures in sections.items()
        for key, (value, source) in figures.items()
    }


def _shape(
    source: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int = 128_256
) -> dict[str, tuple[Value, str]]:
    return {
        "layers": (layers, source),
        "hidden": (hidden, source),
        "ffn": (ffn, source),
        "heads": (heads, source),
        "kv_heads": (kv_heads, source),
        "vocab": (vocab, source),
        "experts": (1, source),
        "tied": (False, source),
    }


def _split(gpus: int, tp: int, pp: int, source: str) -> dict[str, dict[str, tuple[Value, str]]]:
    return {
        "cluster": {"gpus": (gpus, source)},
        "layout": {"tp": (tp, source), "pp": (pp, source), "cp": (1, source)},
    }


DEFAULTS: Preset = _preset(
    model={
        "bytes_per_param": (16.0, "the reference case"),
        "content": (CONTENTS["16"], "the reference case: 2 + 4 + 8 + 2 bytes"),
    },
    layout={
        "cp": (1, _ASSUMED),
        "ep": (1, _ASSUMED),
        "writers": ("every", "what Forebay does"),
        "skew": (1.0, "assumed: sharded evenly; Llama 3 had 1 MB to 4 GB a GPU"),
    },
    cluster={
        "pinned": (True, "what Forebay does; `forebay doctor` measures it"),
        "host_share": (0.5, _ASSUMED),
    },
    storage={
        "per_node_read": (40e9, "DGX SuperPOD H100 reference architecture, Table 6: best"),
        "budget": (0.25, "assumed: three quarters stay with everyone else"),
        "prefixes": (1, _ASSUMED),
    },
    checkpoint={
        "cadence": (1800.0, "the reference case"),
        "local": (True, "the reference case"),
        "mirror": (True, "the reference case"),
        "slots": (2, "Forebay's default"),
        "local_keep": (2, "the newest may be torn: BLOOM's and SCR's lesson"),
        "fixed": (0.02, "assumed: walk of the state, launch and end of the copies"),
        "tail": ("lognormal", _ASSUMED),
        "spread": (0.1, "assumed; links alone spread by 0.002 (ML Engineering, 8 x H200)"),
        "quantile": (0.99, _ASSUMED),
        "pause_limit": (60.0, "the question"),
        "goal": (0.01, "the goal"),
        "interference": (0.03, "Forebay's budget"),
        "interference_window": ("busy", "Forebay paces its drain"),
    },
    failures={
        "node_failures": (
            _NODE_FAILURES,
            _NODE_FAILURES_FROM,
        ),
        "share_memory": (0.23, f"{_LLAMA_FAILURES}: software, network, watchdog, 98 of 419"),
        "share_local": (0.08, f"{_LLAMA_FAILURES}: host maintenance, 32 of 419"),
        "share_peer": (0.67, f"{_LLAMA_FAILURES}: a part of one node, 289 of 419, less the 2 %"),
        "share_durable": (0.02, "assumed: a node and its peer at once, or the whole job"),
        "restart_memory": (300.0, "the reference case"),
        "restart_local": (300.0, "the reference case"),
        "restart_peer": (300.0, "the reference case"),
        "restart_durable": (300.0, "the reference case"),
    },
    training={
        "run": (54 * 86400.0, "Llama 3, section 3.3.4"),
        "tokens": (15.6e12, "Llama 3, arXiv 2407.21783, section 1"),
        "mfu": (0.41, "Llama 3, Table 4: 16,384 GPUs"),
        "flops_per_param_token": (6.0, "forward 2, backward 4 (Kaplan et al., 2020)"),
    },
)

MODELS: dict[str, Preset] = {
    "llama3-8b": _preset(
        model={"params": (8.03e9, _LLAMA), **_shape(_LLAMA, 32, 4096, 14336, 32, 8)},
        **_split(256, 1, 1, _ASSUMED),
    ),
    "llama3-70b": _preset(
        model={"params": (70.55e9, _LLAMA), **_shape(_LLAMA, 80, 8192, 28672, 64, 8)},
        **_split(2048, 8, 4, _ASSUMED),
    ),
    "llama3-405b": _preset(
        model={
            "params": (405e9, "the reference case; its shape gives 405.85e9"),
            **_shape(_LLAMA, 126, 16384, 53248, 128, 8),
        },
        **_split(16384, 8, 16, "Llama 3, arXiv 2407.21783, Table 4"),
    ),
    "llama3-1t": _preset(
        model={
            "params": (1.183e12, f"from the shape of {_MLPERF}"),
            **_shape(f"{_MLPERF}; vocabulary of Llama 3", 128, 25872, 98304, 192, 32),
        },
        **_split(16384, 8, 64, f"{_MLPERF}; GPUs assumed"),
    ),
}

_DGX_PCIE5 = "ML Engineering: 55.06 GB/s measured on 8 links of an H200 node, PCIe 5.0 x16"
_DGX_PAGEABLE = "assumed 8 GB/s: through a bounce buffer, 4 to 7 times slower (NVIDIA, DeepSpeed)"
_DDR5 = "75 % of 16 channels of DDR5-4800; 8 links at once took 440 GB/s of it"
_RAID_GEN5 = "DeepSpeed DeepNVMe, 2025-06: 8 Gen5 drives, 26 GB/s write, 48 read"
_PEER = "assumed: 2 storage NICs of 400 Gbit/s at 80 %"


def _dgx(
    host_memory: float,
    nvme: tuple[float, float, float, str],
    peak: tuple[float, str],
    bandwidth: tuple[float, str],
) -> Preset:
    return _preset(
        cluster={
            "gpus_per_node": (8, "8 GPUs a node"),
            "d2h": (55e9, _DGX_PCIE5),
            "d2h_pageable": (8e9, _DGX_PAGEABLE),
            "host_bandwidth": bandwidth,
            "host_memory": (host_memory, "NVIDIA data sheet"),
            "nvme": (nvme[0], nvme[3]),
            "nvme_read": (nvme[1], nvme[3]),
            "nvme_capacity": (nvme[2], "NVIDIA data sheet: 8 x 3.84 TB"),
            "peer": (80e9, _PEER),
            "peak_flops": peak,
        }
    )


CLUSTERS: dict[str, Preset] = {
    "dgx-h100": _dgx(
        2e12,
        (26e9, 48e9, 30.72e12, _RAID_GEN5),
        (989e12, "NVIDIA H100 SXM data sheet, BF16 dense"),
        (460e9, _DDR5),
    ),
    "dgx-h200": _dgx(
        2e12,
        (26e9, 48e9, 30.72e12, _RAID_GEN5),
        (989e12, "NVIDIA H200 SXM data sheet, BF16 dense"),
        (460e9, _DDR5),
    ),
    "dgx-b200": _dgx(
        2e12,
        (26e9, 48e9, 30.72e12, _RAID_GEN5),
        (2250e12, "NVIDIA DGX B200 data sheet: 72 PFLOP/s FP8 sparse / 8 / 4"),
        (540e9, "assumed: 75 % of 16 channels of DDR5-5600"),
    ),
    "gb200-nvl72": _preset(
        cluster={
            "gpus_per_node": (4, "a compute tray: 2 Grace, 4 Blackwell"),
            "d2h": (175e9, "ML Engineering, half a GB300 station: 377 GB/s one way, 175 with both"),
            "d2h_pageable": (
                175e9,
                "coherent NVLink-C2C: host pages need no bounce; assumed equal",
            ),
            "host_bandwidth": (700e9, "assumed: 70 % of 2 x 512 GB/s LPDDR5X"),
            "host_memory": (0.96e12, "NVIDIA GB200 NVL72: 17 TB over 18 trays"),
            "nvme": (11e9, "DeepSpeed DeepNVMe, 2025-06: 4 Gen5 drives, 11 GB/s write, 27 read"),
            "nvme_read": (27e9, "DeepSpeed DeepNVMe, 2025-06: 4 Gen5 drives"),
            "nvme_capacity": (15.36e12, "assumed: 4 x 3.84 TB"),
            "peer": (40e9, "assumed: 400 Gbit/s at 80 %"),
            "peak_flops": (2500e12, "NVIDIA GB200 NVL72: 180 PFLOP/s BF16 dense over 72"),
        },
        failures={
            "node_failures": (
                _NODE_FAILURES / 2,
                f"half of a node of 8 GPUs: {_NODE_FAILURES_FROM}",
            )
        },
    ),
}

_SUPERPOD = "DGX SuperPOD H100 reference architecture, Table 6, scaled by units of 256 GPUs"


def _filesystem(write: float, read: float, source: str, per_node: float, node_from: str) -> Preset:
    return _preset(
        storage={
            "filesystem": (write, source),
            "filesystem_read": (read, source),
            "per_node": (per_node, node_from),
        }
    )


def _bucket(
    put_limit: float,
    get_limit: float,
    source: str,
    per_node: float,
    node_from: str,
    part_bytes: float = 2**26,
) -> Preset:
    return _preset(
        storage={
            "put_limit": (put_limit, source),
            "get_limit": (get_limit, source),
            "per_node": (per_node, node_from),
            "per_node_read": (per_node, node_from),
            "part_bytes": (part_bytes, "Forebay's parts of 64 MiB"),
        }
    )


_NODE_BEST = "DGX SuperPOD H100 reference architecture, Table 6: best"

STORES: dict[str, Preset] = {
    "reference": _filesystem(100e9, 100e9, "the reference case", 20e9, _NODE_BEST),
    "tectonic": _filesystem(2e12, 2e12, "Llama 3, section 3.3.1: sustained", 20e9, _NODE_BEST),
    "mlperf-405b": _filesystem(
        167.5e9, 167.5e9, "MLPerf Storage v3.0: median write of a 405B checkpoint", 20e9, _NODE_BEST
    ),
    "s3": _bucket(
        3500.0,
        5500.0,
        "AWS: at least 3,500 PUT and 5,500 GET a second and partitioned prefix",
        8e9,
        "c5n.18xlarge, measured download of 2019",
    ),
    "gcs": _bucket(
        1000.0,
        5000.0,
        "Google: about 1,000 writes and 5,000 reads a second at first, doubling every 20 minutes",
        8e9,
        "assumed as for S3",
    ),
    "azure": _preset(
        storage={
            "filesystem": (7.5e9, "Azure: ingress of a standard account, 60 Gbit/s; can be raised"),
            "filesystem_read": (15e9, "assumed: egress twice the ingress"),
            "put_limit": (20000.0, "Azure: requests a second of an account"),
            "get_limit": (20000.0, "Azure: requests a second of an account"),
            "per_node": (7.5e9, "no more than the account"),
            "per_node_read": (7.5e9, "no more than the account"),
            "part_bytes": (2.0**26, "Forebay's parts of 64 MiB"),
        }
    ),
}

_SUPERPOD_GRADES = {
    "superpod-good": (7e9, 15e9, 2e9, 4e9),
    "superpod-better": (20e9, 40e9, 4e9, 8e9),
    "superpod-best": (62e9, 125e9, 20e9, 40e9),
}
"""Write and read of a unit of 32 nodes of 8 GPUs, then of a node."""

_UNIT_GPUS = 32 * 8
STORE_NAMES = (*STORES, *_SUPERPOD_GRADES)


def store(name: str, gpus: int) -> Preset:
    """The storage preset ``name`` for a job of ``gpus``: a SuperPOD's grows with them."""
    grade = _SUPERPOD_GRADES.get(name)
    if grade is None:
        return STORES[name]
    write, read, node_write, node_read = grade
    units = gpus / _UNIT_GPUS
    total = f"{_SUPERPOD}, here {units:g}"
    return _preset(
        storage={
            "filesystem": (write * units, total),
            "filesystem_read": (read * units, total),
            "per_node": (node_write, _SUPERPOD),
            "per_node_read": (node_read, _SUPERPOD),
        }
    )


DEFAULT_MODEL, DEFAULT_CLUSTER, DEFAULT_STORE = "llama3-405b", "dgx-h100", "reference"


def find(kind: str, name: str | None, default: str, among: Iterable[str]) -> str:
    """The full name of a preset: it, or what follows its first dash (``405b``); None: the default.

    Raises UsageError.
    """
    if name is None:
        return default
    wanted = name.strip().lower()
    for full in among:
        if wanted in (full, full.partition("-")[2]):
            return full
    raise UsageError(f"{kind}: unknown preset {name!r}, expected {', '.join(among)}")
