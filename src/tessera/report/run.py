"""A recorded run on one screen: what it cost, where the joules went, what to change first, what to type next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analyze.answer import Answer, PerWork, answer
from ..analyze.kernel_names import fit, region_name
from ..analyze.mean_step import EXPENSIVE
from ..analyze.run_energy import BY_STACKS, Outside
from ..attribute.table import EnergyTable
from ..config import find_cost
from ..notes import kind_of
from ..recording import CpuUse, Facts, Recording
from ..units import format_duration, format_energy, format_energy_error, format_error, format_power, format_share
from .console import label_table, next_line
from .energy import OWN, SUMMARY_NOTE, WIDTH, idle_row, legend, rest_rows, rows_table
from .job import job_text
from .measure import SCOPES, busy_text, describe_exit
from .predict import format_rate

BAR = 30
CHILDREN_SHARE = 0.02
OUTSIDE_SHARE = 0.1
"""The screen mentions joules in no step from this share of the table's on: of ten steps the first, whose beginning is
unknown, may be a tenth.
"""
TOP = 5
REGIONS = 3
_PLACES = {
    "before": "before tracing started",
    "between": "between traced windows",
    "after": "after tracing ended",
    "unsampled": "while no sensor was read (from the energy counter)",
}
LINES_NOTE = (
    f"~ joules of the whole run, divided by {BY_STACKS}: a function or line includes what it calls, "
    "and one that waits for a GPU includes what the GPU does"
)
"""How joules of functions and lines are to be read."""
MODES = {
    "light": "every kernel",
    "operators": "every kernel",
    "sampling": "sampled, no kernels",
    "summary": "totals by name",
}
"""What each mode of a run records, in words."""


def text(
    recording: Recording,
    *,
    html: Path | None = None,
    width: int | None = None,
    by: str | None = None,
    top: int | None = None,
    result: Answer | None = None,
) -> RenderableType:
    """Return the screen.

    `by` shows only one view, `top` is the number of rows; `result` is the answer, if it was computed.
    """
    result, table = result or answer(recording), recording.energy()
    wide = width or WIDTH
    parts: list[RenderableType] = [
        _title(result, wide),
        _headline(result, wide),
        *_traced_lines(result),
        *_warnings(result),
    ]
    parts.append(_facts(result, recording.facts.path, by))
    if result.idle_share is not None:
        parts.append(_split(result, wide))
        parts += [Text(note, style="yellow") for note in table.notes if kind_of(note) == "fitted"]
    if result.job is not None and by is None:
        parts += job_text(result.job)
    parts += _tables(result, table, wide, by, top)
    parts.append(_ending(result, html))
    return Group(*parts, *_next_command(recording.facts, result, table, html, by))


def _title(result: Answer, width: int) -> Text:
    where = f" on {result.device}" if result.device else ""
    mode = mode_text(result)
    room = max(20, width - len(where) - len(mode) - 4)
    return Text(fit(result.name, room) + where, style="bold").append(f"   {mode}", style="dim")


def mode_text(result: Answer) -> str:
    """Return what was recorded, in words."""
    if result.shared_by == BY_STACKS and result.mode != "sampling":
        return "sampled Python stacks"
    if result.mode == "light" and not result.ops:
        return "every kernel, no operators" if result.kernels else "regions and power"
    if result.mode in ("operators", "timeline") and not result.kernels:
        return "every operator" if result.ops or not result.source else "regions and power"
    if result.operators is not None:
        return f"every kernel, {format_share(result.operators.share)} with operators"
    return MODES.get(result.mode, result.mode)


def interval_text(result: Answer) -> str:
    """Return what is known of the error of joules that were shared out."""
    if result.shared_by != BY_STACKS:
        return "a model, without an interval"
    taken = sum(row.calls for row in result.ops)
    return f"a model; ± of a share is the 90% interval of {taken:,} samples, and not the model's error"


def _headline(result: Answer, width: int) -> Text:
    """Return the line for the whole run, however much of it was traced."""
    whole = result.whole
    parts = [format_energy_error(whole.energy_j, whole.error_j)]
    if whole.power_w is not None:
        parts.append(format_error(whole.power_w, whole.error_w, "W"))
    parts.append(format_duration(whole.time_s))
    if whole.steps is not None:
        parts.append(f"{whole.steps:,} step{'' if whole.steps == 1 else 's'}")
    if result.peak_w is not None:
        parts.append(f"peak {format_power(result.peak_w, 3)}")
    source = "" if result.source == result.basis else result.source or "no power"  # the warning names a model
    line = "   ".join(parts)
    interval = "90% intervals" if len(line) + len(source) + len("90% intervals") + 5 <= width else ""
    about = ", ".join(part for part in (source, interval) if part)
    return Text(line, style="bold").append(f"   {about}" if about else "", style="dim")


def _traced_lines(result: Answer) -> list[RenderableType]:
    if not result.partial:
        return []
    hint = " (--limit 0 traces everything)" if limit_cut(result) else ""
    lines = [f"{traced_text(result)}{hint}", outside_text(result)]
    return [Text(line, style="yellow") for line in lines if line]


def limit_cut(result: Answer) -> bool:
    """Return whether the time limit of tracing may have left steps out."""
    return result.limited and (result.whole.whole_steps is None or result.traced_steps != result.whole.whole_steps)


def traced_text(result: Answer) -> str:
    """Return what the tables cover, if that is not the whole run."""
    steps = result.whole.steps
    some = (
        f", {result.traced_steps:,} of {steps:,} steps" if steps is not None and result.traced_steps is not None else ""
    )
    if some and result.whole.whole_steps is not None and result.whole.whole_steps != steps:
        some += " (the first began before tracing)"
    spent = format_energy_error(result.energy_j, result.error_j)
    return f"traced {format_duration(result.time_s, 3)}{some}, {spent}: the tables show this part"


def outside_text(result: Answer) -> str:
    """Return the rest of the run's joules: together with the traced part they sum to the whole."""
    parts = [f"{format_energy(p.energy_j, 3)} in {format_duration(p.time_s, 3)} {_where(p)}" for p in result.outside]
    return f"not in these tables: {', '.join(parts)}" if parts else ""


