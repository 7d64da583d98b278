"""Save what running a program may write, and put it back: weights, gradients, optimizers, random numbers, inputs.

Values go back into the same tensors, so that a captured CUDA graph keeps reading the same memory. Only values that
differ are written, because a write raises the tensor's version, which tells others (weights that were folded into
something) that it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ..graph.nested import find_containers, find_instances, find_leaves, refill, sparse_parts, storage_address

if TYPE_CHECKING:
    from ..graph.surroundings import Surroundings

# These say how an optimizer computes, not what. Code that changes them after the state was saved must restore them
# itself.
_OPTIMIZER_FLAGS = frozenset({"fused", "foreach", "capturable", "differentiable"})
# The share of the free device memory that copies may take; if they need more, they are kept on the host.
ROOM = 0.3


class State:
    """A copy of everything that a call may write; `restore` puts it back. `memory` are the addresses that were copied.

    `program` is any object with the `modules` and `optimizers` of a program.
    """

    def __init__(self, program: Any) -> None:
        self.memory = list_addresses(program)
        self._copy = copy = _choose_copy(_list_tensors(program))
        parameters = _list_parameters(program)
        tensors = parameters | {id(b): b for m in program.modules for b in m.buffers()}
        self._tensors = {key: (t, copy(t)) for key, t in tensors.items()}
        self._grads = [(p, p.grad, None if p.grad is None else copy(p.grad)) for p in parameters.values()]
        self._modules = [(m, m.training, _list_buffers(m)) for root in program.modules for m in root.modules()]
        self._optimizers = [
            (o, {p: self._copy_values(s) for p, s in o.state.items()}, [self._copy_values(g) for g in o.param_groups])
            for o in program.optimizers
        ]
        self._random = torch.get_rng_state()
        self._cuda_random = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None

    def restore(self, *, flags: bool = False) -> None:
        """Put everything back; with `flags`, also the flags that say how optimizers compute."""
        with torch.no_grad():
            for tensor, saved in self._tensors.values():
                self._write(tensor, saved)
            for parameter, grad, saved in self._grads:
                parameter.grad = grad
                if grad is not None:
                    self._write(grad, saved)
            for optimizer, states, groups in self._optimizers:
                self._restore_optimizer(optimizer, states, groups, frozenset() if flags else _OPTIMIZER_FLAGS)
        for module, training, buffers in self._modules:
            module.training = training
            if buffers:
                module._buffers.update(buffers)  # `self.mean = ...` in a forward puts another tensor there
        torch.set_rng_state(self._random)
        if self._cuda_random is not None:
            torch.cuda.set_rng_state_all(self._cuda_random)

    def get_update(self, parameter: Any) -> Any:
        """Return how far a parameter is from its saved value."""
        return parameter.detach() - self._tensors[id(parameter)][1].to(parameter.device)

    def has_changed(self, buffer: Any) -> bool:
        """Tell whether a buffer differs from its saved value, or is another tensor."""
        saved = self._tensors.get(id(buffer))
        return saved is None or not _is_equal(buffer, saved[1])

    def _copy_values(self, values: Any) -> dict[str, tuple[Any, Any]]:
        """Return each value except the parameters, with a copy of it."""
        return {
            name: (value, self._copy(value) if torch.is_tensor(value) else self._copy_nested(value))
            for name, value in values.items()
            if name != "params"
        }

    def _copy_nested(self, value: Any) -> Any:
        """Copy lists and dictionaries with the tensors in them; a plain value is returned as it is."""
        return pytree.tree_map(lambda v: v.clone() if torch.is_tensor(v) else v, value)

    def _restore_optimizer(self, optimizer: Any, states: Any, groups: Any, skip: frozenset[str]) -> None:
        for parameter in [p for p in optimizer.state if p not in states]:
            del optimizer.state[parameter]
        for parameter, saved in states.items():
            now = optimizer.state.setdefault(parameter, {})
            for name in now.keys() - saved.keys():
                del now[name]
            self._restore_values(now, saved)
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            self._restore_values(group, {name: value for name, value in saved.items() if name not in skip})

    def _restore_values(self, now: Any, saved: dict[str, tuple[Any, Any]]) -> None:
        """Write into the tensor that is there now: a step count may have been moved to the device."""
        for name, (original, copy) in saved.items():
            if not torch.is_tensor(copy):
                now[name] = self._copy_nested(copy)
                continue
            if not (torch.is_tensor(now.get(name)) and now[name].shape == copy.shape):
                now[name] = original
            self._write(now[name], copy)

    def _write(self, tensor: Any, saved: Any) -> None:
        if not _is_equal(tensor, saved):
            tensor.copy_(saved)


def list_addresses(program: Any) -> frozenset[int]:
    """Return the addresses of the tensors that a `State` copies."""
    return frozenset(map(storage_address, _list_tensors(program))) - {0}


def _list_buffers(module: Any) -> dict[str, Any]:
    """Return a module's own buffers; nothing for a scripted module, which has no dictionary of them."""
    return dict(module._buffers) if isinstance(module._buffers, dict) else {}


