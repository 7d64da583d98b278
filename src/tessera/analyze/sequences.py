"""Sequences of kernels that occur again and again, and could be one kernel.

::

    stream   ─[gemm]─[bias]─[gelu]─[dropout]─[gemm]─[bias]─[gelu]─[dropout]─[copy DtoH]─
                    └─── a sequence ───────┘       └─ the same, again ───┘

By stream, a sequence is what runs between two matrix products, attentions, convolutions, collectives or copies: kernels
that stream tensors, which a compiler or a hand-written kernel can fuse. By operator, it is what one call of an
outermost operator launches. Sequences are disjoint, so that their seconds and joules add up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, check_choice
from ..profile.open_recording import Progress, open_recording
from ..record import CODE
from ..timeline.columns import NONE, Ints, Timeline
from .devices import explain_no_device, explain_no_power, list_devices, row_joules
from .kernel_names import TYPES, category, fit, short_name
from .launches import SHORT_S
from .result import Result, columns

BY = ("stream", "op")
FUSIBLE = ("normalisation, reduction", "elementwise")
"""Kinds of kernels that stream tensors."""
LEAST = 2
"""Least kernels of a sequence: single kernels are in `analyze.kernels`."""
PAUSE_NS = 1_000_000
"""A stream that did nothing for so many nanoseconds is not in the middle of a sequence: launches are 100 us late at
most.
"""
NAMED = 4
"""How many kernels of a sequence are named; `members` has all."""
LETTERS = 24
"""Letters of each name."""
_INNER = re.compile(r"[A-Za-z_]\w{3,}")
_ENDINGS = re.compile(r"(?:_kernel|_cuda|_impl|Functor)+$")
_COLUMNS = columns(
    ("name", "sequence"),
    ("kernels", "kernels", "of one pass"),
    ("calls", "passes"),
    ("time_s", "time", "of its kernels"),
    ("share_pct", "share", "of all device time"),
    ("gap_s", "gaps", "between its kernels, on its stream"),
    ("short_pct", "short kernels", "those under 10 us"),
)
_JOULES = columns(("energy_j", "energy"), ("error_j", "±"))
_AFTER = columns(("after", "after", "what runs before most of its passes, on its stream"))
_OP = columns(("op", "operator"))


def sequences(
    trace: Any, *, power: Any = None, by: str = "stream", least: int = LEAST, progress: Progress | None = None
) -> Result:
    """Return kernels that run one after the other and repeat, most time first: calls, seconds, joules, gaps.

    `by` "stream": candidates for fusion, between two kernels that are not. `by` "op": what each outermost operator
    launches. `least` is the smallest number of kernels. A sequence that repeats itself is one sequence, passed several
    times.

    >>> analyze.sequences("trace.json.gz").top(3)
    """
    check_choice("by", by, BY)
    if isinstance(least, bool) or least < 1:
        raise ArgumentError(f"least={least!r} is not a number of kernels", fix="e.g. least=3")
    recording = open_recording(trace, power=power, progress=progress)
    timeline, table = recording.timeline, recording.find_energy()
    spent = None if table is None else row_joules(timeline, np.arange(len(timeline)), table)
    sums: dict[tuple[str, tuple[int, ...]], _Sums] = {}
    find = _between_products if by == "stream" else _by_operator
    for head, rows in find(timeline):
        for part in _split_periods(rows, timeline["name"][rows].tolist()):
            if len(part) >= least:
                key = ("" if by == "stream" else head, tuple(timeline["name"][part].tolist()))
                sums.setdefault(key, _Sums()).add(timeline, part, head, spent)
    rows = timeline.device_rows
    whole_ns = max(1, int((timeline["end_ns"][rows] - timeline["start_ns"][rows]).sum()))
    lines = [_describe(timeline, op, names, found, whole_ns) for (op, names), found in sums.items()]
    lines.sort(key=lambda r: (-r["time_s"], r["name"]))
    facts = {"sequences": len(lines), **{k: sum(r[k] for r in lines) for k in ("time_s", "gap_s")}, "by": by}
    facts["share_pct"] = 100.0 * facts["time_s"] * 1e9 / whole_ns
    missing = {}
    if not len(rows):
        missing["sequences"] = explain_no_device(recording)
    elif not lines:
        missing["sequences"] = f"no {least} kernels in a row that could be fused"
    elif table is None:
        missing["energy"] = explain_no_power(recording)
    shown = (*_COLUMNS, *(_JOULES if spent is not None else ()))
    return Result(
        kind="sequences",
        title=f"Sequences of kernels in {recording.facts.name}",
        columns=(*shown, *(_AFTER if by == "stream" else _OP)),
        rows=lines,
        facts=facts,
        notes=recording.notes,
        missing=missing,
    )


class _Sums:
    """The passes of one sequence together."""

    def __init__(self) -> None:
        self.calls = self.ns = self.gap_ns = self.short = 0
        self.joules: float | None = None
        self.error_j: float | None = None
        self.before: dict[str, int] = {}

    def add(self, timeline: Timeline, rows: Ints, head: str, spent: Any) -> None:
        starts, ends = timeline["start_ns"][rows], timeline["end_ns"][rows]
        self.calls += 1
        self.ns += int((ends - starts).sum())
        self.gap_ns += int(np.maximum(starts[1:] - np.maximum.accumulate(ends)[:-1], 0).sum())
        self.short += int(((ends - starts) * 1e-9 < SHORT_S).sum())
        self.before[head] = self.before.get(head, 0) + 1
        if spent is not None:
            self.joules = (self.joules or 0.0) + float(spent[rows].sum())
            if timeline.error_j is not None:  # errors of rows of one class have the same causes, so they add up
                self.error_j = (self.error_j or 0.0) + float(np.nansum(timeline.error_j[rows]))


def _describe(timeline: Timeline, op: str, names: Sequence[int], found: _Sums, whole_ns: int) -> dict[str, Any]:
    members = [timeline.names[n] for n in names]
    return {
        "op": op or None,
        "name": _list_names([_name_kernel(m) for m in members]),
        "members": members,
        "kernels": len(members),
        "calls": found.calls,
        "time_s": found.ns / 1e9,
        "share_pct": 100.0 * found.ns / whole_ns,
        "gap_s": found.gap_ns / 1e9,
        "short_pct": 100.0 * found.short / (found.calls * len(members)),
        "energy_j": found.joules,
        "error_j": found.error_j,
        "after": max(found.before, key=found.before.__getitem__) or None,
    }


def _list_names(names: Sequence[str]) -> str:
    """Return the first names in order (a repeated one once, with its count), and the last."""
    parts: list[tuple[str, int]] = []
    for name in names:
        times = parts.pop()[1] if parts and parts[-1][0] == name else 0
        parts.append((name, times + 1))
    shown = [name if times == 1 else f"{times} x {name}" for name, times in parts]
    return " + ".join(shown if len(shown) <= NAMED else [*shown[: NAMED - 1], "…", shown[-1]])


def _name_kernel(name: str) -> str:
    """Return a few letters that distinguish a kernel from its neighbours: for an elementwise one, what it computes."""
    base, _, arguments = short_name(name).partition("<")
    inner = [word for word in _INNER.findall(arguments) if word not in TYPES.values()]
    return fit(_ENDINGS.sub("", inner[-1] if "elementwise" in base and inner else base), LETTERS)


def _between_products(timeline: Timeline) -> Iterator[tuple[str, Ints]]:
    """Yield stretches of kernels that could be fused, each with the short name of what runs before it on its stream."""
    fusible = np.array([category(name) in FUSIBLE for name in timeline.names] or [False])
    for device in list_devices(timeline):
        streams = timeline["stream"][device.rows]
        for stream in np.unique(streams).tolist():
            rows = device.rows[streams == stream]
            rows = rows[np.argsort(timeline["start_ns"][rows], kind="stable")]
            fits = fusible[timeline["name"][rows]] & (timeline["kind"][rows] == CODE["kernel"])
            pauses = timeline["start_ns"][rows[1:]] - timeline["end_ns"][rows[:-1]] > PAUSE_NS
            begins = np.flatnonzero(fits & np.r_[True, ~fits[:-1] | pauses])
            ends = np.flatnonzero(fits & np.r_[~fits[1:] | pauses, True]) + 1
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                yield _name_kernel(timeline.name(int(rows[begin - 1]))) if begin else "", rows[begin:end]


def _by_operator(timeline: Timeline) -> Iterator[tuple[str, Ints]]:
    """Yield what each call of an outermost operator launched, in the order of the device."""
    rows = timeline.device_rows
    rows = rows[np.argsort(timeline["start_ns"][rows], kind="stable")]
    calls = timeline.linked.top_op[rows]
    rows, calls = rows[calls != NONE], calls[calls != NONE]
    order = np.argsort(calls, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(calls[order])) + 1):
        if len(part):
            yield timeline.name(int(calls[part[0]])), rows[part]


def _split_periods(rows: Ints, names: Sequence[int]) -> list[Ints]:
    """Return the passes of a stretch that is one sequence several times over; otherwise the stretch.

    The shortest period of a text is its length less its longest border (Knuth, Morris and Pratt).
    """
    border = [0] * len(names)
    for i in range(1, len(names)):
        length = border[i - 1]
        while length and names[i] != names[length]:
            length = border[length - 1]
        border[i] = length + (names[i] == names[length])
    period = len(names) - border[-1] if names else 0
    if not period or len(names) % period or period < LEAST:
        return [rows]
    return np.split(rows, len(names) // period)
