"""Roofline, stalls, divergence: FLOPs against torch's own counter, ceilings by hand, counters of a recorded H200."""

from __future__ import annotations

import json
import re
from math import prod

import numpy as np
import pytest

from tessera.analyze.kernel_work import list_calls
from tessera.analyze.kernels import divergence, stalls
from tessera.analyze.roofline import Ceilings, find_device, roofline
from tessera.attribute.work import work_of
from tessera.errors import ArgumentError
from tessera.hardware import lookup
from tessera.profile.counters import merge, ncu
from tessera.report import run_analyses
from tessera.timeline import Builder, Launch, Timeline, kineto

from places import REPOSITORY, TESTS

DATA = TESTS / "data" / "counters"
GPT2 = REPOSITORY.parent / "shared" / "h200" / "gpt2_train.kineto.json.gz"
T0 = 1_790_000_000_000_000_000
GEMM = "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_TNT"
FLASH = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"


def timeline(
    *calls: tuple[str, str, str, float], device: str | None = "NVIDIA H200", watts: float | None = None
) -> Timeline:
    """One kernel after another: (operator, shapes, kernel, microseconds)."""
    b, now = Builder(), T0
    for number, (op, shapes, kernel, us) in enumerate(calls, start=1):
        end = now + round(us * 1000)
        said = {"shapes": b.intern(shapes)} if shapes else {}
        b.add("op", op, now, now + 500, thread=1, external=number, **said)
        b.add("kernel", kernel, now, end, device=0, stream=7, external=number)
        now = end + 1000
    if device:
        b.meta["deviceProperties"] = [{"id": 0, "name": device}]
    made = b.build()
    if watts is not None:
        spends = made["kind"] == 0
        made.energy_j = np.where(spends, watts * (made["end_ns"] - made["start_ns"]) * 1e-9, np.nan)
    return made


# -- work of operators ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "shapes", "flops", "moved"),
    [
        ("aten::mm", "[8,16]bf16 [16,4]bf16", 2 * 8 * 16 * 4, 2 * (8 * 16 + 16 * 4 + 8 * 4)),
        ("aten::addmm", "[4]bf16 [8,16]bf16 [16,4]bf16", 2 * 8 * 16 * 4, 2 * (4 + 8 * 16 + 16 * 4 + 8 * 4)),
        ("aten::bmm", "[3,8,16]f16 [3,16,4]f16", 3 * 2 * 8 * 16 * 4, 2 * 3 * (8 * 16 + 16 * 4 + 8 * 4)),
        ("aten::baddbmm", "[3,8,4]f16 [3,8,16]f16 [3,16,4]f16", 3 * 2 * 8 * 16 * 4, None),
        ("aten::linear", "[2,8,16]f16 [4,16]f16 [4]f16", 2 * 2 * 8 * 16 * 4, None),
        ("aten::_scaled_mm", "[8,16]f8e4m3 [16,4]f8e4m3 []f32 []f32", 2 * 8 * 16 * 4, 8 * 16 + 16 * 4 + 2 * 8 * 4),
        ("aten::mv", "[8,16]f32 [16]f32", 2 * 8 * 16, None),
        ("aten::matmul", "[2,3,8,16]f32 [2,3,16,4]f32", 6 * 2 * 8 * 16 * 4, None),
        ("aten::_scaled_dot_product_flash_attention", " ".join(["[2,3,8,4]bf16"] * 3), 4 * 2 * 3 * 8 * 8 * 4,
         4 * 2 * prod((2, 3, 8, 4))),
        ("aten::_flash_attention_forward", "[2,8,3,4]bf16 [2,8,3,4]bf16 [2,8,3,4]bf16", 4 * 2 * 3 * 8 * 8 * 4, None),
        ("aten::_scaled_dot_product_cudnn_attention_backward", " ".join(["[2,3,8,4]bf16"] * 5), 10 * 2 * 3 * 8 * 8 * 4,
         8 * 2 * prod((2, 3, 8, 4))),
        ("aten::add", "[8,16]bf16 [8,16]bf16", 128, 3 * 256),
        ("aten::mul", "[8,16]bf16 []f64", 128, 2 * 256 + 8),
        ("aten::copy_", "[8,16]f32 [8,16]bf16", 0, 128 * 6),
        ("aten::fill_", "[8,16]f32 []f32", 0, 512),
        ("aten::sum", "[8,16]f32", 128, 512),
        ("aten::_softmax", "[8,16]f32", 5 * 128, 1024),
        ("aten::native_layer_norm", "[8,16]bf16 [16]bf16 [16]bf16", 7 * 128, 2 * 256 + 64),
        ("aten::embedding", "[50257,768]bf16 [8,1024]i64", 0, 2 * 8192 * 768 * 2 + 8192 * 8),
    ],
)  # fmt: skip
def test_work_of_an_operator(op, shapes, flops, moved):
    found = work_of(op, shapes)
    assert found is not None and found.flops == flops
    if moved is not None:
        assert found.bytes == moved


