"""The control path at 64 to 16,384 ranks, beside DCP's: ``python -m bench.scale``.

Llama 3 405B as slices without tensors, under TP8 x PP16 x FSDP and under FSDP alone. Each measure
is a process of its own, on one core, over a directory (``--store s3``: a real S3 server).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import RESULTS, write_result

MESHES = {
    "tp-pp-fsdp": {64: (8, 2, 4), 512: (8, 4, 16), 4096: (8, 16, 32), 16384: (8, 16, 128)},
    "fsdp": {n: (1, 1, n) for n in (64, 512, 4096, 16384)},
}
HALF = {64: (4, 2, 4), 512: (4, 4, 16), 4096: (4, 16, 32), 16384: (4, 16, 128)}
FEW = (1, 1, 8)
SLICES = "slices"

ROWS = (
    ("slices", "slices", 1.0, ""),
    ("one record", "record_bytes", 1e3, "kB"),
    ("all records", "records_bytes", 1e6, "MB"),
    ("index", "index_bytes", 1e6, "MB"),
    ("index without digests", "index_without_digests_bytes", 1e6, "MB"),
    ("manifest", "manifest_bytes", 1e3, "kB"),
    ("seal of a node", "seal_s", 1e-3, "ms"),
    ("records as they arrive", "arrivals_s", 1.0, "s"),
    ("after the last record", "after_last_s", 1.0, "s"),
    ("committer's memory", "commit_peak_bytes", 1e6, "MB"),
    ("same layout: plan of a rank", "same_plan_s", 1e-3, "ms"),
    ("same layout: a rank reads", "same_rank_bytes", 1e3, "kB"),
    ("half the ranks: plan of a rank", "half_plan_s", 1.0, "s"),
    ("half the ranks: a node reads", "half_node_bytes", 1e6, "MB"),
    ("8 ranks: plan of a rank", "few_plan_s", 1.0, "s"),
    ("8 ranks: the node reads", "few_node_bytes", 1e6, "MB"),
    ("all ranks' metadata, same layout", "same_share", 1e-2, "% of payload"),
    ("all ranks' metadata, half the ranks", "half_share", 1e-2, "% of payload"),
    ("DCP: global plan and check", "dcp_s", 1.0, "s"),
    ("DCP: metadata, read by every rank", "dcp_metadata_bytes", 1e6, "MB"),
    ("DCP: planner's memory", "dcp_peak_bytes", 1e6, "MB"),
)


def ask(measure: str, order: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """One measure in a process of its own; why there is none, when it does not end well."""
    words = [sys.executable, "-m", "bench.scale_parts", json.dumps(order | {"measure": measure})]
    env = os.environ | {"OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=limit_s, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return {f"{measure}_why": f"did not end within {limit_s:g} s"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no word"]
        return {f"{measure}_why": f"ended with {done.returncode}: {last[0][:200]}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@contextmanager
def place(kind: str) -> Iterator[tuple[str, str]]:
    """A directory to work in, and the URL of a run below it or on an S3 server."""
    with tempfile.TemporaryDirectory(
        prefix="forebay-scale-", dir=os.environ.get("BENCH_DIR")
    ) as home:
        if kind == "file":
            yield home, f"{home}/run"
            return
        from forebay.testing.s3 import S3Server

        with S3Server(Path(home) / "server") as server:
            os.environ |= server.environment
            yield home, "s3://ckpt/scale"


def measure(
    mesh: tuple[int, ...], half: tuple[int, ...], kind: str, limit_s: float, dcp_slices: int
) -> dict[str, Any]:
    """Everything of one size of one layout."""
    with place(kind) as (home, url):
        order = {"mesh": mesh, "home": home, "store": url, "rank": 3, "planned": 8}
        found = ask("write", order, 6 * limit_s)
        if "write_why" in found:
            return found
        order["nodes"] = found["nodes"]
        found |= ask("seal", order, limit_s)
        commit = ask("commit", order, limit_s)
        found |= commit | {"commit_peak_bytes": commit.get("peak_bytes")}
        if "commit_why" in commit:
            return found
        found |= ask("same", order, limit_s)
        for name, target, planned in (("half", half, 8), ("few", FEW, 1)):
            answer = ask("reshard", order | {"target": target, "planned": planned}, limit_s)
            found |= {key.replace("reshard", name): value for key, value in answer.items()}
        found |= shares(found)
        if found["slices"] <= dcp_slices:
            found |= ask("dcp", order, limit_s)
            if "dcp_global_s" in found:
                found["dcp_s"] = found["dcp_global_s"] + found["dcp_validate_s"]
        else:
            found["dcp_why"] = f"{found['slices']} slices are more than {dcp_slices}"
    return found


def shares(found: dict[str, Any]) -> dict[str, float]:
    """What all ranks read of metadata, each node once, beside the payload."""
    payload, answer = found["payload_bytes"], {}
    if "same_rank_bytes" in found:
        answer["same_share"] = found["same_rank_bytes"] * found["nodes"] / payload
    if "half_node_bytes" in found:
        answer["half_share"] = found["half_node_bytes"] * found["half_nodes"] / payload
    return answer


def exponent(found: dict[int, dict[str, Any]], key: str) -> float | None:
    """By which power of the slices something grows between the two largest sizes that have it."""
    have = [n for n in sorted(found) if found[n].get(key)]
    if len(have) < 2:
        return None
    small, large = found[have[-2]], found[have[-1]]
    grown = math.log(large[SLICES] / small[SLICES])
    return math.log(large[key] / small[key]) / grown if grown else None


def table_of(layout: str, found: dict[int, dict[str, Any]]) -> Table:
    """One layout: a column for each size, and the growth."""
    table = Table(title=f"Llama 3 405B, {layout}")
    table.add_column("")
    for ranks in sorted(found):
        table.add_column(f"{ranks:,} ranks", justify="right")
    table.add_column("grows as slices^", justify="right")
    for title, key, unit, name in ROWS:
        cells = [found[n].get(key) for n in sorted(found)]
        power = exponent(found, key) if key != SLICES else None
        shown = ["-" if cell is None else f"{cell / unit:,.3g} {name}" for cell in cells]
        if key == SLICES:
            shown = ["-" if cell is None else f"{cell:,}" for cell in cells]
        table.add_row(title, *shown, "" if power is None else f"{power:.2f}")
    return table


def plot(results: dict[str, dict[int, dict[str, Any]]]) -> Path:
    """Time and bytes against slices, log by log: a straight line of slope 1 is linear."""
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for layout, found in results.items():
        for title, key, unit, name in ROWS:
            if key in ("after_last_s", "arrivals_s", "half_plan_s", "few_plan_s", "dcp_s"):
                points = [(f[SLICES], f[key] / unit) for f in found.values() if f.get(key)]
                xs, ys = [x for x, _ in points], [y for _, y in points]
                line = f"{layout}: {title} ({name})"
                figure.add_trace(Scatter(x=xs, y=ys, name=line, mode="lines+markers"))
    figure.update_xaxes(type="log", title="slices of the checkpoint")
    figure.update_yaxes(type="log", title="seconds, one core")
    path = RESULTS / "scale.html"
    figure.write_html(path, include_plotlyjs=True)
    return path


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="64,512,4096,16384")
    parser.add_argument("--layouts", default=",".join(MESHES))
    parser.add_argument("--store", choices=["file", "s3"], default="file")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for one measure")
    parser.add_argument("--dcp-slices", type=int, default=1_000_000, help="the most that DCP plans")
    parser.add_argument("--name", default="scale", help="of the result's file")
    given = parser.parse_args()
    console, results = Console(), {}
    for layout in given.layouts.split(","):
        found: dict[int, dict[str, Any]] = {}
        results[layout] = found
        for ranks in map(int, given.ranks.split(",")):
            one = measure(
                MESHES[layout][ranks], HALF[ranks], given.store, given.limit_s, given.dcp_slices
            )
            found[ranks] = one
            why = {key: value for key, value in one.items() if key.endswith("_why")}
            console.print(f"{layout}, {ranks:,} ranks: done {why or ''}")
            write_result(given.name, {"store": given.store, "layouts": results})
        console.print(table_of(layout, found))
    console.print(f"{plot(results)}")


if __name__ == "__main__":
    main()
