"""The state a trial must not change: weights, buffers, gradients, optimizers, random numbers. Taken once, put back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from .found import Reach

# What says how an optimizer computes, not what: a trial may have changed it, and its change takes it back.
HOW = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})
# Of the free device memory, what copies may take; what is larger is kept in the host's, and comes back over PCIe.
ROOM = 0.3


class State:
    """A copy of everything a call of the function may write. `restore` puts it back in place: pointers stay."""

    def __init__(self, reach: Reach) -> None:
        import torch

        self._torch = torch
        copied = _copier(torch, reach)
        self._tensors = [(t, copied(t)) for m in reach.modules for t in (*m.parameters(), *m.buffers())]
        self._grads = [(p, None if p.grad is None else copied(p.grad)) for m in reach.modules for p in m.parameters()]
        self._training = [(m, m.training) for m in reach.submodules()]
        self._optimizers = [
            (o, torch.utils._pytree.tree_map(lambda x: copied(x) if torch.is_tensor(x) else x, o.state_dict()))
            for o in reach.optimizers
        ]
        self._random = torch.get_rng_state()
        self._cuda_random = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None

    def restore(self) -> None:
        """As it was."""
        torch = self._torch
        with torch.no_grad():
            for tensor, kept in self._tensors:
                tensor.copy_(kept)
            for parameter, grad in self._grads:
                parameter.grad = None if grad is None else grad.to(parameter.device, copy=True)
        for module, training in self._training:
            module.training = training
        for optimizer, kept in self._optimizers:
            _restore_optimizer(torch, optimizer, kept)
        self.reseed()

    def updates(self) -> list[Any]:
        """How far each weight is from what was kept."""
        return [t.detach() - kept.to(t.device) for t, kept in self._tensors if t.is_floating_point()]

    def reseed(self) -> None:
        """The random numbers as they were: two runs from here draw the same."""
        self._torch.set_rng_state(self._random)
        if self._cuda_random is not None:
            self._torch.cuda.set_rng_state_all(self._cuda_random)


def _copier(torch: Any, reach: Reach) -> Callable[[Any], Any]:
    """Copies a tensor where it is, or to the host where the device has no room for copies of all of them."""
    tensors = [t for m in reach.modules for t in (*m.parameters(), *m.buffers())]
    tensors += [t.grad for t in tensors if t.grad is not None]
    tensors += [t for o in reach.optimizers for s in o.state.values() for t in s.values() if torch.is_tensor(t)]
    needed = sum(t.numel() * t.element_size() for t in tensors if t.is_cuda)
    if not needed or needed <= ROOM * torch.cuda.mem_get_info()[0]:
        return lambda tensor: tensor.detach().clone()
    return lambda tensor: tensor.detach().to("cpu", copy=True)


def _restore_optimizer(torch: Any, optimizer: Any, kept: Any) -> None:
    """In place where the state exists, so that a captured graph goes on reading the same memory."""
    for group, old in zip(optimizer.param_groups, kept["param_groups"], strict=True):
        for name, value in old.items():
            if torch.is_tensor(value) and torch.is_tensor(group.get(name)):
                group[name].copy_(value)  # a learning rate that a graph reads
            elif name not in HOW:
                group[name] = value
    order = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for old in kept["param_groups"] for n in old["params"]]
    by_parameter = {id(p): kept["state"].get(n) for p, n in zip(order, numbers, strict=True)}
    for p in order:
        old, now = by_parameter[id(p)], optimizer.state.get(p)
        if old is None:
            optimizer.state.pop(p, None)
            continue
        if now is None:
            now = optimizer.state[p] = {}
        for name, value in old.items():
            if torch.is_tensor(value) and torch.is_tensor(now.get(name)) and now[name].shape == value.shape:
                now[name].copy_(value)
            elif torch.is_tensor(value):  # a scalar is the step count, which stays where it was
                now[name] = value.to(p.device if value.dim() else value.device, copy=True)
            else:
                now[name] = copy.deepcopy(value)
