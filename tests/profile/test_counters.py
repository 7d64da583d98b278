"""Counters: tables, ncu's CSV (a recording of an H200), rocprof's and unitrace's (samples we wrote), replay, merge."""

from __future__ import annotations

import itertools
import json
import os
import stat
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tessera.errors import ArgumentError, MeasurementError, RecordingError, SensorPermission, SensorUnavailable
from tessera.profile.counters import KernelCounters, amd, intel, merge, ncu, nvidia, replay
from tessera.profile.counters import names as n
from tessera.profile.counters.merge import COLLECTIVE, COPY, NOT_REPLAYED, OTHER_SIZE, mean
from tessera.profile.demangle import demangle
from tessera.record import Record
from tessera.timeline.columns import Builder, Launch, Timeline

from places import TESTS

DATA = TESTS / "data" / "counters"
GEMM = "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT"
# One kernel as the C++ runtime (so Kineto) and as ncu write it.
MANGLED = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"
KINETO = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
    "(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)"
)
BY_NCU = (
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>, "
    "std::array<char *, (unsigned long)1>>(int, T2, T3)"
)


# --- tables, units and names


@pytest.mark.parametrize("table", [nvidia.TABLE, amd.TABLE, intel.TABLE])
def test_every_row_names_a_field_or_a_figure_and_its_source(table):
    for raw, metric in table.items():
        assert metric.source, raw
        if metric.field in n.FIELDS:
            assert (metric.unit == "%") == (metric.field in n.PERCENT), raw
        else:
            assert metric.field.isidentifier() and metric.field.islower(), raw


def test_every_stall_reason_is_classed_with_a_reason():
    kinds = {nvidia.MEMORY, nvidia.DEPENDENCY, nvidia.STRUCTURAL}
    assert {s.kind for s in nvidia.STALLS.values()} == kinds | {None}
    assert all(s.reason for s in nvidia.STALLS.values())
    assert kinds <= n.FIELDS
    assert {kind for kind, _ in intel.STALLS.values()} == kinds | {None}


@pytest.mark.parametrize(
    ("unit", "factor"),
    [
        ("byte", 1),
        ("Kbyte", 1e3),
        ("Mbyte", 1e6),
        ("Gbyte", 1e9),
        ("Gbyte/s", 1e9),
        ("byte/second", 1),
        ("second", 1),
        ("s", 1),
        ("msecond", 1e-3),
        ("ms", 1e-3),
        ("usecond", 1e-6),
        ("us", 1e-6),
        ("nsecond", 1e-9),
        ("ns", 1e-9),
        ("Gbyte/msecond", 1e12),
        ("%", 1),
        ("", 1),
        ("sector", 1),
        ("register/thread", 1),
        ("warp", 1),
    ],
)
def test_units_become_si(unit, factor):
    assert n.unit_factor(unit) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5", 1234.5),
        ("2,147,496,192", 2147496192.0),
        ("0", 0.0),
        (".5", 0.5),
        ("1e+06", 1e6),
        ("-3", -3.0),
        ("12 (1; 2)", 12.0),
        ("n/a", None),
        ("(!) n/a", None),
        ("nan", None),
        ("inf", None),
        ("", None),
    ],
)
def test_numbers_as_profilers_print_them(text, value):
    assert n.number(text) == value


def test_the_names_of_one_kernel_are_one_name():
    assert demangle(MANGLED) == KINETO
    assert demangle("triton_poi_fused_0") == "triton_poi_fused_0"
    assert demangle("_Znonsense") == "_Znonsense"
    assert n.canonical(MANGLED) == n.canonical(KINETO) == n.canonical(BY_NCU)


@pytest.mark.parametrize(
    ("runtime", "nvidia_writes"),
    [
        ("void f<true, -1, 4u>(float const*)", "void f<(bool)1, (int)-1, (unsigned int)4>(const float *)"),
        ("void (anonymous namespace)::g<int>(int)", "void <unnamed>::g<int>(T1)"),
        (
            "void k<a::f(a::B&)::{lambda(float)#1}::operator()(float) const>(int)",
            "void k<a::f(a::B &)::[lambda(float) (instance 1)]::operator ()(float) const>(T1)",
        ),
    ],
)
def test_demanglers_that_disagree(runtime, nvidia_writes):
    assert n.canonical(runtime) == n.canonical(nvidia_writes)


