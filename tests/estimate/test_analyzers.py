"""The analyzers alone and together: seconds, joules, bytes, parallelism of subgraphs, and what physics asks of them."""

from __future__ import annotations

import itertools
import json
import runpy
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tessera.errors import ArgumentError, PredictionError
from tessera.estimate.concurrency import ConcurrencyAnalyzer
from tessera.estimate.energy import EnergyAnalyzer
from tessera.estimate.memory import Allocator, MemoryEstimator, round_size, scratch_bytes, workspaces
from tessera.estimate.ops import Precision, recast
from tessera.estimate.roofline import LatencyDescriptor, RooflineAnalyzer
from tessera.graph.capture import capture
from tessera.graph.partition import GraphPartitioner, PartitionReport
from tessera.hardware import lookup

from models import Block, Branches, Residual, mlp
from places import REPOSITORY

CHIPS = ("h200", "a100", "l4", "jetson-orin", "mi300x", "epyc-9654")
MIB = 1 << 20


def cut(model: nn.Module, *shape: int, fusion: bool = False, **kwargs: object) -> PartitionReport:
    graph = capture(model, torch.empty(*shape, device="meta"), **kwargs)  # type: ignore[arg-type]
    return GraphPartitioner(fusion=fusion).partition(graph)


@pytest.fixture(scope="module")
def net() -> PartitionReport:
    return cut(Residual(32), 8, 3, 32, 32)


@pytest.fixture(scope="module")
def block() -> PartitionReport:
    return cut(Block(256, 8), 4, 128, 256)


# -- roofline ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", CHIPS)
def test_every_subgraph_has_a_latency(chip: str, net: PartitionReport) -> None:
    found = RooflineAnalyzer(chip).analyze(net.subgraphs, net)
    assert [d.subgraph_name for d in found.latencies] == [s.name for s in net.subgraphs]
    for d in found.latencies:
        assert d.actual_latency > 0
        assert d.actual_latency >= max(d.compute_s, d.memory_s, d.overhead_s)
        assert d.actual_latency >= 0.9 * d.compute_bound_s  # quoted peaks may be at a lower clock than boost
        assert d.bottleneck in ("compute", "memory", "overhead")
        assert 0.0 <= d.utilization <= 1.0 and 0.0 < d.clock <= 1.0
    assert found.total_latency_s == pytest.approx(sum(d.actual_latency for d in found.latencies))
    assert found.critical_ceiling in ("compute", "memory", "overhead")
    assert 0.0 <= found.average_utilization <= 1.0


def test_ridge_points_are_peak_over_bandwidth() -> None:
    a100 = lookup("a100")
    found = RooflineAnalyzer(a100).analyze([])
    assert found.latencies == () and found.total_latency_s == 0.0
    peak, bandwidth = a100.peak("bf16", "matrix"), a100.memory.bandwidth_bytes_per_s
    assert peak and bandwidth
    assert found.ridge_points["matrix.bf16"] == pytest.approx(peak.value / bandwidth.value)


def test_a_large_product_is_bound_by_compute_and_a_copy_by_memory() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x).neg()

    report = cut(Two(), 8192, 8192, precision="bf16")
    product, negation = RooflineAnalyzer("h200").analyze(report.subgraphs, report).latencies
    assert (product.bottleneck, negation.bottleneck) == ("compute", "memory")
    assert product.utilization > 0.5 and negation.utilization > 0.5
    assert product.attained_flops > 100 * max(1.0, negation.attained_flops)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_roof_is_the_side_of_the_ridge_point(chip: str, net: PartitionReport, block: PartitionReport) -> None:
    sides = set()
    for report in (net, block, cut(mlp(8192, 8192), 8192, 8192, precision="bf16")):
        found = RooflineAnalyzer(chip).analyze(report.subgraphs, report)
        for d in found.latencies:
            ridge = found.ridge_points.get(d.unit)
            if ridge is None:  # a chip without that unit: the product runs on another, and has no ridge of its own
                continue
            assert d.roof == ("compute" if d.arithmetic_intensity > ridge else "memory"), d
            sides.add(d.roof)
            assert d.reason
    assert sides == {"compute", "memory"}


