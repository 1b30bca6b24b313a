"""The tensors of Llama 3 405B, as its training state has them: shapes alone, no bytes.

From "The Llama 3 Herd of Models" (Meta, 2024), table 3: 126 layers, dimension 16,384, FFN 53,248,
128 heads, 8 of them for keys and values, vocabulary 128,256. Names are torchtitan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Cut = Literal["columns", "rows", "none"]
"""How tensor parallelism cuts a weight: its first dimension, its second, or not at all."""

STATES = (
    ("model/", "bfloat16", ""),
    ("optimizer/master/", "float32", ""),
    ("optimizer/state/", "float32", "/exp_avg"),
    ("optimizer/state/", "float32", "/exp_avg_sq"),
)
"""Weights, their copies in full precision, two moments: 14 bytes a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter: its name in the model, its global shape, and its cut."""

    name: str
    shape: tuple[int, ...]
    cut: Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """The sizes of a model of this kind."""

    layers: int = 126
    width: int = 16_384
    hidden: int = 53_248
    heads: int = 128
    kv_heads: int = 8
    vocabulary: int = 128_256

    def layer(self, number: int) -> Iterator[Weight]:
        """The weights of one layer."""
        kv = self.width // self.heads * self.kv_heads
        name = f"layers.{number}"
        for part, shape, cut in (
            ("attention.wq", (self.width, self.width), "columns"),
            ("attention.wk", (kv, self.width), "columns"),
            ("attention.wv", (kv, self.width), "columns"),
            ("attention.wo", (self.width, self.width), "rows"),
            ("feed_forward.w1", (self.hidden, self.width), "columns"),
            ("feed_forward.w2", (self.width, self.hidden), "rows"),
            ("feed_forward.w3", (self.hidden, self.width), "columns"),
            ("attention_norm", (self.width,), "none"),
            ("ffn_norm", (self.width,), "none"),
        ):
            yield Weight(name=f"{name}.{part}.weight", shape=shape, cut=cut)  # type: ignore[arg-type]

    def stage(self, number: int, stages: int) -> list[Weight]:
        """The weights of one of so many pipeline stages: layers dealt out as torch.chunk does."""
        each = -(-self.layers // stages)
        first, last = number * each, min((number + 1) * each, self.layers)
        table = (self.vocabulary, self.width)
        found = []
        if number == 0:
            found.append(Weight(name="tok_embeddings.weight", shape=table, cut="columns"))
        for layer in range(first, last):
            found += self.layer(layer)
        if number == stages - 1:
            found.append(Weight(name="norm.weight", shape=(self.width,), cut="none"))
            found.append(Weight(name="output.weight", shape=table, cut="columns"))
        return found

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""
        total = 0
        for weight in self.stage(0, 1):
            count = 1
            for n in weight.shape:
                count *= n
            total += count
        return total
