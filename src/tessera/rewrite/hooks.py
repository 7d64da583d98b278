"""What torch's hooks are handed, read into a `Watch`: graphs before any pass, kernels after fusion, the memory plan.

Everything here reads objects private to torch. What another version answers otherwise is noted as not said; the
compilation goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from .pieces import Piece, Tensor, memory_of, name_of, params_of, pieces_of, tensor_of
from .watch import Kernel, Watch

# What reading another torch's private objects may raise; a compilation must never fail for being watched.
_STRANGE = (AttributeError, KeyError, IndexError, TypeError, ValueError, NotImplementedError, RuntimeError,
            AssertionError)  # fmt: skip


def before(watch: Watch, graph: Any) -> None:
    """The graph before any pass of Inductor's."""
    try:
        found = pieces_of(graph)
    except _STRANGE as e:
        watch.torn = True
        watch.say_not("what the program was", e)
        return
    number = len(watch.nodes)
    watch.pieces += [_in_graph(piece, number) for piece in found]
    watch.nodes.append(frozenset(f"{number}/{node.name}" for node in graph.nodes))
    watch.graph_of.append(watch.graphs)


def _in_graph(piece: Piece, number: int) -> Piece:
    """Names of several graphs apart: every one has its own mul_1."""
    return replace(
        piece, nodes=tuple(f"{number}/{n}" for n in piece.nodes),
        reads=tuple((f"{number}/{n}", t) for n, t in piece.reads),
        writes=tuple((f"{number}/{n}", t) for n, t in piece.writes),
    )  # fmt: skip


def _number(watch: Watch, names: set[str]) -> int:
    """Which of the graphs seen before these nodes come from: backward is compiled later, when others were seen."""

    def shared(number: int) -> int:
        return sum(f"{number}/{name}" in watch.nodes[number] for name in names)

    return max(range(len(watch.nodes)), key=lambda n: (shared(n), n), default=0)


def after_passes(watch: Watch, graph: Any) -> None:
    """The graph its passes left: forward and backward come one by one."""
    try:
        names = {n.name for n in graph.nodes if n.op == "call_function"}
        number = _number(watch, names)
        watch.kept |= {f"{number}/{name}" for name in names}
    except _STRANGE as e:
        watch.say_not("which nodes its passes left", e)


def after_fusion(watch: Watch, nodes: Any) -> Any:
    """The scheduler's nodes once they are fused: one for each kernel."""
    try:
        from torch._inductor.virtualized import V

        backward = bool(getattr(V.graph, "is_backward", False))
        names = {o.name for n in nodes for s in _parts(n) for o in _origins(s.node)}
        number, taken = _number(watch, names), set[str]()
        watch.lowered.append((number, V.graph))
        memory = {b.get_name(): o for n in nodes for s in _parts(n) for b in s.get_outputs() if (o := _origin(b.node))}
        taken |= {f"{number}/{o.name}" for n in nodes if n.is_extern() for s in _parts(n) if (o := _origin(s.node))}
        reader = _Reader(
            number, watch.graph_of[number], backward, {name: memory_of(node) for name, node in memory.items()}, taken
        )
        watch.kernels += [kernel for node in nodes if (kernel := reader.kernel(node)) is not None]
    except _STRANGE as e:
        watch.torn = True
        watch.say_not("which operators it fused", e)
    return nodes


def after_codegen(watch: Watch) -> None:
    """Results that were put into the memory of a tensor nobody reads any more."""
    try:
        for number, graph in watch.lowered:
            for line in graph.wrapper_code.lines:
                if type(line).__name__ == "ReuseLine":
                    sizes = [_plain(size) for size in line.reused_as.get_size()]
                    watch.reused.append((number, float(prod(sizes) * line.reused_as.get_dtype().itemsize)))
    except _STRANGE as e:
        watch.say_not("which tensors share memory", e)
    watch.lowered.clear()  # a graph of Inductor's is large


def _parts(node: Any) -> list[Any]:
    return [part for part in node.get_nodes() if part.node is not None]


def _origins(node: Any) -> Any:
    """All aten nodes a buffer of Inductor stems from."""
    return node.get_origins() if hasattr(node, "get_origins") else node.origins


def _origin(node: Any) -> Any:
    """The aten node a buffer of Inductor holds the value of; of a library call with several values, the call."""
    origin = node.get_origin_node() if hasattr(node, "get_origin_node") else None
    if origin is None and getattr(node, "op_overload", None) is not None:
        return next((o for o in _origins(node) if o.target == node.op_overload), None)
    return origin


