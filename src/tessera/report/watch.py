"""What `tessera watch` shows: a `monitor.snapshot.Snapshot` of every domain, as a screen, plain lines or JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text

from ..monitor.process_table import GpuUse
from ..monitor.snapshot import DomainReading, Snapshot
from ..schema import Telemetry
from ..units import format_duration, format_energy, format_power

BLOCKS = "▁▂▃▄▅▆▇█"
NO_DATA = "·"
_INDENT = "  "


def sparkline(values: Sequence[float | None], top: float) -> str:
    """Return one block per value, scaled from 0 to `top`; unknown is a dot, above `top` is a full block."""

    def block(value: float | None) -> str:
        if value is None:
            return NO_DATA
        share = value / top if top > 0 else 0.0
        return BLOCKS[min(max(round(share * len(BLOCKS)) - 1, 0), len(BLOCKS) - 1)]

    return "".join(map(block, values))


# -- JSON and plain lines ----------------------------------------------------------------------------------------


def json_line(snapshot: Snapshot) -> bytes:
    """Return one line of JSON, without the history of the sparkline."""
    import msgspec

    tree = msgspec.to_builtins(snapshot)
    for row in tree["readings"]:
        for key in ("history_w", "cell_s", "top_w"):
            row.pop(key)
    return msgspec.json.encode(tree)


def plain_lines(snapshot: Snapshot) -> Iterator[str]:
    """Yield one line of name=value pairs per counted domain, and a total if there are several."""
    from datetime import UTC, datetime

    stamp = datetime.fromtimestamp(snapshot.epoch_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    for r in snapshot.counted_readings:
        yield f"{stamp} {r.domain} " + " ".join(f"{k}={v}" for k, v in _pairs(r).items() if v is not None)
    if len(snapshot.counted_readings) > 1:
        figures = ("power_w", "mean_w", "energy_j", "error_j")
        total = {name: _number(getattr(snapshot, name)) for name in figures} | {"basis": snapshot.basis}
        yield f"{stamp} total " + " ".join(f"{k}={v}" for k, v in total.items() if v is not None)
    if (cost := snapshot.cost) is not None:
        spent = {"kwh": cost.kwh, "cost": cost.cost, "gco2e": cost.gco2e}
        pairs = {k: f"{v:.6g}" for k, v in spent.items() if v is not None} | {"currency": _quote(cost.currency)}
        yield f"{stamp} cost " + " ".join(f"{k}={v}" for k, v in pairs.items() if v)


def _pairs(r: DomainReading) -> dict[str, str | None]:
    t = r.telemetry or Telemetry(time_ns=0, domain=r.domain)
    throttle = None if t.throttle is None else ",".join(t.throttle) or "none"
    numbers = {
        "power_w": r.power_w,
        "mean_w": r.mean_w,
        "energy_j": r.energy_j,
        "error_j": r.error_j,
        "limit_w": t.power_limit_w,
        "hbm_w": r.memory_w,
        **{f"{name}_mhz": mhz for name, mhz in t.clocks_mhz.items() if name in ("sm", "memory")},
        "temperature_c": t.temperature_c,
        "hbm_temperature_c": t.memory_temperature_c,
        "utilization_pct": t.utilization_pct,
        "sm_activity_pct": t.sm_activity_pct,
        "memory_used_bytes": t.memory_used_bytes,
        "memory_total_bytes": t.memory_total_bytes,
    }
    words = {"throttle": throttle and _quote(throttle), "lost": r.lost and _quote(r.lost)}
    about = {"gaps": str(r.gaps) if r.gaps else None, "basis": r.basis, "source": r.source}
    return {name: _number(value) for name, value in numbers.items()} | words | about


def _number(value: float | None) -> str | None:
    if value is None:
        return None
    return str(value) if isinstance(value, int) else f"{value:.3f}".rstrip("0").rstrip(".")


def _quote(text: str) -> str:
    plain = " ".join(text.split()).replace('"', "'")
    return f'"{plain}"' if " " in plain else plain


# -- the screen --------------------------------------------------------------------------------------------------


def screen(
    snapshot: Snapshot, *, width: int = 80, height: int | None = None, keys: bool = True, processes: int = 0
) -> Text:
    """Return the whole screen, at most `width` columns wide.

    A low `height` drops processes and details, not the total.
    """
    rows = snapshot.counted_readings
    name_w = max([len("total"), *(len(r.domain) for r in rows)])
    cells = _cells(width, name_w)
    head = [_title(snapshot, width, keys), *_sources(snapshot), Text(), _header(snapshot, name_w, cells)]
    cost = [] if snapshot.cost is None else [Text(f"{'cost':<{name_w}}{_INDENT}{snapshot.cost.text}")]
    foot = [*_total(snapshot, name_w, cells), *cost, *_missing(snapshot)]
    room = None if height is None else height - len(head) - len(foot)
    blocks = [[_power_line(r, name_w, cells), *_states(r, name_w), *_details(r, name_w)] for r in rows]
    shown = _fit(blocks, room)
    left = None if room is None else room - len(shown)
    lines = [*head, *shown, *foot, *_list_processes(snapshot, processes if left is None else min(processes, left - 2))]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def _fit(blocks: Sequence[Sequence[Text]], room: int | None) -> list[Text]:
    """Return as many lines per row as fit: all with a blank line between rows, all, two, or one."""
    spaced = [line for b in blocks for line in (*b, Text())]
    if room is None or len(spaced) <= room:
        return spaced
    merged = [[b[0], *([Text("").join(_after_first(b[1:]))] if b[1:] else [])] for b in blocks]
    for tight in (blocks, merged, [b[:1] for b in blocks]):
        lines = [line for b in tight for line in b]
        if len(lines) <= room:
            return lines
    left = len(blocks) - max(room - 1, 0)
    shown = [b[0] for b in blocks[: max(room - 1, 0)]]
    return [*shown, Text(f"{_INDENT}… {left} more: make the window taller", style="dim")]


def _after_first(lines: Sequence[Text]) -> Iterator[Text]:
    """Yield lines to be joined: all but the first lose their indent."""
    yield lines[0]
    for line in lines[1:]:
        yield line[len(line.plain) - len(line.plain.lstrip()) - len(_INDENT) :]


def _cells(width: int, name_w: int) -> int:
    """Return cells of the sparkline: what the other columns leave (see `_columns`), at most 60."""
    return max(min(width - name_w - 44, 60), 8)


def _columns(name: str, name_w: int, *, now: str, limit: str, spark: Text, mean: str, energy: str) -> Text:
    line = Text(f"{name:<{name_w}}", style="bold")
    line.append(f"{now:>9}", style="bold").append(f"{limit:>8}", style="not bold dim").append("  ")
    line.append_text(spark)
    return line.append(f"{mean:>9}", style="not bold").append(f"{energy:>16}", style="not bold")


def _title(snapshot: Snapshot, width: int, keys: bool) -> Text:
    bases = {
        r.basis: [q.domain for q in snapshot.counted_readings if q.basis == r.basis] for r in snapshot.counted_readings
    }
    line = Text("tessera watch", style="bold")
    if set(bases) <= {"measured"}:
        line.append("  measured", style="not bold green")
    elif len(bases) == 1:
        line.append(f"  {next(iter(bases))}, not measured", style="bold yellow")
    else:
        parts = "; ".join(f"{b}: {', '.join(names)}" for b, names in bases.items())
        line.append(f"  {parts}", style="bold yellow")
    line.append(f"  {format_duration(float(round(snapshot.time_s)))}", style="not bold dim")
    end = "q quits" if keys else ""
    line.append(end.rjust(max(width - line.cell_len, 0)), style="not bold dim")
    return line


def _sources(snapshot: Snapshot) -> list[Text]:
    """Return which devices, the source, and how old the figures are: a line for each kind."""
    kinds = Counter((r.label or r.domain, r.source, r.resolution_s, r.note) for r in snapshot.counted_readings)
    lines = []
    for (label, source, resolution_s, note), count in kinds.items():
        ages = [
            r.age_s for r in snapshot.counted_readings if r.source == source and r.age_s is not None and r.lost is None
        ]
        parts = [f"{count} × {label}" if count > 1 else label]
        parts.append(f"{source}, new value every {format_duration(resolution_s, 2)}")
        if ages:
            parts.append(_ago(max(ages)))
        if note:
            parts.append(note)
        lines.append(Text(" · ".join(parts), style="dim"))
    return lines


def _ago(age_s: float) -> str:
    """Return an age, rounded to 10 ms so that the text does not flicker."""
    return f"{format_duration(max(math.ceil(age_s * 100), 1) / 100, 3 if age_s > 1 else 2)} ago"


def _header(snapshot: Snapshot, name_w: int, cells: int) -> Text:
    spans = {round(r.cell_s * cells, 1) for r in snapshot.counted_readings if r.cell_s}
    what = f"last {max(spans):g} s" if len(spans) == 1 else "history"
    spark = Text(f"{what:<{cells}}")
    line = _columns("", name_w, now="now", limit="limit", spark=spark, mean="mean", energy="since start")
    return Text(line.plain, style="dim")


def _power_line(r: DomainReading, name_w: int, cells: int) -> Text:
    shown = [*r.history_w][-cells:]
    spark = Text(" " * (cells - len(shown)), style="not bold")
    for value, block in zip(shown, sparkline(shown, r.top_w), strict=True):
        over = value is not None and value > r.top_w
        spark.append(block, style="red" if over else "dim" if value is None else "cyan")
    limit_w = r.telemetry.power_limit_w if r.telemetry else None
    limit = "" if limit_w is None else format_power(limit_w)
    now, mean, energy = _watts(r.power_w), _watts(r.mean_w), _joules(r.energy_j, r.error_j)
    return _columns(r.domain, name_w, now=now, limit=limit, spark=spark, mean=mean, energy=energy)


def _watts(power_w: float | None) -> str:
    """Return fixed decimals, so that the figures do not move."""
    if power_w is None:
        return "—"
    if power_w >= 9_999.5:
        return f"{power_w / 1e3:.2f} kW"
    return f"{power_w:.0f} W" if power_w >= 99.95 else f"{power_w:.1f} W"


def _joules(energy_j: float, error_j: float) -> str:
    """Return joules and the 90% half-width in percent."""
    unit, factor = next(((u, f) for u, f in (("GJ", 1e9), ("MJ", 1e6), ("kJ", 1e3)) if energy_j >= f), ("J", 1.0))
    error = f" ±{100 * error_j / energy_j:.1f}%" if energy_j > 0 else ""
    return f"{energy_j / factor:.{2 if factor > 1 else 1}f} {unit}{error}"


def _states(r: DomainReading, name_w: int) -> list[Text]:
    """Return throttling, loss and gaps, if there are any."""
    indent = " " * name_w + _INDENT
    lines = []
    if r.lost is not None:
        ago = "" if r.lost_s is None else f" for {format_duration(r.lost_s, 2)}"
        lines.append(Text(f"{indent}no data{ago}: {' '.join(r.lost.split())}", style="bold red"))
    elif r.telemetry is not None and r.telemetry.throttle:
        lines.append(Text(f"{indent}throttled: {', '.join(r.telemetry.throttle)}", style="bold yellow"))
    past = r.gaps - (r.lost is not None)
    if past > 0:
        covered = f"{100 * r.coverage:.1f}% of the time covered"
        lines.append(Text(f"{indent}{past} gap{'s' if past > 1 else ''}, {covered}", style="yellow"))
    return lines


def _details(r: DomainReading, name_w: int) -> list[Text]:
    """Return clock, temperature, activity; then the memory's. No line if they are unknown or old."""
    t = r.telemetry
    if t is None or r.lost is not None:
        return []
    core = [
        _part(t.clocks_mhz.get("sm", t.clocks_mhz.get("graphics")), "{:>4.0f} MHz"),
        _part(t.temperature_c, "{:>2.0f} °C"),
        _part(t.utilization_pct, "busy {:>3.0f}%"),
        _part(t.sm_activity_pct, "SM {:>3.0f}%"),
    ]
    gib = 2.0**30
    used = None if t.memory_used_bytes is None else t.memory_used_bytes / gib
    total = None if t.memory_total_bytes is None else t.memory_total_bytes / gib
    memory = [
        _part(t.clocks_mhz.get("memory"), "{:>4.0f} MHz"),
        _part(t.memory_temperature_c, "{:>2.0f} °C"),
        _part(r.memory_w, "{:>3.0f} W"),
        None if used is None else f"{used:.0f} GiB" if total is None else f"{used:.0f}/{total:.0f} GiB",
    ]
    groups = [[p for p in parts if p] for parts in (core, memory)]
    text = "   mem ".join(" ".join(parts) for parts in groups if parts)
    return [Text(" " * name_w + _INDENT + text, style="dim")] if text else []