def test_what_holds_a_kernel_back_is_said_where_it_is_not_its_roof() -> None:
    def made(**parts: Any) -> LatencyDescriptor:
        return LatencyDescriptor(
            subgraph_name="s",
            actual_latency=1.0,
            arithmetic_intensity=1.0,
            attained_flops=1.0,
            attained_bandwidth=1.0,
            utilization=0.1,
            error_s=0.0,
            overhead_s=0.0,
            **parts,
        )

    layouts = made(bottleneck="memory", memory_s=0.8, compute_s=0.3, memory_bound_s=0.2, compute_bound_s=0.3)
    assert (layouts.roof, layouts.reason) == ("compute", "4.0 times its bytes (other layouts, a lower rate)")
    plain = made(bottleneck="memory", memory_s=0.22, compute_s=0.0, memory_bound_s=0.2, compute_bound_s=0.0)
    assert (plain.roof, plain.reason) == ("memory", "its bytes")
    cached = made(bottleneck="memory", memory_s=0.1, compute_s=0.0, memory_bound_s=0.2, compute_bound_s=0.0)
    assert cached.reason == "its bytes, partly from the cache"
    norm = made(bottleneck="compute", memory_s=0.2, compute_s=0.3, memory_bound_s=0.2, compute_bound_s=0.0)
    assert (norm.roof, norm.reason) == ("memory", "instructions for each element, no FLOPs")
    small = made(bottleneck="compute", memory_s=0.2, compute_s=0.3, memory_bound_s=0.2, compute_bound_s=0.1)
    assert (small.roof, small.reason) == ("memory", "3.0 times its FLOPs (tiles, waves, padding)")
    tiny = made(bottleneck="overhead", memory_s=0.2, compute_s=0.3, memory_bound_s=0.2, compute_bound_s=0.1)
    assert tiny.reason == "too little work to fill the chip"


def test_lower_precision_is_faster() -> None:
    report = cut(mlp(4096, 4096, 4096), 4096, 4096)
    seconds = {
        p: RooflineAnalyzer("h200", p).analyze(report.subgraphs, report).total_latency_s
        for p in (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP8)
    }
    assert seconds[Precision.FP32] > seconds[Precision.TF32] > seconds[Precision.BF16] > seconds[Precision.FP8]


def test_fused_is_not_slower(net: PartitionReport, block: PartitionReport) -> None:
    for report in (net, block):
        fused = GraphPartitioner(fusion=True).partition(report.graph)
        slow = RooflineAnalyzer("h200").analyze(report.subgraphs, report).total_latency_s
        assert RooflineAnalyzer("h200").analyze(fused.subgraphs, fused).total_latency_s < slow


def test_names_are_checked(net: PartitionReport) -> None:
    with pytest.raises(ArgumentError, match="did you mean 'a100'"):
        RooflineAnalyzer("aa100")
    with pytest.raises(ArgumentError, match="did you mean 'a100'"):
        EnergyAnalyzer("aa100")
    with pytest.raises(ArgumentError, match="no precision 'fp33'"):
        RooflineAnalyzer("h200", "fp33")
    with pytest.raises(ArgumentError, match="expected subgraphs"):
        RooflineAnalyzer("h200").analyze(net)  # type: ignore[arg-type]


@pytest.mark.parametrize("analyzer", [RooflineAnalyzer, EnergyAnalyzer])
def test_a_precision_the_chip_lacks(analyzer: type) -> None:
    with pytest.raises(PredictionError, match="a100 has no fp8") as caught:
        analyzer("a100", Precision.FP8)
    assert "bf16" in str(caught.value) and "tf32" in str(caught.value)


# -- energy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", CHIPS)
def test_components_sum_and_power_is_physical(chip: str, net: PartitionReport, block: PartitionReport) -> None:
    tdp = lookup(chip).tdp_w
    assert tdp is not None
    for report in (net, block):
        found = EnergyAnalyzer(chip).analyze(report.subgraphs, report)
        assert found.basis == "predicted" and found.prediction is not None
        assert found.average_power_w is not None and 0 < found.average_power_w <= tdp.value
        assert found.compute_energy_j is not None and found.memory_energy_j is not None
        assert found.static_energy_j is not None and found.wasted_energy_j is not None
        parts = found.compute_energy_j + found.memory_energy_j + found.static_energy_j
        assert parts == pytest.approx(found.total_energy_j, rel=1e-14)
        assert 0 <= found.wasted_energy_j <= found.static_energy_j
        assert found.total.error_j > 0
        for d in found.descriptors:
            assert min(d.compute_energy_j, d.memory_energy_j, d.static_energy_j) >= 0
            assert d.total_energy_j <= 1.0001 * tdp.value * d.latency_s
            assert 0 <= d.utilization <= 1 and 0 <= d.efficiency <= 1


