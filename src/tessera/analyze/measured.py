"""The one thing to do after a measured run, with the evidence; None when nothing stands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..schema import EnergyReport, Telemetry

# Shares above which a finding is worth a user's time; below them the advice is silent.
IDLE_SHARE = 0.35
UNUSED_SHARE = 0.97
THROTTLED_SHARE = 0.3
LOW_UTILIZATION_PCT = 50.0


def advise(report: EnergyReport, telemetry: Mapping[str, Sequence[Telemetry]]) -> str | None:
    """The finding with the most joules behind it."""
    if report.basis == "modelled":
        return "these joules are modelled: run `tessera doctor` to see which sensor this machine could have"
    if report.total.coverage < 0.98:
        reason = f" ({report.gaps[0].reason})" if report.gaps else ""
        return f"the sensors saw only {report.total.coverage:.0%} of the run{reason}: see `tessera doctor`"
    return _idle(report, telemetry) or _throttled(telemetry)


def _idle(report: EnergyReport, telemetry: Mapping[str, Sequence[Telemetry]]) -> str | None:
    if report.idle_w is None or report.total.joules <= 0:
        return None
    idle_j = report.idle_w * report.total.seconds
    share = idle_j / report.total.joules
    if share < IDLE_SHARE:
        return None
    if share > UNUSED_SHARE:
        return "hardly anything was drawn above idle: was this the right command, and the right GPU?"
    busy = [t.utilization_pct for rows in telemetry.values() for t in rows if t.utilization_pct is not None]
    mean = sum(busy) / len(busy) if busy else None
    used = f", utilisation {mean:.0f}%" if mean is not None and mean < LOW_UTILIZATION_PCT else ""
    return (
        f"{share:.0%} of the joules ({idle_j:.4g} J) are what the machine draws idle{used}: "
        "larger batches or fewer, busier GPUs would spread them over more work"
    )


def _throttled(telemetry: Mapping[str, Sequence[Telemetry]]) -> str | None:
    for domain, rows in telemetry.items():
        known = [t.throttle for t in rows if t.throttle is not None]
        for reason in ("power cap", "thermal (software)", "thermal (hardware)", "power brake"):
            share = sum(reason in t for t in known) / len(known) if known else 0.0
            if share >= THROTTLED_SHARE:
                return _throttle_text(domain, reason, share)
    return None


def _throttle_text(domain: str, reason: str, share: float) -> str:
    if reason == "power cap":
        return (
            f"{domain} ran into its power limit in {share:.0%} of the samples: it is as fast as its watts allow, "
            "so lower precision or fewer bytes moved saves time and joules alike"
        )
    return f"{domain} was slowed by {reason} in {share:.0%} of the samples: check its cooling and inlet temperature"
