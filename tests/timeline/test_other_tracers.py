"""Traces of rocprofv3, JAX and Perfetto, made by hand as those tools write them."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera import analyze
from tessera.cli.main import cli
from tessera.errors import RecordingError
from tessera.profile.open_recording import load
from tessera.timeline.open_trace import is_trace, read_trace
from tessera.timeline.protobuf import DamagedMessage, as_double, as_signed, read_fields

GEMM = "Cijk_Alik_Bljk_BBS_BH_MT16x16x512"
START = 63_857_000_000_000

# -- rocprofv3 ------------------------------------------------------------------------------------------------------


def handle(number: int) -> dict[str, int]:
    return {"handle": number}


def record(kind: int, operation: int, start: int, lasts: int, correlation: int, **more: Any) -> dict[str, Any]:
    return {
        "size": 184, "kind": kind, "operation": operation, "thread_id": 908,
        "correlation_id": {"internal": correlation, "external": 0}, "start_timestamp": START + start,
        "end_timestamp": START + start + lasts, **more,
    }  # fmt: skip


def dispatch(start: int, lasts: int, correlation: int, kernel: int, agent: int = 37946) -> dict[str, Any]:
    info = {
        "agent_id": handle(agent), "queue_id": handle(16), "kernel_id": kernel, "group_segment_size": 512,
        "workgroup_size": {"x": 256, "y": 1, "z": 1}, "grid_size": {"x": 1024, "y": 2, "z": 1},
    }  # fmt: skip
    return record(11, 2, start, lasts, correlation, dispatch_info=info, stream_id=handle(3))


def of_rocprof() -> dict[str, Any]:
    copy = {"dst_agent_id": handle(37947), "src_agent_id": handle(37944), "bytes": 4096}
    process = {
        "metadata": {"node": {"hostname": "node7"}, "pid": 908, "command": ["python", "train.py"], "init_time": START},
        "agents": [
            {"id": handle(37944), "type": 1, "product_name": "AMD EPYC 9575F", "logical_node_type_id": 0},
            {"id": handle(37946), "type": 2, "product_name": "AMD Instinct MI350X", "logical_node_type_id": 0},
            {"id": handle(37947), "type": 2, "product_name": "AMD Instinct MI350X", "logical_node_type_id": 1},
        ],
        "strings": {
            "buffer_records": [
                {"kind": "NONE", "operations": []},
                {"kind": "HIP_RUNTIME_API", "operations": ["hipLaunchKernel", "hipGraphLaunch"]},
                {"kind": "MEMORY_COPY", "operations": ["NONE", "MEMORY_COPY_HOST_TO_DEVICE"]},
                {"kind": "MARKER_CORE_API", "operations": ["roctxRangePushA"]},
            ],
            "marker_api": [{"key": 9, "value": "step 1"}],
        },
        "kernel_symbols": [
            {"kernel_id": 1, "formatted_kernel_name": GEMM},
            {"kernel_id": 2, "formatted_kernel_name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"},
        ],
        "buffer_records": {
            "kernel_dispatch": [
                dispatch(2000, 500, 1, 1), dispatch(3000, 700, 2, 2, agent=37947), dispatch(1, -START, 5, 1),
            ],
            "memory_copy": [record(2, 1, 1000, 100, 3, **copy)],
            "hip_api": [record(1, 0, 1800, 50, 1), record(1, 1, 1900, 50, 2)],
            "marker_api": [record(3, 0, 500, 5000, 9)],
        },
    }  # fmt: skip
    return {"rocprofiler-sdk-tool": [process]}


def test_rocprofs_json_is_read(tmp_path):
    path = tmp_path / "908_results.json.gz"
    path.write_bytes(gzip.compress(json.dumps(of_rocprof(), indent=2).encode()))
    assert is_trace(path)
    timeline = read_trace(path)
    rows = {r.name: r for r in timeline.records()}
    gemm, nccl, copy = rows[GEMM], rows["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"], rows["Memcpy HOST_TO_DEVICE"]
    assert (gemm.kind, gemm.device, gemm.stream_id, gemm.end_ns - gemm.start_ns) == ("kernel", 0, 3, 500)
    assert gemm.grid == (4, 2, 1) and gemm.block == (256, 1, 1) and gemm.shared_bytes == 512
    assert (nccl.kind, nccl.device, nccl.collective_type) == ("collective", 1, "all_reduce")
    assert (copy.kind, copy.memcpy_dir, copy.bytes, copy.device) == ("memcpy", "HtoD", 4096, 1)
    assert gemm.region == "step 1" and timeline.linked.steps[0].name == "step 1"
    assert rows["hipGraphLaunch"].kind == "graph_launch" and len(timeline) == 6  # one dispatch never ended
    assert any("wall clock" in note for note in timeline.notes)
    assert "MI350X" in str(timeline.meta["deviceProperties"])
    assert analyze.launches(path).rows[0]["delay_p50_s"] is not None  # kernels know their launches


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, rows[0].keys(), quoting=csv.QUOTE_NONNUMERIC)
        out.writeheader()
        out.writerows(rows)


@pytest.mark.parametrize("agents", [True, False])
def test_rocprofs_csv_is_read_with_its_neighbours(tmp_path, agents):
    times = {"Start_Timestamp": START + 2000, "End_Timestamp": START + 2500}
    sizes = {f"{what}_{axis}": n for what, n in (("Workgroup_Size", 64), ("Grid_Size", 640)) for axis in "XYZ"}
    kernel = {
        "Kind": "KERNEL_DISPATCH", "Agent_Id": "Agent 4", "Queue_Id": 1, "Stream_Id": 2, "Thread_Id": 70,
        "Kernel_Name": GEMM, "Correlation_Id": 7, **times, "LDS_Block_Size": 0, **sizes,
    }  # fmt: skip
    write_csv(tmp_path / "908_kernel_trace.csv", [kernel, {**kernel, "Agent_Id": "Agent 6", "Correlation_Id": 8}])
    call = {"Domain": "HIP_RUNTIME_API", "Function": "hipLaunchKernel", "Process_Id": 1, "Thread_Id": 70}
    call |= {"Correlation_Id": 7, "Start_Timestamp": START, "End_Timestamp": START + 10}
    write_csv(tmp_path / "908_hip_api_trace.csv", [call])
    write_csv(tmp_path / "908_marker_api_trace.csv", [{**call, "Function": "forward", "End_Timestamp": START + 9999}])
    copy = {"Kind": "MEMORY_COPY", "Direction": "DEVICE_TO_HOST", "Source_Agent_Id": "Agent 6"}
    copy |= {"Destination_Agent_Id": "Agent 0", "Correlation_Id": 0, **times}
    write_csv(tmp_path / "908_memory_copy_trace.csv", [copy])
    if agents:
        info = [
            {"Node_Id": n, "Agent_Type": "CPU" if n < 2 else "GPU", "Product_Name": f"chip {n}"} for n in (0, 2, 4, 6)
        ]
        write_csv(tmp_path / "908_agent_info.csv", info)
    path = tmp_path / "908_kernel_trace.csv"
    timeline = read_trace(path)
    rows = list(timeline.records())
    kernels = [r for r in rows if r.kind == "kernel"]
    assert [k.device for k in kernels] == ([1, 2] if agents else [0, 1]) and kernels[0].grid == (10, 10, 10)
    assert kernels[0].region == "forward" and timeline.linked.launch[0] >= 0
    (memcpy,) = [r for r in rows if r.kind == "memcpy"]
    assert memcpy.memcpy_dir == "DtoH" and memcpy.device == kernels[1].device
    assert [p["name"] for p in timeline.meta["deviceProperties"]] == (["chip 2", "chip 4", "chip 6"] if agents else [])
    result = CliRunner().invoke(cli, ["report", str(path), "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 0 and "Cijk" in result.output


def test_rocprofs_counters_are_read_beside_its_kernels(tmp_path):
    kernel = {
        "Agent_Id": "Agent 4", "Queue_Id": 1, "Kernel_Name": GEMM, "Correlation_Id": 7, "Start_Timestamp": START,
        "End_Timestamp": START + 500, **{f"{w}_{a}": 64 if a == "X" else 1 for w in ("Workgroup_Size", "Grid_Size")
        for a in "XYZ"},
    }  # fmt: skip
    write_csv(tmp_path / "908_kernel_trace.csv", [kernel])
    counted = {"Dispatch_Id": 1, "Agent_Id": "Agent 4", "Kernel_Name": GEMM, "Grid_Size": 64, "Workgroup_Size": 64}
    values = (("OccupancyPercent", 61.5), ("MemUnitStalled", 30.0))
    rows = [{**counted, "Counter_Name": name, "Counter_Value": value} for name, value in values]
    write_csv(tmp_path / "908_counter_collection.csv", rows)
    (found,) = load(tmp_path / "908_kernel_trace.csv").records()
    assert (found.sm_occupancy, found.memory_stall_pct, found.tc_util_pct) == (61.5, 30.0, None)
    (stalled,) = analyze.stalls(tmp_path / "908_kernel_trace.csv").rows
    assert stalled["memory_stall_pct"] == 30.0


# -- protocol buffers, as their tools write them ----------------------------------------------------------------------


def varint(value: int) -> bytes:
    out, value = b"", value % (1 << 64)
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def pack(*fields: tuple[int, Any]) -> bytes:
    """A message: integers, texts and messages by the type of their value, doubles as fixed."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        elif isinstance(value, float):
            out += varint(number << 3 | 1) + struct.pack("<d", value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


@given(st.lists(st.tuples(st.integers(1, 2000), st.one_of(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=300)))))
def test_fields_are_those_that_were_written(fields):
    found = [(n, as_signed(v) if isinstance(v, int) else bytes(v)) for n, v in read_fields(memoryview(pack(*fields)))]
    assert found == fields