def test_latencies_agree_with_the_roofline(net: PartitionReport) -> None:
    roofline = RooflineAnalyzer("a100").analyze(net.subgraphs, net)
    alone = EnergyAnalyzer("a100").analyze(net.subgraphs, net)
    given_ = EnergyAnalyzer("a100").analyze(
        net.subgraphs, net, latencies=[d.actual_latency for d in roofline.latencies]
    )
    assert alone.total_latency_s == pytest.approx(roofline.total_latency_s)
    assert given_.total_energy_j == pytest.approx(alone.total_energy_j)


def test_static_energy_follows_a_given_latency(net: PartitionReport) -> None:
    own = EnergyAnalyzer("a100").analyze(net.subgraphs, net)
    longer = [2 * d.latency_s for d in own.descriptors]
    found = EnergyAnalyzer("a100").analyze(net.subgraphs, net, latencies=longer)
    assert [d.latency_s for d in found.descriptors] == longer
    assert found.static_energy_j == pytest.approx(2 * (own.static_energy_j or 0))
    assert found.compute_energy_j == pytest.approx(own.compute_energy_j)
    assert (found.average_utilization or 0) < (own.average_utilization or 0)


@pytest.mark.parametrize("slower", [None, 1.5])
def test_subgraphs_have_opportunities(slower: float | None) -> None:
    report = cut(mlp(1024, 1024), 64, 1024)
    own = EnergyAnalyzer("a100").analyze(report.subgraphs, report)
    given_ = None if slower is None else [slower * d.latency_s for d in own.descriptors]
    made = EnergyAnalyzer("a100").analyze(report.subgraphs, report, latencies=given_)
    found = {o.kind: o for o in made.opportunities()}
    assert found.keys() >= {"quantise"} and all(0 < o.saves_j < made.total_energy_j for o in found.values())
    assert made.prediction is not None and made.prediction.again is not None
    narrow = made.prediction.again(precision="bf16")
    other = EnergyAnalyzer("a100", "bf16").analyze(report.subgraphs, report)
    wanted = [(slower or 1.0) * d.latency_s for d in other.descriptors]
    assert [d.latency_s for d in narrow.descriptors] == pytest.approx(wanted)
    with pytest.raises(ArgumentError, match="without batch"):
        made.prediction.again(batch=8)


def test_no_latency_passes_the_power_limit() -> None:
    report = cut(mlp(8192, 8192), 8192, 8192, precision="bf16")
    found = EnergyAnalyzer("h200").analyze(report.subgraphs, report, latencies=[1e-6])
    assert found.average_power_w is not None and found.average_power_w <= 700.0
    assert found.total_latency_s > 1e-6


@pytest.mark.parametrize("wrong", [[1.0], [-1.0] * 12, [float("nan")] * 12])
def test_wrong_latencies(wrong: list[float], net: PartitionReport) -> None:
    with pytest.raises(ArgumentError):
        EnergyAnalyzer("a100").analyze(net.subgraphs, net, latencies=wrong)


def test_precision_does_not_change_the_limit() -> None:
    report = cut(mlp(8192, 8192), 8192, 8192)
    for precision in ("fp32", "tf32", "fp16", "int8"):
        found = EnergyAnalyzer("a100", precision).analyze(report.subgraphs, report)
        assert found.peak_power_w is not None and found.peak_power_w <= 400.0


_SIZES = st.integers(1, 64).map(lambda n: 32 * n)


@settings(max_examples=30, deadline=None)
@given(rows=_SIZES, inner=_SIZES, columns=_SIZES, chip=st.sampled_from(CHIPS))
def test_energy_is_positive_sums_and_grows_with_work(rows: int, inner: int, columns: int, chip: str) -> None:
    small, large = cut(mlp(inner, columns), rows, inner), cut(mlp(inner, columns), 4 * rows, inner)
    analyzer = EnergyAnalyzer(chip)
    one, more = (analyzer.analyze(report.subgraphs, report) for report in (small, large))
    assert 0 < one.total_energy_j < more.total_energy_j
    for found in (one, more):
        parts = (found.compute_energy_j or 0) + (found.memory_energy_j or 0) + (found.static_energy_j or 0)
        assert parts == pytest.approx(found.total_energy_j, rel=1e-14)
    twice = analyzer.analyze([*small.subgraphs, *small.subgraphs])
    assert twice.total_energy_j == pytest.approx(2 * analyzer.analyze(small.subgraphs).total_energy_j)


