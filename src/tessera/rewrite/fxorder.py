"""The order of an fx graph's nodes: costed by capture, changed within what data, writes and random numbers allow."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

from torch import fx

from ..device import Device
from ..estimate.iteration import WINDOW_S
from ..graph.fx_capture import capture_fx
from ..graph.ir import Graph
from .effects import has_effect
from .ordering import Buffer, Order, Task, best


def reorder(
    module: fx.GraphModule,
    inputs: Any = None,
    *,
    on: str | Device = "h200",
    window_s: float = WINDOW_S,
    memory_bytes: float | None = None,
) -> Order:
    """Put the nodes of a graph module into the order of the lowest peak of power, in place; the order found.

    A node that writes into something, draws random numbers, waits for the device or cannot be judged stays where it
    is, and nothing passes it.
    """
    from ..estimate.predict import predict

    graph, _ = capture_fx(module, inputs)
    report: Any = predict(graph, on=on, check_memory=False)
    spent: defaultdict[str | None, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for op, d in zip(graph.kernels, report.descriptors, strict=True):
        spent[op.node][0] += d.compute_energy_j + d.memory_energy_j + d.static_energy_j
        spent[op.node][1] += d.latency_s
    nodes = list(module.graph.nodes)
    needs = dependencies(module)
    tasks = [Task(spent[node.name][0], spent[node.name][1], frozenset(needs[i])) for i, node in enumerate(nodes)]
    found = best(tasks, _buffers(graph, nodes), window_s=window_s, memory_bytes=memory_bytes)
    if found.moved:
        _move(module, [nodes[i] for i in found.order])
    return found


def dependencies(module: fx.GraphModule) -> list[set[int]]:
    """The nodes each one must follow: those it uses, and the last one with an effect; inputs first, the result last."""
    nodes = list(module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    needs: list[set[int]] = [{place[n] for n in node.all_input_nodes} for node in nodes]
    last, since = None, list[int]()
    for i, node in enumerate(nodes):
        if node.op in ("output", "placeholder") or has_effect(node, module) is not None:
            needs[i].update(since)
            needs[i].update(() if last is None else (last,))
            last, since = i, []
        else:
            needs[i].update(() if last is None else (last,))
            since.append(i)
    return needs


def _buffers(graph: Graph, nodes: list[fx.Node]) -> list[Buffer]:
    """Storages by the nodes that touch them; what the result holds is there to the end."""
    place = {node.name: i for i, node in enumerate(nodes)}
    users: defaultdict[int, set[int]] = defaultdict(set)
    for op in graph.ops:
        if op.node in place:
            for t in (*op.inputs, *op.outputs):
                users[t.storage].add(place[op.node])
    made = (s for s in graph.storages.values() if s.birth >= 0 and users.get(s.id))
    return [Buffer(s.nbytes, frozenset(users[s.id]), s.death is None) for s in made]


def _move(module: fx.GraphModule, order: list[fx.Node]) -> None:
    for before, node in itertools.pairwise(order):
        before.append(node)
    module.graph.lint()
    module.recompile()
