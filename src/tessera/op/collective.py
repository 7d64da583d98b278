"""`op.all_reduce`: plain all-reduce over torch.distributed, on a stream, with gradients where they make sense."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ArgumentError
from ..stream import Stream
from ..stream import on as stream_on
from .arguments import check_choice, check_tensors

OPS = {"sum": "SUM", "mean": "SUM", "avg": "SUM", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}
_MEANS = ("mean", "avg")


@dataclass(slots=True)
class PendingReduce:
    """A running all-reduce; `wait` returns the tensor."""

    tensor: torch.Tensor
    _work: Any = None
    _buffer: Any = None
    _divide_by: int = 1

    def wait(self) -> torch.Tensor:
        """The reduced tensor. On CUDA the current stream waits for it, the host does not. Safe to call twice."""
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


def all_reduce(
    x: Any, op: str = "sum", *, group: Any = None, stream: Stream | None = None, async_op: bool = False
) -> Any:
    """Reduce a tensor over the ranks of a group: "sum", "mean" ("avg"), "max", "min" or "prod". One process: itself.

    In place, as torch.distributed has it: `x` is overwritten and returned. A tensor that autograd follows cannot be;
    for "sum" and "mean" its reduction is a new tensor, and gradients are reduced in the same way. With `stream` the
    collective runs there, after the work already queued on the current stream; `async_op` returns a `PendingReduce` at
    once, whose `wait()` returns the tensor.
    """
    check_tensors("all_reduce", floating=False, x=x)
    check_choice("all_reduce", "op", op, OPS)
    if op in _MEANS and not (x.is_floating_point() or x.is_complex()):
        raise ArgumentError(f"op.all_reduce: op={op!r} of {x.dtype}", why="integers have no mean", fix='op="sum"')
    follows = x.requires_grad and torch.is_grad_enabled()
    if follows and op not in ("sum", *_MEANS):
        raise ArgumentError(
            f"op.all_reduce: op={op!r} of a tensor that requires gradients", fix="x.detach(), or sum or mean"
        )
    if follows and async_op:
        raise ArgumentError("op.all_reduce: async_op of a tensor that requires gradients", fix="x.detach()")
    with stream_on(stream, x):
        if _ranks(group) == 1:
            return PendingReduce(x) if async_op else x
        if follows:
            return _AllReduce.apply(x, op, group)
        pending = _start(x, op, group, async_op=async_op)
        return pending if async_op else pending.wait()


def _ranks(group: Any) -> int:
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        world = os.environ.get("WORLD_SIZE", "1")
        if world.isdigit() and int(world) > 1:  # a launcher's: reducing nothing would go unseen
            raise ArgumentError(
                f"op.all_reduce: {world} ranks were launched, and none of them is connected",
                fix="torch.distributed.init_process_group() first",
            )
        return 1
    ranks = int(dist.get_world_size(group))
    if ranks < 1:
        raise ArgumentError("op.all_reduce: this rank is not in the group", fix="call it on the group's ranks only")
    return ranks


def _start(x: Any, op: str, group: Any, *, async_op: bool) -> PendingReduce:
    dist = torch.distributed
    buffer = x.detach() if x.is_contiguous() else x.detach().contiguous()  # libraries reduce dense memory only
    kind, divide_by = getattr(dist.ReduceOp, OPS[op]), 1
    if op in _MEANS:
        if dist.get_backend(group) == "nccl":  # the only one with a mean of its own
            kind = dist.ReduceOp.AVG
        else:
            divide_by = _ranks(group)
    work = dist.all_reduce(buffer, op=kind, group=group, async_op=async_op)
    return PendingReduce(x, work, buffer, divide_by)


class _AllReduce(torch.autograd.Function):  # torch is Any here
    """The gradient of a sum over ranks is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Any, op: str, group: Any) -> Any:
        ctx.op, ctx.group = op, group
        return _start(x.detach().clone(), op, group, async_op=False).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        return _start(gradient, ctx.op, ctx.group, async_op=False).wait(), None, None
