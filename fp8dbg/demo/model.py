"""A small decoder-only transformer: rotary positions, RMSNorm before each branch, SwiGLU, no biases."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8dbg.demo.text import VOCABULARY


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same shape."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        with torch.autocast(x.device.type, enabled=False):  # in bfloat16 its backward is slow on CPUs with AVX2 alone
            query, key = _rotated(query.float()), _rotated(key.float())
            mixed = F.scaled_dot_product_attention(query, key, value.float(), is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result


def _rotated(x: Tensor) -> Tensor:
    """Each pair of channels turned by an angle proportional to the position; [..., length, channels]."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]).float(), 100.0 ** -(torch.arange(half) / half)).to(x.device)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same shape."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Transformer(nn.Module):
    """The demo's model; 0.9 million parameters as the demo makes it.

    Args:
        width: channels of the residual stream.
        depth: number of layers.
        heads: attention heads; ``width`` is a multiple of twice this.
        hidden: channels inside the SwiGLU.
    """

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4, hidden: int = 384) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Every branch starts at zero: the first steps train the embedding and the head, undisturbed."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.6 * module.in_features**-0.5)
        for layer in self.layers:
            assert isinstance(layer, Layer)  # ModuleList forgets the type
            nn.init.zeros_(layer.attention.out.weight)
            nn.init.zeros_(layer.mlp.down.weight)

    def forward(self, codes: Tensor) -> Tensor:
        """Logits [batch, length, VOCABULARY] of the code after each position of int64 [batch, length]."""
        x = self.embed(codes)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x))
        return result
