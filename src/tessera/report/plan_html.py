"""A parallel plan as one page that needs no network: figures, the step as a picture, the ranking, the reasons."""

from __future__ import annotations

from html import escape

from ..dist.plan_timeline import StageSpan, StepTimeline
from ..dist.planner import ParallelPlan
from ..units import (
    format_bytes,
    format_duration,
    format_duration_error,
    format_energy_error,
    format_joules,
    format_power,
)
from .html import definitions, framed_page, note, number_cell, table, tile
from .plan import (
    describe_layout,
    describe_least_sure,
    describe_loss,
    describe_neighbour,
    describe_problem,
    describe_search,
    describe_title,
    list_facts,
    list_sources,
    name_setting,
    name_unit,
)

_COLOURS = {
    "forward": "#2b8fc4",
    "backward": "#2f9e6e",
    "data parallel": "#b3589a",
    "optimizer": "#e0a02c",
    "host": "#8a6d3b",
    "waiting": "#8c8c8c",
}
_WIDTH, _LEFT, _LANE, _GAP, _MOST_LANES = 1040, 70, 22, 5, 24
_MOST_MISFITS = 20


def plan_page(plan: ParallelPlan) -> str:
    """Return one self-contained HTML file."""
    parts = [
        f"<h2>{escape(describe_title(plan))}</h2><div class='dim'>{escape(describe_problem(plan))}</div>",
        _tiles(plan),
        f"<dl>{definitions(list_facts(plan))}</dl>",
        f"<h3>One step of {escape(str(plan.best.layout))}</h3>{draw_steps(plan.timeline)}{_explain(plan)}",
        f"<h3>The best layout of each division</h3>{_ranking(plan)}",
        f"<h3>The best layout with one setting changed</h3>{_neighbours(plan)}",
    ]
    if plan.misfits:
        parts.append(f"<h3>What does not fit</h3>{_misfits(plan)}")
    sources = [
        ("least sure", describe_least_sure(plan)),
        ("searched", describe_search(plan)),
        *(("note", text) for text in plan.notes),
        *list_sources(plan.problem.cluster),
    ]
    parts.append(
        f"<details open><summary>Where the numbers come from</summary><dl>{definitions(sources)}</dl></details>"
    )
    return framed_page(f"{describe_title(plan)} - tessera plan", f"<section>{''.join(parts)}</section>", "plan.css")


def _tiles(plan: ParallelPlan) -> str:
    best = plan.best
    share = f"{best.memory_bytes / best.capacity_bytes:.0%} of {format_bytes(best.capacity_bytes, 3)}"
    tiles = [
        tile(format_duration_error(best.time_s, best.error_s), "a step, 90% interval"),
        tile(format_energy_error(best.energy_j, best.error_j, show=format_joules), "a step, all GPUs and hosts"),
        tile(format_power(best.power_w, 3), "average of the cluster"),
        tile(format_joules(best.energy_per_token_j, 3), f"per {name_unit(plan)}"),
        tile(f"{best.tokens_per_s / best.layout.gpus:,.0f}", f"{name_unit(plan)}s/s for each GPU"),
        tile(format_bytes(best.memory_bytes, 3), f"fullest GPU, {share}"),
    ]
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def draw_steps(timeline: StepTimeline) -> str:
    """Return the pipeline's stages over time, as one <svg> element and its legend."""
    lanes = min(timeline.stages, _MOST_LANES)
    scale = (_WIDTH - _LEFT - 10) / timeline.time_s
    height = lanes * (_LANE + _GAP) + 22
    shapes = [
        f"<text x='{_LEFT - 8}' y='{_lane_top(stage) + 15}' text-anchor='end'>stage {stage}</text>"
        f"<rect class='lane' x='{_LEFT}' y='{_lane_top(stage)}' width='{_WIDTH - _LEFT - 10}' height='{_LANE}'/>"
        for stage in range(lanes)
    ]
    shapes += [_draw_span(span, scale) for span in timeline.spans if span.stage < lanes]
    marks = [0.0, 0.25, 0.5, 0.75, 1.0]
    shapes += [
        f"<text x='{_LEFT + part * timeline.time_s * scale:.1f}' y='{height - 4}' "
        f"text-anchor='{'end' if part == 1.0 else 'start' if part == 0.0 else 'middle'}'>"
        f"{escape(format_duration(part * timeline.time_s, 3))}</text>"
        for part in marks
    ]
    kinds = {span.kind for span in timeline.spans}
    keys = "".join(
        f"<span><i style='background:{colour}'></i>{escape(kind)}</span>"
        for kind, colour in _COLOURS.items()
        if kind in kinds
    )
    bubble = "<span><i style='background:var(--soft)'></i>bubble</span>" if timeline.bubble > 0.001 else ""
    picture = (
        f"<svg class='steps' viewBox='0 0 {_WIDTH} {height}' role='img' aria-label='One step'>{''.join(shapes)}</svg>"
    )
    return f"<div class='scroll'>{picture}</div><p class='legend'>{keys}{bubble}</p>"


