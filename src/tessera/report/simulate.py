"""A simulation in the terminal, and the words that its page shares."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..fleet.engine import LIMIT_S
from ..fleet.power_quality import RAMP_S, PowerQuality, Verdict
from ..fleet.simulation import JobResult, SimulatedEvent, Simulation
from ..units import (
    format_count,
    format_duration,
    format_power,
    format_power_rate,
    format_share,
    format_temperature,
    pick_energy_format,
)
from .console import PIPED_COLUMNS, FittedTable, TableColumn, TextFlow, label_table, next_line, plain_console

_EVENTS, _JOBS = 8, 12


def simulation_text(result: Simulation) -> str:
    """Return the screen of a simulation as plain text."""
    return plain_console(PIPED_COLUMNS).text(simulation_screen(result))


def simulation_screen(result: Simulation, *, next_command: str | None = None) -> RenderableType:
    """Return one screen: what the feed does, whether the utility's spec is met, jobs, trips, what to type next."""
    facts = label_table()
    for name, text in list_figures(result):
        facts.add_row(name, text)
    parts: list[RenderableType] = [
        TextFlow(Text(result.scenario.facility.name, style="bold"), Text(describe_size(result), style="dim")),
        TextFlow(*(Text(figure, style="bold") for figure in list_headlines(result)), Text("simulated", style="dim")),
        facts,
    ]
    if result.verdicts:
        parts += [Text(""), _list_verdicts(result.verdicts)]
    if result.jobs:
        parts += [Text(""), _list_jobs(result.jobs, result.energy_j)]
    notable = [e for e in result.events if not e.kind.startswith("job ")]
    if notable:
        parts += [Text(""), _list_events(notable)]
    if next_command:
        parts.append(next_line(next_command))
    return Group(*parts)


def describe_size(result: Simulation) -> str:
    """Return how large the facility is and how it was simulated."""
    facility = result.scenario.facility
    counts = [(facility.racks, "rack"), (facility.rows, "row")]
    places = ", ".join(format_count(count, name) for count, name in counts)
    size = f"{facility.gpus:,} GPUs ({facility.gpu.name}), {places}"
    how = f"{format_duration(result.duration_s, 3)} in steps of {format_duration(result.step_s, 3)}"
    return f"{size}; {how}, seed {result.scenario.seed}"


def list_headlines(result: Simulation) -> list[str]:
    """Return mean, peak and joules of the feed."""
    q = result.quality
    return [
        f"mean {format_power(q.mean_w, 3)}",
        f"peak {format_power(q.peak_w, 3)}",
        f"swing {format_power(q.range_w, 3)}",
        f"{pick_energy_format(result.energy_j)(result.energy_j, 3)} in all",
    ]


def list_figures(result: Simulation) -> list[tuple[str, str]]:
    """Return the figures of the feed, of heat and of the run."""
    q = result.quality
    hottest = max((r.hottest_c for r in result.racks), default=0.0)
    inlet = max((r.inlet_c for r in result.racks), default=0.0)
    highest = format_temperature(result.scenario.facility.aisle.highest_c, 3)
    held = f" (the model holds the air at {highest}: in truth it gets warmer)" if result.is_air_held else ""
    rows = [
        ("judged", describe_judged(result)),
        ("feed", describe_swing(q)),
        ("ramp", describe_ramps(result)),
        ("band", describe_band(q)),
        ("heat", f"hottest GPU {format_temperature(hottest, 3)}, warmest inlet {format_temperature(inlet, 3)}{held}"),
        ("trips", describe_trips(result)),
        ("throttled", f"{format_duration(result.throttled_s, 3)} of GPUs, by heat" if result.throttled_s else "none"),
    ]
    if result.racks_above_breaker:
        rows.append(("above breaker", describe_above_breaker(result)))
    rows += [("soft start" if job.is_granted_all else "held", describe_held(job, result)) for job in result.held_jobs]
    rows += [("stalled", f"{job.name}: {job.reason}, and its ranks wait") for job in result.jobs if job.reason]
    if result.cap_above_breaker is not None:
        rows.append(("rack_cap", describe_cap_above(result)))
    if result.late_faults:
        first = result.late_faults[0]
        more = f" and {len(result.late_faults) - 1} more" if len(result.late_faults) > 1 else ""
        at = format_duration(first.at_s, 3)
        rows.append(("faults", f"not reached: {first.kind} at {at}{more}. Fix: a longer duration"))
    if result.racks_above_cap:
        rows.append(("above rack_cap", describe_above_cap(result)))
    if result.ballast_j > 0:
        share = format_share(result.ballast_j / result.energy_j)
        rows.append(
            ("ballast", f"{pick_energy_format(result.energy_j)(result.ballast_j, 3)}, {share} of the feed's joules")
        )
    if result.scenario.facility.feed.storage is not None:
        lost = format_share(1.0 - result.scenario.facility.feed.ups_efficiency)
        adds = f"what the rows draw: the feed adds what storage and UPS ({lost}) lose"
        rows.append(("before storage", f"{describe_swing(result.load_quality)}; {adds}"))
    classes = ", ".join(format_count(count, name.removesuffix("s")) for name, count in result.classes.items())
    rows.append(("engine", f"{result.engine}; classes: {classes}; {result.speed:,.0f} times real time"))
    return rows