@given(st.binary(max_size=400))
@settings(max_examples=300)
def test_damaged_messages_are_refused_or_read(data):
    with contextlib.suppress(DamagedMessage):
        list(read_fields(memoryview(data)))


def test_doubles_are_read():
    (field,) = read_fields(memoryview(pack((2, 1.5))))
    assert as_double(field[1]) == 1.5


STATS = {1: "correlation_id", 2: "hlo_op", 3: "tf_op", 4: "kernel_details", 5: "memcpy_details", 6: "step_num",
         7: "profile_start_time", 20: "dot.3", 21: "jit(f)/dot_general", 22: "regs:32 grid:8,1,1 block:128,1,1",
         23: "size:4096 kind:h2d", 24: "XlaModule:"}  # fmt: skip


def plane(
    name: str, lines: list[tuple[int, str, list[tuple[str, int, int, list[bytes]]]]], own: tuple[bytes, ...] = ()
) -> bytes:
    names = sorted({event[0] for _, _, events in lines for event in events})
    out = pack((2, name))
    for number, line, events in lines:
        packed = [
            (4, pack((1, names.index(n) + 1), (2, start * 1000), (3, lasts * 1000), *((4, s) for s in stats)))
            for n, start, lasts, stats in events
        ]
        out += pack((3, pack((1, number), (2, line), (3, 5000), *packed)))
    for i, event in enumerate(names, 1):
        out += pack((4, pack((1, i), (2, pack((1, i), (2, event))))))
    for key, stat in STATS.items():
        out += pack((5, pack((1, key), (2, pack((1, key), (2, stat))))))
    return out + pack(*((6, stat) for stat in own))


