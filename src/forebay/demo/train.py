"""The demo's training job, run on every rank by torchrun; the user's side of the API.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m forebay.demo.train ...

Writes into ``--out``: ``losses.jsonl`` (rank 0, a line a step), ``saved-<step>.<rank>`` (the pid,
written the moment ``save`` has returned), ``report-<rank>.json`` and, at the end,
``final.safetensors`` (rank 0, every parameter and optimizer tensor in full).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the usual name
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

import forebay
from forebay.demo.loader import make_loader
from forebay.demo.model import FULL, GPT, QUICK
from forebay.demo.text import Windows, open_text

if TYPE_CHECKING:
    from forebay.snapshot import Snapshot

SEED = 1234
COPY_ROUNDS = 9
CLOSE_TIMEOUT_S = 90.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ``--mode restore`` restores and gathers, without a step of training."""
    parser = argparse.ArgumentParser(prog="forebay.demo.train")
    parser.add_argument("--mode", choices=("train", "restore"), default="train")
    parser.add_argument("--store", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--steps", required=True, type=int)
    parser.add_argument("--every", required=True, type=int)
    parser.add_argument("--drain-bytes-per-s", type=float, default=None)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args(arguments)


def learning_rate(steps: int) -> Any:
    """Warm-up over a tenth of the steps, then half a cosine; a factor of the base rate."""
    warmup = max(1, steps // 10)

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (done - warmup) / max(1, steps - warmup))

    return factor


class Job:
    """Model, optimizer, schedule, loader and checkpointer of this rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        shape = QUICK if args.quick else FULL
        torch.manual_seed(SEED)  # the same initial weights on every rank
        self.model = GPT(shape)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        if self.world_size > 1:
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        self.scheduler = LambdaLR(self.optimizer, learning_rate(args.steps))
        windows = Windows(
            open_text(args.text), context=shape.context, rank=self.rank, world_size=self.world_size
        )
        self.loader = make_loader(windows, batch=args.batch, seed=SEED + self.rank)
        torch.manual_seed(SEED + 1 + self.rank)  # dropout is another one on every rank
        self.step = forebay.value(0)
        # A save here waits for a free slot, so that every run saves at the same steps.
        self.checkpointer = forebay.Checkpointer(
            args.store, on_full="wait", drain_bytes_per_s=args.drain_bytes_per_s
        )

    def state(self) -> dict[str, Any]:
        """What a restart on the same ranks needs to go on bit for bit."""
        return {
            **self.state_for_any_world(),
            "loader": forebay.per_rank(self.loader),
            "rng": forebay.per_rank(forebay.rng()),
        }

    def state_for_any_world(self) -> dict[str, Any]:
        """The part of it that does not depend on how many ranks there are."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "step": self.step,
        }

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """One step; returns the loss, averaged over all ranks."""
        logits = self.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / self.world_size


def train(job: Job) -> dict[str, Any]:
    """Resume, train to the last step, checkpoint every few; returns this rank's report."""
    args, state = job.args, job.state()
    resumed = job.checkpointer.restore(state)
    begin = 0 if resumed is None else resumed
    job.model.train()
    snapshots: list[tuple[float, Snapshot]] = []
    batches = iter(job.loader)
    with (args.out / "losses.jsonl").open("a", buffering=1) as losses:
        for step in range(begin + 1, args.steps + 1):
            inputs, targets = next(batches)
            loss = job.train_step(inputs, targets)
            if job.rank == 0:
                losses.write(json.dumps({"step": step, "loss": loss, "bits": loss.hex()}) + "\n")
            if step % args.every == 0 or step == args.steps:
                job.step.value = step
                began_s = time.time()
                snap = job.checkpointer.save(step, state)
                write_whole(args.out / f"saved-{step}.{job.rank}", str(os.getpid()))
                snapshots.append((began_s, snap))
    job.checkpointer.close(timeout_s=CLOSE_TIMEOUT_S)
    return {
        "resumed_step": resumed,
        "copy_s": copy_limit(max((snap.bytes for _, snap in snapshots), default=0)),
        "saves": [saved(began_s, snap) for began_s, snap in snapshots],
    }


def restore_only(job: Job) -> dict[str, Any]:
    """Restore on whatever number of ranks this is; returns this rank's report.

    The checkpoint also holds each rank's loader and RNG, which mean nothing on another number of
    ranks; ``strict=False`` leaves out what this state has no place for.
    """
    resumed = job.checkpointer.restore(job.state_for_any_world(), strict=False)
    job.checkpointer.close(timeout_s=CLOSE_TIMEOUT_S)
    return {"resumed_step": resumed, "copy_s": [], "saves": []}


def saved(began_s: float, snap: Snapshot) -> dict[str, Any]:
    """One save in numbers; ``durable_s``: from the call of ``save`` to the commit, if known."""
    committed_s = snap.status()["reached_s"].get("committed")
    return {
        "step": snap.step,
        "bytes": snap.bytes,
        "pause_s": snap.pause_s,
        "durable_s": None if committed_s is None else committed_s - began_s,
    }


def copy_limit(nbytes: int) -> list[float]:
    """Seconds of plain copies of ``nbytes`` into touched memory, all ranks at once as in a save."""
    if nbytes == 0:
        return []
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(COPY_ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return seconds


def gather(job: Job) -> dict[str, torch.Tensor]:
    """Every parameter and optimizer tensor in full, by name, on rank 0; elsewhere empty."""
    found: dict[str, torch.Tensor] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if job.rank == 0:
            found[name] = whole.detach().clone().contiguous()

    for name, parameter in job.model.named_parameters():
        add(f"model.{name}", parameter)
        for key, value in sorted(job.optimizer.state[parameter].items()):
            add(f"optimizer.{name}.{key}", torch.as_tensor(value))
    rates = torch.tensor(job.scheduler.get_last_lr(), dtype=torch.float64)
    add("scheduler.rate", rates)
    add("step", torch.tensor([job.scheduler.last_epoch, job.step.value]))
    return found


def write_whole(path: Path, text: str) -> None:
    """Write a small file that a reader sees whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.rename(path)


def main(arguments: list[str] | None = None) -> None:
    """One rank, from start to end."""
    args = parse(arguments)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    try:
        job = Job(args)
        report = train(job) if args.mode == "train" else restore_only(job)
        report |= {"world_size": job.world_size, "parameters": job.parameters}
        tensors = gather(job)
        if job.rank == 0:
            save_file(tensors, args.out / "final.safetensors")
        write_whole(args.out / f"report-{job.rank}.json", json.dumps(report))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