def _points(part: Any) -> int:
    """How many points the loops of a part run over: (points, reduced ones), of each a product or the factors."""
    sides = part.group[1]
    return prod(_plain(size) for side in sides for size in (side if isinstance(side, (tuple, list)) else (side,)))


def _plain(size: Any) -> int:
    """A size as a number; of one that may change, what it was when the graph was traced."""
    try:
        return int(size)
    except TypeError:
        from torch._inductor.virtualized import V

        sizes = V.graph.sizevars
        hint = getattr(sizes, "size_hint", None) or sizes.optimization_hint  # the name since torch 2.12
        return int(hint(size))


def _bytes(name: str, points: int | None) -> float | None:
    """The most a kernel of so many points can touch of a buffer: rows of a table that are looked up, not the table."""
    if points is None:
        return None
    from torch._inductor.virtualized import V

    try:
        return float(points * V.graph.get_dtype(name).itemsize)
    except (KeyError, NotImplementedError):  # a value without a layout: its size is what Inductor says
        return None


def _laid_out(node: Any) -> Callable[[Tensor], Tensor]:
    """How images lie in the memory of a call: Inductor puts channels last for convolutions, whatever there was."""
    strides = {}
    for each in (node, *getattr(node, "inputs", ())):
        layout = getattr(each, "maybe_get_layout", lambda: None)()
        size, stride = getattr(layout, "size", None), getattr(layout, "stride", None)
        if size is not None and stride is not None and len(size) in (4, 5):
            strides[tuple(_plain(s) for s in size)] = tuple(_plain(s) for s in stride)
    return lambda tensor: replace(tensor, stride=strides.get(tensor.shape, tensor.stride))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the scheduler's nodes of one graph; `memory` names buffers as the aten graph does, where it can."""

    number: int
    graph: int
    backward: bool
    memory: Mapping[str, str]
    taken: set[str]

    def kernel(self, node: Any) -> Kernel | None:
        """A node of the scheduler as data; None where it launches nothing (part of a tuple, a `cat` in place)."""
        parts = _parts(node)
        if not parts or type(node).__name__.startswith("Nop"):
            return None
        reads, writes = self._moved(node, True), self._moved(node, False)
        if not (reads or writes):
            return None
        extern = bool(node.is_extern())
        call = self._called(parts[0]) if extern else None
        if extern and call is None:
            return None
        origins = [call.nodes[0]] if call else [f"{self.number}/{o.name}" for p in parts for o in _origins(p.node)]
        own = tuple(dict.fromkeys(name for name in origins if call or name not in self.taken))
        self.taken.update(own)
        dtypes = [] if extern else [str(b.node.get_dtype()) for p in parts for b in p.get_outputs()]
        return Kernel(
            name=node.get_name(), nodes=own, origins=tuple(dict.fromkeys(origins)), reads=reads, writes=writes,
            backward=self.backward, graph=self.graph, call=call,
            dtype=dtypes[-1].removeprefix("torch.") if dtypes else "float32",
            reduction=bool(node.is_reduction()),
        )  # fmt: skip

    def _name(self, name: str) -> str:
        return f"{self.number}/{self.memory.get(name, name)}"

    def _moved(self, node: Any, reads: bool) -> dict[str, float]:
        found = node.get_read_write_buffer_accesses(include_reads=reads, include_writes=not reads)
        most = None if node.is_extern() else max(_points(part) for part in _parts(node) if hasattr(part, "group"))
        return {
            self._name(name): float(min(_plain(nbytes), _bytes(name, most) or _plain(nbytes)))
            for name, nbytes in found.items()
        }

    def _called(self, part: Any) -> Piece | None:
        """The library call of an extern kernel, as the operator it is."""
        origin = _origin(part.node)
        if origin is None or type(part.node).__name__ == "MultiOutput":
            return None
        laid = _laid_out(part.node)
        given = {
            memory_of(n): laid(t) for n in origin.all_input_nodes if (t := tensor_of(n.meta.get("val"))) is not None
        }
        value = origin.meta.get("val")
        outs = list(value) if isinstance(value, (tuple, list)) else [value]
        made = {f"{origin.name}.{i}" if len(outs) > 1 else origin.name: laid(t)
                for i, v in enumerate(outs) if (t := tensor_of(v)) is not None}  # fmt: skip
        piece = Piece(name=name_of(origin.target), nodes=(origin.name,), reads=tuple(given.items()),
                      writes=tuple(made.items()), backward=self.backward, params=params_of(origin))  # fmt: skip
        return _in_graph(piece, self.number)
