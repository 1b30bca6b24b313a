"""What a rank process does in a test, and the nursery that makes such processes quickly.

Run as a program this is the nursery: it imports torch once and forks a process for each line of
JSON on its standard input, ``{"worker", "arguments", "env", "log"}``, answering with its pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import forebay
from forebay.config import Settings

RANK, WORLD = 0, 1  # set in each rank process


def _imports() -> None:
    """Load in the nursery what nearly every worker needs."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    import forebay.checkpointer  # noqa: F401


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
        self.up = torch.nn.Linear(width, 3 * width)
        self.down = torch.nn.Linear(3 * width, width)
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


def save_trained(url: str, layout: str, step: int, width: int = 12, **options: Any) -> Any:
    """Train three steps, save, wait for the commit; rank 0 returns all tensors."""
    group()
    model, optimizer = build(layout, width)
    for number in range(3):
        train_step(model, optimizer, number)
    with forebay.Checkpointer(url, **options) as checkpointer:
        state = {"model": model, "optimizer": optimizer, "step": forebay.value(step)}
        checkpointer.prepare(state)
        checkpointer.save(step, state).wait("durable", timeout_s=60)
        return full_tensors(model, optimizer)


def load_trained(url: str, layout: str, step: int, width: int = 12) -> Any:
    """Restore into a freshly built model and optimizer and return all tensors."""
    group()
    model, optimizer = build(layout, width)
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
) -> Any:
    """Save what is given by rank: ``{name: [value of rank 0, ...]}``; lists are tensors."""
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


def save_own(url: str, steps: list[int], tensors: int, fixed: str) -> Any:
    """Save steps one by one, each rank its own tensors; after the first, no more faults."""
    group()
    half = tensors // 2
    state = {
        "model": {f"t{i}": forebay.per_rank(torch.full((10,), float(i))) for i in range(half)},
        "optimizer": {
            f"t{i}": forebay.per_rank(torch.full((10,), float(i))) for i in range(half, tensors)
        },
    }
    checkpointer = forebay.Checkpointer(url)
    checkpointer.prepare(state)
    outcomes = []
    for number, step in enumerate(steps):
        snapshot = checkpointer.save(step, state)
        try:
            snapshot.wait("durable", timeout_s=60)
            outcomes.append("committed")
        except forebay.ForebayError as error:
            outcomes.append(f"{error.kind}: {error}")
        dist.barrier()
        if number == 0 and RANK == 0:
            script = Path(fixed)
            script.with_suffix(".new").write_text("[]")
            script.with_suffix(".new").rename(script)
        dist.barrier()
    with contextlib.suppress(forebay.IncompleteError):
        checkpointer.close()
    return outcomes


def shapes_state(fill: bool) -> dict[str, Any]:
    """Sharded and plain tensors of every awkward size; zeros unless ``fill``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    flat = init_device_mesh("cpu", (WORLD,))
    rows = 2 if WORLD % 2 == 0 else 1
    square = init_device_mesh("cpu", (rows, WORLD // rows))

    def numbered(*shape: int) -> torch.Tensor:
        tensor = torch.zeros(shape)
        if fill and tensor.numel():
            tensor += torch.arange(1.0, tensor.numel() + 1).view(shape)
        return tensor

    return {
        "six": distribute_tensor(numbered(6), flat, [Shard(0)]),
        "three": distribute_tensor(numbered(3), flat, [Shard(0)]),
        "many": distribute_tensor(numbered(512), flat, [Shard(0)]),
        "flat0": distribute_tensor(numbered(0, 4), flat, [Shard(0)]),
        "flat1": distribute_tensor(numbered(3, 0), flat, [Shard(0)]),
        "both": distribute_tensor(numbered(5, 7), square, [Shard(0), Shard(1)]),
        "swapped": distribute_tensor(numbered(5, 7), square, [Shard(1), Shard(0)]),
        "twice": distribute_tensor(numbered(11), square, [Shard(0), Shard(0)]),
        "mixed": distribute_tensor(numbered(5, 7), square, [Replicate(), Shard(1)]),
        "large": distribute_tensor(numbered(300, 1000), flat, [Replicate()]),
        "scalar": numbered(),
        "plain": numbered(4, 3),
    }


def save_shapes(url: str) -> Any:
    """Save the awkward sizes."""
    group()
    with forebay.Checkpointer(url) as checkpointer:
        state = shapes_state(True)
        checkpointer.prepare(state)
        checkpointer.save(1, state).wait("durable", timeout_s=60)
    return True


def load_shapes(url: str) -> Any:
    """Restore the awkward sizes and compare every local tensor."""
    from torch.distributed.tensor import DTensor

    group()
    target, expected = shapes_state(False), shapes_state(True)
    with forebay.Checkpointer(url) as checkpointer:
        assert checkpointer.restore(target) == 1
    for name, tensor in target.items():
        wanted = expected[name]
        if isinstance(tensor, DTensor):
            tensor, wanted = tensor.to_local(), wanted.to_local()
        assert torch.equal(tensor, wanted), (name, tensor, wanted)
    return True


def few_state(elements: int, fill: bool) -> dict[str, Any]:
    """One sharded tensor with fewer elements than ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(1.0, elements + 1) if fill else torch.zeros(elements)
    return {"w": distribute_tensor(whole, init_device_mesh("cpu", (WORLD,)), [Shard(0)])}


