"""The answer of `tessera-prof`: one screen, or JSON."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from ..analyze.run_energy import from_stacks, weigh_stacks
from ..attribute.table import EnergyRow
from ..profile.attach import Attached, TraceFigures, TrackSummary
from ..units import format_bytes, format_duration, format_energy, format_frequency, format_power
from .console import FittedTable, TableColumn, label_table

MAX_ROWS = 11
_SHORT_TRACE_S = 0.1
# These rows come first; the others follow in the order they were measured, as far as the screen goes.
_PROCESS = ("cpu", "rss", "memory", "sm_utilization", "power")
_DEVICE = ("sm_clock", "utilization", "sm_activity", "tensor_activity", "dram_activity", "memory_used", "temperature")
_FIRST = (*_PROCESS, *_DEVICE, "nvlink_rx", "nvlink_tx", "pcie_rx", "pcie_tx")


def answer(attached: Attached, *, files: Mapping[str, Path], next_command: str) -> RenderableType:
    """Return the process, its figures and the devices', its trace or how to get one, and what to type next."""
    notes = label_table()
    for name, text in _notes(attached, files):
        notes.add_row(name, text)
    notes.add_row("next", Text(next_command, style="cyan"))
    return Group(_headline(attached), _figures(attached.metrics), notes)


def python_functions(a: Attached) -> list[EnergyRow]:
    """Return where the main thread was while the devices spent joules, most first; [] if no stack was read."""
    total_j = math.fsum(e.energy_j for e in a.energy.values())
    shares = from_stacks(weigh_stacks(a.stacks, a.power, total_j, a.target.pid), total_j)
    return sorted(shares.ops, key=lambda row: row.energy_j, reverse=True) if shares is not None else []


def _headline(a: Attached) -> Text:
    line = Text(f"{a.target.pid}  {_cut(a.target.command, 36)}", style="bold")
    line.append(f"   {format_duration(a.seconds, 3)}, every {format_duration(a.sample_s, 3)}", style="dim")
    if a.power.basis != "measured":
        line.append(f"   power {a.power.basis.upper()}", style="yellow")
    return line


def _figures(metrics: Sequence[TrackSummary]) -> RenderableType:
    shown = _most_telling(metrics)
    scopes = ["process" if m.scope == "process" else "whole device" for m in shown]
    scopes = [s if m.basis == "measured" else f"{s}, {m.basis}" for s, m in zip(scopes, shown, strict=True)]
    columns = [
        TableColumn(heading="", cells=[m.metric.removeprefix("process.") for m in shown]),
        TableColumn(heading="mean", cells=[_value(m.mean, m.unit) for m in shown], right=True),
        TableColumn(heading="min", cells=[_value(m.min, m.unit) for m in shown], right=True, drop=3),
        TableColumn(heading="max", cells=[_value(m.max, m.unit) for m in shown], right=True, drop=2),
        TableColumn(heading="scope", cells=scopes, drop=1, style="dim"),
    ]
    hidden = len(metrics) - len(shown)
    more = [Text(f"and {hidden} more: --summary perf.csv", style="dim")] if hidden else []
    return Group(FittedTable(columns), *more)


def _most_telling(metrics: Sequence[TrackSummary]) -> list[TrackSummary]:
    """Return the process's rows, then the devices', the most telling first."""

    def rank(m: TrackSummary) -> tuple[bool, int]:
        what = m.metric.rpartition(".")[2]
        return m.scope == "device", _FIRST.index(what) if what in _FIRST else len(_FIRST)

    return sorted(metrics, key=rank)[:MAX_ROWS]


def _value(value: float, unit: str) -> str:
    if unit in ("B", "B/s"):
        return format_bytes(value, 3) + unit.removeprefix("B")
    if unit == "Hz":
        return format_frequency(value, 4)
    if unit == "W":
        return format_power(value, 3)
    if unit == "%":
        return f"{value:.0f} %" if value >= 10 else f"{value:.1f} %"
    return f"{value:.4g} {unit}"