def test_different_instances_stay_different():
    assert n.canonical(KINETO) != n.canonical(KINETO.replace("<4,", "<8,"))
    assert n.canonical(KINETO) != n.canonical(KINETO.replace("float", "double"))


def test_percentages_a_little_over_are_cut_and_others_not_believed():
    rate = "lts__t_sector_hit_rate.pct"
    assert nvidia.normalise({rate: 100.7}).values["l2_hit_rate"] == 100.0
    assert nvidia.normalise({rate: -0.1}).values["l2_hit_rate"] == 0.0
    result = nvidia.normalise({rate: 131.0})
    assert "l2_hit_rate" not in result.values
    assert "131" in result.missing["l2_hit_rate"]


def test_what_the_chip_lacks_stays_none_with_a_reason():
    result = nvidia.normalise({})
    assert result.values == {}
    assert {"sm_occupancy", "tc_util_pct", "memory_stall_pct", "stall_reasons", "warps_eligible"} <= set(result.missing)
    assert set(result.missing) <= n.FIELDS


def test_available_keeps_what_the_chip_has():
    wanted = ["dram__bytes_read.sum", "sm__gone.sum", "launch__registers_per_thread"]
    assert nvidia.available(wanted, ["dram__bytes_read"]) == ["dram__bytes_read.sum", "launch__registers_per_thread"]


def test_asynchronous_copies_are_none_under_way_only_where_none_was_issued():
    ldgsts, tma = "smsp__inst_executed_op_ldgsts.sum", "sm__inst_executed_pipe_tma.sum"
    major = "device__attribute_compute_capability_major"
    assert nvidia.normalise({ldgsts: 0.0, tma: 0.0}).values["cp_async_inflight"] == 0.0
    assert nvidia.normalise({ldgsts: 0.0, major: 8.0}).values["cp_async_inflight"] == 0.0
    for raw in ({ldgsts: 0.0}, {ldgsts: 0.0, tma: 9.0}, {ldgsts: 5.0, tma: 0.0}, {}):
        assert "cp_async_inflight" in nvidia.normalise(raw).missing


def test_tensor_use_leaves_out_what_is_no_matrix_product():
    matrix = "sm__pipe_tensor_type_hmma_hgmma_qgmma_imma_igmma_bmma_bgmma_cycles_active" + nvidia._ACTIVE
    pipe = "sm__pipe_tensor_cycles_active" + nvidia._ACTIVE
    dmma = "sm__pipe_tensor_op_dmma_cycles_active" + nvidia._ACTIVE
    assert nvidia.normalise({pipe: 2.4, matrix: 0.0, dmma: 0.0}).values["tc_util_pct"] == 0.0
    assert nvidia.normalise({pipe: 2.4}).values["tc_util_pct"] == 2.4
    assert nvidia.normalise({pipe: 80.0, matrix: 0.0, dmma: 80.0}).values["tc_util_pct"] == 80.0


# --- ncu's CSV


@pytest.fixture(scope="module")
def recorded() -> list[KernelCounters]:
    return ncu.parse((DATA / "ncu_h200.csv").read_text())


def of(recorded: list[KernelCounters], part: str) -> KernelCounters:
    return next(k for k in recorded if part in k.name)


def test_a_recording_of_a_matrix_product(recorded):
    gemm = of(recorded, GEMM)
    assert gemm.grid == (2, 66, 1) and gemm.block == (384, 1, 1) and gemm.device == 0
    assert gemm.values["tc_util_pct"] > 90
    assert gemm.values["sm_occupancy"] < gemm.figures["theoretical_occupancy_pct"] == 18.75
    assert gemm.values["warps_launched"] == 2 * 66 * 12
    assert gemm.values["flops"] == 2 * 8192**2 * 8320  # whole tiles of 320 rows
    assert gemm.values["stall_reasons"]["gmma"] > 10
    assert "cp_async_inflight" in gemm.missing


