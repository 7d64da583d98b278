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

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

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

_MODULES = {
    "advise": "advise",
    "breakdown": "breakdown",
    "collectives": "collectives",
    "critical_path": "critical_path",
    "diff": "diff",
    "divergence": "kernels",
    "kernels": "kernels",
    "launches": "launches",
    "memcpy": "memory",
    "memory": "memory",
    "modules": "module_tree",
    "overlap": "breakdown",
    "phases": "phases",
    "power": "power",
    "roofline": "roofline",
    "sequences": "sequences",
    "stalls": "kernels",
}
KINDS = tuple(k for k in _MODULES if k != "diff")

__all__ = ["KINDS", *_MODULES]  # noqa: PLE0604


class _Analyses(ModuleType):
    """The type of this package: the module `roofline` never hides the function `roofline`.

    Importing a submodule sets it as an attribute of its package. Here the function wins.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Analyses

if not TYPE_CHECKING:  # a type checker that saw it would accept every misspelt name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        raise AttributeError(f"module 'tessera.analyze' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
