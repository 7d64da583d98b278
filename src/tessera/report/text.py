"""Tables and one-screen answers in the terminal."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..monitor.benchmark import BenchmarkResult
from ..monitor.steady_state import Uncertain
from ..schema import Domain, Energy, EnergyReport
from ..units import format_duration, format_energy, format_power, format_share
from .screen import Console


def with_error(value: float, error: float | None, unit: str = "") -> str:
    """A value as "412.3 ± 1.8 W": as many digits as the error allows."""
    space = f" {unit}" if unit else ""
    if error is None or not error > 0:
        return f"{value:.4g}{space}"
    digits = max(0, 1 - _exponent(error))
    return f"{value:.{min(digits, 9)}f} ± {error:.{min(digits, 9)}f}{space}"


def _exponent(value: float) -> int:
    return int(f"{value:e}".split("e")[1])


def energy_text(energy_j: float, error_j: float | None) -> str:
    """Joules in a fitting prefix, with their error."""
    number, unit = format_energy(energy_j).split()
    scale = energy_j / float(number) if float(number) else 1.0
    factor = {"MJ": 1e6, "kJ": 1e3, "J": 1.0, "mJ": 1e-3, "µJ": 1e-6, "nJ": 1e-9, "pJ": 1e-12}.get(unit, scale)
    return with_error(energy_j / factor, None if error_j is None else error_j / factor, unit)


def sensors_line(domains: Sequence[Domain]) -> Text:
    """One line on what measures; a loud one where nothing does."""
    counted = [d for d in domains if d.counted]
    modelled = ", ".join(d.name for d in counted if d.basis != "measured")
    if modelled:
        text = (
            f"MODELLED, not measured: no power sensor is readable here, so {modelled} is utilisation x a power curve."
        )
        return Text(text, style="yellow")
    names = [f"{d.name} ({d.source}, {format_duration(d.resolution_s)})" for d in counted[:4]]
    more = f" and {len(counted) - 4} more" if len(counted) > 4 else ""
    return Text(f"measuring {', '.join(names)}{more}", style="dim")


def print_benchmark(results: Sequence[BenchmarkResult], console: Console | None = None) -> None:
    """One row per measured function, with 90% intervals."""
    out = console or Console()
    if not results:
        out.print("nothing was measured yet: call a function decorated with @bench.measure")
        return
    table = Table(box=None)
    names = list(dict.fromkeys(k for r in results for k in r.measures()))
    table.add_column("")
    for result in results:
        table.add_column(result.name, justify="right")
    for name in names:
        table.add_row(_label(name), *(_cell(r.measures().get(name)) for r in results))
    table.add_row("utilisation, %", *(_plain(r.utilization_pct) for r in results))
    table.add_row("calls", *(str(r.calls) for r in results))
    table.add_row("source", *(r.source for r in results))
    if any(r.basis != "measured" for r in results):
        out.print(Text("MODELLED, not measured: no power sensor is readable here.", style="yellow"))
    out.print(table)
    out.print(Text("per call; ± is the half-width of a 90% interval", style="dim"))
    for result in results:
        for note in result.notes:
            out.print(Text(f"{result.name}: {note}", style="yellow"))


_LABELS = {
    "power_w": "power, W",
    "energy_per_call_j": "energy, J",
    "time_per_call_s": "time, s",
    "tflops": "TFLOPS",
    "tflops_per_w": "TFLOPS/W",
    "sample_per_j": "samples/J",
    "token_per_j": "tokens/J",
    "kwh_per_call": "kWh",
    "node_hours_per_call": "node-hours",
    "gco2e_per_call": "gCO2e",
    "cost_per_call": "cost",
}


def _label(measure: str) -> str:
    return _LABELS.get(measure) or measure.removesuffix("_per_j") + "/J"


def _cell(value: Uncertain | None) -> str:
    if value is None:
        return "-"
    if value.error is None:
        return f"{value.value:.4g}"
    if abs(value.value) < 1e-3:
        return f"{value.value:.3g} ± {value.error:.1g}"
    return with_error(value.value, value.error)


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def answer(
    report: EnergyReport, *, advice: str | None, next_command: str | None, returncode: int = 0
) -> RenderableType:
    """One screen: joules, watts, seconds, per unit of work, where they went, one thing to do, what to type next."""
    lines: list[RenderableType] = [_headline(report)]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for unit, joules, error in report.per_work():
        table.add_row(f"per {unit}", energy_text(joules, error))
    for region in report.regions[:5]:
        table.add_row("region", _region_text(region.name, region.calls, region.energy, report.total.joules))
    for name, energy in sorted(report.by_domain.items(), key=lambda kv: -kv[1].joules):
        table.add_row(name, _domain_text(report, name, energy))
    if report.idle_w is not None and report.total.seconds > 0:
        above = report.total.joules - report.idle_w * report.total.seconds
        table.add_row("above idle", f"{format_energy(above)} (idle before the run: {format_power(report.idle_w)})")
    for gap in report.gaps[:3]:
        table.add_row("gap", Text(f"{gap.domain}: {gap.reason}", style="yellow"))
    for event in report.events[:3]:
        table.add_row("event", Text(f"{event.domain}: {event.kind}: {event.message}", style="red"))
    if returncode:
        table.add_row("command", Text(f"{ended_text(returncode)}: these are the joules until then", style="yellow"))
    if advice:
        table.add_row("do", Text(advice, style="bold"))
    if next_command:
        table.add_row("next", Text(next_command, style="cyan"))
    lines.append(table)
    return Group(*lines)


def ended_text(returncode: int) -> str:
    """How a program that did not succeed ended: 128 + 15, as a shell says it, or -15, as Python does, is SIGTERM."""
    number = -returncode if returncode < 0 else returncode - 128
    if number == signal.SIGINT:
        return "was interrupted (Ctrl-C)"
    try:
        return f"was ended by {signal.Signals(number).name}"
    except ValueError:  # an exit code of its own, or one above 128 that is no signal
        return f"failed with exit code {returncode}"


def _headline(report: EnergyReport) -> Text:
    total = report.total
    watts = total.watts or 0.0
    error_w = total.error_j / total.seconds if total.seconds > 0 else None
    parts = [energy_text(total.joules, total.error_j), with_error(watts, error_w, "W"), format_duration(total.seconds)]
    if report.peak_w is not None:
        parts.append(f"peak {format_power(report.peak_w)}")
    text = Text("   ".join(parts), style="bold")
    text.append(f"   {total.source}, 90% intervals", style="dim")
    return text


def _region_text(name: str, calls: int, energy: Energy, total_j: float) -> str:
    share = energy.joules / total_j if total_j > 0 else 0.0
    each = energy_text(energy.joules / calls, energy.error_j / calls)
    return f"{name}: {calls} x {each} = {format_energy(energy.joules)} ({format_share(share)})"


def _domain_text(report: EnergyReport, name: str, energy: Energy) -> str:
    domain = next((d for d in report.domains if d.name == name), None)
    share = energy.joules / report.total.joules if report.total.joules > 0 else 0.0
    label = f"  {domain.label}" if domain and domain.label else ""
    inside = "" if domain is None or domain.counted else ", inside another domain"
    seen = "" if energy.coverage > 0.995 else f", seen {energy.coverage:.0%} of the time"
    return f"{energy_text(energy.joules, energy.error_j)} ({format_share(share)}{inside}{seen}){label}"


def command_line(argv: Sequence[str]) -> str:
    """A command as one would type it."""
    return shlex.join(argv)


def plain_table() -> Table:
    """Two columns without lines: what a figure is, and the figure."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table