def number(stat: int, value: int) -> bytes:
    return pack((1, stat), (3, value))


def shared(stat: int, text: int) -> bytes:
    return pack((1, stat), (7, text))


def of_jax() -> bytes:
    began = 1_790_000_000_000_000_000
    kernels = [
        ("loop_fusion.kd", 100, 50, [number(1, 1), shared(2, 20), shared(3, 21), shared(4, 22)]),
        ("gemm_fusion_dot", 200, 80, [number(1, 2), shared(2, 20), shared(3, 24)]),
    ]
    copies = [("MemcpyH2D", 10, 5, [number(1, 3), shared(5, 23)])]
    calls = [
        ("hipModuleLaunchKernel", 60, 10, [number(1, 1)]), ("hipModuleLaunchKernel", 80, 10, [number(1, 2)]),
        ("train", 0, 300, [number(6, 4)]), ("$train.py:3 step", 1, 2, []), ("ExecuteHelper", 50, 60, []),
    ]  # fmt: skip
    device = plane("/device:GPU:1", [(1, "Stream #16(Kernel)", kernels), (2, "Stream #17(MemcpyH2D)", copies),
                                     (3, "XLA Ops", kernels)])  # fmt: skip
    host = plane("/host:CPU", [(7, "python", calls)])
    environment = plane("Task Environment", [], (pack((1, 7), (3, began)),))
    return pack((1, device), (1, host), (1, environment), (4, "node7"))


