"""The joules of a recorded run: attribution, over the stretches of it that were traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..attribute.table import EnergyTable
    from ..timeline.columns import Timeline
    from .runfile import RunFile


def energy(run: RunFile, timeline: Timeline | None = None) -> EnergyTable:
    """What a run's joules were spent on.

    A timeline of which only some steps were traced is accounted for in those windows: outside them nobody knows what
    ran. Without a schedule windows follow one another, and what lies between belongs to the run (Kineto was restarted).
    `timeline` saves reading it again.
    """
    from ..attribute.solve import attribute

    rows = run.timeline() if timeline is None else timeline
    power = run.power()
    windows = sorted(run.get("windows") or [])
    if windows and run.get("scheduled"):
        return attribute(rows, power, windows=[(int(a), int(b)) for a, b in windows])
    if windows and run.get("mode") != "summary":
        return attribute(rows, power, start_ns=windows[0][0], end_ns=windows[-1][1])
    return attribute(rows, power, start_ns=power.start_ns, end_ns=power.end_ns)
