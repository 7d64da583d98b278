"""The kernel models: what holds for every shape and chip, and a few measured kernels they must come near."""

import dataclasses
import json
import math
from importlib import resources

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tessera.errors import ArgumentError, PredictionError
from tessera.estimate.attention import attention_time, count_pairs
from tessera.estimate.chip_fits import find_fit
from tessera.estimate.gemm import gemm_time
from tessera.estimate.kernel_time import ELEMENT_BYTES, FITTED, KernelTime, chip
from tessera.estimate.power import DeviceWork, PowerModel
from tessera.hardware import catalogue, lookup

H200, A100 = lookup("h200"), lookup("a100")
# Without their memory's bandwidth nothing can be predicted, and it says so.
UNKNOWN = [device for device in catalogue().values() if device.memory.bandwidth_bytes_per_s is None]
DEVICES = [device for device in catalogue().values() if device not in UNKNOWN]

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
eights = st.integers(1, 1024).map(lambda i: 8 * i)
precisions = st.sampled_from(["bf16", "fp16", "fp8", "fp8_block", "tf32", "fp32", "int8", "fp64"])
shares = st.floats(0, 1)


def sound(kernel: KernelTime) -> None:
    numbers = [v for v in dataclasses.asdict(kernel).values() if isinstance(v, float)]
    assert all(math.isfinite(v) and v >= 0 for v in numbers), kernel
    assert 0 < kernel.seconds < 1e5
    assert kernel.clock_s <= kernel.seconds * (1 + 1e-9)
    assert kernel.overhead_s <= kernel.seconds
    assert 0 <= kernel.busy <= 1
    assert 0 < kernel.relative_error < 1
    assert kernel.provenance


# ---------------------------------------------------------------- matrix products
@few
@given(
    m=st.integers(1, 20000), n=st.integers(1, 60000), k=st.integers(1, 20000), batch=st.integers(1, 64), p=precisions
)
def test_a_product_is_never_faster_than_the_chip(m: int, n: int, k: int, batch: int, p: str) -> None:
    for device in (H200, A100) if p not in ("fp8", "fp8_block") else (H200, lookup("b200")):
        kernel = gemm_time(device, m, n, k, batch, p)
        sound(kernel)
        of = chip(device)
        peak = of.peak(p)[0] * of.boost_over_quoted
        assert kernel.flops == pytest.approx(2.0 * m * n * k * batch)
        assert kernel.flops / kernel.seconds <= peak
        assert kernel.hbm_bytes / kernel.seconds <= of.bandwidth


@few
@given(
    m=eights,
    n=eights,
    k=eights,
    which=st.integers(0, 2),
    device=st.sampled_from(DEVICES),
    p=st.sampled_from(["bf16", "fp32"]),
)
def test_doubling_a_dimension_never_saves_time(m: int, n: int, k: int, which: int, device, p: str) -> None:
    doubled = [m, n, k]
    doubled[which] *= 2
    before, after = gemm_time(device, m, n, k, 1, p).seconds, gemm_time(device, *doubled, 1, p).seconds
    # Where a correction was learned it follows what was measured, which is not monotone to the last tenth.
    fitted = p == "bf16" and find_fit(chip(device), "gemm", "bf16") is not None
    learned = fitted or "with residual" in gemm_time(device, m, n, k, 1, p).provenance
    assert after >= before * (0.75 if learned else 1 - 1e-9)


@few
@given(m=eights, n=eights, k=eights)
def test_cold_operands_take_no_less_time(m: int, n: int, k: int) -> None:
    size = 2.0 * (m * k + n * k + m * n)
    warm, cold = (gemm_time(A100, m, n, k, hbm_bytes=b).seconds for b in (0.0, size))
    assert cold >= warm * (1 - 1e-9)


def test_rows_that_do_not_start_at_16_bytes_are_slow() -> None:
    odd, even = gemm_time(H200, 8192, 50257, 768), gemm_time(H200, 8192, 50304, 768)
    assert 4 < odd.seconds / even.seconds < 12
    assert (
        gemm_time(H200, 50257, 768, 8192, layout="tn").seconds
        > 3 * gemm_time(H200, 50304, 768, 8192, layout="tn").seconds
    )


