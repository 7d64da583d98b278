"""What `tessera measure` prints, and the table of an `EnergyBenchmark`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..config import find_cost
from ..monitor.benchmark import BenchmarkResult
from ..monitor.steady_state import Uncertain
from ..schema import Domain, Energy, EnergyReport, RegionEnergy
from ..sensors.modelled import IDLE_PART, MACHINE_PART
from ..units import format_duration, format_energy, format_energy_error, format_error, format_power, format_share
from .console import Console, label_table

if TYPE_CHECKING:
    from ..recording import CpuUse

REGIONS = 5
BUSY_SHARE = 0.05
"""The share of a run's time that its main thread must wait for a core before the screen says so."""
SCOPES = {"process": "the program and its children", "machine": "everything on the machine"}
"""Whose power a domain measures, in words."""


def sensors_line(domains: Sequence[Domain]) -> Text:
    """Return one line on which sensors measure, or a warning that none does."""
    counted = [d for d in domains if d.counted]
    modelled = [d for d in counted if d.basis != "measured"]
    if not counted:
        who = ", ".join(d.name for d in domains[:4]) or "no sensor"
        return Text(f"no joules are counted: {who} cannot say which are the program's", style="yellow")
    if modelled:
        which = ", ".join(d.name for d in modelled)
        if all(d.source == "modelled" for d in modelled):
            of = "CPU time" if modelled[0].scope == "process" else "utilisation"
            how = f"no power sensor is readable; {which} is the {of} of {SCOPES[modelled[0].scope]} times a power curve"
        elif all(d.scope == "process" for d in modelled):
            how = f"{which} is the share of {SCOPES['process']} in what was measured, by CPU time"
        else:
            how = f"the power of {which} was modelled when it was recorded"
        return Text(f"MODELLED, not measured: {how}.", style="yellow")
    names = [f"{d.name} ({d.source}, {format_duration(d.resolution_s)})" for d in counted[:4]]
    more = f" and {len(counted) - 4} more" if len(counted) > 4 else ""
    return Text(f"measuring {', '.join(names)}{more}", style="dim")


def answer(
    report: EnergyReport, *, advice: str | None, next_command: str | None, returncode: int = 0, busy: str = ""
) -> RenderableType:
    """Return one screen: joules, watts, seconds, per unit of work, where they went, what to change, what to type."""
    table = label_table()
    for unit, joules, error in report.per_work():
        table.add_row(f"per {unit}", format_energy_error(joules, error))
    if cost := find_cost(report.total.energy_j, report.total.error_j):
        table.add_row("cost", cost.text)
    for region in report.regions[:REGIONS]:
        table.add_row("region", _region_text(region, report.total.energy_j))
    if (more := len(report.regions) - REGIONS) > 0:
        table.add_row("", Text(f"and {more} more regions: --json lists them", style="dim"))
    for name, energy in sorted(report.by_domain.items(), key=lambda kv: -kv[1].energy_j):
        table.add_row(name, _domain_text(report, name, energy))
    if report.idle_w and report.total.time_s > 0:  # a process that has not begun draws 0 W: that says nothing
        above = report.total.energy_j - report.idle_w * report.total.time_s
        table.add_row("above idle", f"{format_energy(above)} (idle before the run: {format_power(report.idle_w)})")
    for gap in report.gaps[:3]:
        table.add_row("gap", Text(f"{gap.domain}: {gap.reason}", style="yellow"))
    for event in report.events[:3]:
        table.add_row("event", Text(f"{event.domain}: {event.kind}: {event.message}", style="red"))
    if busy:
        table.add_row("note", Text(busy, style="yellow"))
    if returncode:
        table.add_row("command", Text(f"{describe_exit(returncode)}; the energy is up to then", style="yellow"))
    if advice:
        table.add_row("do", Text(advice, style="bold"))
    if next_command:
        table.add_row("next", Text(next_command, style="cyan"))
    return Group(_headline(report), table)


def busy_text(use: CpuUse | None) -> str:
    """Say that other programs took the cores; "" if that is almost nothing."""
    if use is None or use.crowded_share < BUSY_SHARE:
        return ""
    count = f"{use.others_cores:.2g}"
    cores = f"other programs used {count} core{'' if count == '1' else 's'}"
    waited = f"the main thread waited {format_share(use.crowded_share)} of the time for one"
    return f"busy machine: {cores}, and {waited}; on a quiet machine the run takes less time"


