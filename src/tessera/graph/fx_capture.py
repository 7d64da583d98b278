"""Capture fx graphs and exported programs as a `Graph`: they run node by node, so that every operator has its node."""

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
from .ir import Graph, size_of
from .recorder import Recorder

_aten = torch.ops.aten


def _functional(name: str) -> Callable[..., Any]:
    """A function of torch.nn.functional, looked up when it is called: capture replaces some."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(torch.nn.functional, name)(*args, **kwargs)

    return call


# Operators of an exported program that a GPU runs as one kernel and the meta device takes apart: called through the
# functions that capture intercepts.
_INTERCEPTED: dict[Any, Any] = {
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
        program = _unwrap(program)
    if isinstance(program, fx.GraphModule):
        if inputs is None:
            inputs = _make_inputs(program)
        with _run_by_nodes(program):
            graph = capture(program, inputs)
        return graph, _find_returned(program)
    if isinstance(program, torch.nn.Module):
        if inputs is None:
            raise ArgumentError("a module needs inputs to be partitioned", fix="partition(model, inputs=...)")
        return capture(program, inputs), frozenset()
    raise ArgumentError(
        f"cannot partition {type(program).__name__}",
        fix="pass a tessera Graph, a torch.fx.GraphModule, an exported program or an nn.Module with inputs=",
    )


def _unwrap(program: Any) -> fx.GraphModule:
    """The exported program with its parameters in place, without the guards on its inputs."""
    has_guards = "check_guards" in inspect.signature(program.module).parameters
    module: fx.GraphModule = program.module(**({"check_guards": False} if has_guards else {}))
    module.__dict__["train"] = lambda _mode=True: module  # the mode is fixed at export: its own train() refuses
    return module


class _NodeInterpreter(fx.Interpreter):
    """Runs the nodes and tells the recorder which one is running."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        modes = reversed(_get_current_dispatch_mode_stack())
        self._recorder = next((mode for mode in modes if isinstance(mode, Recorder)), None)

    def run_node(self, n: fx.Node) -> Any:
        if self._recorder is None:
            return super().run_node(n)
        before, self._recorder.node = self._recorder.node, n.name
        try:
            return super().run_node(n)
        finally:
            self._recorder.node = before

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(_INTERCEPTED.get(target, target), args, kwargs)


@contextlib.contextmanager
def _run_by_nodes(module: fx.GraphModule) -> Iterator[None]:
    """Run the module through the interpreter inside this block."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _NodeInterpreter(module).run(*_bind_arguments(module, args, kwargs), enable_io_processing=False)

    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def _bind_arguments(module: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments in the order of the placeholders; an exported program takes its tree of inputs apart."""
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    inputs = (*args, *kwargs.values())
    if len(inputs) != len(nodes) and not all(isinstance(a, torch.Tensor) for a in inputs):
        args, kwargs = tuple(pytree.tree_leaves((args, dict(kwargs)))), {}
    left, values = dict(kwargs), list(args)
    for node in nodes[len(args) :]:
        if node.target in left or node.name in left:
            values.append(left.pop(node.target if node.target in left else node.name))
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


def _make_inputs(module: fx.GraphModule) -> tuple[Any, ...]:
    """Meta tensors with the shapes the placeholders carry."""
    values: list[Any] = []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        example = node.meta.get("val", node.meta.get("tensor_meta"))
        if example is None and node.args:
            values.append(node.args[0])
            continue
        if example is None:
            raise ArgumentError(
                f"the shape of the graph's input {node.target!r} is not known",
                why="an fx graph from symbolic_trace has no shapes",
                fix="pass inputs=torch.randn(...) to partition(), or run ShapeProp(graph).propagate(...) first",
            )
        values.append(pytree.tree_map(_to_meta, example, is_leaf=lambda x: hasattr(x, "shape")))
    return tuple(values)


def _to_meta(example: Any) -> Any:
    if not hasattr(example, "shape"):
        return example
    stride = example.stride() if callable(example.stride) else example.stride
    shape, stride = (tuple(size_of(s) for s in sizes) for sizes in (example.shape, stride))
    return torch.empty_strided(shape, stride, dtype=example.dtype, device="meta")


def _find_returned(module: fx.GraphModule) -> frozenset[str]:
    outputs = (node for node in module.graph.nodes if node.op == "output")
    return frozenset(n.name for node in outputs for n in node.all_input_nodes)