def test_misaligned_rows_of_the_result_alone_cost_less() -> None:
    head = gemm_time(H200, 4096, 30522, 768)  # BERT's vocabulary: pieces of two elements, in the result only
    assert head.seconds == pytest.approx(779e-6, rel=0.15)
    both = gemm_time(H200, 4096, 30522, 770)
    assert both.seconds > 1.2 * head.seconds


@pytest.mark.parametrize(
    ("shape", "layout", "us"),
    [  # h200_heldout and heldout5 traces: rows of whole 8 bytes, which Hopper's own kernels cannot load
        ((1536, 8960, 7020), "nn", 820.0),
        ((7020, 8960, 1536), "tn", 808.9),
        ((49152, 196, 384), "nt", 50.1),
        ((49152, 384, 196), "nt", 66.9),
    ],
)
def test_rows_of_whole_8_bytes_run_on_older_kernels(shape: tuple[int, int, int], layout: str, us: float) -> None:
    assert gemm_time(H200, *shape, layout=layout).seconds == pytest.approx(us * 1e-6, rel=0.2)


@pytest.mark.parametrize(
    ("shape", "precision", "layout", "measured_s"),
    [  # shared/h200/kernels.jsonl and kernels_more.jsonl, less 0.9 us of one-kernel graphs
        ((8192, 8192, 8192), "bf16", "nn", 1.649e-3),
        ((4096, 4096, 4096), "bf16", "nn", 0.2068e-3),
        ((8192, 8192, 8192), "fp32", "nn", 21.446e-3),
        ((8192, 8192, 8192), "tf32", "nn", 3.186e-3),
        ((8192, 8192, 8192), "fp8", "nt", 0.9165e-3),
        ((128, 4096, 4096), "bf16", "nn", 12.7e-6),
        ((8192, 3072, 768), "bf16", "nt", 66.8e-6),
    ],
)
def test_measured_products(shape: tuple[int, int, int], precision: str, layout: str, measured_s: float) -> None:
    kernel = gemm_time(H200, *shape, precision=precision, layout=layout)
    found = PowerModel.from_device(H200).estimate(DeviceWork.of(kernel))
    assert found.seconds == pytest.approx(measured_s, rel=0.12)


def test_the_big_bf16_product_meets_the_power_limit() -> None:
    found = PowerModel.from_device(H200).estimate(DeviceWork.of(gemm_time(H200, 8192, 8192, 8192, layout="nn")))
    assert found.seconds == pytest.approx(1.649e-3, rel=0.1)
    assert found.energy_j == pytest.approx(1.136, rel=0.1)
    assert found.clock < 1.0
    assert 1.3e9 < found.clock * 1.98e9 < 1.8e9  # 1545 MHz measured
    assert found.power_w == pytest.approx(690, abs=5)


@pytest.mark.parametrize("wrong", [{"m": 0}, {"precision": "fp17"}, {"source": "tensorrt"}, {"layout": "xx"}])
def test_wrong_products_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        gemm_time(H200, **({"m": 8, "n": 8, "k": 8} | wrong))


# ---------------------------------------------------------------- attention
@few
@given(
    batch=st.integers(1, 64),
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 8),
    q=st.integers(1, 4096),
    more=st.integers(0, 4096),
    d=st.sampled_from([32, 64, 80, 96, 128, 256]),
    causal=st.booleans(),
    p=st.sampled_from(["bf16", "fp16", "fp32"]),
    backward=st.booleans(),
    mask=st.booleans(),
    source=st.sampled_from(["torch", "vllm"]),
)
def test_attention_is_never_faster_than_the_chip(
    batch, kv_heads, group, q, more, d, causal, p, backward, mask, source
) -> None:
    for device in (H200, A100):
        kernel = attention_time(
            device,
            batch,
            kv_heads * group,
            kv_heads,
            q,
            q + more,
            d,
            causal,
            p,
            backward=backward,
            mask=mask,
            source=source,
        )
        sound(kernel)
        assert kernel.flops / kernel.seconds <= chip(device).peak(p)[0] * chip(device).boost_over_quoted


@few
@given(q=st.integers(1, 40), kv=st.integers(1, 40), causal=st.booleans(), window=st.none() | st.integers(1, 50))
def test_pairs_are_counted(q: int, kv: int, causal: bool, window: int | None) -> None:
    assume(kv >= q or not causal)
    counted = 0
    for i in range(q):
        seen = kv - q + 1 + i if causal else kv
        counted += min(seen, window or kv)
    found = float(count_pairs(float(q), float(kv), causal, math.inf if window is None else float(window)))  # type: ignore[arg-type]
    assert found == pytest.approx(counted)


