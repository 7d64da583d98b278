"""`apply_layout`: a module divided as a layout says, by torch's own DTensor, FSDP2 and pipelining.

The order is fixed: first the pipeline removes blocks, then tensor parallel splits matrices, then blocks are set to
recompute, and last the rest is sharded over the data parallel ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..errors import ArgumentError
from .block_stack import BlockStack, find_pairs, find_stack, require_stack
from .layout import Layout
from .mesh import Mesh, device_type
from .parallel_module import ParallelModule, pack_inputs
from .pipeline_stages import Batch, StackTracer, StagePart, cut_stages, restrict_stack
from .tensor_parallel import ModuleSplit, check_heads, split_tensors

_MATRIX_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def apply_layout(
    module: nn.Module,
    layout: Layout,
    *,
    example_inputs: Any = None,
    device: torch.device | str | None = None,
    split_logits: bool = False,
) -> ParallelModule:
    """Divide a module over the ranks of the process group. Every rank calls this with the same whole module.

    All ranks take rank 0's parameters. A pipeline needs `example_inputs` (a tensor, a tuple or a dict of one small
    batch) if the inputs are not words; nothing is computed with them. With `split_logits` each rank of `tp` keeps its
    part of the vocabulary, and the loss must be a cross entropy (torch's `loss_parallel`). The module itself is
    changed.
    """
    _check_ranks(layout)
    stack = find_stack(module)
    _check_layout(module, layout, stack)
    if getattr(getattr(module, "config", None), "use_cache", False):
        # for models of transformers: keys and values are kept for generation, not for training
        module.config.use_cache = False
    mesh = _make_mesh(layout)
    device = torch.device(device) if device is not None else _choose_device()
    if any(p.device != device and not p.is_meta for p in module.parameters()):
        module.to(device)
    _copy_from_first_rank(module)
    _share_seed(mesh, device)
    splits: list[ModuleSplit] = []
    tracer = None
    if layout.pp > 1:
        stack = require_stack(module, "a pipeline")
        tracer = StackTracer(module, stack)
        trace = tracer.trace(_choose_inputs(module, stack, example_inputs, device))
        mine = mesh.coordinate(c10d.get_rank())["pp"]
        indices = [mine + chunk * layout.pp for chunk in range(layout.vp)]
        parts = cut_stages(module, stack, trace, indices=indices, stages=layout.pp * layout.vp)
        splits += [
            ModuleSplit(module=f"{stack.path}[{p.first}:{p.last}]", how=f"stage {p.index}", axis="pp") for p in parts
        ]
    else:
        parts = [StagePart(module=module, index=0, first=0, last=len(stack) if stack else 0, shared=())]
    for part in parts:
        own = restrict_stack(stack, part.module) if stack is not None else None
        if layout.tp > 1 and own is not None:
            splits += split_tensors(part.module, own, mesh.device_mesh["tp"], split_logits=split_logits)
        blocks = [block for _, block in own.named_blocks() if any(True for _ in block.parameters())] if own else []
        _recompute_blocks(blocks, layout.recompute)
        splits += _shard_parameters(part.module, blocks, layout, mesh)
    return ParallelModule(parts=parts, layout=layout, mesh=mesh, device=device, splits=tuple(splits), tracer=tracer)


def _check_ranks(layout: Layout) -> None:
    if not c10d.is_initialized() and layout.gpus == 1:
        c10d.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    elif not c10d.is_initialized():
        if "RANK" not in os.environ:
            raise ArgumentError(
                f"{layout} needs {layout.gpus} ranks, and this process is alone",
                fix=f"start the program with torchrun --nproc-per-node {layout.gpus}, or use `with dist.dry(...)`",
            )
        c10d.init_process_group()
    if c10d.get_world_size() != layout.gpus:
        raise ArgumentError(
            f"{layout} is for {layout.gpus} ranks, and {c10d.get_world_size()} run", fix="plan again for these ranks"
        )


def _check_layout(module: nn.Module, layout: Layout, stack: BlockStack | None) -> None:
    """Raise for what cannot be applied, before anything is changed."""
    if layout.cp > 1:
        raise ArgumentError(
            f"cp={layout.cp} cannot be applied",
            why="torch's context_parallel knows the attention kernels of GPUs only: it could not be tested here",
            fix="a layout with cp=1",
        )
    if layout.ep > 1:
        raise ArgumentError(
            f"ep={layout.ep} cannot be applied",
            why="how a module sends tokens to its experts is its own code",
            fix="a layout with ep=1: every rank then holds all experts of its blocks",
        )
    if "embedding" in layout.offload or (layout.offload and layout.sharding == "none"):
        raise ArgumentError(
            f"offload={layout.offload} cannot be applied",
            why="FSDP moves what it shards to the host, and nothing else",
            fix='offload=("optimizer",) with sharding="zero1" to "zero3"',
        )
    if layout.tp > 1:
        for name, block in require_stack(module, "tensor parallel").named_blocks():
            for pair in find_pairs(block):
                check_heads(pair, layout.tp, f"{name}.{pair.row}")
    if layout.recompute != "none" and stack is None:
        require_stack(module, "recomputation")
    if layout.pp > 1 and layout.schedule == "1f1b" and layout.microbatches < layout.pp:
        raise ArgumentError(
            f"{layout.microbatches} microbatches are too few for 1f1b on {layout.pp} stages",
            fix=f'microbatches={layout.pp}, or schedule="gpipe"',
        )


def _make_mesh(layout: Layout) -> Mesh:
    """Return the layout's mesh without the axes of size 1, which would cost a process group each."""
    whole = layout.mesh()
    axes = [a for a in whole.axes if whole.size(a) > 1] or ["dp"]
    return Mesh(axes, whole.devices, [whole.size(a) for a in axes], order=[a for a in whole.order if a in axes])


def _choose_device() -> torch.device:
    if device_type() == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", c10d.get_rank() % torch.cuda.device_count()))
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _copy_from_first_rank(module: nn.Module) -> None:
    """Copy rank 0's parameters, as DDP does: ranks with different seeds would train different models."""
    if c10d.get_backend() == "fake":
        return
    for value in (*module.parameters(), *module.buffers()):
        if value.is_meta:
            raise ArgumentError(
                "the module is on the meta device", why="its parameters have no values", fix="build it on the host"
            )
        c10d.broadcast(value.detach(), src=0)


def _share_seed(mesh: Mesh, device: torch.device) -> None:
    """Share the seed: ranks with parts of the same activations must draw the same dropout, replicas their own."""
    if "tp" not in mesh.axes or c10d.get_backend() == "fake":
        return
    seed = torch.tensor([torch.initial_seed() % 2**62], dtype=torch.int64, device=device)
    c10d.broadcast(seed, src=0)
    at = mesh.coordinate(c10d.get_rank())
    torch.manual_seed(int(seed.item()) + sum(place for axis, place in at.items() if axis != "tp"))


def _choose_inputs(module: nn.Module, stack: BlockStack, inputs: Any, device: torch.device) -> Batch:
    if inputs is not None:
        return pack_inputs(inputs)
    if stack.embedding is None:
        raise ArgumentError(
            f"a pipeline of {type(module).__name__} needs example_inputs",
            why="it has no embedding of words, so the shape of its inputs is unknown",
            fix="apply(module, ..., example_inputs=torch.zeros(1, 64))",
        )
    return (torch.zeros((1, 8), dtype=torch.int64, device=device),), {}


def _recompute_blocks(blocks: Sequence[nn.Module], recompute: str) -> None:
    if recompute == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        options["context_fn"] = _make_selective_contexts
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, **options)


def _make_selective_contexts() -> Any:
    """Return contexts that keep attention and every second matrix product (torchtitan's policy)."""
    products = {"forward": 0, "recompute": 0}

    def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if "scaled_dot_product" in str(operation):
            return CheckpointPolicy.MUST_SAVE
        if operation in _MATRIX_PRODUCTS:
            phase = "recompute" if context.is_recompute else "forward"
            products[phase] += 1
            return CheckpointPolicy.MUST_SAVE if products[phase] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def _shard_parameters(module: nn.Module, blocks: Sequence[nn.Module], layout: Layout, mesh: Mesh) -> list[ModuleSplit]:
    """Shard by FSDP2: it always shards optimizer states, and `ParallelModule.step` keeps what stays whole."""
    if layout.dp == 1 or layout.sharding == "none":
        return []
    options: dict[str, Any] = {
        "mesh": mesh.device_mesh["dp"],
        "reshard_after_forward": layout.sharding == "zero3" and layout.pp == 1,
    }
    if layout.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for part in (*blocks, module):
        fully_shard(part, **options)
    return [ModuleSplit(module=type(module).__name__.removeprefix("FSDP"), how=layout.sharding, axis="dp")]
