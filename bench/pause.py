"""The pause of a save against a plain copy of the same bytes: ``python -m bench.pause``.

Two ranks of 350 MB on one machine. In each rank, before every save, a plain copy of the same
tensors into memory that was touched before, by the same number of threads, both ranks at once as
the saves are. The first save counts. The drain of one save ends before the next begins.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench.machine import write_result


def run_rank(url: str, nbytes: int, tensors: int, saves: int) -> dict[str, Any]:
    """Measure on one rank; ``url`` is the run."""
    import torch
    import torch.distributed as dist

    import forebay

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = f"file://{url}.rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    state = {f"t{i}": forebay.per_rank(torch.randn(nbytes // 4 // tensors)) for i in range(tensors)}
    sources = [box.item for box in state.values()]
    targets = [torch.zeros_like(source) for source in sources]

    def plain_copy() -> float:
        began = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return time.perf_counter() - began

    plain_copy()
    pauses, walls, copies = [], [], []
    with forebay.Checkpointer(url) as checkpointer:
        checkpointer.prepare(state)
        for step in range(saves):
            dist.barrier()
            copies.append(plain_copy())
            dist.barrier()
            began = time.perf_counter()
            snapshot = checkpointer.save(step, state)
            walls.append(time.perf_counter() - began)
            pauses.append(snapshot.pause_s)
            snapshot.wait("durable", timeout_s=300)
            dist.barrier()
    return {"rank": rank, "pause_s": pauses, "save_call_s": walls, "plain_copy_s": copies}


def measure(nbytes: int, tensors: int, saves: int, ranks: int = 2) -> dict[str, Any]:
    """Run all ranks and sum up: the slowest rank of each save counts."""
    with tempfile.TemporaryDirectory(
        prefix="forebay-bench-", dir=os.environ.get("BENCH_DIR")
    ) as home:
        arguments = [f"{home}/run", str(nbytes), str(tensors), str(saves)]
        env = os.environ | {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
            "FOREBAY_RUNTIME_DIR": f"/dev/shm/forebay-bench-{os.getpid()}",
        }
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.pause", "--rank", *arguments],
                env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        results = []
        for process in processes:
            out, _ = process.communicate(timeout=600)
            if process.returncode:
                raise SystemExit(f"a rank ended with status {process.returncode}")
            results.append(json.loads(out.splitlines()[-1]))
    slowest = [max(r["save_call_s"][i] for r in results) for i in range(saves)]
    limits = [max(r["plain_copy_s"][i] for r in results) for i in range(saves)]
    limit = statistics.median(limits)
    return {
        "bytes_per_rank": nbytes,
        "tensors": tensors,
        "ranks": ranks,
        "save_s": slowest,
        "plain_copy_s": limits,
        "ratio_median": statistics.median(slowest) / limit,
        "ratio_first": slowest[0] / limit,
        "ratio_worst": max(slowest) / limit,
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--saves", type=int, default=10)
    given = parser.parse_args()
    if given.rank:
        url, nbytes, tensors, saves = given.rest
        print(json.dumps(run_rank(url, int(nbytes), int(tensors), int(saves))))
        return
    cases = {
        "350 MB a rank in 50 tensors": measure(350_000_000, 50, given.saves),
        "350 MB a rank in 1,000 tensors": measure(350_000_000, 1000, given.saves),
    }
    print(f"{'case':34} {'copy ms':>8} {'save ms':>8} {'first':>6} {'median':>7} {'worst':>6}")
    for name, case in cases.items():
        copy_ms = 1e3 * statistics.median(case["plain_copy_s"])
        save_ms = 1e3 * statistics.median(case["save_s"])
        print(
            f"{name:34} {copy_ms:8.1f} {save_ms:8.1f} {case['ratio_first']:5.2f}x "
            f"{case['ratio_median']:6.2f}x {case['ratio_worst']:5.2f}x"
        )
    print(f"kept in {write_result('pause', {'cases': cases})}")


if __name__ == "__main__":
    main()