def _where(part: Outside) -> str:
    place = _PLACES[part.where]
    if part.steps:
        return f"{place} ({part.steps:,} step{'' if part.steps == 1 else 's'})"
    return f"{place} (imports, setup)" if part.where == "before" else place


def basis_text(result: Answer) -> str:
    """Say that the joules are not measured, and whose they are."""
    whose = f"joules of {SCOPES[result.scope]}; `tessera doctor` lists the sensors"
    return f"{result.basis.upper()}, not measured: {whose}"


def _warnings(result: Answer) -> list[RenderableType]:
    lines = []
    if result.basis != "measured":
        lines.append(basis_text(result))
    if busy := busy_text(result.cpu_use):
        lines.append(busy)
    if result.cut:
        lines.append(f"INCOMPLETE: {result.cut}")
    if result.returncode:
        lines.append(f"the program {describe_exit(result.returncode)}; the energy is up to then")
    return [Text(line, style="yellow") for line in lines]


def _facts(result: Answer, path: Path | None, by: str | None) -> Table:
    table = label_table()
    if cost := find_cost(result.whole.energy_j, result.whole.error_j):
        table.add_row("cost", cost.text)
    for per in result.per_work:
        # Text: the unit is the user's word, not markup
        table.add_row(Text(f"per {per.unit}"), Text(_per_work_text(result, per)))
    if in_no_step := outside_steps_text(result):
        table.add_row("no step", Text(in_no_step))
    for region in result.regions[:REGIONS]:
        each = format_energy_error(region.energy_j / max(region.calls, 1), region.error_j / max(region.calls, 1))
        back = region.with_backward_j
        more = f", {format_energy(back, 3)} with backward" if back is not None and back > region.energy_j * 1.01 else ""
        about = "~" if result.shared_by and math.isnan(region.error_j) else ""
        whole = f"{format_energy(region.energy_j, 3)} ({format_share(region.share)}{more})"
        table.add_row("region", Text(f"{region_name(region.name)}: {region.calls:,} x {about}{each} = {about}{whole}"))
    if (hidden := len(result.regions) - REGIONS) > 0 and by != "regions":
        command = f"tessera report {shlex.quote(str(path or 'RUN'))} --by regions"
        table.add_row("", Text(f"and {hidden} more: {command}", style="dim"))
    if children := children_text(result):
        table.add_row("children", Text(children))
    if threads := threads_text(result):
        table.add_row("threads", Text(threads))
    return table


def children_text(result: Answer) -> str:
    """Return what the program's children used of the CPUs; "" if that is almost nothing."""
    use = result.cpu_use
    return "" if use is None else _used_text(use, use.children, result.children_j)


def threads_text(result: Answer) -> str:
    """Return what Python threads beside the main one used of the CPUs; "" if that is almost nothing."""
    use = result.cpu_use
    used = "" if use is None else _used_text(use, use.beside, result.beside_j)
    if result.kernels:
        shown = ""
    elif result.ops or result.functions:
        shown = ", whose operators and functions the tables show"
    else:
        shown = ", the only one whose operators can be traced (run their work on it once to see them)"
    return f"beside the main one{shown}: {used}" if used else ""


