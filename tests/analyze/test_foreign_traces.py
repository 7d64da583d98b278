"""Traces as others write them: each form of the public sets that was once read or explained wrongly, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera import analyze
from tessera.analyze.evidence import RunEvidence
from tessera.analyze.rules_host import _remedy
from tessera.analyze.spikes import Curve, choose_threshold, find_spikes
from tessera.attribute.table import EnergyRow
from tessera.attribute.work import work_of
from tessera.profile.export import Chrome
from tessera.profile.open_recording import open_recording
from tessera.profile.ranks.align import align, fit
from tessera.profile.ranks.clocks import Offset
from tessera.profile.ranks.collectives import meetings
from tessera.profile.ranks.merge import merge
from tessera.recording import Recording
from tessera.report.analysis import text
from tessera.schema import Telemetry
from tessera.timeline import Timeline, kineto

BASE_NS = 1_790_000_000_000_000_000
SGEMM = "volta_sgemm_128x64_tn"


def event(cat: str, name: str, ts: float, dur: float, *, pid: Any = 0, tid: Any = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def read(*events: dict[str, Any], **meta: Any) -> Timeline:
    whole = {"baseTimeNanoseconds": BASE_NS, "traceEvents": list(events), **meta}
    return kineto.read(json.dumps(whole).encode())


def kernels(name: str, count: int, each_us: float, gap_us: float, **meta: Any) -> Timeline:
    """A kernel after the other, each launched a little before it starts."""
    events = []
    for i in range(count):
        at = 100.0 + i * (each_us + gap_us)
        events.append(event("cuda_runtime", "cudaLaunchKernel", at - 5, 2, pid=9, tid=9, correlation=i + 1))
        events.append(event("kernel", name, at, each_us, device=0, stream=7, correlation=i + 1))
    return read(*events, **meta)


# -- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", [None, "NVIDIA H200"])
def test_without_power_no_joule_is_said(chip):
    properties = [{"id": 0, "name": chip}] if chip else []
    result = analyze.advise(kernels(SGEMM, 40, 50.0, 400.0, deviceProperties=properties))
    assert result.rows and result.facts["energy_j"] is None and result.facts["saves_s"] > 0
    assert all(r["saves_j"] is None and r["energy_j"] is None and r["saves_s"] is not None for r in result.rows)
    shown = text(result) + result.to_json()
    assert " J " not in shown and " mJ" not in shown and " J)" not in shown and "modelled" not in shown
    assert all("J" not in a.text.replace("JSON", "") for a in result.advice)


@pytest.mark.parametrize(
    ("name", "major", "says", "not_says"),
    [
        ("Tesla V100-SXM2-32GB", 7, "fp16 autocast", "bf16"),
        ("NVIDIA GeForce RTX 2080 Ti", 7, "fp16 autocast", "TF32"),
        ("NVIDIA H200", 9, "TF32", "GradScaler"),
    ],
)
def test_precision_is_advised_only_where_the_chip_has_it(name, major, says, not_says):
    trace = kernels(SGEMM, 40, 500.0, 1.0, deviceProperties=[{"id": 0, "name": name, "computeMajor": major}])
    row = next(r for r in analyze.advise(trace).rows if r["kind"] == "fp32")
    assert says in row["action"] and not_says not in row["action"]


def test_a_chip_without_matrix_units_gets_no_advice_on_precision():
    trace = kernels(SGEMM, 40, 500.0, 1.0, deviceProperties=[{"id": 0, "name": "Quadro GP100", "computeMajor": 6}])
    assert not [r for r in analyze.advise(trace).rows if r["kind"] == "fp32"]


def test_a_virtual_function_is_its_chip():
    trace = kernels(SGEMM, 4, 500.0, 1.0, deviceProperties=[{"id": 0, "name": "AMD Instinct MI300X VF"}])
    device = RunEvidence(table=None, telemetry={}, timeline=trace).device  # type: ignore[arg-type]
    assert device is not None and device.id == "mi300x"


def test_much_idle_time_is_always_said():
    """The tracer may have caused all of it (an operator and a call for every kernel), and launches explain the rest."""
    events = []
    for i in range(400):
        at = 100.0 + i * 24.0
        events += [
            event("cpu_op", "aten::add", at - 9 + n, 0.5, pid=9, tid=9, **{"External id": 10 * i + n}) for n in range(5)
        ]
        events.append(event("cuda_runtime", "cudaLaunchKernel", at - 4, 2, pid=9, tid=9, correlation=i + 1))
        events.append(event("kernel", "add_kernel", at, 2.0, device=0, stream=7, correlation=i + 1))
    result = analyze.advise(read(*events))
    idle = next(r for r in result.rows if r["kind"] in ("idle", "launch"))
    assert "92%" in idle["evidence"] and "tracer" in idle["evidence"]


def test_savings_are_never_longer_than_the_trace():
    events = []
    for device in range(8):
        for i in range(20):
            at = 100.0 + i * 1000.0
            events.append(event("kernel", SGEMM, at, 300.0, pid=device, device=device, stream=7, correlation=-1))
    trace = read(*events)
    result = analyze.advise(trace)
    seconds = (trace.end_ns - trace.start_ns) * 1e-9
    assert result.rows and all(0 <= r["saves_s"] <= seconds for r in result.rows)
    assert 0 < result.facts["saves_s"] <= seconds


def test_findings_of_no_weight_are_dropped():
    """Products of which a padded size would save a thousandth are no finding, however sure that is."""
    odd = "cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1"
    events = [event("kernel", "other_kernel", 0, 1e6, device=0, stream=7, correlation=-1)]
    events += [event("kernel", odd, 1e6 + i * 10, 9.0, device=0, stream=8, correlation=-1) for i in range(6000)]
    shares = [a.saves_share for a in analyze.advise(read(*events)).advice]
    assert not [s for s in shares if 0 < s < 0.005]


@pytest.mark.parametrize(
    ("during", "says"),
    [
        ("in ProfilerStep, in DistributedDataParallel.forward", "keep the device fed"),
        ("in enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "load ahead"),
        ("in load_data", "load ahead"),
        ("in aten::_scaled_dot_product_cudnn_attention", "enable_cudnn_sdp"),
        ("in step, in compilation", "TORCHINDUCTOR_CACHE_DIR"),
        ("in metadata", "keep the device fed"),
        ("in forward, in hipMemcpyWithStream", "non_blocking"),
        ("in aten::to", "non_blocking"),
        ("in aten::item", "read values back"),
        ("in itemize", "keep the device fed"),
        ("in Optimizer.step#SGD.step", "fused=True"),
    ],
)
def test_remedies_match_whole_words(during, says):
    assert says in _remedy(during)


@pytest.mark.parametrize(
    ("kernel", "says"),
    [("cudnn_sdpa_sm80_flash_fprop_wmma", "enable_cudnn_sdp"), ("flash_fwd_kernel", "keep the device fed")],
)
def test_attention_that_plans_is_known_by_its_kernels(kernel, says):
    """Its gaps lie inside torch's outermost operator, whose name is the same for every library."""
    row = EnergyRow(name=kernel, kind="kernel", calls=1, time_s=1.0, energy_j=1.0, error_j=0.1, share=0.1)
    assert says in _remedy("in aten::scaled_dot_product_attention", [row])


