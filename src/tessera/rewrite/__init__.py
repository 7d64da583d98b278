"""Make programs cheaper and explain how: `optimize` (torch.compile's passes and ours), checkpointing, reordering.

::

    optimize ─► variants ─► inductor (torch.compile, with `passes` before it) ─► compilation
                   │                                                                  │
         program, compare, state                                savings (kernel_times, program_cost)
      (run, check, put back), measure                                                 │
                                                                                   Rewrite
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("checkpoint", "fused_conv", "reorder")


def __getattr__(name: str) -> Any:
    """Load `tessera.rewrite.checkpoint` and the others when first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)