def save_few(url: str, elements: int) -> Any:
    """Save a tensor of which some ranks hold nothing."""
    group()
    with forebay.Checkpointer(url) as checkpointer:
        checkpointer.save(1, few_state(elements, True)).wait("durable", timeout_s=60)
    return True


def load_few(url: str, elements: int) -> Any:
    """Restore it on any number of ranks."""
    group()
    target = few_state(elements, False)
    with forebay.Checkpointer(url) as checkpointer:
        assert checkpointer.restore(target) == 1
    return bool(torch.equal(target["w"].to_local(), few_state(elements, True)["w"].to_local()))


def save_growing(url: str) -> Any:
    """Two saves; the second has one more tensor on rank 1 only, and a longer byte entry."""
    group()
    state: dict[str, Any] = {"a": torch.ones(6), "b": torch.full((2, 3), 2.0), "bytes": b"x" * 100}
    with forebay.Checkpointer(url) as checkpointer:
        checkpointer.prepare(state)
        checkpointer.save(1, state).wait("durable", timeout_s=60)
        state["bytes"] = b"y" * 150
        if RANK == 1:
            state["late"] = torch.full((5,), 3.0)
        checkpointer.save(2, state).wait("durable", timeout_s=60)
    return "committed"


def load_growing(url: str) -> Any:
    """Restore both saves."""
    group()
    state: dict[str, Any] = {"a": torch.zeros(6), "b": torch.zeros(2, 3), "bytes": b""}
    with forebay.Checkpointer(url) as checkpointer:
        assert checkpointer.restore(state, step=1) == 1
        assert state["bytes"] == b"x" * 100
        if RANK == 1:
            state["late"] = torch.zeros(5)
        assert checkpointer.restore(state) == 2
    assert state["bytes"] == b"y" * 150
    assert torch.equal(state["b"], torch.full((2, 3), 2.0))
    return RANK == 0 or bool(torch.equal(state["late"], torch.full((5,), 3.0)))


def save_refused(url: str) -> Any:
    """Try to checkpoint under the name of a live job."""
    try:
        forebay.Checkpointer(url).prepare({"w": torch.ones(1)})
    except forebay.ForebayError as error:
        return f"{error.kind}: {error}"
    return "not refused"


def save_or_say(url: str, **options: Any) -> Any:
    """Save one step; "committed", or the error."""
    try:
        settings = Settings(**options)
        with forebay.Checkpointer(url, settings=settings) as checkpointer:
            checkpointer.save(1, {"w": torch.ones(10)}).wait("durable", timeout_s=60)
    except forebay.ForebayError as error:
        return f"{error.kind}: {error}"
    return "committed"


def save_late(url: str, late_rank: int, go: str, done: str) -> Any:
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