def test_exposed_communication_is_one_figure():
    """A copy beside a collective does not hide it: only kernels do."""
    trace = read(
        event("kernel", "gemm", 0, 100, device=0, stream=7, correlation=-1),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 50, 150, device=0, stream=20, correlation=-1),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 120, 30, device=0, stream=9, bytes=4096, correlation=-1),
    )
    exposed_s = analyze.breakdown(trace).facts["exposed_communication_s"]
    assert exposed_s == pytest.approx(100e-6) == analyze.overlap(trace).facts["communication_exposed_s"]
    advice = next(a for a in analyze.advise(trace).advice if a.kind == "communication")
    assert advice.saves_s == pytest.approx(exposed_s) and "100 µs of it" in advice.evidence


# -- forms of traces ------------------------------------------------------------------------------------------------


def test_numbers_of_rocm_are_texts_and_are_read_at_once():
    """A batch that does not decode is mended event by event: what ROCm writes must never go that way."""
    trace = read(
        event(
            "cuda_runtime",
            "hipMemcpyWithStream",
            0,
            60,
            pid=9,
            tid=9,
            correlation=1,
            stream="0x0",
            bytes="616",
            size="616",
        ),
        event("gpu_memcpy", "Memcpy HtoD (Host -> Device)", 10, 22, device=2, stream=0, correlation=1, bytes="616"),
        event("cpu_op", "triton", 0, 5, pid=9, tid=9, grid="grid(100,)", stream="0"),
    )
    decoder = kineto.Events([], None).decoder  # type: ignore[arg-type]
    assert decoder(json.dumps([event("cuda_runtime", "x", 0, 1, stream="0x0", bytes="1")]).encode()) is not None
    copy = int(trace.rows("memcpy")[0])
    assert trace["bytes"][copy] == 616 and trace["stream"][copy] == 0 and trace["device"][copy] == 2
    assert not trace.notes


