"""The demo's model: a byte-level GPT of some millions of parameters, with dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a GPT: ``context`` in bytes of text, ``width`` a multiple of ``heads``."""

    layers: int
    heads: int
    width: int
    context: int
    dropout: float = 0.1


FULL = Shape(layers=8, heads=8, width=256, context=128)
QUICK = Shape(layers=3, heads=4, width=128, context=32)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and a residual. x_BTW -> x_BTW."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x_BTW: Tensor) -> Tensor:  # noqa: N803 - shape suffixes
        x_BTW = x_BTW + self._drop(self._attend(self.norm_attention(x_BTW)))  # noqa: N806
        return x_BTW + self._drop(self.down(F.gelu(self.up(self.norm_mlp(x_BTW)))))

    def _attend(self, x_BTW: Tensor) -> Tensor:  # noqa: N803
        batch, time, width = x_BTW.shape
        split = (batch, time, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x_BTW).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed_BTW = mixed.transpose(1, 2).reshape(batch, time, width)  # noqa: N806
        attended: Tensor = self.out(mixed_BTW)
        return attended

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Predicts the next byte. tokens_BT -> logits of shape (B, T, 256)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.dropout = shape.dropout
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens_BT: Tensor) -> Tensor:  # noqa: N803
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTW = self.byte(tokens_BT) + self.position(places)  # noqa: N806
        x_BTW = F.dropout(x_BTW, self.dropout, self.training)  # noqa: N806
        for block in self.blocks:
            x_BTW = block(x_BTW)  # noqa: N806
        logits: Tensor = self.head(self.norm(x_BTW))
        return logits