def describe_judged(result: Simulation) -> str:
    """Return the times from which figures count."""
    steady, whole = (format_duration(seconds, 3) for seconds in (result.quality.from_s, result.duration_s))
    text = f"mean, peak, swing and band from {steady} on; ramps and joules of all {whole}"
    # Under a governor it starts softly, and that ramp is seen.
    governed = result.scenario.policies.rack_power_governor is not None
    if not governed and any(job.start_s == 0.0 for job in result.jobs):
        text += "; a job that starts at 0 s runs from the first step: its start is no ramp"
    return text


def describe_swing(q: PowerQuality) -> str:
    """Return the lowest and the highest power of the swing."""
    levels = f"{format_power(q.low_w, 3)} to {format_power(q.peak_w, 3)}"
    return f"{levels} ({format_share(q.range_share)} of the mean), crest factor {q.crest_factor:.2f}"


def describe_ramps(result: Simulation) -> str:
    """Return the largest rise and fall within `RAMP_S`, and the steepest step."""
    q = result.quality
    up, down, steepest = (
        format_power_rate(rate, 3) for rate in (q.ramp_up_w_per_s, q.ramp_down_w_per_s, q.steepest_w_per_s)
    )
    within, step = (format_duration(seconds, 3) for seconds in (RAMP_S, result.step_s))
    return f"up {up}, down {down} within {within}; {steepest} over one step of {step}"


def describe_band(q: PowerQuality) -> str:
    """Return how much of the swing lies in the band."""
    low, high = q.band_hz
    text = f"{low:g}-{high:g} Hz: {format_power(q.band_rms_w, 3)} rms, {format_share(q.band_share)} of the mean"
    if q.band_of_swing is not None:
        text += f"; {format_share(q.band_of_swing)} of the swing's energy"
    return f"{text}; strongest at {q.dominant_hz:.3g} Hz" if q.dominant_hz else text


def describe_trips(result: Simulation) -> str:
    """Return how many breakers and supplies switched off, by themselves and by faults of the file."""
    kinds: dict[str, int] = {}
    for event in result.trips:
        kinds[event.kind] = kinds.get(event.kind, 0) + event.count
    by_themselves = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if not result.ordered_trips:
        return by_themselves or "none"
    return f"{by_themselves or 'none by overload'}, {result.ordered_trips} by a fault of the file"


def describe_above_breaker(result: Simulation) -> str:
    """Return how far racks were above what their breakers carry, although none of these opened."""
    racks = result.racks_above_breaker
    count, load = sum(rack.count for rack in racks), max(rack.load for rack in racks)
    return (
        f"{count:,} rack{'s' if count > 1 else ''} up to {load:.0%} of what the breaker is rated for. Fix: simulate "
        f"longer than {format_duration(result.duration_s, 3)} to see whether it holds, or fewer GPUs a rack"
    )


def describe_held(job: JobResult, result: Simulation) -> str:
    """Return what a rack governor gave to a job, why no more, and what to change."""
    governor = result.scenario.policies.rack_power_governor
    if governor is None or job.granted_w is None or job.asked_w is None or job.start_s is None:
        return "none"
    granted, asked = (format_power(watts, 3) for watts in (job.granted_w, job.asked_w))
    if job.is_granted_all:
        return f"{job.name}: {granted} of {asked} asked in the mean, and all of it since its soft start was over"
    text = f"{job.name} by rack_power_governor: {granted} of {asked} asked"
    if job.steady_granted_w is not None:
        text += f" in the mean, {format_power(job.steady_granted_w, 3)} since its soft start was over"
    fixes = []
    if result.duration_s - job.start_s < 2 * governor.soft_start_s:
        fixes.append(f"simulate longer than its soft_start of {format_duration(governor.soft_start_s, 3)}")
    if result.rack_asked_w is not None and result.rack_asked_w > governor.usable_w:
        text += (
            f"; a rack gives out {format_power(governor.usable_w, 3)}, its jobs ask for "
            f"{format_power(result.rack_asked_w, 3)}"
        )
        fixes.append(
            f"rack_cap of {format_power(result.rack_asked_w / governor.breaker_margin, 3)}, or fewer GPUs a rack"
        )
    if job.iterations < 1 and result.verdicts:
        text += "; the utility spec is judged without its work"
    return f"{text}. Fix: {'; '.join(fixes)}" if fixes else text