def test_what_shapes_do_not_tell_is_not_known():
    assert work_of("aten::view", "[8,16]bf16") is None
    assert work_of("aten::mm", None) is None
    assert work_of("AddmmBackward0", "[8,16]bf16") is None
    assert work_of("aten::mm", "[8,16]bf16 [8,16]bf16") is None
    assert work_of("aten::_foreach_mul_", "() ()") is None
    conv = work_of("aten::cudnn_convolution", "[2,3,32,32]f32 [8,3,3,3]f32")
    assert conv is not None and conv.flops is None and conv.matrix
    packed = "[77,3,4]bf16 [77,3,4]bf16 [77,3,4]bf16 [5]i32"
    assert work_of("aten::_flash_attention_forward", packed) is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Timeline, int]:
    """A CPU trace with shapes of one training step, and the FLOPs torch counts."""
    torch = pytest.importorskip("torch")
    nn = torch.nn
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode

    class Net(nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.Sequential(
                nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                nn.Conv2d(8, 16, 5, padding=2, bias=False), nn.ReLU(), nn.ConvTranspose2d(16, 4, 2, stride=2),
            )  # fmt: skip
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 10)

        def forward(self, x):
            y = self.convs(x).reshape(2, 64, 64)
            q, k, v = self.qkv(y).reshape(2, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).reshape(2, 64, 64))

    model, x = Net(), torch.randn(2, 3, 32, 32)

    def step() -> None:
        model(x).sum().backward()

    step()
    with FlopCounterMode(display=False) as counted:
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        step()
        step()
    path = tmp_path_factory.mktemp("cpu") / "trace.json"
    recorded.export_chrome_trace(str(path))
    return kineto.read(path), counted.get_total_flops()


def test_flops_of_a_cpu_trace_are_those_torch_counts(trained):
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    made, counted = trained
    calls = list_calls(made)
    matrix = np.array([*(w.matrix for w in calls.works), False])[calls.work]
    assert not np.any(np.isnan(calls.flops[matrix]))
    # torch's counter has a formula for attention, but does not know the operator it is on a CPU.
    q = (2, 4, 64, 16)
    counted += sdpa_flop_count(q, q, q) + sdpa_backward_flop_count(q, q, q, q)
    assert float(calls.flops[matrix].sum()) == 2 * counted


def test_a_host_has_a_roofline_too(trained):
    made, _ = trained
    found = roofline(made, by="op", arch="epyc-9654")
    names = {row["name"] for row in found}
    assert {"aten::conv2d", "aten::convolution_backward", "aten::linear"} <= names
    assert all(row["unit"] == "vector.fp32" for row in found if row["name"] == "aten::conv2d")
    assert found.facts["device"] == "epyc-9654"


def test_the_words_of_a_roofline_fit_a_host(trained):
    made, _ = trained
    found = roofline(made)
    said = str(found)
    assert found.facts["on_host"] and "time in operators" in said and "device time" not in said
    assert "--on epyc-9654" in found.missing["ceilings"] and "--kind cpu" in found.missing["ceilings"]
    assert "h200" not in said and "--counters" not in said
    titles = {c.title for c in roofline(made, arch="epyc-9654").columns}
    assert "Of memory bandwidth" in titles and "Of HBM" not in titles
    shown = run_analyses.roofline(roofline(made, arch="epyc-9654"))
    assert "The operators as a table" in shown and "What limits the run, by time in operators" in shown
    words = re.findall(r".{30}kernel.{20}", shown)
    assert words == [] and "device time" not in shown


def test_the_words_of_a_roofline_fit_a_device():
    found = roofline(timeline(("aten::mm", "[8192,768]bf16 [768,3072]bf16", GEMM, 55.0), watts=600.0))
    assert not found.facts["on_host"] and "device time" in str(found)
    assert "The kernels as a table" in run_analyses.roofline(found)


