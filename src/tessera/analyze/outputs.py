"""Shapes the trace does not record: a convolution's output, and whether its backward went on to the layer before.

Kineto records the inputs of operators, not their outputs, and a convolution's padding and stride are arguments. The
output's shape is read off the backward operator of the same call (its gradient has it), else off the first operator
afterwards that takes a tensor of that batch and that many channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..attribute.work import Shape, is_convolution
from ..timeline.columns import NONE, Ints, Timeline
from ..timeline.shapes import parse

_LOOK_AHEAD = 40
"""Operators looked at after a convolution: its bias, a norm and an activation are within the first few."""
_NODE = "autograd::engine::evaluate_function: "


def convolutions(timeline: Timeline, ops: Ints) -> Mapping[int, tuple[Shape | None, bool]]:
    """For each convolution among some operators: its output's shape, and whether the input's gradient is computed."""
    named = [is_convolution(name) for name in timeline.names]
    rows = ops[np.array(named, bool)[timeline["name"][ops]]] if len(ops) else ops
    if not len(rows):
        return {}
    gradients = _from_backward(timeline)
    found: dict[int, tuple[Shape | None, bool]] = {}
    walk = _Walk(timeline)
    for row in rows.tolist():
        if "backward" in timeline.name(row):
            found[row] = None, walk.goes_on(row)
        else:
            path = timeline.linked.path(row)
            known = next((gradients[r] for r in path if r in gradients), None)
            found[row] = known or walk.reader(row, path[0]), True
    return found


def _from_backward(timeline: Timeline) -> dict[int, Shape]:
    """Forward operator -> its output's shape, by the gradient its backward got."""
    links, ops, out = timeline.linked, timeline.rows("op"), {}
    for row in ops[links.forward_op[ops] != NONE].tolist():
        name = timeline.name(row)
        if is_convolution(name) and "backward" in name:
            tensors = parse(timeline.text("shapes", row) or "")
            if tensors:
                out[int(links.forward_op[row])] = tensors[0][0]
    return out


class _Walk:
    """Operators of each thread in time order."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        ops = timeline.rows("op")
        self._order = ops[np.lexsort((timeline["start_ns"][ops], timeline["thread"][ops]))]
        self._at = {int(row): i for i, row in enumerate(self._order.tolist())}

    def reader(self, row: int, outermost: int) -> Shape | None:
        """The first tensor taken afterwards that could be the output: the batch, the channels, as many dimensions."""
        t = self._timeline
        tensors = parse(t.text("shapes", row) or "")
        if len(tensors) < 2:
            return None
        (x, _), (w, _) = tensors[:2]
        transposed = any("transpose" in t.name(r) for r in t.linked.path(row))
        begin = self._at[row] + 1
        for later in self._order[begin : begin + _LOOK_AHEAD].tolist():
            if t["thread"][later] != t["thread"][row]:
                break
            # What is inside the same call of convolution takes its inputs again.
            if is_convolution(t.name(later)) and t["end_ns"][later] <= t["end_ns"][outermost]:
                continue
            for shape, _ in parse(t.text("shapes", later) or ""):
                channels = len(shape) == len(x) and (shape[1] % w[1] == 0 if transposed else shape[1] == w[0])
                if channels and shape[0] == x[0]:
                    return shape
        return None

    def goes_on(self, row: int) -> bool:
        """Whether autograd evaluated another node after this one's in the same pass.

        The engine takes nodes by falling sequence number, so a larger one begins the next pass. The last node of a
        pass is the first layer, whose input needs no gradient.
        """
        t = self._timeline
        node = next((r for r in reversed(t.linked.path(row)) if t["sequence"][r] >= 0), row)
        number, end_ns = int(t["sequence"][node]), int(t["end_ns"][node])
        for later in self._order[self._at[row] + 1 :].tolist():
            if t["thread"][later] != t["thread"][row]:
                break
            name = t.name(later)
            if t["start_ns"][later] < end_ns or not name.startswith(_NODE) or "AccumulateGrad" in name:
                continue
            return bool(0 <= t["sequence"][later] < number)
        return False