def test_a_recording_of_a_stream(recorded):
    stream = of(recorded, "CUDAFunctorOnSelf_add")
    assert stream.name.startswith("void at::native::vectorized_elementwise_kernel<4,")
    assert stream.figures["dram_read_bytes"] == pytest.approx(2**31, rel=0.01)
    seconds = stream.figures["seconds"]
    assert stream.values["dram_read_gbps"] == pytest.approx(2**31 / seconds * 1e-9, rel=0.01)
    assert stream.values["memory_stall_pct"] > 80
    assert stream.values["cp_async_inflight"] == 0.0


def test_a_recording_of_divergence_and_bank_conflicts(recorded):
    assert of(recorded, "diverging").values["warp_divergence_pct"] == pytest.approx(48.4, abs=4)
    conflicting = of(recorded, "conflicting")
    assert conflicting.values["warp_divergence_pct"] == 0.0
    assert conflicting.values["smem_bank_conflicts"] == pytest.approx(1056 * 8 * 256 * 31, rel=0.01)


def test_all_values_of_a_recording_are_of_the_schema(recorded):
    for kernel in recorded:
        assert set(kernel.values) <= n.FIELDS
        Record(kind="kernel", name=kernel.name, start_ns=0, end_ns=1, **kernel.values)
        for field in n.PERCENT & set(kernel.values):
            assert 0.0 <= kernel.values[field] <= 100.0, field
        stalls = [kernel.values[f] for f in (nvidia.MEMORY, nvidia.DEPENDENCY, nvidia.STRUCTURAL)]
        assert 50.0 < sum(stalls) <= 100.0 + 1e-9
        assert sum(kernel.values["stall_reasons"].values()) <= 100.1


def test_lines_around_the_table_and_scaled_units():
    text = textwrap.dedent("""\
        ==PROF== Connected to process 7
        step 1, loss "0.5"
        "ID","Process ID","Kernel Name","Block Size","Grid Size","CC","dram__bytes_read.sum","gpu__time_duration.sum"
        "","","","","","","Gbyte","usecond"
        "0","7","k(int)","(128, 1, 1)","(2, 3, 1)","1","1.50","1,500.25"
        "epoch 3"
        "1","7","k(int)","(128, 1, 1)","(2, 3, 1)","1","n/a","2"
        ==WARNING== something
        "ID","Process ID","Kernel Name","Block Size","Grid Size","Device","dram__bytes_read.sum"
        "","","","","","","byte"
        "0","8","other","(32, 1, 1)","(1, 1, 1)","0","(!) n/a"
    """)
    first, second, third = ncu.parse(text)
    assert first.figures == pytest.approx({"dram_read_bytes": 1.5e9, "seconds": 1500.25e-6})
    assert (first.name, first.grid, first.block) == ("k(int)", (2, 3, 1), (128, 1, 1))
    assert second.figures == pytest.approx({"seconds": 2e-6})
    assert third.name == "other" and third.figures == {}


def test_the_details_page_has_a_row_for_each_metric():
    text = textwrap.dedent("""\
        "ID","Process ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit","Metric Value"
        "0","7","k","(128, 1, 1)","(2, 1, 1)","gpu__time_duration.sum","us","3.00"
        "0","7","k","(128, 1, 1)","(2, 1, 1)","dram__bytes_read.sum","Mbyte","2"
    """)
    (kernel,) = ncu.parse(text)
    assert kernel.figures == pytest.approx({"seconds": 3e-6, "dram_read_bytes": 2e6})


def test_nothing_in_an_empty_output():
    assert ncu.parse("") == ncu.parse("==PROF== Connected\n") == []


# --- replay, with a stand-in for ncu


