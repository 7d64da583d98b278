"""A module's forward as an fx graph, read without changing anything about the module.

Submodules with hooks or a replaced forward stay calls: what they do is not the class's forward. Arguments with a
default are taken at their default, so that `if mask is not None` goes the way of the plain call.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import RewriteError
from .inductor import PRIVATE_ERRORS

_CONSTANT = "_tensor_constant"  # what fx calls tensors that a forward makes of nothing; it puts them on the module


def trace(module: nn.Module) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """The graph of a module's plain call, sharing its submodules, and the names of the arguments that call needs."""
    tracer = _Tracer()
    with _unchanged(module):
        try:
            with _NoDraws():
                graph = tracer.trace(module)
            return fx.GraphModule(module, graph), tracer.needed
        except PRIVATE_ERRORS as e:
            name = type(module).__name__
            raise RewriteError(
                f"the forward of {name} cannot be traced: {str(e).splitlines()[0] if str(e) else type(e).__name__}",
                why="it decides by values, shapes or types that are not known before it runs",
                fix="give the submodule that holds the convolutions, such as model.backbone",
            ) from e


def plain(module: nn.Module) -> bool:
    """Whether calling a module runs its class's forward and nothing else."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


class _Proxy(fx.Proxy):
    """fx's proxy, but `x += y` writes into x: without these methods it would be read as x = x + y."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer"):
            raise TypeError(f"it sets {name} of a tensor")
        super().__setattr__(name, value)


def _in_place(target: Any) -> Any:
    def method(self: _Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul"):
    setattr(_Proxy, f"__{_name}__", _in_place(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    """fx's tracer, but for what it would silently get wrong."""

    proxy_buffer_attributes = True  # else a buffer that forward writes into would be written while tracing
    needed: tuple[str, ...] = ()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or not plain(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        given = list(inspect.signature(inspect.unwrap(root_fn)).parameters.values())[1:]
        open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [p for p in given if p.default is p.empty and p.kind not in open_ended]
        if any(p.kind is p.KEYWORD_ONLY for p in needed):
            raise TypeError("an argument is keyword-only and has no default")
        self.needed = tuple(p.name for p in needed)
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in self.needed)]

    def create_arg(self, a: Any) -> Any:
        if type(a) is OrderedDict:  # fx would make a plain dictionary of it
            return self.create_node(
                "call_function", OrderedDict, ([(k, self.create_arg(v)) for k, v in a.items()],), {}
            )
        if isinstance(a, dict) and type(a) is not dict:
            raise TypeError(f"it makes a {type(a).__name__}")
        return super().create_arg(a)


class _NoDraws(TorchDispatchMode):
    """Refuses random numbers that would be drawn once, while tracing, and be the same for ever after."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise RuntimeError("it draws random numbers")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Attributes of a module and its parts are as before; an error if the forward wrote any."""
    before = [(name, m, {k: (v, _items(v)) for k, v in m.__dict__.items()}) for name, m in module.named_modules()]
    try:
        yield
    finally:
        wrote = None
        for name, m, attributes in before:
            for key in [k for k in m.__dict__ if k not in attributes]:
                del m.__dict__[key]
                wrote = wrote if key.startswith(_CONSTANT) else f"{name}.{key}".lstrip(".")
            for key, (value, items) in attributes.items():
                if m.__dict__.get(key) is not value or not _same(_items(value), items):
                    m.__dict__[key] = value
                    _put_back(value, items)
                    wrote = f"{name}.{key}".lstrip(".")
    if wrote is not None:
        raise RewriteError(
            f"the forward of {type(module).__name__} writes {wrote}",
            why="a traced forward would not write it again",
            fix="give a submodule whose forward only returns its result",
        )


def _items(value: Any) -> list[Any] | None:
    """What a list or dictionary holds; None for anything else."""
    if isinstance(value, dict):
        return [part for item in value.items() for part in item]
    return list(value) if isinstance(value, list) else None


def _same(now: list[Any] | None, before: list[Any] | None) -> bool:
    if now is None or before is None:
        return now is before
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _put_back(value: Any, items: list[Any] | None) -> None:
    if items is not None and isinstance(value, dict):
        value.clear()
        value.update(zip(items[::2], items[1::2], strict=True))
    elif items is not None:
        value[:] = items
