"""Drain to a real S3 server: ``python -m bench.upload [throughput] [memory] [pace] [hang]``.

Each figure beside its limit, measured in the same run, on SeaweedFS on loopback, which shares the
cores with what is measured:

    throughput  an image sent by the store against the same bytes put by obstore alone, same parts
    memory      how much an agent grows, arenas aside, while it drains an image of 4 GB
    pace        bytes that leave the job's host in its busiest second, against the budget
    hang        step time of a training loop while the store hangs for 60 s, against before
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.machine import write_result
from forebay.testing.s3 import S3Server

IMAGE_BYTES = 512 * 2**20
ROUNDS = 5
LARGE_BYTES = 4 * 2**30
BUDGET_BYTES_PER_S = 40e6
PACED_BYTES = 1_000_000_000
HANG_S = 60.0
SAVE_EVERY = 20


@contextlib.contextmanager
def server() -> Iterator[S3Server]:
    """A server, with its keys in the environment, and a runtime directory of ours."""
    os.environ["FOREBAY_RUNTIME_DIR"] = f"/dev/shm/forebay-bench-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory(
            prefix="forebay-bench-", dir=os.environ.get("BENCH_DIR")
        ) as home,
        S3Server(Path(home) / "s3") as running,
    ):
        (Path(home) / "local").mkdir()
        os.environ.update(running.environment)
        yield running


def random_file(path: Path, nbytes: int) -> None:
    with path.open("wb") as file:
        for _ in range(nbytes // 2**20):
            file.write(os.urandom(2**20))


def throughput() -> dict[str, Any]:
    """Interleaved: obstore alone, ours, obstore alone, ours …"""
    import obstore
    from obstore.store import S3Store

    from forebay.storage.address import open_store
    from forebay.storage.multipart import plan_parts

    plan = plan_parts(IMAGE_BYTES)
    alone_s, ours_s = [], []
    with server() as running:
        image = running.directory.parent / "image"
        random_file(image, IMAGE_BYTES)
        with image.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        client = S3Store(
            "ckpt",
            prefix="alone",
            endpoint=running.endpoint,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        store = open_store(running.run_url("ours"))
        for number in range(-1, ROUNDS):  # the first of each warms up
            began = time.perf_counter()
            obstore.put(
                client,
                f"{number + 1}",
                view,
                chunk_size=plan.part_bytes,
                max_concurrency=plan.lanes,
            )
            middle = time.perf_counter()
            store.put_large(f"image-{number + 1}", view)
            ended = time.perf_counter()
            if number >= 0:
                alone_s.append(middle - began)
                ours_s.append(ended - middle)
            obstore.delete(client, f"{number + 1}")
            store.delete(f"image-{number + 1}")
    share = statistics.median(alone_s) / statistics.median(ours_s)
    print(
        f"throughput: obstore alone {IMAGE_BYTES / statistics.median(alone_s) / 1e6:.0f} MB/s, "
        f"ours {IMAGE_BYTES / statistics.median(ours_s) / 1e6:.0f} MB/s: {share:.2f} of it"
    )
    return {"bytes": IMAGE_BYTES, "obstore_s": alone_s, "ours_s": ours_s, "of_limit": share}


def own_bytes(pid: int) -> int:
    """Resident memory of a process without shared memory (the arenas)."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


class Watch:
    """Samples the agent's memory in a thread."""

    def __init__(self, pid: int) -> None:
        self.most = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            with contextlib.suppress(OSError):
                self.most = max(self.most, own_bytes(self._pid))

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.most


def agent_pid(checkpointer: Any) -> int:
    return int(checkpointer.status()["agent"].split()[1])


def memory() -> dict[str, Any]:
    """One small checkpoint, then a large one, with a local tier."""
    import torch

    import forebay

    with server() as running:
        local = running.directory.parent / "local"
        small = {"w": torch.ones(16 * 2**20, dtype=torch.uint8)}
        with forebay.Checkpointer(running.run_url("memory"), local=local) as checkpointer:
            checkpointer.save(1, small).wait("durable", timeout_s=300)
            pid = agent_pid(checkpointer)
            before = own_bytes(pid)
            large = {"w": torch.randint(0, 255, (LARGE_BYTES,), dtype=torch.uint8)}
            watch = Watch(pid)
            began = time.perf_counter()
            checkpointer.save(2, large).wait("durable", timeout_s=1800)
            took_s = time.perf_counter() - began
            grown = watch.end() - before
            assert agent_pid(checkpointer) == pid
    print(
        f"memory: agent {before / 1e6:.0f} MB after a small checkpoint, at most "
        f"{grown / 1e6:.1f} MB more while it drained {LARGE_BYTES / 1e9:.1f} GB "
        f"({LARGE_BYTES / took_s / 1e6:.0f} MB/s)"
    )
    return {"image_bytes": LARGE_BYTES, "before": before, "grown": grown, "seconds": took_s}


