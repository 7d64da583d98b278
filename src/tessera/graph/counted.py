"""Operators whose results have a size that only values decide: counted where the values are known, refused elsewhere.

A mask of the user's, lengths, ids and what follows from them are known (`known.py`); the outputs of a layer are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from .record import Recorder

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def nonzero(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> torch.Tensor:
    """Where a mask is set."""
    tensor = recorder.on_meta(args[0])
    unknown = recorder.known.value(tensor) is None and recorder.routes.density(tensor) is None
    if unknown and tensor.dim() == 1 and recorder.made_by(tensor) in ("gt", "ne", "greater"):
        recorder.assume("tokens are spread evenly over the experts")
        return _places(recorder, tensor, tensor.numel(), torch.ones(tensor.shape))  # "which were hit": all of them
    return _where(recorder, tensor)


def _where(recorder: Recorder, mask: torch.Tensor) -> torch.Tensor:
    """Where a mask is set: known values decide, else the density of a one-hot mask."""
    value, density = recorder.known.value(mask), recorder.routes.density(mask)
    if value is not None:
        return _places(recorder, mask, int(torch.count_nonzero(value)), value)
    if density is None:
        raise recorder.cannot("aten.nonzero")
    recorder.assume("tokens are spread evenly over the experts")
    return _places(recorder, mask, max(1, round(density * mask.numel())), None)


def _places(recorder: Recorder, mask: torch.Tensor, count: int, value: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty((count, mask.dim()), dtype=torch.int64, device="meta")
    recorder.wait()  # the host asks how many there are
    recorder.emit("aten.nonzero", "gather", [mask], [out], {})
    if value is not None:
        recorder.known.note(out, torch.nonzero(value))
    return out


def index(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`x[mask]`: on a GPU the mask is turned into indices first, and the host waits for their number."""
    x, indices = args[:2]
    if not any(_is_mask(i) for i in indices):
        return NotImplemented
    whole: list[Any] = []
    for i in indices:
        if not _is_mask(i):
            whole.append(i)
            continue
        places = _where(recorder, recorder.on_meta(i))
        with recorder:
            whole += places.unbind(1)
    with recorder:
        return func(x, whole, *args[2:], **kwargs)


