"""`ParallelModule`: a module that was divided over ranks, with a step that is the same for every layout."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as c10d
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils import _pytree as pytree

from ..errors import ArgumentError
from .groups import make_group
from .layout import Layout
from .mesh import Mesh
from .overlap import overlap_gradients
from .pipeline_stages import Batch, StackTracer, StagePart, make_stage_forward
from .tensor_parallel import ModuleSplit, SplitLinear

LossFunction = Callable[[Any, Any], torch.Tensor]
_BUCKET_BYTES = 25 * 2**20  # gradients that are reduced together, as in DDP


class ParallelModule:
    """A module divided over the ranks of a mesh; made by `apply_layout`.

    `module` is this rank's part (an interleaved pipeline has several `modules`), `mesh` has the axes that are larger
    than 1, `splits` say how each module was split. `gradient_sync` is that of `overlap_gradients`, if data parallel is
    the only axis and nothing is sharded.
    """

    def __init__(
        self,
        *,
        parts: list[StagePart],
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        splits: tuple[ModuleSplit, ...],
        tracer: StackTracer | None,
    ) -> None:
        self.layout, self.mesh, self.device, self.splits = layout, mesh, device, splits
        self.modules = [part.module for part in parts]
        self._parts = parts
        self._tracer = tracer
        self._loss_fn: LossFunction | None = None
        self._schedules: dict[Any, Any] = {}
        is_plain = layout.dp > 1 and layout.sharding == "none" and layout.tp == layout.pp == 1
        self.gradient_sync = overlap_gradients(self.module, mesh=mesh) if is_plain else None
        self._ends_group = self._connect_ends() if parts[0].shared else None
        if layout.pp > 1:
            for part in parts:
                part.module.forward = make_stage_forward(part, self._compute_loss)

    def __str__(self) -> str:
        counts = Counter((s.axis, s.how) for s in self.splits if s.reason is None)
        told = [f"{axis}: {n} x {how}" if n > 1 else f"{axis}: {how}" for (axis, how), n in counts.items()]
        left = [f"left whole: {s.module} ({s.reason})" for s in self.splits if s.reason is not None]
        name = type(self.module).__name__.removeprefix("FSDP")
        return "\n".join([f"{name} as {self.layout} on {self.mesh!r}", *told, *left[:8]])

    @property
    def module(self) -> nn.Module:
        """Return this rank's part of the module (the first of them where a pipeline interleaves)."""
        return self.modules[0]

    @property
    def data_rank(self) -> int:
        """Return which of the `layout.dp` replicas this rank belongs to: it reads that part of the data."""
        return self.mesh.coordinate(c10d.get_rank()).get("dp", 0)

    def local_batch(self, batch: Any) -> Any:
        """Return this replica's part of a global batch: tensors are cut along their first dimension."""
        parts, ranks = self.data_rank, self.layout.dp

        def take(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            _check_divides(value, ranks, "data parallel ranks")
            return value.chunk(ranks)[parts]

        return pytree.tree_map(take, batch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward. A pipeline has none: its stages run in `step`."""
        if self.layout.pp > 1:
            raise ArgumentError("a pipeline has no forward of its own", fix="call step(inputs, targets, loss_fn)")
        with implicit_replication():
            return self.module(*args, **kwargs)

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any, loss_fn: LossFunction) -> torch.Tensor:
        """Run forward and backward of this replica's batch, microbatch by microbatch; the same call for every layout.

        `inputs` are a tensor, a tuple of positional or a dict of named arguments; `loss_fn(output, targets)` returns
        the mean of a microbatch. All ranks return the mean loss of all replicas, and gradients are those of that mean.
        """
        loss = self._run(inputs, targets, loss_fn)
        self._finish_gradients()
        return self._average_loss(loss)

    def evaluate(self, inputs: Any, targets: Any, loss_fn: LossFunction) -> torch.Tensor:
        """Return the mean loss of all replicas, as in `step`, without gradients."""
        with torch.no_grad():
            return self._average_loss(self._run(inputs, targets, loss_fn))

    def _run(self, inputs: Any, targets: Any, loss_fn: LossFunction) -> torch.Tensor:
        batch = pack_inputs(inputs)
        for value in pytree.tree_leaves((batch, targets)):
            if isinstance(value, torch.Tensor):
                _check_divides(value, self.layout.microbatches, "microbatches")
        self._loss_fn = loss_fn
        with implicit_replication(), loss_parallel():  # masks that the module makes are the same on all ranks
            return self._run_pipeline(batch, targets) if self.layout.pp > 1 else self._run_microbatches(batch, targets)

    def _compute_loss(self, forward: Callable[..., Any], inputs: Batch, targets: Any) -> torch.Tensor:
        output = forward(*inputs[0], **inputs[1])
        assert self._loss_fn is not None
        loss = self._loss_fn(output, targets) / self.layout.microbatches
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def _run_microbatches(self, batch: Batch, targets: Any) -> torch.Tensor:
        count, module = self.layout.microbatches, self.module
        _, chunks = split_args_kwargs_into_chunks((), {"inputs": batch, "targets": targets}, count)
        total = torch.zeros((), device=self.device)
        for number, chunk in enumerate(chunks):
            is_last = number == count - 1
            if isinstance(module, FSDPModule):
                module.set_is_last_backward(is_last)
                module.set_reshard_after_backward(is_last or self.layout.sharding == "zero3")
                module.set_requires_gradient_sync(is_last or self.layout.sharding != "zero1")
            sync = None if is_last else self.gradient_sync
            with sync.no_sync() if sync is not None else contextlib.nullcontext():
                loss = self._compute_loss(module, chunk["inputs"], chunk["targets"])
                if torch.is_grad_enabled():
                    loss.backward()
            total += loss.detach()
        return total

    def _run_pipeline(self, batch: Batch, targets: Any) -> torch.Tensor:
        count = self.layout.microbatches
        schedule = self._find_schedule(batch)
        numbers = torch.zeros(count, device=self.device)
        losses: list[torch.Tensor] = []
        first = (numbers,) if any(part.index == 0 for part in self._parts) else ()
        run = schedule.step if torch.is_grad_enabled() else schedule.eval
        run(*first, target=numbers, losses=losses, return_outputs=False, inputs=batch, targets=targets)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)

    def _find_schedule(self, batch: Batch) -> Any:
        """Return the schedule for batches of these shapes; torch makes stages for one set of shapes."""
        count, layout = self.layout.microbatches, self.layout
        shapes = [x.shape for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]
        key = tuple(shapes)
        if key not in self._schedules:
            assert self._tracer is not None
            _, chunks = split_args_kwargs_into_chunks((), {"inputs": batch}, count)
            boundaries = self._tracer.trace(chunks[0]["inputs"]).boundaries
            stages = [self._make_stage(part, boundaries) for part in self._parts]
            make: Any = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
            what = stages if layout.schedule == "interleaved" else stages[0]
            options = {"loss_fn": _take_loss, "scale_grads": False}
            schedule = make[layout.schedule](what, n_microbatches=count, **options)
            if c10d.get_backend() == "fake":
                _skip_vote(schedule, stages)
            self._schedules = {key: schedule}
        return self._schedules[key]

    def _make_stage(self, part: StagePart, boundaries: tuple[torch.Tensor, ...]) -> PipelineStage:
        count = self.layout.pp * self.layout.vp

        def describe(at: int) -> torch.Tensor:
            like = boundaries[at]
            return torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=True)

        number = torch.empty(1, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        return PipelineStage(
            part.module,
            part.index,
            count,
            self.device,
            input_args=describe(part.first) if part.index else number,
            output_args=describe(part.last) if part.index < count - 1 else loss,
            group=self.mesh.process_group("pp"),
        )

    # -- gradients --------------------------------------------------------------------------------------------------

    def _finish_gradients(self) -> None:
        for p in self.parameters():
            if isinstance(p.grad, DTensor) and isinstance(p, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
        if self._ends_group is not None:
            for part in self._parts:
                named = dict(part.module.named_parameters(remove_duplicate=False))
                held = {id(p): p for name in part.shared if (p := named.get(name)) is not None and p.requires_grad}
                for parameter in held.values():  # in the order of their names, which is the same at the other end
                    self._sum_over_ends(parameter)
        if self.layout.dp > 1 and self.layout.sharding == "none" and self.gradient_sync is None:
            self._average_gradients()

    def _average_gradients(self) -> None:
        group = self.mesh.process_group("dp")
        bucket: list[torch.Tensor] = []
        gradients = [_to_local(p.grad) for p in self.parameters() if p.grad is not None]
        for number, gradient in enumerate(gradients):
            bucket.append(gradient)
            size = sum(g.numel() * g.element_size() for g in bucket)
            is_full = size > _BUCKET_BYTES or number == len(gradients) - 1
            if is_full or gradients[number + 1].dtype != gradient.dtype:
                flat = torch.cat([g.reshape(-1) for g in bucket])
                c10d.all_reduce(flat, group=group)
                flat /= self.layout.dp
                for whole, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    whole.copy_(piece.view_as(whole))
                bucket = []

    def _connect_ends(self) -> Any:
        """Return the group of the first and the last stage, which both hold a tied embedding."""
        rank = c10d.get_rank()
        ranks = next(group for group in self.mesh.groups("pp") if rank in group)
        ends = [ranks[0], ranks[-1]]
        return make_group(ends, like=None) if rank in ends else None

    def _sum_over_ends(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        c10d.all_reduce(_to_local(parameter.grad), group=self._ends_group)

    def _average_loss(self, loss: torch.Tensor) -> torch.Tensor:
        for axis in ("pp", "dp"):
            if axis in self.mesh.axes and self.mesh.size(axis) > 1:
                c10d.all_reduce(loss, group=self.mesh.process_group(axis))
        return loss / self.layout.dp

    # -- parameters -------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters."""
        seen: set[int] = set()
        for module in self.modules:
            for parameter in module.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def optimizer(self, kind: Callable[..., torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        """Return an optimizer of this rank's parameters: `optimizer(torch.optim.AdamW, lr=1e-3)`."""
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in self.parameters():  # one operation cannot take DTensors of several meshes
            groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        return kind([{"params": parameters} for parameters in groups.values()], **options)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; return the norm before."""
        # this rank's shards by how they are spread: each sum needs one reduction over ranks
        squares: dict[Any, torch.Tensor] = {}
        shared = set(self._parts[0].shared)
        for part in self._parts:
            skip = {id(p) for n, p in part.module.named_parameters() if part.index and n in shared}  # counted once
            for p in part.module.parameters():
                if p.grad is not None and id(p) not in skip:
                    spread = (p.grad.device_mesh, p.grad.placements) if isinstance(p.grad, DTensor) else None
                    square = _to_local(p.grad.detach()).float().square().sum().to(self.device)
                    squares[spread] = squares.get(spread, torch.zeros_like(square)) + square
        total = torch.zeros((), device=self.device)
        for spread, square in squares.items():
            total += square if spread is None else _sum_over_shards(square, *spread)
        if self.layout.pp > 1:
            c10d.all_reduce(total, group=self.mesh.process_group("pp"))
        norm = total.sqrt()
        for p in self.parameters():
            if p.grad is not None:
                _to_local(p.grad).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers, whole and under the names of the original module, on every rank."""
        return self._gather(lambda value: value.detach())

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return all gradients, whole and under the names of the original module, on every rank."""
        return self._gather(lambda value: value.grad if isinstance(value, nn.Parameter) else None)

    def _gather(self, read: Callable[[Any], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        own: dict[str, torch.Tensor] = {}
        for module in self.modules:
            buffers = {n for n, _ in module.named_buffers()} & set(module.state_dict())
            named = [*module.named_parameters(remove_duplicate=False)]
            named += [(n, b) for n, b in module.named_buffers() if n in buffers]
            for name, value in named:
                found = read(value)
                if found is not None:
                    own[name] = found.full_tensor() if isinstance(found, DTensor) else found
            for name, part in module.named_modules():
                if isinstance(part, SplitLinear):
                    for kind in ("weight", "bias"):
                        pieces = [own.pop(f"{name}.{i}.{kind}", None) for i in range(len(part))]
                        if pieces[0] is not None:
                            own[f"{name}.{kind}"] = part.merge([p for p in pieces if p is not None])
        if self.layout.pp > 1:
            gathered: list[Any] = [None] * self.layout.pp
            c10d.all_gather_object(gathered, own, group=self.mesh.process_group("pp"))
            for other in gathered:
                own |= {name: value.to(self.device) for name, value in other.items()}
        return own


def pack_inputs(inputs: Any) -> Batch:
    """Return a tensor, a tuple of positional or a mapping of named arguments as (args, kwargs)."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _take_loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output


def _skip_vote(schedule: Any, stages: list[PipelineStage]) -> None:
    """Skip the stages' vote on whether all know their shapes: they do, and in a dry run a vote has no values."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
    schedule._warmup_p2p = lambda *args: None


def _sum_over_shards(square: torch.Tensor, mesh: Any, placements: Any) -> torch.Tensor:
    """Return the sum over ranks that hold different parts; ranks that hold the same part count once."""
    parts = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    return DTensor.from_local(square, mesh, parts).full_tensor()


def _to_local(value: Any) -> torch.Tensor:
    local: torch.Tensor = value.to_local() if isinstance(value, DTensor) else value
    return local


def _check_divides(value: torch.Tensor, parts: int, what: str) -> None:
    if value.dim() == 0 or value.shape[0] % parts:
        raise ArgumentError(
            f"a batch of {value.shape[0] if value.dim() else 1} does not divide into {parts} {what}",
            fix=f"a multiple of {parts} along the first dimension of every tensor",
        )