def describe_exit(returncode: int) -> str:
    """Return how a failed program ended: 128 + 15, as a shell reports it, or -15, as Python does, is SIGTERM."""
    number = -returncode if returncode < 0 else returncode - 128
    if number == signal.SIGINT:
        return "was interrupted (Ctrl-C)"
    try:
        return f"was ended by {signal.Signals(number).name}"
    except ValueError:  # its own exit code, or one above 128 that is not a signal
        return f"failed with exit code {returncode}"


def _headline(report: EnergyReport) -> Text:
    total = report.total
    error_w = total.error_j / total.time_s if total.time_s > 0 else None
    power = "unknown W" if total.power_w is None else format_error(total.power_w, error_w, "W")
    parts = [format_energy_error(total.energy_j, total.error_j), power, format_duration(total.time_s)]
    if report.peak_w is not None:
        parts.append(f"peak {format_power(report.peak_w)}")
    return Text("   ".join(parts), style="bold").append(f"   {total.source}, 90% intervals", style="dim")


def _region_text(region: RegionEnergy, total_j: float) -> str:
    energy, calls = region.energy, region.calls
    share = energy.energy_j / total_j if total_j > 0 else 0.0
    each = format_energy_error(energy.energy_j / calls, energy.error_j / calls)
    with_others = ", with what other scopes did meanwhile" if region.overlaps else ""
    part = "not in the total" if region.apart else format_share(share)
    return f"{region.name}: {calls} x {each} = {format_energy(energy.energy_j)} ({part}{with_others})"


def _domain_text(report: EnergyReport, name: str, energy: Energy) -> str:
    domain = next((d for d in report.domains if d.name == name), None)
    share = energy.energy_j / report.total.energy_j if report.total.energy_j > 0 else 0.0
    label = f"  {domain.label}" if domain and domain.label else ""
    if domain is not None and domain.counted and domain.device.kind == "cpu":
        label += f", {SCOPES[domain.scope]}"
    inside = "" if domain is None or domain.counted else f", {_inside(domain)}"
    seen = "" if energy.coverage > 0.995 else f", measured {energy.coverage:.0%} of the time"
    part = f"{format_share(share)}{inside}"
    if inside and not energy.energy_j <= report.total.energy_j:  # a node's power, or the total is unknown
        part = "not in the total"
    return f"{format_energy_error(energy.energy_j, energy.error_j)} ({part}{seen}){label}"


def _inside(domain: Domain) -> str:
    """Say how a domain that is not counted relates to those that are."""
    if domain.name.endswith(IDLE_PART):
        return f"of {domain.name.removesuffix(IDLE_PART)}: share of the machine's idle power"
    if domain.name.endswith(MACHINE_PART):
        return f"of {SCOPES['machine']}, measured"
    return "inside another domain"


# -- a benchmark ----------------------------------------------------------------------------------------------------

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


def print_benchmark(results: Sequence[BenchmarkResult]) -> None:
    """Print one column per measured function, with 90% intervals."""
    out = Console()
    if not results:
        out.print("nothing was measured yet: call a function decorated with @bench.measure")
        return
    table = Table("", box=None)
    for result in results:
        table.add_column(result.name, justify="right")
    for name in dict.fromkeys(k for r in results for k in r.measures()):
        label = _LABELS.get(name) or name.removesuffix("_per_j") + "/J"
        table.add_row(label, *(_cell(r.measures().get(name)) for r in results))
    percents = ("-" if r.utilization_pct is None else f"{r.utilization_pct:.0f}" for r in results)
    table.add_row("utilisation, %", *percents)
    table.add_row("calls", *(str(r.calls) for r in results))
    table.add_row("source", *(r.source for r in results))
    if any(r.basis != "measured" for r in results):
        out.print(Text("MODELLED, not measured: no power sensor is readable here.", style="yellow"))
    out.print(table)
    out.print(Text("per call; ± is the half-width of a 90% interval", style="dim"))
    for result in results:
        for note in result.notes:
            out.print(Text(f"{result.name}: {note}", style="yellow"))


def _cell(value: Uncertain | None) -> str:
    if value is None:
        return "-"
    if value.error is None:
        return f"{value.value:.4g}"
    if abs(value.value) < 1e-3:
        return f"{value.value:.3g} ± {value.error:.1g}"
    return format_error(value.value, value.error)
