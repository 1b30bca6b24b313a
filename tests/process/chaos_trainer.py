"""A trainer of one process for a tool that kills it: ``python chaos_trainer.py --out DIRECTORY``.

Trains six steps, saves each and waits until it is durable, goes on where the run is when started
again, and writes ``final.bin``, whose bytes do not depend on how often it died.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

STEPS = 6


def main() -> None:
    """Train to the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["FOREBAY_RUNTIME_DIR"] = str(out / "runtime")
    os.environ["FOREBAY_AGENT_LINGER_S"] = "2"
    import torch

    import forebay

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = forebay.value(0)
    with forebay.Checkpointer(out / "run") as checkpointer:
        state = {"model": model, "optimizer": optimizer, "done": done}
        if checkpointer.restore(state) is not None:
            print(f"resumed from step {done.value}", flush=True)
        while done.value < STEPS:
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(done.value))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            done.value += 1
            checkpointer.save(done.value, state).wait("durable", timeout_s=120)
    final = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    temporary = out / "final.tmp"
    temporary.write_bytes(final)
    temporary.rename(out / "final.bin")


if __name__ == "__main__":
    main()
