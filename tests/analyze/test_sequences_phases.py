"""Kernels that follow each other again and again, and the passes of a serving engine, on traces made by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tessera import analyze
from tessera.analyze.kernel_names import category, short_name
from tessera.analyze.phases import EnginePass, parse_pass
from tessera.errors import ArgumentError
from tessera.joules import DomainSamples
from tessera.profile.open_recording import open_recording
from tessera.report.analysis import text
from tessera.schema import Domain
from tessera.timeline import kineto
from tessera.trace import PowerTrace

BASE_NS = 1_790_000_000_000_000_000
GEMM, GELU, NORM = "nvjet_tst_128x128", "vectorized_elementwise_kernel<4, gelu>", "layer_norm_kernel<bf16>"


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 9, "ts": ts, "dur": dur, "args": args}


def read(events: list[dict[str, Any]]) -> Any:
    return kineto.read(json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": events}).encode())


def stream(names: list[str], *, lasts: float = 20.0, gap: float = 2.0) -> Any:
    """Kernels of one stream, each launched by an operator that is called as its place."""
    events, at = [], 1000.0
    for i, name in enumerate(names):
        events.append(event("cpu_op", f"aten::op{i % 3}", at - 9, 4, **{"External id": i + 1}))
        events.append(event("cuda_runtime", "cudaLaunchKernel", at - 8, 1, correlation=i + 1))
        events.append(event("kernel", name, at, lasts, device=0, stream=7, correlation=i + 1, **{"External id": i + 1}))
        at += lasts + gap
    return read(events)


def test_what_runs_between_products_is_a_sequence():
    found = analyze.sequences(stream([GEMM, GELU, NORM, GEMM, GELU, NORM, GEMM, GELU]))
    (row,) = found.rows  # one GELU alone is no sequence
    assert row["members"] == [GELU, NORM] and row["calls"] == 2 and row["kernels"] == 2
    assert row["time_s"] == pytest.approx(80e-6) and row["gap_s"] == pytest.approx(4e-6)
    assert row["after"] == GEMM and row["share_pct"] == pytest.approx(50.0)
    assert analyze.sequences(stream([GEMM, GELU, NORM]), least=3).missing["sequences"]


def test_a_sequence_that_repeats_itself_is_passed_several_times():
    (row,) = analyze.sequences(stream([GELU, NORM] * 5)).rows
    assert row["members"] == [GELU, NORM] and row["calls"] == 5
    (same,) = analyze.sequences(stream([GELU] * 6)).rows  # one kernel six times is a sequence of six
    assert same["kernels"] == 6 and same["name"] == "6 x gelu"


def test_a_pause_ends_a_sequence():
    assert not analyze.sequences(stream([GELU, NORM], gap=1500.0)).rows


def test_joules_of_sequences_are_those_of_their_kernels():
    recording = open_recording(stream([GEMM, GELU, NORM] * 400, lasts=500.0))
    times = BASE_NS + np.arange(0, 700_000_000, 20_000_000)
    domain = Domain(name="gpu0", source="test", resolution_s=0.02)
    samples = DomainSamples.of(domain, times, np.full(len(times), 300.0))
    recording.power = PowerTrace({"gpu0": samples}, start_ns=int(times[0]), end_ns=int(times[-1]))
    (row,) = analyze.sequences(recording).rows
    assert row["energy_j"] == pytest.approx(300.0 * row["time_s"], rel=0.05) and row["error_j"] > 0


def test_by_operator_every_kernel_counts():
    events = []
    for call in range(3):
        at = 1000.0 + 200 * call
        events.append(event("cpu_op", "aten::linear", at, 50, **{"External id": 90 + call}))
        for i, name in enumerate((GEMM, GELU)):
            number = 10 * call + i + 1
            events.append(event("cuda_runtime", "cudaLaunchKernel", at + 5 + i, 1, correlation=number))
            events.append(event("kernel", name, at + 20 + 20 * i, 15, device=0, stream=7, correlation=number))
    (row,) = analyze.sequences(read(events), by="op").rows
    assert row["op"] == "aten::linear" and row["members"] == [GEMM, GELU] and row["calls"] == 3


@pytest.mark.parametrize("wrong", [{"by": "kernel"}, {"least": 0}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ArgumentError):
        analyze.sequences(stream([GELU]), **wrong)


@pytest.mark.parametrize("name", ["aten::resolve_conj", "aten::conj", "efficient_conv_bn_eval_pass"])
def test_what_only_sounds_like_a_convolution_is_none(name):
    assert category(name, "op") != "convolution"
    assert category("aten::mkldnn_convolution", "op") == category("aten::conv2d", "op") == "convolution"


def test_kernels_of_rocm_are_what_they_are():
    tensile = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT16x16x512_MI16x16x1"
    mangled = "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64ELi8EEEvPT0_"
    assert category(tensile) == "matrix product"
    assert short_name(mangled) == "add_rmsnorm_quant_kernel"
    assert category(mangled) == "normalisation, reduction"
    assert short_name("_ZN12_GLOBAL__N_14busyEv") == "busy"
    assert short_name("_Zoops") == "_Zoops"


@pytest.mark.parametrize(
    ("name", "said", "phase"),
    [
        ("execute_context_2(6144)_generation_3(3)", (2, 6144, 3, 3), "mixed"),
        ("execute_64_context_0(sq0sk0sqsq0sqsk0)_generation_64(sq64sk999sqsq64sqsk9)", (0, 0, 64, 64), "decode"),
        ("step[EXTEND bs=2 toks=14721]", (2, 14721, 0, 0), "prefill"),
        ("step[DECODE bs=64]", (0, 0, 64, 64), "decode"),
        ("step[DECODE bs=64 g_sq=128 g_sk=9]", (0, 0, 64, 128), "decode"),
        ("step[MIXED bs=5 c=2 g=3 c_sq=50 c_sk=8 g_sq=3 g_sk=12]", (2, 50, 3, 3), "mixed"),
        ("prefill[bs=2 tok=14721 ctx=[7803, 6918]]", (2, 14721, 0, 0), "prefill"),
        ("decode[bs=117/128 tok=117 d=117]", (0, 0, 117, 117), "decode"),
    ],
)
def test_passes_of_engines_are_read(name, said, phase):
    found = parse_pass(name)
    assert found == EnginePass(**dict(zip(("prompts", "prompt_tokens", "decoding", "new_tokens"), said, strict=True)))
    assert found.phase == phase
    assert parse_pass(f"my_{name}") is None


def test_phases_have_tokens_and_times_of_the_device():
    events, number = [], 0
    for at, name, lasts in ((1000, "step[EXTEND bs=1 toks=500]", 400), (2000, "step[DECODE bs=8]", 90),
                            (3000, "step[DECODE bs=8]", 110)):  # fmt: skip
        inner = "execute_context_0(0)_generation_8(8)"  # a wrapper's name inside: the same pass
        events += [event("user_annotation", name, at, 50), event("user_annotation", inner, at + 1, 48)]
        for i in range(2):
            number += 1
            events.append(event("cuda_runtime", "cudaLaunchKernel", at + 5 + i, 1, correlation=number))
            half = event("kernel", GEMM, at + 100 + i * lasts / 2, lasts / 2, device=0, stream=7, correlation=number)
            events.append(half)
    found = analyze.phases(read(events))
    prefill, decode = found.rows
    assert (prefill["phase"], prefill["passes"], prefill["prompt_tokens"]) == ("prefill", 1, 500)
    assert (decode["passes"], decode["new_tokens"], decode["prompt_tokens"]) == (2, 16, 0)
    assert decode["time_s"] == pytest.approx(200e-6) and decode["tokens_per_s"] == pytest.approx(16 / 200e-6)
    assert found.facts["prefill_tokens_per_s"] == pytest.approx(500 / 400e-6)
    assert "tokens/s" in text(found) and decode["busy_pct"] == pytest.approx(100.0)
    assert [r["batch"] for r in analyze.phases(read(events), by="batch").rows] == [1, 8]


def test_a_trace_without_passes_says_how_to_get_them():
    assert "vLLM" in analyze.phases(stream([GEMM])).missing["phases"]
