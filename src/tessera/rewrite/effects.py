"""What a node of an fx graph does besides returning a value: writes into something, draws random numbers, or unknown.

Where it cannot be told, the answer is that it does: a rewrite then leaves the node where it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "exponential", "uniform", "rrelu",
           "gumbel", "fractional_max_pool", "multi_head_attention")  # fmt: skip
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})  # dropout between their layers
# Functions and methods that wait for the device or leave torch: their place in the program means something.
_HOST = frozenset({"item", "tolist", "numpy", "cpu", "cuda", "backward", "register_hook", "_assert", "is_nonzero"})
_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul",
                 "ilshift", "irshift", "setitem", "delitem")
)  # fmt: skip
# Where functions live that return a value and do nothing else, but for those named above.
_PLAIN = frozenset({"torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "torch._C._fft", "_operator",
                    "torch._C._linalg", "torch._C._special", "operator", "math", "builtins"})  # fmt: skip


def name_of(node: fx.Node) -> str:
    """The plain name of what a node calls: "relu" for torch.relu, aten.relu.default, F.relu and x.relu()."""
    if isinstance(node.target, str):
        return node.target.rpartition(".")[2] if node.op == "call_module" else node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name).rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def has_effect(node: fx.Node, module: nn.Module) -> str | None:
    """Why a node must stay where it is ("writes", "random", "host", "unknown"), or None where it may move."""
    if node.op in ("placeholder", "get_attr", "output"):
        return None
    if node.op == "call_module":
        return _of_module(module.get_submodule(str(node.target)))
    name = name_of(node)
    if _updates_statistics(node, name) or (name.startswith("embedding") and node.kwargs.get("max_norm") is not None):
        return "writes"
    if isinstance(node.target, torch._ops.OpOverload):
        if node.target._schema.is_mutable:
            return "writes"
        return "random" if torch.Tag.nondeterministic_seeded in node.target.tags else None
    if node.target in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        return "writes"
    if node.kwargs.get("inplace") or node.kwargs.get("out") is not None or True in _positional_inplace(node, name):
        return "writes"
    if name in _HOST:
        return "host"
    if name in _RECURRENT or (any(word in name for word in _RANDOM) and _argument(node, "training", 2) is not False):
        return "random"
    if "dot_product_attention" in name and _argument(node, "dropout_p", 4) not in (None, 0, 0.0):
        return "random"
    return None if node.op == "call_method" or getattr(node.target, "__module__", "") in _PLAIN else "unknown"


def _argument(node: fx.Node, name: str, place: int) -> Any:
    """A named argument, or the one at a place; None where it is left out."""
    return node.kwargs.get(name, node.args[place] if len(node.args) > place else None)


def _positional_inplace(node: fx.Node, name: str) -> tuple[Any, ...]:
    """The `inplace` of functions that take it by position: F.relu(x, True), F.dropout(x, 0.5, False, True)."""
    place = {"relu": 1, "relu6": 1, "silu": 1, "mish": 1, "elu": 2, "leaky_relu": 2, "hardtanh": 3, "dropout": 3}
    at = place.get(name)
    return node.args[at : at + 1] if at is not None else ()


def _updates_statistics(node: fx.Node, name: str) -> bool:
    """Batch norms that train write their running statistics, which their schemas do not all say."""
    if "batch_norm" not in name and "instance_norm" not in name:
        return False
    return not (name.endswith(("no_training", "functional")) or _argument(node, "training", 5) is False)


def _of_module(module: nn.Module) -> str | None:
    """Layers of torch.nn are known; containers are as their parts, and anything else may do anything."""
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