def _lane_top(stage: int) -> int:
    return stage * (_LANE + _GAP)


def _draw_span(span: StageSpan, scale: float) -> str:
    width = max(0.3, (span.end_s - span.start_s) * scale)
    what = span.kind if span.microbatch is None else f"{span.kind} of microbatch {span.microbatch}"
    if span.chunk:
        what += f", chunk {span.chunk}"
    title = f"{what}: {format_duration(span.end_s - span.start_s, 3)}"
    second = " class='second'" if span.microbatch is not None and (span.microbatch + (span.chunk or 0)) % 2 else ""
    left, top = _LEFT + span.start_s * scale, _lane_top(span.stage)
    shape = f"x='{left:.2f}' y='{top}' width='{width:.2f}' height='{_LANE}' style='fill:{_COLOURS[span.kind]}'{second}"
    room = width > 14 and span.microbatch is not None
    label = (
        f"<text x='{left + width / 2:.1f}' y='{top + 15}' text-anchor='middle'>{span.microbatch}</text>" if room else ""
    )
    return f"<rect {shape}><title>{escape(title)}</title></rect>{label}"


def _explain(plan: ParallelPlan) -> str:
    timeline, layout = plan.timeline, plan.best.layout
    words = (
        f"Communication that compute does not hide is {timeline.exposed:.1%} of the microbatches' time and is inside "
        f"them; the pipeline waits {plan.best.parts['pipeline bubble'] / plan.best.time_s:.1%} of the step."
    )
    if timeline.microbatches < layout.microbatches:
        words += (
            f" {timeline.microbatches} of {layout.microbatches} microbatches are drawn: the end of the step looks "
            "longer than it is."
        )
    if timeline.stages > _MOST_LANES:
        words += f" {_MOST_LANES} of {timeline.stages} stages are drawn."
    return note(words)


def _ranking(plan: ParallelPlan) -> str:
    rows = "".join(
        f"<tr{' class=front' if row is plan.best else ''}><td>{escape(str(row.layout))}</td>"
        f"<td class='name'>{escape(describe_layout(row.layout))}</td>"
        f"{number_cell(format_duration_error(row.time_s, row.error_s), row.time_s)}"
        f"{number_cell(format_energy_error(row.energy_j, row.error_j, show=format_joules), row.energy_j)}"
        f"{number_cell(format_power(row.power_w, 3), row.power_w)}"
        f"{number_cell(format_bytes(row.memory_bytes, 3), row.memory_bytes)}"
        f"<td>{escape(describe_loss(plan, row))}</td></tr>"
        for row in plan.candidates
    )
    columns = (("layout", False), ("settings", False), ("time", True), ("energy", True), ("power", True))
    return table((*columns, ("memory", True), ("more than the best", False)), rows, sorted_by="")


def _neighbours(plan: ParallelPlan) -> str:
    rows = "".join(
        f"<tr><td>{escape(f'{name_setting(n.setting)} {n.value}')}</td><td>{escape(str(n.layout))}</td>"
        f"<td>{escape(n.verdict)}</td><td>{escape(describe_neighbour(plan, n))}</td></tr>"
        for n in plan.neighbours
    )
    return table((("changed", False), ("layout", False), ("verdict", False), ("why", False)), rows, sorted_by="")


def _misfits(plan: ParallelPlan) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(m.layout))}</td><td>{escape(describe_layout(m.layout))}</td>"
        f"{number_cell(format_bytes(m.over_bytes, 3), m.over_bytes)}</tr>"
        for m in plan.misfits[:_MOST_MISFITS]
    )
    return table((("layout", False), ("settings", False), ("too much by", True)), rows, sorted_by="")
