"""Programs made cheaper and explained: `optimize` (torch.compile's passes and ours), checkpointing, reordering.

::

    patterns, spectral ─► inductor (torch.compile) ─► watch ─► sides (seen, prices) ─► savings ─► Rewrite
                              ways ─► candidates (check, measure, choose) ─► Optimized
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("checkpoint", "fused_conv", "inplace", "masks", "reorder")


def __getattr__(name: str) -> Any:
    """`tessera.rewrite.checkpoint` without an import of its own, loaded when first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)