def test_old_torch_has_steps_loaders_and_shapes():
    trace = read(
        event("Operator", "ProfilerStep#3", 0, 1000, pid=9, tid="9"),
        event("Operator", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 100, pid=9, tid="9"),
        event("Operator", "aten::mm", 200, 20, pid=9, tid="9", **{"External id": 5, "Input dims": [[8, 16], [16, 4]]}),
        event("Runtime", "cudaLaunchKernel", 205, 5, pid=9, tid="9", correlation=7, **{"external id": 5}),
        event("Kernel", "sgemm", 230, 50, tid="stream 7", device=0, stream=7, correlation=7, **{"external id": 5}),
    )
    assert [s.name for s in trace.linked.steps] == ["ProfilerStep#3"]
    assert {trace.name(int(r)) for r in trace.rows("region")} >= {"ProfilerStep#3"}
    assert len(trace.rows("region")) == 2 and trace.text("shapes", int(trace.rows("op")[0])) == "[8,16] [16,4]"
    assert trace.linked.op[trace.rows("kernel")[0]] == trace.rows("op")[0]


def test_mtia_runs_on_a_device():
    trace = read(
        event("mtia_runtime", "runFunction", 0, 10, pid=9, tid=9, correlation=5),
        event("mtia_ccp_events", "fc-dtype_Float", 20, 40, pid=17, tid=3, correlation=5, stream=1),
        event("mtia_ccp_events", "dma_request", 70, 8, pid=17, tid=3, stream=1, direction="HOST_TO_DEVICE", size=65536),
        event("mtia_ccp_events", "event_wait", 60, 100, pid=17, tid=4, stream=2, wait_on_stream=1),
    )
    found = analyze.breakdown(trace).facts
    assert found["devices"] == 1 and found["compute_s"] == pytest.approx(40e-6)
    row = analyze.memcpy(trace).rows[0]
    assert row["direction"] == "HtoD" and row["bytes"] == 65536


def test_replayed_ranges_and_launches_without_kernels_are_told_from_nothing():
    ranges = [event("cuda_profiler_range", "gemm", 10.0 * i, 10, tid=0, **{"smsp__inst.sum": 3}) for i in range(77)]
    calls = [event("cuda_runtime", "cudaLaunchKernel", 10.0 * i, 2, pid=9, tid=9, correlation=i + 1) for i in range(5)]
    op = event(
        "cpu_op", "aten::mm", 0, 100, pid=9, tid=9, **{"Input Dims": [[8, 8], [8, 8]], "Input type": ["float"] * 2}
    )
    said = analyze.breakdown(read(op, *ranges, *calls)).missing["device"]
    assert "77 kernels" in said and "nothing ran on a GPU" not in said
    counters = analyze.kernels(read(op, *ranges, *calls))
    assert counters.rows == [{"name": "gemm", "op": None, "calls": 77, "smsp__inst.sum": 231}]
    metrics = {"sm__op_fadd.sum": 2, "sm__op_ffma.sum": 5}
    of_calls = [event("cuda_profiler_range", f"k{i % 2}", 900.0 + i, 1, tid=0, **metrics) for i in range(5)]
    by_op = analyze.kernels(read(op, *of_calls, *calls))  # as many as launches: each belongs to its operator
    assert [(r["name"], r["op"], r["calls"], r["sm__op_ffma.sum"]) for r in by_op.rows] == [
        ("k0", "aten::mm", 3, 15), ("k1", "aten::mm", 2, 10),
    ]  # fmt: skip
    assert [c.title for c in by_op.columns][-2:] == ["fma", "add"] and "replayed" in text(by_op)
    launched = read(op, *calls)
    assert "launched 5 kernels" in analyze.breakdown(launched).missing["device"]
    roofline = analyze.roofline(launched)
    assert not roofline.rows and "ceilings" not in roofline.missing  # no roofline of the CPU that only launched
    assert analyze.roofline(read(op)).rows