# -- precision --------------------------------------------------------------------------------------------------


def test_precisions_are_our_strings() -> None:
    assert Precision.FP32 == "fp32" and Precision("bf16") is Precision.BF16
    assert str(Precision.INT8) == "int8"


def test_recast_halves_the_bytes(net: PartitionReport) -> None:
    conv = net.subgraphs[0].main
    half = recast(conv, "bf16")
    assert half.bytes_in * 2 == conv.bytes_in and half.bytes_out * 2 == conv.bytes_out
    assert (half.precision, half.unit) == ("bf16", "matrix")
    assert recast(conv, "fp32").precision == conv.precision  # TF32 stays what cuDNN does with fp32
    assert recast(half, "fp32").bytes_in == conv.bytes_in
    assert recast(conv, None) is conv


# -- memory -----------------------------------------------------------------------------------------------------


def test_blocks_are_reused_and_split() -> None:
    a = Allocator()
    assert a.allocate(0, 1) == 512 and round_size(513) == 1024
    assert a.allocate(1, 3 * MIB) == 3 * MIB and a.reserved == 22 * MIB
    a.release(1)
    assert a.allocate(2, 2 * MIB) == 2 * MIB and a.reserved == 22 * MIB
    assert a.allocate(3, 11 * MIB + 512) == 11 * MIB + 512  # what is left of the first segment
    assert a.allocate(4, 0) == 0 and a.allocate(3, 5) == 0
    assert a.allocated == 512 + 13 * MIB + 512


def test_a_large_block_keeps_less_than_a_mebibyte_too_much() -> None:
    a = Allocator()
    assert a.allocate(0, 11 * MIB + MIB // 2) == 12 * MIB
    a.release(0)
    assert a.allocate(1, 2 * MIB) == 2 * MIB and a.reserved == 12 * MIB


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30 * MIB)), max_size=60))
def test_the_allocator_loses_nothing(requests: list[tuple[int, int]]) -> None:
    a, held = Allocator(), {}
    for key, nbytes in requests:
        if key in held:
            a.release(key)
            del held[key]
        else:
            held[key] = a.allocate(key, nbytes)
            assert round_size(nbytes) <= held[key] <= round_size(nbytes) + MIB
        assert a.allocated == sum(held.values()) <= a.reserved
    for key in held:
        a.release(key)
    assert a.allocated == 0


def test_peak_of_a_perceptron_by_hand() -> None:
    report = MemoryEstimator("h200").estimate(capture(mlp(1024, 4096, 1024), torch.empty(512, 1024)))
    weights = 2 * 1024 * 4096 * 4 + 4096 * 4 + 1024 * 4
    hidden, out = 512 * 4096 * 4, 512 * 1024 * 4
    # The activation reads the first product and writes its own: both live, beside the weights and the input.
    assert report.peak_bytes == weights + out + 2 * hidden + 33 * MIB
    assert report.by_category == {
        "weights": weights,
        "inputs": out,
        "activations": 2 * hidden,
        "workspace": 33 * MIB,
    }
    assert report.fits and report.headroom_bytes == (report.capacity_bytes or 0) - report.peak_bytes
    assert report.peak_op == "1.relu" and max(report.timeline) == report.peak_bytes


def test_training_holds_gradients_and_states() -> None:
    model, x = mlp(256, 512, 10), torch.empty(64, 256)
    infer, sgd, adamw = (
        MemoryEstimator().estimate(capture(model, x, mode=mode, optimizer=optimizer))  # type: ignore[arg-type]
        for mode, optimizer in (("infer", "sgd"), ("train", "sgd"), ("train", "adamw"))
    )
    assert infer.peak_bytes < sgd.peak_bytes < adamw.peak_bytes
    assert adamw.by_category["optimizer"] > 1.9 * sgd.by_category["optimizer"]
    for report in (infer, sgd, adamw):
        assert sum(report.by_category.values()) == report.peak_bytes <= report.reserved_bytes
        assert len(report.timeline) > 0 and report.fits is None


