"""A recorded run on one screen: what it cost, where the joules went, one thing to do, what to type next."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analyze.answer import TIME_LIMIT, Answer, answer
from ..analyze.kernel_names import fit, region_name
from ..analyze.whole import Outside
from ..attribute.table import EnergyTable
from ..profile.runfile import RunFile
from ..timeline.columns import Timeline
from ..units import format_duration, format_energy, format_power, format_share
from .energy import SEEN, WIDTH, idle_row, joules, legend, rest_row, spenders
from .text import ended_text, plain_table, with_error

BAR = 30
TOP = 5
REGIONS = 3
MODES = {
    "timeline": "every kernel",
    "sampling": "sampled, no kernels",
    "summary": "summed up by name",
}
"""What a run's mode recorded, in words."""


def text(
    run: RunFile,
    table: EnergyTable,
    *,
    html: Path | None = None,
    width: int | None = None,
    by: str | None = None,
    top: int | None = None,
    timeline: Timeline | None = None,
    found: Answer | None = None,
) -> RenderableType:
    """The screen. `by` shows one view only, `top` how many rows of each; `found` saves computing the answer again."""
    said = found or answer(run, table, timeline)
    wide = width or WIDTH
    parts: list[RenderableType] = [_title(said, wide), _headline(said, wide), *_traced(said), *_warnings(said)]
    parts.append(_facts(said))
    if said.idle_share is not None:
        parts.append(_split(said, wide))
    parts += _tables(said, table, wide, by, top)
    parts.append(_ending(said, html, wide))
    return Group(*parts, *_following(run, said, table, html, by))


def _title(said: Answer, width: int) -> Text:
    where = f" on {said.device}" if said.device else ""
    mode = mode_text(said)
    room = max(20, width - len(where) - len(mode) - 4)
    return Text(fit(said.name, room) + where, style="bold").append(f"   {mode}", style="dim")


def mode_text(said: Answer) -> str:
    """What was recorded, in words."""
    if said.mode == "timeline" and not said.kernels:
        return "every operator" if said.ops or not said.source else "regions and power"
    return MODES.get(said.mode, said.mode)


def _headline(said: Answer, width: int) -> Text:
    """The whole run, whatever was traced of it."""
    whole = said.whole
    parts = [joules(whole.energy_j, whole.error_j)]
    if whole.power_w is not None:
        parts.append(with_error(whole.power_w, whole.power_error_w, "W"))
    parts.append(format_duration(whole.seconds))
    if whole.steps is not None:
        parts.append(f"{whole.steps:,} step{'' if whole.steps == 1 else 's'}")
    if said.peak_w is not None:
        parts.append(f"peak {format_power(said.peak_w, 3)}")
    source = "" if said.source == said.basis else said.source or "no power"  # a model is named below
    line = "   ".join(parts)
    interval = "90% intervals" if len(line) + len(source) + len("90% intervals") + 5 <= width else ""
    known = ", ".join(part for part in (source, interval) if part)
    return Text(line, style="bold").append(f"   {known}" if known else "", style="dim")


def _traced(said: Answer) -> list[RenderableType]:
    if not said.partial:
        return []
    lines = [f"{traced_text(said)}{_all_of_it(said)}", outside_text(said)]
    return [Text(line, style="yellow") for line in lines if line]


def _all_of_it(said: Answer) -> str:
    return " (--limit 0 traces all)" if limit_cut(said) else ""


def limit_cut(said: Answer) -> bool:
    """Whether the limit for tracing left steps out; of a run without steps that is not known."""
    return said.limited and (said.whole.whole_steps is None or said.traced_steps != said.whole.whole_steps)


def traced_text(said: Answer) -> str:
    """What the tables are of, where that is not the whole run."""
    steps = said.whole.steps
    some = f", {said.traced_steps:,} of {steps:,} steps" if steps is not None and said.traced_steps is not None else ""
    if some and said.whole.whole_steps is not None and said.whole.whole_steps != steps:
        some += " (the first had begun before it)"
    spent = joules(said.energy_j, said.error_j)
    return f"traced {format_duration(said.seconds, 3)}{some}, {spent}: the tables are of these"


def outside_text(said: Answer) -> str:
    """Where the rest of the run's joules is: with what was traced they sum to the whole."""
    parts = [f"{format_energy(p.energy_j, 3)} in {format_duration(p.seconds, 3)} {_where(p)}" for p in said.outside]
    return f"in no table: {', '.join(parts)}" if parts else ""


def _where(part: Outside) -> str:
    place = {
        "before": "before it", "between": "between its windows", "after": "after it",
        "unsampled": "while no sensor was read (by the counter)",
    }[part.where]  # fmt: skip
    if part.steps:
        return f"{place} ({part.steps:,} step{'' if part.steps == 1 else 's'})"
    return f"{place} (imports, preparation)" if part.where == "before" else place


def _warnings(said: Answer) -> list[RenderableType]:
    lines = []
    if said.basis != "measured":
        lines.append(f"{said.basis.upper()}, not measured: `tessera doctor` says which sensor could be had")
    if said.cut:
        lines.append(f"CUT: {said.cut}")
    if said.returncode:
        lines.append(f"the program {ended_text(said.returncode)}: these are the joules until then")
    return [Text(line, style="yellow") for line in lines]