def test_a_memory_timeline_is_read(tmp_path):
    rows = [[-1, 0, 1000, 0], [BASE_NS, 1, 500, 4], [BASE_NS + 1000, 3, -500, 4], [BASE_NS + 2000, 1, 100, 2]]
    path = tmp_path / "memory.raw.json"
    path.write_text(json.dumps(rows))
    found = analyze.memory(path)
    assert found.rows[0]["peak_bytes"] == 1500 and found.rows[0]["last_bytes"] == 1100
    assert found.facts["peak_by_category"] == {"parameters": 1000.0, "activations": 500.0}
    assert "memory timeline" in analyze.breakdown(path).missing["device"]


@pytest.mark.parametrize(("causal", "share"), [("False", 1.0), ("True", 0.5)])
def test_causal_attention_computes_half(causal, share):
    dims = [[2, 8, 1024, 64]] * 3
    trace = read(
        event(
            "cpu_op",
            "aten::_scaled_dot_product_flash_attention",
            0,
            10,
            pid=9,
            tid=9,
            **{"Input Dims": dims, "Input type": ["c10::BFloat16"] * 3, "Concrete Inputs": ["", "", "", "0.", causal]},
        )
    )
    op = int(trace.rows("op")[0])
    work = work_of(trace.name(op), trace.text("shapes", op))
    whole = work_of(trace.name(op), "[2,8,1024,64]bf16 [2,8,1024,64]bf16 [2,8,1024,64]bf16")
    assert work is not None and whole is not None and work.flops == pytest.approx(share * whole.flops, rel=0.01)


def test_the_critical_path_uses_recorded_events_between_streams():
    """The kernel waits for an event in stream 20, while another stream ends later for reasons of its own."""
    sync = {"cuda_sync_kind": "Stream Wait Event", "wait_on_stream": 20, "wait_on_cuda_event_record_corr_id": 11}
    events = [
        event("cuda_runtime", "cudaLaunchKernel", 0, 2, pid=9, tid=9, correlation=10),
        event("cuda_runtime", "cudaLaunchKernel", 4, 2, pid=9, tid=9, correlation=12),
        event("cuda_runtime", "cudaLaunchKernel", 8, 2, pid=9, tid=9, correlation=14),
        event("kernel", "awaited", 20, 300, tid=20, device=0, stream=20, correlation=10),
        event("kernel", "elsewhere", 20, 380, tid=28, device=0, stream=28, correlation=12),
        event("kernel", "late", 420, 100, tid=24, device=0, stream=24, correlation=14),
    ]
    waits = event("cuda_sync", "Stream Wait Event", 7, 1, tid=24, device=0, stream=24, correlation=13, **sync)
    guessed, known = analyze.critical_path(read(*events)), analyze.critical_path(read(*events, waits))
    assert "elsewhere" in {r["name"] for r in guessed.rows}
    assert "awaited" in {r["name"] for r in known.rows} and "elsewhere" not in {r["name"] for r in known.rows}
    assert not any("not in the trace" in note for note in known.notes)


def test_counters_survive_an_export(tmp_path):
    """What ncu counted is in the exported trace, and read from there."""
    trace = kernels("gemm", 3, 100.0, 5.0)
    counted = {"memory_stall_pct": 61.0, "sm_occupancy": 40.0, "warp_divergence_pct": 25.0}
    trace.extra = {int(row): dict(counted) for row in trace.rows("kernel")}
    written = Chrome(tmp_path / "out.json.gz").write(Recording(trace))
    stalls, divergence = analyze.stalls(written), analyze.divergence(written)
    assert stalls.rows[0]["memory_stall_pct"] == pytest.approx(61.0)
    assert divergence.rows[0]["warp_divergence_pct"] == pytest.approx(25.0)


