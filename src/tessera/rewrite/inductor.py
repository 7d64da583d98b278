"""Run our passes before torch's compiler, and observe what the compiler does.

Three things are observed, each by a hook that torch offers: the aten graph before any pass (the program as eager torch
would run it), the kernels after fusion, and the plan of memory. The objects that the hooks get are private to torch: if
another version differs, the compiled program is the same and the `Compilation` notes what is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..graph.ir import TensorSpec
from .compilation import Compilation, InductorKernel, Replacement
from .eager_ops import EagerOp, list_eager_ops, memory_of, name_of, read_params, spec_of

Pass = Callable[[Any], list[Replacement]]
"""Changes a Dynamo graph in place and returns what it replaced."""

PRIVATE_ERRORS = (AttributeError, LookupError, TypeError, ValueError, RuntimeError, AssertionError)
"""What reading another torch's private objects, or tracing a part of a user's program, may raise."""


def make_backend(
    compilation: Compilation, passes: Sequence[Pass] = (), options: Mapping[str, Any] | None = None
) -> Any:
    """Return a backend for `torch.compile`: our passes, then Inductor with `options` (its config by name)."""

    def compile_graph(module: Any, inputs: Sequence[Any]) -> Any:
        from torch._functorch import config as autograd_config
        from torch._inductor.compile_fx import compile_fx

        # Dynamo compiles for other shapes later; the program was explained for the first shapes.
        watch = Compilation(observe=False) if compilation.closed else compilation
        apply_passes(module, passes, watch)
        if not watch.observe:
            return hold_graph(compile_fx(module, inputs, config_patches=dict(options or {})), module, compilation)
        hooks = {**(options or {}), **_make_hooks(compilation)}
        # A graph that comes out of autograd's cache is not seen, so the cache is off, if this torch has one.
        cached = hasattr(autograd_config, "enable_autograd_cache")
        with autograd_config.patch("enable_autograd_cache", False) if cached else contextlib.nullcontext():
            compiled = compile_fx(module, inputs, inner_compile=_make_inner_compile(compilation), config_patches=hooks)
        return hold_graph(compiled, module, compilation)

    return compile_graph


def hold_graph(compiled: Any, module: Any, compilation: Compilation) -> Any:
    """Return a compiled graph that notes when it runs, and that `compilation.release` can free.

    Dynamo keeps what it compiled, with CUDA graphs and their memory, for as long as the user's code lives.
    """
    held, graph = [compiled], compilation.graphs
    compilation.held.append((held, module))

    def run(*args: Any) -> Any:
        if not compilation.closed:
            compilation.ran.add(graph)
        return held[0](*args)

    return run


def apply_passes(module: Any, passes: Sequence[Pass], compilation: Compilation) -> None:
    """Run our passes, and note what they changed."""
    compilation.graphs += 1
    replacements = [replace(each, graph=compilation.graphs) for run in passes for each in run(module)]
    if replacements:
        module.graph.lint()
        module.recompile()
    compilation.replacements += replacements


def _make_hooks(compilation: Compilation) -> dict[str, Any]:
    """Return the config that lets us observe; caches are off, because they would skip the passes."""
    from torch._inductor import config

    fused = "which operators it fused"
    hooks: dict[str, Any] = {"fx_graph_cache": False}
    for name, what, hook in (
        ("joint_custom_pre_pass", "what the program was", lambda graph: read_before(compilation, graph)),
        ("post_grad_custom_post_pass", fused, lambda graph: read_after_passes(compilation, graph)),
        ("_post_fusion_custom_pass", fused, lambda nodes: read_after_fusion(compilation, nodes)),
    ):
        if not hasattr(config, name):
            compilation.note_missing(what, f"this torch has no {name}")
        elif getattr(config, name) is not None:
            compilation.note_missing(what, f"{name} is used elsewhere")
        else:
            hooks[name] = hook
    return hooks


def _make_inner_compile(compilation: Compilation) -> Any:
    """Return Inductor's compilation of one graph, forward or backward, after which its memory plan is read."""
    from torch._inductor.compile_fx import compile_fx_inner

    def compile_inner(module: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        compiled = compile_fx_inner(module, inputs, **kwargs)
        read_memory_plan(compilation)
        return compiled

    return compile_inner


# -- what the hooks are handed --------------------------------------------------------------------------------------


def read_before(compilation: Compilation, graph: Any) -> None:
    """Read the graph before any of Inductor's passes."""
    try:
        ops = list_eager_ops(graph)
    except PRIVATE_ERRORS as e:
        compilation.broken = True
        compilation.note_missing("what the program was", e)
        return
    number = len(compilation.nodes)
    compilation.ops += [op.add_prefix(str(number)) for op in ops]
    compilation.nodes.append(frozenset(f"{number}/{node.name}" for node in graph.nodes))
    compilation.graph_of.append(compilation.graphs)


def _find_graph(compilation: Compilation, names: set[str]) -> int:
    """Return which of the graphs seen before these nodes come from; backward is compiled later than forward."""

    def count_shared(number: int) -> int:
        return sum(f"{number}/{name}" in compilation.nodes[number] for name in names)

    return max(range(len(compilation.nodes)), key=lambda n: (count_shared(n), n), default=0)


def read_after_passes(compilation: Compilation, graph: Any) -> None:
    """Read the graph that Inductor's passes produced; forward and backward come one by one."""
    try:
        names = {n.name for n in graph.nodes if n.op == "call_function"}
        number = _find_graph(compilation, names)
        compilation.remaining_nodes |= {f"{number}/{name}" for name in names}
    except PRIVATE_ERRORS as e:
        compilation.note_missing("which nodes its passes left", e)


def read_after_fusion(compilation: Compilation, nodes: Any) -> Any:
    """Read the scheduler's nodes after fusion: one node for each kernel."""
    try:
        from torch._inductor.virtualized import V

        names = {o.name for n in nodes for s in _list_parts(n) for o in _list_origins(s.node)}
        number = _find_graph(compilation, names)
        compilation.lowered.append((number, V.graph))
        parts = [part for node in nodes for part in _list_parts(node)]
        memory = {b.get_name(): memory_of(o) for p in parts for b in p.get_outputs() if (o := _find_origin(b.node))}
        externs = [part for node in nodes if node.is_extern() for part in _list_parts(node)]
        reader = _KernelReader(
            number=number,
            graph=compilation.graph_of[number],
            backward=bool(getattr(V.graph, "is_backward", False)),
            memory=memory,
            taken={f"{number}/{o.name}" for part in externs if (o := _find_origin(part.node))},
        )
        compilation.kernels += [kernel for node in nodes if (kernel := reader.read(node)) is not None]
    except PRIVATE_ERRORS as e:
        compilation.broken = True
        compilation.note_missing("which operators it fused", e)
    return nodes


def read_memory_plan(compilation: Compilation) -> None:
    """Find the results that are written into the memory of a tensor that is not read any more."""
    try:
        for number, graph in compilation.lowered:
            for line in graph.wrapper_code.lines:
                if type(line).__name__ == "ReuseLine":
                    sizes = [_to_int(size) for size in line.reused_as.get_size()]
                    nbytes = float(prod(sizes) * line.reused_as.get_dtype().itemsize)
                    compilation.reused_bytes.append((number, nbytes))
    except PRIVATE_ERRORS as e:
        compilation.note_missing("which tensors share memory", e)
    compilation.lowered.clear()  # Inductor's graphs are large


def _list_parts(node: Any) -> list[Any]:
    return [part for part in node.get_nodes() if part.node is not None]


def _list_origins(node: Any) -> Any:
    """Return all aten nodes that a buffer of Inductor comes from."""
    return node.get_origins() if hasattr(node, "get_origins") else node.origins


def _find_origin(node: Any) -> Any:
    """Return the aten node whose value a buffer holds; for a library call with several values, the call."""
    origin = node.get_origin_node() if hasattr(node, "get_origin_node") else None
    if origin is None and getattr(node, "op_overload", None) is not None:
        return next((o for o in _list_origins(node) if o.target == node.op_overload), None)
    return origin


def _count_points(part: Any) -> int:
    """Return how many points the loops of a part run over: (points, reduced ones), each a product or its factors."""
    sides = part.group[1]
    return prod(_to_int(size) for side in sides for size in (side if isinstance(side, (tuple, list)) else (side,)))


def _to_int(size: Any) -> int:
    """Return a size as a number; for a dynamic size, its value when the graph was traced."""
    try:
        return int(size)
    except TypeError:
        from torch._inductor.virtualized import V

        sizes = V.graph.sizevars
        hint = getattr(sizes, "size_hint", None) or sizes.optimization_hint  # the name since torch 2.12
        return int(hint(size))


def _limit_bytes(name: str, points: int | None) -> float | None:
    """Return the most bytes of a buffer that so many points can touch, such as the rows looked up in a table."""
    if points is None:
        return None
    from torch._inductor.virtualized import V

    try:
        return float(points * V.graph.get_dtype(name).itemsize)
    except (KeyError, NotImplementedError):  # the value has no layout, so its size is what Inductor says
        return None


def _read_layouts(node: Any) -> Callable[[TensorSpec], TensorSpec]:
    """Return a function that sets the strides of images, because Inductor puts channels last for convolutions."""
    strides = {}
    for each in (node, *getattr(node, "inputs", ())):
        layout = getattr(each, "maybe_get_layout", lambda: None)()
        size, stride = getattr(layout, "size", None), getattr(layout, "stride", None)
        if size is not None and stride is not None and len(size) in (4, 5):
            strides[tuple(_to_int(s) for s in size)] = tuple(_to_int(s) for s in stride)
    return lambda tensor: replace(tensor, stride=strides.get(tensor.shape, tensor.stride))


@dataclass(frozen=True, slots=True, kw_only=True)
class _KernelReader:
    """Reads the scheduler's nodes of one graph; `memory` maps buffers to their names in the aten graph, where known."""

    number: int
    graph: int
    backward: bool
    memory: Mapping[str, str]
    taken: set[str]

    def read(self, node: Any) -> InductorKernel | None:
        """Return a scheduler's node as data; None if it launches nothing (part of a tuple, a `cat` in place)."""
        parts = _list_parts(node)
        if not parts or type(node).__name__.startswith("Nop"):
            return None
        reads, writes = self._count_bytes(node, True), self._count_bytes(node, False)
        if not (reads or writes):
            return None
        extern = bool(node.is_extern())
        call = self._read_call(parts[0]) if extern else None
        if extern and call is None:
            return None
        origins = [call.nodes[0]] if call else [f"{self.number}/{o.name}" for p in parts for o in _list_origins(p.node)]
        own = tuple(dict.fromkeys(name for name in origins if call or name not in self.taken))
        self.taken.update(own)
        dtypes = [] if extern else [str(b.node.get_dtype()) for p in parts for b in p.get_outputs()]
        return InductorKernel(
            name=node.get_name(),
            nodes=own,
            origins=tuple(dict.fromkeys(origins)),
            reads=reads,
            writes=writes,
            backward=self.backward,
            graph=self.graph,
            call=call,
            dtype=dtypes[-1].removeprefix("torch.") if dtypes else "float32",
        )

    def _count_bytes(self, node: Any, reads: bool) -> dict[str, float]:
        accesses = node.get_read_write_buffer_accesses(include_reads=reads, include_writes=not reads)
        points = None
        if not node.is_extern():
            points = max(_count_points(part) for part in _list_parts(node) if hasattr(part, "group"))
        return {
            f"{self.number}/{self.memory.get(name, name)}": float(
                min(_to_int(nbytes), _limit_bytes(name, points) or _to_int(nbytes))
            )
            for name, nbytes in accesses.items()
        }

    def _read_call(self, part: Any) -> EagerOp | None:
        """Return the library call of an extern kernel as an operator."""
        origin = _find_origin(part.node)
        if origin is None or type(part.node).__name__ == "MultiOutput":
            return None
        lay_out = _read_layouts(part.node)
        inputs = [(memory_of(n), spec_of(n.meta.get("val"))) for n in origin.all_input_nodes]
        value = origin.meta.get("val")
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        names = [f"{origin.name}.{i}" for i in range(len(values))] if len(values) > 1 else [origin.name]
        outputs = [(name, spec_of(v)) for name, v in zip(names, values, strict=True)]
        op = EagerOp(
            name=name_of(origin.target),
            nodes=(origin.name,),
            reads=tuple({name: lay_out(spec) for name, spec in inputs if spec is not None}.items()),
            writes=tuple((name, lay_out(spec)) for name, spec in outputs if spec is not None),
            backward=self.backward,
            params=read_params(origin),
        )
        return op.add_prefix(str(self.number))