FAKE_NCU = r"""#!{python}
import os, subprocess, sys
args = sys.argv[1:]
if "--query-metrics" in args:
    print("Device Fake (GH100)\nMetric Name   Metric Type\ndram__bytes_read   Counter\ngpu__time_duration   Counter")
    sys.exit(0)
log = args[args.index("--log-file") + 1]
command = args[args.index("--") + 1:] if "--" in args else args[args.index("{python}"):]
with open({folder!r} + "/argv.txt", "w") as f:
    f.write("\n".join(args))
mode = os.environ.get("FAKE", "")
with open(log, "w") as f:
    if mode == "permission":
        f.write("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance "
                "Counters on the target device 0.\n")
        sys.exit(1)
    if mode == "busy":
        f.write("==ERROR== Profiling failed because a driver resource was unavailable.\n")
        sys.exit(1)
    f.write("==PROF== Connected to process 1\n==WARNING== Running with unmodified GPU clocks.\n")
    f.flush()
    code = subprocess.run(command).returncode
    if code:
        f.write("==ERROR== The application returned an error code (%d).\n" % code)
    if mode == "none":
        f.write("==WARNING== No kernels were profiled.\n")
    else:
        f.write(open({csv!r}).read())
sys.exit(code)
"""


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch) -> Path:
    """A stand-in that runs the command and prints our recording; what it was called with is in argv.txt."""
    path = tmp_path / "bin" / "ncu"
    path.parent.mkdir()
    csv = str(DATA / "ncu_h200.csv")
    path.write_text(FAKE_NCU.format(python=sys.executable, folder=str(tmp_path), csv=csv))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    ncu.chip_metrics.cache_clear()
    return tmp_path / "argv.txt"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_replay_runs_the_command_under_ncu(fake_ncu, tmp_path):
    seen = tmp_path / "seen.txt"
    ticks: list[float] = []
    code = f"import os, time; open({str(seen)!r}, 'w').write(os.environ['TESSERA_REPLAY']); time.sleep(0.6)"
    found = replay(python(code), kernels=3, match="gemm", nvtx="step 3/", progress=ticks.append)
    assert seen.read_text() == "1"
    assert ticks and ticks == sorted(ticks)
    assert len(found) == len(ncu.parse((DATA / "ncu_h200.csv").read_text()))
    assert found.passes > len(found) and found.seconds > 0.5 and found.notes == []
    args = fake_ncu.read_text().splitlines()
    options = dict(itertools.pairwise(args))
    assert options["--filter-mode"] == "per-launch-config" and options["--launch-count"] == "3"
    assert options["--nvtx-include"] == "step 3/"
    assert options["--clock-control"] == "none" and options["--replay-mode"] == "kernel"
    assert options["--metrics"].split(",")[0] == "gpu__time_duration.sum"
    assert "sm__warps_active" not in options["--metrics"]  # the stand-in's chip does not have it
    assert "launch__registers_per_thread" in options["--metrics"]
    assert options["--kernel-name"] == "regex:^(?!.*(nccl|nvshmem)).*(gemm)"


def test_every_launch(fake_ncu):
    replay(python("pass"), kernels=None, flops=True)
    assert "--launch-count" not in fake_ncu.read_text().splitlines()


def test_no_permission_says_where_to_get_it(fake_ncu, monkeypatch):
    monkeypatch.setenv("FAKE", "permission")
    with pytest.raises(SensorPermission) as error:
        replay(python("pass"))
    assert "https://developer.nvidia.com/ERR_NVGPUCTRPERM" in error.value.fix
    assert "NVreg_RestrictProfilingToAdminUsers=0" in error.value.fix


def test_counters_another_tool_holds(fake_ncu, monkeypatch):
    monkeypatch.setenv("FAKE", "busy")
    with pytest.raises(SensorUnavailable, match="another tool") as error:
        replay(python("pass"))
    assert "dcgmi" in error.value.fix


def test_the_commands_failure_is_passed_on(fake_ncu):
    with pytest.raises(MeasurementError, match="exit status 3") as error:
        replay(python("import sys; print('the loss is nan'); sys.exit(3)"))
    assert "the loss is nan" in str(error.value)


