"""`tessera doctor` and `tessera selftest` in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from ..actuators import OutstandingChange
from ..schema import Capability, Domain
from ..selftest import SelfCheck
from ..sensors.health import Health, MachineCheck, SensorHealth
from ..sensors.response_store import ResponseFit, SensorResponse
from ..units import format_duration
from .console import Console, HangingText

_MARKS = {"ok": ("✓", "green"), "no permission": ("!", "yellow"), "missing": ("·", "dim")}
_VERDICTS = {"pass": "pass", "fail": "FAIL", "skipped": "skip"}
_CHECKS = {True: ("✓", "green"), False: ("!", "yellow"), None: ("·", "dim")}


def print_health(
    health: Health, console: Console, control: Sequence[OutstandingChange] = (), *, restored: bool = False
) -> None:
    """Print sensors and what they lack, checks of the machine, and changed limits and clocks of its GPUs."""
    for sensor in health.sensors:
        _print_sensor(sensor, console)
    console.print()
    for check in health.checks:
        _print_check(check, console)
    for change in control:
        _print_outstanding(change, console, restored)
    if restored and not control:
        _print_check(MachineCheck(name="power limits and clocks", ok=True, detail="nothing to put back"), console)
    console.print()
    if health.measures:
        conclusion = Text("Power is measured here.", style="bold")
    else:
        conclusion = Text("No power sensor is readable here: joules will be modelled.", style="bold yellow")
    console.print(HangingText(conclusion, 2))
    console.print(Text("next: tessera measure -- python train.py", style="cyan"), soft_wrap=True)


def _print_line(mark: str, style: str, name: str, text: str, console: Console) -> None:
    line = Text(f"{mark} ", style=style)
    line.append(f"{name:<10} ", style="bold")
    line.append(text, style="" if style == "green" else style)
    console.print(HangingText(line, 13))


def _print_sensor(sensor: SensorHealth, console: Console) -> None:
    mark, style = _MARKS[sensor.state]
    if sensor.state != "ok":
        _print_line(mark, style, sensor.name, f"{sensor.state}: {sensor.reason}", console)
        _print_fix(sensor.fix, console)
        return
    _print_line(
        mark, style, sensor.name, f"{len(sensor.domains)} domain{'s' if len(sensor.domains) != 1 else ''}", console
    )
    for domain in sensor.domains:
        console.print(HangingText(f"    {_domain(domain, sensor.responses.get(domain.name))}", 6))
    for lack in sensor.lacks:
        console.print(HangingText(Text(f"    without {lack.name}: {_lack(lack)}", style="dim"), 6))


def _domain(domain: Domain, learnt: SensorResponse | None) -> str:
    parts = [f"{domain.name:<12}", domain.label or "-", f"source {domain.source}"]
    parts.append(f"new value every {format_duration(domain.resolution_s)}")
    if domain.lag_s:
        parts.append(_response(domain, learnt))
    if domain.basis != "measured":
        parts.append(domain.basis.upper())
    if not domain.counted:
        parts.append("not counted in totals")
    if domain.note:
        parts.append(domain.note)
    return " · ".join(parts)


def _response(domain: Domain, learnt: SensorResponse | None) -> str:
    """Return lag, blur and idle power, with their errors and source."""
    if learnt is None and not domain.lag_error_s:
        return f"lag {format_duration(domain.lag_s)}"
    if learnt is None:
        lag = f"lag {1e3 * domain.lag_s:.0f} ± {1e3 * domain.lag_error_s:.1f} ms, blur {1e3 * domain.blur_s:.0f} ms"
        return f"{lag} (default: fitted on an H200; a traced run learns this board's)"
    idle = "" if learnt.idle_w is None else f", idle {learnt.idle_w:.1f} ± {learnt.idle_error_w:.1f} W"
    runs = f"{learnt.runs} run{'s' if learnt.runs != 1 else ''}"
    return f"{lag_and_blur(learnt)}{idle} (learnt from {learnt.seconds:.0f} s of {runs})"


def lag_and_blur(learnt: SensorResponse | ResponseFit) -> str:
    """Return lag and blur with their errors, in milliseconds."""
    figures = (("lag", learnt.lag_s, learnt.lag_error_s), ("blur", learnt.blur_s, learnt.blur_error_s))
    return ", ".join(f"{name} {1e3 * value_s:.1f} ± {1e3 * error_s:.1f} ms" for name, value_s, error_s in figures)


def _lack(lack: Capability) -> str:
    return f"{lack.reason}; {lack.fix}" if lack.fix else str(lack.reason)


def _print_check(check: MachineCheck, console: Console) -> None:
    mark, style = _CHECKS[check.ok]
    line = Text(f"{mark} ", style=style)
    line.append(f"{check.name}: ", style="bold")
    line.append(check.detail)
    console.print(HangingText(line, 4))
    _print_fix(check.fix, console)


def _print_outstanding(change: OutstandingChange, console: Console, restored: bool) -> None:
    name = f"{change.gpu} limits and clocks"
    owners = [*(f"held by {h}" for h in change.holders), *(f"left by {d} (dead)" for d in change.dead)]
    held = "; ".join(owners)
    if change.error:
        detail = f"{held}: {change.error}" if held else change.error
        _print_check(MachineCheck(name=name, ok=False, detail=detail), console)
    elif restored or not change.needs_restore:
        _print_check(MachineCheck(name=name, ok=True, detail=change.action if restored else held), console)
    else:
        detail = f"{held or 'changed by a process that has ended'}; --restore would {change.action}"
        _print_check(MachineCheck(name=name, ok=False, detail=detail, fix="sudo tessera doctor --restore"), console)


def _print_fix(fix: str | None, console: Console) -> None:
    if fix:
        console.print(HangingText(Text(f"    fix: {fix}", style="cyan"), 9))


# -- tessera selftest -----------------------------------------------------------------------------------------------


def print_checks(checks: Sequence[SelfCheck], machine: str, console: Console) -> None:
    """Print one line per check and a summary, to paste into an issue."""
    width = max(len(c.what) for c in checks)
    console.print(HangingText(machine, 2))
    for check in checks:
        figure = "" if check.value is None else f"{check.value:.3g} {check.unit} (limit {check.limit:g})  "
        line = f"{_VERDICTS[check.verdict]}  {check.what:<{width}}  {figure}{check.why}".rstrip()
        console.print(HangingText(line, 6 + width + 2))
    failed, skipped = (sum(c.verdict == v for c in checks) for v in ("fail", "skipped"))
    rest = f", {skipped} skipped on this machine" if skipped else ""
    console.print(HangingText(f"{len(checks) - failed - skipped} passed, {failed} failed{rest}", 2))