def test_backward_convolutions_of_a_long_trace_are_looked_at_once_each(monkeypatch):
    """Traces of torch 1.8 have no nodes of autograd: the search for the next one must not read the rest of each."""
    named = Timeline.name

    def count_reads(calls: int) -> int:
        read = []
        monkeypatch.setattr(Timeline, "name", lambda self, row: [read.append(row), named(self, row)][1])
        backward = ("aten::cudnn_convolution_backward_weight", "[2,8,8,8]f32 [2,4,8,8]f32", "wgrad", 3.0)
        list_calls(timeline(*[backward, ("aten::relu", "[2]f32", "relu", 1.0)] * calls))
        return len(read)

    assert count_reads(200) < 3 * count_reads(100)


def test_a_convolution_without_a_backward_is_read_off_who_takes_its_output():
    b = Builder()
    x, w = "[2,3,32,32]f32", "[8,3,3,3]f32"
    b.add("op", "aten::conv2d", T0, T0 + 900, thread=1, external=1, shapes=b.intern(f"{x} {w}"))
    b.add("op", "aten::cudnn_convolution", T0 + 10, T0 + 800, thread=1, external=2, shapes=b.intern(f"{x} {w}"))
    b.add("op", "aten::relu", T0 + 1000, T0 + 1100, thread=1, external=3, shapes=b.intern("[2,8,16,16]f32"))
    b.add("kernel", "implicit_convolve_sgemm", T0 + 50, T0 + 5050, device=0, stream=7, external=2)
    (flops,) = list_calls(b.build()).flops
    assert flops == 2 * 2 * 16 * 16 * prod((8, 3, 3, 3))


# -- the roofline ---------------------------------------------------------------------------------------------------


def test_a_product_and_an_attention_by_hand():
    made = timeline(
        ("aten::mm", "[8192,768]bf16 [768,3072]bf16", GEMM, 55.0),
        ("aten::_cudnn_attention_forward", " ".join(["[8,12,1024,64]bf16"] * 3), FLASH, 100.0),
        watts=600.0,
    )
    found = roofline(made)
    rows = {row["name"]: row for row in found}
    gemm, flash = rows[GEMM], rows[FLASH]
    flops = 2.0 * 8192 * 768 * 3072
    moved = 2.0 * (8192 * 768 + 768 * 3072 + 8192 * 3072)
    assert gemm["flops_per_call"] == flops and gemm["bytes_per_call"] == moved and gemm["bytes_from"] == "shapes"
    assert gemm["intensity"] == pytest.approx(flops / moved) == pytest.approx(571.5, rel=1e-3)
    assert gemm["flop_per_s"] == pytest.approx(flops / 55e-6)
    assert gemm["flops_pct"] == pytest.approx(100 * flops / 55e-6 / 9.89e14)
    assert gemm["hbm_pct"] == pytest.approx(100 * moved / 55e-6 / 4.8e12)
    assert gemm["ridge"] == pytest.approx(9.89e14 / 4.8e12)
    assert gemm["bound"] == "compute" and gemm["roof_pct"] == gemm["flops_pct"] and gemm["unit"] == "matrix.bf16"
    assert gemm["energy_j"] == pytest.approx(600 * 55e-6)
    assert gemm["flop_per_j"] == pytest.approx(flops / (600 * 55e-6))
    assert gemm["energy_pct"] == pytest.approx(100 * flops / (600 * 55e-6) * 1.03e-12)
    pairs = 8 * 12 * 1024 * 1024
    assert flash["flops_per_call"] == 4.0 * pairs * 64
    assert flash["bytes_per_call"] == 4 * 2.0 * 8 * 12 * 1024 * 64
    assert flash["bound"] == "compute"
    assert any("causal" in note for note in found.notes)
    assert found.facts["ceilings_flop_per_s"]["matrix.bf16"] == 9.89e14
    assert found.facts["flops"]["matrix.bf16"] == pytest.approx(flops + 4.0 * pairs * 64)
    assert "dram_bytes" in found.missing and "energy" not in found.missing


def test_streams_are_bound_by_memory_or_the_cache():
    made = timeline(
        ("aten::add", "[8192,8192]bf16 [8192,8192]bf16", "elementwise_a", 100.0),
        ("aten::add", "[1024,1024]bf16 [1024,1024]bf16", "elementwise_b", 1.0),
    )
    rows = {row["name"]: row for row in roofline(made)}
    assert rows["elementwise_a"]["bound"] == "memory"
    assert rows["elementwise_a"]["roof_pct"] == pytest.approx(100 * 3 * 2 * 8192**2 / 100e-6 / 4.8e12)
    assert rows["elementwise_b"]["bound"] == "cache"