def _facts(said: Answer) -> Table:
    table = plain_table()
    for per in said.per_work:
        rate = f"{per.rate_per_s:,.0f}" if per.rate_per_s >= 100 else f"{per.rate_per_s:.3g}"
        spread = _spread(said, per.left_out) if per.unit == "step" else ""
        if per.traced_j is not None:
            which = f"{per.amount:,.0f} untraced, {per.left_out}"
            spread = f" (of {which}; {format_energy(per.traced_j, 3)} traced)"
        elif per.unit == "step" and said.partial:
            spread = f" (of {per.amount:,.0f} traced){spread}"
        about = "~" if math.isnan(per.error_j) else ""
        spent = f"{about}{joules(per.energy_j, per.error_j)}   {rate} {per.unit}s/s{spread}"
        table.add_row(Text(f"per {per.unit}"), Text(spent))  # the unit is the user's word, and no markup
    for region in said.regions[:REGIONS]:
        each = joules(region.energy_j / max(region.calls, 1), region.energy_error_j / max(region.calls, 1))
        back = region.with_backward_j
        more = f", {format_energy(back, 3)} with backward" if back is not None and back > region.energy_j * 1.01 else ""
        about = "~" if said.shared_by and math.isnan(region.energy_error_j) else ""
        whole = f"{format_energy(region.energy_j, 3)} ({format_share(region.share)}{more})"
        table.add_row("region", Text(f"{region_name(region.name)}: {region.calls:,} x {about}{each} = {about}{whole}"))
    return table


def _spread(said: Answer, left_out: str | None) -> str:
    """Which steps do not count, and why; where all do, the least and the most of them."""
    s = said.steps
    if s is None:
        return ""
    if left_out:
        return f"   {left_out}"
    return f"   {format_energy(s.least_j, 3)} ({s.least}) to {format_energy(s.most_j, 3)} ({s.most})"


def _split(said: Answer, width: int) -> Text:
    """Busy and idle as one bar."""
    share = said.idle_share or 0.0
    room = min(BAR, max(10, width - 70))
    idle = min(room - 1, max(1, round(share * room))) if share > 0 else 0
    line = Text("busy ", style="dim")
    line.append("█" * (room - idle), style="green").append("░" * idle, style="yellow").append(" idle   ", style="dim")
    line.append(f"{joules(said.busy_j or 0.0, None)} in {format_duration(said.busy_s or 0.0, 3)} busy, ")
    line.append(f"{joules(said.idle_j or 0.0, said.idle_error_j)} ({format_share(share)}) idle")
    return line


def _tables(said: Answer, table: EnergyTable, width: int, by: str | None, top: int | None) -> list[RenderableType]:
    shared = said.shared_by is not None
    parts: list[RenderableType] = []
    if by is not None:
        rows = table.top(top or 20, by) if by == "steps" else list(said.rows(by)[: top or 20])
        if not rows:
            how = ": tessera run --modules records them" if by == "modules" else ""
            return [Text(f"no {by} were recorded{how}", style="yellow")]
        total, idle = len(table.steps if by == "steps" else said.rows(by)), idle_row(table, by) or rest_row(said, by)
        return [Text(""), spenders(rows, by, width=width, total=total, idle=idle), *legend(rows)]
    for view in ("ops", "kernels"):
        found = said.rows(view)
        if not found:
            continue
        rows = list(found[: top or (TOP if said.ops and said.kernels else 2 * TOP)])
        parts += [
            Text(""),
            spenders(rows, view, width=width, total=len(found), idle=rest_row(said, view)),
            *legend(rows),
        ]
    if said.modules:
        rows = list(said.modules[: top or 2 * TOP])
        inside = Text("a module has what the modules inside it spent, and the backward pass of both", style="dim")
        parts += [Text(""), spenders(rows, "modules", width=width, total=len(said.modules)), inside]
    if shared and (said.ops or said.kernels):
        parts.append(Text(f"~ shared out by {said.shared_by}: a model, without an interval. {SEEN}", style="yellow"))
    return parts


def _ending(said: Answer, html: Path | None, width: int) -> Table:
    table = plain_table()
    table.add_row("", "")
    telling = [note for note in said.notes if note != said.cut and "left out" not in note]
    telling = [note for note in telling if not (said.partial and TIME_LIMIT in note)]  # said above already
    slowed = said.tracing.text if said.tracing is not None else None
    for note in [*([f"{slowed}{_measure_it(said)}"] if slowed else []), *telling[:1]]:
        table.add_row("note", Text(note, style="yellow"))
    if said.advice:
        table.add_row("do", Text(said.advice, style="bold"))
    if html is not None:
        table.add_row("report", Text(str(html), style="cyan"))
    return table


def _measure_it(said: Answer) -> str:
    """How to know instead of bounding it: leave steps untraced."""
    known = said.tracing is None or said.tracing.basis == "steps" or said.whole.steps is None
    return "" if known else " (untraced steps beside traced ones would tell: --steps 10:20)"


def _following(
    run: RunFile, said: Answer, table: EnergyTable, html: Path | None, by: str | None
) -> list[RenderableType]:
    """The next command in one piece, however narrow the terminal: it is there to be copied. Never the last one."""
    path = shlex.quote(str(run.path))
    views = [view for view in ("kernels", "ops", "regions", "modules") if said.rows(view)]
    views += ["steps"] if table.steps else []
    at = views.index(by) + 1 if by in views else 0
    if html is None:
        command = f"tessera report {path} --open"
    elif (said.kernels or said.ops) and not said.shared_by and at < len(views):
        command = f"tessera report {path} --by {views[at]} --top 30"
    else:
        command = f"tessera report {path} --json"
    line = Text("next    ", style="dim", no_wrap=True, overflow="ignore")
    return [line.append(command, style="not dim cyan")]
