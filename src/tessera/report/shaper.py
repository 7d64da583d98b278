"""What a power shaper did on a rank, and whether it passes rule 9.4, as text."""

from __future__ import annotations

from ..runtime.shaper import ShaperReport
from ..runtime.shaper_validation import TARGET_LOSS, ShaperValidation
from ..runtime.shaping import LOSS
from ..units import format_duration, format_power, format_share


def shaper_text(report: ShaperReport) -> str:
    """Return a few lines: the rank's place, its offset, and its waits."""
    place = report.place
    where = f"replica {place.replica} of {place.replicas}"
    where += f", stage {place.stage} of {place.stages}" if place.stages > 1 else ""
    lines = [f"{where}, {'synchronous' if report.synchronous else 'independent'} groups"]
    if report.period_s is not None:
        lines.append(f"starts {format_duration(report.offset_s)} late in a step of {format_duration(report.period_s)}")
    waited = f"{format_duration(report.phase_wait_s)} for its phase, {format_duration(report.jitter_wait_s)} of jitter"
    lines.append(
        f"{report.steps} steps, {report.microbatches} microbatches: waited {waited}, "
        f"{format_share(report.waited_share)} of the time"
    )
    if report.validation is not None:
        lines.append(validation_text(report.validation))
    return "\n".join([*lines, *report.notes])


def validation_text(validation: ShaperValidation) -> str:
    """Return pass or fail, then the three rules with their figures without and with the shaper."""
    off, on = validation.off, validation.on
    change = on["peak"] / off["peak"] - 1 if off["peak"] else 0.0
    crest = f"crest factor {off['crest_factor']:.3g} -> {on['crest_factor']:.3g}"
    spikes = f"peak {_show(validation, off['peak'])} -> {_show(validation, on['peak'])} ({change:+.1%}), {crest}"
    times = f"steps {format_duration(off['step_s'])} -> {format_duration(on['step_s'])}"
    allowed = f"within {TARGET_LOSS:.0%}" if validation.loss <= TARGET_LOSS else f"{LOSS:.0%} is allowed"
    rows = [
        (validation.spikes_down, f"spikes down in windows of {format_duration(validation.window_s)}", spikes),
        (validation.loss_within, f"throughput {-validation.loss:+.1%}", f"{times}, {allowed}"),
        (validation.new_stalls == 0, "no new stalls", f"{validation.new_stalls} more than without"),
    ]
    head = f"shaper: {'PASS' if validation.passed else 'FAIL'} (rule 9.4; {validation.ranks} ranks, off and on in turn)"
    lines = [f"  {'pass' if ok else 'FAIL'}  {name}: {text}" for ok, name, text in rows]
    return "\n".join([head, *lines, *(f"  note  {note}" for note in validation.notes)])


def _show(validation: ShaperValidation, value: float) -> str:
    return format_power(value) if validation.unit == "W" else f"{value:.3g} {validation.unit}"
