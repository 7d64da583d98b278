"""A schedule's report, and a plan of the tuner, as text."""

from __future__ import annotations

from ..runtime.ballast_loop import BallastReport
from ..runtime.cap_report import ScheduleReport, TokenReport, ZoneReport
from ..runtime.tuning.plan import OpPlan, Plan, TuningTrial, format_setting, format_value
from ..units import format_count, format_duration, format_energy, format_power, format_power_rate, format_share
from .rewrite import search_line, use_line


def schedule_text(report: ScheduleReport) -> str:
    """Return a few lines: the plan, the cap, the power that was reached, what waiting cost."""
    lines = _plan_lines(report.plan) if report.plan is not None else []
    lines += [_cap_line(report)] if report.cap is not None or report.plan is None else []
    lines += [_zone_line(report, zone) for zone in report.zones]
    if report.how == "token_bucket" and not report.waits:
        lines.append("nothing had to wait")
    elif report.how == "token_bucket":
        lines.append(
            f"waited {format_duration(report.waited_s)} in {report.waits} waits {report.where or ''}: {_cost(report)}"
        )
    if report.tokens is not None:
        lines.append(_tokens_line(report.tokens))
    if report.ballast is not None:
        lines += _ballast_lines(report.ballast)
    if report.shaper is not None:
        lines.append(str(report.shaper))
    each = report.energy_per_call_j
    lines.append(format_count(report.calls, "call") + (f", {format_energy(each)} each" if each is not None else ""))
    return "\n".join([*lines, *report.notes])


def _plan_lines(plan: Plan) -> list[str]:
    lines = [f"tuned for {plan.policy}: {format_setting(plan.setting)}", _outcome(plan)]
    return [*lines, *_use_and_cost(plan)]


def _use_and_cost(plan: Plan) -> list[str]:
    """Return how the plan did in use, and what the search took."""
    lines = [] if plan.in_use is None else [use_line(plan.in_use)]
    return [*lines, search_line(plan.spent_s, plan.spent_j, plan.paid_after_calls)] if plan.spent_s else lines


def _cap_line(report: ScheduleReport) -> str:
    if report.cap is None:
        return "no cap"
    scope = _cap_scope(report)
    if report.how == "driver":
        return f"cap {format_power(report.cap.power_w)} for {scope}, held by the driver"
    if report.window_s is None:
        yet = "nothing has run yet" if report.plan is None else "no call since the first one, which tuned"
        return f"cap {format_power(report.cap.power_w)} for {scope}, {yet}"
    why = "the shortest the sensor resolves" if report.window_from == "sensor" else "cap_window_ms"
    return (
        f"cap {format_power(report.cap.power_w)} for {scope}, held for the mean over "
        f"{format_duration(report.window_s)} ({why})"
    )


def _cap_scope(report: ScheduleReport) -> str:
    """Return what the cap applies to."""
    if report.cap is not None and report.cap.scope == "node":
        return "all processes of this node"
    if any(zone.own for zone in report.zones):
        return "this program and its children, by their CPU time"
    if any(zone.zone == "cpu" for zone in report.zones):
        return "this machine's CPUs together"
    return "each GPU" if report.zones or report.how == "driver" else "each GPU, or the CPUs of a machine without one"


def _cost(report: ScheduleReport) -> str:
    """Return what waiting adds; a factor if a percentage would be hard to read."""
    if report.slowdown < 1.0:
        return f"adds at most {report.slowdown:.1%} to the time"
    return f"the time is at most {1.0 + report.slowdown:.3g} times as long"


def _zone_line(report: ScheduleReport, zone: ZoneReport) -> str:
    of = ", ".join(zone.domains) or "no sensor"
    of += f"; {zone.processes} processes together" if zone.processes > 1 else ""
    name = f"{zone.zone} ({of})" if zone.zone in ("cpu", "node") else zone.zone
    if zone.mean_w is None:
        return f"{name}: too short to measure"
    parts = [f"{name}: mean {_against(report, zone.mean_w)}"]
    if zone.peak_w is not None:
        parts.append(f"highest window {_against(report, zone.peak_w)}")
    elif zone.first_peak_w is not None:
        parts.append(f"highest window of the beginning {_against(report, zone.first_peak_w)}")
    parts.append(f"{format_energy(zone.energy_j)} in {format_duration(zone.time_s)}, {zone.basis}")
    return ", ".join(parts)