def index_put(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`x[mask] = number` fills on a GPU; `x[mask] = tensor` turns the mask into indices first."""
    x, indices, values = args[:3]
    masks = [i for i in indices if i is not None]
    if not any(_is_mask(i) for i in masks):
        return NotImplemented
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if len(masks) == 1 and values.numel() == 1 and not accumulates:
        with recorder:
            filled = _aten.masked_fill_ if func._schema.name.endswith("_") else _aten.masked_fill
            mask = masks[0]
            before = next(at for at, i in enumerate(indices) if i is not None)
            for _ in range(x.dim() - before - mask.dim()):
                mask = mask.unsqueeze(-1)
            return filled(x, mask, 0.0)
    for mask in masks:
        if _is_mask(mask):
            meta = recorder.on_meta(mask)
            value = recorder.known.value(meta)
            rows = int(torch.count_nonzero(value)) if value is not None else int(values.shape[0] if values.dim() else 1)
            _places(recorder, meta, rows, value)
    return NotImplemented


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in _MASKS


def masked_select(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> Any:
    """The same as `x[mask]`, with both broadcast."""
    with recorder:
        x, mask = torch.broadcast_tensors(*(recorder.on_meta(t) for t in args[:2]))
    return index(recorder, _aten.index.Tensor, (x, [mask]), {})


def by_value(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Unique values, counts of values, repeats: done for real on known values, and refused on others."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    metas = [recorder.on_meta(t) for t in flat if isinstance(t, torch.Tensor)]
    values = [recorder.known.value(t) if isinstance(t, torch.Tensor) else t for t in flat]
    name = func._schema.name.replace("::", ".")
    if any(v is None and isinstance(t, torch.Tensor) for v, t in zip(values, flat, strict=True)):
        raise recorder.cannot(name)
    real_args, real_kwargs = pytree.tree_unflatten(values, spec)
    real = func(*real_args, **real_kwargs)
    made: list[torch.Tensor] = []

    def twin(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        meta = torch.empty_like(t, device="meta")
        recorder.known.note(meta, t)
        made.append(meta)
        return meta

    found = pytree.tree_map(twin, real)
    recorder.wait()
    recorder.emit(name, "sort" if "unique" in name else "scatter", metas, made, {})
    return found


def repeats(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`repeat_interleave` with a tensor of repeats: how many there are in all may be given."""
    size = args[1] if len(args) > 1 else kwargs.get("output_size")
    if size is None:
        return by_value(recorder, func, args, kwargs)
    meta = recorder.on_meta(args[0])
    out = torch.empty((size,), dtype=torch.int64, device="meta")
    recorder.emit("aten.repeat_interleave", "copy", [meta], [out], {})
    return out


def bincount(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Counts of values: of unknown ones there are as many as the program says there are at least."""
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    tensor = recorder.on_meta(args[0])
    if recorder.known.value(tensor) is not None or not least:
        return by_value(recorder, func, args, kwargs)
    recorder.assume("bincount() is taken to find no value above its minlength")
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    out = torch.empty((least,), dtype=torch.int64 if weights is None else torch.float64, device="meta")
    recorder.wait()
    recorder.emit("aten.bincount", "scatter", [out, tensor], [out], {})
    return out


def pack(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> Any:
    """Sequences laid end to end, step by step: lengths and batch sizes stay on the CPU, as torch wants them."""
    x, lengths = args[:2]
    known = recorder.known.value(lengths)
    if known is None:
        raise recorder.cannot("aten._pack_padded_sequence")
    sizes = torch.tensor([int((known > step).sum()) for step in range(int(known.max()))])
    data = torch.empty((int(known.sum()), *x.shape[2:]), dtype=x.dtype, device="meta")
    recorder.emit("aten._pack_padded_sequence", "copy", [x], [data], {})
    return data, sizes


def pack_backward(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> torch.Tensor:
    """The gradient of sequences laid end to end."""
    out = torch.empty(args[1], dtype=args[0].dtype, device="meta")
    recorder.emit("aten._pack_padded_sequence_backward", "copy", [args[0]], [out], {})
    return out


def left_aligned(recorder: Recorder, _func: Any, _args: Any, _kwargs: Any) -> bool:
    """`nn.TransformerEncoder` with a padding mask: a GPU may drop the padding, which is not predicted."""
    recorder.assume("padding is computed on, as torch does without nested tensors")
    return False


def close(recorder: Recorder, func: Any, args: Any, _kwargs: Any) -> bool:
    """`torch.allclose`, `torch.equal`: one answer for the host."""
    name = func._schema.name.partition("::")[2]
    recorder.assume(f"{name}() is taken to be True")
    flags = torch.empty(args[0].shape, dtype=torch.bool, device="meta")
    recorder.emit("aten.eq", "elementwise", [recorder.on_meta(t) for t in args[:2]], [flags], {})
    recorder.emit("aten.all", "reduce", [flags], [torch.empty((), dtype=torch.bool, device="meta")], {})
    recorder.wait()
    return True


def checked(recorder: Recorder, _func: Any, _args: Any, _kwargs: Any) -> None:
    """A factorisation's errors: the host waits for them, and finds none."""
    recorder.wait()


COUNTED: dict[str, Callable[[Recorder, Any, Any, Any], Any]] = {
    "nonzero": nonzero, "index": index, "index_put": index_put, "index_put_": index_put,
    "_index_put_impl_": index_put, "masked_select": masked_select, "_unique2": by_value, "unique_dim": by_value,
    "unique_consecutive": by_value, "unique_dim_consecutive": by_value, "bincount": bincount,
    "repeat_interleave": repeats, "_pack_padded_sequence": pack, "_pack_padded_sequence_backward": pack_backward,
    "_nested_tensor_from_mask_left_aligned": left_aligned, "_linalg_check_errors": checked,
    "allclose": close, "equal": close,
}  # fmt: skip
"""Operators by their short names; NotImplemented: this call is an ordinary one."""