def test_why_says_what_would_help():
    trace = read(
        event(
            "cpu_op",
            "aten::mm",
            0,
            10,
            pid=9,
            tid=9,
            **{"External id": 5, "Input Dims": [[8, 16], [16, 4]], "Input type": ["float"] * 2},
        ),
        event("cpu_op", "mine::add", 20, 10, pid=9, tid=9, **{"Input Dims": [[8], [8]], "Input type": ["float"] * 2}),
        event("kernel", "gemm", 12, 5, device=0, stream=7, correlation=-1, **{"External id": 5}),
    )
    told = [Telemetry(domain="gpu0", time_ns=BASE_NS, throttle=(), temperature_c=50.0)]
    records = {r.name: r for r in Recording(trace, telemetry=told).records()}
    assert records["aten::mm"].flops == 2 * 8 * 16 * 4 and records["gemm"].throttle_reason == "none"
    assert "shapes do not tell" in str(records["mine::add"].why("flops"))
    assert "recording.energy()" in str(records["aten::mm"].why("energy_j"))
    (alone,) = [r for r in Recording(trace).records() if r.kind == "kernel"]
    assert "telemetry" in str(alone.why("throttle_reason")) and "power samples" in str(alone.why("energy_j"))


@pytest.mark.parametrize(("chip", "taken_as"), [("NVIDIA H200", "nvml-samples"), ("AMD Instinct MI300X", "")])
def test_only_a_log_beside_nvidias_chip_is_its_ring(tmp_path, chip, taken_as):
    log = tmp_path / "power.csv"
    lines = [f"{BASE_NS // 1000 + 20_000 * i},gpu0,300" for i in range(20)]
    log.write_text("\n".join(["epoch_us,domain,watts", *lines]))
    recording = open_recording(kernels("gemm", 4, 900.0, 1.0, deviceProperties=[{"id": 0, "name": chip}]), power=log)
    assert recording.power is not None and recording.power.domains[0].taken_as == taken_as


def test_launches_have_delay_queue_and_short_kernels():
    """Three launches at once: the second and third wait for the kernels before them."""
    events = []
    for i, (at, lasts) in enumerate(((20.0, 100.0), (120.0, 5.0), (125.0, 50.0))):
        events.append(event("cuda_runtime", "cudaLaunchKernel", 3.0 * i, 2, pid=9, tid=9, correlation=i + 1))
        events.append(event("kernel", "k", at, lasts, device=0, stream=7, correlation=i + 1))
    found = analyze.launches(read(*events))
    (row,) = found.rows
    assert row["delay_max_s"] == pytest.approx(117e-6) and row["delay_p50_s"] == pytest.approx(115e-6)
    assert row["queue_max"] == 3 and row["short_calls"] == 1 and row["short_s"] == pytest.approx(5e-6)
    queued_us = 3 + 2 * 3 + 14 * 3 + 100 * 2 + 5  # one, then two, then three waiting; two from 20 us on, one from 120
    assert row["queue_mean"] == pytest.approx(queued_us / 125.0)
    assert "Launches" in text(found) and not analyze.launches(read()).rows


# -- ranks ----------------------------------------------------------------------------------------------------------


def rank_of(number: int, late_us: float, name: str, count: int = 6) -> Timeline:
    """All-to-all as NCCL 2.10 names it: rank `number` comes `late_us` late to each, and all end together."""
    rows = []
    for i in range(count):
        begin = 1000.0 * i
        rows.append(event("kernel", "gemm", begin, 300 + late_us, device=0, stream=7, correlation=-1))
        start = begin + 310 + late_us
        rows.append(
            event("kernel", f"{name}(ncclWorkElem)", start, begin + 700 - start, device=0, stream=20, correlation=-1)
        )
        rows.append(
            event(
                "kernel",
                "ncclKernel_AllReduce_RING_LL_Sum_float(x)",
                begin + 800,
                100,
                device=0,
                stream=20,
                correlation=-1,
            )
        )
    return read(*rows, distributedInfo={"rank": number, "world_size": 4})


def test_all_to_all_of_nccl_is_matched_and_the_straggler_is_right():
    ranks = [rank_of(r, 250.0 if r == 2 else 10.0 * r, "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t") for r in range(4)]
    offsets = [Offset(rank=r, error_ns=0.0, source="exchange") for r in range(4)]
    met = meetings(ranks, offsets, [0, 100, 200, 300])
    sent = [m for m in met if m.kind == "send_recv"]
    assert len(sent) == 6 and {m.straggler for m in sent} == {2} and all(len(m.ranks) == 4 for m in sent)