def _used_text(use: CpuUse, used: Mapping[str, tuple[int, float]], used_j: float | None) -> str:
    used_s, parts = sum(seconds for _, seconds in used.values()), []
    if not used_s > CHILDREN_SHARE * use.cpu_s:
        return ""
    for name, (count, seconds) in used.items():
        if seconds > CHILDREN_SHARE * use.cpu_s:
            part = used_j * seconds / used_s if used_j is not None else None
            joules = "" if part is None else f", ~{format_energy(part, 3)} of the run's joules"
            time = f"{format_duration(seconds, 3)} of CPU time ({format_share(seconds / use.cpu_s)})"
            parts.append(f"{f'{count} x ' if count else ''}{name}: {time}{joules}")
    return "; ".join(parts[:2]) + (f"; and {len(parts) - 2} more" if len(parts) > 2 else "")


def _per_work_text(result: Answer, per: PerWork) -> str:
    """Return joules and rate of one step, sample or token; for steps also which ones count, and how they differ."""
    spread = "".join(f"   {part}" for part in (spread_text(per), per.left_out) if part)
    if per.traced_j is not None:
        spread = f" (of {per.amount:,.0f} untraced, {per.left_out}; {format_energy(per.traced_j, 3)} traced)"
    elif per.traced_steps is not None:
        spread = f" (of {per.amount:,.0f} steps, {per.traced_steps:,} traced){spread}"
    elif per.unit == "step" and result.partial and result.traced_steps != result.whole.steps:
        spread = f" (of {per.amount:,.0f} traced){spread}"
    return f"{spent_text(per)}   {format_rate(per.rate_per_s)} {per.unit}s/s{spread}"


def spent_text(per: PerWork) -> str:
    """Return the mean with its error; the median if one step determines the mean."""
    spent = format_energy_error(per.energy_j, per.error_j)
    if per.spread is not None and per.spread.is_dominated:
        mean = f"mean {format_energy(per.energy_j, 3)}: one step decides it"
        return f"median {format_energy(per.spread.median_j, 3)} ({mean})"
    if per.energy_j < per.error_j:
        return f"{format_energy(per.energy_j, 3)} ({spent})"
    return f"{'~' if math.isnan(per.error_j) else ''}{spent}"


def spread_text(per: PerWork) -> str:
    """Return the cheapest and the most expensive step, and their distance from the median; "" if unknown."""
    s = per.spread
    if s is None:
        return ""
    times = f", {s.factor:.{1 if s.factor < 10 else 0}f} times the median" if s.factor > EXPENSIVE else ""
    return f"{format_energy(s.least_j, 3)} ({s.least}) to {format_energy(s.most_j, 3)} ({s.most}{times})"


def outside_steps_text(result: Answer) -> str:
    """Return how much of the table's joules is in no step, and where; "" if that is little."""
    found = result.outside_steps
    if found is None or found.rest.share <= OUTSIDE_SHARE:
        return ""
    unbegun = result.whole.steps != result.whole.whole_steps  # of a script's first step, only the end is known
    words = {
        "before": "before the first whole step (setup, first step)" if unbegun else "before the first step",
        "between": "between steps",
        "after": "after the last step",
    }
    parts = {words[p]: j for p, j in found.places.items() if j > 0.01 * found.rest.energy_j}
    where = ", ".join(f"{format_energy(j, 3)} {place}" if len(parts) > 1 else place for place, j in parts.items())
    spent = f"{format_energy(found.rest.energy_j, 3)} ({format_share(found.rest.share)})"
    spent += f" in {format_duration(found.rest.time_s, 3)}"
    return f"{spent}: {where}" if where else spent


def _split(result: Answer, width: int) -> Text:
    """Return busy and idle as one bar; on a host alone, in and between operators, where Python runs."""
    on_host = not result.kernels
    share = result.idle_share or 0.0
    room = min(BAR, max(10, width - 70))
    idle = min(room - 1, max(1, round(share * room))) if share > 0 else 0
    line = Text("operators " if on_host else "busy ", style="dim")
    line.append("█" * (room - idle), style="green").append("░" * idle, style="yellow")
    line.append(" rest   " if on_host else " idle   ", style="dim")
    spent = f"{format_energy_error(result.busy_j or 0.0, None)} in {format_duration(result.busy_s or 0.0, 3)}"
    line.append(f"{spent} {'in operators' if on_host else 'busy'}, ")
    waiting = "between them (Python, waiting)" if on_host else "idle"
    waiting = f"in other threads, or {waiting}" if on_host and threads_text(result) else waiting
    waiting = f"while only children ran, or {waiting}" if children_text(result) else waiting
    line.append(f"{format_energy_error(result.idle_j or 0.0, result.idle_error_j)} ({format_share(share)}) {waiting}")
    return line


