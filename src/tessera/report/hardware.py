"""`tessera hardware` in the terminal: one line per device, or one device with every figure and its source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from ..device import Device, Figure
from ..units import format_bytes, format_si
from .console import Console, FittedTable, HangingText, TableColumn

_ENDINGS = (("_bytes_per_s", "B/s"), ("_bytes", "B"), ("_hz", "Hz"), ("_w", "W"))

STAND_IN = "generic-cpu"
"""The catalogue's stand-in for a CPU that it does not have (`hardware/host.py`)."""


def print_devices(devices: Iterable[Device], console: Console) -> None:
    """Print one line per device; "~" marks assumed figures, "-" unknown ones."""
    listed = list(devices)
    console.print(FittedTable(_columns(listed)), crop=False)
    chips = sum(device.id != STAND_IN for device in listed)
    also = f" and {STAND_IN}, for any other CPU" if chips < len(listed) else ""
    console.print()
    console.print(Text(f"{chips} chips{also}", style="dim"), soft_wrap=True)
    console.print(Text("dense peaks in FLOP/s; ~ assumed, - unknown", style="dim"), soft_wrap=True)
    console.print(Text("next: tessera hardware show h200", style="cyan"), soft_wrap=True)


def _columns(devices: Sequence[Device]) -> list[TableColumn]:
    """Return the columns of the list, and the order in which a narrow terminal drops them."""
    figures = {
        "fp32": [_short(d.peak("fp32")) for d in devices],
        "16 bit": [_short(d.peak("bf16") or d.peak("fp16")) for d in devices],
        "memory": [_gibibytes(d.memory.capacity_bytes) for d in devices],
        "B/s": [_short(d.memory.bandwidth_bytes_per_s) for d in devices],
        "TDP": [_watts(d.tdp_w) for d in devices],
        "idle": [_watts(d.idle_w) for d in devices],
    }
    drops = {"fp32": 4, "idle": 2, "B/s": 1}
    return [
        TableColumn(heading="id", cells=[d.id for d in devices]),
        TableColumn(heading="kind", cells=[d.kind for d in devices], drop=3),
        *(TableColumn(heading=h, cells=cells, right=True, drop=drops.get(h, 0)) for h, cells in figures.items()),
    ]


def print_device(device: Device, console: Console) -> None:
    """Print every figure with its unit and source; assumed figures are marked, unknown ones explained."""
    console.print(Text(device.name, style="bold"), soft_wrap=True)
    for label, value in _identity(device):
        console.print(HangingText(f"  {label:<12} {value}", 15))
    group = ""
    shown = set()
    for name, figure in device.figures():
        head, _, tail = name.rpartition(".")
        if head != group:
            console.print(Text(f"\n{head}" if head else "", style="bold"), soft_wrap=True)
            group = head
        _print_figure(tail, figure, _unit(device, name), console)
        shown.add(name)
    _print_points(device, console)
    unknown = {key: text for key, text in device.notes.items() if key not in shown}
    remarks = {key: text for key, text in device.notes.items() if key in shown}
    for title, notes in (("notes", remarks), ("unknown, and other notes", unknown)):
        if notes:
            console.print(Text(f"\n{title}", style="bold"))
            for key, text in notes.items():
                console.print(HangingText(f"  {key}: {text}", 4))


def _identity(device: Device) -> list[tuple[str, str]]:
    chip = " ".join(part for part in (device.architecture, device.compute_capability) if part)
    rows = [("id", device.id), ("also", ", ".join(device.aliases)), ("kind", f"{device.kind}, {device.vendor}")]
    rows += [("chip", chip), ("threads", str(device.threads or "")), ("memory", device.memory.kind or "")]
    if device.power_limit_w is not None:
        rows.append(("limit", f"{device.power_limit_w:g} W, set by the driver"))
    if device.clock_limit_hz is not None:
        rows.append(("clock", f"at most {device.clock_limit_hz * 1e-6:g} MHz, set by the driver"))
    rows.append(("from", ", ".join(device.origin)))
    return [(label, value) for label, value in rows if value]


def _print_figure(name: str, figure: Figure, unit: str, console: Console) -> None:
    value = _value(figure, unit)
    if figure.error is not None:
        value += f" ± {_value(Figure(value=figure.error, source='-'), unit)}"
    line = Text(f"  {name:<25} {value}")
    if figure.assumed:
        line.append("  ASSUMED", style="bold yellow")
    console.print(HangingText(line, 28))
    console.print(HangingText(Text(f"      {figure.source}", style="dim"), 6))


def _print_points(device: Device, console: Console) -> None:
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
        console.print(HangingText(f"  {f'{base}@{point.name}':<25} {', '.join(parts)}{mark}", 28))
        console.print(HangingText(Text(f"      {point.power_w.source}", style="dim"), 6))


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
    if unit == "W" or counted:
        return f"{figure.value:.4g} {unit}"
    return format_si(figure.value, unit, submultiples=unit.startswith("J"))


def _short(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    return _mark(figure) + format_si(figure.value, "x", 3).removesuffix("x")


def _gibibytes(figure: Figure | None) -> str:
    return "-" if figure is None else f"{_mark(figure)}{figure.value / 2**30:.3g} GiB"


def _watts(figure: Figure | None) -> str:
    return "-" if figure is None else f"{_mark(figure)}{figure.value:.4g} W"


def _mark(figure: Figure) -> str:
    return "~" if figure.assumed else ""
