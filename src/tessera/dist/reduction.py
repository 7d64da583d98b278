"""The ways to all-reduce a flat tensor: each gives the sum on every rank, and says what it sent.

::

    flat           the backend's own all-reduce
    two_step       reduce-scatter, then all-gather: the same bytes, and each half can be overlapped or paced
    rank_order     all-to-all, add in the order of the ranks, all-gather: the same bits in every run
    hierarchical   inside each node, then across nodes on 1/n of the bytes, then inside again
    compressed     all-to-all of rounded values, add in float32, round, all-gather
    sparse         only rows that are not zero travel
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import torch
import torch.distributed as c10d
from torch._guards import detect_fake_mode

from .compression import Codec, ErrorFeedback, largest
from .groups import make_group, resolve_group

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "mean": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}
REDUCE_OP = {"sum": "SUM", "mean": "SUM", "avg": "SUM", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}
MEANS = ("mean", "avg")
WIDER = {
    torch.bool: torch.int32,  # Gloo would add 1 and 1 to a "bool" of 2
    torch.int16: torch.int32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}
"""Types that backends do not add: they are added as these wider types, and rounded back."""
_INDEX_BYTES = 8
_EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sent: all bytes, those that left its node (None: not known), and a bound of the error.

    The bound is None if there are no values to compute it from: in a dry run.
    """

    bytes: float
    between_nodes: float | None = None
    error_bound: float | None = 0.0


def is_dry() -> bool:
    """Return whether tensors have no values now, and other ranks do not exist: in `dist.dry`."""
    return detect_fake_mode() is not None


def read_bound(bounds: Sequence[torch.Tensor]) -> float | None:
    """Return the largest of some bounds; None in a dry run."""
    return None if is_dry() else max(map(float, bounds))


def reduce_flat(x: torch.Tensor, op: str, group: Any) -> Sent:
    """Run the backend's all-reduce, in place."""
    c10d.all_reduce(x, op=getattr(c10d.ReduceOp, REDUCE_OP[op]), group=group)
    return Sent(ring_bytes(x.numel() * x.element_size(), c10d.get_world_size(group)))


def ring_bytes(nbytes: float, ranks: int) -> float:
    """Return the bytes that a rank sends in the most frugal all-reduce: a ring's, or reduce-scatter and all-gather."""
    return 2.0 * nbytes * (ranks - 1) / ranks


