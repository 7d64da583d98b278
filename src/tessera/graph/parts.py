"""Operators that are one call to dispatch and several kernels on a GPU: taken apart as torch's C++ does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .record import Recorder


def euclidean_dist(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> torch.Tensor:
    """`torch.cdist` of more than 25 points: squares, and one product that adds them to the cross terms."""
    a, b = (recorder.on_meta(t) for t in args[:2])
    with recorder:
        a_square, b_square = a.pow(2).sum(-1, keepdim=True), b.pow(2).sum(-1, keepdim=True)
        left = torch.cat([a.mul(-2), a_square, torch.ones_like(a_square)], -1)
        right = torch.cat([b, torch.ones_like(b_square), b_square], -1)
        return _product(left, right.mT).clamp_min_(0).sqrt_()


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` as the one kernel it is: within a dispatch mode `matmul` itself would not be taken apart."""
    if a.dim() == 2 and b.dim() == 2:
        return a.mm(b)
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (a, b))
    return a.bmm(b).view(*lead, a.shape[-2], b.shape[-1])


def trilinear(recorder: Recorder, _func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """`nn.Bilinear`: for each step along the unrolled dimension two products, and their sum."""
    *expands, sums = (list(dims) for dims in args[3:7])
    unroll = args[7] if len(args) > 7 else kwargs.get("unroll_dim", 1)
    with recorder:
        factors = [_expanded(recorder.on_meta(t), dims) for t, dims in zip(args[:3], expands, strict=True)]
        sizes = [max(t.shape[i] for t in factors) for i in range(factors[0].dim())]
        out = torch.zeros([1 if i in sums else n for i, n in enumerate(sizes)], dtype=args[0].dtype, device="meta")
        last = [i for i in sums if factors[2].shape[i] > 1]
        first = [i for i in sums if i not in last]
        for step in range(sizes[unroll]):
            a, b, c = (t.narrow(unroll, step if t.shape[unroll] > 1 else 0, 1) for t in factors)
            product = _pair(_pair(a, b, [i for i in first if i != unroll]), c, [i for i in last if i != unroll])
            out.narrow(unroll, step if out.shape[unroll] > 1 else 0, 1).add_(product)
        for i in sorted(sums, reverse=True):
            out = out.squeeze(i)
        return out


def _expanded(t: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    for i in sorted(dims):
        t = t.unsqueeze(i)
    return t


def _pair(a: torch.Tensor, b: torch.Tensor, sums: Sequence[int]) -> torch.Tensor:
    """A product of two tensors summed over some dimensions, which stay with the size 1."""
    sizes = [max(a.shape[i], b.shape[i]) for i in range(a.dim())]
    a, b = (t.expand([n if i in sums else t.shape[i] for i, n in enumerate(sizes)]) for t in (a, b))
    kept = [i for i in range(a.dim()) if i not in sums]
    left = [i for i in kept if b.shape[i] == 1]
    right = [i for i in kept if i not in left and a.shape[i] == 1]
    both = [i for i in kept if i not in left and i not in right]
    batch, rows, depth, columns = (prod(sizes[i] for i in dims) for dims in (both, left, sums, right))
    x = a.permute(*both, *left, *sums, *right).reshape(batch, rows, depth)
    y = b.permute(*both, *sums, *right, *left).reshape(batch, depth, columns)
    order = [*both, *left, *right, *sums]
    out = x.bmm(y).view([1 if i in sums else sizes[i] for i in order])
    return out.permute([order.index(i) for i in range(a.dim())])


def ctc_loss(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss over alignments: the steps one after another, of which nobody has a time."""
    scores, targets, _, lengths = args[:4]
    steps, batch = (scores.shape[0], scores.shape[1]) if scores.dim() == 3 else (scores.shape[0], 1)
    longest = targets.shape[1] if targets.dim() == 2 else _longest(recorder, lengths)
    loss = torch.empty((batch,) if scores.dim() == 3 else (), dtype=scores.dtype, device="meta")
    alpha = torch.empty((batch, steps, 2 * longest + 1), dtype=scores.dtype, device="meta")
    reads = [recorder.on_meta(scores), recorder.on_meta(targets)]
    recorder.emit("aten._ctc_loss", "sort", reads, [loss, alpha], {"unmodelled": True})
    return loss, alpha


def _longest(recorder: Recorder, lengths: Any) -> int:
    known = recorder.known.value(lengths) if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)
    if known is None:
        raise recorder.cannot("aten._ctc_loss")
    return int(known.max())


def ctc_loss_backward(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> torch.Tensor:
    """Its gradient, which walks back through the steps."""
    scores = args[1]
    out = torch.empty_like(scores, device="meta")
    reads = [t for t in args if isinstance(t, torch.Tensor) and t.device.type == "meta"]
    recorder.emit("aten._ctc_loss_backward", "sort", reads, [out], {"unmodelled": True})
    return out


PARTS: dict[str, Callable[[Recorder, Any, Any, Any], Any]] = {
    "_euclidean_dist": euclidean_dist, "_trilinear": trilinear, "_ctc_loss": ctc_loss,
    "_ctc_loss_backward": ctc_loss_backward,
}  # fmt: skip
"""Operators by their short names."""
