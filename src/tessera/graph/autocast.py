"""`torch.autocast("cuda")` for tensors that are on no GPU: the casts it would insert, inserted and recorded.

Autocast is a dispatch key of the device, which meta tensors do not have, and without CUDA it switches itself off. Its
rules are two lists (torch.amp's documentation): products and convolutions run in the narrow format, losses, norms and
exponentials in fp32. A parameter is cast once for the outermost region, as autocast's cache does.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils import _pytree as pytree

_vf = torch._C._VariableFunctions
_NARROW = {
    F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.mm,
    torch.Tensor.mm, torch.bmm, torch.Tensor.bmm, torch.addmm, torch.baddbmm, torch.einsum, torch.mv, F.bilinear,
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, torch.conv1d,
    torch.conv2d, torch.conv3d, F.scaled_dot_product_attention, F.prelu, _vf.lstm, _vf.gru, _vf.rnn_tanh, _vf.rnn_relu,
}  # fmt: skip
_WIDE = {
    F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.softmax, torch.softmax, torch.Tensor.softmax,
    F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss,
    F.smooth_l1_loss, F.kl_div, F.cosine_similarity, F.binary_cross_entropy_with_logits, torch.exp, torch.Tensor.exp,
    torch.log, torch.Tensor.log, torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.rsqrt, torch.Tensor.rsqrt,
    torch.norm, torch.Tensor.norm, torch.sum, torch.Tensor.sum, torch.prod, torch.cumsum, torch.Tensor.cumsum,
    F.softplus, torch.cosh, torch.sinh, torch.tan, torch.expm1, torch.log1p, torch.reciprocal, torch.dist,
}  # fmt: skip


class Autocast:
    """Which regions a program is in, and the casts of a call made inside them."""

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
        """A region ends; with the outermost one the cast parameters go."""
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
        known = self._cache.get(id(t))
        if known is None or known[1].dtype != wanted:
            known = self._cache[id(t)] = (t, t.to(wanted))  # the parameter is kept, so that its id stays its own
        return known[1]


@contextlib.contextmanager
def followed(regions: Autocast, assumptions: dict[str, None]) -> Iterator[None]:
    """`torch.autocast` for a GPU (or a meta tensor's device) tells `regions` instead of switching itself off."""
    cls = torch.amp.autocast_mode.autocast
    init, enter, leave = cls.__init__, cls.__enter__, cls.__exit__

    def make(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        device = "cuda" if device_type == "meta" else device_type
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no CUDA here is no news
            init(self, device, dtype, enabled, cache_enabled)
        self.tessera_region = (self.fast_dtype if enabled else None,) if device == "cuda" else ()

    def begin(self: Any) -> Any:
        if not hasattr(self, "tessera_region"):  # made before the capture: without CUDA it has switched itself off
            self.tessera_region = (self.fast_dtype,) if self.device == "cuda" else ()
            if self.tessera_region:
                assumptions["an autocast region made before the capture is taken to be enabled"] = None
        if not self.tessera_region:
            return enter(self)
        regions.enter(self.tessera_region[0])  # torch's own switch is left alone
        return self

    def end(self: Any, *exc: Any) -> Any:
        if not getattr(self, "tessera_region", ()):
            return leave(self, *exc)
        regions.leave()
        return False

    # Activation checkpointing asks which region it is in, to enter it again when it recomputes.
    asked = (torch.amp.is_autocast_available, torch.is_autocast_enabled, torch.get_autocast_dtype)

    def gpu(device: Any) -> bool:
        return str(device).partition(":")[0] in ("meta", "cuda")

    torch.amp.is_autocast_available = lambda device: gpu(device) or asked[0](device)
    torch.is_autocast_enabled = lambda *a: regions.dtype is not None if not a or gpu(a[0]) else asked[1](*a)
    torch.get_autocast_dtype = lambda device: (regions.dtype or torch.float16) if gpu(device) else asked[2](device)
    cls.__init__, cls.__enter__, cls.__exit__ = make, begin, end
    try:
        if asked[1]("cuda"):
            regions.enter(asked[2]("cuda"))  # the capture itself is inside a region
        yield
    finally:
        cls.__init__, cls.__enter__, cls.__exit__ = init, enter, leave
        torch.amp.is_autocast_available, torch.is_autocast_enabled, torch.get_autocast_dtype = asked