def _tokens_line(tokens: TokenReport) -> str:
    """Return how many tokens were spent, how fast, and their energy."""
    parts = [f"{tokens.spent:,} {tokens.kind} spent by Tessera's own kernels"]
    if tokens.per_s is not None:
        parts.append(f"{tokens.per_s:,.4g} per second")
    if tokens.energy_per_token_j is not None:
        parts.append(f"{format_energy(tokens.energy_per_token_j)} each above idle")
    return ", ".join(parts) + "; other work spends no tokens and does not wait"


def _ballast_lines(ballast: BallastReport) -> list[str]:
    """Return what was held, what that cost, and how much power moved meanwhile."""
    held = [] if ballast.floor_w is None else [f"floor {format_power(ballast.floor_w)}"]
    held += [] if ballast.max_ramp_w_per_s is None else [f"fall at most {format_power_rate(ballast.max_ramp_w_per_s)}"]
    cost = "" if ballast.cost is None else f" ({format_share(ballast.cost, signed=True)} joules)"
    line = f"{', '.join(held)}: ballast {ballast.where} ran {format_duration(ballast.ran_s)} and took "
    lines = [f"{line}{format_energy(ballast.energy_j)}{cost}"]
    if ballast.paused_s > 0:
        lines.append(f"the GPU was paused for {format_duration(ballast.paused_s)} when work began after a pause")
    if ballast.lowest_w is not None and ballast.highest_w is not None:
        lines.append(f"power between {format_power(ballast.lowest_w)} and {format_power(ballast.highest_w)}")
    return [*lines, *ballast.notes]


def _against(report: ScheduleReport, power_w: float) -> str:
    cap_w = report.cap.power_w if report.cap else power_w
    off = power_w / cap_w - 1
    where = "at the cap" if abs(off) < 0.0005 else f"{abs(off):.1%} {'above' if off > 0 else 'below'} the cap"
    return f"{format_power(power_w)} ({where})"


# -- plans ----------------------------------------------------------------------------------------------------------


def plan_text(plan: Plan) -> str:
    """Return what was chosen and what it saves, what was tried, the operators."""
    lines = [f"plan of {plan.function} on {plan.device}   policy {plan.policy}", _outcome(plan), *_use_and_cost(plan)]
    for knob, value in plan.setting.items():
        why = f"   ({plan.why[knob]})" if plan.why.get(knob) else ""
        lines.append(f"  {knob}: {format_value(value)}{why}")
    lines += ["", f"tried {len(plan.trials)} settings"]
    lines += [f"  {_trial_line(trial)}" for trial in plan.trials]
    if plan.ops:
        width = max(len(o.op) for o in plan.ops)
        lines += ["", "operators (predicted)", *(f"  {_operator_line(o, width)}" for o in plan.ops)]
    lines += [f"note  {note}" for note in plan.notes]
    return "\n".join(lines)


def _outcome(plan: Plan) -> str:
    if not plan.setting:
        return "no setting was better than the unchanged function"
    before, after, parts = plan.baseline, plan.best, []
    if before.energy_j and after.energy_j:
        change = f"{100 * (after.energy_j / before.energy_j - 1):+.1f}%"
        parts.append(f"{format_energy(before.energy_j)} -> {format_energy(after.energy_j)} per call ({change})")
    if before.time_s and after.time_s:
        change = f"{100 * (after.time_s / before.time_s - 1):+.1f}%"
        parts.append(f"{format_duration(before.time_s)} -> {format_duration(after.time_s)} ({change})")
    return "   ".join(parts)


def _trial_line(trial: TuningTrial) -> str:
    setting = format_setting(trial.setting)
    if trial.time_s is None:
        return f"{setting}: {trial.refused}"
    line = f"{setting}: {format_duration(trial.time_s)}"
    if trial.energy_j is not None:
        line += f"   {format_energy(trial.energy_j)} ± {format_energy(trial.error_j or 0.0)}"
    line += "" if trial.power_w is None else f"   {format_power(trial.power_w)}"
    line += "" if trial.temp_c is None else f"   {trial.temp_c:.0f} °C"
    return f"{line}   not used: {trial.refused}" if trial.refused else line


def _operator_line(row: OpPlan, width: int) -> str:
    parts = [f"{row.op:<{width}}", f"{row.share_pct:4.0f}%", f"x{row.calls}", f"clock {row.clock}" if row.clock else ""]
    parts += [f"precision {row.precision}"] if row.precision else []
    parts += [f"tile {row.tile}"] if row.tile else []
    return "  ".join(p for p in parts if p) + (f"  ({row.why})" if row.why else "")
