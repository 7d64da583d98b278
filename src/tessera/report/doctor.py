"""`tessera doctor` in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ..actuators import OutstandingChange
from ..schema import Capability, Domain
from ..sensors.health import Health, MachineCheck, SensorHealth
from ..units import format_duration
from .narrow import Hanging

_MARKS = {"ok": ("✓", "green"), "no permission": ("!", "yellow"), "missing": ("·", "dim")}
_CHECKS = {True: ("✓", "green"), False: ("!", "yellow"), None: ("·", "dim")}


def print_health(
    health: Health, console: Console, control: Sequence[OutstandingChange] = (), *, restored: bool = False
) -> None:
    """Sensors first, what they lack beneath them, then the machine, then what is changed on its GPUs."""
    for sensor in health.sensors:
        _sensor(sensor, console)
    console.print()
    for check in health.checks:
        _check(check, console)
    for found in control:
        _outstanding(found, console, restored)
    if restored and not control:
        _check(MachineCheck(name="power limits and clocks", ok=True, detail="nothing was left to put back"), console)
    console.print()
    if health.measures:
        conclusion = Text("Power is measured here.", style="bold")
    else:
        said = "No power sensor is readable here: joules will be modelled, and say so."
        conclusion = Text(said, style="bold yellow")
    console.print(Hanging(conclusion, 2))
    console.print(Text("next: tessera measure -- python train.py", style="cyan"), soft_wrap=True)


def _line(mark: str, style: str, name: str, text: str, console: Console) -> None:
    line = Text(f"{mark} ", style=style)
    line.append(f"{name:<10} ", style="bold")
    line.append(text, style="" if style == "green" else style)
    console.print(Hanging(line, 13))


def _sensor(sensor: SensorHealth, console: Console) -> None:
    mark, style = _MARKS[sensor.state]
    if sensor.state != "ok":
        _line(mark, style, sensor.name, f"{sensor.state}: {sensor.reason}", console)
        _fix(sensor.fix, console)
        return
    _line(mark, style, sensor.name, f"{len(sensor.domains)} domain{'s' if len(sensor.domains) != 1 else ''}", console)
    for domain in sensor.domains:
        console.print(Hanging(f"    {_domain(domain)}", 6))
    for lack in sensor.lacks:
        console.print(Hanging(Text(f"    without {lack.name}: {_lack(lack)}", style="dim"), 6))


def _domain(domain: Domain) -> str:
    parts = [f"{domain.name:<12}", domain.label or "-", f"source {domain.source}"]
    parts.append(f"new value every {format_duration(domain.resolution_s)}")
    if domain.lag_s:
        parts.append(f"lag {format_duration(domain.lag_s)}")
    if domain.basis != "measured":
        parts.append(domain.basis.upper())
    if not domain.counted:
        parts.append("not counted in totals")
    if domain.note:
        parts.append(domain.note)
    return " · ".join(parts)


def _lack(lack: Capability) -> str:
    return f"{lack.reason}; {lack.fix}" if lack.fix else str(lack.reason)


def _check(check: MachineCheck, console: Console) -> None:
    mark, style = _CHECKS[check.ok]
    line = Text(f"{mark} ", style=style)
    line.append(f"{check.name}: ", style="bold")
    line.append(check.detail)
    console.print(Hanging(line, 4))
    _fix(check.fix, console)


def _outstanding(found: OutstandingChange, console: Console, restored: bool) -> None:
    name = f"{found.gpu} limits and clocks"
    held = "; ".join((*(f"held by {h}" for h in found.holders), *(f"left by {d} (dead)" for d in found.dead)))
    if found.error:
        _check(MachineCheck(name=name, ok=False, detail=f"{held}: {found.error}" if held else found.error), console)
    elif restored or not found.needs_restore:
        _check(MachineCheck(name=name, ok=True, detail=found.action if restored else held), console)
    else:
        detail = f"{held or 'changed by a process that is gone'}; --restore would {found.action}"
        _check(MachineCheck(name=name, ok=False, detail=detail, fix="sudo tessera doctor --restore"), console)


def _fix(fix: str | None, console: Console) -> None:
    if fix:
        console.print(Hanging(Text(f"    fix: {fix}", style="cyan"), 9))
