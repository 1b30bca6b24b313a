"""How large the state is: parameters from a model's shape, bytes from what is kept of each."""

from __future__ import annotations

import re

from forebay.errors import UsageError

DTYPE_BYTES = {
    "fp64": 8.0,
    "fp32": 4.0,
    "tf32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5,
}
PARTS = ("weights", "master", "moments", "gradients", "other")

CONTENTS = {
    "16": "weights=bf16,master=fp32,moments=2*fp32,gradients=bf16",
    "14": "weights=bf16,master=fp32,moments=2*fp32",
    "12": "master=fp32,moments=2*fp32",
}
"""The three usual ones, by bytes a parameter."""

_PART = re.compile(r"([a-z]+)\s*=\s*(?:([0-9]+)\s*\*\s*)?([a-z0-9]+)")


def content_bytes(text: str) -> float:
    """``'weights=bf16,master=fp32,moments=2*fp32'`` -> 14.0 bytes a parameter.

    Raises UsageError.
    """
    total = 0.0
    seen: set[str] = set()
    bare = text.strip().removesuffix(".0")  # a number in a file
    for part in CONTENTS.get(bare, text).split(","):
        found = _PART.fullmatch(part.strip().lower())
        if found is None:
            raise UsageError(
                f"content: expected parts such as moments=2*fp32, or {', '.join(CONTENTS)}; "
                f"found {part.strip()!r}"
            )
        name, times, dtype = found.groups()
        if name not in PARTS:
            raise UsageError(f"content: unknown part {name!r}, expected {', '.join(PARTS)}")
        if name in seen:
            raise UsageError(f"content: {name!r} stands twice in {text!r}: name each part once")
        seen.add(name)
        if dtype not in DTYPE_BYTES:
            raise UsageError(f"content: unknown dtype {dtype!r}, expected {', '.join(DTYPE_BYTES)}")
        total += DTYPE_BYTES[dtype] * int(times or 1)
    if not total:
        raise UsageError(f"content: nothing is kept: {text!r}")
    return total


def count_params(
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    experts: int = 1,
    tied: bool = False,
) -> float:
    """Parameters of a Llama-like transformer.

    A layer has attention (query and output ``hidden x hidden``, key and value ``hidden x hidden
    kv_heads / heads``), a gated feed-forward of three ``hidden x ffn`` matrices an expert, a router
    where there are several, and two norms. Embedding and output are two ``vocab x hidden`` matrices
    unless tied. Llama 3 (arXiv 2407.21783, Table 3) gives 8.03, 70.55 and 405.85 billion.
    """
    if heads % kv_heads:
        raise UsageError(f"kv_heads: expected a divisor of heads {heads}, found {kv_heads}")
    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv_heads // heads
    router = hidden * experts if experts > 1 else 0
    layer = attention + 3 * hidden * ffn * experts + router + 2 * hidden
    return float(layers * layer + (1 if tied else 2) * vocab * hidden + hidden)
