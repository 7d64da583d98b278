"""Collectives over torch.distributed: reproducible, by node, paced, compressed or sparse; each says what it sent."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as c10d

from ..errors import ArgumentError, check_choice, is_integer
from ..stream import Stream
from ..stream import on as stream_on
from .agreement import agree, check_device, count_ranks, describe_call, is_connected, tell_refusal
from .compression import Codec, ErrorFeedback, make_codec
from .groups import resolve_group
from .liveness import explain_failure
from .mesh import Mesh, find_mesh
from .pacing import Jitter, Pace, Phase
from .records import note
from .reduction import (
    COMBINE,
    MEANS,
    REDUCE_OP,
    WIDER,
    Sent,
    as_movable,
    gather_into,
    is_dry,
    read_bound,
    reduce_compressed,
    reduce_flat,
    reduce_hierarchical,
    reduce_in_rank_order,
    reduce_scatter_into,
    reduce_sparse,
    reduce_two_step,
    scatter_compressed,
    scatter_in_order,
)

Algorithm = Literal["flat", "two_step", "hierarchical"]
ALGORITHMS = ("flat", "two_step", "hierarchical")


@dataclass(slots=True)
class PendingReduce:
    """A running all-reduce; `wait` returns the tensor."""

    tensor: torch.Tensor
    _work: Any = None
    _buffer: Any = None
    _divide_by: int = 1

    def wait(self) -> torch.Tensor:
        """Return the reduced tensor. On CUDA, the current stream waits for it, not the host. Safe to call twice."""
        if self._work is not None:
            self._work.wait()
        self._work = None
        if self._divide_by > 1:
            self._buffer.div_(self._divide_by)
            self._divide_by = 1
        if self._buffer is not None and self._buffer is not self.tensor:
            self.tensor.copy_(self._buffer)
        self._buffer = None
        return self.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduction:
    """How to all-reduce: all arguments except the tensor."""

    op: str
    group: Any
    mesh: Mesh | None
    algorithm: Algorithm
    deterministic: bool
    codec: Codec | None
    feedback: ErrorFeedback | None
    sparse: bool
    node_size: int
    pace: Pace

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce in place."""
        begun = time.perf_counter()
        rank, ranks = c10d.get_rank(), c10d.get_world_size(self.group)
        delay_s = self.pace.wait_to_start(self.mesh, rank, self.node_size, seed=_seed_jitter(self.group))
        dense = x.to(WIDER.get(x.dtype, x.dtype)).contiguous()  # the tensor itself, if it is dense already
        with explain_failure("all_reduce", self.group):
            line = describe_call("all_reduce", x, self.op, self._name, f"chunks={self.pace.chunks}")
            agree(line, 0, self.group, x.device)
            sent = self._reduce(dense)
        if self.op in MEANS:
            dense.div_(ranks)
        if dense is not x:
            x.copy_(dense)
        _calls[resolve_group(self.group).group_name] += 1
        note("all_reduce", self._name, ranks, x, sent, time_s=time.perf_counter() - begun, delay_s=delay_s)
        return x

    @property
    def _name(self) -> str:
        parts = [self.algorithm, "rank_order" * self.deterministic, self.codec.format if self.codec else ""]
        return "+".join(p for p in [*parts, "sparse" * self.sparse] if p)

    def _reduce(self, x: torch.Tensor) -> Sent:
        if self.sparse:
            return reduce_sparse(x, self.group)
        flat = x.view(-1)
        bounds = [round(i * flat.numel() / self.pace.chunks) for i in range(self.pace.chunks + 1)]
        total = Sent(0.0)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
            if number and self.pace.gap_s:
                time.sleep(self.pace.gap_s)
            total = _add(total, self._reduce_chunk(flat[start:stop]))
        return total

    def _reduce_chunk(self, x: torch.Tensor) -> Sent:
        if self.codec is not None:
            return reduce_compressed(x, self.group, self.codec, self.feedback)
        if self.algorithm == "hierarchical":
            return reduce_hierarchical(x, self.op, self.group, self.node_size, in_order=self.deterministic)
        if self.deterministic:
            return reduce_in_rank_order(x, self.op, self.group)
        return (reduce_two_step if self.algorithm == "two_step" else reduce_flat)(x, self.op, self.group)


def _add(a: Sent, b: Sent) -> Sent:
    between = None if b.between_nodes is None else (a.between_nodes or 0.0) + b.between_nodes
    bound = None if a.error_bound is None or b.error_bound is None else max(a.error_bound, b.error_bound)
    return Sent(a.bytes + b.bytes, between, bound)


_calls: Counter[str] = Counter()
"""Successful all-reduces of each group. All its ranks have the same count, also if one of them refused a call."""