def _list_parameters(program: Any) -> dict[int, Any]:
    """Return the parameters of models, and those that only optimizers have."""
    optimized = [p for o in program.optimizers for group in o.param_groups for p in group["params"]]
    return {id(p): p for p in (*(p for m in program.modules for p in m.parameters()), *optimized)}


def _list_tensors(program: Any) -> list[Any]:
    """Return parameters, buffers, gradients, and the state of optimizers."""
    parameters = _list_parameters(program)
    tensors = parameters | {id(b): b for m in program.modules for b in m.buffers()}
    grads = [p.grad for p in parameters.values() if p.grad is not None]
    states = [s for o in program.optimizers for s in o.state.values()]
    return [*tensors.values(), *grads, *(v for s in states for v in s.values() if hasattr(v, "untyped_storage"))]


class Inputs:
    """The arguments of a call and the variables around it; leaving the context puts them back.

    Tensors in `copied` memory (`State.memory`) are restored elsewhere. `generators` are those that draw random numbers.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outside: Surroundings | None = None,
        copied: frozenset[int] = frozenset(),
    ) -> None:
        self._args, self._kwargs = tuple(args), dict(kwargs)
        self._outside, self._copied = outside, copied
        self._variables = outside.values() if outside is not None else {}
        self._leaves = self._read_leaves()
        tensors = {id(t): t for t in self._leaves.values() if torch.is_tensor(t)}
        self.differentiable = {
            name: t for name, t in self._leaves.items() if torch.is_tensor(t) and t.requires_grad and t.is_leaf
        }
        grads = [(t, t.grad) for t in self.differentiable.values()]
        copy = _choose_copy([*tensors.values(), *(g for _, g in grads if g is not None)])
        self._tensors = {key: (t, copy(t), _read_geometry(t)) for key, t in tensors.items()}
        self._grads = [(t, grad, None if grad is None else copy(grad)) for t, grad in grads]
        held = (self._args, [*self._kwargs.values()], [*self._variables.values()])
        self._containers = [(c, c.copy()) for c in find_containers(held)]
        self.generators = find_instances(held, torch.Generator)
        self._generator_states = [g.get_state() for g in self.generators]

    def find_changes(self) -> dict[str, Any]:
        """Return copies of the values that have changed, by name."""
        now, changes = self._read_leaves(), dict[str, Any]()
        for name, leaf in now.items():
            old = self._leaves.get(name)
            if torch.is_tensor(leaf):
                saved = self._tensors[id(old)][1] if torch.is_tensor(old) else None
                if saved is None or not _is_equal(leaf, saved):
                    changes[name] = leaf.detach().clone()
            elif name not in self._leaves or (leaf is not old and (torch.is_tensor(old) or leaf != old)):
                changes[name] = leaf
        return changes | dict.fromkeys(self._leaves.keys() - now.keys(), "taken away")

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        if self._outside is not None:
            self._outside.restore(self._variables)
        for generator, state in zip(self.generators, self._generator_states, strict=True):
            generator.set_state(state)
        for container, contents in self._containers:
            refill(container, contents)
        for tensor, saved, geometry in self._tensors.values():
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if geometry is not None and _read_geometry(tensor) != geometry:  # x.unsqueeze_(0)
                    tensor.as_strided_(*geometry)
                if not _is_equal(tensor, saved):
                    tensor.copy_(saved)
        for tensor, grad, saved in self._grads:
            tensor.grad = grad
            if grad is not None and not _is_equal(grad, saved):
                with torch.no_grad():
                    grad.copy_(saved)

    def _read_leaves(self) -> dict[str, Any]:
        leaves = find_leaves(self._args, "argument") | find_leaves(self._kwargs, "argument")
        if self._outside is not None:
            leaves |= find_leaves(self._outside.values(), "outside")
        return {k: v for k, v in leaves.items() if not (torch.is_tensor(v) and storage_address(v) in self._copied)}


def _read_geometry(tensor: Any) -> tuple[Any, ...] | None:
    """Return size, stride and offset; None for a sparse tensor."""
    if tensor.layout is not torch.strided:
        return None
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _is_equal(tensor: Any, saved: Any) -> bool:
    """Tell whether two tensors are equal, NaN equal to NaN."""
    if tensor.dtype != saved.dtype or tensor.layout != saved.layout or tensor.shape != saved.shape:
        return False
    if tensor.layout is not torch.strided:
        parts = zip(sparse_parts(tensor), sparse_parts(saved), strict=True)
        return all(torch.equal(a, b.to(a.device)) for a, b in parts)
    a, b = tensor, saved.to(tensor.device)
    if a.is_complex():
        a, b = (torch.view_as_real(t.detach().resolve_conj()) for t in (a, b))
    if torch.equal(a, b):
        return True
    return bool(a.is_floating_point() and ((a == b) | (a.isnan() & b.isnan())).all())


def _choose_copy(tensors: Sequence[Any]) -> Callable[[Any], Any]:
    """Return a function that copies a tensor where it is, or to the host if the device has no room for all copies."""
    needed = sum(t.numel() * t.element_size() for t in tensors if t.is_cuda)
    if not needed or needed <= ROOM * torch.cuda.mem_get_info()[0]:
        return lambda tensor: tensor.detach().clone()
    return lambda tensor: tensor.detach().to("cpu", copy=True)
