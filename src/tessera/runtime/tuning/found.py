"""What a function works with: the modules and optimizers it reaches through arguments, closure, globals and `self`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The outermost modules and the optimizers of a function; `tensors` are those among its arguments."""

    modules: tuple[Any, ...]
    optimizers: tuple[Any, ...]
    tensors: tuple[Any, ...]

    @property
    def trains(self) -> bool:
        """Whether calling it changes weights: it has an optimizer."""
        return bool(self.optimizers)

    def submodules(self) -> Iterator[Any]:
        """Every module, outermost first."""
        for module in self.modules:
            yield from module.modules()

    @property
    def device(self) -> Any:
        """Where it runs: the device of its parameters or arguments; None where there are none."""
        for module in self.modules:
            for parameter in module.parameters():
                return parameter.device
        return next((t.device for t in self.tensors), None)


def reach(fn: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Reach:
    """What a call works with: as a capture finds it, in the function and in what it is given."""
    import torch

    from ...graph.surroundings import find_models

    modules, optimizers = find_models(fn, args, dict(kwargs or {}))
    inner = {id(sub) for m in modules for sub in m.modules() if sub is not m}
    tensors = [t for t in torch.utils._pytree.tree_leaves((args, dict(kwargs or {}))) if torch.is_tensor(t)]
    return Reach(
        modules=tuple(m for m in modules if id(m) not in inner), optimizers=tuple(optimizers), tensors=tuple(tensors)
    )
