"""What the numbers mean: from a trace to the reason.

::

    from tessera import analyze

    analyze.breakdown(trace="trace.json.gz")        # compute, communication, copies, idle and why
    analyze.roofline(trace=sess, arch="sm90")       # intensity against the ceilings, FLOP/s and FLOP/J
    analyze.diff("before.tessera", "after.tessera") # what changed, and whether it is noise

Each takes a run file, a Kineto trace, a folder of ranks, a session or a timeline, and returns a table with
`to_frame()`, `to_json()` and a notebook view. `KINDS` are what `tessera analyze KIND` offers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advice import advise as advise
    from .allocations import memory as memory
    from .change import diff as diff
    from .comms import collectives as collectives
    from .copies import memcpy as memcpy
    from .critical import critical_path as critical_path
    from .roofs import roofline as roofline
    from .spenders import kernels as kernels
    from .temporal import breakdown as breakdown
    from .temporal import overlap as overlap
    from .warps import divergence as divergence
    from .warps import stalls as stalls
    from .watts import power as power

# Name -> the module that has the function. No module has the name of a function: importing it would hide the function.
_WHERE = {
    "advise": "advice",
    "breakdown": "temporal",
    "collectives": "comms",
    "critical_path": "critical",
    "diff": "change",
    "divergence": "warps",
    "kernels": "spenders",
    "memcpy": "copies",
    "memory": "allocations",
    "overlap": "temporal",
    "power": "watts",
    "roofline": "roofs",
    "stalls": "warps",
}
KINDS = tuple(k for k in _WHERE if k != "diff")

__all__ = ["KINDS", *_WHERE]  # noqa: PLE0604

if not TYPE_CHECKING:  # a checker that saw it would take every misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name in _WHERE:
            return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
        raise AttributeError(f"module 'tessera.analyze' has no attribute {name!r}")
