"""Time to durable against an O_DIRECT write of the same bytes: ``python -m bench.drain``.

One rank, one image, a directory as the durable tier. The limit is measured before each save in the
same directory: O_DIRECT writes of 4 MiB from touched, page-aligned memory, and one fsync.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from pathlib import Path

from bench.machine import write_result

NBYTES = 1_000_000_000
SAVES = 5
BLOCK_BYTES = 4 * 2**20


def direct_write_s(path: Path, memory: mmap.mmap) -> float:
    """Write all of ``memory`` with O_DIRECT and flush; seconds."""
    view = memoryview(memory)
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    for at in range(0, len(view), BLOCK_BYTES):
        os.pwrite(fd, view[at : at + BLOCK_BYTES], at)
    os.fsync(fd)
    os.close(fd)
    took = time.perf_counter() - began
    path.unlink()
    view.release()
    return took


def main() -> None:
    """Measure, print, keep."""
    import torch

    import forebay

    os.environ["FOREBAY_RUNTIME_DIR"] = f"/dev/shm/forebay-bench-{os.getpid()}"
    memory = mmap.mmap(-1, NBYTES // BLOCK_BYTES * BLOCK_BYTES)
    state = {"w": torch.randint(0, 255, (len(memory),), dtype=torch.uint8)}
    memory.write(state["w"].numpy().tobytes())
    limits, durables = [], []
    with (
        tempfile.TemporaryDirectory(
            prefix="forebay-bench-", dir=os.environ.get("BENCH_DIR")
        ) as home,
        forebay.Checkpointer(f"{home}/run", keep=forebay.Keep(last=1)) as checkpointer,
    ):
        checkpointer.prepare(state)
        for step in range(SAVES):
            limits.append(direct_write_s(Path(home) / "limit", memory))
            snapshot = checkpointer.save(step, state)
            staged = time.perf_counter()
            snapshot.wait("durable", timeout_s=300)
            durables.append(time.perf_counter() - staged)
    limit, durable = statistics.median(limits), statistics.median(durables)
    print(f"O_DIRECT write {limit:.3f} s, save to committed {durable:.3f} s: ", end="")
    print(f"{limit / durable:.2f} of the limit ({len(memory) / durable / 1e6:.0f} MB/s)")
    result = {
        "bytes": len(memory),
        "direct_write_s": limits,
        "durable_s": durables,
        "of_limit": limit / durable,
    }
    print(f"kept in {write_result('drain', result)}")


if __name__ == "__main__":
    main()
