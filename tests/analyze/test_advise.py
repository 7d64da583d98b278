"""Advice: every rule speaks on a run that asks for it and is silent on a healthy one; savings are computed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.analyze.advise import NOTHING, RULES, advise
from tessera.analyze.breakdown import breakdown
from tessera.analyze.evidence import RunEvidence
from tessera.analyze.rules_host import check_throttling
from tessera.analyze.slowdown import EVENT_S
from tessera.attribute.table import EnergyTable
from tessera.estimate.predict import GAP_S
from tessera.joules import DomainSamples
from tessera.recording import Recording
from tessera.report.analysis import text
from tessera.schema import Domain, Telemetry
from tessera.timeline import Builder, Launch, Timeline, kineto
from tessera.trace import PowerTrace

from places import REPOSITORY

SHARED = REPOSITORY.parent / "shared" / "h200"
T0 = 1_790_000_000_000_000_000
RING = Domain(
    name="gpu0", source="nvml-samples", label="NVIDIA H200", resolution_s=0.02, lag_s=0.016, blur_s=0.012,
    sample_noise=0.012, gain_error=0.005,
)  # fmt: skip
GEMM = "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_TNT"
ADD = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>"
PRODUCT = ("aten::mm", "[8192,4096]bf16 [4096,4096]bf16", GEMM, 400.0)  # 687 TFLOP/s: as good as it gets


class Script:
    """A timeline written call by call: each an operator with its shapes and one row on the device."""

    def __init__(self, device: str | None = "NVIDIA H200") -> None:
        self.b, self.now, self.number = Builder(), T0, 0
        self.chip = "h200" if device == "NVIDIA H200" else None
        if device:
            self.b.meta["deviceProperties"] = [{"id": 0, "name": device}]

    def run(
        self, op: str, shapes: str, name: str, us: float, *, times: int = 1, gap_us: float = 0.5, kind: Any = "kernel",
        stream: int = 7, after: bool = True, **more: Any,
    ) -> Script:  # fmt: skip
        for _ in range(times):
            self.number += 1
            end = self.now + round(us * 1000)
            said = {"shapes": self.b.intern(shapes)} if shapes else {}
            self.b.add("op", op, self.now - 300, self.now - 100, thread=1, external=self.number, **said)
            self.b.add(kind, name, self.now, end, device=0, stream=stream, external=self.number, **more)
            self.now = end + round(gap_us * 1000) if after else self.now
        return self

    def pause(self, ms: float, during: str = "") -> Script:
        if during:
            self.b.add("region", during, self.now, self.now + round(ms * 1e6), thread=1)
        self.now += round(ms * 1e6)
        return self

    def healthy(self, times: int = 20) -> Script:
        return self.run(*PRODUCT, times=times)

    def build(self) -> Timeline:
        return self.b.build()


def found(what: Script | Timeline | Recording, **options: Any) -> dict[str, Any]:
    if isinstance(what, Script):
        what, options = what.build(), {"on": what.chip, **options}
    result = advise(what, **options)
    saved = [row["saves_j"] for row in result if row["saves_j"] is not None]
    assert saved == sorted(saved, reverse=True)
    return {row["kind"]: row for row in result}


def test_a_healthy_run_is_silent():
    result = advise(Script().healthy().build(), on="h200")
    assert result.rows == [] and NOTHING in result.notes
    assert result.facts["basis"] == "modelled" and result.facts["energy_j"] > 0
    assert "counters" in result.missing and "energy" in result.missing
    assert "50257" not in str(result.to_json())


def test_a_chip_that_ran_nothing_has_no_joules():
    timeline = Builder()
    for i in range(12):
        timeline.add("op", "aten::mm", T0 + i * 10_000_000, T0 + i * 10_000_000 + 9_000_000, thread=1)
    result = advise(timeline.build(), on="h200")
    assert result.facts["energy_j"] is None and result.facts["basis"] is None
    assert not any("J" in str(row["evidence"]) for row in result.rows)
    assert any("nothing in the trace ran on it" in note for note in result.notes)


def test_kernels_without_length_have_no_share():
    """Found by a damaged run file: all of its kernels began and ended at one moment."""
    timeline = Builder()
    timeline.add("kernel", GEMM, T0, T0, device=0, stream=7)
    assert advise(timeline.build(), on="h200").rows == []


def test_every_rule_says_when_it_speaks():
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
    assert all(rule.__doc__ and len(rule.__doc__) > 30 for rule in RULES)


def test_late_launches_ask_for_a_graph_or_a_larger_batch():
    row = found(Script().run(*PRODUCT[:3], 30.0, times=300, gap_us=40.0))["launch"]
    assert "CUDA graph" in row["action"] and "larger batch" in row["action"] and "299 launches" in row["evidence"]
    tracer_s = 300 * EVENT_S["device"]  # of a trace alone, the most its events can have cost is nobody's to save
    assert row["saves_s"] == pytest.approx(299 * (40e-6 - GAP_S["graph"]) - tracer_s) and row["by"] == "prediction"
    left = 299 * GAP_S["graph"] / (299 * 40e-6 - tracer_s)
    assert row["saves_j"] == pytest.approx(row["energy_j"] * (1 - left))


@pytest.mark.parametrize(
    ("during", "says"),
    [
        ("DataLoader.__next__", "workers"),
        ("aten::item", "read values back"),
        ("Optimizer.step", "fused=True"),
        ("", "fed"),
    ],
)
def test_waiting_is_told_by_what_the_host_did(during, says):
    script = Script()
    for _ in range(10):
        script.healthy(5).pause(2.0, during)
    row = found(script.healthy(1))["idle"]
    assert says in row["action"] and row["saves_s"] == pytest.approx(10 * 2e-3, rel=0.05)
    assert row["saves_j"] == row["energy_j"]
    mostly = Script().healthy(2).pause(60.0).healthy(2)
    assert "consolidate" in found(mostly)["idle"]["action"]


def test_an_odd_vocabulary_is_padded():
    odd = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(p)"
    row = found(Script().healthy().run("aten::mm", "[8192,768]bf16 [768,50257]bf16", odd, 6600.0))["unaligned"]
    assert "50257" in row["evidence"] and "50304" in row["action"]
    assert row["by"] == "prediction" and 0.6 < row["saves_j"] / row["energy_j"] < 0.85
    assert 5e-3 < row["saves_s"] < 6e-3
    without = found(Script().healthy().run("aten::mm", "", odd, 6600.0))["unaligned"]
    assert without["by"] == "experience" and without["confidence"] == "low" and without["saves_s"] is None
    aligned = Script().healthy().run("aten::mm", "[8192,768]bf16 [768,50304]bf16", GEMM, 1000.0)
    assert found(aligned) == {}


def test_fp32_products_may_run_as_tf32():
    script = Script().run("aten::mm", "[2048,2048]f32 [2048,2048]f32", "ampere_sgemm_128x64_tn", 350.0, times=20)
    row = found(script)["fp32"]
    assert "TF32" in row["action"] and row["by"] == "prediction" and row["saves_j"] > 0.6 * row["energy_j"]
    unknown = found(Script().run("aten::mm", "", "ampere_sgemm_128x64_tn", 350.0, times=20))["fp32"]
    assert unknown["by"] == "roofline" and unknown["saves_j"] == pytest.approx(unknown["energy_j"] * (1 - 2 / 13.2))
    tf32 = Script().run("aten::mm", "[4096,4096]f32 [4096,4096]f32", "cutlass_tf32_s1688gemm", 350.0, times=20)
    assert found(tf32) == {}


def test_small_products_ask_for_larger_ones():
    script = Script().run("aten::mm", "[512,4096]bf16 [4096,512]bf16", GEMM, 20.0, times=50)
    row = found(script)["low tensor use"]
    assert "larger products" in row["action"] and row["by"] == "prediction"
    assert 0.3 < row["saves_j"] / row["energy_j"] < 0.9 and "11% of the tensor" in row["evidence"]


def test_accumulators_matter_on_a_geforce_only():
    kernel = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn"
    shapes = "[4096,4096]f16 [4096,4096]f16"
    geforce = Script("NVIDIA GeForce RTX 4090").run("aten::mm", shapes, kernel, 1100.0, times=20)
    assert "allow_fp16_accumulation" in found(geforce)["accumulators"]["action"]
    assert "accumulators" not in found(Script().run("aten::mm", shapes, kernel, 220.0, times=20))


def test_elementwise_chains_are_fused_by_the_bytes_between_them():
    shapes = "[8192,8192]bf16 [8192,8192]bf16"
    script = Script().run("aten::add", shapes, ADD, 100.0, times=10)
    row = found(script)["fuse"]
    size = 2 * 8192 * 8192
    assert row["by"] == "roofline" and "2.25 GiB" in row["evidence"]  # nine tensors, written and read again
    assert 18 * size == 2.25 * 2**30
    assert row["saves_s"] == pytest.approx(10 * 100e-6 * 18 / 30)
    lone = Script()
    for _ in range(5):
        lone.run("aten::add", shapes, ADD, 100.0).run(*PRODUCT[:3], 200.0)
    assert "fuse" not in found(lone)
    compiled = Script().run("aten::add", shapes, "triton_poi_fused_add_0", 100.0, times=10)
    assert "fuse" not in found(compiled)


def test_pageable_copies_are_pinned():
    script = Script().healthy(10)
    launch = script.b.intern_launch(Launch(memcpy_dir="HtoD", pinned=False))
    size = 256 << 20
    script.run(
        "aten::copy_", "", "Memcpy HtoD (Pageable -> Device)", 50_000.0, kind="memcpy", bytes=size, launch=launch
    )
    row = found(script)["copies"]
    assert "pin_memory" in row["action"] and row["by"] == "roofline"
    assert row["saves_s"] == pytest.approx(50e-3 - size / (0.87 * 6.3015e10))
    assert "copies" not in found(
        Script().healthy(100).run("a", "", "Memcpy HtoD (Pinned -> Device)", 50.0, kind="memcpy")
    )


def test_collectives_alone_are_told_from_hidden_ones():
    alone, hidden = Script(), Script()
    for _ in range(10):
        alone.healthy(3).run("c10d::allreduce_", "", "AllReduce", 600.0, kind="collective")
        hidden.run("c10d::allreduce_", "", "AllReduce", 390.0, kind="collective", stream=8, after=False).healthy(3)
    row = found(alone)["communication"]
    assert "overlap" in row["action"] and "reduce-scatter" in row["action"] and row["by"] == "energy table"
    assert row["saves_s"] == pytest.approx(10 * 600e-6)
    assert "communication" not in found(hidden)


def readings(*throttle: str, limit_w: float | None = None) -> list[Telemetry]:
    return [Telemetry(time_ns=i * 10**8, domain="gpu0", throttle=throttle, power_limit_w=limit_w) for i in range(10)]


def test_a_power_limit_is_weighed_against_a_lower_cap():
    row = found(Recording(Script().healthy().build(), telemetry=readings("power cap", limit_w=700.0)), on="h200")[
        "power cap"
    ]
    assert "560 W" in row["action"] and row["by"] == "prediction"
    assert row["saves_j"] > 0 > row["saves_s"]
    hot = found(Recording(Script().healthy().build(), telemetry=readings("thermal (hardware)")))["thermal"]
    assert "cooling" in hot["action"]
    assert found(Recording(Script().healthy().build(), telemetry=readings())) == {}


def test_a_capped_run_without_kernels_is_told_its_joules():
    """Of a program whose kernels are not traced (JAX's), nobody knows what was idle."""
    table = EnergyTable(
        energy_j=1000.0, error_j=1.0, idle_j=math.nan, idle_error_j=math.nan, kernels=(), time_s=2.0, busy_s=0.0
    )
    advice = check_throttling(RunEvidence(table=table, telemetry={"gpu0": readings("power cap")}))
    assert advice is not None and advice.evidence.endswith("in 100% of the readings, 1 kJ (100%)")


def powered(watts: np.ndarray, script: Script) -> Recording:
    times = T0 + np.arange(len(watts)) * 20_000_000
    trace = PowerTrace({"gpu0": DomainSamples.of(RING, times, watts)}, start_ns=T0, end_ns=int(times[-1]))
    return Recording(script.build(), trace)


def test_spikes_over_the_limit_are_staggered():
    def script() -> Script:
        return Script().run(*PRODUCT[:3], 400.0, times=4500, gap_us=1.0)

    calm, spiky = np.full(90, 600.0), np.full(90, 500.0)
    spiky[10::20] = 880.0
    assert "spikes" not in found(powered(calm, script()))
    row = found(powered(spiky, script()))["spikes"]
    assert "stagger" in row["action"] and "token bucket" in row["action"] and "880 W" in row["evidence"]
    assert row["saves_j"] == 0.0


# -- counters -------------------------------------------------------------------------------------------------------

HEALTHY = {
    "sm_occupancy": 80.0, "memory_stall_pct": 60.0, "warp_divergence_pct": 0.5, "inst_issue_eff_pct": 30.0,
    "dram_read_gbps": 2800.0, "dram_write_gbps": 1400.0, "tc_util_pct": 0.0,
}  # fmt: skip


def counted(**changed: float) -> Timeline:
    """Ten kernels nobody knows the work of, with counters."""
    made = Script().run("aten::custom", "", "my_kernel", 200.0, times=10).build()
    made.extra = dict.fromkeys(made.rows("kernel").tolist(), HEALTHY | changed)
    return made


def test_counters_of_a_good_stream_say_nothing():
    assert {"low occupancy", "uncoalesced", "divergence"}.isdisjoint(found(counted()))


@pytest.mark.parametrize(
    ("changed", "kind", "says"),
    [
        ({"sm_occupancy": 12.0, "dram_read_gbps": 400.0, "dram_write_gbps": 200.0}, "low occupancy", "registers"),
        ({"dram_read_gbps": 400.0, "dram_write_gbps": 200.0}, "uncoalesced", "cp.async"),
        ({"warp_divergence_pct": 45.0}, "divergence", "shuffles"),
    ],
)
def test_counters_name_the_cause(changed, kind, says):
    rows = found(counted(**changed))
    assert {"low occupancy", "uncoalesced", "divergence"} & set(rows) == {kind}
    row = rows[kind]
    assert says in row["action"] and "my_kernel" in row["evidence"] and row["by"] == "counters"
    part = 0.45 * 0.30 if kind == "divergence" else 1 - 600e9 / 4.8e12 / 0.85
    assert row["saves_s"] == pytest.approx(part * 10 * 200e-6)


def test_few_warps_on_busy_tensor_cores_are_as_they_should_be():
    assert "low occupancy" not in found(counted(sm_occupancy=15.0, tc_util_pct=92.0))


# -- whole recordings -----------------------------------------------------------------------------------------------


def test_without_a_known_chip_only_seconds_are_given():
    result = advise(Script(None).healthy(2).pause(60.0).healthy(2).build())
    row = next(r for r in result if r["kind"] == "idle")
    assert row["saves_j"] is None and row["energy_j"] is None and row["saves_s"] > 0.05
    assert result.facts["basis"] is None
    assert advise(Builder().build()).rows == []


@pytest.mark.skipif(not (SHARED / "gpt2_train.power.json").exists(), reason="the shared recording is not here")
def test_a_recorded_training_is_told_to_pad_its_vocabulary():
    samples = json.loads((SHARED / "gpt2_train.power.json").read_text())["samples_mw"]
    times, milliwatts = (np.array(v) for v in zip(*samples, strict=True))
    trace = PowerTrace(
        {"gpu0": DomainSamples.of(RING, times * 1000, milliwatts / 1e3)}, start_ns=int(times[0]) * 1000,
        end_ns=int(times[-1]) * 1000,
    )  # fmt: skip
    rows = found(Recording(kineto.read(SHARED / "gpt2_train.kineto.json.gz"), trace))
    row = rows["unaligned"]
    assert next(iter(rows)) == "unaligned" and "50257" in row["evidence"]
    assert 75 < row["energy_j"] < 105 and row["by"] == "prediction" and row["confidence"] == "high"
    assert 0.6 < row["saves_j"] / row["energy_j"] < 0.8
    # Twelve steps: 15.4 ms of products each, 3 ms as the measured padded ones (1.03 pJ/FLOP, 700 W) would take.
    assert row["saves_s"] == pytest.approx(12 * (15.4e-3 - 3e-3), rel=0.1)
    assert 15 < rows["fuse"]["saves_j"] < 70
    # No more than all idle time from the first kernel to the last.
    assert "of it after the last kernel; up to 150 ms of it may be the tracer's" in rows["idle"]["evidence"]
    assert "one operator" not in rows  # it would say the same again


def test_a_trace_of_a_host_takes_as_long_as_was_traced():
    """The program's own regions go on after that."""
    timeline = Builder()
    timeline.add("op", "aten::mm", T0, T0 + 10**9)
    timeline.add("region", "step_7", T0 + 5 * 10**9, T0 + 6 * 10**9)
    assert advise(Recording(timeline.build())).facts["time_s"] == pytest.approx(1.0)


def test_advice_reads_as_paragraphs_with_evidence_and_fix():
    script = Script()
    script.run(*PRODUCT, times=20)
    script.run("aten::add", "[8192,4096]bf16 [8192,4096]bf16", ADD, 60.0, times=300, gap_us=40.0)
    result = advise(Recording(script.b.build()))
    assert result.rows
    for width in (60, 80, 120):
        said = " ".join(text(result, width=width).split())
        for row in result.rows:
            for part in (row["kind"], row["evidence"], row["action"], f"{row['confidence']} confidence"):
                assert " ".join(part.split()) in said
        assert ("they overlap" in said) == (len(result.rows) > 1)


def test_shares_without_power_are_those_of_the_breakdown(tmp_path: Path) -> None:
    """Beside a collective of 60 of 100 ms, a kernel computes for 30 of them."""
    rows = [("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0, 60e3, 20), ("gemm", 10e3, 30e3, 7), ("gemm", 99.9e3, 100, 7)]
    events = [
        {"ph": "X", "name": name, "cat": "kernel", "ts": at, "dur": took, "pid": 0, "tid": stream,
         "args": {"device": 0, "stream": stream, "correlation": i}}
        for i, (name, at, took, stream) in enumerate(rows)
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    shares = {row["kind"]: row["share_pct"] for row in advise(path).rows}
    parts = breakdown(path).rows
    assert shares["communication"] == pytest.approx(60.0)
    assert shares["communication"] == pytest.approx(sum(r["pct"] for r in parts if "communication" in r["part"]))
    assert shares["idle"] == pytest.approx(sum(r["pct"] for r in parts if r["part"].startswith("idle")), abs=0.1)
