"""Operators that capture answers itself instead of running them on meta tensors.

Some have results whose size depends on values: they are counted where the values are known (a mask of the user's,
lengths, ids and what follows from them), and refused elsewhere. Others are one call to dispatch and several kernels on
a GPU: they are taken apart as torch's C++ does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from .recorder import Recorder

Handler = Callable[["Recorder", Any, Any, Any], Any]

HANDLERS: dict[str, Handler] = {}
"""By the short names of operators; a handler returns NotImplemented where a call is an ordinary one."""

_aten = torch.ops.aten


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


# -- sizes that depend on values --------------------------------------------------------------------------------


@_handles("nonzero")
def _nonzero(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> torch.Tensor:
    """Where a mask is set."""
    tensor = recorder.on_meta(args[0])
    unknown = recorder.known.value(tensor) is None and recorder.masks.density(tensor) is None
    if unknown and tensor.dim() == 1 and recorder.made_by(tensor) in ("gt", "ne", "greater"):
        recorder.assume("tokens are spread evenly over the experts")
        return _emit_nonzero(recorder, tensor, tensor.numel(), torch.ones(tensor.shape))  # "which were hit": all
    return _find_set(recorder, tensor)


def _find_set(recorder: Recorder, mask: torch.Tensor) -> torch.Tensor:
    """Where a mask is set: known values decide, else the density of a one-hot mask."""
    value, density = recorder.known.value(mask), recorder.masks.density(mask)
    if value is not None:
        return _emit_nonzero(recorder, mask, int(torch.count_nonzero(value)), value)
    if density is None:
        raise recorder.needs_values("aten.nonzero")
    recorder.assume("tokens are spread evenly over the experts")
    return _emit_nonzero(recorder, mask, max(1, round(density * mask.numel())), None)


def _emit_nonzero(recorder: Recorder, mask: torch.Tensor, count: int, value: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty((count, mask.dim()), dtype=torch.int64, device="meta")
    recorder.wait()  # the host asks how many there are
    recorder.emit("aten.nonzero", "gather", [mask], [out], {})
    if value is not None:
        recorder.known.note(out, torch.nonzero(value))
    return out


@_handles("index")
def _index(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`x[mask]`: on a GPU the mask is turned into indices first, and the host waits for their number."""
    x, indices = args[:2]
    if not any(_is_mask(i) for i in indices):
        return NotImplemented
    integers: list[Any] = []
    for i in indices:
        if not _is_mask(i):
            integers.append(i)
            continue
        places = _find_set(recorder, recorder.on_meta(i))
        with recorder:
            integers += places.unbind(1)
    with recorder:
        return func(x, integers, *args[2:], **kwargs)