def test_no_kernel(fake_ncu, monkeypatch):
    monkeypatch.setenv("FAKE", "none")
    with pytest.raises(MeasurementError, match="no kernel") as error:
        replay(python("pass"))
    assert "No kernels were profiled" in error.value.why


def test_the_time_runs_out(fake_ncu):
    with pytest.raises(MeasurementError, match=r"stopped after 0.4 s"):
        replay(python("import time; time.sleep(30)"), timeout_s=0.4)


def test_no_ncu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(SensorUnavailable) as error:
        replay(["true"])
    assert "nsight-compute" in error.value.fix


def test_ncu_in_its_own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    tool = tmp_path / "cuda" / "bin" / "ncu"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert ncu.find_ncu() == str(tool)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    there = {
        "/opt/nvidia/nsight-compute": [
            Path("/opt/nvidia/nsight-compute/2025.10.0/ncu"),
            Path("/opt/nvidia/nsight-compute/2025.3.1/ncu"),
        ]
    }
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(there.get(str(self), [])))
    assert ncu.find_ncu() == "/opt/nvidia/nsight-compute/2025.10.0/ncu"


def test_no_command():
    with pytest.raises(ArgumentError):
        replay([])


def test_ncu_that_does_not_answer_is_asked_for_everything(tmp_path):
    ncu.chip_metrics.cache_clear()
    assert ncu.chip_metrics(str(tmp_path / "nothing")) == frozenset()


# --- AMD and Intel


def test_rocprofv3_rows_of_a_dispatch_become_one_kernel():
    first, second = amd.read(DATA / "rocprofv3.csv")
    assert first.name == "void scale<float>(float*, float const*, int)"
    assert first.source == "rocprofv3" and first.block == (256,) and first.grid == (4096,)
    v = first.values
    assert v["sm_occupancy"] == 61.5 and v["warps_launched"] == 16384
    assert v["warp_divergence_pct"] == pytest.approx(6.25)
    assert v["l2_hit_rate"] == pytest.approx(75.0)
    assert v["dram_read_gbps"] == pytest.approx(4096 * 1024 / 5e-6 * 1e-9)
    assert v["dependency_stall_pct"] == pytest.approx(40.0) and v["structural_stall_pct"] == pytest.approx(10.0)
    assert v["memory_stall_pct"] == 22.0
    assert v["stall_reasons"] == {"memory unit": 22.0}
    assert first.figures["seconds"] == pytest.approx(5e-6)
    assert "tc_util_pct" in first.missing
    assert second.values["tc_util_pct"] == 78.25
    assert "dram_read_gbps" in second.missing  # no size was counted


def test_rocprof_columns():
    (kernel,) = amd.read(DATA / "rocprof.csv")
    assert kernel.name == "gemm_kernel" and kernel.source == "rocprof" and kernel.device == 2
    assert kernel.grid == (1024,) and kernel.block == (256,)
    assert kernel.values["alu_util_pct"] == 33.5 and kernel.values["l2_hit_rate"] == 88.0
    assert kernel.values["dram_write_gbps"] == pytest.approx(512 * 1024 / 20e-6 * 1e-9)
    assert kernel.values["stall_reasons"] == {"memory unit": 4.0, "write unit": 7.0, "LDS bank conflict": 1.5}
    assert kernel.values["memory_stall_pct"] == 7.0


def test_unitrace_queries():
    first, second = intel.read(DATA / "unitrace_query.csv")
    assert first.name == "saxpy(float*, float, int)" and first.grid == (8192, 1, 1) and first.block == (128, 1, 1)
    assert first.device == 0 and first.source == "unitrace"
    v = first.values
    assert v["sm_occupancy"] == 71.25 and v["inst_issue_eff_pct"] == 20.5 and v["alu_util_pct"] == 8.0
    assert v["tc_util_pct"] == 0.0 and v["warps_launched"] == 32768
    assert v["dram_read_gbps"] == pytest.approx(8388608 / 10e-6 * 1e-9)
    assert v["l2_gbps"] == pytest.approx((8400000 + 4194304) / 10e-6 * 1e-9)
    assert v["stall_reasons"] == {"all reasons": 75.0}
    assert first.missing["memory_stall_pct"] == "needs unitrace --stall-sampling"
    assert second.name == "gemm" and second.values["tc_util_pct"] == 89.0