def describe_cap_above(result: Simulation) -> str:
    """Return a cap that protects no breaker, in words."""
    governor, least = result.scenario.policies.rack_power_governor, result.cap_above_breaker
    if governor is None or least is None:
        return "none"
    cap, rating = format_power(governor.rack_cap_w, 3), format_power(least[1], 3)
    return f"{cap} is more than the {rating} that the breaker of {least[0]} carries. Fix: rack_cap of {rating} or less"


def describe_above_cap(result: Simulation) -> str:
    """Return how far racks were above the cap of their governor."""
    governor, racks = result.scenario.policies.rack_power_governor, result.racks_above_cap
    if governor is None or not racks:
        return "none"
    count = sum(rack.count for rack in racks)
    mean_w = float(result.rack_mean_w.max())
    return (
        f"{count:,} rack{'s' if count > 1 else ''} up to {format_power(max(rack.peak_w for rack in racks), 3)} of "
        f"{format_power(governor.rack_cap_w, 3)}, up to {format_power(mean_w, 3)} over "
        f"{format_duration(result.decide_s, 3)}: a GPU's limit takes {format_duration(LIMIT_S, 3)} to hold"
    )


def format_verdict(verdict: Verdict) -> tuple[str, str, str]:
    """Return found, allowed, and pass or fail, with enough digits to see why it fails."""
    found, limit = verdict.show()
    return found, limit, "pass" if verdict.passed else "FAIL"


def _list_verdicts(verdicts: Sequence[Verdict]) -> RenderableType:
    texts = [format_verdict(v) for v in verdicts]
    columns = [
        TableColumn(heading="utility spec", cells=[v.what for v in verdicts]),
        TableColumn(heading="found", cells=[t[0] for t in texts], right=True),
        TableColumn(heading="allowed", cells=[t[1] for t in texts], right=True),
        TableColumn(heading="", cells=[t[2] for t in texts]),
    ]
    return FittedTable(columns, styles=["" if v.passed else "red" for v in verdicts])


def format_lost(job: JobResult) -> str:
    """Return the share of a job's iterations that were lost."""
    return _format_lost(job.lost_share)


def _format_lost(share: float | None) -> str:
    if share is None:
        return "-"
    return format_share(share) if share > 5e-4 else "0%"


def _list_jobs(jobs: Sequence[JobResult], all_j: float) -> RenderableType:
    shown, energy = jobs[:_JOBS], pick_energy_format(all_j)
    columns = [
        TableColumn(heading="job", cells=[j.name for j in shown]),
        TableColumn(heading="GPUs", cells=[f"{j.gpus:,}" for j in shown], right=True),
        TableColumn(heading="state", cells=[j.state for j in shown]),
        TableColumn(heading="waited", cells=[format_duration(j.waited_s, 3) for j in shown], right=True, drop=3),
        TableColumn(heading="iterations", cells=[f"{j.iterations:,.1f}" for j in shown], right=True, drop=2),
        TableColumn(heading="lost", cells=[format_lost(j) for j in shown], right=True),
        *(
            [
                TableColumn(
                    heading="after its start",
                    cells=[_format_lost(j.steady_lost_share) for j in shown],
                    right=True,
                    drop=1,
                )
            ]
            if any(j.asked_w is not None for j in shown)
            else []
        ),
        TableColumn(heading="GPU energy", cells=[energy(j.energy_j, 3) for j in shown], right=True),
        TableColumn(heading="ballast", cells=[energy(j.ballast_j, 3) for j in shown], right=True, drop=4),
    ]
    table = FittedTable(columns)
    if len(jobs) > len(shown):
        return Group(table, Text(f"and {len(jobs) - len(shown)} more jobs (--json has all)", style="dim"))
    return table


def _list_events(events: Sequence[SimulatedEvent]) -> RenderableType:
    table = label_table()
    for event in events[:_EVENTS]:
        table.add_row(format_duration(event.time_s, 4), f"{event.kind}: {event.place}{count_text(event)}")
    if len(events) > _EVENTS:
        table.add_row("", f"and {len(events) - _EVENTS} more (--json has all)")
    return table


def count_text(event: SimulatedEvent) -> str:
    """Return how many others are alike."""
    return f" and {event.count - 1:,} alike" if event.count > 1 else ""