def paced_job(url: str, local: str) -> None:
    """The training job of ``pace``, in a network namespace of its own."""
    import torch

    import forebay

    state = {"w": torch.randint(0, 255, (PACED_BYTES,), dtype=torch.uint8)}
    with forebay.Checkpointer(
        url, local=local, drain_bytes_per_s=BUDGET_BYTES_PER_S
    ) as checkpointer:
        checkpointer.prepare(state)
        checkpointer.save(1, state).wait("durable", timeout_s=300)


@contextlib.contextmanager
def host() -> Iterator[tuple[str, str, Path]]:
    """A network namespace behind a link: its name, our address on the link, the link's counter."""
    name = f"fb{os.getpid() % 10000}"
    ours, theirs = f"{name}a", f"{name}b"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        ip("addr", "add", "10.231.7.1/30", "dev", ours)
        ip("link", "set", ours, "up")
        ip("-n", name, "addr", "add", "10.231.7.2/30", "dev", theirs)
        ip("-n", name, "link", "set", theirs, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name, "10.231.7.1", Path(f"/sys/class/net/{ours}/statistics/rx_bytes")
    finally:
        ip("netns", "del", name)


def busiest_second(samples: list[tuple[float, int]]) -> int:
    """Most bytes between two samples at most a second apart."""
    most = first = 0
    for at_s, count in samples:
        while samples[first][0] < at_s - 1.0:
            first += 1
        most = max(most, count - samples[first][1])
    return most


def pace() -> dict[str, Any]:
    """Seen on the wire: what leaves the job's network namespace. Needs root."""
    from forebay.testing.proxy import FaultProxy

    with (
        server() as running,
        host() as (name, address, counter),
        FaultProxy(running.endpoint, host=address) as proxy,
    ):
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        program = [sys.executable, "-m", "bench.upload", "paced-job"]
        local = running.directory.parent / "local"
        job = subprocess.Popen(
            ["ip", "netns", "exec", name, *program, running.run_url("pace"), str(local)]
        )
        samples = []
        while job.poll() is None:
            samples.append((time.monotonic(), int(counter.read_text())))
            time.sleep(0.005)
        assert job.returncode == 0
        busiest, arrived = busiest_second(samples), proxy.busiest_second()
        parts = [one for one in proxy.requests if "partNumber=" in one.query]
    took_s = max(one.ended_s or 0.0 for one in parts) - min(one.started_s for one in parts)
    mean = sum(one.body_bytes for one in parts) / took_s
    share = busiest / BUDGET_BYTES_PER_S
    print(
        f"pace: budget {BUDGET_BYTES_PER_S / 1e6:.0f} MB/s, mean {mean / 1e6:.1f} MB/s, "
        f"busiest second {busiest / 1e6:.1f} MB: {share:.3f} of the budget"
    )
    return {
        "budget_bytes_per_s": BUDGET_BYTES_PER_S,
        "mean_bytes_per_s": mean,
        "busiest_second_bytes": busiest,
        "busiest_second_at_the_receiver_bytes": arrived,
        "of_budget": share,
    }


def hang() -> dict[str, Any]:
    """A training loop that saves; the server stops answering, connections stay open."""
    import torch

    import forebay

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 1024)
    state = {"model": model, "optimizer": optimizer}
    before: list[float] = []
    during: list[float] = []
    saves: list[float] = []
    with server() as running:
        checkpointer = forebay.Checkpointer(
            running.run_url("hang"), local=running.directory.parent / "local"
        )

        def steps(until: float, into: list[float], number: int) -> int:
            while time.monotonic() < until:
                began = time.perf_counter()
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                into.append(time.perf_counter() - began)
                number += 1
                if number % SAVE_EVERY == 0:
                    saves.append(checkpointer.save(number, state).pause_s)
            return number

        number = steps(time.monotonic() + 5, [], 0)
        checkpointer.wait(timeout_s=120)
        number = steps(time.monotonic() + 20, before, number)
        running.suspend()
        number = steps(time.monotonic() + HANG_S, during, number)
        trouble = [line["phase"] for line in checkpointer.status()["open"]]
        running.resume()
        began = time.monotonic()
        checkpointer.save(number + 1, state).wait("durable", timeout_s=300)
        back_s = time.monotonic() - began
        checkpointer.close()
    ratio = statistics.median(during) / statistics.median(before)
    print(
        f"hang: step {statistics.median(before) * 1e3:.2f} ms with a store that answers, "
        f"{statistics.median(during) * 1e3:.2f} ms while it hangs for {HANG_S:.0f} s: "
        f"{ratio:.3f} x; {len(trouble)} snapshots waited; committed {back_s:.1f} s after its return"
    )
    return {
        "before_s": statistics.median(before),
        "during_s": statistics.median(during),
        "worst_during_s": max(during),
        "worst_before_s": max(before),
        "pause_s": saves,
        "of_limit": ratio,
        "durable_after_s": back_s,
    }


MEASURES = {"throughput": throughput, "memory": memory, "pace": pace, "hang": hang}


def main(names: list[str]) -> None:
    """Measure, print, keep: one result a measure."""
    if names[:1] == ["paced-job"]:
        paced_job(names[1], names[2])
        return
    for name in names or list(MEASURES):
        print(f"kept in {write_result(f'upload-{name}', MEASURES[name]())}")


if __name__ == "__main__":
    main(sys.argv[1:])