def test_fp32_products_run_on_vector_units_unless_their_kernel_says_tf32():
    shapes = "[512,512]f32 [512,512]f32"
    made = timeline(
        ("aten::mm", shapes, "ampere_sgemm_128x64_tn", 50.0), ("aten::mm", shapes, "cutlass_tf32_s1688gemm", 20.0)
    )
    assert {row["unit"] for row in roofline(made)} == {"vector.fp32", "matrix.tf32"}


def test_helpers_of_an_operator_get_no_flops():
    b = Builder()
    shapes = b.intern(" ".join(["[8,12,1024,64]bf16"] * 4))
    b.add("op", "aten::_cudnn_attention_backward", T0, T0 + 500, thread=1, external=1, shapes=shapes)
    for i, name in enumerate(("sdpa_flash_bprop", "void cudnn::fusion::convert_dq_to_16bits<true>()")):
        b.add("kernel", name, T0 + i * 200_000, T0 + i * 200_000 + 100_000, device=0, stream=7, external=1)
    rows = {row["name"]: row for row in roofline(b.build(), arch="h200")}
    assert rows["sdpa_flash_bprop"]["flops_per_call"] == 10.0 * 8 * 12 * 1024 * 1024 * 64
    helper = rows["void cudnn::fusion::convert_dq_to_16bits<true>()"]
    assert helper["flops_per_call"] == 0.0 and helper["bytes_per_call"] is None
    (op,) = roofline(b.build(), arch="h200", by="op").rows
    assert op["calls"] == 1 and op["flops_per_call"] == rows["sdpa_flash_bprop"]["flops_per_call"]


def test_what_is_missing_is_said():
    found = roofline(timeline(("aten::mm", "", GEMM, 50.0), device=None))
    assert set(found.missing) == {"ceilings", "flops", "energy", "dram_bytes"}
    (row,) = found.rows
    assert row["flops_per_call"] is None and row["bound"] is None and row["time_s"] == pytest.approx(50e-6)
    assert roofline(Builder().build()).rows == []
    with pytest.raises(ArgumentError, match="kernel"):
        roofline(timeline(), by="kernels")


def test_the_chip_is_found_by_name_capability_or_trace():
    named, bare = timeline(device="NVIDIA H100 80GB HBM3"), timeline(device=None)
    assert find_device(named).id == "h100"
    assert find_device(named, "sm90").id == "h100"
    assert find_device(bare, "sm90").compute_capability == "sm90"
    assert find_device(bare, "sm_80").compute_capability == "sm80"
    assert find_device(bare, "h200").id == "h200"
    assert find_device(bare) is None
    with pytest.raises(ArgumentError, match="sm91"):
        find_device(bare, "sm91")


def test_the_best_joules_are_the_measured_ones_where_there_are_any():
    h200 = Ceilings.of(lookup("h200"))
    assert h200.flop_per_j["matrix.bf16"] == h200.flop_per_j["matrix.fp16"] == pytest.approx(1 / 1.03e-12)
    assert h200.bytes_per_j == pytest.approx(1 / 1.52e-10)
    a100 = Ceilings.of(lookup("a100"))
    assert a100.flop_per_j["matrix.bf16"] == pytest.approx(a100.flops_per_s["matrix.bf16"] / lookup("a100").tdp_w.value)


@pytest.mark.skipif(not GPT2.exists(), reason="the shared recording is not here")
def test_the_vocabulary_is_far_below_its_roof_in_a_recorded_training():
    found = roofline(GPT2, by="op")
    first = found.rows[0]
    assert first["name"] == "aten::mm" and "50257" in first["shapes"] and first["calls"] == 12
    assert first["bound"] == "compute" and 8 < first["roof_pct"] < 12
    good = next(r for r in found if r["shapes"] == "[3072]bf16 [8192,768]bf16 [768,3072]bf16")
    assert 60 < good["roof_pct"] < 80
    assert found.facts["known_time_s"] > 0.9 * found.facts["time_s"]


# -- counters -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counted() -> Timeline:
    """The kernels of the recorded replay on a timeline, each for 100 us (the product twice), with their counters."""
    seen = json.loads((DATA / "kineto_h200.json").read_text())
    b, now = Builder(), T0
    b.add("region", "warm", T0, T0 + 50_000, thread=1)
    for number, k in enumerate(seen, start=1):
        launch = b.intern_launch(Launch(grid=tuple(k["grid"]), block=tuple(k["block"])))
        for _ in range(2 if "nvjet" in k["name"] else 1):
            b.add("op", f"aten::op{number}", now, now + 500, thread=1, external=number)
            b.add("kernel", k["name"], now, now + 100_000, device=0, stream=7, external=number, launch=launch)
            now += 101_000
    made = b.build()
    made.meta["deviceProperties"] = [{"name": "NVIDIA H200"}]
    made.extra = merge(made, ncu.parse((DATA / "ncu_h200.csv").read_text())).extra
    return made


