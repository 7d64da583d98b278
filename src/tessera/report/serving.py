"""A served model: one combination as a report, several as a table with the cheapest one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..serving.estimate import FIRST_STEPS, USED_SHARE, PhaseEstimate, RefusedServer, ServingReport
from ..units import (
    format_bytes,
    format_duration,
    format_duration_error,
    format_energy_error,
    format_error,
    format_power,
)
from .console import FittedTable, TableColumn, label_table, next_line

_NOTES = 8  # of a table with many chips


def serving_screen(
    reports: Sequence[ServingReport],
    best: ServingReport | None,
    refused: Sequence[RefusedServer],
    *,
    limited: bool,
    next_command: str,
) -> RenderableType:
    """Return what the terminal shows."""
    first = reports[0]
    d = first.served
    active = "" if not d.shape.experts else f", {d.active_parameters / 1e9:.1f}B of them active"
    about = (
        f"{d.shape.parameters / 1e9:.1f}B parameters{active}; served by {first.deployment.engine}, prompts of "
        f"{first.prompt:,}, answers of {first.generate:,} tokens"
    )
    head = Text(d.name, style="bold").append(f"   {about}", style="dim")
    if len(reports) == 1 and not refused:
        missed = limited and best is None and first.fits is not False
        verdict = [Text("it does not meet the limits", style="yellow")] if missed else []
        misfit = [Text(_misfit(first), style="yellow")] if first.fits is False else []
        return Group(head, *misfit, _one(first), *verdict, *_notes(reports), _from(reports), next_line(next_command))
    ending = label_table()
    if best is not None:
        within = " within the limits" if limited else ""
        energy = format_energy_error(best.joules_per_token, best.joules_per_token.error)
        speed = format_duration_error(best.time_per_output_token_s, best.time_per_output_token_s.error)
        ending.add_row(f"fewest joules{within}", Text(f"{_name(best)}: {energy} per token, {speed} per token"))
    else:
        limited = limited or not all(report.holds_limit for report in reports)
        why = "none fits and meets the limits" if limited else "none fits into the memory of its GPUs"
        ending.add_row("fewest joules", Text(why, style="yellow"))
    for reason, rows in _group_refused(refused).items():
        ending.add_row("not possible", Text(f"{', '.join(rows)}: {reason}", style="yellow"))
    note = Text(
        "J (for an output token with its share of the prompt) and W of all GPUs; memory of each GPU; ± is a 90% "
        "half-width",
        style="dim",
    )
    return Group(head, _rows(reports, best), note, ending, *_notes(reports), _from(reports), next_line(next_command))


def _group_refused(refused: Sequence[RefusedServer]) -> dict[str, list[str]]:
    """Return the impossible combinations by reason."""
    by_reason: dict[str, list[str]] = {}
    for row in refused:
        gpus = f"{row.gpus} x {row.on}" if row.gpus > 1 else row.on
        by_reason.setdefault(row.reason, []).append(" ".join([gpus, *([row.dtype] if row.dtype else [])]))
    return {reason: list(dict.fromkeys(rows)) for reason, rows in by_reason.items()}


def _from(reports: Sequence[ServingReport]) -> Text:
    """Return where the figures come from: every part of one prediction, or the kernels of each chip of several."""
    if len(reports) == 1:
        sources = reports[0].provenance.items()
        return Text("from  " + "; ".join(f"{name}: {source}" for name, source in sources), style="dim")
    chips: dict[str, dict[str, None]] = {}
    for report in reports:
        for part, word in (("latency", ""), ("experts", "experts: ")):
            if part in report.provenance:
                chips.setdefault(word + report.provenance[part], {})[report.deployment.device.id] = None
    return Text("from  " + "\n      ".join(f"{', '.join(on)}: {source}" for source, on in chips.items()), style="dim")


def _notes(reports: Sequence[ServingReport]) -> list[Text]:
    lines = list(dict.fromkeys(line for report in reports for line in report.notes))
    if len(lines) > _NOTES:
        lines[_NOTES:] = [f"{len(lines) - _NOTES} more notes (--json)"]
    return [Text(f"note  {line}", style="yellow") for line in lines]


def _misfit(report: ServingReport) -> str:
    usable = format_bytes(USED_SHARE * (report.capacity_bytes or 0), 3)
    needs = f"it needs {format_bytes(report.memory_bytes, 3)} on each GPU, where {usable} may be used"
    return f"it does not fit: {needs}; with enough memory it would have these figures"


def _name(report: ServingReport) -> str:
    on = report.deployment
    gpus = f"{on.gpus} x {on.device.id}" if on.gpus > 1 else on.device.id
    return f"{gpus} {on.weights} batch {report.batch}"


def _one(report: ServingReport) -> RenderableType:
    lines = label_table()
    first, step = report.time_to_first_token_s, report.time_per_output_token_s
    lines.add_row("on", Text(_name(report) + (f", cache {report.deployment.cache}")))
    steady, alone = report.arrivals == "steady", report.batch <= report.deployment.replicas
    before = "the prefill" if alone else "the prefill, prompts of others that are first"
    until = f"{before}, and the way through the server ({FIRST_STEPS:g} steps)" if steady else "the mean of all at once"
    lines.add_row("first token", Text(f"{format_duration_error(first, first.error)}: {until}"))
    between = "" if alone or not steady else ", and its share of the prompts that come meanwhile"
    lines.add_row("each token", Text(f"{format_duration_error(step, step.error)}: a decode step{between}"))
    rate, joules, watts = report.tokens_per_s, report.joules_per_token, report.power_w
    lines.add_row("output", Text(f"{format_error(rate, rate.error)} tokens/s"))
    lines.add_row("energy", Text(f"{format_energy_error(joules, joules.error)} per output token"))
    lines.add_row("power", Text(f"{format_error(watts, watts.error, 'W')}{_of_gpus(report)}"))
    lines.add_row("prefill", Text(_phase(report.prefill)))
    if report.waiting_s:
        waits_w = format_power(report.waiting_j / report.waiting_s, 3)
        lines.add_row("waiting", Text(f"{format_duration(report.waiting_s)} of each step, {waits_w}: between prompts"))
    for context, phase in report.decode_by_context:
        lines.add_row(f"decode at {context:,}", Text(_phase(phase)))
    lines.add_row("memory", _memory(report))
    return lines


def _of_gpus(report: ServingReport) -> str:
    return f" of {report.deployment.gpus} GPUs" if report.deployment.gpus > 1 else ""


def _phase(phase: PhaseEstimate) -> str:
    seconds = format_duration_error(phase.time_s, phase.time_s.error)
    each = format_energy_error(phase.joules_per_token, phase.joules_per_token.error)
    return f"{seconds}, {phase.tokens_per_s:,.0f} tokens/s, {each} per token, {format_power(phase.power_w, 3)}"


def _memory(report: ServingReport) -> Text:
    parts = (
        f"{format_bytes(report.weights_bytes, 3)} weights, {format_bytes(report.cache_bytes, 3)} cache, "
        f"{format_bytes(report.engine_bytes, 3)} engine: context, graphs, activations"
    )
    text = Text(f"{format_bytes(report.memory_bytes, 3)} on each GPU ({parts})")
    if report.largest_batch is not None:
        most = (
            f"at most {report.largest_batch:,} such sequences fit" if report.largest_batch else "not one sequence fits"
        )
        text.append(f"; {most}", style="" if report.fits else "yellow")
        text.append(f" ({USED_SHARE:.0%} of {format_bytes(report.capacity_bytes or 0, 3)} may be used)", style="dim")
    return text


def _rows(reports: Sequence[ServingReport], best: ServingReport | None) -> FittedTable:
    def pair(name: str) -> list[str]:
        return [format_duration_error(getattr(r, name), getattr(r, name).error) for r in reports]

    fits = ["?" if r.fits is None else "yes" if r.fits else "no" for r in reports]
    columns = [
        TableColumn(heading="", cells=["*" if r is best else "" for r in reports]),
        TableColumn(heading="chip", cells=[r.deployment.device.id for r in reports]),
        TableColumn(heading="GPUs", cells=[str(r.deployment.gpus) for r in reports], right=True),
        TableColumn(heading="dtype", cells=[r.deployment.weights for r in reports]),
        TableColumn(heading="batch", cells=[str(r.batch) for r in reports], right=True),
        TableColumn(heading="first token", cells=pair("time_to_first_token_s"), right=True, drop=2),
        TableColumn(heading="each token", cells=pair("time_per_output_token_s"), right=True),
        TableColumn(heading="tokens/s", cells=[f"{r.tokens_per_s:,.0f}" for r in reports], right=True, drop=3),
        TableColumn(
            heading="J/token",
            cells=[format_error(r.joules_per_token, r.joules_per_token.error) for r in reports],
            right=True,
        ),
        TableColumn(heading="W", cells=[f"{r.power_w:.0f}" for r in reports], right=True, drop=4),
        TableColumn(heading="memory", cells=[format_bytes(r.memory_bytes, 3) for r in reports], right=True, drop=5),
        TableColumn(heading="fits", cells=fits),
    ]
    styles = ["bold" if r is best else "dim" if r.fits is False else "" for r in reports]
    return FittedTable(columns, gap=1, styles=styles)
