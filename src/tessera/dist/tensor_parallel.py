"""Tensor parallel for a module that is not written for it: the matrices of its blocks become torch DTensors.

Between the two matrices of a pair, tensors are DTensors with whole shapes, split over the ranks. So the block's code
stays as it is, and the result is right whatever that code does: an operation that needs the whole tensor gathers it.
The pairs that were found affect only the speed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ..errors import ArgumentError
from .block_stack import BlockStack, MatrixPair, find_experts, find_pairs, width_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSplit:
    """How one module was divided, and over which `axis`; `reason` says why, if it was not."""

    module: str
    how: str
    axis: str
    reason: str | None = None


def split_tensors(module: nn.Module, stack: BlockStack, mesh: Any, *, split_logits: bool = False) -> list[ModuleSplit]:
    """Split the blocks, the embedding and the head of a module over a mesh with the single axis `tp`."""
    _teach_cpu_attention()
    splits: list[ModuleSplit] = []
    for name, block in stack.named_blocks():
        splits += _split_block(name, block, mesh) if any(True for _ in block.parameters()) else []
    if stack.embedding is not None and stack.head is None:
        splits.append(_leave(stack.embedding, "no Linear head was found: the forward may use its matrix otherwise"))
    elif stack.embedding is not None:
        splits += _split_end(module, stack.embedding, RowwiseParallel(input_layouts=Replicate()), mesh)
    if stack.head is not None:
        kept = {"use_local_output": False} if split_logits else {"output_layouts": Replicate()}
        splits += _split_end(module, stack.head, ColwiseParallel(**kept), mesh)
    if stack.tied and stack.embedding and stack.head and len(splits):
        module.get_submodule(stack.head).weight = module.get_submodule(stack.embedding).weight
    return splits


def _split_end(module: nn.Module, name: str, style: Any, mesh: Any) -> list[ModuleSplit]:
    end = module.get_submodule(name)
    if not any(True for _ in end.parameters()):  # it is on another stage of the pipeline
        return []
    parallelize_module(end, mesh, style)
    if style.use_local_output:
        end.register_forward_hook(_own_output)
    return [ModuleSplit(module=name, how="vocabulary", axis="tp")]


def _split_block(name: str, block: nn.Module, mesh: Any) -> list[ModuleSplit]:
    splits = []
    pairs = find_pairs(block)
    for pair in pairs:
        check_heads(pair, mesh.size(), name)
        if pair.kind == "attention" and pair.heads is None:
            splits.append(
                _leave(f"{name}.{pair.row}", "its number of heads is unknown (no num_heads, n_head, head_dim)")
            )
            continue
        for column in pair.columns:
            for matrix in _replace_matrix(block, column, pair.parts):
                parallelize_module(matrix, mesh, ColwiseParallel(use_local_output=False))
                matrix.register_forward_pre_hook(functools.partial(_share_input, mesh), prepend=True)
            splits.append(ModuleSplit(module=f"{name}.{column}", how="columns", axis="tp"))
        for matrix in _replace_matrix(block, pair.row, ()):
            parallelize_module(matrix, mesh, RowwiseParallel())
            matrix.register_forward_hook(_own_output)
        splits.append(ModuleSplit(module=f"{name}.{pair.row}", how="rows", axis="tp"))
        if container := _common_parent(pair):
            _replicate_rest(block.get_submodule(container), mesh)
    experts = find_experts(block)
    if experts is not None and isinstance(experts[1], nn.ModuleList):
        for number, expert in enumerate(experts[1]):
            splits += _split_block(f"{name}.{experts[0]}.{number}", expert, mesh)
    elif experts is not None:
        splits.append(_leave(f"{name}.{experts[0]}", "matrices of all experts in one parameter are not split"))
    elif not pairs:
        splits.append(_leave(name, "no pair of matrices was found in it (hidden to inner and back)"))
    return splits


def _share_input(mesh: Any, module: nn.Module, args: Any) -> Any:
    """Make one DTensor of an input that several columns read, so that its gradients are summed before one reduction."""
    x = args[0]
    if isinstance(x, DTensor):
        return None
    if getattr(x, "as_dtensor", None) is None:
        x.as_dtensor = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return (x.as_dtensor, *args[1:])


class _OwnedOutput(torch.autograd.Function):
    """Returns the same values, but no view of a DTensor: FSDP loses the hook on a view that is changed in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _own_output(module: nn.Module, args: Any, output: torch.Tensor) -> Any:
    return _OwnedOutput.apply(output)


def _leave(name: str, reason: str) -> ModuleSplit:
    return ModuleSplit(module=name, how="replicated", axis="tp", reason=reason)


def check_heads(pair: MatrixPair, ranks: int, name: str) -> None:
    """Raise if the heads do not divide over the ranks: a head is never cut."""
    for count, what in ((pair.heads, "heads"), (pair.key_heads, "heads of keys")):
        if count is not None and count % ranks:
            raise ArgumentError(
                f"tp={ranks} does not divide the {count} {what} of {name}",
                fix=f"tp={max(d for d in range(1, ranks) if count % d == 0)}",
            )


def _common_parent(pair: MatrixPair) -> str:
    parents = [name.split(".")[:-1] for name in pair.columns]
    same: list[str] = []
    for names in zip(*parents, strict=False):
        if len(set(names)) > 1:
            break
        same.append(names[0])
    return ".".join(same)


