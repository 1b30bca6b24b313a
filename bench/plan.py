"""How long ``forebay plan`` takes to answer, beside Python itself. ``python -m bench.plan``."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from bench.machine import write_result

ROUNDS = 15
TARGET_S = 0.5


def timed(words: list[str]) -> float:
    """Seconds of one run."""
    began_s = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - began_s


def main() -> None:
    kinds = {
        "python": [sys.executable, "-c", "pass"],
        "plan": [sys.executable, "-m", "forebay.cli", "plan"],
        "plan --json": [sys.executable, "-m", "forebay.cli", "plan", "--json"],
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, words in kinds.items():  # interleaved: what disturbs one disturbs all
            found[name].append(timed(words))
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, values in found.items():
        print(
            f"{name:12} median {medians[name] * 1e3:6.0f} ms, slowest {max(values) * 1e3:6.0f} ms"
        )
    print(f"target: plan under {TARGET_S * 1e3:.0f} ms")
    write_result("plan", {"rounds": ROUNDS, "target_s": TARGET_S, "median_s": medians})


if __name__ == "__main__":
    main()
