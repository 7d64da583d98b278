"""Trace a module's forward into an fx graph without changing the module, and tell which nodes may write.

Submodules with hooks or a replaced forward stay calls, because they do not run their class's forward. Arguments with a
default are taken at their default, so that `if mask is not None` is decided as in the plain call.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import RewriteError
from ..graph.nested import refill
from .inductor import PRIVATE_ERRORS

# The name that fx gives to tensors that a forward makes without inputs; fx puts them on the module.
_CONSTANT = "_tensor_constant"
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul")
_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name) for name in (*_IN_PLACE, "ilshift", "irshift", "setitem", "delitem")
)
# Where these functions take `inplace` by position: F.relu(x, True), F.dropout(x, 0.5, False, True).
_INPLACE_PLACES = {"relu": 1, "relu6": 1, "silu": 1, "mish": 1, "elu": 2, "leaky_relu": 2, "hardtanh": 3, "dropout": 3}
# Modules whose functions write into nothing, except those with `inplace`, `out` or a name that ends in "_".
_PURE_MODULES = re.compile(
    r"torch|torch\.functional|torch\.nn\.functional|torch\._C\._(nn|fft|linalg|special)|_operator|operator|math|builtins"
)


def trace_forward(module: nn.Module) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return the graph of a module's plain call, which shares its submodules, and the arguments it needs."""
    tracer = _Tracer()
    with _restore_attributes(module):
        try:
            with _RefuseRandom():
                graph = tracer.trace(module)
            return fx.GraphModule(module, graph), tracer.needed
        except PRIVATE_ERRORS as e:
            name = type(module).__name__
            raise RewriteError(
                f"the forward of {name} cannot be traced: {str(e).splitlines()[0] if str(e) else type(e).__name__}",
                why="it decides by values, shapes or types that are not known before it runs",
                fix="pass the submodule that holds the convolutions, such as model.backbone",
            ) from e


def is_plain(module: nn.Module) -> bool:
    """Tell whether calling a module runs its class's forward and nothing else."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


class _Proxy(fx.Proxy):
    """fx's proxy, except that `x += y` writes into x: without these methods, fx would read it as x = x + y."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer"):
            raise TypeError(f"it sets {name} of a tensor")
        super().__setattr__(name, value)


def _make_in_place_method(target: Any) -> Any:
    def method(self: _Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


for _name in _IN_PLACE:
    setattr(_Proxy, f"__{_name}__", _make_in_place_method(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    """fx's tracer, with corrections for what it would silently get wrong."""

    proxy_buffer_attributes = True  # otherwise, a buffer that forward writes into would be written during tracing
    needed: tuple[str, ...] = ()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or not is_plain(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        parameters = list(inspect.signature(inspect.unwrap(root_fn)).parameters.values())[1:]
        open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [p for p in parameters if p.default is p.empty and p.kind not in open_ended]
        if any(p.kind is p.KEYWORD_ONLY for p in needed):
            raise TypeError("an argument is keyword-only and has no default")
        self.needed = tuple(p.name for p in needed)
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in self.needed)]

    def create_arg(self, a: Any) -> Any:
        if type(a) is OrderedDict:  # fx would make it a plain dictionary
            return self.create_node(
                "call_function", OrderedDict, ([(k, self.create_arg(v)) for k, v in a.items()],), {}
            )
        if isinstance(a, dict) and type(a) is not dict:
            raise TypeError(f"it makes a {type(a).__name__}")
        return super().create_arg(a)


class _RefuseRandom(TorchDispatchMode):
    """Refuses random numbers: they would be drawn once, while tracing, and then stay the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise RuntimeError("it draws random numbers")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _restore_attributes(module: nn.Module) -> Iterator[None]:
    """Put the attributes of a module and its parts back; raise if the forward changed any."""
    saved = [
        (name, vars(m), vars(m).copy(), {k: v.copy() for k, v in vars(m).items() if isinstance(v, (dict, list))})
        for name, m in module.named_modules()
    ]
    wrote: list[str] = []
    try:
        yield
    finally:
        for name, now, before, contents in saved:
            changed = [k for k in now.keys() | before.keys() if now.get(k) is not before.get(k)]
            changed += [k for k, items in contents.items() if not _is_same(before[k], items)]
            wrote += [f"{name}.{k}".lstrip(".") for k in changed if not k.startswith(_CONSTANT)]
            refill(now, before)
            for k, items in contents.items():
                refill(before[k], items)
    if wrote:
        raise RewriteError(
            f"the forward of {type(module).__name__} writes {wrote[0]}",
            why="a traced forward would not write it again",
            fix="pass a submodule whose forward only returns its result",
        )


def _is_same(container: Any, copy: Any) -> bool:
    now, before = ([x for item in c.items() for x in item] if isinstance(c, dict) else c for c in (container, copy))
    return len(now) == len(before) and all(map(operator.is_, now, before))


def may_write(node: fx.Node, module: nn.Module) -> bool:
    """Tell whether a node may write into a tensor that others read; an unknown function or layer may."""
    if node.op == "call_module":
        layers = list(module.get_submodule(str(node.target)).modules())
        known = all(type(m).__module__.startswith("torch.nn.modules") and is_plain(m) for m in layers)
        return not known or any(getattr(m, "inplace", False) for m in layers)
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", node.target))
    if node.target in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        return True
    at = _INPLACE_PLACES.get(name, len(node.args))
    if node.kwargs.get("inplace") or node.kwargs.get("out") is not None or node.args[at : at + 1] == (True,):
        return True
    return node.op == "call_function" and not _PURE_MODULES.fullmatch(getattr(node.target, "__module__", None) or "")