def _seed_jitter(group: Any) -> str:
    """Return a seed that is equal on the ranks of a group, which call in one order, and differs from other groups'."""
    group = resolve_group(group)
    return f"{c10d.get_process_group_ranks(group)[0]} {group.group_name} {_calls[group.group_name]}"


def all_reduce(
    x: Any,
    op: str = "sum",
    *,
    group: Any = None,
    mesh: Mesh | None = None,
    axis: str | None = None,
    deterministic: bool = False,
    algorithm: Algorithm = "flat",
    compress: str | Codec | None = None,
    feedback: ErrorFeedback | None = None,
    sparse: bool = False,
    phase: str | Phase | None = None,
    jitter_ms: Jitter = 0.0,
    chunks: int = 1,
    gap_ms: float = 0.0,
    node_size: int | None = None,
    stream: Stream | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce a tensor over ranks: "sum", "mean" ("avg"), "max", "min" or "prod". With one process, this is the tensor.

    As in torch.distributed, `x` is overwritten and returned. That is not possible for a tensor that autograd follows:
    for "sum" and "mean" its reduction is a new tensor, and gradients are reduced in the same way. The ranks are those
    of `group`, or of this rank's group along `axis` of `mesh`. With `stream`, the collective runs there, after the work
    already queued on the current stream; `async_op` (plain reductions only) returns a `PendingReduce` at once.

    `deterministic` adds in the order of the ranks: the same bits on every rank and in every run. `algorithm` is "flat"
    (the backend's), "two_step" (reduce-scatter, all-gather) or "hierarchical" (inside nodes of `node_size` ranks, then
    across). `compress` sends "fp16", "bf16", "bf16-stochastic" or "fp8"; with `feedback`, the rounding error is added
    at the next call. `sparse` sends only rows that are not zero. `phase="group_offset(tp)"` lets the groups of an axis
    start one after the other, `jitter_ms` adds a random wait (at most that, or between two: `(1, 5)`), `chunks` and
    `gap_ms` spread the bytes. `dist.record_collectives()` tells what was sent and how large the error can be.
    """
    if axis is not None:
        mesh = find_mesh(mesh, axis)
        group = mesh.process_group(axis) if is_connected() else None
    with tell_refusal("all_reduce", group):
        _check("all_reduce", x, op, async_op)
        _check_way("all_reduce", x, op, algorithm, compress, feedback, sparse)
        codec, pace = make_codec(compress), Pace.make(phase, jitter_ms, chunks, gap_ms)
        ranks = count_ranks(group)
        if ranks > 1:
            check_device(x, group)
        if async_op and (deterministic or codec or sparse or pace != Pace() or algorithm != "flat"):
            raise ArgumentError("all_reduce: async_op works with plain reductions only", fix="give it a stream instead")
    with stream_on(stream, x):
        if ranks == 1:
            return PendingReduce(x) if async_op else x
        if async_op:
            return _start(x, op, group)
        how = _Reduction(
            op=op,
            group=group,
            mesh=mesh,
            algorithm=algorithm,
            deterministic=deterministic,
            codec=codec,
            feedback=feedback,
            sparse=sparse,
            node_size=node_size or int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or c10d.get_world_size(),
            pace=pace,
        )
        if x.requires_grad and torch.is_grad_enabled():
            return _AllReduce.apply(x, how)
        how.run(x.detach())
        return x


def _check(kind: str, x: Any, op: str, async_op: bool) -> None:
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{kind}: x is a {type(x).__name__}", fix="pass a tensor")
    check_choice(f"{kind}: op", op, COMBINE)
    if op in MEANS and not (x.is_floating_point() or x.is_complex()):
        raise ArgumentError(f"{kind}: op={op!r} of {x.dtype}", why="integers have no mean", fix='op="sum"')
    if x.is_complex() and op not in ("sum", *MEANS):
        raise ArgumentError(f"{kind}: op={op!r} of {x.dtype}", why="complex numbers have no order", fix='op="sum"')
    follows = x.requires_grad and torch.is_grad_enabled()
    if follows and op not in ("sum", *MEANS):
        raise ArgumentError(f"{kind}: op={op!r} of a tensor that requires gradients", fix="x.detach(), or sum or mean")
    if follows and async_op:
        raise ArgumentError(f"{kind}: async_op of a tensor that requires gradients", fix="x.detach()")


def _check_way(
    kind: str, x: Any, op: str, algorithm: str, compress: str | Codec | None, feedback: Any, sparse: bool
) -> None:
    check_choice(f"{kind}: algorithm", algorithm, ALGORITHMS)
    if (compress or sparse) and op not in ("sum", *MEANS):
        raise ArgumentError(f"{kind}: op={op!r} cannot be compressed or sparse", fix='op="sum" or "mean"')
    if sparse:
        _refuse_in_simulation(x, "all_reduce(sparse=True)")
        if is_dry():
            raise ArgumentError(
                "all_reduce(sparse=True) cannot be counted in dist.dry",
                why="how many rows travel depends on their values",
                fix="leave sparse out: the bytes are then those of all rows",
            )
    if compress and not x.is_floating_point():
        raise ArgumentError(f"{kind}: compress={compress!r} of {x.dtype}", why="only floats are rounded")
    if not isinstance(feedback, ErrorFeedback | None):
        fix = "feedback=dist.ErrorFeedback(), the same at each call for one tensor"
        raise ArgumentError(f"{kind}: feedback={feedback!r}", fix=fix)


def _check_rows(kind: str, x: torch.Tensor) -> None:
    if not x.dim():
        raise ArgumentError(f"{kind}: x is a single number", why="its rows go to different ranks", fix="x.view(1)")


def _refuse_in_simulation(x: torch.Tensor, what: str) -> None:
    """Refuse a simulated run: one process is all ranks there, and each step has one shape for all of them."""
    if type(x).__name__ == "LocalTensor":
        raise ArgumentError(f"{what} does not work in dist.simulate", fix="use as many Gloo processes")


def _start(x: torch.Tensor, op: str, group: Any) -> PendingReduce:
    buffer = x.detach() if x.is_contiguous() else x.detach().contiguous()  # libraries reduce dense memory only
    if x.dtype in WIDER:
        raise ArgumentError(f"all_reduce: async_op of {x.dtype}", fix="give it a stream instead")
    kind, divide_by = getattr(c10d.ReduceOp, REDUCE_OP[op]), count_ranks(group) if op in MEANS else 1
    return PendingReduce(x, c10d.all_reduce(buffer, op=kind, group=group, async_op=True), buffer, divide_by)


class _AllReduce(torch.autograd.Function):
    """An all-reduce for autograd: the gradient of a sum over ranks is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Any, how: _Reduction) -> Any:
        ctx.how = how
        return how.run(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.how.run(gradients[0].clone(memory_format=torch.contiguous_format)), None


def all_gather(x: torch.Tensor, *, group: Any = None) -> torch.Tensor:
    """Return the tensors of all ranks, one after the other along the first dimension. Their first sizes may differ."""
    ranks = _count_ranks_for("all_gather", x, group)
    if ranks == 1:
        return x.clone()
    begun = time.perf_counter()
    with explain_failure("all_gather", group):
        line = describe_call("all_gather", x, any_first=True)
        sizes = agree(line, x.shape[0] if x.dim() else 1, group, x.device, sizes_needed=True)
        rows = x.detach().reshape(sizes[c10d.get_rank(group)], math.prod(x.shape[1:])).contiguous()
        most, width = max(sizes), rows.shape[1]
        own = rows.new_zeros(max(most * width, 1))
        own[: rows.numel()] = rows.view(-1)
        whole = own.new_empty(ranks * own.numel())
        gather_into(whole, own, group)
    parts = [part[: n * width].view(n, width) for part, n in zip(whole.view(ranks, -1), sizes, strict=True)]
    sent = Sent((ranks - 1) * own.numel() * x.element_size())
    note("all_gather", "flat", ranks, x, sent, time_s=time.perf_counter() - begun)
    return torch.cat(parts).view(sum(sizes), *x.shape[1:])


def _count_ranks_for(kind: str, x: torch.Tensor, group: Any) -> int:
    """Return the ranks of a group that can move the tensor; a rank that cannot tells the others."""
    with tell_refusal(kind, group):
        ranks = count_ranks(group)
        if ranks > 1:
            check_device(x, group)
    return ranks


def reduce_scatter(
    x: torch.Tensor,
    op: str = "sum",
    *,
    group: Any = None,
    deterministic: bool = False,
    compress: str | Codec | None = None,
    feedback: ErrorFeedback | None = None,
) -> torch.Tensor:
    """Return this rank's part, along the first dimension, of the sum over ranks; last parts may be shorter or empty."""
    with tell_refusal("reduce_scatter", group):
        _check("reduce_scatter", x, op, async_op=False)
        _check_way("reduce_scatter", x, op, "flat", compress, feedback, sparse=False)
        _check_rows("reduce_scatter", x)
        codec = make_codec(compress)
    ranks = _count_ranks_for("reduce_scatter", x, group)
    if ranks == 1:
        return x.clone()
    if x.shape[0] % ranks:
        _refuse_in_simulation(x, "reduce_scatter of unequal parts")
    begun = time.perf_counter()
    length = -(-x.shape[0] // ranks)
    rows = x.detach().reshape(x.shape[0], math.prod(x.shape[1:])).to(WIDER.get(x.dtype, x.dtype))
    padded = rows.new_zeros(max(length, 1) * ranks, rows.shape[1])
    padded[: x.shape[0]] = rows
    flat = padded.view(-1)
    own = flat.new_empty(flat.numel() // ranks)
    sent = Sent(flat.numel() * flat.element_size() * (ranks - 1) / ranks)
    way = codec.format if codec else "rank_order" * deterministic
    with explain_failure("reduce_scatter", group):
        agree(describe_call("reduce_scatter", x, op, way), 0, group, x.device)
        if codec is not None:
            total, bound, sent_bytes = scatter_compressed(flat.float(), group, codec, feedback)
            own.copy_(total)
            sent = Sent(sent_bytes, error_bound=read_bound([bound]))
        elif deterministic:
            own.copy_(scatter_in_order(flat, op, group))
        else:
            reduce_scatter_into(own, flat, op, group)
    if op in MEANS:
        own.div_(ranks)
    begin = min(c10d.get_rank(group) * length, x.shape[0])
    stop = min(begin + length, x.shape[0])
    note("reduce_scatter", way or "flat", ranks, x, sent, time_s=time.perf_counter() - begun)
    return own.view(max(length, 1), rows.shape[1])[: stop - begin].view(stop - begin, *x.shape[1:]).to(x.dtype)


def all_to_all(x: torch.Tensor, counts: Sequence[int], *, group: Any = None) -> tuple[torch.Tensor, list[int]]:
    """Send `counts[r]` rows to each rank r, in order; return the rows that arrived and their number from each rank."""
    with tell_refusal("all_to_all", group):
        _check_rows("all_to_all", x)
        whole = all(is_integer(n) and n >= 0 for n in counts)
        if not whole or len(counts) != count_ranks(group) or sum(counts) != x.shape[0]:
            raise ArgumentError(
                f"all_to_all: counts={list(counts)}",
                why=f"there are {count_ranks(group)} ranks and {x.shape[0]} rows",
                fix="give one count for each rank; together they are all rows",
            )
    ranks = _count_ranks_for("all_to_all", x, group)
    if ranks == 1:
        return x.clone(), list(counts)
    if len(set(counts)) > 1:
        _refuse_in_simulation(x, "all_to_all of unequal parts")
    begun = time.perf_counter()
    sending = torch.tensor(list(counts), device=x.device)
    arriving = torch.empty_like(sending)
    with explain_failure("all_to_all", group):
        agree(describe_call("all_to_all", x, any_first=True), 0, group, x.device)
        c10d.all_to_all_single(arriving, sending, group=group)
        own = counts[c10d.get_rank(group)]
        # In a dry run, every rank calls with what this one does.
        received = [own] * ranks if is_dry() else [int(n) for n in arriving.tolist()]
        rows = as_movable(x.detach().reshape(x.shape[0], math.prod(x.shape[1:])).contiguous())
        out = rows.new_empty(sum(received), rows.shape[1])
        c10d.all_to_all_single(out, rows, received, list(counts), group=group)
    row_bytes = x.element_size() * (x.numel() // x.shape[0] if x.shape[0] else 0)
    note("all_to_all", "flat", ranks, x, Sent((x.shape[0] - own) * row_bytes), time_s=time.perf_counter() - begun)
    return out.view(x.dtype).view(sum(received), *x.shape[1:]), received


def broadcast(x: torch.Tensor, source: int = 0, *, group: Any = None) -> torch.Tensor:
    """Overwrite `x` with the tensor of the group's rank `source`."""
    with tell_refusal("broadcast", group):
        ranks = count_ranks(group)
        if not (is_integer(source) and 0 <= source < ranks):
            raise ArgumentError(f"broadcast: source={source!r} of {ranks} ranks", fix=f"0 to {ranks - 1}")
    if _count_ranks_for("broadcast", x, group) == 1:
        return x
    begun = time.perf_counter()
    dense = x.detach() if x.is_contiguous() else x.detach().contiguous()
    with explain_failure("broadcast", group):
        agree(describe_call("broadcast", x, f"source={source}"), 0, group, x.device)
        c10d.broadcast(as_movable(dense), c10d.get_global_rank(resolve_group(group), source), group=group)
    if not x.is_contiguous():
        x.detach().copy_(dense)
    is_source = c10d.get_rank(group) == source
    sent = Sent(x.numel() * x.element_size() * (ranks - 1) / ranks * is_source)
    note("broadcast", "flat", ranks, x, sent, time_s=time.perf_counter() - begun)
    return x
