"""Summary mode: adds up what each name took, in a memory that does not grow with the run.

Every window of the trace is added up by (kind, name) and forgotten. Steps and other numbered names (`step_12`) share
one name, and so do all further names once there are `MAX_NAMES`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..record import KINDS, ON_DEVICE, Kind
from ..timeline.columns import Ints, Timeline
from ..timeline.intervals import Nesting

MAX_NAMES = 8192
OTHER = "(other names)"
_COUNTED = re.compile(r"(?<![0-9])\d+$")
_KINDS: tuple[Kind, ...] = (
    "kernel", "memcpy", "memset", "collective", "runtime", "graph_launch", "op", "region", "mark",
)  # fmt: skip


_VIEW: dict[str, str] = {**dict.fromkeys(ON_DEVICE, "kernels"), "runtime": "runtime", "graph_launch": "runtime"}


class Totals:
    """Calls, total, least and most nanoseconds of one name; for a counter, of its values.

    `own` are an operator's nanoseconds without those of the operators it calls. `always`: the name is counted all the
    time, not only in the windows of the trace.
    """

    __slots__ = ("always", "calls", "maximum", "minimum", "own", "total")

    def __init__(self) -> None:
        self.calls = 0
        self.total = 0.0
        self.own = 0
        self.always = False
        self.minimum = float("inf")
        self.maximum = float("-inf")

    def add(self, calls: int, total: float, minimum: float, maximum: float) -> None:
        self.calls += calls
        self.total += total
        self.minimum = min(self.minimum, minimum)
        self.maximum = max(self.maximum, maximum)


class RunSummary:
    """The totals of a run so far. Several threads may add to it."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._lock = threading.Lock()
        self._by_name: dict[tuple[str, str], Totals] = {}
        self._counters: dict[tuple[str, str], Totals] = {}
        self.windows = 0
        self.traced_ns = 0
        self.count_traced_steps: Callable[[], float] = lambda: 0.0

    def __len__(self) -> int:
        return len(self._by_name) + len(self._counters)

    def add_window(self, timeline: Timeline, start_ns: int, end_ns: int) -> None:
        rows = timeline.rows(*_KINDS)
        keys = (timeline["kind"][rows] << 32) | timeline["name"][rows]
        order = np.argsort(keys, kind="stable")
        keys, ns = keys[order], (timeline["end_ns"] - timeline["start_ns"])[rows][order]
        own = _own_ns(timeline)[rows][order]
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        with self._lock:
            self.windows += 1
            self.traced_ns += end_ns - start_ns
            if len(first) == 0:
                return
            calls = np.diff(first, append=len(keys))
            parts = (np.add.reduceat(ns, first), np.minimum.reduceat(ns, first), np.maximum.reduceat(ns, first))
            own = np.add.reduceat(own, first)
            for key, count, total, low, high, itself in zip(keys[first], calls, *parts, own, strict=True):
                kind, name = KINDS[int(key) >> 32], timeline.names[int(key) & 0xFFFFFFFF]
                totals = self._of(self._by_name, kind, name)
                totals.add(int(count), int(total), int(low), int(high))
                totals.own += int(itself)

    def forget_windows(self) -> None:
        """Forget what windows added; what is counted all the time stays."""
        with self._lock:
            self.windows = self.traced_ns = 0
            self._by_name = {key: totals for key, totals in self._by_name.items() if totals.always}

    def add_row(self, kind: Kind, name: str, ns: int) -> None:
        with self._lock:
            totals = self._of(self._by_name, kind, name)
            totals.add(1, ns, ns, ns)
            totals.always = True

    def add_counter(self, name: str, value: float, unit: str) -> None:
        with self._lock:
            self._of(self._counters, name, unit, general=False).add(1, value, value, value)

    def _of(self, table: dict[tuple[str, str], Totals], first: str, second: str, general: bool = True) -> Totals:
        """Return the totals of a name. Names with a number at the end are one: `step_12` is `step_N`."""
        name = _COUNTED.sub("N", second) if general and first in ("region", "mark") else second
        totals = table.get((first, name))
        if totals is None:
            key = (first, name) if len(self) < self._max_names else (first if general else OTHER, OTHER)
            totals = table.setdefault(key, Totals())
        return totals

    def to_json(self) -> Mapping[str, Any]:
        """Return plain data, as it is kept in the run file: the rows of each view, most time first."""
        with self._lock:
            by_name = sorted(self._by_name.items(), key=lambda item: -item[1].total)
            views: dict[str, list[dict[str, Any]]] = {}
            for (kind, name), t in by_name:
                views.setdefault(_VIEW.get(kind, kind + "s"), []).append(
                    {"name": name, "kind": kind, "calls": t.calls, "time_s": t.total * 1e-9,
                     "total_ns": int(t.total), "min_ns": int(t.minimum), "max_ns": int(t.maximum),
                     "traced": not t.always, **({"self_s": t.own * 1e-9} if kind == "op" else {})}
                )  # fmt: skip
            counters = [
                {"name": name, "unit": unit, "calls": t.calls, "mean": t.total / t.calls, "min": t.minimum,
                 "max": t.maximum}
                for (name, unit), t in self._counters.items()
            ]  # fmt: skip
        traced = {"traced_s": self.traced_ns * 1e-9, "traced_steps": self.count_traced_steps()}
        return {"windows": self.windows, **traced, **views, "counters": counters}


def _own_ns(timeline: Timeline) -> Ints:
    """Return each operator's nanoseconds without its inner ones; 0 for other rows, and for modules and frames."""
    holders = [*timeline.meta.get("modules", ()), *timeline.meta.get("frames", ())]
    ops = timeline.rows("op")
    ops = ops[~np.isin(timeline["name"][ops], holders)]
    nested = Nesting(ops, timeline["thread"][ops], timeline["start_ns"][ops], timeline["end_ns"][ops])
    rows, start, end = nested.stretches()
    own_ns = np.zeros(len(timeline), np.int64)
    np.add.at(own_ns, rows, end - start)
    return own_ns
