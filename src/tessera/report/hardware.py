"""`tessera hardware` in the terminal: one line a device, or one device with every figure and its source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from ..device import Device, Figure
from ..units import format_bytes
from .narrow import Column, Hanging, fitting, table_of

_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-9, "n"), (1e-12, "p"))

_ENDINGS = (("_bytes_per_s", "B/s"), ("_bytes", "B"), ("_hz", "Hz"), ("_w", "W"))

STAND_IN = "generic-cpu"
"""The catalogue's entry for a CPU it does not know: no chip (`hardware/host.py`)."""


def decimal(value: float, unit: str) -> str:
    """A value with a decimal prefix, as datasheets write it: 4.8e12 -> "4.8 TB/s"."""
    factor, prefix = next(((f, p) for f, p in _DECIMAL if value >= f * 0.9995), _DECIMAL[-1])
    return f"{value / factor:.4g} {prefix}{unit}"


def print_devices(devices: Iterable[Device], console: Console) -> None:
    """One line a device; "~" marks what is assumed, "-" what is not known."""
    listed = list(devices)
    kept, gone = fitting(_columns(listed), console.width, gap=2)
    console.print(table_of(kept, gap=2), crop=False)
    if gone:
        names = ", ".join(c.heading for c in gone)
        console.print(Text(f"no room here for {names}: a wider terminal or --json has them", style="dim"))
    chips = sum(device.id != STAND_IN for device in listed)
    also = f" and {STAND_IN}, for a CPU that is none of them" if chips < len(listed) else ""
    console.print()
    console.print(Text(f"{chips} chips{also}", style="dim"), soft_wrap=True)
    console.print(Text("dense peaks in FLOP/s; ~ assumed, - not known", style="dim"), soft_wrap=True)
    console.print(Text("next: tessera hardware show h200", style="cyan"), soft_wrap=True)


def _columns(devices: Sequence[Device]) -> list[Column]:
    """The columns of the list; those a narrow terminal can do without leave it one by one."""
    figures = {
        "fp32": [_short(d.peak("fp32")) for d in devices],
        "16 bit": [_short(d.peak("bf16") or d.peak("fp16")) for d in devices],
        "memory": [_gibibytes(d.memory.capacity_bytes) for d in devices],
        "B/s": [_short(d.memory.bandwidth_bytes_per_s) for d in devices],
        "TDP": [_watts(d.tdp_w) for d in devices],
        "idle": [_watts(d.idle_w) for d in devices],
    }
    leaves = {"fp32": 4, "idle": 2, "B/s": 1}
    return [
        Column(heading="id", cells=[d.id for d in devices]),
        Column(heading="kind", cells=[d.kind for d in devices], leaves=3),
        *(Column(heading=h, cells=cells, right=True, leaves=leaves.get(h, 0)) for h, cells in figures.items()),
    ]


def print_device(device: Device, console: Console) -> None:
    """Every figure with its unit and source; what is assumed is marked, what is not known says why."""
    console.print(Text(device.name, style="bold"), soft_wrap=True)
    for label, value in _identity(device):
        console.print(Hanging(f"  {label:<12} {value}", 15))
    group = ""
    shown = set()
    for name, figure in device.figures():
        head, _, tail = name.rpartition(".")
        if head != group:
            console.print(Text(f"\n{head}" if head else "", style="bold"), soft_wrap=True)
            group = head
        _figure(tail, figure, _unit(device, name), console)
        shown.add(name)
    _points(device, console)
    unknown = {key: text for key, text in device.notes.items() if key not in shown}
    remarks = {key: text for key, text in device.notes.items() if key in shown}
    for title, notes in (("notes", remarks), ("not known, or to know", unknown)):
        if notes:
            console.print(Text(f"\n{title}", style="bold"))
            for key, text in notes.items():
                console.print(Hanging(f"  {key}: {text}", 4))


def _identity(device: Device) -> list[tuple[str, str]]:
    chip = " ".join(part for part in (device.architecture, device.compute_capability) if part)
    rows = [("id", device.id), ("also", ", ".join(device.aliases)), ("kind", f"{device.kind}, {device.vendor}")]
    rows += [("chip", chip), ("threads", str(device.threads or "")), ("memory", device.memory.kind or "")]
    rows.append(("from", ", ".join(device.origin)))
    return [(label, value) for label, value in rows if value]


def _figure(name: str, figure: Figure, unit: str, console: Console) -> None:
    value = _value(figure, unit)
    if figure.error is not None:
        value += f" ± {_value(Figure(value=figure.error, source='-'), unit)}"
    line = Text(f"  {name:<25} {value}")
    if figure.assumed:
        line.append("  ASSUMED", style="bold yellow")
    console.print(Hanging(line, 28))
    console.print(Hanging(Text(f"      {figure.source}", style="dim"), 6))


def _points(device: Device, console: Console) -> None:
    if not device.operating_points:
        return
    console.print(Text("\noperating points", style="bold"))
    for point in device.operating_points:
        parts = [_value(point.power_w, "W")]
        if point.clock_hz:
            parts.append(_value(point.clock_hz, "Hz"))
        if point.units:
            parts.append(f"{point.units.value:g} {device.unit_name or 'units'}")
        if point.bandwidth_bytes_per_s:
            parts.append(_value(point.bandwidth_bytes_per_s, "B/s"))
        mark = "  (this one)" if point.name == device.point else ""
        base = device.id.partition("@")[0]
        console.print(Hanging(f"  {f'{base}@{point.name}':<25} {', '.join(parts)}{mark}", 28))
        console.print(Hanging(Text(f"      {point.power_w.source}", style="dim"), 6))


def _unit(device: Device, name: str) -> str:
    last = name.rpartition(".")[2]
    if name.startswith("peaks."):
        return "op/s" if last.startswith("int") else "FLOP/s"
    if name.startswith("interconnect."):
        return f"B/s {device.interconnect[last].direction}"
    if name == "units":
        return f"{device.unit_name or 'unit'}s"
    if name.startswith("energy."):
        return "J/" + last.rpartition("_per_")[2]
    return next(unit for end, unit in _ENDINGS if last.endswith(end))


def _value(figure: Figure, unit: str) -> str:
    if unit == "B":
        return format_bytes(figure.value)
    counted = unit.endswith("s") and "/" not in unit
    # Boards are compared in watts, a kilowatt board as well.
    return f"{figure.value:.4g} {unit}" if unit == "W" or counted else decimal(figure.value, unit)


def _short(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    number, _, prefix = decimal(figure.value, "").partition(" ")
    return f"{_mark(figure)}{float(number):.3g} {prefix}"


def _gibibytes(figure: Figure | None) -> str:
    return "-" if figure is None else f"{_mark(figure)}{figure.value / 2**30:.3g} GiB"


def _watts(figure: Figure | None) -> str:
    return "-" if figure is None else f"{_mark(figure)}{figure.value:.4g} W"


def _mark(figure: Figure) -> str:
    return "~" if figure.assumed else ""