def _part(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _total(snapshot: Snapshot, name_w: int, cells: int) -> list[Text]:
    if len(snapshot.counted_readings) < 2:
        return []
    unseen = [r.domain for r in snapshot.counted_readings if r.power_w is None]
    note = f"without {', '.join(unseen)}" if unseen else ""
    spark = Text(f"{note:<{cells}}"[:cells], style="not bold yellow")
    now, mean = _watts(snapshot.power_w), _watts(snapshot.mean_w)
    energy = _joules(snapshot.energy_j, snapshot.error_j)
    return [_columns("total", name_w, now=now, limit="", spark=spark, mean=mean, energy=energy)]


def _list_processes(snapshot: Snapshot, count: int) -> list[Text]:
    """Return the processes with most watts. The watts are estimates, and so marked."""
    rows = snapshot.processes[: max(count, 0)]
    if not rows:
        return []
    on_gpus = {r.pid: ", ".join(_describe_gpu(name, use) for name, use in r.gpus.items()) for r in rows}
    gpu_w = max(map(len, on_gpus.values())) + 2
    of = f"{'GPU':<{gpu_w}}" if gpu_w > 2 else ""
    head = f"{'pid':>8} {'user':<10} {'job or pod':<12} {'cores':>6} {'~power':>7}  {of}process (~: estimated)"
    lines = [Text(), Text(head, style="dim")]
    for r in rows:
        gpus = f"{on_gpus[r.pid]:<{gpu_w}}" if of else ""
        job = (r.owner.job or r.owner.pod or "")[:12]
        watts = "" if r.power_w is None else _watts(r.power_w)
        user = (r.owner.user or "?")[:10]
        lines.append(Text(f"{r.pid:>8} {user:<10} {job:<12} {r.cores:>6.2f} {watts:>7}  {gpus}{r.name}"))
    return lines


def _describe_gpu(name: str, use: GpuUse) -> str:
    share = "" if use.sm_pct is None else f" SM {use.sm_pct:.0f}%"
    memory = "" if use.memory_bytes is None else f" {use.memory_bytes / 2**30:.1f} GiB"
    return f"{name}{share}{memory}"


def _missing(snapshot: Snapshot) -> list[Text]:
    if not snapshot.missing:
        return []
    names = ", ".join(snapshot.missing)
    return [Text(f"not available: {names} (run `tessera doctor` to see why)", style="dim")]


def summary(snapshot: Snapshot) -> str:
    """Return the last line, printed when the screen closes."""
    span = format_duration(snapshot.time_s, 3)
    if snapshot.mean_w is None:
        return f"no data in {span}"
    total = f"{format_energy(snapshot.energy_j)} ± {format_energy(snapshot.error_j, 2)}"
    basis = "" if snapshot.basis == "measured" else f" ({snapshot.basis}, not measured)"
    cost = "" if snapshot.cost is None else f"   {snapshot.cost.text}"
    return f"{total} in {span}, {format_power(snapshot.mean_w)} on average{basis}{cost}"
