"""Small models as strangers write them, for the tests of plans and of their application."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class FusedAttention(nn.Module):
    """One matrix for queries, keys and values, as in nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class GroupedAttention(nn.Module):
    """Matrices of their own, fewer heads of keys, and scores by hand with a mask that is a buffer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, heads // 2, width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width // 2, bias=False)
        self.wv = nn.Linear(width, width // 2, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.register_buffer("mask", torch.full((64, 64), float("-inf")).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2).repeat_interleave(2, dim=1)
        v = self.wv(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2).repeat_interleave(2, dim=1)
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5 + self.mask[:t, :t]
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class GatedMLP(nn.Module):
    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, ffn, bias=False)
        self.w2 = nn.Linear(ffn, width, bias=False)
        self.w3 = nn.Linear(width, ffn, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """A mixture of MLPs: each token goes to `top_k` of them."""

    def __init__(self, width: int, ffn: int, count: int, top_k: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(GatedMLP(width, ffn) for _ in range(count))
        self.top_k = top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            y = y + share * expert(x)
        return y


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kind: str) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if kind == "fused":
            self.attn: nn.Module = FusedAttention(width, heads)
            self.mlp: nn.Module = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        else:
            self.attn = GroupedAttention(width, heads)
            self.mlp = Experts(width, 2 * width, 4, 2) if kind == "experts" else GatedMLP(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A decoder: "fused" is like GPT-2, "grouped" like Llama, "experts" like Mixtral."""

    def __init__(self, kind: str = "fused", *, width: int = 32, heads: int = 4, layers: int = 4, tied: bool = False):
        super().__init__()
        self.wte = nn.Embedding(64, width)
        self.wpe = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads, kind) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 64, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_gpt(kind: str = "fused", **options: Any) -> GPT:
    torch.manual_seed(1)
    return GPT(kind, **options)


def make_words(batch: int, seq: int = 8) -> torch.Tensor:
    return torch.randint(0, 64, (batch, seq), generator=torch.Generator().manual_seed(7))


def next_word_loss(logits: Any, words: torch.Tensor) -> torch.Tensor:
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
