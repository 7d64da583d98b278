"""A plan as text: what was chosen and what that saves, what was tried, and the operators."""

from __future__ import annotations

from ..runtime.tuning.plan import OpPlan, Plan, TuningTrial, format_value
from ..units import format_duration, format_energy


def text(plan: Plan) -> str:
    """One screen."""
    lines = [f"plan of {plan.function} on {plan.device}   policy {plan.policy}", _outcome(plan)]
    for knob, value in plan.setting.items():
        why = f"   ({plan.why[knob]})" if plan.why.get(knob) else ""
        lines.append(f"  {knob}: {format_value(value)}{why}")
    lines += ["", f"tried {len(plan.trials)} settings in {format_duration(plan.spent_s)}"]
    lines += [f"  {_trial(trial)}" for trial in plan.trials]
    if plan.ops:
        lines += ["", "operators (predicted)"]
        width = max(len(o.op) for o in plan.ops)
        lines += [f"  {_op(o, width)}" for o in plan.ops]
    lines += [f"note  {note}" for note in plan.notes]
    return "\n".join(lines)


def _outcome(plan: Plan) -> str:
    if not plan.setting:
        return "nothing tried was better than the function as it is"
    before, after, parts = plan.baseline, plan.best, []
    if before.energy_j and after.energy_j:
        change = _change(before.energy_j, after.energy_j)
        parts.append(f"{format_energy(before.energy_j)} -> {format_energy(after.energy_j)} a call ({change})")
    if before.time_s and after.time_s:
        change = _change(before.time_s, after.time_s)
        parts.append(f"{format_duration(before.time_s)} -> {format_duration(after.time_s)} ({change})")
    return "   ".join(parts)


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f}%"


def _trial(trial: TuningTrial) -> str:
    what = ", ".join(f"{k}={format_value(v)}" for k, v in trial.setting.items()) or "as it is"
    if trial.time_s is None:
        return f"{what}: {trial.refused}"
    joules = (
        "" if trial.energy_j is None else f"   {format_energy(trial.energy_j)} ± {format_energy(trial.error_j or 0.0)}"
    )
    return f"{what}: {format_duration(trial.time_s)}{joules}{f'   not used: {trial.refused}' if trial.refused else ''}"


def _op(row: OpPlan, width: int) -> str:
    parts = [f"{row.op:<{width}}", f"{row.share_pct:4.0f}%", f"x{row.calls}", f"clock {row.clock}" if row.clock else ""]
    parts += [f"precision {row.precision}"] if row.precision else []
    return "  ".join(p for p in parts if p) + (f"  ({row.why})" if row.why else "")
