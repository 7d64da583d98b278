"""Models for tests: small ones of our own, and torchvision's and transformers' where they are installed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn


class Residual(nn.Module):
    """Convolution, batch norm, activation, twice, with a skip; pooled, flattened, dropped out, classified."""

    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn0(self.stem(x)))
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y = y + x
        y = self.relu(y)
        return self.head(self.drop(torch.flatten(self.pool(y), 1)))


class Branches(nn.Module):
    """Three branches of one input, summed: two of them the same, one twice as long."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x) + self.d(self.c(x))


class Block(nn.Module):
    """A transformer block: norm, attention, norm, two-layer perceptron."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, w = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.out(y.transpose(1, 2).reshape(b, n, w))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Words(nn.Module):
    """A large table of which a few rows are read, and a linear layer."""

    def __init__(self, vocabulary: int = 50_000, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def mlp(*widths: int) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def declare_torchvision() -> None:
    """A wheel of torchvision beside another build of torch cannot load its operators; nothing here calls them."""
    if not hasattr(torch.ops.torchvision, "nms"):
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor")


def vision(name: str) -> nn.Module:
    """A torchvision model in eval mode; skips the test where torchvision is not installed."""
    declare_torchvision()
    torchvision = pytest.importorskip("torchvision", exc_type=ImportError)
    model: nn.Module = getattr(torchvision.models, name)(weights=None)
    return model.eval()


def hugging_face(cls: str, config: str, **kwargs: Any) -> nn.Module:
    """A transformers model from a configuration, on the meta device; skips the test where it is not installed."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, cls)(getattr(transformers, config)(**kwargs))
    return model.eval()
