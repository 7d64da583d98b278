"""A model on the roofline of a chip: the limit of each subgraph, and how much of it is reached.

python examples/roofline.py [CHIP] [PRECISION]
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import torch
from torch import nn

from tessera.estimate.roofline import LatencyDescriptor, RooflineAnalyzer, RooflineReport
from tessera.graph.partition import GraphPartitioner

NOTE = """
roof     memory below the ridge point of the unit that computes, compute above it
reached  bytes/s or FLOP/s, as the roof is; bytes from the cache may come faster than the roof (100%)
held by  the longest part of the kernel model, beside what its own bytes or FLOPs would take at the peak. It need not be
         the roof: a convolution may be held by bytes that are not its own (tensors brought to another layout and back),
         a norm by instructions. What cuDNN makes of a convolution's shape comes on top"""


def network() -> nn.Module:
    """A small convolutional classifier."""
    layers: dict[str, nn.Module] = {}
    for i, (inside, outside) in enumerate(((3, 64), (64, 128), (128, 256))):
        layers[f"conv{i}"] = nn.Conv2d(inside, outside, 3, stride=2, padding=1)
        layers[f"bn{i}"], layers[f"relu{i}"] = nn.BatchNorm2d(outside), nn.ReLU()
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "head": nn.Linear(256, 1000)}
    return nn.Sequential(OrderedDict(layers))


def reached(d: LatencyDescriptor) -> str:
    """What it reaches, in the unit of its roof."""
    if d.roof == "compute":
        return f"{d.attained_flops * 1e-12:.1f} TFLOP/s"
    return f"{d.attained_bandwidth * 1e-12:.2f} TB/s"


def show(title: str, report: RooflineReport) -> None:
    print(f"\n{title}: {report.total_latency_s * 1e6:.0f} µs, mostly limited by {report.critical_ceiling}")
    print(f"  {'subgraph':16} {'µs':>6} {'FLOP/byte':>9} {'roof':>8} {'reached':>13} {'of it':>6}  limited by")
    for d in report.latencies:
        print(
            f"  {d.subgraph_name[:16]:16} {d.actual_latency * 1e6:6.1f} {d.arithmetic_intensity:9.1f} {d.roof:>8}"
            f" {reached(d):>13} {d.utilization:6.0%}  {d.bottleneck}: {d.reason}"
        )


def main() -> None:
    chip = sys.argv[1] if len(sys.argv) > 1 else "a100"
    precision = sys.argv[2] if len(sys.argv) > 2 else "bf16"
    graph = torch.fx.symbolic_trace(network())
    analyzer = RooflineAnalyzer(chip, precision)
    for fusion in (False, True):
        report = GraphPartitioner(fusion=fusion).partition(graph, inputs=torch.empty(32, 3, 224, 224, device="meta"))
        found = analyzer.analyze(report.subgraphs, report)
        show(f"{chip}, {precision}, {'fused' if fusion else 'one kernel per operator'}", found)
    used = dict.fromkeys(d.unit for d in found.latencies if d.compute_bound_s)
    ridges = [f"{unit} {found.ridge_points[unit]:.0f} FLOP/byte" for unit in used if unit in found.ridge_points]
    print(f"\nridge point: {', '.join(ridges)}\n{NOTE}")


if __name__ == "__main__":
    main()
