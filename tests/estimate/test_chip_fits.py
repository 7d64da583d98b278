"""Fits of chips with public timings: which fit a chip gets, what holds for every shape, a few public kernels."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tessera
from tessera.device import Device, Figure
from tessera.errors import ArgumentError, PredictionError
from tessera.estimate.attention import attention_time
from tessera.estimate.chip_fits import find_fit
from tessera.estimate.gemm import Product, find_constants, formula, gemm_time
from tessera.estimate.kernel_time import FITTED, KernelTime, chip
from tessera.estimate.kriging import Kriging, covariance
from tessera.estimate.moe import moe_time
from tessera.estimate.power import DeviceWork, PowerModel
from tessera.hardware import catalogue, lookup

NVIDIA = [d.id for d in catalogue().values() if d.memory.bandwidth_bytes_per_s is not None and chip(d).nvidia]
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
formats = st.sampled_from(  # of each chip those that it runs: others are refused (test_other_chips.py)
    [(n, f) for n in NVIDIA for f in ("bf16", "fp8", "fp8_block", "fp4") if f == "bf16" or chip(lookup(n)).peak(f)[2]]
)


def check(device: Device, kernel: KernelTime) -> None:
    """No kernel is faster than the chip, and its parts are parts of it."""
    of = chip(device)
    assert kernel.seconds >= of.least_s(kernel.flops, kernel.unit) * (1 - 1e-9)
    assert kernel.seconds >= kernel.hbm_bytes / of.bandwidth * (1 - 1e-9)
    assert 0 <= kernel.clock_s <= kernel.seconds * (1 + 1e-9)
    assert 0 <= kernel.overhead_s <= kernel.seconds * (1 + 1e-9)
    assert 0 <= kernel.busy <= 1
    assert 0 < kernel.relative_error < 1


@pytest.mark.parametrize(
    ("name", "kernel", "fitted_on"),
    [
        *((name, "bf16", name) for name in FITTED),
        ("gb200", "bf16", "b200"),
        ("gb300", "fp4", "b200"),
        ("rtx-5090", "fp8", "rtx-pro-6000"),
        ("a30", "bf16", "a100"),
        ("l40s", "bf16", "other"),
        ("a100", "fp8", "other"),
        ("gh200", "bf16", "h100"),
        ("h800", "bf16", "h100"),  # as much bandwidth; the H200's constants are those of chips with more
        ("h200", "fp8", "h100"),  # vLLM's fp8 products were not timed on it
    ],
)
def test_a_chip_gets_its_own_fit_or_that_of_its_nearest_relative(name: str, kernel: str, fitted_on: str) -> None:
    fit = find_fit(chip(lookup(name)), "gemm", kernel)
    assert fit is not None
    assert (fit.chip, fit.own) == (fitted_on, fitted_on == name)


@pytest.mark.parametrize(
    ("name", "kernel"), [("h200", "bf16"), ("h200-nvl", "bf16"), ("mi300x", "bf16"), ("l40s", "fp32")]
)
def test_where_the_h200s_constants_are_what_is_known_there_is_no_fit(name: str, kernel: str) -> None:
    assert find_fit(chip(lookup(name)), "gemm", kernel) is None


def test_a_board_with_other_figures_is_not_the_chip_that_was_fitted() -> None:
    own = lookup("b200")
    slower = dataclasses.replace(own, units=Figure(value=100.0, source="a test"))
    assert chip(own).fitted == "b200"
    assert chip(slower).fitted is None
    fit = find_fit(chip(slower), "gemm", "bf16")
    assert fit is not None
    assert not fit.own


def test_chips_that_run_one_library_share_its_constants() -> None:
    """FlashAttention-2 of Ampere, Ada and Blackwell for workstations is fitted apart from what data centres run."""
    ada, thor = (
        find_fit(dataclasses.replace(chip(lookup("l40s")), architecture=architecture), "attention", "decode.bf16")
        for architecture in ("ada", "blackwell")
    )
    assert ada is not None and thor is not None
    assert ada.constants != thor.constants and (ada.chip, thor.chip) == ("other", "other")


def test_a_relative_is_more_certain_than_a_stranger_and_less_than_the_chip_itself() -> None:
    call = (8, 32, 8, 1, 4096, 128, False)
    own, relative, stranger = (attention_time(lookup(n), *call, source="vllm") for n in ("b200", "gb200", "l40s"))
    assert own.relative_error < relative.relative_error < stranger.relative_error


def test_a_chip_that_was_not_measured_is_less_certain() -> None:
    shape = (2048, 4096, 4096)
    assert gemm_time(lookup("gb200"), *shape).relative_error > gemm_time(lookup("b200"), *shape).relative_error
    assert "carried over" in gemm_time(lookup("gb200"), *shape).provenance
    assert "fitted on public timings of the b200" in gemm_time(lookup("b200"), *shape).provenance


def test_a_relatives_share_of_the_peak_follows_its_watts() -> None:
    """The fewer watts a board has for its peak, the less of it a large product reaches."""
    own = lookup("gb200")
    starved = dataclasses.replace(own, tdp_w=Figure(value=600.0, source="a test"))
    full, less = (gemm_time(device, 8192, 8192, 8192, source="vllm").seconds for device in (own, starved))
    assert less > 1.1 * full
    assert chip(own).scale_efficiency(0.7, {}) == 0.7  # constants that say nothing of watts hold as they are


def test_a_relatives_launch_is_halfway_between_the_ways_to_time_it_but_no_later_than_its_own() -> None:
    """The B200 was timed in long loops, the RTX PRO 6000 in loops of six launches, of which the first is slow."""
    call, later = (1, 8, 8, 1, 16, 128, False), {}
    for name, relative in (("b200", "gb200"), ("rtx-pro-6000", "rtx-5090")):
        own, other = (find_fit(chip(lookup(n)), "attention", "decode.bf16") for n in (name, relative))
        assert own is not None and other is not None
        later[name] = other.constants["launch_us"] - own.constants["launch_us"]
        assert attention_time(lookup(relative), *call, source="vllm").seconds > 0
    assert later["b200"] == 0
    assert later["rtx-pro-6000"] == pytest.approx(-2.05, rel=0.01)


def test_near_shapes_err_alike_and_far_ones_not_at_all() -> None:
    points = np.array([[0.0, 0.0], [6.0, 0.0]])
    errors = np.array([0.2, -0.1])
    weights = np.linalg.solve(covariance(points, points), errors)
    data = {"features": [0, 2], "lengths": [2.0, 1.0], "points": 10 * points, "weights": weights, "bound": 0.15}
    correct = Kriging.of(data)
    at, beside, far = correct(np.array([[12.0, 9.0, 0.0], [11.8, 9.0, 0.0], [200.0, 9.0, 50.0]]))
    assert at == pytest.approx(-0.1)
    assert -0.1 < beside < -0.09
    assert far == pytest.approx(0.0, abs=1e-9)
    assert correct(np.zeros((1, 3)))[0] == 0.15, "held within its bound"


def test_a_loop_over_copies_of_the_weights_reads_them_from_device_memory() -> None:
    """Public loops are taken to have six copies: a cache of 134 MB holds 17 MB of weights, and not six times that."""
    of = chip(lookup("rtx-pro-6000"))
    fit = find_fit(of, "gemm", "bf16")
    assert fit is not None
    constants = {
        **find_constants(of, Product(1, 1, 1, 1, "bf16", source="vllm"))[0],
        "cache_kept": 0.5,
        "cache_spill": 0.1,
    }
    product = Product(64, 4096, 2048, 1, "bf16", source="vllm")
    once, six = (
        float(formula(constants | {"weight_copies": copies}, of, product)["hbm_bytes"]) for copies in (1.0, 6.0)
    )
    assert fit.constants["weight_copies"] == 6.0
    assert once == 0.0
    assert six == pytest.approx(2 * 4096 * 2048)  # the operand and the result are the same each time


def test_block_scaled_fp8_waits_for_the_host_of_its_architecture() -> None:
    ada, blackwell = (
        find_fit(dataclasses.replace(chip(lookup("l40s")), architecture=architecture), "gemm", "fp8_block")
        for architecture in ("ada", "blackwell")
    )
    assert ada is not None and blackwell is not None
    assert blackwell.constants["host_floor_s"] != ada.constants["host_floor_s"]


@pytest.mark.parametrize("shape", [(16, 8688, 496), (32, 3072, 512), (32, 4096, 512)])
def test_an_h100_is_not_slower_than_an_a100_in_fp32(shape: tuple[int, int, int]) -> None:
    """Both run the kernels whose errors were learned on the H200: what is learned there holds for both."""
    older, newer = (gemm_time(lookup(name), *shape, precision="fp32", bias=True).seconds for name in ("a100", "h100"))
    assert newer < older


@few
@given(
    run=formats,
    m=st.integers(1, 40000),
    n=st.integers(1, 60000),
    k=st.integers(1, 70000),
)
def test_products_of_vllm_are_never_faster_than_the_chip(run: tuple[str, str], m: int, n: int, k: int) -> None:
    device, precision = lookup(run[0]), run[1]
    check(device, gemm_time(device, m, n, k, precision=precision, source="vllm"))


@few
@given(
    name=st.sampled_from(NVIDIA),
    batch=st.integers(1, 512),
    kv_heads=st.sampled_from([1, 2, 8]),
    group=st.sampled_from([1, 4, 16]),
    queries=st.sampled_from([1, 16, 1000, 8192]),
    more=st.sampled_from([0, 512, 30000]),
    size=st.sampled_from([64, 128, 192, 256]),
    narrow=st.booleans(),
    window=st.sampled_from([None, 128]),
)
def test_attention_of_vllm_is_never_faster_than_the_chip(
    name: str, batch, kv_heads, group, queries, more, size, narrow, window
) -> None:
    device, heads, keys = lookup(name), kv_heads * group, queries + more
    options = {"kv_precision": "fp8" if narrow else "bf16", "window": window, "source": "vllm"}
    check(device, attention_time(device, batch, heads, kv_heads, queries, keys, size, queries > 1, **options))


@few
@given(
    run=formats,
    tokens=st.integers(1, 20000),
    width=st.sampled_from([64, 704, 2048]),
    experts=st.sampled_from([8, 64, 256]),
    topk=st.integers(1, 8),
    ranks=st.sampled_from([1, 4, 8]),
    skew=st.sampled_from([0.0, 1.01, 1.2]),
)
def test_experts_are_never_faster_than_the_chip(
    run: tuple[str, str], tokens, width, experts, topk, ranks, skew
) -> None:
    device, precision = lookup(run[0]), run[1]
    check(device, moe_time(device, tokens, 4096, width, topk, experts, precision, ranks=ranks, skew=skew))


# Rows of aiconfigurator's tables (Apache-2.0) that lie well inside the intervals, with the latency in milliseconds.
@pytest.mark.parametrize(
    ("name", "shape", "precision", "measured_ms"),
    [
        ("a100", (1024, 10240, 4096), "bf16", 0.306325),
        ("h100", (3072, 4096, 64), "fp8", 0.0371813),
        ("b200", (512, 51200, 65536), "fp4", 0.882975),
        ("rtx-pro-6000", (8, 4096, 65536), "fp4", 0.232475),  # k is not divided: one block walks all of it
    ],
)
def test_public_products(name: str, shape: tuple[int, int, int], precision: str, measured_ms: float) -> None:
    kernel = gemm_time(lookup(name), *shape, precision=precision, source="vllm")
    assert kernel.seconds * 1e3 == pytest.approx(measured_ms, rel=0.15)


def test_decoding_without_shared_keys_is_not_split_by_flash_attention_2() -> None:
    one = attention_time(lookup("a100"), 1, 1, 1, 1, 65536, 128, False, source="vllm")
    assert one.seconds == pytest.approx(1.526e-3, rel=0.25)  # 1,526 us on an A100, 30 times what its memory needs


def test_experts_wait_for_the_weights_that_tokens_reach() -> None:
    device = lookup("b200")
    few_tokens, many = (moe_time(device, n, 2048, 768, 8, 128, "fp8").seconds for n in (1, 160))
    assert few_tokens < 0.4 * many
    assert many == pytest.approx(190e-6, rel=0.35)


def test_wrong_experts_are_refused() -> None:
    with pytest.raises(ArgumentError, match="at most the experts"):
        moe_time(lookup("b200"), 8, 64, 64, 9, 8)
    with pytest.raises(PredictionError, match="NVIDIA"):
        moe_time(lookup("mi300x"), 8, 64, 64, 2, 8)


def test_watts_of_a_b200_are_those_that_were_read_on_one() -> None:
    own, carried = PowerModel.from_device(lookup("b200")), PowerModel.from_device(lookup("gb200"))
    assert "fitted on public readings" in own.provenance
    assert "carried over" in carried.provenance
    kernel = gemm_time(lookup("b200"), 8192, 8192, 8192, source="vllm")
    found = own.estimate(DeviceWork.of(kernel))
    assert 900 < found.power_w <= own.limit_w * (1 + 1e-9)  # 971 W is the median of 90 such products
    assert found.seconds < 1.1 * kernel.seconds  # timed at the limit, so the limit does not slow it once more


def test_under_the_limit_the_error_of_the_watts_counts() -> None:
    a = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    burst, held = (tessera.predict(lambda: a @ a, on="h100", launch="graph", state=s) for s in ("burst", "sustained"))
    assert burst.prediction.state == "burst"
    assert held.prediction.state == "sustained"
    assert held.prediction.clock < burst.prediction.clock
    relative = [report.prediction.error_s / report.total_latency_s for report in (burst, held)]
    assert relative[1] > relative[0] + 0.03


def test_a_state_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no state 'bursty'"):
        tessera.predict(lambda: torch.empty(4, device="meta") + 1, state="bursty")
