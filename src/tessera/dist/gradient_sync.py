"""Gradients of a plain module, reduced in buckets while the backward pass makes them.

::

    backward   [ layer 3 ][ layer 2 ][ layer 1 ][ layer 0 ]wait [ step ]
    ranks                 [ bucket 0 ][ bucket 1 ][ bucket 2 ]          a bucket leaves when its last gradient is there

Buckets leave in the same order on every rank: the order in which rank 0 made the gradients in the first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as c10d
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ArgumentError
from .collectives import broadcast
from .gradient_reducer import GradientBucket, GradientReducer, PendingGradients
from .gradient_report import GradientLedger, GradientReport


class GradientSync:
    """Reduces gradients in the backward pass until `remove()`, or the end of a `with` block."""

    def __init__(self, ledger: GradientLedger) -> None:
        self._ledger = ledger
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def wait(self) -> None:
        """Wait until all gradients are there: call it after a backward pass with `defer=True`, before reading them."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `optimizer.step()` and `zero_grad()`.

        With `defer=True`, parameters are updated as their gradients arrive.
        """
        self.wait()
        optimizer.step()
        optimizer.zero_grad()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the backward passes inside add up on this rank: for all microbatches except the last."""
        yield

    def report(self, *, last_step: bool = False) -> GradientReport:
        """Return what was sent and hidden in all steps so far, or in the last one. Waits for pending reductions."""
        self.wait()
        return self._ledger.last_step if last_step else self._ledger.total

    def remove(self) -> None:
        """Wait, and restore the module."""
        self.wait()
        while self._handles:
            self._handles.pop().remove()


@dataclass(slots=True, eq=False)
class _Bucket:
    """Parameters whose gradients travel together, and their state in this backward pass."""

    numbers: list[int]
    parameters: list[nn.Parameter]
    to_come: set[int] = field(default_factory=set)
    is_used: list[bool] = field(default_factory=list)
    pending: PendingGradients | None = None
    is_stale: bool = False  # a gradient was made after the bucket had left
    update: Callable[[Sequence[nn.Parameter]], None] | None = None

    def fill(self, number: int, *, last: bool) -> GradientBucket:
        """Take the gradients from the parameters, with zeros for those that have none."""
        grads = [p.grad for p in self.parameters]
        self.is_used = [g is not None for g in grads]
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, grads, strict=True)]
        flat = torch.cat([part.detach().reshape(-1) for part in parts])
        for p in self.parameters:
            p.grad = None
        return GradientBucket(flat, self.parameters, number, last)


