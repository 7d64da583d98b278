"""What a schedule held, as text."""

from __future__ import annotations

from ..runtime.cap_report import ScheduleReport, TokenReport, ZoneReport
from ..units import format_duration, format_energy, format_power


def schedule_text(report: ScheduleReport) -> str:
    """A few lines: what was asked, what was held, what it cost."""
    lines = [_asked(report)]
    lines += [_held(report, zone) for zone in report.zones]
    if report.how == "token_bucket" and not report.waits:
        lines.append("nothing had to wait")
    elif report.how == "token_bucket":
        lines.append(
            f"waited {format_duration(report.waited_s)} in {report.waits} waits {report.where or ''}: {_cost(report)}"
        )
    if report.tokens is not None:
        lines.append(_tokens(report.tokens))
    each = report.energy_per_call_j
    lines.append(f"{report.calls} calls" + (f", {format_energy(each)} each" if each is not None else ""))
    return "\n".join([*lines, *report.notes])


def _asked(report: ScheduleReport) -> str:
    if report.cap is None:
        return "no cap"
    scope = _capped(report)
    if report.how == "driver":
        return f"cap {format_power(report.cap.power_w)} for {scope}, held by the driver"
    if report.window_s is None:
        return f"cap {format_power(report.cap.power_w)} for {scope}, nothing was run yet"
    why = "the sensor tells no shorter one" if report.window_from == "sensor" else "cap_window_ms"
    return (
        f"cap {format_power(report.cap.power_w)} for {scope}, held for the mean over "
        f"{format_duration(report.window_s)} ({why})"
    )


def _capped(report: ScheduleReport) -> str:
    """Whose watts are capped."""
    if report.cap is not None and report.cap.scope == "node":
        return "all of this node's processes"
    if any(zone.zone == "cpu" for zone in report.zones):
        return "this machine's CPUs together"
    return "each GPU" if report.zones or report.how == "driver" else "each GPU, or the CPUs of a machine without one"


def _cost(report: ScheduleReport) -> str:
    """What waiting adds; as a factor where percents are hard to read."""
    if report.slowdown < 1.0:
        return f"adds at most {report.slowdown:.1%} to the time"
    return f"the time is at most {1.0 + report.slowdown:.3g} times as long"


def _held(report: ScheduleReport, zone: ZoneReport) -> str:
    name = zone.zone if zone.zone not in ("cpu", "node") else f"{zone.zone} ({', '.join(zone.domains) or 'no sensor'})"
    if zone.mean_w is None:
        return f"{name}: too short to tell"
    parts = [f"{name}: mean {_against(report, zone.mean_w)}"]
    if zone.peak_w is not None:
        parts.append(f"highest window {_against(report, zone.peak_w)}")
    elif zone.first_peak_w is not None:
        parts.append(f"highest window of the first second {_against(report, zone.first_peak_w)}")
    parts.append(f"{format_energy(zone.energy_j)} in {format_duration(zone.time_s)}, {zone.basis}")
    return ", ".join(parts)


def _tokens(tokens: TokenReport) -> str:
    """What was spent, how fast, and what it cost; and what is not in it."""
    parts = [f"{tokens.spent:,} {tokens.kind} spent by Tessera's own kernels"]
    if tokens.per_s is not None:
        parts.append(f"{tokens.per_s:,.4g} a second")
    if tokens.energy_per_token_j is not None:
        parts.append(f"{format_energy(tokens.energy_per_token_j)} each above idle")
    return ", ".join(parts) + "; other work spends none and is not waited for"


def _against(report: ScheduleReport, power_w: float) -> str:
    cap_w = report.cap.power_w if report.cap else power_w
    off = power_w / cap_w - 1
    where = "at the cap" if abs(off) < 0.0005 else f"{abs(off):.1%} {'above' if off > 0 else 'below'} the cap"
    return f"{format_power(power_w)} ({where})"
