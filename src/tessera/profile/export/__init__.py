"""A run in other tools' forms. Every exporter is a frozen value with `write(run, table)`; nothing is loaded before use.

::

    Chrome("trace.json").write(RunFile("runs/train.tessera"), table)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Exporter as Exporter
    from .chrome import Chrome as Chrome
    from .otlp import Otlp as Otlp
    from .parquet import Parquet as Parquet
    from .summary import Summary as Summary
    from .tensorboard import TensorBoard as TensorBoard

_LAZY = {
    "Chrome": ".chrome",
    "Exporter": ".base",
    "Otlp": ".otlp",
    "Parquet": ".parquet",
    "Summary": ".summary",
    "TensorBoard": ".tensorboard",
}

__all__ = ["Chrome", "Exporter", "Otlp", "Parquet", "Summary", "TensorBoard"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