@_handles("index_put", "index_put_", "_index_put_impl_")
def _index_put(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`x[mask] = number` fills on a GPU; `x[mask] = tensor` turns the mask into indices first."""
    x, indices, values = args[:3]
    masks = [i for i in indices if i is not None]
    if not any(_is_mask(i) for i in masks):
        return NotImplemented
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if len(masks) == 1 and values.numel() == 1 and not accumulates:
        with recorder:
            fill = _aten.masked_fill_ if func._schema.name.endswith("_") else _aten.masked_fill
            mask = masks[0]
            before = next(at for at, i in enumerate(indices) if i is not None)
            for _ in range(x.dim() - before - mask.dim()):
                mask = mask.unsqueeze(-1)
            return fill(x, mask, 0.0)
    for mask in masks:
        if _is_mask(mask):
            meta = recorder.on_meta(mask)
            value = recorder.known.value(meta)
            rows = int(torch.count_nonzero(value)) if value is not None else int(values.shape[0] if values.dim() else 1)
            _emit_nonzero(recorder, meta, rows, value)
    return NotImplemented


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


@_handles("masked_select")
def _masked_select(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> Any:
    """The same as `x[mask]`, with both broadcast."""
    value = recorder.known.value(recorder.on_meta(args[1]))
    with recorder:
        x, mask = torch.broadcast_tensors(*(recorder.on_meta(t) for t in args[:2]))
    if value is not None:
        recorder.known.note(mask, value.expand(mask.shape))
    return _index(recorder, _aten.index.Tensor, (x, [mask]), {})


@_handles("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
def _run_on_values(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Unique values, counts of values, repeats: run for real on known values, and refused on others."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    metas = [recorder.on_meta(t) for t in leaves if isinstance(t, torch.Tensor)]
    values = [recorder.known.value(t) if isinstance(t, torch.Tensor) else t for t in leaves]
    name = func._schema.name.replace("::", ".")
    if any(v is None and isinstance(t, torch.Tensor) for v, t in zip(values, leaves, strict=True)):
        raise recorder.needs_values(name)
    real_args, real_kwargs = pytree.tree_unflatten(values, spec)
    outs: list[torch.Tensor] = []

    def twin(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        meta = torch.empty_like(t, device="meta")
        recorder.known.note(meta, t)
        outs.append(meta)
        return meta

    answer = pytree.tree_map(twin, func(*real_args, **real_kwargs))
    recorder.wait()
    recorder.emit(name, "sort" if "unique" in name else "scatter", metas, outs, {})
    return answer


@_handles("repeat_interleave")
def _repeat_interleave(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """With a tensor of repeats: the program may say how many there are in all."""
    size = args[1] if len(args) > 1 else kwargs.get("output_size")
    if size is None:
        return _run_on_values(recorder, func, args, kwargs)
    meta = recorder.on_meta(args[0])
    out = torch.empty((size,), dtype=torch.int64, device="meta")
    recorder.emit("aten.repeat_interleave", "copy", [meta], [out], {})
    return out


@_handles("bincount")
def _bincount(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Counts of values: of unknown values there are as many counts as `minlength`."""
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    tensor = recorder.on_meta(args[0])
    if recorder.known.value(tensor) is not None or not least:
        return _run_on_values(recorder, func, args, kwargs)
    recorder.assume("bincount() is taken to find no value above its minlength")
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    out = torch.empty((least,), dtype=torch.int64 if weights is None else torch.float64, device="meta")
    recorder.wait()
    recorder.emit("aten.bincount", "scatter", [out, tensor], [out], {})
    if weights is None:
        recorder.note_counts("bincount", (tensor,), [out])
    return out


@_handles("_pack_padded_sequence")
def _pack(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> Any:
    """Sequences laid end to end, step by step: lengths and batch sizes stay on the CPU, as torch wants them."""
    x, lengths = args[:2]
    values = recorder.known.value(lengths)
    if values is None:
        raise recorder.needs_values("aten._pack_padded_sequence")
    sizes = torch.tensor([int((values > step).sum()) for step in range(int(values.max()))])
    data = torch.empty((int(values.sum()), *x.shape[2:]), dtype=x.dtype, device="meta")
    recorder.emit("aten._pack_padded_sequence", "copy", [x], [data], {})
    return data, sizes


@_handles("_pack_padded_sequence_backward")
def _pack_backward(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> torch.Tensor:
    out = torch.empty(args[1], dtype=args[0].dtype, device="meta")
    recorder.emit("aten._pack_padded_sequence_backward", "copy", [args[0]], [out], {})
    return out


@_handles("_nested_tensor_from_mask_left_aligned")
def _is_left_aligned(recorder: Recorder, _func: Any, _args: Any, _kwargs: Any) -> bool:
    """`nn.TransformerEncoder` with a padding mask: a GPU may drop the padding, which is not predicted."""
    recorder.assume("padding is computed on, as torch does without nested tensors")
    return False


@_handles("allclose", "equal")
def _is_close(recorder: Recorder, func: Any, args: Any, _kwargs: Any) -> bool:
    """One answer for the host."""
    name = func._schema.name.partition("::")[2]
    recorder.assume(f"{name}() is taken to be True")
    flags = torch.empty(args[0].shape, dtype=torch.bool, device="meta")
    recorder.emit("aten.eq", "elementwise", [recorder.on_meta(t) for t in args[:2]], [flags], {})
    recorder.emit("aten.all", "reduce", [flags], [torch.empty((), dtype=torch.bool, device="meta")], {})
    recorder.wait()
    return True


@_handles("_linalg_check_errors")
def _check_linalg_errors(recorder: Recorder, _func: Any, _args: Any, _kwargs: Any) -> None:
    """The host waits for a factorisation's errors; there are taken to be none."""
    recorder.wait()


# -- one call, several kernels ----------------------------------------------------------------------------------


@_handles("_euclidean_dist")
def _euclidean_dist(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> torch.Tensor:
    """`torch.cdist` of more than 25 points: squares, and one product that adds them to the cross terms."""
    a, b = (recorder.on_meta(t) for t in args[:2])
    with recorder:
        a_square, b_square = a.pow(2).sum(-1, keepdim=True), b.pow(2).sum(-1, keepdim=True)
        left = torch.cat([a.mul(-2), a_square, torch.ones_like(a_square)], -1)
        right = torch.cat([b, torch.ones_like(b_square), b_square], -1)
        return _multiply(left, right.mT).clamp_min_(0).sqrt_()


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` as the one kernel it is: within a dispatch mode `matmul` itself would not be taken apart."""
    if a.dim() == 2 and b.dim() == 2:
        return a.mm(b)
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (a, b))
    return a.bmm(b).view(*lead, a.shape[-2], b.shape[-1])


@_handles("_trilinear")
def _trilinear(recorder: Recorder, _func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """`nn.Bilinear`: for each step along the unrolled dimension two products, and their sum."""
    *expands, sums = (list(dims) for dims in args[3:7])
    unroll = args[7] if len(args) > 7 else kwargs.get("unroll_dim", 1)
    with recorder:
        factors = [_unsqueeze(recorder.on_meta(t), dims) for t, dims in zip(args[:3], expands, strict=True)]
        sizes = [max(t.shape[i] for t in factors) for i in range(factors[0].dim())]
        out = torch.zeros([1 if i in sums else n for i, n in enumerate(sizes)], dtype=args[0].dtype, device="meta")
        last = [i for i in sums if factors[2].shape[i] > 1]
        first = [i for i in sums if i not in last]
        for step in range(sizes[unroll]):
            a, b, c = (t.narrow(unroll, step if t.shape[unroll] > 1 else 0, 1) for t in factors)
            inner, outer = ([i for i in dims if i != unroll] for dims in (first, last))
            product = _contract(_contract(a, b, inner), c, outer)
            out.narrow(unroll, step if out.shape[unroll] > 1 else 0, 1).add_(product)
        for i in sorted(sums, reverse=True):
            out = out.squeeze(i)
        return out


def _unsqueeze(t: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    for i in sorted(dims):
        t = t.unsqueeze(i)
    return t


def _contract(a: torch.Tensor, b: torch.Tensor, sums: Sequence[int]) -> torch.Tensor:
    """A product of two tensors summed over some dimensions, which stay with the size 1."""
    sizes = [max(a.shape[i], b.shape[i]) for i in range(a.dim())]
    a, b = (t.expand([n if i in sums else t.shape[i] for i, n in enumerate(sizes)]) for t in (a, b))
    free = [i for i in range(a.dim()) if i not in sums]
    left = [i for i in free if b.shape[i] == 1]
    right = [i for i in free if i not in left and a.shape[i] == 1]
    both = [i for i in free if i not in left and i not in right]
    batch, rows, depth, columns = (prod(sizes[i] for i in dims) for dims in (both, left, sums, right))
    x = a.permute(*both, *left, *sums, *right).reshape(batch, rows, depth)
    y = b.permute(*both, *sums, *right, *left).reshape(batch, depth, columns)
    order = [*both, *left, *right, *sums]
    out = x.bmm(y).view([1 if i in sums else sizes[i] for i in order])
    return out.permute([order.index(i) for i in range(a.dim())])


@_handles("_ctc_loss")
def _ctc_loss(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss over alignments: the steps run one after another, and their time is not modelled."""
    scores, targets, _, lengths = args[:4]
    steps, batch = (scores.shape[0], scores.shape[1]) if scores.dim() == 3 else (scores.shape[0], 1)
    longest = targets.shape[1] if targets.dim() == 2 else _longest(recorder, lengths)
    loss = torch.empty((batch,) if scores.dim() == 3 else (), dtype=scores.dtype, device="meta")
    alpha = torch.empty((batch, steps, 2 * longest + 1), dtype=scores.dtype, device="meta")
    reads = [recorder.on_meta(scores), recorder.on_meta(targets)]
    recorder.emit("aten._ctc_loss", "sort", reads, [loss, alpha], {"unmodelled": True})
    return loss, alpha


def _longest(recorder: Recorder, lengths: Any) -> int:
    values = recorder.known.value(lengths) if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)
    if values is None:
        raise recorder.needs_values("aten._ctc_loss")
    return int(values.max())


@_handles("_ctc_loss_backward")
def _ctc_loss_backward(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> torch.Tensor:
    out = torch.empty_like(args[1], device="meta")
    reads = [t for t in args if isinstance(t, torch.Tensor) and t.device.type == "meta"]
    recorder.emit("aten._ctc_loss_backward", "sort", reads, [out], {"unmodelled": True})
    return out