def restore_alone(url: str, attempt: str) -> Any:
    """Two ranks without a process group: save, then restore with and without naming a step."""
    state = {"w": torch.ones(3), "own": forebay.per_rank(torch.full((2,), float(RANK)))}
    with forebay.Checkpointer(url, attempt=attempt) as checkpointer:
        checkpointer.save(1, state).wait("durable", timeout_s=60)
        try:
            checkpointer.restore(state)
            unnamed = "restored"
        except forebay.ForebayError as error:
            unnamed = f"{error.kind}: {error}"
        return [unnamed, checkpointer.restore(state, step=1)]


def save_without(url: str, missing: int) -> Any:
    """All save step 1; then one rank dies and the others save step 2."""
    group()
    state = {"w": forebay.per_rank(torch.ones(100))}
    checkpointer = forebay.Checkpointer(url)
    checkpointer.prepare(state)
    checkpointer.save(1, state).wait("durable", timeout_s=60)
    dist.barrier()
    if missing == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        checkpointer.save(2, state).wait("durable", timeout_s=60)
    except forebay.ForebayError as error:
        Path(os.environ["RESULT"]).write_text(json.dumps(f"{error.kind}: {error}"))
    os._exit(0)


def save_and_hang(url: str, step: int, marker: str, nbytes: int, **options: Any) -> Any:
    """Save, say so, then stay until killed."""
    if WORLD > 1:
        group()
    state = {"w": forebay.per_rank(torch.arange(nbytes // 4, dtype=torch.int32) + RANK)}
    keep_last = options.pop("keep_last", None)
    keep = None if keep_last is None else forebay.Keep(last=keep_last)
    checkpointer = forebay.Checkpointer(url, keep=keep, **options)
    checkpointer.prepare(state)
    checkpointer.save(step, state)
    Path(f"{marker}-{RANK}").touch()
    time.sleep(600)


def train_on(home: str, url: str | None, every: int, nap_s: float, **options: Any) -> Any:
    """Train, with dropout of this rank's own, until the step that the file ``stop`` names.

    Logs each loss, and each step that was told to be committed; resumes where there is something
    to. Without a ``url`` nothing is saved. Rank 0 returns all tensors.
    """
    group()
    model, optimizer = build("fsdp", width=6)
    torch.manual_seed(100 + RANK)
    done = forebay.value(0)
    state = {
        "model": model,
        "optimizer": optimizer,
        "step": done,
        "rng": forebay.per_rank(forebay.rng()),
    }
    checkpointer = None
    if url is not None:
        checkpointer = forebay.Checkpointer(url, on_full="wait", **options)
        checkpointer.restore(state)
    stop, taken = Path(home, "stop"), []
    with (
        Path(home, f"losses-{RANK}").open("a", buffering=1) as losses,
        Path(home, f"committed-{RANK}").open("a", buffering=1) as committed,
    ):
        while not (stop.exists() and done.value >= int(stop.read_text())):
            done.value += 1
            tokens = torch.randint(0, 13, (4, 5))
            loss = model(torch.nn.functional.dropout(tokens.float(), 0.1).long() % 13)
            loss = loss.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.write(f"{done.value} {float(loss).hex()}\n")
            time.sleep(nap_s)
            if checkpointer is not None and done.value % every == 0:
                taken.append(checkpointer.save(done.value, state))
            for snapshot in [one for one in taken if one.status()["committed"]]:
                committed.write(f"{snapshot.step}\n")
                taken.remove(snapshot)
    if checkpointer is not None:
        checkpointer.close(timeout_s=60)
    return full_tensors(model, optimizer)


def be_rank(order: dict[str, Any]) -> None:
    """Run one worker in this process and write what it returns."""
    global RANK, WORLD
    os.environ.update(order["env"])
    RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    worker: Callable[..., Any] = globals()[order["worker"]]
    result = worker(**order["arguments"])
    Path(os.environ["RESULT"]).write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """Be the nursery until standard input ends."""
    _imports()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(log, 1)
                os.dup2(log, 2)
                be_rank(order)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                Path(order["env"]["RESULT"] + ".status").write_text(str(status))
                os._exit(status)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