def reduce_two_step(x: torch.Tensor, op: str, group: Any) -> Sent:
    """Reduce-scatter, then all-gather."""
    ranks = c10d.get_world_size(group)
    padded = pad_to_multiple(x, ranks)
    own = padded.new_empty(padded.numel() // ranks)
    reduce_scatter_into(own, padded, op, group)
    gather_into(padded, own, group)
    x.copy_(padded[: x.numel()])
    return Sent(ring_bytes(padded.numel() * x.element_size(), ranks))


def reduce_in_rank_order(x: torch.Tensor, op: str, group: Any) -> Sent:
    """Add in the order of the ranks, floats in float64: every rank and every run gets the same bits."""
    ranks = c10d.get_world_size(group)
    padded = pad_to_multiple(x, ranks)
    gather_into(padded, scatter_in_order(padded, op, group), group)
    x.copy_(padded[: x.numel()])
    return Sent(ring_bytes(padded.numel() * x.element_size(), ranks))


def scatter_in_order(flat: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    """Return this rank's part of all ranks' tensors, combined from the first rank to the last; floats in float64."""
    received = torch.empty_like(flat)
    c10d.all_to_all_single(received, flat, group=group)
    parts = received.view(c10d.get_world_size(group), -1)
    if parts.is_floating_point() or parts.is_complex():
        parts = parts.to(torch.complex128 if parts.is_complex() else torch.float64)
    return reduce(COMBINE[op], parts.unbind(0)).to(flat.dtype)


def reduce_hierarchical(x: torch.Tensor, op: str, group: Any, node_size: int, *, in_order: bool = False) -> Sent:
    """Reduce inside the node, across nodes, and inside again. Only one rank's bytes of each node go across."""
    nodes = split_nodes(group, node_size)
    if len(nodes) == 1 or max(map(len, nodes)) == 1:
        return (reduce_in_rank_order if in_order else reduce_flat)(x, op, group)
    inner, outer = node_groups(resolve_group(group), node_size)
    across = reduce_in_rank_order if in_order else reduce_flat
    if len({len(node) for node in nodes}) > 1:
        return _reduce_by_leaders(x, op, inner, outer, across)
    ranks = len(nodes[0])
    padded = pad_to_multiple(x, ranks)
    if in_order:
        own = scatter_in_order(padded, op, inner)
    else:
        own = padded.new_empty(padded.numel() // ranks)
        reduce_scatter_into(own, padded, op, inner)
    sent = across(own, op, outer)
    gather_into(padded, own, inner)
    x.copy_(padded[: x.numel()])
    return Sent(ring_bytes(padded.numel() * x.element_size(), ranks) + sent.bytes, sent.bytes)


def _reduce_by_leaders(x: torch.Tensor, op: str, inner: Any, outer: Any, across: Callable[..., Sent]) -> Sent:
    """Reduce over nodes of different sizes: each node's first rank adds up its tensors, and sends the sum back."""
    leader = c10d.get_global_rank(inner, 0)
    reduce_in_rank_order(x, op, inner)
    sent = across(x, op, outer) if c10d.get_rank() == leader else Sent(0.0)
    c10d.broadcast(x, leader, group=inner)
    return Sent(ring_bytes(x.numel() * x.element_size(), c10d.get_world_size(inner)) + sent.bytes, sent.bytes)


def reduce_compressed(x: torch.Tensor, group: Any, codec: Codec, feedback: ErrorFeedback | None) -> Sent:
    """Reduce in float32, but send rounded values. The bound is for every element of the sum."""
    ranks = c10d.get_world_size(group)
    total, bound, _ = scatter_compressed(pad_to_multiple(x.float(), ranks), group, codec, feedback)
    count = len(total)
    if feedback is not None:
        total = feedback.add_to("summed", total)
    own = codec.encode(total)
    rounded = codec.decode(own, count)
    if feedback is not None:
        feedback.keep("summed", total - rounded)
    message = torch.cat([own, (bound + largest(total - rounded)).view(torch.uint8)])
    gathered = message.new_empty(ranks * message.numel())
    gather_into(gathered, message, group)
    results = [_split_bound(part, codec, count) for part in gathered.view(ranks, -1)]
    x.copy_(torch.cat([part for part, _ in results])[: x.numel()])
    return Sent(2.0 * (ranks - 1) * message.numel(), error_bound=read_bound([b for _, b in results]))


def scatter_compressed(
    values: torch.Tensor, group: Any, codec: Codec, feedback: ErrorFeedback | None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return this rank's part of the sum of flat float32 values, the bound of its error, and the bytes it sent."""
    ranks = c10d.get_world_size(group)
    count = values.numel() // ranks
    if feedback is not None:
        values = feedback.add_to("sent", values)
    parts, error = _encode_parts(values.view(ranks, -1), codec)
    if feedback is not None:
        feedback.keep("sent", values - torch.cat([codec.decode(p, count) for p in parts]))
    received = torch.empty_like(outgoing := _with_bound(parts, error))
    c10d.all_to_all_single(received, outgoing, group=group)
    arrived = [_split_bound(part, codec, count) for part in received.view(ranks, -1)]
    # Adding rounds, too: once for each rank, by at most the sum of the magnitudes times float32's precision.
    adding = ranks * _EPSILON * torch.stack([largest(part) for part, _ in arrived]).sum(0)
    bound = torch.stack([b for _, b in arrived]).sum(0) + adding
    return reduce(torch.add, [part for part, _ in arrived]), bound, outgoing.numel() * (ranks - 1) / ranks


def _encode_parts(parts: torch.Tensor, codec: Codec) -> tuple[list[torch.Tensor], torch.Tensor]:
    encoded = [codec.encode(part) for part in parts]
    errors = [largest(part - codec.decode(e, len(part))) for part, e in zip(parts, encoded, strict=True)]
    return encoded, torch.stack(errors)


def _with_bound(parts: list[torch.Tensor], errors: torch.Tensor) -> torch.Tensor:
    """Return each part with its largest error in four more bytes: bounds are sent with the values."""
    return torch.cat([t for part, e in zip(parts, errors, strict=True) for t in (part, e.view(torch.uint8))])


def _split_bound(part: torch.Tensor, codec: Codec, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return codec.decode(part[:-4], count), part[-4:].clone().view(torch.float32)


def reduce_sparse(x: torch.Tensor, group: Any) -> Sent:
    """Sum tensors whose rows (slices along the first dimension) are mostly zero: rows are sent with their numbers."""
    ranks = c10d.get_world_size(group)
    rows = x.view(x.shape[0] if x.dim() else 1, math.prod(x.shape[1:]))
    own = torch.nonzero((rows != 0).any(1)).view(-1)
    counts = own.new_empty(ranks)
    gather_into(counts, own.new_tensor([len(own)]), group)
    most, width = int(counts.max()), rows.shape[1]
    numbers, values = own.new_zeros(most), rows.new_zeros(most, width)
    numbers[: len(own)], values[: len(own)] = own, rows[own]
    all_numbers, all_values = own.new_empty(ranks * most), rows.new_empty(ranks * most, width)
    gather_into(all_numbers, numbers, group)
    gather_into(all_values.view(-1), values.view(-1), group)
    wide = torch.float64 if rows.is_floating_point() else torch.complex128 if rows.is_complex() else rows.dtype
    total = torch.zeros(rows.shape, dtype=wide, device=rows.device)
    for rank, count in enumerate(counts.tolist()):  # in the order of the ranks, so that every run gives the same bits
        part = slice(rank * most, rank * most + count)
        total.index_add_(0, all_numbers[part], all_values[part].to(wide))
    x.copy_(total.to(x.dtype).view(x.shape))
    return Sent((ranks - 1) * (most * (width * x.element_size() + _INDEX_BYTES) + _INDEX_BYTES))


def pad_to_multiple(x: torch.Tensor, parts: int) -> torch.Tensor:
    """Return a copy with zeros at the end, so that it can be cut into equal parts of at least one element each."""
    size = max(-(-x.numel() // parts), 1) * parts
    padded = x.new_zeros(size)
    padded[: x.numel()] = x
    return padded


def reduce_scatter_into(own: torch.Tensor, whole: torch.Tensor, op: Any, group: Any) -> None:
    """Call torch's reduce-scatter by the name that this torch has for it; `op` is a name, or torch's."""
    scatter = getattr(c10d, "reduce_scatter_single", None) or c10d.reduce_scatter_tensor
    scatter(own, whole, op=getattr(c10d.ReduceOp, REDUCE_OP[op]) if isinstance(op, str) else op, group=group)


def gather_into(whole: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """Call torch's all-gather by the name that this torch has for it."""
    gather = getattr(c10d, "all_gather_single", None) or c10d.all_gather_into_tensor
    gather(as_movable(whole), as_movable(own), group=group)


def as_movable(x: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a type that every backend can send."""
    if x.dtype in WIDER and x.dim() and x.stride(-1) != 1:  # a single element is dense with any stride
        x = x.as_strided(x.shape, [1] * x.dim())
    return x.view(torch.uint8) if x.dtype in WIDER else x


def split_nodes(group: Any, node_size: int) -> list[list[int]]:
    """Return the ranks of a group by node."""
    nodes: dict[int, list[int]] = {}
    for rank in c10d.get_process_group_ranks(resolve_group(group)):
        nodes.setdefault(rank // node_size, []).append(rank)
    return list(nodes.values())


@lru_cache(maxsize=64)
def node_groups(group: Any, node_size: int) -> tuple[Any, Any]:
    """Return this rank's group inside its node, and the one across nodes.

    The latter has the ranks at the same place in their nodes, or the first ranks if nodes have different sizes.
    """
    nodes = split_nodes(group, node_size)
    here = next(node for node in nodes if c10d.get_rank() in node)
    inner = make_group(here, like=group)
    even = len({len(node) for node in nodes}) == 1
    place = here.index(c10d.get_rank()) if even else 0
    across = [node[place] for node in nodes]
    outer = make_group(across, like=group) if c10d.get_rank() in across else None
    return inner, outer
