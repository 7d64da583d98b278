"""Rules about several ranks: which rank comes late to collectives, and what part of them nothing hides."""

from __future__ import annotations

from collections import Counter

from ..advice import Advice
from ..profile.ranks.collectives import sum_delays, total_wait_s
from ..timeline.transfers import ON_HOST
from ..timeline.view import collective_overlap_pct
from ..units import format_duration
from .devices import exposed_spans, list_devices
from .evidence import RunEvidence

COMMUNICATION_SHARE = 0.15
"""Share of the joules that collectives must spend, if it is not known how much of them runs beside kernels."""
EXPOSED_SHARE = 0.05
LATE_SHARE = 0.05
"""Share of the ranks' time for which the others must wait for one rank."""


def check_late_rank(run: RunEvidence) -> Advice | None:
    """Advise if one rank makes the others wait for 5% of their time or more, and longer than all other ranks do.

    The saving is the waiting: at best, that rank is as fast as the others.
    """
    delays_s = sum_delays(run.meetings)
    times = Counter(met.straggler for met in run.meetings)
    if not delays_s:
        return None
    rank, waited_s = max(delays_s.items(), key=lambda item: item[1])
    ranks = {rank for met in run.meetings for rank in met.ranks}
    whole_s = run.table.time_s * max(run.devices, len(ranks))
    if waited_s < max(LATE_SHARE * whole_s, 0.5 * sum(delays_s.values())):
        return None
    joules = waited_s * _watts_of_collectives(run)
    evidence = (
        f"rank {rank} comes last to {times[rank]} of {len(run.meetings)} collectives that several ranks traced, and "
        f"the others wait {format_duration(waited_s, 3)} for it ({waited_s / whole_s:.0%} of the ranks' time)"
    )
    action = (
        f"find out why rank {rank} is slower: more work than the others (longer sequences, more experts), lower clocks "
        "(heat, a power limit), a slower host or disk"
    )
    return run.advise(
        "late rank", joules, evidence, action, saves=(joules, waited_s), by="energy table", confidence="high"
    )


def check_communication(run: RunEvidence) -> Advice | None:
    """Advise if collectives run with nothing computing beside them, for 5% of the joules (15% if overlap is unknown).

    The saving is the joules of the time they were alone, without what they waited for the last rank: at best, all of it
    is hidden.
    """
    joules, _ = run.sum_kernels(lambda r: r.kind == "collective")
    if joules <= 0.0:
        return None
    action = "overlap it with compute, or send less (larger buckets, bf16 gradients, accumulation)"
    if run.calls is None or run.timeline is None:
        if run.share(joules) < COMMUNICATION_SHARE:
            return None
        return run.advise("communication", joules, f"collectives spend {run.format_amount(joules)}", action)
    overlap = collective_overlap_pct(run.timeline, run.calls.rows)
    places = {int(r): i for i, r in enumerate(run.calls.rows.tolist()) if int(r) in overlap}
    alone = {row: 1.0 - pct / 100.0 for row, pct in overlap.items()}
    exposed_s = (
        sum(exposed_spans(run.timeline, d.rows, "collective").total_ns for d in list_devices(run.timeline)) * 1e-9
    )
    exposed_j = exposed_s
    if run.has_joules:
        exposed_j = sum(float(run.joules[i]) * alone[row] for row, i in places.items())
    exposed, waited_s = run.format_spent(exposed_j), total_wait_s(run.meetings)
    moving = max(0.0, 1.0 - waited_s / exposed_s) if exposed_s > 0 else 1.0
    if run.share(moving * exposed_j) < EXPOSED_SHARE:
        return None
    evidence = f"collectives spend {run.format_amount(joules)}, {exposed} of it without any kernel at the same time"
    if waited_s > 0.1 * exposed_s:
        evidence += f" ({format_duration(waited_s, 3)} waiting for the last rank)"
    action += "; reduce-scatter and sharded optimizers send half, hierarchical rings stay within a node"
    saves = (moving * exposed_j, moving * exposed_s)
    return run.advise("communication", joules, evidence, action, saves=saves, by="energy table", confidence="medium")


def _watts_of_collectives(run: RunEvidence) -> float:
    """Return the watts of collectives; without power, a second stands for a joule. Gloo's collectives are operators."""
    joules, seconds = run.sum_kernels(lambda r: r.kind == "collective")
    if not run.table.kernels:
        on_host = [r for r in run.table.ops if r.name.startswith(ON_HOST)]
        joules, seconds = sum(r.energy_j for r in on_host), sum(r.time_s for r in on_host)
    return joules / seconds if seconds > 0 else 0.0
