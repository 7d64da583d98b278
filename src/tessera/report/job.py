"""A job of several ranks: a row for each rank, and one for each kind and group of collectives; terminal and page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..analyze.job_summary import JobSummary, RankRow
from ..units import format_bytes, format_duration, format_energy_error, format_power, format_share, format_si
from .console import FittedTable, HangingText, TableColumn
from .html import FOLDED, folding_table, note, number_cell, table
from .measure import describe_exit

RANKS = 16
"""Rows of ranks on a screen: the first ranks, and those that stand out."""
GROUPS = 8
STEPS = 200
_INDENT = 4
SHARES = "busy, waiting: of the time of its traced steps; it may compute while a collective waits"


def job_text(job: JobSummary) -> list[RenderableType]:
    """Return the ranks as a table, the collectives as lines."""
    shown = _choose(job.ranks)
    columns = _columns(shown, several=len({r.host for r in job.ranks}) > 1)
    styles = ["yellow" if r.straggler or r.returncode or r.crashed else "" for r in shown]
    parts: list[RenderableType] = [Text(""), FittedTable(columns, styles=styles)]
    if len(shown) < len(job.ranks):
        parts.append(Text(f"{len(shown)} of {len(job.ranks)} ranks (--json has all)", style="dim"))
    if any(row.wait_share is not None for row in shown):
        parts.append(Text(SHARES, style="dim"))
    parts += [Text(line, style="yellow") for line in job_notes(job)]
    parts.append(Text(""))
    if not job.collectives:
        parts.append(Text("no collective was traced", style="dim"))
    for row in job.collectives[:GROUPS]:
        parts.append(HangingText(describe_collective(row), _INDENT))
    if len(job.collectives) > GROUPS:
        parts.append(Text(f"and {len(job.collectives) - GROUPS} more (--json has all)", style="dim"))
    if overlap := describe_overlap(job.steps):
        parts.append(Text(overlap, style="dim"))
    return parts


def describe_overlap(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return how much of a step's collectives compute hides, and the steps with least and most; "" without steps."""
    known = sorted((s for s in steps if s["overlap_pct"] is not None), key=lambda s: float(s["overlap_pct"]))
    if not known:
        return ""
    middle, least, most = known[len(known) // 2], known[0], known[-1]
    words = f"compute hides {middle['overlap_pct']:.0f}% of a step's collectives"
    if len(known) < 2:
        return words
    return f"{words} ({least['overlap_pct']:.0f}% in {least['step']}, {most['overlap_pct']:.0f}% in {most['step']})"


def job_notes(job: JobSummary) -> list[str]:
    """Return problems: ranks without a recording, failed ranks, unknown joules, ranks the others wait for."""
    lines = []
    if job.missing:
        lines.append(f"no recording of {_name_numbers(job.missing)}: its joules are not in the sums")
    endings: dict[str, list[RankRow]] = {}
    for row in job.ranks:
        if row.crashed:
            endings.setdefault("was killed, its file ends early", []).append(row)
        elif row.returncode:
            endings.setdefault(describe_exit(row.returncode), []).append(row)
    # An ending that all ranks share is reported once, for the program.
    lines += [f"{_name_ranks(rows)} {how}" for how, rows in endings.items() if len(rows) < len(job.ranks)]
    if sum(bool(row.returncode) for row in job.ranks) > 1:
        lines += [f"rank {row.rank} failed first" for row in job.ranks if row.failed_first]
    if limited := [row for row in job.ranks if row.limited]:
        lines.append(f"{_name_ranks(limited)} stopped tracing at its time limit: the tables of all ranks end there")
    for reason in dict.fromkeys(r.no_energy for r in job.ranks if r.no_energy):
        lines.append(f"{_name_ranks([r for r in job.ranks if r.no_energy == reason])} has no joules: {reason}")
    for row in job.ranks:
        if row.straggler:
            waited = format_duration(row.delays_s, 3)
            lines.append(
                f"rank {row.rank} is the straggler: last {row.last:,} times, the others waited {waited} for it"
            )
    return lines


def _name_ranks(rows: Sequence[RankRow]) -> str:
    return _name_numbers([r.rank for r in rows])


def _name_numbers(ranks: Sequence[int]) -> str:
    """Return some ranks, the first eight of them."""
    return f"rank {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}"


def _choose(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return at most `RANKS`: those that stand out, and the first of the others."""
    if len(rows) <= RANKS:
        return list(rows)
    chosen = sorted(rows, key=lambda r: (not (r.straggler or r.returncode or r.crashed), -r.delays_s, r.rank))[:RANKS]
    return sorted(chosen, key=lambda r: r.rank)


def _columns(rows: Sequence[RankRow], *, several: bool) -> list[TableColumn]:
    columns = [TableColumn(heading="rank", cells=[str(r.rank) for r in rows])]
    if several:
        columns.append(TableColumn(heading="host", cells=[r.host or "-" for r in rows], drop=2))
    has_joules = any(r.energy_j is not None for r in rows)
    figures = [_figures(r, has_joules) for r in rows]
    drops = {"power": 4, "steps/s": 1, "last": 3, "others waited": 3}
    for heading in figures[0]:
        cells = [figure[heading][0] for figure in figures]
        columns.append(TableColumn(heading=heading, cells=cells, right=True, drop=drops.get(heading, 0)))
    return columns


def _figures(row: RankRow, has_joules: bool) -> dict[str, tuple[str, float | None]]:
    """Return the figures of a rank by their headings, as words and as numbers."""
    spent = {"energy": (_energy(row.energy_j, row.error_j), row.energy_j), "power": (_power(row.power_w), row.power_w)}
    rate = "-" if row.steps_per_s is None else f"{row.steps_per_s:.3g}"
    return {
        **(spent if has_joules else {}),
        "busy": (_share(row.busy_share), row.busy_share),
        "waiting": (_share(row.wait_share), row.wait_share),
        "steps/s": (rate, row.steps_per_s),
        "last": (f"{row.last:,}", row.last),
        "others waited": (format_duration(row.delays_s, 3) if row.last else "-", row.delays_s),
    }


def describe_collective(row: Mapping[str, Any]) -> str:
    """Return `AllReduce[dp] latency=15 µs bandwidth=1.6 TB/s`, and what else is known of a kind and group."""
    rate = "" if row["bytes_per_s"] is None else f"   bandwidth={format_si(row['bytes_per_s'], 'B/s', 3)}"
    size = "" if row["bytes"] is None else f", {format_bytes(row['bytes'], 3)}"
    alone = f" ({row['met']:,} traced on several ranks)" if 0 < row.get("met", 0) < row["count"] else ""
    calls = f"{row['count']:,} call{'' if row['count'] == 1 else 's'}{alone}"
    parts = [f"{calls}{size} in {format_duration(row['time_s'], 3)}"]
    if row["skew_s"] is not None:
        parts.append(f"skew {format_duration(row['skew_s'], 3)} (worst {format_duration(row['worst_skew_s'], 3)})")
    if row["overlap_pct"] is not None:
        parts.append(f"{row['overlap_pct']:.0f}% overlaps compute")
    parts += [str(row[key]) for key in ("path", "algorithm") if row[key]]
    if row["energy_j"] is not None:
        parts.append(_energy(row["energy_j"], row["error_j"]))
    head = f"{row['name']:<16} latency={format_duration(row['latency_s'], 3)}{rate}"
    return f"{head}   {', '.join(parts)}"


def _energy(joules: float | None, error: float | None) -> str:
    return "-" if joules is None else format_energy_error(joules, error)


def _power(watts: float | None) -> str:
    return "-" if watts is None else format_power(watts, 3)


def _share(share: float | None) -> str:
    return "-" if share is None else format_share(share)


# -- the page ---------------------------------------------------------------------------------------------------------


def job_section(job: JobSummary) -> str:
    """Return the ranks as a section of the page."""
    has_joules = any(row.energy_j is not None for row in job.ranks)
    # With many ranks, the first rows are visible at once: those for which the others waited.
    late = len(job.ranks) > FOLDED and any(row.delays_s for row in job.ranks)
    ranks_shown = sorted(job.ranks, key=lambda row: -row.delays_s) if late else job.ranks
    body = [_rank_row(row, has_joules) for row in ranks_shown]
    headings = _figures(job.ranks[0], has_joules)
    columns = [("rank", True), ("host", False), *((name, True) for name in headings)]
    ranks = folding_table(columns, body, caption="Ranks", sorted_by="others waited" if late else "rank")
    notes = note(f"{SHARES.capitalize()}.") + "".join(note(f"{line[:1].upper()}{line[1:]}.") for line in job_notes(job))
    return f"<section id='ranks'><h2>Ranks</h2>{ranks}{notes}</section>"


def _rank_row(row: RankRow, has_joules: bool) -> str:
    figures = "".join(number_cell(text, value) for text, value in _figures(row, has_joules).values())
    return f"<tr>{number_cell(str(row.rank), row.rank)}<td>{escape(row.host or '-')}</td>{figures}</tr>"


def groups_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the collectives by kind and group, as a table of the page."""
    numbers = ("calls", "latency", "time", "bytes", "bandwidth", "bus", "overlap", "skew", "waited", "energy")
    columns = [("collective", False), *((name, True) for name in numbers), ("path", False), ("algorithm", False)]
    body = "".join(map(_group_row, rows))
    return table(columns, body, caption="Collectives by kind and group", sorted_by="time")


def steps_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the collectives of each step, all ranks together; "" without steps."""
    if not rows:
        return ""
    body = "".join(_step_row(row) for row in rows[:STEPS])
    columns = [("step", False), *((name, True) for name in ("calls", "time", "hidden", "overlap"))]
    shown = f"first {STEPS} of {len(rows)}" if len(rows) > STEPS else f"{len(rows)}"
    inside = table(columns, body, caption="Collectives by step, all ranks together", sorted_by="")
    return f"<details><summary>Overlap by step ({shown})</summary>{inside}</details>"


def _step_row(row: Mapping[str, Any]) -> str:
    hidden = row["overlap_pct"]
    cells = [
        number_cell(f"{row['calls']:,}", row["calls"]),
        *(_time_cell(row[key]) for key in ("time_s", "hidden_s")),
        number_cell("-" if hidden is None else f"{hidden:.0f}%", hidden),
    ]
    return f"<tr><td>{escape(str(row['step']))}</td>{''.join(cells)}</tr>"


def _group_row(row: Mapping[str, Any]) -> str:
    moved, hidden = row.get("bytes"), row.get("overlap_pct")
    cells = [
        number_cell(f"{row['count']:,}", row["count"]),
        *(_time_cell(row.get(key)) for key in ("latency_s", "time_s")),
        number_cell(format_bytes(moved, 3) if moved else "-", moved),
        *(number_cell(format_si(row.get(key), "B/s", 3), row.get(key)) for key in ("bytes_per_s", "bus_bytes_per_s")),
        number_cell(f"{hidden:.0f}%" if hidden is not None else "-", hidden),
        *(_time_cell(row.get(key)) for key in ("skew_s", "wait_s")),
        number_cell(_energy(row.get("energy_j"), row.get("error_j")), row.get("energy_j")),
        *(f"<td>{escape(str(row.get(key) or '-'))}</td>" for key in ("path", "algorithm")),
    ]
    return f"<tr><td>{escape(str(row['name']))}</td>{''.join(cells)}</tr>"


def _time_cell(seconds: float | None) -> str:
    return number_cell(format_duration(seconds, 3) if seconds else "-", seconds)
