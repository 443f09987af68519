"""What is trained: layers of any size for the checks, a transformer for the measurements."""

from __future__ import annotations

from typing import Any

import torch
from gpu_site import Site
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.nn import functional

OPTIMIZERS: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}}


class Job:
    """Linear layers and AdamW. A large learning rate: every update changes every weight."""

    def __init__(
        self,
        site: Site,
        *,
        width: int | None = None,
        layers: int = 8,
        kind: str = "fused",
        norm: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.site = site
        width = width or site.size(2048, 256)
        made: list[nn.Module] = [nn.Linear(width, width) for _ in range(layers)]
        if norm:
            made.append(nn.BatchNorm1d(width))
        self.model = nn.Sequential(*made).to(site.device)
        self.optim = torch.optim.AdamW(
            self.model.parameters(), lr=1e-2, **(OPTIMIZERS[kind] | options)
        )
        self.batch = torch.randn(64, width, device=site.device)

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim}

    def capture(self) -> dict[str, Any]:
        """Return what `Checkpointer` saves of `parts`; tensors are the live ones."""
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optim),
        }

    def compute(self) -> None:
        self.optim.zero_grad(set_to_none=True)
        self.model(self.batch).square().mean().backward()

    def iterate(self) -> None:
        self.compute()
        self.optim.step()


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        batch, length, width = value.shape
        q, k, v = (
            self.qkv(self.norm1(value))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        value = value + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return value + self.down(functional.gelu(self.up(self.norm2(value))))


class Transformer(nn.Module):
    """A GPT; embedding and head are tied."""

    def __init__(self, *, width: int, layers: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("places", torch.arange(length), persistent=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        value = self.embed(words) + self.place(self.places)
        for block in self.blocks:
            value = block(value)
        return functional.linear(self.norm(value), self.embed.weight)


# fp32 weights and AdamW: 12 bytes for each parameter.
SIZES = {
    "tiny": {"width": 64, "layers": 2, "heads": 2, "words": 256, "length": 32},
    "200M": {"width": 1024, "layers": 14, "heads": 16, "words": 32000, "length": 1024},
    "1B": {"width": 2048, "layers": 19, "heads": 16, "words": 32000, "length": 2048},
}


class Trainer:
    """A transformer step: fp32 weights, bf16 compute on a GPU, AdamW."""

    def __init__(self, site: Site, size: str, batch: int) -> None:
        torch.manual_seed(0)
        self.site = site
        spec = SIZES[size]
        with torch.device(site.device):
            self.model = Transformer(**spec)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._spec = spec
        self.set_batch(batch)

    def set_batch(self, batch: int) -> None:
        self.batch = batch
        shape = (batch, self._spec["length"] + 1)
        self._words = torch.randint(self._spec["words"], shape, device=self.site.device)

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim}

    def capture(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optim),
        }

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def compute(self) -> torch.Tensor:
        """Forward and backward; return the loss."""
        self.optim.zero_grad(set_to_none=True)
        inputs, targets = self._words[:, :-1], self._words[:, 1:]
        device = self.site.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.site.on_gpu):
            scores = self.model(inputs)
        loss = functional.cross_entropy(scores.flatten(0, 1).float(), targets.reshape(-1))
        loss.backward()
        return loss.detach()

    def iterate(self) -> None:
        self.compute()
        self.optim.step()