def test_jax_is_read(tmp_path):
    path = tmp_path / "node7.xplane.pb"
    path.write_bytes(of_jax())
    timeline = read_trace(path)
    rows = list(timeline.records())
    kernels = [r for r in rows if r.kind == "kernel"]
    assert [k.name for k in kernels] == ["loop_fusion", "gemm_fusion_dot"]  # the derived line repeats them
    assert (
        kernels[0].start_ns == 1_790_000_000_000_000_000 + 5100
        and kernels[0].device == 1
        and kernels[0].stream_id == 16
    )
    assert kernels[0].grid == (8, 1, 1) and kernels[0].block == (128, 1, 1) and kernels[0].registers == 32
    assert [k.op for k in kernels] == ["jit(f)/dot_general", "dot.3"]  # the framework's name, else the HLO's
    (copy,) = [r for r in rows if r.kind == "memcpy"]
    assert copy.memcpy_dir == "HtoD" and copy.bytes == 4096
    assert [s.name for s in timeline.linked.steps] == ["step 4"] and timeline.linked.step[0] == 0
    assert list(timeline.notes) == ["not read: 1 events of the Python tracer"]


def test_advice_for_jax_is_not_about_torch(tmp_path):
    path = tmp_path / "node7.xplane.pb"
    kernels = [("loop_reduce_fusion", 1000 * i, 900, [number(1, i + 1)]) for i in range(50)]
    path.write_bytes(pack((1, plane("/device:GPU:0", [(1, "Stream #16(Kernel)", kernels)]))))
    assert all("torch" not in row["action"] for row in analyze.advise(load(path)).rows)


def packet(sequence: int, *fields: tuple[int, Any]) -> bytes:
    return pack((1, pack((10, sequence), *fields)))


def of_perfetto() -> bytes:
    """As rocprofv3 writes it: interned names, a queue's track, one clock that counts up."""
    interned = pack(
        (1, pack((1, 1), (2, "kernel_dispatch"))), (2, pack((1, 5), (2, GEMM))), (3, pack((1, 2), (2, "corr_id")))
    )
    clock = pack((1, pack((1, 64), (2, START), (3, 1))))
    out = packet(1, (6, clock), (59, pack((58, 64))), (13, 1))
    out += packet(1, (60, pack((1, 900), (2, "COMPUTE [4] QUEUE [2]"))))
    out += packet(1, (60, pack((1, 901), (4, pack((1, 908), (2, 909), (5, "python"))))))
    begin = pack((3, 1), (10, 5), (9, 1), (11, 900), (4, pack((1, 2), (3, 77))))
    out += packet(1, (12, interned), (8, 1000), (11, begin))
    out += packet(1, (8, 500), (11, pack((9, 2), (11, 900))))
    for name, category, at, lasts in (("hipLaunchKernel", "hip_api", 100, 10), ("forward", "marker_api", 200, 10)):
        said = pack((10, "corr_id"), (3, 77))
        out += packet(2, (8, START + at), (11, pack((22, category), (23, name), (9, 1), (11, 901), (4, said))))
        out += packet(2, (8, START + at + lasts), (11, pack((9, 2), (11, 901))))
    return out


def test_perfetto_is_read(tmp_path):
    path = tmp_path / "908_results.pftrace"
    path.write_bytes(of_perfetto())
    timeline = read_trace(path)
    rows = {r.name: r for r in timeline.records()}
    assert rows[GEMM].start_ns == START + 1000 and rows[GEMM].end_ns == START + 1500
    assert rows[GEMM].device == 0 and rows[GEMM].stream_id == 2 and rows["hipLaunchKernel"].kind == "runtime"
    assert rows["forward"].kind == "region" and timeline.meta["threads"] == {909: "python"}
    gemm = next(i for i in range(len(timeline)) if timeline.name(i) == GEMM)
    assert timeline.name(int(timeline.linked.launch[gemm])) == "hipLaunchKernel"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.xplane.pb", b"\x0a\xff\xff\xff\xff\x7f"),
        ("x.pftrace", b"\x0b\x0b\x0b"),
        ("x.pftrace", b""),
        ("x_results.json", b'{"rocprofiler-sdk-tool": [{"agents": 5}]}'),
        ("x_results.json", b'{"rocprofiler-sdk-tool": []}'),
        ("x_kernel_trace.csv", b'"Kind","Agent_Id"\n'),
    ],
)
def test_what_is_damaged_is_refused(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(RecordingError):
        read_trace(path)


@pytest.mark.parametrize(("name", "make"), [("x.xplane.pb", of_jax), ("x.pftrace", of_perfetto)])
def test_a_trace_that_was_cut_is_read_so_far_or_refused(tmp_path, name, make):
    whole = make()
    path = tmp_path / name
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        try:
            assert len(read_trace(path))
        except RecordingError:
            continue
