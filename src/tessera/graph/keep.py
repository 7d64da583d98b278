"""Put a program back as it was before the capture: caches, counters, schedulers, tensors that want gradients.

A captured program runs once, on meta tensors. What it writes into containers and objects of its own on the way is
taken back afterwards, in place, so that the real program finds them as it left them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .nested import find_containers, holds_at_most, refill
from .surroundings import MAX_VALUES, Surroundings


@contextlib.contextmanager
def restore_containers(modules: list[torch.nn.Module], program: Callable[..., Any]) -> Iterator[None]:
    """Give the containers in modules, and in the variables around a callable, their contents back at the end."""
    attributes = [
        value
        for root in modules
        for module in root.modules()
        for name, value in module.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules") and holds_at_most(value, MAX_VALUES)
    ]
    around = None if isinstance(program, torch.nn.Module) else Surroundings(program)
    values = around.values() if around is not None else {}
    copies = [(c, c.copy()) for c in find_containers([attributes, *values.values()], search=True)]
    try:
        yield
    finally:
        if around is not None:
            around.restore(values)
        for container, contents in copies:
            refill(container, contents)


@contextlib.contextmanager
def replace_leaves(program: Any, make_twin: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replace the tensors around a callable that want gradients by twins: a meta gradient cannot reach a real one."""
    if isinstance(program, torch.nn.Module):
        yield
        return

    def swap(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            wanted = value.requires_grad and value.is_leaf and value.device.type != "meta"
            return make_twin(value) if wanted else value
        if type(value) is tuple:
            twin = tuple(swap(item) for item in value)
            return value if all(a is b for a, b in zip(twin, value, strict=True)) else twin
        return value

    around = Surroundings(program)
    values = around.values()
    copies = [(c, c.copy()) for c in find_containers([*values.values()], search=True) if isinstance(c, (dict, list))]
    try:
        around.restore({name: swap(value) for name, value in values.items()})
        for container, contents in copies:
            for key, value in list(contents.items() if isinstance(contents, dict) else enumerate(contents)):
                if (twin := swap(value)) is not value:
                    container[key] = twin
        yield
    finally:
        around.restore(values)
        for container, contents in copies:
            refill(container, contents)
