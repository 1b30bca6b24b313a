"""Train a small model with FSDP2 and Forebay checkpoints; run it again to resume.

    torchrun --nproc-per-node 4 examples/train_fsdp2.py [DIRECTORY]      # or just: python ...

Kill it whenever you like: the next start goes on after the newest complete checkpoint, with the
same batches and the same losses. Delete DIRECTORY to begin anew.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import forebay

STEPS, EVERY = 200, 20


def main() -> None:
    directory = sys.argv[1] if len(sys.argv) > 1 else "checkpoints"
    launched = "RANK" in os.environ
    if launched:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if launched else 0

    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    if launched:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    torch.manual_seed(1 + rank)  # other data and other dropout on each

    checkpointer = forebay.Checkpointer(directory)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": forebay.per_rank(forebay.rng()),
    }
    resumed = checkpointer.restore(state)  # in place; None when there is no checkpoint yet
    if rank == 0:
        print("from the start" if resumed is None else f"resumed after step {resumed}")

    for step in range((resumed or 0) + 1, STEPS + 1):
        inputs = torch.randn(32, 64)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            snap = checkpointer.save(step, state)  # the drain goes on behind the training
            if rank == 0:
                print(f"step {step}: loss {loss.item():.4f}, paused {snap.pause_s * 1e3:.2f} ms")

    checkpointer.close()  # waits until everything saved is committed
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