@pytest.mark.parametrize(
    ("args", "backward_too", "measured_s"),
    [  # shared/h200/kernels.jsonl, kernels_more.jsonl, benchmarks/data/h200_ops.jsonl.gz
        ((1, 32, 32, 8192, 8192, 128, True), False, 1.0152e-3),
        ((4, 32, 32, 2048, 2048, 128, True), False, 297e-6),
        ((8, 12, 12, 1024, 1024, 64, True), True, 194.6e-6),
        ((16, 32, 32, 1, 2048, 128, False), False, 123.8e-6),
    ],
)
def test_measured_attention(args: tuple[int, ...], backward_too: bool, measured_s: float) -> None:
    work = DeviceWork.of(attention_time(H200, *args))
    if backward_too:
        work += DeviceWork.of(attention_time(H200, *args, backward=True))
    assert PowerModel.from_device(H200).estimate(work).seconds == pytest.approx(measured_s, rel=0.15)


def test_wrong_attention_is_refused() -> None:
    with pytest.raises(ArgumentError):
        attention_time(H200, 1, 8, 8, 0, 8, 64, True)
    with pytest.raises(ArgumentError):
        attention_time(H200, 1, 8, 8, 8, 8, 64, True, source="sglang")


# ---------------------------------------------------------------- power
works = st.builds(
    DeviceWork,
    clock_s=st.floats(0, 1),
    fixed_s=st.floats(0, 1),
    idle_s=st.floats(0, 1),
    busy_s=st.just(0.0),
    flops=st.dictionaries(st.sampled_from(["matrix.bf16", "vector.fp32", "matrix.fp4"]), st.floats(0, 1e15)),
    hbm_bytes=st.floats(0, 1e13),
    l2_bytes=st.floats(0, 1e13),
)


@few
@given(work=works, share=shares, device=st.sampled_from(DEVICES), switching=st.floats(0.1, 1))
def test_power_stays_under_the_limit_and_the_parts_add_up(
    work: DeviceWork, share: float, device, switching: float
) -> None:
    work = dataclasses.replace(work, busy_s=share * (work.clock_s + work.fixed_s))
    model = PowerModel.from_device(device)
    found = model.estimate(work, switching=switching)
    assert found.energy_j == found.static_j + found.compute_j + found.memory_j
    assert min(found.static_j, found.compute_j, found.memory_j) >= 0
    assert found.seconds >= work.seconds * (1 - 1e-9)
    assert found.power_w <= model.limit_w * (1 + 1e-6)
    assert 0 < found.clock <= 1
    assert device.tdp_w is not None
    assert model.limit_w <= device.tdp_w.value


@few
@given(
    work=works, share=shares, what=st.sampled_from(["clock_s", "fixed_s", "idle_s", "hbm_bytes", "l2_bytes", "flops"])
)
def test_more_work_never_takes_less_energy_or_time(work: DeviceWork, share: float, what: str) -> None:
    work = dataclasses.replace(work, busy_s=share * (work.clock_s + work.fixed_s))
    extra = {"matrix.bf16": 1e13} if what == "flops" else max(1e-6, getattr(work, what))
    more = {what: extra} | ({"busy_s": share * extra} if what in ("clock_s", "fixed_s") else {})
    model = PowerModel.from_device(H200)
    before, after = model.estimate(work), model.estimate(work + DeviceWork(**more))
    assert after.seconds >= before.seconds * (1 - 1e-5)  # the clock is found by bisection
    assert after.energy_j >= before.energy_j * (1 - 1e-5)


def test_work_is_never_negative() -> None:
    with pytest.raises(ArgumentError):
        DeviceWork(clock_s=-1.0)
    assert PowerModel.from_device(H200).estimate(DeviceWork()).power_w == 0.0


@few
@given(m=st.integers(1, 16384), n=st.integers(1, 16384), k=st.integers(1, 16384))
def test_an_a100_draws_at_most_400_w(m: int, n: int, k: int) -> None:
    found = PowerModel.from_device(A100).estimate(DeviceWork.of(gemm_time(A100, m, n, k, 1, "fp16")))
    assert 55 <= found.power_w <= 400