def test_unitrace_samples_of_one_kernel_are_weighed_by_time():
    (kernel,) = intel.read(DATA / "unitrace_sampling.csv")
    assert kernel.values["sm_occupancy"] == pytest.approx((50 * 1 + 80 * 3) / 4)
    assert kernel.figures["dram_read_bytes"] == 3000
    assert kernel.figures["seconds"] == pytest.approx(4e-6)


def test_unitrace_stalls():
    (kernel,) = intel.read(DATA / "unitrace_stalls.csv")
    assert kernel.values["memory_stall_pct"] == pytest.approx(60.0)
    assert kernel.values["dependency_stall_pct"] == pytest.approx(10.0)
    assert kernel.values["structural_stall_pct"] == pytest.approx(5.0)


@pytest.mark.parametrize("reader", [amd.read, intel.read])
def test_another_file_is_told_apart(reader, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(RecordingError) as error:
        reader(path)
    assert error.value.why and error.value.fix


# --- merge


def timeline(*rows: tuple[str, str, Launch | None, int]) -> Timeline:
    """Rows of (kind, name, launch, nanoseconds)."""
    built = Builder()
    at = 1_000
    for kind, name, launch, ns in rows:
        integers = {} if launch is None else {"launch": built.intern_launch(launch)}
        built.add(kind, name, at, at + ns, **integers)
        at += ns + 10
    return built.build()


def kernel(name: str = KINETO, grid=(4, 1, 1), block=(128, 1, 1), **values) -> KernelCounters:
    return KernelCounters(name=name, grid=grid, block=block, values=values)


SMALL = Launch(grid=(4, 1, 1), block=(128, 1, 1), registers=32)
LARGE = Launch(grid=(9, 1, 1), block=(128, 1, 1))


def test_rows_get_the_mean_of_their_launches():
    t = timeline(("kernel", KINETO, SMALL, 600), ("kernel", KINETO, SMALL, 400), ("op", "aten::add", None, 5000))
    merged = merge(
        t,
        [
            kernel(sm_occupancy=40.0, stall_reasons={"wait": 10.0}),
            kernel(sm_occupancy=60.0, tc_util_pct=7.0, stall_reasons={"drain": 4.0}),
        ],
    )
    assert dict(merged.extra[0]) == {
        "sm_occupancy": 50.0,
        "tc_util_pct": 7.0,
        "stall_reasons": {"wait": 5.0, "drain": 2.0},
    }
    assert merged.extra[0] is merged.extra[1]
    assert 2 not in merged.extra and set(merged.extra) == {0, 1} and len(merged.extra) == 2
    assert merged.coverage == 1.0 and merged.missing_s == {}
    assert merged.rows == merged.matched_rows == 2 and merged.kernels[0].launches == 2
    with pytest.raises(KeyError):
        merged.extra[99]


@pytest.mark.parametrize("name", [MANGLED, KINETO, BY_NCU])
@pytest.mark.parametrize("replayed", [MANGLED, KINETO, BY_NCU])
def test_however_the_name_is_written(name, replayed):
    merged = merge(timeline(("kernel", name, SMALL, 100)), [kernel(replayed, sm_occupancy=1.0)])
    assert merged.coverage == 1.0


def test_why_rows_have_none():
    t = timeline(
        ("kernel", KINETO, SMALL, 500),
        ("kernel", KINETO, LARGE, 200),
        ("kernel", "other", SMALL, 100),
        ("memcpy", "Memcpy HtoD", None, 150),
        ("collective", "ncclDevKernel_AllReduce", None, 50),
    )
    merged = merge(t, [kernel(sm_occupancy=1.0)])
    assert merged.missing_s == pytest.approx({OTHER_SIZE: 2e-7, NOT_REPLAYED: 1e-7, COPY: 1.5e-7, COLLECTIVE: 5e-8})
    assert merged.coverage == pytest.approx(0.5)
    notes = merged.notes()
    assert notes[0] == "counters: 50.0% of device time (1 of 5 rows)"
    assert notes[1].startswith("without counters: 20.0%") and len(notes) == 5


def test_totals_match_where_the_profiler_gives_no_more():
    launch = Launch(grid=(2, 8, 1), block=(64, 4, 1))
    merged = merge(timeline(("kernel", "k", launch, 100)), [kernel("k", grid=(16,), block=(256,), sm_occupancy=1.0)])
    assert merged.coverage == 1.0


def test_a_row_without_a_launch_size_matches_only_where_there_is_one():
    t = timeline(("kernel", "k", None, 100))
    one = kernel("k", sm_occupancy=1.0)
    assert merge(t, [one]).coverage == 1.0
    assert merge(t, [one, kernel("k", grid=(5, 1, 1), sm_occupancy=1.0)]).missing_s.keys() == {OTHER_SIZE}


def test_two_dimensions_are_three():
    launch = Launch(grid=(4, 1, 1), block=(128, 1, 1))
    merged = merge(timeline(("kernel", "k", launch, 9)), [kernel("k", grid=(4, 1), block=(128, 1), sm_occupancy=1.0)])
    assert merged.coverage == 1.0


def test_what_rows_had_before_stays():
    t = timeline(("kernel", KINETO, SMALL, 100), ("collective", "nccl", None, 100))
    t.extra = {0: {"collective_overlap_pct": 3.0, "sm_occupancy": 9.0}, 1: {"collective_overlap_pct": 5.0}}
    merged = merge(t, [kernel(sm_occupancy=1.0)])
    assert dict(merged.extra[0]) == {"collective_overlap_pct": 3.0, "sm_occupancy": 1.0}
    assert dict(merged.extra[1]) == {"collective_overlap_pct": 5.0}
    assert len(merged.extra) == 2 and set(merged.extra) == {0, 1}


def test_a_replay_that_read_nothing():
    merged = merge(timeline(("kernel", KINETO, SMALL, 100)), [kernel()])
    assert merged.coverage == 0.0 and "gave no counters" in next(iter(merged.missing_s))


def test_nothing_to_merge():
    assert merge(timeline(), []).coverage is None
    assert merge(timeline(), []).notes() == ["counters: nothing ran on a device"]
    assert merge(timeline(("op", "aten::add", None, 5)), []).coverage is None


def test_many_rows_share_one_mapping_for_each_kernel_and_size():
    built = Builder()
    count = 300_000
    launches = [built.intern_launch(Launch(grid=(g, 1, 1), block=(128, 1, 1))) for g in range(1, 9)]
    names = [built.intern(f"kernel_{i}") for i in range(50)]
    start = np.arange(count, dtype=np.int64) * 10
    built.extend(
        {
            "kind": np.zeros(count),
            "name": np.resize(names, count),
            "start_ns": start,
            "end_ns": start + 8,
            "launch": np.resize(launches, count),
        },
        count,
    )
    counters = [kernel(f"kernel_{i}", grid=(g, 1, 1), sm_occupancy=1.0) for i in range(50) for g in range(1, 9)]
    merged = merge(built.build(), counters)
    assert merged.coverage == 1.0 and len(merged.extra) == count
    assert len({id(merged.extra[r]) for r in range(1000)}) == 200  # one for each kernel and size


def test_the_mean_of_one_is_itself():
    one = kernel(sm_occupancy=3.0)
    assert mean([one]) is one


def test_what_kineto_and_ncu_recorded_of_one_script_agrees(recorded):
    """The names, grids and blocks of the same script under Kineto and under ncu, on an H200."""
    seen = json.loads((DATA / "kineto_h200.json").read_text())
    rows = [("kernel", k["name"], Launch(grid=tuple(k["grid"]), block=tuple(k["block"])), 1000) for k in seen]
    merged = merge(timeline(*rows), recorded)
    assert merged.coverage == 1.0, merged.notes()
