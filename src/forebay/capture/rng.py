"""The random generators of a process, as one object with a state.

Covers Python's ``random`` and, where they are loaded, numpy's global generator and torch's on the
CPU and on every visible accelerator. Never imports either.
"""

from __future__ import annotations

import random
import sys
from typing import Any


class Rng:
    """State of all generators; restoring it makes the next draws equal. Declare it per rank."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of the states of all generators that are loaded."""
        state: dict[str, Any] = {"python": random.getstate()}
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, position, has_gauss, cached = numpy.random.get_state()
            state["numpy"] = {
                "kind": kind,
                "keys": keys.tobytes(),
                "rest": [int(position), int(has_gauss), float(cached)],
            }
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            state["torch"] = torch.get_rng_state().numpy().tobytes()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                state["cuda"] = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set every generator whose state was saved; what is not loaded now stays untouched."""
        random.setstate(state["python"])
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and "numpy" in state:
            saved = state["numpy"]
            keys = numpy.frombuffer(saved["keys"], dtype=numpy.uint32)
            numpy.random.set_state((saved["kind"], keys, *saved["rest"]))
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return
        if "torch" in state:
            torch.set_rng_state(_byte_tensor(torch, state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            states = state["cuda"][: torch.cuda.device_count()]
            torch.cuda.set_rng_state_all([_byte_tensor(torch, s) for s in states])


def _byte_tensor(torch: Any, data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
