"""Means of gradients over ranks that run beside the backward pass.

Plain means are the backend's own asynchronous all-reduce, started where the gradient is made. The other ways take
several collectives each: a thread runs them, one bucket after the other, in the same order on all ranks. Both use a
process group of their own, so that the program's collectives cannot come between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as c10d

from .collectives import all_reduce
from .compression import ErrorFeedback
from .gradient_report import GradientLedger, TimedReduction, make_timed
from .groups import make_group, resolve_group
from .liveness import explain_failure
from .records import record_collectives
from .reduction import Sent, ring_bytes

_WHAT = "the reduction of gradients"


@dataclass(slots=True)
class PendingGradients:
    """A flat tensor whose mean is being computed; `job` is torch's work, or the thread's future."""

    timed: TimedReduction
    job: Any = None
    event: Any = None

    def is_done(self) -> bool:
        """Return whether waiting for the mean takes no time."""
        return bool(self.job.done() if isinstance(self.job, Future) else self.job is None or self.job.is_completed())


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients in one flat tensor, with the methods of torch's `GradBucket` that PowerSGD's hook needs."""

    flat: torch.Tensor
    of: Sequence[torch.Tensor]
    number: int
    last: bool

    def parameters(self) -> Sequence[torch.Tensor]:
        """Return the parameters that have these gradients."""
        return self.of

    def buffer(self) -> torch.Tensor:
        """Return all gradients, one after the other."""
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        """Return each gradient, as a view."""
        parts = self.flat.split([p.numel() for p in self.of])
        return [part.view(p.shape) for part, p in zip(parts, self.of, strict=True)]

    def index(self) -> int:
        """Return the bucket's place in the order of the step."""
        return self.number

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return self.last


