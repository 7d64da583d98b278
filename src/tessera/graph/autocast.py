"""`torch.autocast("cuda")` for tensors that are on no GPU: the casts it would insert, inserted and recorded.

Autocast is a dispatch key of the device, which meta tensors do not have, and without CUDA it switches itself off. Its
rules are two lists (torch.amp's documentation): products and convolutions run in the narrow format, losses, norms and
exponentials in fp32. A parameter is cast once for the outermost region, as autocast's cache does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils import _pytree as pytree


def _find_functions(*places: tuple[Any, str]) -> frozenset[Any]:
    return frozenset(getattr(place, name) for place, names in places for name in names.split())


_NARROW = _find_functions(
    (F, "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    (F, "scaled_dot_product_attention prelu"),
    (torch, "matmul mm bmm addmm baddbmm einsum mv conv1d conv2d conv3d"),
    (torch.Tensor, "matmul __matmul__ __rmatmul__ mm bmm"),
    (torch._C._VariableFunctions, "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
)
_WIDE = _find_functions(
    (F, "layer_norm group_norm softmax log_softmax cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss kl_div"),
    (F, "cosine_similarity binary_cross_entropy_with_logits softplus"),
    (torch, "layer_norm group_norm softmax log_softmax exp log pow rsqrt norm sum prod cumsum cosh sinh tan expm1"),
    (torch, "log1p reciprocal dist"),
    (torch.Tensor, "softmax log_softmax exp log pow __pow__ rsqrt norm sum cumsum"),
)


class Autocast:
    """The autocast regions a program is in, and the casts of a call made inside them."""

    def __init__(self) -> None:
        self._regions: list[torch.dtype | None] = []
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def dtype(self) -> torch.dtype | None:
        """The narrow format of the region the program is in, or None."""
        return self._regions[-1] if self._regions else None

    def enter(self, dtype: torch.dtype | None) -> None:
        """A region begins; None is one with enabled=False."""
        self._regions.append(dtype)

    def leave(self) -> None:
        """A region ends; the outermost one takes the cast parameters with it."""
        self._regions.pop()
        if not self._regions:
            self._cache.clear()

    def apply(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments as autocast would pass them."""
        narrow = self.dtype
        if narrow is None:
            return args, kwargs
        wanted = narrow if func in _NARROW else torch.float32 if func in _WIDE else None
        if wanted is None:
            return args, kwargs
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # From the last argument to the first, as traces of an H200 have it: C++ evaluates them in that order.
        cast = [self._cast(t, wanted) for t in reversed(leaves)]
        return pytree.tree_unflatten(cast[::-1], spec)  # type: ignore[no-any-return]

    def _cast(self, t: Any, wanted: torch.dtype) -> Any:
        if not isinstance(t, torch.Tensor) or not t.is_floating_point() or t.dtype in (wanted, torch.float64):
            return t
        if not (t.is_leaf and t.requires_grad):
            return t.to(wanted)
        entry = self._cache.get(id(t))
        if entry is None or entry[1].dtype != wanted:
            entry = self._cache[id(t)] = (t, t.to(wanted))  # with the parameter, so that no other gets its id
        return entry[1]
