"""fx graphs and exported programs as a `Graph`: run node by node, so that every operator knows its node."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..errors import ArgumentError
from .capture import capture
from .ir import Graph
from .recorder import Recorder

_aten = torch.ops.aten


def _functional(name: str) -> Callable[..., Any]:
    """A function of torch.nn.functional, looked up when it is called: capture puts its own there."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(torch.nn.functional, name)(*args, **kwargs)

    return call


# Operators of an exported program that a GPU runs as one kernel and the meta device takes apart: called by the name
# under which capture knows them.
_NAMES_CAPTURE_KNOWS: dict[Any, Any] = {
    _aten.scaled_dot_product_attention.default: _functional("scaled_dot_product_attention"),
    _aten.dropout.default: _functional("dropout"),
    _aten.rms_norm.default: _functional("rms_norm"),
    _aten.lstm.input: torch._C._VariableFunctions.lstm,
    _aten.gru.input: torch._C._VariableFunctions.gru,
}


def capture_fx(program: Any, inputs: Any) -> tuple[Graph, frozenset[str]]:
    """An fx graph module, exported program or plain module as a `Graph`, and the nodes whose values it returns."""
    if isinstance(program, torch.export.ExportedProgram):
        if inputs is None and program.example_inputs is not None:
            inputs = tuple(pytree.tree_leaves(program.example_inputs))
        program = _module_of(program)
    if isinstance(program, fx.GraphModule):
        if inputs is None:
            inputs = _inputs_of(program)
        with _node_by_node(program):
            graph = capture(program, inputs)
        return graph, _returned(program)
    if isinstance(program, torch.nn.Module):
        if inputs is None:
            raise ArgumentError("a module needs inputs to be partitioned", fix="partition(model, inputs=...)")
        return capture(program, inputs), frozenset()
    raise ArgumentError(
        f"cannot partition {type(program).__name__}",
        fix="pass a tessera Graph, a torch.fx.GraphModule, an exported program or an nn.Module with inputs=",
    )


def _module_of(program: Any) -> fx.GraphModule:
    """The exported program with its parameters in place, without the guards on its inputs."""
    known = inspect.signature(program.module).parameters
    module: fx.GraphModule = program.module(**({"check_guards": False} if "check_guards" in known else {}))
    module.__dict__["train"] = lambda _mode=True: module  # the mode is fixed at export: its own train() refuses
    return module


class _Nodes(fx.Interpreter):
    """Runs the nodes and tells the recorder which one."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        found = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]
        self._recorder = found[-1] if found else None

    def run_node(self, n: fx.Node) -> Any:
        if self._recorder is None:
            return super().run_node(n)
        before, self._recorder.node = self._recorder.node, n.name
        try:
            return super().run_node(n)
        finally:
            self._recorder.node = before

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(_NAMES_CAPTURE_KNOWS.get(target, target), args, kwargs)


@contextlib.contextmanager
def _node_by_node(module: fx.GraphModule) -> Iterator[None]:
    """The module runs through the interpreter for as long as this lasts."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _Nodes(module).run(*_bound(module, args, kwargs), enable_io_processing=False)

    had = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if had is not None:
            module.__dict__["forward"] = had


def _bound(module: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments in the order of the placeholders; an exported program takes its tree of inputs apart."""
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    given = (*args, *kwargs.values())
    if len(given) != len(nodes) and not all(isinstance(a, torch.Tensor) for a in given):
        args, kwargs = tuple(pytree.tree_leaves((args, dict(kwargs)))), {}
    left, values = dict(kwargs), list(args)
    for node in nodes[len(args) :]:
        if node.target in left or node.name in left:
            values.append(left.pop(node.target, None) if node.target in left else left.pop(node.name))
        elif node.args:
            values.append(node.args[0])
        else:
            raise ArgumentError(
                f"the input {node.target!r} of the graph is missing",
                why=f"it has {len(nodes)}: {', '.join(str(n.target) for n in nodes)}",
                fix="pass all of them in inputs=, a tuple in this order or a dict by name",
            )
    if left or len(values) > len(nodes):
        extra = ", ".join(left) or f"{len(values) - len(nodes)} too many"
        raise ArgumentError(f"inputs the graph does not have: {extra}", fix=f"it has {len(nodes)}")
    return values


def _inputs_of(module: fx.GraphModule) -> tuple[Any, ...]:
    """Meta tensors with the shapes the placeholders carry."""
    values: list[Any] = []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        found = node.meta.get("val", node.meta.get("tensor_meta"))
        if found is None and node.args:
            values.append(node.args[0])
            continue
        if found is None:
            raise ArgumentError(
                f"the shape of the graph's input {node.target!r} is not known",
                why="an fx graph from symbolic_trace has no shapes",
                fix="pass inputs=torch.randn(...) to partition(), or run ShapeProp(graph).propagate(...) first",
            )
        values.append(pytree.tree_map(_meta, found, is_leaf=lambda x: hasattr(x, "shape")))
    return tuple(values)


def _meta(found: Any) -> Any:
    if not hasattr(found, "shape"):
        return found
    shape = tuple(_plain(s) for s in found.shape)
    stride = found.stride() if callable(found.stride) else found.stride
    return torch.empty_strided(shape, tuple(_plain(s) for s in stride), dtype=found.dtype, device="meta")


def _plain(size: Any) -> int:
    """A size as a number; of a symbolic one the value it was traced with."""
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint if hint is not None else size)


def _returned(module: fx.GraphModule) -> frozenset[str]:
    names: set[str] = set()
    for node in module.graph.nodes:
        if node.op == "output":
            names.update(n.name for n in node.all_input_nodes)
    return frozenset(names)