class GradientReducer:
    """Starts means in the order of the calls, and waits for them. `way` are arguments of `dist.all_reduce`."""

    def __init__(self, group: Any, way: dict[str, Any], *, feedback: bool, power_sgd: dict[str, Any] | None) -> None:
        self.group = _take_group(group)
        self.ranks = c10d.get_world_size(self.group)
        self.ledger = GradientLedger(has_bound=power_sgd is None)
        self._way = way
        self._has_feedback = feedback and "compress" in way
        self._residuals: dict[int, tuple[tuple[int, ...], ErrorFeedback]] = {}
        self._power_sgd = _make_power_sgd(self.group, feedback, power_sgd) if power_sgd else None
        self._is_plain = not way and power_sgd is None
        self.is_dry = c10d.get_backend(self.group) == "fake"
        is_threaded = not self._is_plain and not self.is_dry
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tessera-gradients") if is_threaded else None
        self._stream: Any = None

    def start(self, bucket: GradientBucket) -> PendingGradients:
        """Begin to compute a mean, in place."""
        pending = PendingGradients(make_timed(bucket.flat, self.ranks))
        if self._is_plain:
            self._start_sum(pending)
        elif self._thread is None:
            self._reduce(pending.timed, bucket)
        else:
            self._submit(pending, lambda: self._reduce(pending.timed, bucket))
        return pending

    def _start_sum(self, pending: PendingGradients) -> None:
        timed = pending.timed
        timed.begin_ns = time.monotonic_ns()
        timed.flat.div_(self.ranks)  # before the sum, as in DDP, because a sum may overflow half precision
        with explain_failure(_WHAT, self.group):
            pending.job = c10d.all_reduce(timed.flat, group=self.group, async_op=True)
        if not timed.flat.is_cuda and pending.job is not None:
            pending.job.get_future().then(lambda _: timed.stamp_end())

    def _submit(self, pending: PendingGradients, run: Callable[[], object]) -> None:
        """Let the thread run something on the tensor; on CUDA in its own stream, after what made the tensor."""
        x = pending.timed.flat
        ready = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None
        if ready is not None:
            self._stream = self._stream or torch.cuda.Stream(x.device)
            x.record_stream(self._stream)

        def run_in_thread() -> None:
            if ready is None:
                run()
                return
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                run()
                pending.event = self._stream.record_event()

        assert self._thread is not None
        pending.job = self._thread.submit(run_in_thread)

    def _reduce(self, timed: TimedReduction, bucket: GradientBucket) -> None:
        timed.begin_ns = time.monotonic_ns()
        if self._power_sgd is not None:
            timed.sent = self._reduce_by_power_sgd(bucket)
        else:
            with record_collectives() as records:
                all_reduce(timed.flat, "mean", group=self.group, feedback=self._find_residual(bucket), **self._way)
            timed.sent = records[-1].to_sent(divide_by=self.ranks)
        timed.stamp_end()

    def _find_residual(self, bucket: GradientBucket) -> ErrorFeedback | None:
        """Return the residual of a bucket; none if other parameters have taken its place (after the first step)."""
        if not self._has_feedback:
            return None
        who = tuple(map(id, bucket.of))
        if self._residuals.get(bucket.number, (None,))[0] != who:
            self._residuals[bucket.number] = who, ErrorFeedback()
        return self._residuals[bucket.number][1]

    def _reduce_by_power_sgd(self, bucket: GradientBucket) -> Sent:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        state: Any = self._power_sgd
        before, is_full = state.total_numel_after_compression, state.iter < state.start_powerSGD_iter
        with explain_failure(_WHAT, self.group):
            powerSGD_hook(state, bucket).wait()
        numbers = bucket.flat.numel() if is_full else state.total_numel_after_compression - before
        return Sent(ring_bytes(numbers * bucket.flat.element_size(), self.ranks))

    def make_future(self, pending: PendingGradients) -> torch.futures.Future[torch.Tensor]:
        """Return a future of torch's kind, for DDP."""
        flat, job = pending.timed.flat, pending.job
        if isinstance(job, c10d.Work):
            return job.get_future().then(lambda _: flat)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[flat.device] * flat.is_cuda)

        def complete(done: Future[None]) -> None:
            with torch.cuda.stream(self._stream):  # None: no change of stream
                if error := done.exception():
                    future.set_exception(error)
                else:
                    future.set_result(flat)

        if job is None:
            future.set_result(flat)
        else:
            job.add_done_callback(complete)
        return future

    def wait(self, pending: PendingGradients) -> torch.Tensor:
        """Return the mean. On CUDA, the current stream waits for it, not the host."""
        timed = pending.timed
        self._wait_for_job(pending)
        timed.stamp_end()
        self.ledger.add(timed)
        return timed.flat

    def count_users(self, is_used: Sequence[bool], device: torch.device) -> PendingGradients:
        """Begin to count, for each parameter, the ranks that have a gradient."""
        users = torch.tensor(is_used, dtype=torch.int32, device=device)
        pending = PendingGradients(make_timed(users, self.ranks))
        if self._thread is None:
            with explain_failure(_WHAT, self.group):
                pending.job = c10d.all_reduce(users, group=self.group, async_op=True)
        else:
            self._submit(pending, lambda: all_reduce(users, group=self.group))
        return pending

    def wait_for_users(self, pending: PendingGradients) -> torch.Tensor:
        """Return how many ranks have a gradient, by parameter."""
        self._wait_for_job(pending)
        return pending.timed.flat

    def _wait_for_job(self, pending: PendingGradients) -> None:
        job, pending.job = pending.job, None
        with self.ledger.mark_waiting(), explain_failure(_WHAT, self.group):
            if isinstance(job, Future):
                job.result()
            elif job is not None:
                job.wait()
            if pending.event is not None:
                torch.cuda.current_stream(pending.timed.flat.device).wait_event(pending.event)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()
        if self.group is not None:
            _unused_groups[-1][1].append(self.group)
        self.group = None


_unused_groups: list[tuple[Any, list[Any]]] = []
"""Pairs of the job's process group and groups of it that no reducer uses: a group's name cannot be used again."""


def _take_group(like: Any) -> Any:
    """Return a process group of the same ranks that nothing else uses."""
    world = c10d.group.WORLD
    if not _unused_groups or _unused_groups[-1][0] is not world:
        _unused_groups[:] = [(world, [])]
    ranks = c10d.get_process_group_ranks(resolve_group(like))
    for group in _unused_groups[-1][1]:
        if c10d.get_process_group_ranks(group) == ranks:
            _unused_groups[-1][1].remove(group)
            return group
    return make_group(ranks, like=like)


def _make_power_sgd(group: Any, feedback: bool, options: dict[str, Any]) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    return PowerSGDState(group, use_error_feedback=feedback, orthogonalization_epsilon=1e-8, **options)
