"""What to do about a run's joules: every rule there is, applied; the most joules saved first.

`analyze.advise`, the screen and the page all show this list. A rule is silent below a share that is worth a user's
time, so that a healthy run has no findings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..attribute.table import EnergyTable
from ..device import Device
from ..schema import Telemetry
from ..timeline.columns import Timeline
from ..trace import PowerTrace
from . import rules_host, rules_kernels, rules_warps
from .evidence import SAVES as SAVES
from .evidence import Case
from .evidence import Finding as Finding
from .host_gaps import HostGap
from .slowdown import Slowdown

RULES: tuple[Callable[[Case], Finding | None], ...] = (
    rules_host.idle,
    rules_host.launch,
    rules_host.outside,
    rules_kernels.fp32,
    rules_kernels.unaligned,
    rules_kernels.low_tensor_use,
    rules_kernels.accumulators,
    rules_kernels.copies,
    rules_kernels.fuse,
    rules_kernels.communication,
    rules_warps.low_occupancy,
    rules_warps.uncoalesced,
    rules_warps.diverging,
    rules_host.outliers,
    rules_host.throttled,
    rules_host.spikes,
    rules_host.one,
)
"""All rules; each says in its docstring when it speaks and how its saving is computed."""


_OF_KERNELS = frozenset(
    {"fp32", "unaligned", "low tensor use", "accumulators", "low occupancy", "uncoalesced", "divergence"}
)
COVERED = 0.5
"""Where a rule about kernels speaks of half of what the dearest operator spends, "start there" adds nothing."""


def findings(
    table: EnergyTable,
    telemetry: Mapping[str, Sequence[Telemetry]],
    gaps: Sequence[HostGap] = (),
    *,
    timeline: Timeline | None = None,
    power: PowerTrace | None = None,
    arch: str | Device | None = None,
    tracing: Slowdown | None = None,
) -> list[Finding]:
    """All that stands out, most joules saved first; [] when nothing does. With a timeline, savings are computed.

    `tracing` is what the tracer did: what a device waited for it is in no finding.
    """
    if not table.total_j > 0:
        return []
    case = Case(table=table, telemetry=telemetry, gaps=gaps, timeline=timeline, power=power, arch=arch, tracing=tracing)
    found = [f for rule in RULES if (f := rule(case)) is not None]
    kernels_j = max((f.energy_j for f in found if f.kind in _OF_KERNELS), default=0.0)
    found = [f for f in found if f.kind != "one operator" or kernels_j < COVERED * f.energy_j]
    return sorted(found, key=_order, reverse=True)


def _order(finding: Finding) -> Any:
    return finding.saves_j, finding.energy_j