@pytest.mark.parametrize("kernel", ["ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", "ncclDevKernel_Generic(x)"])
def test_the_operator_tells_a_collective_whose_kernel_does_not(kernel):
    """NCCL 2.12 to 2.18 name the kernel of most collectives SendRecv, whatever they do."""
    ran = {"nccl:all_reduce": "all_reduce", "nccl:_all_gather_base": "all_gather", "nccl:all_to_all": "all_to_all"}
    events = []
    for i, name in enumerate((*ran, "aten::mm"), start=1):
        events.append(event("cpu_op", name, 100 * i, 50, pid=9, tid=9))
        events.append(event("cuda_runtime", "cudaLaunchKernel", 100 * i + 5, 2, pid=9, tid=9, correlation=i))
        events.append(event("kernel", kernel, 100 * i + 20, 40, device=0, stream=20, correlation=i))
    found = [row["kind"] for row in analyze.collectives(read(*events)).rows]
    assert found == [*ran.values(), "send_recv" if "SendRecv" in kernel else "other"]


def test_ranks_with_other_parts_of_a_run_keep_their_clocks():
    """Two random samples of the collectives of a run: a shift fits the names, and no shift the times."""
    at = [(0, 40, 55, 120, 190, 260), (0, 12, 130, 150, 171, 300)]
    names = [("AllReduce", "AllGather", "AllReduce", "AllReduce", "AllGather", "AllReduce"),
             ("AllReduce", "AllReduce", "AllGather", "AllReduce", "AllReduce", "AllGather")]  # fmt: skip
    ranks = [
        read(*(event("kernel", f"ncclDevKernel_{name}_RING_LL(x)", 1000.0 * ms, 500, device=0, stream=20)
               for ms, name in zip(at[r], names[r], strict=True)))
        for r in range(2)
    ]  # fmt: skip
    assert align(ranks)[1].error_ns is None and align(ranks)[1].offset_ns == 0


def test_merged_traces_without_power_say_that_they_take_a_log(tmp_path):
    """They said that no sensor could be read in this run, which had none."""
    for rank in range(2):
        at = {"baseTimeNanoseconds": BASE_NS, "distributedInfo": {"rank": rank, "world_size": 2}}
        kernel = event("kernel", "gemm", 1000, 500, device=rank, stream=7)
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(at | {"traceEvents": [kernel]}))
    merge(tmp_path).write(tmp_path / "merged.tessera").close()
    missing = analyze.kernels(tmp_path / "merged.tessera").missing["energy"]
    assert "has no power" in missing and "--power power.csv" in missing


def test_messages_of_pairs_are_no_meeting():
    """Two ranks whose k-th messages do not overlap did not wait for each other."""
    ranks = [
        read(
            *(
                event("kernel", "ncclDevKernel_SendRecv(x)", 1000.0 * i + 400 * r, 100, device=0, stream=20)
                for i in range(5)
            )
        )
        for r in range(2)
    ]
    offsets = [Offset(rank=r, error_ns=0.0, source="exchange") for r in range(2)]
    assert not meetings(ranks, offsets, [0, 100])


def test_drift_needs_a_span_that_can_show_it():
    """Three collectives within 4 ms: their ends differ by microseconds, and no clock drifts by 1,800 ppm."""
    times = np.array([0, 2_000_000, 4_000_000]) + BASE_NS
    line = fit(times, times + np.array([0, 4_000, 7_300]))
    assert line.drift == 0.0
    rng = np.random.default_rng(1)
    long = BASE_NS + np.arange(0, 60_000_000_000, 100_000_000)
    drifting = fit(long, long + np.rint((long - BASE_NS) * 20e-6 + rng.normal(0, 2000, len(long))).astype(np.int64))
    assert drifting.drift == pytest.approx(20e-6, rel=0.05)


def test_collectives_lists_all_with_sums_by_kind_first():
    comm = {
        "Collective name": "allreduce",
        "In msg nelems": 6_553_600,
        "Out msg nelems": 6_553_600,
        "dtype": "Float",
        "Group size": 8,
    }
    events = [
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 1000.0 * i, 500, device=0, stream=20, **comm)
        for i in range(3)
    ]
    events.append(event("kernel", "ncclKernel_AllGather_RING_LL_Sum_int8_t(x)", 9000, 500, device=0, stream=20))
    found = analyze.collectives(read(*events))
    assert len(found.rows) == 4 and found.facts["by_kind"]["all_reduce"]["bytes"] == 3 * 25 << 20
    shown = text(found, width=140)
    assert "25 MiB" in shown and "75 MiB" in shown
    assert shown.index("75 MiB") < shown.index("25 MiB")  # the sum of a kind stands before each