# ---------------------------------------------------------------- every chip of the catalogue
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.id)
def test_every_device_is_predicted(device) -> None:
    model = PowerModel.from_device(device)
    for precision in ("bf16", "fp16", "fp32", *(["int8"] if device.peak("int8") is not None else [])):
        kernel = gemm_time(device, 2048, 2048, 2048, 1, precision)
        sound(kernel)
        assert model.estimate(DeviceWork.of(kernel)).power_w <= model.limit_w * (1 + 1e-6)
        native = device.peak(precision) is not None
        calibrated = chip(device).calibrated or chip(device).fitted is not None
        assert kernel.relative_error >= (0.02 if calibrated else 0.2 if native else 0.3)
    sound(attention_time(device, 2, 8, 8, 512, 512, 64, True, "fp16"))


def test_a_device_without_bandwidth_says_so() -> None:
    device = dataclasses.replace(
        H200, id="unheard-of", memory=dataclasses.replace(H200.memory, bandwidth_bytes_per_s=None)
    )
    with pytest.raises(PredictionError, match="bandwidth") as caught:
        gemm_time(device, 8, 8, 8)
    assert caught.value.fix


def test_operating_points_scale() -> None:
    slow, fast = lookup("jetson-orin@15W"), lookup("jetson-orin")
    assert gemm_time(slow, 1024, 1024, 1024).seconds > gemm_time(fast, 1024, 1024, 1024).seconds
    assert PowerModel.from_device(slow).limit_w < PowerModel.from_device(fast).limit_w


def test_the_data_files_say_where_they_come_from_and_stay_small() -> None:
    total = 0
    scripts = {f"h200_{name}": "fit_kernels.py" for name in ("power", "gemm", "attention")}
    scripts |= {f"{name}_kernels": "fit_chips.py" for name in (*FITTED, "other")}
    for name, script in scripts.items():
        text = (resources.files("tessera.estimate") / "data" / f"{name}.json").read_text(encoding="utf-8")
        total += len(text)
        assert script in json.loads(text)["provenance"]
    assert total < 700_000


def test_every_precision_has_a_size() -> None:
    for precision, size in ELEMENT_BYTES.items():
        device = H200 if chip(H200).peak(precision)[2] else lookup("a40" if precision == "int4" else "b200")
        kernel = gemm_time(device, 8192, 8192, 8192, 1, precision)
        sound(kernel)
        assert kernel.hbm_bytes >= 2 * 8192**2 * size, precision  # both operands are read once, at their size


@pytest.mark.parametrize(("m", "n", "k", "us"), [(50, 768, 768, 22.0), (50, 768, 3072, 46.6), (128, 768, 768, 28.3)])
def test_an_fp32_product_of_few_rows_with_a_bias_is_slow(m: int, n: int, k: int, us: float) -> None:
    """cuBLASLt divides k little where it adds a bias; `us` as traced in models on an H200 (h200_dev_traces)."""
    plain, biased = (gemm_time(lookup("h200"), m, n, k, precision="fp32", bias=bias) for bias in (False, True))
    assert biased.seconds == pytest.approx(1e-6 * us, rel=0.15)
    assert plain.seconds < 0.8 * biased.seconds


def test_a_bias_costs_16_bit_products_little() -> None:
    for m in (1, 50, 4096):
        plain, biased = (gemm_time(lookup("h200"), m, 4096, 4096, bias=bias).seconds for bias in (False, True))
        assert biased == pytest.approx(plain, rel=0.1)


@pytest.mark.parametrize(
    ("m", "n", "k", "us"),
    [
        (197, 768, 3072, 97.7),  # tiles for more than every SM: k is not divided
        (392, 512, 2048, 63.9),
        (8, 1000, 384, 6.1),  # a kernel for few rows
        (8, 640, 1280, 14.1),
        (12, 80, 1536, 8.9),
    ],
)
def test_an_fp32_product_with_a_bias_divides_k_by_its_tiles(m: int, n: int, k: int, us: float) -> None:
    """`us` as traced in models on an H200 (h200_heldout_traces and heldout4)."""
    assert gemm_time(lookup("h200"), m, n, k, precision="fp32", bias=True).seconds == pytest.approx(1e-6 * us, rel=0.4)
