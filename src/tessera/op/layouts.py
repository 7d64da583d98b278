"""In which order the heads of attention lie in memory, and how wide the kernels take them."""

from __future__ import annotations

from typing import Any

import torch


def alike(x: Any, dtype: torch.dtype | None = None) -> Any:
    """An empty (batch, heads, sequence, dim) tensor, dense; a token's heads side by side where `x` has them so.

    What a model made by splitting the rows of a product, it will join again: in that order without a copy.
    """
    batch, heads, length, dim = x.shape
    if x.stride(1) < x.stride(2):
        return torch.empty(batch, length, heads, dim, device=x.device, dtype=dtype or x.dtype).transpose(1, 2)
    return torch.empty(batch, heads, length, dim, device=x.device, dtype=dtype or x.dtype)


def block_dim(dims: int) -> int:
    """The width the kernels work with: a power of two that holds the head. Triton's own function takes microseconds."""
    return max(16, 1 << (dims - 1).bit_length())
