"""Pause, drain and time to durable as predicted from the doctor's figures, against a real job.

``python -m bench.predict [--bytes 256MB] [--saves 5] [--seconds 1]``: one rank on this machine
saves to a local and a durable directory, below ``$BENCH_DIR`` or else the temporary directory.
Doctor measures the same directories before and after the job, and the mean of both goes into
``forebay simulate``; of what was measured and played the median counts. On a quiet machine each is
meant to be within 20 %; the result says whether it was, whatever it says.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import write_result
from forebay.doctor import disk, memory, store
from forebay.doctor.finding import Finding
from forebay.plan.arithmetic import work
from forebay.plan.resolve import read_flags, resolve
from forebay.plan.scenario import NS, scenario_of
from forebay.plan.simulate import simulate
from forebay.units import parse_bytes

WITHIN = 0.2
FIELDS = {  # the doctor's lines, and where they go
    "host copy": "cluster.d2h",
    "host memory traffic": "cluster.host_bandwidth",
    "write, O_DIRECT": "cluster.nvme",
    "read, O_DIRECT": "cluster.nvme_read",
    "store put rate": "storage.per_node",
    "store get rate": "storage.per_node_read",
}


def measured_rates(home: Path, nbytes: int, seconds: float) -> dict[str, float]:
    """Bytes/s by field, from the doctor's lines."""
    bounds: dict[str, Any] = {"seconds": seconds, "size_bytes": nbytes, "told": lambda _: None}
    found: list[Finding] = [
        *memory.measure({}, **bounds),
        *disk.measure(home / "local", {}, **bounds),
        *store.measure(str(home / "store"), {}, **bounds),
    ]
    rates = {}
    for each in found:
        for name, field in FIELDS.items():
            named = each.field == field or each.name == name
            if named and each.measured is not None and field not in rates:
                rates[field] = each.measured
    missing = sorted(set(FIELDS.values()) - set(rates))
    if missing:
        lines = "; ".join(f"{each.hop}/{each.name}: {each.note}" for each in found)
        raise SystemExit(f"doctor measured nothing for {', '.join(missing)}: {lines}")
    return rates


def job(home: Path, nbytes: int, saves: int) -> dict[str, list[float]]:
    """Seconds of each save of a real job: pause, until local, until durable; each drains alone."""
    import torch

    import forebay

    os.environ["FOREBAY_RUNTIME_DIR"] = f"/dev/shm/forebay-bench-{os.getpid()}"
    state = {"w": torch.randint(0, 255, (nbytes,), dtype=torch.uint8)}
    found: dict[str, list[float]] = {"pause": [], "local": [], "durable": []}
    with forebay.Checkpointer(
        str(home / "store"), local=str(home / "local"), keep=forebay.Keep(last=1)
    ) as checkpointer:
        checkpointer.prepare(state)
        for step in range(saves):
            began = time.perf_counter()
            snapshot = checkpointer.save(step, state)
            found["pause"].append(snapshot.pause_s)
            snapshot.wait("local", timeout_s=300)
            found["local"].append(time.perf_counter() - began)
            snapshot.wait("durable", timeout_s=300)
            found["durable"].append(time.perf_counter() - began)
    found["drain"] = [b - a for a, b in zip(found["local"], found["durable"], strict=True)]
    return found


def predicted(rates: dict[str, float], nbytes: int) -> dict[str, float]:
    """The same four, played: one GPU on one node, no peer, a drain without a budget."""
    flags = {field: f"{rate:.6g}B/s" for field, rate in rates.items()}
    flags |= {
        "model.params": str(nbytes),
        "model.bytes_per_param": "1",
        "cluster.gpus": "1",
        "cluster.gpus_per_node": "1",
        "storage.filesystem": flags["storage.per_node"],
        "storage.budget": "100%",
        "checkpoint.mirror": "no",
        "checkpoint.cadence": "10min",
        "failures.mtbf": "1e12s",
    }
    plan = work(resolve(flags=read_flags(flags)), best=False)
    tally = simulate(scenario_of(plan), runs=1, days=2).tally
    pause, local, durable = (
        each.quantile(0.5) / NS for each in (tally.pauses, tally.reached[1], tally.reached[3])
    )
    return {"pause": pause, "local": local, "durable": durable, "drain": durable - local}


def main() -> None:
    """Measure, predict, compare, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", default="256MB", help="of the checkpoint")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each of doctor's lines")
    parser.add_argument("--no-result", action="store_true", help="write no result")
    given = parser.parse_args()
    nbytes = parse_bytes(given.bytes)
    with tempfile.TemporaryDirectory(
        prefix="forebay-bench-", dir=os.environ.get("BENCH_DIR")
    ) as name:
        home = Path(name)
        (home / "local").mkdir()
        (home / "store").mkdir()
        before = measured_rates(home, nbytes, given.seconds)
        seen = job(home, nbytes, given.saves)
        after = measured_rates(home, nbytes, given.seconds)
    rates = {field: (before[field] + after[field]) / 2 for field in before}
    guess = predicted(rates, nbytes)
    rows: dict[str, Any] = {}
    for what in ("pause", "local", "drain", "durable"):
        real = statistics.median(seen[what])
        error = guess[what] / real - 1
        rows[what] = {"predicted_s": guess[what], "measured_s": real, "error": error}
        verdict = "within" if abs(error) <= WITHIN else "MISSED"
        print(f"{what:8} predicted {guess[what]:.4f} s, measured {real:.4f} s: ", end="")
        print(f"{error * 100:+.1f} %, {verdict} {WITHIN * 100:.0f} %")
    drift = max(abs(after[field] / before[field] - 1) for field in before)
    print(f"doctor's figures before and after differ by up to {drift * 100:.0f} %")
    if not given.no_result:
        result = {"bytes": nbytes, "saves": seen, "rates": rates, "drift": drift, "rows": rows}
        print(f"kept in {write_result('predict', result)}")


if __name__ == "__main__":
    main()