def test_what_stays_in_a_kernel_takes_no_memory() -> None:
    graph = capture(Residual(64), torch.empty(16, 3, 32, 32))
    plain, fused = (GraphPartitioner(fusion=f).partition(graph) for f in (False, True))
    assert MemoryEstimator().estimate(plain).peak_bytes == MemoryEstimator().estimate(graph).peak_bytes
    assert MemoryEstimator().estimate(fused).peak_bytes < MemoryEstimator().estimate(plain).peak_bytes


def test_too_large_for_the_chip() -> None:
    with torch.device("meta"):
        model, x = mlp(16384, 65536, 131072), torch.empty(1, 16384)
    report = MemoryEstimator("l4").estimate(capture(model, x))
    assert report.fits is False and (report.headroom_bytes or 0) < 0
    assert json.loads(report.to_json())["fits"] is False


def test_layout_copies_of_convolutions() -> None:
    x = torch.empty(4, 32, 16, 16, device="meta")
    plain = capture(nn.Conv2d(32, 32, 3, padding=1), x, precision="bf16").ops[0]
    assert scratch_bytes(plain) == (2 * 4 * 32 * 16 * 16 + 32 * 32 * 9) * 2
    last = capture(nn.Conv2d(32, 32, 3, padding=1), x.to(memory_format=torch.channels_last), precision="bf16").ops[0]
    assert scratch_bytes(last) == 0


def test_workspaces_by_chip_and_thread() -> None:
    x = torch.empty(8, 64, device="meta")
    infer, train = capture(mlp(64, 64), x), capture(mlp(64, 64), x, mode="train")
    assert workspaces(infer, lookup("h200")) == [32 * MIB, MIB]
    assert workspaces(train, lookup("h200")) == [32 * MIB, 32 * MIB, MIB]
    assert workspaces(infer, lookup("a100")) == [8 * MIB + 128 * 1024, MIB]
    assert workspaces(infer, lookup("epyc-9654")) == []


# -- concurrency ------------------------------------------------------------------------------------------------


def test_stages_and_the_critical_path() -> None:
    report = cut(Branches(64), 4, 64)
    found = ConcurrencyAnalyzer().analyze(report)
    assert [s.width for s in found.stages] == [3, 2, 1] and found.max_width == 3
    assert found.mean_width == 2.0 and found.cost_unit == "FLOP" and found.mean_occupancy is None
    linear = 2 * 4 * 64 * 64
    assert found.critical_path_cost == 2 * linear and found.total_cost == 4 * linear
    assert found.speedup_bound == 2.0 and found.stages[0].speedup == 3.0
    path = [report.subgraphs[i] for i in found.critical_path]
    assert all(a.index in b.depends_on for a, b in itertools.pairwise(path))


def test_tiles_in_waves() -> None:
    report = cut(mlp(4096, 4096), 4096, 4096, precision="bf16")
    found = ConcurrencyAnalyzer("h200").analyze(report)
    (tiles,) = found.tiles
    assert (tiles.tiles, tiles.units, tiles.waves) == (1024, 132, 8)
    assert tiles.occupancy == pytest.approx(1024 / (8 * 132)) and found.cost_unit == "s"
    assert json.loads(json.dumps(found.to_dict()))["max_width"] == 1


@pytest.mark.parametrize("chip", [None, "a100"])
def test_no_schedule_beats_the_critical_path(chip: str | None, block: PartitionReport) -> None:
    found = ConcurrencyAnalyzer(chip).analyze(block)
    assert 0 < found.critical_path_cost <= found.total_cost * (1 + 1e-12)
    assert sum(s.longest for s in found.stages) >= found.critical_path_cost * (1 - 1e-12)
    assert sorted(i for s in found.stages for i in s.subgraphs) == list(range(len(block)))


# -- examples ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"), [("roofline", "ridge point"), ("memory", "GiB left"), ("concurrency", "critical path")]
)
def test_examples_run(
    name: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = REPOSITORY / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert words in capsys.readouterr().out


# -- without torch ----------------------------------------------------------------------------------------------


def test_analyzers_import_without_torch() -> None:
    parts = ["concurrency", "energy", "memory", "ops", "roofline"]
    code = (
        "import sys; sys.modules['torch'] = None; import tessera.graph.partition, tessera.graph.fusion, "
        + ", ".join(f"tessera.estimate.{part}" for part in parts)
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
