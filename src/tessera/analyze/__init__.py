"""What the numbers mean: from a trace to the reason.

::

    from tessera import analyze

    analyze.breakdown(trace="trace.json.gz")        # compute, communication, copies, idle and why
    analyze.roofline(trace=sess, arch="sm90")       # intensity against the ceilings, FLOP/s and FLOP/J
    analyze.diff("before.tessera", "after.tessera") # what changed, and whether it is noise

Each takes a run file, a Kineto trace, a folder of ranks, a session or a timeline, and returns a table with
`to_frame()`, `to_dict()`, `to_json()` and a notebook view. `KINDS` are what `tessera analyze KIND` offers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import load_lazily

if TYPE_CHECKING:
    from .advise import advise as advise
    from .breakdown import breakdown as breakdown
    from .breakdown import overlap as overlap
    from .collectives import collectives as collectives
    from .critical_path import critical_path as critical_path
    from .diff import diff as diff
    from .kernels import divergence as divergence
    from .kernels import kernels as kernels
    from .kernels import stalls as stalls
    from .launches import launches as launches
    from .memory import memcpy as memcpy
    from .memory import memory as memory
    from .module_tree import modules as modules
    from .phases import phases as phases
    from .power import power as power
    from .roofline import roofline as roofline
    from .sequences import sequences as sequences

_NAMES = load_lazily(
    __name__,
    {
        "advise": "advise",
        "breakdown": "breakdown overlap",
        "collectives": "collectives",
        "critical_path": "critical_path",
        "diff": "diff",
        "kernels": "divergence kernels stalls",
        "launches": "launches",
        "memory": "memcpy memory",
        "module_tree": "modules",
        "phases": "phases",
        "power": "power",
        "roofline": "roofline",
        "sequences": "sequences",
    },
)
KINDS = tuple(sorted(name for name in _NAMES if name != "diff"))

__all__ = ["KINDS", *_NAMES]  # noqa: PLE0604
