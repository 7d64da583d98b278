"""Chips that nobody measured here: what others published of them, and figures that the catalogue lacks."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import nn

import tessera
from tessera.device import Device
from tessera.errors import PredictionError
from tessera.estimate import attention_time, moe_time
from tessera.estimate.gemm import gemm_time
from tessera.estimate.kernel_time import KernelTime, chip
from tessera.estimate.ops import OpModel
from tessera.estimate.power import DeviceWork, PowerModel
from tessera.graph.capture import capture
from tessera.hardware import catalogue, lookup


def tflops(chip: str, n: int, precision: str) -> float:
    """Sustained TFLOP/s of a square product."""
    kernel = gemm_time(lookup(chip), n, n, n, precision=precision)
    return 2e-12 * n**3 / PowerModel.from_device(lookup(chip)).estimate(DeviceWork.of(kernel)).seconds


@pytest.mark.parametrize(
    ("chip", "n", "precision", "measured"),
    [  # github.com/zzc0721/torch-performance-test-data, issues 140 and 90; gist dirkgr/25aac9f8dc24
        ("v100", 8192, "fp32", 14.4),
        ("v100", 2048, "fp32", 12.7),
        ("v100", 8192, "bf16", 10.65),
        ("v100", 8192, "fp16", 97.4),
        ("t4", 8192, "bf16", 4.26),
        ("a100", 10240, "fp32", 17.7),
    ],
)
def test_products_of_older_chips(chip: str, n: int, precision: str, measured: float) -> None:
    assert tflops(chip, n, precision) == pytest.approx(measured, rel=0.2)


def test_a_chip_without_bf16_units_says_so() -> None:
    model, x = nn.Linear(64, 64).bfloat16(), torch.empty(8, 64, dtype=torch.bfloat16)
    report = tessera.predict(model, x, on="v100")
    assert "v100 has no bf16 units: bf16 products run on its fp32 vector units" in report.notes
    assert not any("units" in note for note in tessera.predict(model, x, on="h200").notes)
    cast = tessera.predict(nn.Linear(64, 64), torch.empty(8, 64), on="v100", precision="bf16")
    assert cast.notes == report.notes and cast.total == report.total, "a cast model runs as one that is in bf16"
    with pytest.raises(PredictionError, match="v100 has no fp8 units"):
        tessera.predict(model, x, on="v100", precision="fp8")


@pytest.mark.parametrize(
    ("chip", "precision"), [("h100", "fp4"), ("h100", "int4"), ("mi300x", "fp4"), ("a100", "fp8_block")]
)
def test_kernels_in_a_format_that_the_chip_lacks_are_refused(chip: str, precision: str) -> None:
    device, named = lookup(chip), precision.removesuffix("_block")
    with pytest.raises(PredictionError, match=f"{chip} has no {named} units"):
        gemm_time(device, 64, 64, 64, precision=precision)
    with pytest.raises(PredictionError, match=f"{chip} has no {named} units"):
        attention_time(device, 1, 8, 8, 64, 64, 64, True, precision)
    with pytest.raises(PredictionError, match=f"{chip} has no {named} units"):
        moe_time(device, 64, 64, 64, 2, 8, precision)
    assert attention_time(lookup("a100"), 1, 8, 8, 64, 64, 64, True, kv_precision="fp8", source="vllm").seconds > 0


def test_no_missing_figure_makes_a_chip_slow() -> None:
    graph = capture(torch.neg, (torch.empty(1 << 28, device="meta"),))
    (op,) = graph.kernels
    moved = 2.0 * 4 * (1 << 28)
    slow = {}
    for device in catalogue().values():
        if device.kind == "gpu" and device.memory.bandwidth_bytes_per_s is not None:
            seconds = OpModel(device).time(op, moved).seconds
            share = moved / seconds / device.memory.bandwidth_bytes_per_s.value
            if share < 0.8:
                slow[device.id] = share
    assert not slow


def test_assumed_figures_are_named() -> None:
    unknown = next(d for d in catalogue().values() if d.kind == "gpu" and d.units is None)
    report = tessera.predict(nn.Linear(8, 8), torch.empty(1, 8), on=unknown)
    assert "units (not in the catalogue)" in report.prediction.provenance["assumed"]


def test_every_chip_streams_at_the_share_of_its_bandwidth_that_was_measured() -> None:
    """0.905 on the H200: no chip without timings gets more, and no board is too weak for its own memory."""
    (op,) = capture(lambda x: x + 1, (torch.empty(1 << 30, device="meta"),)).kernels
    moved = 2.0 * 4 * (1 << 30)
    shares = {}
    for device in catalogue().values():
        if device.kind == "gpu" and device.memory.bandwidth_bytes_per_s is not None and device.tdp_w is not None:
            found = PowerModel.from_device(device).estimate(DeviceWork.of(OpModel(device).time(op, moved)))
            shares[device.id] = moved / found.seconds / device.memory.bandwidth_bytes_per_s.value
            assert found.clock > 0.97, device.id
    assert len(shares) > 30
    assert {name: share for name, share in shares.items() if not 0.89 < share < 0.91} == {}


def figures(device: Device) -> dict[str, float]:
    of = chip(device)
    numbers = {"units": of.units, "clock": of.clock_hz, "bandwidth": of.bandwidth, "l2": of.cache_bytes}
    # fp64 is cut on boards for export, and no kernel below runs in it.
    peaks = {f"{kind}.{name}": value for name, value, kind in of.peaks if name != "fp64"}
    return numbers | peaks | {"tdp": of.tdp_w or 0.0}


GPUS = [d for d in catalogue().values() if d.kind == "gpu" and d.memory.bandwidth_bytes_per_s and d.tdp_w]


def at_least(better: Device, than: Device) -> bool:
    a, b = figures(better), figures(than)
    return all(a.get(name, 0.0) >= value for name, value in b.items())


# A chip with timings of its own keeps them, whatever its relatives are predicted to take.
PAIRS = [
    (a, b)
    for a in GPUS
    for b in GPUS
    if a is not b and a.compute_capability and a.compute_capability == b.compute_capability and at_least(b, a)
    if not (chip(b).calibrated or chip(b).fitted)
]


def kernels_of(device: Device) -> Iterator[tuple[object, KernelTime]]:
    formats = [p for p in ("bf16", "fp8", "fp4", "fp32") if p in ("bf16", "fp32") or device.peak(p) is not None]
    for source in ("torch", "vllm"):
        for precision in formats:
            for shape in ((16, 4096, 4096), (512, 512, 512), (128, 28672, 8192), (8192, 8192, 8192)):
                yield (source, precision, shape), gemm_time(device, *shape, precision=precision, source=source)
        for call in (
            (4, 32, 32, 8192, 8192, 128, True),
            (64, 32, 8, 1, 8192, 128, False),
            (1, 32, 8, 1, 1024, 128, False),
        ):
            yield (source, call), attention_time(device, *call, source=source)
    (op,) = capture(lambda x: x + 1, (torch.empty(1 << 28, device="meta"),)).kernels
    yield "x + 1", OpModel(device).time(op, 2.0 * 4 * (1 << 28))


def test_the_pairs_of_relatives_are_known() -> None:
    assert {("b200", "gb200"), ("h100", "gh200"), ("a100", "a800")} <= {(a.id, b.id) for a, b in PAIRS}


@pytest.mark.parametrize(("worse", "better"), PAIRS, ids=lambda device: device.id)
def test_no_relative_is_slower_than_the_chip_it_exceeds(worse: Device, better: Device) -> None:
    a, b = dict(kernels_of(worse)), dict(kernels_of(better))
    limits = [PowerModel.from_device(device) for device in (worse, better)]
    for name in a.keys() & b.keys():
        slow, fast = (m.estimate(DeviceWork.of(k)).seconds for m, k in zip(limits, (a[name], b[name]), strict=True))
        assert b[name].seconds <= 1.01 * a[name].seconds, name
        assert fast <= 1.01 * slow, name


@pytest.mark.parametrize(
    ("name", "precision"), [("l4", "fp32"), ("gb200", "bf16"), ("a800", "bf16"), ("l40s", "bf16"), ("rtx-5090", "fp32")]
)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (8192, 28672), (1024, 8192)])
def test_more_rows_do_not_take_less_time_where_no_timing_says_so(name: str, precision: str, n: int, k: int) -> None:
    rows = (1, 2, 3, 4, 8, 16, 17, 32, 33, 64, 100, 128, 200, 256)
    seconds = [gemm_time(lookup(name), m, n, k, precision=precision).seconds for m in rows]
    assert all(more >= 0.99 * fewer for fewer, more in pairwise(seconds))


def test_one_row_is_not_slower_than_two_on_a_b200() -> None:
    one, two = (gemm_time(lookup("b200"), m, 8192, 28672).seconds for m in (1, 2))
    assert one <= 1.001 * two