# -- power ----------------------------------------------------------------------------------------------------------


def test_all_of_many_spikes_are_found():
    """Forty spikes in a tenth of the time: the 95th percentile lies half-way down them."""
    watts = np.full(4000, 200.0)
    for i in range(40):
        watts[100 * i + 50 : 100 * i + 60] = 600.0 + (i % 2) * 80.0
    edges = BASE_NS + np.arange(4001) * 20_000_000
    curve = Curve(
        edges_ns=edges, begin_w=watts, end_w=watts, domains=("gpu0",), reach_s=0.01, resolution_s=0.02, noise=0.01
    )
    assert len(find_spikes(curve, choose_threshold(curve))) == 40
    assert len(find_spikes(curve, choose_threshold(curve, 95.0))) < 40


def test_a_recording_opens_its_own_forms(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [event("kernel", "k", 0, 1, device=0, stream=1)]}))
    assert isinstance(open_recording(path), Recording)


# -- ranks that come late -------------------------------------------------------------------------------------------


def of_ranks(folder: Path, slow: int | None, count: int = 4) -> Recording:
    """Ranks that compute, then meet: one of them computes three times as long."""
    for r in range(count):
        rows = []
        for i in range(6):
            begin = 1000.0 * i
            lasts = 600.0 if r == slow else 200.0
            rows.append(event("kernel", "gemm", begin, lasts, pid=r, device=r, stream=7))
            meets = event(
                "kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", begin + lasts, 650.0 - lasts + r * 0.001,
                pid=r, tid=20, device=r, stream=20,
            )  # fmt: skip
            rows.append(meets)
        about = {"distributedInfo": {"rank": r, "world_size": count}, "host_name": "node0"}
        trace = {"baseTimeNanoseconds": BASE_NS, "traceEvents": rows, **about}
        (folder / f"rank{r}.json").write_text(json.dumps(trace))
    return merge(folder, workers=1)


def test_the_rank_that_the_others_wait_for_comes_before_communication(tmp_path):
    found = analyze.advise(of_ranks(tmp_path, slow=2))
    late = next(r for r in found.rows if r["kind"] == "late rank")
    assert found.rows[0]["kind"] == "late rank" and "rank 2 comes last to 6 of 6" in late["evidence"]
    assert late["saves_s"] == pytest.approx(6 * 3 * 400e-6 / 4, rel=0.05) and late["by"] == "recorded times"
    sent = [r for r in found.rows if r["kind"] == "communication"]
    assert not sent or sent[0]["saves_s"] < late["saves_s"]  # waiting is not what overlap would hide


def test_ranks_in_step_have_no_late_one(tmp_path):
    assert "late rank" not in {r["kind"] for r in analyze.advise(of_ranks(tmp_path, slow=None)).rows}


def test_what_ranks_wait_in_two_collectives_at_once_counts_once(tmp_path):
    """Two buckets of gradients on two streams: rank 0 waits 400 us for rank 1 in both, at the same time."""
    for rank in range(2):
        rows = []
        for i in range(6):
            ready = 1000.0 * i + (400.0 if rank else 0.0)
            ends = 1000.0 * i + 600.0 + 0.001 * rank
            rows.append(event("kernel", "gemm", 1000.0 * i - 300.0, 250.0, pid=rank, device=rank, stream=7))
            for stream in (20, 21):
                name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
                rows.append(
                    event("kernel", name, ready, ends - ready, pid=rank, tid=stream, device=rank, stream=stream)
                )
        about = {"distributedInfo": {"rank": rank, "world_size": 2}, "host_name": "node0"}
        (tmp_path / f"rank{rank}.json").write_text(
            json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": rows, **about})
        )
    facts = analyze.collectives(tmp_path).facts
    waited_s = sum(sum(by.values()) for by in facts["across_ranks"]["waits_s"].values())
    assert waited_s == pytest.approx(6 * 400e-6, rel=0.05)
    assert facts["by_kind"]["all_reduce"]["wait_s"] == pytest.approx(waited_s)
    assert sum(group["wait_s"] for group in facts["by_group"]) == pytest.approx(waited_s)