def _replicate_rest(container: nn.Module, mesh: Any) -> None:
    """Make DTensors of parameters between the matrices (norms of queries and keys), because they meet DTensors."""
    for part in container.modules():
        for name, value in list(part.named_parameters(recurse=False)):
            if not isinstance(value, DTensor):
                whole = distribute_tensor(value.detach(), mesh, [Replicate()])
                part.register_parameter(name, nn.Parameter(whole, requires_grad=value.requires_grad))


# -- a matrix that holds several ---------------------------------------------------------------------------------


class SplitLinear(nn.ModuleList):
    """A Linear whose outputs are in parts (queries, keys, values), each with its own matrix, which can be split.

    It is also used for a matrix that is stored transposed (transformers' Conv1D), possibly with a single part.
    """

    def __init__(self, parts: Sequence[nn.Linear], *, is_transposed: bool) -> None:
        super().__init__(parts)
        self.is_transposed = is_transposed

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one weight (or bias) of the replaced matrix, from those of the parts."""
        whole = torch.cat(list(parts))
        return whole.T.contiguous() if self.is_transposed and whole.dim() == 2 else whole

    def forward(self, x: torch.Tensor) -> Any:
        """Return the parts side by side, as one tensor."""
        parts = [part(x) for part in self]
        return _PartedTensor.join(parts) if len(parts) > 1 else parts[0]


class _PartedTensor(torch.Tensor):
    """Parts along the last dimension. Code that takes them apart gets the parts; other code gets the whole tensor."""

    parts: list[Any]

    @staticmethod
    def join(parts: list[Any]) -> Any:
        shape = (*parts[0].shape[:-1], sum(p.shape[-1] for p in parts))
        make = torch.Tensor._make_wrapper_subclass
        joined = make(_PartedTensor, shape, dtype=parts[0].dtype, device=parts[0].device)
        joined.parts = parts
        return joined

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TELLERS:
            return super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], _PartedTensor):
            taken = args[0]._take_apart(name, args[1:], kwargs)
            if taken is not None:
                return taken
        whole = [torch.cat(a.parts, dim=-1) if isinstance(a, _PartedTensor) else a for a in args]
        return func(*whole, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} reached the parts of a matrix before they were joined")

    def _take_apart(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the parts if a call asks for exactly them; None if it asks for something else."""
        parts = self.parts
        sizes = [p.shape[-1] for p in parts]
        if name in ("split", "chunk", "split_with_sizes", "tensor_split"):
            values = [*args, *kwargs.values()]
            if len(values) == 2 and values[1] in (-1, self.dim() - 1):
                many = list(values[0]) if isinstance(values[0], (list, tuple)) else values[0]
                equal = len(set(sizes)) == 1
                wanted = equal and many == (sizes[0] if name == "split" else len(sizes))
                return tuple(parts) if many == sizes or wanted else None
        if name in ("view", "reshape", "unflatten") and not kwargs and len(set(sizes)) == 1:
            given = args[-1] if isinstance(args[-1], (list, tuple)) else args
            shape = [*self.shape[:-1], *given] if name == "unflatten" else list(given)
            at = self.dim() - 1
            if len(shape) == self.dim() + 2 and shape[at] == len(parts):  # (batch, time, 3, heads, head size)
                return torch.stack([p.reshape(*shape[:at], *shape[at + 1 :]) for p in parts], dim=at)
        return None


_TELLERS = {
    torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.dtype.__get__,
    torch.Tensor.device.__get__, torch.Tensor.ndim.__get__,
}  # fmt: skip


def _replace_matrix(block: nn.Module, name: str, parts: Sequence[int]) -> list[nn.Linear]:
    """Return the Linear layers of a matrix: itself, or those of the SplitLinear that now replaces it."""
    matrix: Any = block.get_submodule(name)
    is_transposed = not isinstance(matrix, nn.Linear)
    if not parts and not is_transposed:
        return [matrix]
    weight = matrix.weight.detach().T if is_transposed else matrix.weight.detach()
    inside, out = width_of(matrix)
    sizes = list(parts) or [out]
    made = []
    for number, rows in enumerate(weight.split(sizes)):
        linear = nn.Linear(inside, rows.shape[0], bias=matrix.bias is not None, device="meta", dtype=rows.dtype)
        linear.weight = nn.Parameter(
            rows.clone(memory_format=torch.contiguous_format), requires_grad=matrix.weight.requires_grad
        )
        if matrix.bias is not None:
            bias = matrix.bias.detach().split(sizes)[number]
            linear.bias = nn.Parameter(bias.clone(), requires_grad=matrix.bias.requires_grad)
        made.append(linear)
    parent, _, leaf = name.rpartition(".")
    setattr(block.get_submodule(parent), leaf, SplitLinear(made, is_transposed=is_transposed))
    return made


@functools.cache
def _teach_cpu_attention() -> None:
    """Tell DTensor that CPU attention may be cut by heads or by batch, as it knows for the GPU kernels."""

    def list_cuts(tensors_out: int, tensors_in: int, *args: Any, attn_mask: Any = None, **_: Any) -> Any:
        mask = None if attn_mask is None else Replicate()
        cuts = (Replicate(), Shard(1), Shard(0) if mask is None else Replicate())
        return [([cut] * tensors_out, [cut] * tensors_in + [None, None, mask, None]) for cut in cuts]

    aten = torch.ops.aten
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)(functools.partial(list_cuts, 2, 3))
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(
        functools.partial(list_cuts, 3, 6)
    )
