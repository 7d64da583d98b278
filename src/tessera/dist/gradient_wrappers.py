"""Gradients of modules that torch already reduces in the backward pass: DDP by its hook, FSDP2 by its own call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import ArgumentError
from .collectives import reduce_scatter
from .compression import ErrorFeedback
from .gradient_reducer import GradientBucket, GradientReducer, PendingGradients
from .gradient_report import GradientLedger, TimedReduction
from .gradient_sync import GradientSync
from .liveness import explain_failure
from .records import record_collectives
from .reduction import Sent, reduce_scatter_into


class ReplicatedSync(GradientSync):
    """Lets DDP's hook hand its buckets to the reducer; DDP starts them itself."""

    def __init__(self, module: DistributedDataParallel, reducer: GradientReducer) -> None:
        super().__init__(reducer.ledger)
        self._module, self._reducer = module, reducer
        self._pass = -1
        self._pending: list[PendingGradients] = []
        self._is_on = True
        # A lambda, because DDP reads annotations and cannot read them as text.
        module.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))

    def _reduce(self, bucket: c10d.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not self._is_on:  # DDP cannot remove a hook
            return allreduce_hook(self._module.process_group, bucket)
        if self._pass != (this_pass := torch._C._current_graph_task_id()):
            self._pass, self._pending = this_pass, []
            # before DDP's own callback, so that errors name the collective
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        own = GradientBucket(bucket.buffer(), bucket.parameters(), bucket.index(), bucket.is_last())
        pending = self._reducer.start(own)
        self._pending.append(pending)
        return self._reducer.make_future(pending)

    def wait(self) -> None:
        pending, self._pending = self._pending, []
        for one in pending:
            self._reducer.wait(one)
        self._ledger.close_step()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._module.no_sync():
            yield

    def remove(self) -> None:
        super().remove()
        if self._is_on:
            self._is_on = False
            self._reducer.close()


class ShardedSync(GradientSync):
    """Replaces the call by which FSDP2 reduces and scatters each of its groups of parameters.

    On CUDA, FSDP2 does so on a stream of its own, beside the backward pass. On a CPU it waits, so nothing is hidden.
    """

    def __init__(self, module: Any, way: dict[str, Any], *, feedback: bool) -> None:
        super().__init__(GradientLedger())
        if other := set(way) - {"deterministic", "compress"}:
            raise ArgumentError(
                f"overlap_gradients: {', '.join(sorted(other))} with FSDP2",
                why="FSDP2 reduces and scatters, and only the way to add can be changed",
                fix="deterministic= or compress= work",
            )
        if not hasattr(module, "set_custom_reduce_scatter"):
            raise ArgumentError(
                "overlap_gradients: this torch does not let FSDP2's reductions be replaced", fix="torch 2.9"
            )
        self._module = module
        self._inner = [m for m in module.modules() if is_sharded(m)]
        for inner in self._inner:
            inner.set_custom_reduce_scatter(_ShardedReduction(self._ledger, way, feedback=feedback))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._module.set_requires_gradient_sync(True)

    def remove(self) -> None:
        super().remove()
        for inner in self._inner:
            inner.set_custom_reduce_scatter(_ShardedReduction(GradientLedger(), {}, feedback=False))


def is_sharded(module: Any) -> bool:
    """Return whether `fully_shard` (FSDP2) was applied to a module."""
    return hasattr(module, "set_requires_gradient_sync")


class _ShardedReduction:
    """The object that FSDP2 calls (its `ReduceScatter`) for one group of parameters."""

    def __init__(self, ledger: GradientLedger, way: dict[str, Any], *, feedback: bool) -> None:
        self._ledger, self._way = ledger, way
        if "compress" in way and feedback:
            self._way = way | {"feedback": ErrorFeedback()}
        self._pass = -1

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if self._pass != (this_pass := torch._C._current_graph_task_id()):
            self._pass = this_pass
            torch.autograd.Variable._execution_engine.queue_callback(self._ledger.close_step)
        ranks = c10d.get_world_size(group)
        plain_bytes = input_tensor.numel() * input_tensor.element_size() * (ranks - 1) / ranks
        timed = TimedReduction(input_tensor, plain_bytes, Sent(plain_bytes))
        with self._ledger.mark_waiting():
            timed.begin_ns = time.monotonic_ns()
            if self._way:
                timed.sent = self._reduce(output_tensor, input_tensor, group, op)
            else:
                with explain_failure("the reduction of gradients", group):
                    reduce_scatter_into(output_tensor, input_tensor, op, group)
            timed.stamp_end()
        self._ledger.add(timed)

    def _reduce(self, output: torch.Tensor, x: torch.Tensor, group: Any, op: Any) -> Sent:
        if op not in (c10d.ReduceOp.AVG, c10d.ReduceOp.SUM):
            raise ArgumentError(f"FSDP2 reduces by {op} here", why="a divide factor was set", fix="leave it unset")
        is_mean = op == c10d.ReduceOp.AVG
        rows = x.view(c10d.get_world_size(group), -1)
        with record_collectives() as records:
            output.copy_(reduce_scatter(rows, "mean" if is_mean else "sum", group=group, **self._way).view(-1))
        return records[-1].to_sent(divide_by=len(rows) if is_mean else 1)
