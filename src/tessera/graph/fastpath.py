"""Fused inference paths of torch's own transformer layers, which real tensors take and meta tensors do not.

`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` in eval mode without gradients run one C++ function that packs
the three projections into one product. These are the same layers written with the operators that function launches.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from .autocast import Autocast
from .record import Recorder


def _packed(mha: nn.MultiheadAttention, x: torch.Tensor, autocast: Autocast) -> bool:
    """Whether self-attention of x takes the fast path (the conditions of `nn.MultiheadAttention.forward`)."""
    return bool(
        not mha.training
        and x.dim() == 3
        and mha.batch_first
        and mha._qkv_same_embed_dim
        and mha.in_proj_bias is not None
        and mha.in_proj_weight.dtype == x.dtype
        and mha.num_heads % 2 == 0
        and mha.bias_k is None
        and mha.bias_v is None
        and not mha.add_zero_attn
        and not torch.is_grad_enabled()
        and autocast.dtype is None
    )


def _attend(mha: nn.MultiheadAttention, x: torch.Tensor) -> torch.Tensor:
    batch, length, width = x.shape
    qkv = F.linear(x, mha.in_proj_weight, mha.in_proj_bias)
    q, k, v = (
        t.view(batch, length, mha.num_heads, width // mha.num_heads).transpose(1, 2) for t in qkv.chunk(3, dim=-1)
    )
    out = F.scaled_dot_product_attention(q, k, v)
    return F.linear(out.transpose(1, 2).reshape(batch, length, width), mha.out_proj.weight, mha.out_proj.bias)


def _feed_forward(recorder: Recorder, layer: nn.TransformerEncoderLayer, x: torch.Tensor) -> torch.Tensor:
    """Two products; the activation is part of the first one's kernel."""
    first, second = layer.linear1, layer.linear2
    flat = x.reshape(-1, x.shape[-1])
    hidden = torch.empty((flat.shape[0], first.out_features), dtype=x.dtype, device="meta")
    reads = [first.bias, flat, first.weight.t()] if first.bias is not None else [flat, first.weight.t()]
    name = "aten._addmm_activation" if first.bias is not None else "aten.mm"
    recorder.emit(name, "gemm", reads, [hidden], {})
    return F.linear(hidden, second.weight, second.bias).view(x.shape)


@contextlib.contextmanager
def fast_paths(recorder: Recorder, autocast: Autocast) -> Iterator[None]:
    """Replace the forwards of torch's transformer layers where a GPU would take their fast path."""
    attention, encoder = nn.MultiheadAttention.forward, nn.TransformerEncoderLayer.forward

    here = threading.get_ident()

    def mha_forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return attention(self, query, key, value, *args, **kwargs)
        weights = args[1] if len(args) > 1 else kwargs.get("need_weights", True)
        masks = kwargs.get("attn_mask") is None and kwargs.get("key_padding_mask") is None and not args
        if query is key and key is value and not weights and masks and _packed(self, query, autocast):
            return _attend(self, query), None
        return attention(self, query, key, value, *args, **kwargs)

    def encoder_forward(self: Any, src: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return encoder(self, src, *args, **kwargs)
        plain = not any(a is not None and a is not False for a in (*args, *kwargs.values()))
        if not (
            plain
            and _packed(self.self_attn, src, autocast)
            and self.activation_relu_or_gelu
            and self.norm1.eps == self.norm2.eps
        ):
            return encoder(self, src, *args, **kwargs)
        recorder.functions += 1
        if self.norm_first:
            x = _attend(self.self_attn, self.norm1(src)).add_(src)
            return _feed_forward(recorder, self, self.norm2(x)).add_(x)
        x = self.norm1(_attend(self.self_attn, src).add_(src))
        return self.norm2(_feed_forward(recorder, self, x).add_(x))

    nn.MultiheadAttention.forward = mha_forward
    nn.TransformerEncoderLayer.forward = encoder_forward
    try:
        yield
    finally:
        nn.MultiheadAttention.forward = attention
        nn.TransformerEncoderLayer.forward = encoder
