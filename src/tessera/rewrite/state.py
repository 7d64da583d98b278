"""What running a program may write: weights, buffers, gradients, optimizers, random numbers, inputs. Kept, put back.

Values go back into the same tensors, so that a captured CUDA graph goes on reading the same memory, and only where they
differ: a tensor's version tells others (weights that were folded into something) that it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..graph.surroundings import Surroundings

# What says how an optimizer computes, not what: whoever changed it after the state was kept takes it back himself.
HOW = frozenset({"fused", "foreach", "capturable", "differentiable"})
# Of the free device memory, what copies may take; what is larger is kept in the host's, and comes back over PCIe.
ROOM = 0.3


class Held(Protocol):
    """What a program works with."""

    @property
    def modules(self) -> Sequence[Any]:
        """Its models."""

    @property
    def optimizers(self) -> Sequence[Any]:
        """Its optimizers."""


class State:
    """A copy of everything a call may write; `restore` puts it back. `memory` is that of what was copied."""

    def __init__(self, held: Held) -> None:
        import torch

        self._torch = torch
        parameters = _parameters(held)
        tensors = parameters | {id(b): b for m in held.modules for b in m.buffers()}
        grads = [(p, p.grad) for p in parameters.values()]
        self.memory = memory(held)
        self._copied = copied = _copier(torch, _tensors(held))
        self._tensors = {key: (t, copied(t)) for key, t in tensors.items()}
        self._grads = [(p, grad, None if grad is None else copied(grad)) for p, grad in grads]
        self._modules = [(m, m.training, _buffers(m)) for root in held.modules for m in root.modules()]
        self._optimizers = [(o, {p: self._both(s) for p, s in o.state.items()}, [self._both(g) for g in o.param_groups])
                            for o in held.optimizers]  # fmt: skip
        self._random = torch.get_rng_state()
        self._cuda_random = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None

    def restore(self, *, how: bool = False) -> None:
        """As it was; with `how` also what says how optimizers compute."""
        with self._torch.no_grad():
            for tensor, kept in self._tensors.values():
                self._put(tensor, kept)
            for parameter, grad, kept in self._grads:
                parameter.grad = grad
                if grad is not None:
                    self._put(grad, kept)
            for optimizer, states, groups in self._optimizers:
                self._restore_optimizer(optimizer, states, groups, () if how else HOW)
        for module, training, buffers in self._modules:
            module.training = training
            if buffers:
                module._buffers.update(buffers)  # `self.mean = ...` puts another tensor there
        self._torch.set_rng_state(self._random)
        if self._cuda_random is not None:
            self._torch.cuda.set_rng_state_all(self._cuda_random)

    def moved(self, parameter: Any) -> Any:
        """How far a parameter is from what was kept."""
        return parameter.detach() - self._tensors[id(parameter)][1].to(parameter.device)

    def wrote(self, tensor: Any) -> bool:
        """Whether a buffer is not what was kept, or is another tensor."""
        known = self._tensors.get(id(tensor))
        return known is None or not _same(self._torch, tensor, known[1])

    def _both(self, values: Any) -> dict[str, tuple[Any, Any]]:
        """By name: the value itself, and a copy of it."""
        copied = self._copied
        return {k: (v, copied(v) if self._torch.is_tensor(v) else self._nested(v)) for k, v in values.items()
                if k != "params"}  # fmt: skip

    def _nested(self, value: Any) -> Any:
        """A plain value, or lists and dictionaries with the tensors in them copied."""
        return self._torch.utils._pytree.tree_map(lambda v: v.clone() if self._torch.is_tensor(v) else v, value)

    def _restore_optimizer(self, optimizer: Any, states: Any, groups: Any, but: Any) -> None:
        """What did not exist is taken away again."""
        for parameter in [p for p in optimizer.state if p not in states]:
            del optimizer.state[parameter]
        for parameter, kept in states.items():
            now = optimizer.state.setdefault(parameter, {})
            for name in now.keys() - kept.keys():
                del now[name]
            self._refill(now, kept)
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            self._refill(group, {k: v for k, v in kept.items() if k not in but})

    def _refill(self, now: Any, kept: dict[str, tuple[Any, Any]]) -> None:
        """Into the tensor that is there, another one where a step count was moved to the device, else into its own."""
        is_tensor = self._torch.is_tensor
        for name, (own, value) in kept.items():
            if not is_tensor(value):
                now[name] = self._nested(value)
                continue
            if not (is_tensor(now.get(name)) and now[name].shape == value.shape):
                now[name] = own
            self._put(now[name], value)

    def _put(self, tensor: Any, kept: Any) -> None:
        if not _same(self._torch, tensor, kept):
            tensor.copy_(kept)


def memory(held: Held) -> frozenset[int]:
    """Where the tensors lie that a `State` keeps."""
    from ..graph.nested import storage_address

    return frozenset(map(storage_address, _tensors(held))) - {0}


def _buffers(module: Any) -> dict[str, Any]:
    """A module's own; a scripted one's cannot become other tensors, and it shows no dictionary of them."""
    return dict(module._buffers) if isinstance(module._buffers, dict) else {}


def _parameters(held: Held) -> dict[int, Any]:
    """Those of models, and those that optimizers alone have."""
    given = [p for o in held.optimizers for group in o.param_groups for p in group["params"]]
    return {id(p): p for p in (*(p for m in held.modules for p in m.parameters()), *given)}


def _tensors(held: Held) -> list[Any]:
    """Parameters, buffers, gradients, and what optimizers remember."""
    parameters = _parameters(held)
    tensors = parameters | {id(b): b for m in held.modules for b in m.buffers()}
    grads = [p.grad for p in parameters.values() if p.grad is not None]
    inside = [v for o in held.optimizers for s in o.state.values() for v in s.values() if hasattr(v, "untyped_storage")]
    return [*tensors.values(), *grads, *inside]


class Inputs:
    """The arguments of a call; after `with` they are what they were: tensors by value, lists by what they hold.

    So are the variables `outside`. Tensors in `known` memory (`State.memory`) are somebody else's to keep. `generators`
    draw random numbers.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outside: Surroundings | None = None,
        known: frozenset[int] = frozenset(),
    ) -> None:
        import torch

        from ..graph.nested import find_containers, find_instances

        self._torch, self._args, self._kwargs = torch, tuple(args), dict(kwargs)
        self._outside, self._known = outside, known
        self._variables = outside.values() if outside is not None else {}
        self._leaves = self._now()
        tensors = {id(t): t for t in self._leaves.values() if torch.is_tensor(t)}
        self.differentiable = {
            name: t for name, t in self._leaves.items() if torch.is_tensor(t) and t.requires_grad and t.is_leaf
        }  # fmt: skip
        grads = [(t, t.grad) for t in self.differentiable.values()]
        copied = _copier(torch, [*tensors.values(), *(g for _, g in grads if g is not None)])
        self._tensors = {key: (t, copied(t), _placed(t)) for key, t in tensors.items()}
        self._grads = [(t, grad, None if grad is None else copied(grad)) for t, grad in grads]
        held = (self._args, [*self._kwargs.values()], [*self._variables.values()])
        self._holders = [(h, h.copy()) for h in find_containers(held)]
        self.generators = find_instances(held, torch.Generator)
        self._drawn = [g.get_state() for g in self.generators]

    def changed(self) -> dict[str, Any]:
        """Values that are not what was kept, by name: copies of those that are there now."""
        now, found = self._now(), dict[str, Any]()
        for name, leaf in now.items():
            old = self._leaves.get(name)
            if self._torch.is_tensor(leaf):
                kept = self._tensors[id(old)][1] if self._torch.is_tensor(old) else None
                if kept is None or not _same(self._torch, leaf, kept):
                    found[name] = leaf.detach().clone()
            elif name not in self._leaves or (leaf is not old and (self._torch.is_tensor(old) or leaf != old)):
                found[name] = leaf
        return found | dict.fromkeys(self._leaves.keys() - now.keys(), "taken away")

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        from ..graph.nested import refill

        if self._outside is not None:
            self._outside.restore(self._variables)
        for generator, drawn in zip(self.generators, self._drawn, strict=True):
            generator.set_state(drawn)
        for holder, kept in self._holders:
            refill(holder, kept)
        for tensor, kept, placed in self._tensors.values():
            with self._torch.inference_mode(tensor.is_inference()), self._torch.no_grad():
                if placed is not None and _placed(tensor) != placed:  # x.unsqueeze_(0)
                    tensor.as_strided_(*placed)
                if not _same(self._torch, tensor, kept):
                    tensor.copy_(kept)
        for tensor, grad, kept in self._grads:
            tensor.grad = grad
            if grad is not None and not _same(self._torch, grad, kept):
                with self._torch.no_grad():
                    grad.copy_(kept)

    def _now(self) -> dict[str, Any]:
        from ..graph.nested import find_leaves, storage_address

        found = find_leaves(self._args, "argument") | find_leaves(self._kwargs, "argument")
        if self._outside is not None:
            found |= find_leaves(self._outside.values(), "outside")
        return {k: v for k, v in found.items() if not (self._torch.is_tensor(v) and storage_address(v) in self._known)}