def _notes(a: Attached, files: Mapping[str, Path]) -> list[tuple[str, Text]]:
    rows: list[tuple[str, Text]] = []
    if a.figures is not None:
        rows.append(("trace", _trace_line(a, a.figures)))
        heaviest = ", ".join(f"{_cut(h.name, 44)} {format_duration(h.time_s, 2)}" for h in a.figures.heaviest[:3])
        if heaviest:
            rows.append(("heaviest", Text(heaviest)))
        rows += [("more", Text(hint)) for hint in _suggest_steps(a.figures)]
    elif a.kineto is None and a.kineto_state.reason:
        rows.append(("no trace", Text(a.kineto_state.reason, style="yellow")))
        if a.kineto_state.fix:
            rows.append(("do", Text(a.kineto_state.fix, style="bold")))
    functions = python_functions(a)
    if functions:
        top = ", ".join(f"{r.name} {format_energy(r.energy_j, 3)} ({r.share:.0%})" for r in functions[:3])
        samples = sum(r.calls for r in functions)
        rows.append(("functions", Text(top)))
        rows.append(("", Text(f"py-spy read the main thread {samples} times; joules are the devices'", style="dim")))
    if a.traced_pid not in (None, a.target.pid):
        rows.append(("traced", Text(f"its child process {a.traced_pid}: the process itself does not run PyTorch")))
    if a.ended:
        rows.append(("ended", Text("the process ended; the figures are up to then", style="yellow")))
    if a.stopped:
        rows.append(("stopped", Text("by Ctrl-C; the figures are up to then", style="yellow")))
    rows += [("note", Text(note, style="dim")) for note in a.notes[:3]]
    if files:
        names = {"trace": "trace" if a.kineto is not None else "counter tracks, no trace"}
        rows.append(("written", Text(", ".join(f"{path} ({names.get(what, what)})" for what, path in files.items()))))
    return rows


def _trace_line(a: Attached, f: TraceFigures) -> Text:
    if f.kernels:
        body = f"{f.kernels} kernels ({f.kernels_with_shapes} with shapes) in {format_duration(f.kernel_s, 3)}"
    else:
        body = f"{f.ops} operators ({f.ops_with_shapes} with shapes), no kernels"
    parts = [f"{f.events} events over {format_duration(f.time_s, 3)}", body]
    if f.steps:
        parts.append(f"{f.steps} optimizer steps")
    if f.collectives:
        parts.append(f"{f.collectives} collectives {format_duration(f.collective_s, 3)}")
    if a.trace_s is not None:
        parts.append(f"complete after {a.trace_s:.1f} s")
    return Text(", ".join(parts))


def _suggest_steps(f: TraceFigures) -> list[str]:
    """Return how many steps cover half a second, if the trace is too short for a power sensor."""
    if not f.steps or not 0 < f.time_s < _SHORT_TRACE_S:
        return []
    steps = max(round(0.5 * f.steps / f.time_s), f.steps + 1)
    return [f"--steps {steps} would cover half a second, long enough for power samples"]


def _cut(name: str, cells: int) -> str:
    return name if len(name) <= cells else name[: cells - 1] + "…"


def next_command(attached: Attached, files: Mapping[str, Path]) -> str:
    """Return what to type next: attribute the trace, record one, or watch the machine."""
    pid, trace = str(attached.target.pid), files.get("trace")
    if attached.kineto is not None and trace is not None:
        power = files.get("power")
        words = ["tessera", "attribute", str(trace), *(["--power", str(power)] if power else [])]
    elif attached.ended or not attached.kineto_state.possible:
        words = ["tessera", "watch"]
    else:
        words = ["tessera-prof", "--pid", pid, "--export", str(trace or "trace.json")]
    return shlex.join(words)


def to_json(attached: Attached, files: Mapping[str, Path]) -> str:
    """Return everything except the samples as JSON."""
    a = attached
    kineto: dict[str, Any] = {
        "state": a.kineto_state.state,
        "traced": a.kineto is not None,
        "reason": a.kineto_state.reason or None,
        "fix": a.kineto_state.fix or None,
        "seconds_to_trace": a.trace_s,
        "pid": a.traced_pid,
        "figures": None if a.figures is None else dataclasses.asdict(a.figures),
    }
    return msgspec.json.encode(
        {
            "pid": a.target.pid,
            "command": a.target.command,
            "user": a.target.user,
            "time_s": a.seconds,
            "sample_ms": a.sample_s * 1e3,
            "basis": a.power.basis,
            "metrics": a.metrics,
            "energy": a.energy,
            "kineto": kineto,
            "functions": [
                {"name": r.name, "samples": r.calls, "energy_j": r.energy_j, "share": r.share}
                for r in python_functions(a)
            ],
            "files": {what: str(path) for what, path in files.items()},
            "ended": a.ended,
            "stopped": a.stopped,
            "notes": [*a.notes, *a.power.notes],
        }
    ).decode()
