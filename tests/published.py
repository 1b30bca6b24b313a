"""Cases with published outcomes, and the flags that their inputs are as the plan takes them.

``tests/cases/published.json`` has the figures and their sources; nothing is fitted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads((ROOT / "tests" / "cases" / "published.json").read_text())
}
BOUNDS = {
    "size": 0.02,
    "time": 0.05,
    "loss": 0.10,
    "mtbf": 0.03,
    "mfu": 0.02,
    "rate": 0.02,
    "number": 0.03,
}
"""How far ours may be from theirs, by what it is, as a part of theirs."""


def ettr_flags(case: dict[str, Any]) -> dict[str, str]:
    """A run that goes back to its last checkpoint, whose write costs ``w``."""
    given = case["inputs"]
    pause_s = given.get("write_overhead_min", 0) * 60
    return {
        "cluster.gpus": str(given["gpus"]),
        "layout.tp": "1",
        "layout.pp": "1",
        "failures.node_failures": str(given["r_f_per_1000_node_days"] / 1000),
        "failures.restart": f"{given['restart_min']}min",
        "failures.share_memory": "1",
        "checkpoint.pause": f"{pause_s or 1e-6}s",
        "checkpoint.cadence": f"{given['cadence_min']}min",
        "checkpoint.interference": "0",
    }


def relative_mfu_flags(case: dict[str, Any]) -> dict[str, str]:
    """A checkpoint in every step, and nothing that fails."""
    given = case["inputs"]
    return {
        "model.params": "70e9",
        "cluster.gpus": str(given["gpus"]),
        "cluster.gpus_per_node": str(given["gpus"] // given["nodes"]),
        "checkpoint.pause": f"{given['pause_s']}s",
        "checkpoint.cadence": f"{given['iter_s_inferred']}s",
        "checkpoint.interference": "0",
        "failures.mtbf": "1e12s",
    }


def pauses_flags(case: dict[str, Any]) -> dict[str, str]:
    """So many saves in so many days, each with the pause that was published."""
    given = case["inputs"]
    return {
        "checkpoint.pause": f"{given['pause_s']}s",
        "checkpoint.cadence": f"{given['days'] * 86400 / given['saves']}s",
    }
