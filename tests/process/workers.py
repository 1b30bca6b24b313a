"""What a rank process does in a test: run as ``workers.py NAME JSON``, writes its result as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import forebay

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def group() -> None:
    """Join the gloo group of all ranks of this job."""
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=RANK, world_size=WORLD
    )


def wait_for_file(path: str, timeout_s: float = 60.0) -> None:
    """Return once another process has made ``path``."""
    deadline = time.monotonic() + timeout_s
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {path} after {timeout_s} s")
        time.sleep(0.01)


class TinyModel(torch.nn.Module):
    """Two layers, a norm, a tied head and a buffer: uneven sizes on purpose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, width)
        self.up = torch.nn.Linear(width, 3 * width + 1)
        self.down = torch.nn.Linear(3 * width + 1, width)
        self.norm = torch.nn.LayerNorm(width)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.norm(x + self.down(torch.relu(self.up(x)))) * self.scale[0]


def build(layout: str, width: int = 12) -> tuple[TinyModel, torch.optim.Optimizer]:
    """The model under a layout (``plain``, ``fsdp``, ``hsdp``, ``fsdp_tp``) and its AdamW."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = TinyModel(width)
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    elif layout == "fsdp_tp":
        tp = 2 if WORLD % 2 == 0 else 1
        mesh = init_device_mesh("cpu", (WORLD // tp, tp), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: TinyModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One optimizer step on the same batch on every rank."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 13, (4, 5), generator=generator)
    model(tokens).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def full_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every parameter and optimizer tensor, whole, as lists of bytes."""
    from torch.distributed.tensor import DTensor

    found: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = whole.detach().contiguous().numpy().tobytes().hex()
    names = {id(p): n for n, p in model.named_parameters()}
    for parameter, slots in optimizer.state.items():
        for key, tensor in slots.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            data = whole.detach().contiguous().numpy().tobytes().hex()
            found[f"{names[id(parameter)]}:{key}"] = data
    return found


def save_trained(url: str, layout: str, step: int, **options: Any) -> Any:  # noqa: ANN401
    """Train three steps, save, wait for the commit; rank 0 returns all tensors."""
    group()
    model, optimizer = build(layout)
    for number in range(3):
        train_step(model, optimizer, number)
    with forebay.Checkpointer(url, **options) as checkpointer:
        state = {"model": model, "optimizer": optimizer, "step": forebay.value(step)}
        checkpointer.prepare(state)
        checkpointer.save(step, state).wait("durable", timeout_s=60)
        return full_tensors(model, optimizer)


def load_trained(url: str, layout: str, step: int) -> Any:  # noqa: ANN401
    """Restore into a freshly built model and optimizer and return all tensors."""
    group()
    model, optimizer = build(layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(7.0)
    box = forebay.value(0)
    with forebay.Checkpointer(url) as checkpointer:
        state = {"model": model, "optimizer": optimizer, "step": box}
        restored = checkpointer.restore(state)
        assert restored == step == box.value, (restored, step, box.value)
        report = checkpointer.last_restore
        assert report is not None
        return full_tensors(model, optimizer)


def save_dict(
    url: str, step: int, values: dict[str, Any], grouped: bool = True, **options: Any
) -> Any:  # noqa: ANN401
    """Save tensors and values given by rank: ``{name: [value of rank 0, ...]}``; lists are tensors."""
    if grouped:
        group()
    state: dict[str, Any] = {}
    for name, by_rank in values.items():
        mine = by_rank[RANK]
        if mine is not None:
            state[name] = torch.tensor(mine) if isinstance(mine, list) else mine
    checkpointer = forebay.Checkpointer(url, **options)
    checkpointer.prepare(state)
    snapshot = checkpointer.save(step, state)
    try:
        snapshot.wait("durable", timeout_s=60)
        outcome = "committed"
    except forebay.ForebayError as error:
        outcome = f"{error.kind}: {error}"
    try:
        checkpointer.close()
    except forebay.ForebayError as error:
        outcome += f" | close {error.kind}"
    return outcome


def save_late(url: str, late_rank: int, go: str, done: str) -> Any:  # noqa: ANN401
    """All ranks save at once, but one only when the others have finished their save call."""
    group()
    state = {"w": torch.ones(1000), "own": forebay.per_rank(torch.full((3,), float(RANK)))}
    with forebay.Checkpointer(url) as checkpointer:
        checkpointer.prepare(state)
        if late_rank == RANK:
            for rank in range(WORLD):
                if rank != late_rank:
                    wait_for_file(f"{done}-{rank}")
        snapshot = checkpointer.save(1, state)
        Path(f"{done}-{RANK}").touch()
        snapshot.wait("durable", timeout_s=60)
    return "committed"


def save_and_hang(url: str, step: int, marker: str, nbytes: int, **options: Any) -> Any:  # noqa: ANN401
    """Save, say so, then stay until killed."""
    if WORLD > 1:
        group()
    state = {"w": forebay.per_rank(torch.arange(nbytes // 4, dtype=torch.int32) + RANK)}
    checkpointer = forebay.Checkpointer(url, **options)
    checkpointer.prepare(state)
    checkpointer.save(step, state)
    Path(f"{marker}-{RANK}").touch()
    time.sleep(600)


def pause_ratio(url: str, nbytes: int, saves: int) -> Any:  # noqa: ANN401
    """Pauses of several saves and the plain copy of the same bytes, in the same process."""
    group()
    count = 50
    state = {f"t{i}": forebay.per_rank(torch.randn(nbytes // 4 // count)) for i in range(count)}
    target = [torch.zeros_like(box.item) for box in state.values()]
    sources = [box.item for box in state.values()]

    def plain() -> float:
        began = time.perf_counter()
        for t, s in zip(target, sources, strict=True):
            t.copy_(s)
        return time.perf_counter() - began

    plain()
    with forebay.Checkpointer(url) as checkpointer:
        checkpointer.prepare(state)
        pauses, limits = [], []
        for step in range(saves):
            dist.barrier()
            limits.append(plain())
            dist.barrier()
            snapshot = checkpointer.save(step, state)
            pauses.append(snapshot.pause_s)
            snapshot.wait("durable", timeout_s=120)
    return {"pause_s": pauses, "copy_s": limits}


def main() -> None:
    """Run one worker by name and write what it returns."""
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    worker: Callable[..., Any] = globals()[name]
    result = worker(**arguments)
    Path(os.environ["RESULT"]).write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