def test_stalls_of_recorded_counters(counted):
    found = stalls(counted)
    assert not found.missing and len(found) >= 5
    for row in found:
        parts = [row[k] for k in ("memory_stall_pct", "dependency_stall_pct", "structural_stall_pct")]
        assert all(0 <= p <= 100 for p in parts) and sum(parts) <= 100.01
        assert row["stalled_s"] == pytest.approx(row["time_s"] * sum(parts) / 100)
        assert row["main_reason_pct"] == max(row["stall_reasons"].values()) and row["main_reason_means"]
        assert row["counted_pct"] == 100.0
    assert found.facts["counted_pct"] == pytest.approx(100.0)
    assert [r["stalled_s"] for r in found] == sorted((r["stalled_s"] for r in found), reverse=True)
    by_op = stalls(counted, group_by="op")
    assert {r["name"] for r in by_op} == {f"aten::op{i}" for i in range(1, len(by_op) + 1)}
    by_region = {r["name"]: r for r in stalls(counted, group_by="region")}
    assert set(by_region) == {"warm", "(no region)"}


def test_means_are_weighted_by_time():
    made = timeline(("a", "", "k", 300.0), ("a", "", "k", 100.0), ("a", "", "k", 600.0))
    first, second, _ = made.rows("kernel").tolist()
    made.extra = {
        first: {"memory_stall_pct": 80.0, "stall_reasons": {"long_scoreboard": 80.0}},
        second: {"memory_stall_pct": 40.0, "stall_reasons": {"long_scoreboard": 20.0, "wait": 20.0}},
    }
    (row,) = stalls(made).rows
    assert row["memory_stall_pct"] == pytest.approx(70.0)
    assert row["stall_reasons"] == pytest.approx({"long_scoreboard": 65.0, "wait": 5.0})
    assert row["counted_pct"] == pytest.approx(40.0) and row["calls"] == 3


def test_stalls_without_reasons_show_none():
    t = timeline(("aten::mm", "", "k", 100.0))
    t.extra = {1: {"memory_stall_pct": 40.0}}
    result = stalls(t)
    assert result.rows[0]["memory_stall_pct"] == 40.0 and result.rows[0]["stall_reasons"] is None
    assert "{}" not in str(result)


def test_divergence_of_recorded_counters(counted):
    everything = divergence(counted, threshold=0.0)
    recorded = {k.name: k.values["warp_divergence_pct"] for k in ncu.parse((DATA / "ncu_h200.csv").read_text())}
    high = {name for name, pct in recorded.items() if pct > 20}
    found = divergence(counted)
    assert len(found) < len(everything) and not found.missing
    assert {row["name"] for row in found} <= {r["name"] for r in everything}
    assert len(found) == len({row["name"] for row in found}) >= min(1, len(high))
    assert all(row["warp_divergence_pct"] > 20 for row in found)
    assert divergence(counted, threshold=20).rows == found.rows
    silent = divergence(counted, threshold=99)
    assert silent.rows == [] and any("diverges" in note for note in silent.notes)


def test_without_counters_nothing_is_invented():
    made = timeline(("aten::mm", "", GEMM, 50.0))
    for found in (stalls(made), divergence(made)):
        assert found.rows == []
        assert all("tessera run --counters" in fix for fix in found.missing.values()) and found.missing
    with pytest.raises(ArgumentError, match="threshold"):
        divergence(made, threshold=-1)
    with pytest.raises(ArgumentError, match="group_by"):
        stalls(made, group_by="kernels")


def test_measured_bytes_take_the_place_of_those_from_shapes(counted):
    found = roofline(counted)
    rows = [r for r in found if r["bytes_from"] == "ncu"]
    assert len(rows) == len(found) and "dram_bytes" not in found.missing
    made = timeline(("aten::mm", "[8192,768]bf16 [768,3072]bf16", GEMM, 50.0))
    (row,) = made.rows("kernel").tolist()
    made.extra = {row: {"dram_read_gbps": 1000.0, "dram_write_gbps": 500.0, "l2_gbps": 4000.0}}
    (one,) = roofline(made).rows
    assert one["bytes_per_call"] == pytest.approx(1500e9 * 50e-6) and one["bytes_from"] == "ncu"
    assert one["l2_pct"] is None  # nobody knows the H200's
