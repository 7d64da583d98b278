"""Spikes and what they fall on, as text and as a page's fragment: the conclusion first, then spike by spike."""

from __future__ import annotations

from html import escape

from ..analyze.correlate import ChecklistAnswer, Correlation, describe_alignment
from ..analyze.kernel_names import fit, short
from ..analyze.spikes import Spike, format_level
from ..units import format_duration, format_power
from .run_parts import prose

SHOWN = 10
"""Spikes in the text; the highest, in time order. `Correlation.spikes` has all."""
_MARKS = {"yes": "yes", "no": "no ", "unknown": "?  "}


def text(found: Correlation) -> str:
    """One screen."""
    lines = [_headline(found)]
    lines += [_spike(s, found.start_ns) for s in _highest(found)]
    if len(found.spikes) > SHOWN:
        lines.append(f"... and {len(found.spikes) - SHOWN} lower ones")
    lines += ["", *(f"  {describe_alignment(a)}" for a in found.aligned if a.verdict == "aligned")]
    for answer in found.checklist:
        lines += _answer(answer)
    lines += [f"note: {n}" for n in found.notes]
    return "\n".join(lines)


def html(found: Correlation) -> str:
    """A table of the spikes and the checklist, without scripts or outside resources."""
    spikes = "".join(f"<li>{escape(_spike(s, found.start_ns))}</li>" for s in _highest(found))
    rows = "".join(
        f"<tr><td>{escape(a.question)}</td><td><b>{a.verdict}</b></td><td>{prose(a.evidence)}"
        f"{f'<br><i>needs {prose(a.needs)}</i>' if a.needs else ''}</td></tr>"
        for a in found.checklist
    )
    notes = "".join(f"<p>{prose(n)}</p>" for n in found.notes)
    return f"<div><p><b>{escape(_headline(found))}</b></p><ul>{spikes}</ul><table>{rows}</table>{notes}</div>"


def _headline(found: Correlation) -> str:
    span_s = (found.end_ns - found.start_ns) * 1e-9
    where = f"{found.domain}, {format_duration(span_s)}, mean {format_power(found.mean_w)}"
    count = len(found.spikes)
    if count == 0:
        return f"no spike above {format_level(found.threshold_w)} ({where})"
    above_s = sum(s.time_s for s in found.spikes)
    return (
        f"{count} spike{'s' if count > 1 else ''} above {format_level(found.threshold_w)},"
        f" {format_duration(above_s)} in all ({where}; times are within {format_duration(found.reach_s)})"
    )


def _highest(found: Correlation) -> list[Spike]:
    top = sorted(found.spikes, key=lambda s: -s.peak_w)[:SHOWN]
    return sorted(top, key=lambda s: s.start_ns)


def _spike(spike: Spike, start_ns: int) -> str:
    parts = [
        f"spike {spike.number}: {format_power(spike.peak_w)} at +{(spike.peak_ns - start_ns) * 1e-9:.3f} s"
        f" for {format_duration(spike.time_s)}"
    ]
    if spike.rise_w_per_s is not None:
        parts[0] += f", rising {format_power(spike.rise_w_per_s)}/s"
    for kernel in spike.kernels[:2]:
        often = "seen in spikes only" if kernel.lift is None else f"{kernel.lift:.1f}x as common in spikes as outside"
        parts.append(f"{fit(short(kernel.name, kernel.kind), 60)} (overlap {kernel.share:.0%}), {often}")
    parts += [f"{b.kind} {b.offset_s * 1e3:+.0f} ms" for b in spike.boundaries[:1]]
    if spike.throttle:
        parts.append(f"then throttled: {', '.join(spike.throttle)}")
    if spike.clock_before_mhz and spike.clock_after_mhz:
        parts.append(f"clock {spike.clock_before_mhz:.0f} -> {spike.clock_after_mhz:.0f} MHz")
    return "; during ".join(parts[:2]) + "".join(f"; {p}" for p in parts[2:])


def _answer(answer: ChecklistAnswer) -> list[str]:
    lines = [f"[{_MARKS[answer.verdict]}] {answer.question} {answer.evidence}"]
    return lines + ([f"      needs {answer.needs}"] if answer.needs else [])
