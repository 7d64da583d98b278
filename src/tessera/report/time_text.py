"""A recording without power on one screen: time first, and no joule."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analyze.kernel_names import fit
from ..analyze.time_answer import VIEWS, DeviceTime, TimeAnswer
from ..units import format_duration, format_share
from .console import open_table
from .energy import TITLES, display_names
from .job import job_text

TOP = 8
DEVICES = 16
PARTS = (
    ("compute_s", "compute"),
    ("communication_s", "communication alone"),
    ("copies_s", "copies alone"),
    ("idle_s", "idle"),
)
"""What a device does, in words. Communication and copies are those that no kernel hides."""


def headline(result: TimeAnswer) -> str:
    """Return the whole in one line."""
    if not result.on_device:
        return f"{format_duration(result.time_s, 4)}, nothing ran on a device"
    shares = ", ".join(f"{format_share(result.share(key))} {name}" for key, name in PARTS if result.share(key) > 0)
    where = f", on {len(result.devices)} devices" if len(result.devices) > 1 else ""
    longest = format_duration(max(d.span_s for d in result.devices), 4)
    return f"{format_duration(result.time_s, 4)} traced; first to last kernel {longest}{where}: {shares}"


def time_text(result: TimeAnswer, *, width: int, by: str | None, top: int | None) -> RenderableType:
    """Return the screen of a trace without power, or one of its tables."""
    if by is not None:
        return _view(result, by, top or len(result.rows(by)) or 1, width)
    parts: list[RenderableType] = [Text(fit(result.name, width), style="bold")]
    parts += [Text(result.device, style="dim")] if result.device else []
    parts += [Text(headline(result), style="bold")]
    parts += [Text(result.missing, style="yellow")] if result.missing else []
    if len(result.devices) > 1:
        parts += ["", _devices(result.devices)]
        if len(result.devices) > DEVICES:
            least = f"the {DEVICES // 2} that compute least and the {DEVICES // 2} that compute most"
            parts.append(Text(f"{DEVICES} of {len(result.devices)} devices: {least} (--json has all)", style="dim"))
    if result.advice:
        first, *rest = result.advice
        parts += ["", Text("do this first", style="bold green"), Text(f"  {first.text}")]
        parts += [Text(f"  also: {a.text}", style="dim") for a in rest[:2]]
    for view in VIEWS:
        if result.rows(view):
            parts += ["", _view(result, view, top or TOP, width)]
    if result.job is not None:
        parts += job_text(result.job)
    parts += ["", *(Text(f"note  {note}", style="yellow") for note in result.notes[:6])]
    return Group(*parts)


def _devices(devices: Sequence[DeviceTime]) -> Table:
    table = open_table("device", "span", *(name for _, name in PARTS))
    if len(devices) > DEVICES:
        by_compute = sorted(devices, key=lambda d: d.compute_s)
        devices = [*by_compute[: DEVICES // 2], *by_compute[-DEVICES // 2 :]]
    for d in devices:
        shares = [format_share(getattr(d, key) / d.span_s) if d.span_s > 0 else "-" for key, _ in PARTS]
        table.add_row(Text(d.where), format_duration(d.span_s, 4), *shares)
    return table


def _view(result: TimeAnswer, view: str, top: int, width: int) -> RenderableType:
    rows = result.rows(view)
    shown = rows[:top]
    title = f"{TITLES[view]} ({len(shown)} of {len(rows)})" if len(shown) < len(rows) else TITLES[view]
    table = open_table(title, "time", "share", "each", "calls")
    names = display_names(shown, view)
    for row in shown:
        each = format_duration(row.time_s / row.calls, 3) if row.calls else "-"
        name = Text(fit(names[row.name], max(24, width - 44)))
        table.add_row(name, format_duration(row.time_s, 4), format_share(row.share), each, f"{row.calls:,}")
    return Group(table, Text(result.region_time, style="dim")) if view == "regions" and shown else table
