"""Writes a run in the formats of other tools. Every exporter is a frozen value with `write(recording)`.

::

    Chrome("trace.json").write(open_recording("runs/train.tessera"))

An exporter's module is loaded when it is first used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...lazy_names import load_lazily

if TYPE_CHECKING:
    from ...recording import Recording
    from .chrome import Chrome as Chrome
    from .otlp import Otlp as Otlp
    from .parquet import Parquet as Parquet
    from .summary import SummaryCsv as SummaryCsv
    from .tensorboard import TensorBoard as TensorBoard

__all__ = ["Chrome", "Exporter", "Otlp", "Parquet", "SummaryCsv", "TensorBoard"]


load_lazily(
    __name__,
    {
        "chrome": "Chrome",
        "otlp": "Otlp",
        "parquet": "Parquet",
        "summary": "SummaryCsv",
        "tensorboard": "TensorBoard",
    },
)


class Exporter(Protocol):
    """An exporter writes a run in another format; `write` returns where."""

    def write(self, recording: Recording) -> Path | str: ...
