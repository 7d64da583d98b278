"""Where a model stands under the roofs of a chip: what bounds each subgraph, and how near to it it runs.

python examples/roofline.py [CHIP] [PRECISION]
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import torch
from torch import nn

from tessera.estimate.roofline import RooflineAnalyzer, RooflineReport
from tessera.graph.partition import GraphPartitioner


def network() -> nn.Module:
    """A small convolutional classifier."""
    layers: dict[str, nn.Module] = {}
    for i, (inside, outside) in enumerate(((3, 64), (64, 128), (128, 256))):
        layers[f"conv{i}"] = nn.Conv2d(inside, outside, 3, stride=2, padding=1)
        layers[f"bn{i}"], layers[f"relu{i}"] = nn.BatchNorm2d(outside), nn.ReLU()
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "head": nn.Linear(256, 1000)}
    return nn.Sequential(OrderedDict(layers))


def show(title: str, report: RooflineReport) -> None:
    print(f"\n{title}: {report.total_latency * 1e6:.0f} µs, mostly under the {report.critical_ceiling} ceiling")
    print(f"  {'subgraph':16} {'µs':>7} {'bound by':>9} {'FLOP/byte':>10} {'TFLOP/s':>8} {'of the roof':>11}")
    for d in report.latencies:
        print(
            f"  {d.subgraph_name[:16]:16} {d.actual_latency * 1e6:7.1f} {d.bottleneck:>9}"
            f" {d.arithmetic_intensity:10.1f} {d.attained_flops * 1e-12:8.2f} {d.utilization:11.0%}"
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
    ridges = {name: value for name, value in found.ridge_points.items() if name.endswith(precision)}
    print("\nridge point:", ", ".join(f"{name} {value:.0f} FLOP/byte" for name, value in ridges.items()))


if __name__ == "__main__":
    main()
