"""Trace a module's forward into an fx graph without changing the module, and tell which nodes have side effects.

Submodules with hooks or a replaced forward stay calls: what they do is not the class's forward. Arguments with a
default are taken at their default, so that `if mask is not None` is decided as in the plain call.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import RewriteError
from ..graph.nested import refill
from .inductor import PRIVATE_ERRORS

# What fx calls tensors that a forward makes of nothing; it puts them on the module.
_CONSTANT = "_tensor_constant"
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul")
_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name) for name in (*_IN_PLACE, "ilshift", "irshift", "setitem", "delitem")
)
_RANDOM = re.compile(
    "dropout|rand|bernoulli|multinomial|normal|poisson|exponential|uniform|rrelu|gumbel|fractional_max_pool"
    "|multi_head_attention"
)
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})  # dropout between their layers
# Functions and methods that wait for the device or leave torch: their place in the program matters.
_HOST = frozenset({"item", "tolist", "numpy", "cpu", "cuda", "backward", "register_hook", "_assert", "is_nonzero"})
# Modules of functions that only return a value, but for those named above.
_PURE_MODULES = re.compile(
    r"torch|torch\.functional|torch\.nn\.functional|torch\._C\._(nn|fft|linalg|special)|_operator|operator|math|builtins"
)

EffectKind = Literal["writes", "random", "host", "unknown"]


def trace_forward(module: nn.Module) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return the graph of a module's plain call, sharing its submodules, and the names of the arguments it needs."""
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
                fix="give the submodule that holds the convolutions, such as model.backbone",
            ) from e


def is_plain(module: nn.Module) -> bool:
    """Tell whether calling a module runs its class's forward and nothing else."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


class _Proxy(fx.Proxy):
    """fx's proxy, but `x += y` writes into x: without these methods it would be read as x = x + y."""

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
    """fx's tracer, but for what it would silently get wrong."""

    proxy_buffer_attributes = True  # else a buffer that forward writes into would be written while tracing
    needed: tuple[str, ...] = ()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or not is_plain(m)

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


class _RefuseRandom(TorchDispatchMode):
    """Refuses random numbers that would be drawn once, while tracing, and then stay the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise RuntimeError("it draws random numbers")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _restore_attributes(module: nn.Module) -> Iterator[None]:
    """Put the attributes of a module and its parts back; raise if the forward wrote any."""
    before = [
        (name, m, {k: (v, _copy_container(v)) for k, v in m.__dict__.items()}) for name, m in module.named_modules()
    ]
    try:
        yield
    finally:
        wrote = None
        for name, m, attributes in before:
            for key in [k for k in m.__dict__ if k not in attributes]:
                del m.__dict__[key]
                wrote = wrote if key.startswith(_CONSTANT) else f"{name}.{key}".lstrip(".")
            for key, (value, copy) in attributes.items():
                if m.__dict__.get(key) is not value or not _is_unchanged(value, copy):
                    m.__dict__[key] = value
                    if copy is not None:
                        refill(value, copy)
                    wrote = f"{name}.{key}".lstrip(".")
    if wrote is not None:
        raise RewriteError(
            f"the forward of {type(module).__name__} writes {wrote}",
            why="a traced forward would not write it again",
            fix="give a submodule whose forward only returns its result",
        )


def _copy_container(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list)) else None


def _is_unchanged(container: Any, copy: Any) -> bool:
    """Tell whether a container holds the same objects as its copy; anything else is unchanged."""
    if copy is None:
        return True
    now, before = ([x for item in c.items() for x in item] if isinstance(c, dict) else c for c in (container, copy))
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


# -- side effects of nodes: where it cannot be told, a node has one --------------------------------------------------


def name_of(node: fx.Node) -> str:
    """Return the plain name of what a node calls: "relu" for torch.relu, aten.relu.default, F.relu and x.relu()."""
    if isinstance(node.target, str):
        return node.target.rpartition(".")[2] if node.op == "call_module" else node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name).rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def find_effect(node: fx.Node, module: nn.Module) -> EffectKind | None:
    """Return why a node must stay where it is; None where it only returns a value and may move."""
    if node.op in ("placeholder", "get_attr", "output"):
        return None
    if node.op == "call_module":
        return _find_module_effect(module.get_submodule(str(node.target)))
    name = name_of(node)
    if _updates_statistics(node, name) or (name.startswith("embedding") and node.kwargs.get("max_norm") is not None):
        return "writes"
    if isinstance(node.target, torch._ops.OpOverload):
        if node.target._schema.is_mutable:
            return "writes"
        return "random" if torch.Tag.nondeterministic_seeded in node.target.tags else None
    if node.target in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        return "writes"
    if node.kwargs.get("inplace") or node.kwargs.get("out") is not None or _get_inplace(node, name) is True:
        return "writes"
    if name in _HOST:
        return "host"
    if name in _RECURRENT or (_RANDOM.search(name) and _get_argument(node, "training", 2) is not False):
        return "random"
    if "dot_product_attention" in name and _get_argument(node, "dropout_p", 4) not in (None, 0, 0.0):
        return "random"
    pure = node.op == "call_method" or _PURE_MODULES.fullmatch(getattr(node.target, "__module__", None) or "")
    return None if pure else "unknown"


def _get_argument(node: fx.Node, name: str, place: int) -> Any:
    """Return a named argument, or the one at a place; None where it is left out."""
    return node.kwargs.get(name, node.args[place] if len(node.args) > place else None)


def _get_inplace(node: fx.Node, name: str) -> Any:
    """Return the `inplace` of functions that take it by position: F.relu(x, True), F.dropout(x, 0.5, False, True)."""
    place = {"relu": 1, "relu6": 1, "silu": 1, "mish": 1, "elu": 2, "leaky_relu": 2, "hardtanh": 3, "dropout": 3}
    at = place.get(name)
    return node.args[at] if at is not None and len(node.args) > at else None


def _updates_statistics(node: fx.Node, name: str) -> bool:
    """Tell whether a batch norm writes its running statistics: not all schemas show that."""
    if "batch_norm" not in name and "instance_norm" not in name:
        return False
    return not (name.endswith(("no_training", "functional")) or _get_argument(node, "training", 5) is False)


def _find_module_effect(module: nn.Module) -> EffectKind | None:
    """Layers of torch.nn are known; containers do what their parts do; anything else may do anything."""
    for part in module.modules():
        if not type(part).__module__.startswith("torch.nn.modules") or part._forward_hooks or part._forward_pre_hooks:
            return "unknown"
        tracks = isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats
        if getattr(part, "inplace", False) or (part.training and tracks) or getattr(part, "max_norm", None) is not None:
            return "writes"
        drop = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
        if part.training and (isinstance(part, nn.RReLU) or (isinstance(drop, float) and drop > 0)):
            return "random"
    return None