def _tables(result: Answer, table: EnergyTable, width: int, by: str | None, top: int | None) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if by is not None:
        rows = table.top(top or 20, by) if by == "steps" else list(result.rows(by)[: top or 20])
        if not rows:
            option = "--stack" if by in OWN else "--modules" if by == "modules" else None
            hint = f": use tessera run {option}" if option else ""
            return [Text(f"no {by} were recorded{hint}", style="yellow")]
        total = len(table.steps if by == "steps" else result.rows(by))
        idle = idle_row(table, by)
        about = [Text(LINES_NOTE, style="yellow")] if by in OWN else legend(rows)
        below = [idle] if idle else rest_rows(result, by, len(rows))
        if by == "steps" and result.outside_steps:
            below = list(result.outside_steps.rows)
        return [Text(""), rows_table(rows, by, width=width, total=total, below=below), *about]
    for view in ("ops", "kernels"):
        all_rows = result.rows(view)
        if not all_rows:
            continue
        rows = list(all_rows[: top or (TOP if result.ops and result.kernels else 2 * TOP)])
        lines = rows_table(rows, view, width=width, total=len(all_rows), below=rest_rows(result, view, len(rows)))
        parts += [Text(""), lines, *legend(rows)]
    if result.modules:
        rows = list(result.modules[: top or 2 * TOP])
        inside = Text("a module includes the modules inside it, and its backward pass", style="dim")
        parts += [Text(""), rows_table(rows, "modules", width=width, total=len(result.modules)), inside]
    for view in OWN if result.lines else ():
        rows = list(result.rows(view)[: top or TOP])
        total = len(result.rows(view))
        parts += [Text(""), rows_table(rows, view, width=width, total=total, below=rest_rows(result, view))]
    if result.lines:
        parts.append(Text(LINES_NOTE, style="yellow"))
    if result.shared_by is not None and (result.ops or result.kernels):
        parts.append(Text(f"~ divided by {result.shared_by}: {interval_text(result)}. {SUMMARY_NOTE}", style="yellow"))
    return parts


def _ending(result: Answer, html: Path | None) -> Table:
    table = label_table()
    table.add_row("", "")
    telling = [note for note in result.notes if note != result.cut and kind_of(note) not in ("omission", "fitted")]
    telling = [note for note in telling if not (result.partial and kind_of(note) == "time_limit")]  # in the headline
    slowed = result.tracing.text if result.tracing is not None else None
    for note in [*([f"{slowed}{_tracing_hint(result)}"] if slowed else []), *telling[:1]]:
        table.add_row("note", Text(note, style="yellow"))
    if result.advice:
        table.add_row("do", Text(result.advice[0].text, style="bold"))
    if html is not None:
        table.add_row("report", Text(str(html), style="cyan"))
    return table


def _tracing_hint(result: Answer) -> str:
    """Say how to measure the slowdown instead of its upper bound: leave steps untraced."""
    tracing = result.tracing
    known = tracing is None or tracing.basis == "steps" or tracing.is_brief or result.whole.steps is None
    return "" if known else " (to measure it, leave some steps untraced: --steps 10:20)"


def _next_command(
    facts: Facts, result: Answer, table: EnergyTable, html: Path | None, by: str | None
) -> list[RenderableType]:
    """Return the next command: a view that was not shown yet, or a mode that has something to show."""
    path, ran = shlex.quote(str(facts.path or "RUN")), facts.command
    if any(kind_of(note) == "no_torch" for note in facts.notes) and ran and not isinstance(ran, str):
        return [next_line(shlex.join(["tessera", "run", "--mode", "sampling", *ran[1:]]), 6)]
    views = [view for view in ("kernels", "ops", "regions", "modules") if result.rows(view)]
    views += [view for view in ("steps",) if table.steps] + [view for view in OWN if result.lines]
    at = views.index(by) + 1 if by in views else 0
    if html is None:
        command = f"tessera report {path} --open"
    elif (result.kernels or result.ops) and not result.shared_by and at < len(views):
        command = f"tessera report {path} --by {views[at]} --top 30"
    else:
        command = f"tessera report {path} --json"
    return [next_line(command, 6)]