class ModuleSync(GradientSync):
    """The gradients of a plain module: hooks on its parameters fill buckets, hooks on its modules wait for updates."""

    def __init__(self, module: nn.Module, reducer: GradientReducer, *, bucket_bytes: int, defer: bool) -> None:
        super().__init__(reducer.ledger)
        self._module, self._reducer, self._bucket_bytes, self._defer = module, reducer, bucket_bytes, defer
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._is_on = True
        self._is_updating = False
        self._passes: set[int] = set()  # the backward passes that run now: with checkpoints, one inside another
        self._next = 0
        self._users: PendingGradients | None = None
        self._made: list[int] = []  # in the order of the first step
        self._is_ordered = False
        self._called: set[int] = set()
        self._check_ranks()
        self._build_buckets(list(reversed(range(len(self._parameters)))))
        self._add_hooks()

    def _check_ranks(self) -> None:
        """Check that all ranks have the same parameters: a collective of different sizes hangs, or worse."""
        layout = [(tuple(p.shape), str(p.dtype)) for p in self._parameters]
        layouts: list[Any] = [layout] * self._reducer.ranks
        if not self._reducer.is_dry:
            c10d.all_gather_object(layouts, layout, group=self._reducer.group)
        for rank, other in enumerate(layouts):
            if other != layout:
                raise ArgumentError(
                    f"overlap_gradients: rank {rank} of the group has other parameters than this rank",
                    why=f"{len(other)} trainable parameters there and {len(layout)} here, or other shapes or dtypes",
                    fix="build the same module, with the same parameters frozen, on every rank",
                )

    def _build_buckets(self, order: list[int]) -> None:
        """Cut the parameters into buckets of one dtype and device, in the order in which their gradients come."""
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        room: dict[tuple[torch.dtype, torch.device], tuple[_Bucket, int]] = {}
        for number in order:
            p = self._parameters[number]
            key, size = (p.dtype, p.device), p.numel() * p.element_size()
            bucket, filled = room.get(key, (None, 0))
            if bucket is None or filled + size > self._bucket_bytes:
                bucket, filled = _Bucket([], []), 0
                self._buckets.append(bucket)
            bucket.numbers.append(number)
            bucket.parameters.append(p)
            room[key] = bucket, filled + size
            self._bucket_of[number] = bucket
        self._forget_pass()

    def _add_hooks(self) -> None:
        numbers = {p: n for n, p in enumerate(self._parameters)}
        for p, number in numbers.items():
            self._handles.append(p.register_hook(partial(self._settle_before_adding, number)))
            self._handles.append(p.register_post_accumulate_grad_hook(partial(self._take, number)))
        self._handles.append(self._module.register_forward_pre_hook(self._begin_forward))
        if self._defer:
            self._handles.append(register_optimizer_step_pre_hook(self._wait_to_step))
            for module in self._module.modules():
                if own := [numbers[p] for p in module.parameters(recurse=False) if p in numbers]:
                    self._handles.append(module.register_forward_pre_hook(partial(self._update_before_use, own)))

    def _take(self, number: int, _parameter: torch.Tensor) -> None:
        """Note a gradient that is there, and start every bucket that is full, in order."""
        if not self._is_on:
            return
        this_pass = torch._C._current_graph_task_id()
        if not self._passes and self._made and not self._is_ordered:
            self._follow_order()
        if this_pass not in self._passes:
            self._passes.add(this_pass)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, this_pass))
        if not self._is_ordered:
            self._made.append(number)
        bucket = self._bucket_of[number]
        bucket.is_stale |= number not in bucket.to_come
        bucket.to_come.discard(number)
        while self._next < len(self._buckets) and not self._buckets[self._next].to_come:
            self._start(self._next)
            self._next += 1

    def _start(self, number: int) -> None:
        bucket = self._buckets[number]
        if bucket.pending is not None:
            self._settle(bucket)
        bucket.is_stale = False
        bucket.pending = self._reducer.start(bucket.fill(number, last=number == len(self._buckets) - 1))

    def _end_backward(self, this_pass: int) -> None:
        self._passes.discard(this_pass)
        if self._passes:
            return
        for number, bucket in enumerate(self._buckets):
            if number >= self._next or bucket.is_stale:
                self._start(number)
        is_used = dict(pair for b in self._buckets for pair in zip(b.numbers, b.is_used, strict=True))
        flags = [is_used[n] for n in range(len(self._parameters))]
        self._users = self._reducer.count_users(flags, self._parameters[0].device)
        self._forget_pass()
        if not self._defer:
            self.wait()

    def _forget_pass(self) -> None:
        self._passes.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.to_come, bucket.is_stale = set(bucket.numbers), False

    def _follow_order(self) -> None:
        """Order the buckets, after the first step, as rank 0 made the gradients."""
        self.wait()
        self._is_ordered = True
        if self._reducer.is_dry:
            return
        made = list(dict.fromkeys(self._made))
        order = torch.tensor(made + [n for n in range(len(self._parameters)) if n not in set(made)])
        order = broadcast(order.to(self._parameters[0].device), group=self._reducer.group)
        self._build_buckets([int(n) for n in order.tolist()])

    def _settle_before_adding(self, number: int, _gradient: torch.Tensor) -> None:
        if (bucket := self._bucket_of[number]).pending is not None:
            self._settle(bucket)

    def _settle(self, bucket: _Bucket) -> None:
        """Wait for a bucket and give the parameters its gradients."""
        assert bucket.pending is not None
        pending, bucket.pending = bucket.pending, None
        gradients = self._reducer.wait(pending).split([p.numel() for p in bucket.parameters])
        users: list[int] = []
        if self._users is not None and not all(bucket.is_used):
            users = self._reducer.wait_for_users(self._users).tolist()
        for number, p, used, gradient in zip(bucket.numbers, bucket.parameters, bucket.is_used, gradients, strict=True):
            if used or (users and users[number]):
                p.grad = gradient.view(p.shape)
        if bucket.update is not None:
            update, bucket.update = bucket.update, None
            update(bucket.parameters)

    def wait(self) -> None:
        for bucket in self._buckets:
            if bucket.pending is not None:
                self._settle(bucket)
        if self._users is not None:
            self._reducer.wait_for_users(self._users)
            self._users = None
            self._ledger.close_step()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ArgumentError("step: LBFGS updates all parameters at once", fix="sync.wait(), then optimizer.step()")
        groups = [dict(group) for group in optimizer.param_groups]  # copied now, because schedulers change them
        late: set[torch.Tensor] = set()
        for bucket in self._buckets:
            if bucket.pending is not None and bucket.pending.is_done():
                self._settle(bucket)
            if bucket.pending is not None:
                bucket.update = partial(self._update, optimizer, groups)
                late.update(bucket.parameters)
        self._update(optimizer, groups, [p for group in groups for p in group["params"] if p not in late])

    def _update(self, optimizer: Any, groups: list[dict[str, Any]], parameters: Sequence[torch.Tensor]) -> None:
        """Let the optimizer update only some parameters."""
        chosen, whole = set(parameters), optimizer.param_groups
        optimizer.param_groups = [{**g, "params": [p for p in g["params"] if p in chosen]} for g in groups]
        self._is_updating = True
        try:
            optimizer.step()
        finally:
            self._is_updating, optimizer.param_groups = False, whole
        for p in parameters:
            p.grad = None

    def _wait_to_step(self, *_: object) -> None:
        if not self._is_updating:
            self.wait()

    def _begin_forward(self, *_: object) -> None:
        if torch._C._current_graph_task_id() != -1:  # a checkpoint recomputes the forward
            return
        if self._passes:  # a backward pass failed
            self._forget_pass()
        if sum(p.requires_grad for p in self._module.parameters()) > len(self._parameters):
            raise ArgumentError(
                "overlap_gradients: a parameter that was frozen requires gradients now",
                fix="sync.remove(), then call overlap_gradients again",
            )
        for bucket in self._buckets:  # for a module that uses a parameter of another one without calling it
            if bucket.update is not None and not self._called.issuperset(bucket.numbers):
                self._settle(bucket)

    def _update_before_use(self, numbers: list[int], *_: object) -> None:
        self._called.update(numbers)
        for number in numbers:
            if (bucket := self._bucket_of[number]).update is not None:
                self._settle(bucket)

    def remove(self) -> None:
        super().remove()
        self._reducer.close()
