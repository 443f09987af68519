"""A small byte-level GPT: 256 tokens, learned positions, pre-norm blocks, causal attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [batch, length, width], float32."""
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.norm1(x)).view(split).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Same ``seed``, same weights: every rank builds the whole model, then FSDP2 keeps its part."""

    def __init__(self, *, layers: int, width: int, heads: int, length: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bytes_in = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.bytes_out = nn.Linear(width, VOCABULARY, bias=False)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: [batch, length], int64. Returns logits [batch, length, 256], float32."""
        x = self.bytes_in(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.bytes_out(self.norm(x))
