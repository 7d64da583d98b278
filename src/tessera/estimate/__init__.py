"""Predict what a program will take before it runs: seconds, joules, watts and bytes, with their errors.

::

    report = tessera.predict(model, inputs, on="h200")              # the whole answer

    parts = GraphPartitioner().partition(fx_graph)                  # or its parts, alone and together
    roofline = RooflineAnalyzer("a100").analyze(parts.subgraphs, parts)
    seconds = [x.actual_latency for x in roofline.latencies]
    energy = EnergyAnalyzer("a100").analyze(parts.subgraphs, parts, latencies=seconds)

Names are loaded when first used; nothing here imports torch before a model is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import load_lazily

if TYPE_CHECKING:
    from ..graph.partition import GraphPartitioner as GraphPartitioner
    from ..graph.partition import PartitionReport as PartitionReport
    from ..graph.partition import Subgraph as Subgraph
    from ..schema import EnergyDescriptor as EnergyDescriptor
    from ..schema import EnergyReport as EnergyReport
    from ..serving.estimate import estimate_serving as serving  # noqa: F401
    from .attention import attention_time as attention_time
    from .concurrency import ConcurrencyAnalyzer as ConcurrencyAnalyzer
    from .concurrency import ConcurrencyReport as ConcurrencyReport
    from .energy import EnergyAnalyzer as EnergyAnalyzer
    from .gemm import gemm_time as gemm_time
    from .host import HostModel as HostModel
    from .memory import MemoryEstimator as MemoryEstimator
    from .memory import MemoryReport as MemoryReport
    from .moe import moe_time as moe_time
    from .ops import Precision as Precision
    from .predict import predict as predict
    from .roofline import RooflineAnalyzer as RooflineAnalyzer
    from .roofline import RooflineReport as RooflineReport
    from .search import Sweep as Sweep
    from .search import batch_for as batch_for
    from .search import power_curve as power_curve
    from .search import sweep as sweep

__all__ = load_lazily(  # noqa: PLE0605 - a list of strings, which the linter cannot see
    __name__,
    {
        ".graph.partition": "GraphPartitioner PartitionReport Subgraph",
        ".schema": "EnergyDescriptor EnergyReport",
        ".serving.estimate": "serving=estimate_serving",  # of a later room, which knows links between GPUs
        "attention": "attention_time",
        "concurrency": "ConcurrencyAnalyzer ConcurrencyReport",
        "energy": "EnergyAnalyzer",
        "gemm": "gemm_time",
        "host": "HostModel",
        "memory": "MemoryEstimator MemoryReport",
        "moe": "moe_time",
        "ops": "Precision",
        "predict": "predict",
        "roofline": "RooflineAnalyzer RooflineReport",
        "search": "Sweep batch_for power_curve sweep",
    },
)
