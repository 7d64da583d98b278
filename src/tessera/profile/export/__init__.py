"""A run in other tools' forms. Every exporter is a frozen value with `write(recording)`; nothing is loaded before use.

::

    Chrome("trace.json").write(open_recording("runs/train.tessera"))
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ...recording import Recording
    from .chrome import Chrome as Chrome
    from .otlp import Otlp as Otlp
    from .parquet import Parquet as Parquet
    from .summary import SummaryCsv as SummaryCsv
    from .tensorboard import TensorBoard as TensorBoard

_LAZY = {
    "Chrome": ".chrome",
    "Otlp": ".otlp",
    "Parquet": ".parquet",
    "SummaryCsv": ".summary",
    "TensorBoard": ".tensorboard",
}

__all__ = ["Chrome", "Exporter", "Otlp", "Parquet", "SummaryCsv", "TensorBoard"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Exporter(Protocol):
    """Anything that writes a run in another form; says where it went."""

    def write(self, recording: Recording) -> Path | str: ...