def _placed(tensor: Any) -> tuple[Any, ...] | None:
    """Size, stride and offset, where a tensor has them."""
    if str(tensor.layout) != "torch.strided":
        return None
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _same(torch: Any, tensor: Any, kept: Any) -> bool:
    """Whether they are known to be equal; not where torch cannot tell."""
    if tensor.dtype != kept.dtype or tensor.layout != kept.layout or tensor.shape != kept.shape:
        return False
    if tensor.layout is torch.strided:
        return _equal(torch, tensor, kept.to(tensor.device))
    from ..graph.nested import sparse_parts

    return all(torch.equal(a, b.to(a.device)) for a, b in zip(sparse_parts(tensor), sparse_parts(kept), strict=True))


def _equal(torch: Any, a: Any, b: Any) -> bool:
    """Value by value, NaN beside NaN."""
    if a.is_complex():
        a, b = (torch.view_as_real(t.detach().resolve_conj()) for t in (a, b))
    if torch.equal(a, b):
        return True
    return bool(a.is_floating_point() and ((a == b) | (a.isnan() & b.isnan())).all())


def _copier(torch: Any, tensors: Sequence[Any]) -> Callable[[Any], Any]:
    """Copies a tensor where it is, or to the host where the device has no room for copies of all of them."""
    needed = sum(t.numel() * t.element_size() for t in tensors if t.is_cuda)
    if not needed or needed <= ROOM * torch.cuda.mem_get_info()[0]:
        return lambda tensor: tensor.detach().clone()
    return lambda tensor: tensor.detach().to("cpu", copy=True)
