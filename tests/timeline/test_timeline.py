"""Reading traces, tying rows together, interval arithmetic and records: against brute force and real recordings."""

from __future__ import annotations

import gzip
import json
import math
import re
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.errors import RecordingError
from tessera.profile.ranks.collectives import measure_overlap
from tessera.timeline import Builder, Timeline, intervals, shapes, source, stream, transfers
from tessera.timeline.columns import NONE
from tessera.timeline.intervals import Nesting, Spans, _scan, _tree, latest, single, union
from tessera.timeline.kineto import read
from tessera.timeline.link import link, steps_of

from places import REPOSITORY, TESTS

DATA = TESTS / "data"
GPT2 = REPOSITORY.parent / "shared" / "h200" / "gpt2_train.kineto.json.gz"
BASE = 1790857026000000000


# -- small traces in the layouts that exist ----------------------------------------------------------------------


def us(ns: int) -> str:
    """Nanoseconds as Kineto writes them."""
    return f"{'-' if ns < 0 else ''}{abs(ns) // 1000}.{abs(ns) % 1000:03}"


def event(ph="X", *, ts: int | None = 0, dur: int | None = None, **fields) -> str:
    """One event as text; `ts` and `dur` in nanoseconds."""
    parts = [f'"ph": {json.dumps(ph)}', *(f'"{k}": {json.dumps(v)}' for k, v in fields.items() if k != "args")]
    parts += [f'"{key}": {us(ns)}' for key, ns in (("ts", ts), ("dur", dur)) if ns is not None]
    if "args" in fields:
        parts.append(f'"args": {{\n      {json.dumps(fields["args"])[1:-1]}\n    }}')
    return "{\n    " + ",\n    ".join(parts) + "\n  }"


def pretty(events: list[str], *, late_base: bool = False, head: str = "") -> bytes:
    """Kineto's own layout."""
    base = f'"baseTimeNanoseconds": {BASE}'
    body = ",\n  ".join(events)
    first, last = ("", f",\n  {base}") if late_base else (f"  {base},\n", "")
    before, after = f'\n{{\n  "schemaVersion": 1,{head}\n{first}', f'{last},\n  "traceName": "t"\n}}\n'
    return f'{before}  "traceEvents": [\n  {body}\n  ]{after}'.encode()


def by_line(events: list[str], *, late_base: bool = False) -> bytes:
    """One event per line."""
    lines = ",\n".join(re.sub(r"\n\s*", " ", e) for e in events)
    base = f'"baseTimeNanoseconds": {BASE}'
    tail = f',\n"deviceProperties": [{{"id": 0}}, {{"id": 1}}],\n{base}' if late_base else ""
    return f'{{{"" if late_base else base + ", "}"traceEvents": [\n{lines}\n]{tail}}}'.encode()


def compact(events: list[str], **options) -> bytes:
    """Nothing but JSON."""
    return re.sub(rb'("(?:[^"\\]|\\.)*")|\s+', lambda m: m[1] or b"", by_line(events, **options))


LAYOUTS = [pretty, by_line, compact]


def kernel(name="gemm", *, ts, dur, correlation, external=0, device=0, stream=7, **args) -> str:
    return event(
        cat="kernel", name=name, pid=device, tid=stream, ts=ts, dur=dur,
        args={"External id": external, "device": device, "stream": stream, "correlation": correlation,
              "registers per thread": 32, "shared memory": 1024, "grid": [8, 1, 1], "block": [128, 1, 1], **args},
    )  # fmt: skip


def op(name, *, ts, dur, external, tid=10, sequence=None, fwd=None, **args) -> str:
    more = {} if sequence is None else {"Sequence number": sequence, "Fwd thread id": fwd or 0}
    args = {"External id": external, **more, **args}
    return event(cat="cpu_op", name=name, pid=10, tid=tid, ts=ts, dur=dur, args=args)


def call(*, ts, dur, correlation, external=0, tid=10, name="cudaLaunchKernel", cat="cuda_runtime") -> str:
    return event(
        cat=cat, name=name, pid=10, tid=tid, ts=ts, dur=dur, args={"External id": external, "correlation": correlation}
    )


def region(name, *, ts, dur, tid=10) -> str:
    return event(cat="user_annotation", name=name, pid=10, tid=tid, ts=ts, dur=dur, args={"External id": 900})


def training() -> list[str]:
    """One step: forward on thread 10 in a region, backward on thread 20, a copy, an all-reduce, power."""
    dims = {"Input Dims": [[8, 16], [16, 4], []], "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"]}
    return [
        event("M", name="process_labels", pid=0, tid=0, args={"labels": "GPU 0"}),
        event("M", name="thread_name", pid=10, tid=20, args={"name": "pt_autograd_0"}),
        region("ProfilerStep#3", ts=0, dur=100_000),
        region("forward", ts=1_000, dur=20_000),
        op("aten::linear", ts=2_000, dur=10_001, external=1, sequence=7, **dims),
        op("aten::mm", ts=2_500, dur=8_999, external=2, sequence=7, **dims),
        call(ts=3_000, dur=500, correlation=101, external=2),
        kernel("gemm_fwd", ts=5_000, dur=30_333, correlation=101, external=2),
        event(cat="gpu_memcpy", name="Memcpy HtoD (Pageable -> Device)", pid=0, tid=7, ts=40_000, dur=1_000,
              args={"device": 0, "stream": 7, "correlation": 102, "bytes": 25_000}),
        event(cat="gpu_memset", name="Memset (Device)", pid=0, tid=7, ts=42_000, dur=768,
              args={"device": 0, "stream": 7, "correlation": 103, "bytes": 4}),
        event("s", cat="fwdbwd", name="fwdbwd", id=1, pid=10, tid=10, ts=2_000),
        op("autograd::engine::evaluate_function: MmBackward0", ts=30_000, dur=20_000, external=3, tid=20, sequence=7,
           fwd=1),
        op("MmBackward0", ts=31_000, dur=10_000, external=4, tid=20, sequence=7, fwd=1),
        event("f", cat="fwdbwd", name="fwdbwd", id=1, pid=10, tid=20, ts=31_000, bp="e"),
        op("aten::mm", ts=32_000, dur=5_000, external=5, tid=20),
        call(ts=33_000, dur=400, correlation=104, external=5, tid=20, name="cuLaunchKernelEx", cat="cuda_driver"),
        kernel("gemm_bwd", ts=50_000, dur=10_000, correlation=104, external=5),
        op("record_param_comms", ts=44_000, dur=2_000, external=6, tid=20, **{
            "Collective name": "_allgather_base", "In msg nelems": 1000, "Out msg nelems": 8000, "dtype": "BFloat16",
            "Group size": 8, "Process Group Name": "0"}),
        call(ts=45_000, dur=400, correlation=105, external=6, tid=20),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", ts=55_000, dur=20_000,
               correlation=105, external=6, stream=20),
        event(cat="gpu_user_annotation", name="forward", pid=0, tid=7, ts=5_000, dur=30_000),
        event(cat="cuda_runtime", name="cudaGraphLaunch", pid=10, tid=10, ts=60_000, dur=100,
              args={"correlation": 106}),
        kernel("in_graph", ts=80_000, dur=5, correlation=106),
        event("C", name="GPU 0 power", pid="tessera", tid=0, ts=50_000, args={"W": 312.5}),
        event("i", name="Record Window End", pid="", tid="", ts=99_000, s="g"),
        event(cat="Trace", name="PyTorch Profiler (0)", pid="Spans", tid="PyTorch Profiler", ts=0, dur=100_000),
    ]  # fmt: skip


def table(timeline: Timeline) -> list[tuple]:
    """Everything a timeline holds, independent of its interning."""
    return [
        (
            timeline.kind(r), timeline.name(r), *(int(timeline[c][r]) for c in (
                "start_ns", "end_ns", "device", "stream", "thread", "correlation", "external", "sequence",
                "forward_thread", "bytes")),
            timeline.text("shapes", r), timeline.text("unit", r), str(timeline["value"][r]),
            timeline.launches[timeline["launch"][r]] if timeline["launch"][r] != NONE else None,
        )
        for r in range(len(timeline))
    ]  # fmt: skip


def find(timeline: Timeline, name: str, nth: int = 0) -> int:
    return [r for r in range(len(timeline)) if timeline.name(r) == name][nth]


# -- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_base", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_layout_reads_alike(layout, late_base, packed, tmp_path):
    text = layout(training(), late_base=late_base)
    path = tmp_path / ("t.json.gz" if packed else "t.json")
    path.write_bytes(gzip.compress(text) if packed else text)
    seen: list[float] = []
    timeline = read(path, progress=seen.append)
    assert table(timeline) == table(read(pretty(training())))
    assert seen[-1] == 1.0
    assert timeline.meta["threads"][20] == "pt_autograd_0"
    assert timeline.meta["forward_threads"] == {1: 10}
    assert timeline.notes == []  # what every trace has and nobody misses is not worth a note


def test_what_a_trace_says(tmp_path):
    timeline = read(pretty(training()))
    row = find(timeline, "gemm_fwd")
    assert (timeline["start_ns"][row], timeline["end_ns"][row]) == (BASE + 5_000, BASE + 35_333)
    launch = timeline.launches[timeline["launch"][row]]
    assert (launch.grid, launch.block, launch.registers, launch.shared_bytes) == ((8, 1, 1), (128, 1, 1), 32, 1024)
    assert timeline.text("shapes", find(timeline, "aten::linear")) == "[8,16]bf16 [16,4]bf16"
    assert timeline.kind(find(timeline, "cudaGraphLaunch")) == "graph_launch"
    assert timeline.kind(find(timeline, "cuLaunchKernelEx")) == "runtime"
    copied = timeline.launches[timeline["launch"][find(timeline, "Memcpy HtoD (Pageable -> Device)")]]
    assert (copied.memcpy_dir, copied.pinned) == ("HtoD", False)
    gather = timeline.rows("collective").tolist()
    assert len(gather) == 1
    said = timeline.launches[timeline["launch"][gather[0]]]
    assert (said.collective_type, said.collective_bytes, said.group, said.group_size) == ("all_gather", 16_000, "0", 8)
    (power,) = timeline.rows("counter").tolist()
    assert (timeline.name(power), timeline["value"][power]) == ("GPU 0 power", 312.5)
    assert (timeline.text("unit", power), timeline["device"][power]) == ("W", 0)


@given(st.lists(st.tuples(st.integers(0, 7_776_000_000_000_000), st.integers(0, 10**13)), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_nanoseconds_are_exact(times):
    timeline = read(pretty([kernel(ts=t, dur=d, correlation=1) for t, d in times]))
    assert timeline["start_ns"].tolist() == [BASE + t for t, _ in times]
    assert timeline["end_ns"].tolist() == [BASE + t + d for t, d in times]


@given(st.lists(st.integers(2**43 * 1000 - 2000, 1_800_000_000_000_000_000), min_size=1, max_size=20), st.booleans())
@settings(max_examples=60, deadline=None)
def test_absolute_times_are_exact_too(times, mixed):
    """From 2^43 us on a float has lost the nanoseconds: old Kineto wrote the epoch into ts."""
    times = [*([5] if mixed else []), *times]
    timeline = read(("[" + ",".join(kernel(ts=t, dur=1_001, correlation=1) for t in times) + "]").encode())
    assert timeline["start_ns"].tolist() == times
    assert set((timeline["end_ns"] - timeline["start_ns"]).tolist()) == {1_001}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [64, 200, 777, 1500, 4000])
def test_chunks_of_any_size(layout, size, monkeypatch):
    args = {"list": [{"a": 1}, {"a": 2}, {"name": "]"}]}
    nested = event(cat="kernel", name='n},{"x', pid=0, tid=7, ts=5, dur=1, args=args)
    events = [*training(), nested, *training()]
    expected = table(read(layout(events, late_base=True)))
    monkeypatch.setattr(stream, "CHUNK_BYTES", size)
    monkeypatch.setattr(source, "CHUNK_BYTES", size)
    timeline = read(layout(events, late_base=True))
    assert sorted(map(str, table(timeline))) == sorted(map(str, expected))
    assert len(timeline) == 2 * (len(training()) - 6) + 1
    assert timeline.meta["base_ns"] == BASE


def test_a_bare_list_with_and_without_its_end():
    for text in ("[" + ",\n".join(training()) + "]", "[" + ",\n".join(training()) + ",\n"):
        timeline = read(text.encode())
        assert table(timeline) == [(*t[:2], t[2] - BASE, t[3] - BASE, *t[4:]) for t in table(read(pretty(training())))]
        assert not any("cut" in n for n in timeline.notes)
        assert any("wall clock" in n for n in timeline.notes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_cut_at_every_byte(layout, packed):
    """A writer that crashed: what is whole is read, what was cut is said, and nothing else is raised."""
    events = training()[3:8]
    whole = layout(events, late_base=True)
    data = gzip.compress(whole, mtime=0) if packed else whole
    expected, counts = table(read(data)), set()
    for size in range(len(data)):
        try:
            timeline = read(data[:size])
        except RecordingError as error:
            assert error.what and error.why and error.fix
            counts.add(-1)
            continue
        counts.add(len(timeline))
        got = [(*t[:2], t[3] - t[2], *t[4:]) for t in table(timeline)]
        assert got == [(*t[:2], t[3] - t[2], *t[4:]) for t in expected[: len(got)]]
        if size < len(data) - 8 - (packed and 30):  # the last bytes are the closing brace, or the sum of the gzip
            assert any("cut" in n for n in timeline.notes), size
    assert counts >= ({-1, 5} if packed else {-1, 1, 2, 3, 4, 5})


@pytest.mark.parametrize(
    "text", [b"", b"  ", b"hello", b"{}", b'{"a": "traceEvents"}', b'{"x": {"traceEvents": []}}', b"\x1f\x8b"]
)
def test_what_is_no_trace(text):
    with pytest.raises(RecordingError) as caught:
        read(text)
    assert caught.value.why and caught.value.fix


def test_no_such_file(tmp_path):
    with pytest.raises(RecordingError, match="cannot read"):
        read(tmp_path / "none.json")


def test_an_empty_trace_is_a_trace():
    for text in (b'{"traceEvents": []}', b"[]", b'{"traceEvents": [ ], "baseTimeNanoseconds": 5}'):
        timeline = read(text)
        assert len(timeline) == 0
        assert list(timeline.records()) == []


def raw(name: bytes, extra: bytes = b"") -> bytes:
    return (
        b'{"ph": "X", "cat": "kernel", "name": "' + name + b'", "pid": 0, "tid": 7, "ts": 1.500, "dur": 0.250, '
        b'"args": {"device": 0, "stream": 7, "correlation": 3' + extra + b"}}"
    )


@pytest.mark.parametrize(
    ("name", "read_as"),
    [
        (b"a\xffb", "a\ufffdb"), (b"a\x01b", "a b"), (b"a\nb", "a b"), (b"tab\tb", "tab b"),
        (b"C:\\Users\\x", "C:\\Users\\x"),
        (b"\\ud800!", "\ufffd!"), (b"\\ud83d\\ude00", "\U0001f600"), (b"\\u0041\\n\\\"", 'A\n"'),
        (b"\\x1b[0m", "\\x1b[0m"),
        ("größe".encode(), "größe"), ("größe".encode()[:-2], "grö\ufffd"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
def test_broken_names(name, read_as, layout):
    around = [event(cat="cpu_op", name="before", ts=0, dur=9), "@", event(cat="cpu_op", name="after", ts=0, dur=9)]
    timeline = read(layout(around).replace(b"@", raw(name)))
    assert [timeline.name(r) for r in range(3)] == ["before", read_as, "after"]
    assert timeline["start_ns"][1] == BASE + 1_500


@pytest.mark.parametrize(
    "extra",
    [
        b', "memory bandwidth (GB/s)": inf', b', "blocks per SM": NaN', b', "x": -Infinity', b', "y": [nan, -inf, 1]',
        b', "bytes": "12"', b', "registers per thread": null', b', "grid": [1, 2, "x"]', b', "bytes": 1e400',
        b', "stream": 18446744073709551615',
    ],
)  # fmt: skip
def test_odd_arguments(extra):
    timeline = read(pretty(["@", kernel(ts=9, dur=2, correlation=4)]).replace(b"@", raw(b"k: nan, inf", extra)))
    assert [timeline.name(r) for r in range(2)] == ["k: nan, inf", "gemm"]
    assert timeline["correlation"].tolist() == [3, 4]
    assert timeline.notes == []


def test_odd_events():
    timeline = read(pretty([
        event(cat="cpu_op", name="no dur", ts=5), event(cat="cpu_op", name="negative", ts=5, dur=-7),
        event(cat="cpu_op", name="no time", ts=None, dur=1), event(cat="new_thing", name="x", ts=1, dur=1),
        event(cat="xpu_runtime", name="urEnqueue", pid=1, tid="worker", ts=1, dur=1),
        event("b", name="async", ts=1, id=3),
        event(cat="kernel", name="bare", pid=2, tid=9, ts=1, dur=1), "17",
        '{"ph": "X", "cat": "cpu_op", "name": null, "pid": 1.5, "tid": null, "ts": "2.25", "dur": 1, "args": null}',
    ]))  # fmt: skip
    assert timeline.notes == [
        "not read: 1 event of category 'new_thing'",
        "with a negative duration, taken as instants: 1 event", "without a duration, taken as instants: 1 event",
        "not read, of phase 'b': 1 event", "not read, without a time: 1 event",
    ]  # fmt: skip
    assert [timeline.name(r) for r in range(5)] == ["no dur", "negative", "urEnqueue", "bare", ""]
    assert timeline["thread"][2] < NONE and timeline.meta["threads"][int(timeline["thread"][2])] == "worker"
    assert (timeline["device"][3], timeline["stream"][3]) == (2, 9)
    assert timeline["start_ns"][4] == BASE + 2_250


def test_damage_in_the_middle_spoils_one_event(monkeypatch):
    events = [kernel(f"k{i}", ts=i * 10, dur=5, correlation=i + 1) for i in range(40)]
    text = pretty(events)
    for hole in (b'{"ph": "X", "cat": "ker', b'"', b"}", b"\x00\xfe{{[", b"]]"):
        for size in (1 << 20, 300):
            monkeypatch.setattr(stream, "CHUNK_BYTES", size)
            monkeypatch.setattr(source, "CHUNK_BYTES", size)
            at = text.index(b'"k20"') - 3
            timeline = read(text[:at] + hole + text[at + 30 :])
            names = {timeline.name(r) for r in range(len(timeline))}
            assert names >= {f"k{i}" for i in range(20)}, hole
            if hole != b"]]":
                assert names >= {f"k{i}" for i in range(22, 40)}, (hole, size)
            assert timeline.notes or len(timeline) == 40, (hole, size)  # one may be whole again, without a name


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_damage_raises_anything_else(data):
    text = bytearray(data.draw(st.sampled_from(LAYOUTS))(training(), late_base=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 40))] = data.draw(
            st.one_of(
                st.binary(max_size=4), st.sampled_from([b'"', b"{", b"}", b"]", b"[", b"\\", b"1e999", b"null", b"-"])
            )
        )
    try:
        timeline = read(bytes(text))
    except RecordingError:
        return
    assert len(list(timeline.records())) == len(timeline)


def test_open_and_close_pairs():
    timeline = read(pretty([
        event("B", name="outer", pid=1, tid=5, ts=1_000), event("B", name="inner", pid=1, tid=5, ts=2_000),
        event("E", pid=1, tid=5, ts=3_000), event("E", pid=1, tid=5, ts=9_000), event("E", pid=1, tid=5, ts=9_500),
        event("B", name="open", pid=1, tid=5, ts=10_000),
    ]))  # fmt: skip
    assert {r.name: (r.start_ns - BASE, r.end_ns - BASE) for r in timeline.records()} == {
        "outer": (1_000, 9_000),
        "inner": (2_000, 3_000),
        "open": (10_000, 10_000),
    }
    assert len(timeline.notes) == 2


def test_counters_and_allocations():
    timeline = read(pretty([
        event("C", name="power", pid=0, tid=0, ts=5, args={"gpu": 1.5, "cpu": "2.5", "lost": None}),
        event("C", name="GPU 1 clock", pid=0, tid=0, ts=6, args={"MHz": 1980}),
        event("C", name="broken", pid=0, tid=0, ts=6, args={"x": "y"}),
        event("i", cat="cpu_instant_event", name="[memory]", pid=1, tid=1, ts=7,
              args={"Total Allocated": 4096, "Device Id": 0, "Bytes": -512}),
    ]))  # fmt: skip
    rows = [(timeline.name(r), timeline["value"][r], timeline.text("unit", r), timeline["device"][r]) for r in range(4)]
    assert rows == [
        ("power/gpu", 1.5, None, NONE), ("power/cpu", 2.5, None, NONE), ("GPU 1 clock", 1980, "MHz", 1),
        ("memory allocated", 4096, "B", 0),
    ]  # fmt: skip
    assert timeline.notes == ["not read, counters without a number: 1 event"]


def test_rank_and_devices():
    head = '\n  "distributedInfo": {"backend": "nccl", "rank": 3},\n  "deviceProperties": [{"id": 0}, {"id": 1}],'
    timeline = read(pretty(training(), head=head))
    assert timeline.rank == 3
    assert len(timeline.meta["deviceProperties"]) == 2


def test_shapes_and_back():
    types = b'["float", "long int", "TensorList", "Scalar", ""]'
    text = shapes.compact(b"[[8, 1024], [], [[2, 3], [4]], [], []]", types)
    assert text == "[8,1024]f32 []i64 ([2,3] [4])"
    assert shapes.parse(text) == [((8, 1024), "f32"), ((), "i64"), ((2, 3), ""), ((4,), "")]
    assert shapes.compact(b"[[1, 2], []]", b"") == "[1,2]"
    assert shapes.compact(b"17", b"[") == ""


@pytest.mark.parametrize(
    ("name", "direction", "pinned"),
    [
        ("Memcpy DtoH (Device -> Pinned)", "DtoH", True), ("Memcpy DtoD (Device -> Device)", "DtoD", None),
        ("CopyHostToDevice", "HtoD", None), ("Memcpy M2D", "HtoD", None),
        ("Memcpy PtoP (Device -> Device)", "PtoP", None),
        ("Memcpy", None, None),
    ],
)  # fmt: skip
def test_copies(name, direction, pinned):
    launch = transfers.copy(name)
    assert (launch.memcpy_dir, launch.pinned) == (direction, pinned)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("allreduce", "all_reduce"), ("_reduce_scatter_base", "reduce_scatter"), ("all_to_allv", "all_to_all"),
        ("ncclDevKernel_SendRecv", "send_recv"), ("ncclKernel_AllReduce_RING_LL_Sum_float", "all_reduce"),
        ("allgather_into_tensor_coalesced", "all_gather"), ("reduce", "reduce"), ("nothing", None),
    ],
)  # fmt: skip
def test_collective_types(name, kind):
    assert transfers.collective_type(name) == kind


# -- tying together ------------------------------------------------------------------------------------------------


def test_a_training_step_is_tied_together():
    timeline = read(pretty(training()))
    links = link(timeline)

    def names(row: int) -> dict[str, str | None]:
        fields = ("op", "top_op", "launch", "forward_op", "region", "forward_region")
        return {f: None if (r := int(getattr(links, f)[row])) == NONE else timeline.name(r) for f in fields}

    assert names(find(timeline, "gemm_fwd")) == {
        "op": "aten::mm", "top_op": "aten::linear", "launch": "cudaLaunchKernel", "forward_op": None,
        "region": "forward", "forward_region": None,
    }  # fmt: skip
    assert names(find(timeline, "gemm_bwd")) == {
        "op": "aten::mm", "top_op": "autograd::engine::evaluate_function: MmBackward0", "launch": "cuLaunchKernelEx",
        "forward_op": "aten::linear", "region": "ProfilerStep#3", "forward_region": "forward",
    }  # fmt: skip
    graph = find(timeline, "in_graph")
    assert names(graph)["launch"] == "cudaGraphLaunch" and links.launch_ns[graph] == BASE + 60_000
    assert links.launch_thread[find(timeline, "gemm_bwd")] == 20
    assert [s.name for s in links.steps] == ["ProfilerStep#3"]
    assert set(links.step[timeline.device_rows].tolist()) == {0}
    assert [timeline.name(r) for r in links.path(find(timeline, "forward"))] == ["ProfilerStep#3", "forward"]
    assert timeline["parent"][find(timeline, "gemm_fwd")] == links.op[find(timeline, "gemm_fwd")]
    assert timeline.linked is links


def test_marks_make_steps():
    moments = [("start/a", 10), ("end/a", 50), ("end/b", 60), ("start/c", 70)]
    marks = [event("i", name=n, pid=1, tid=1, ts=t) for n, t in moments]
    timeline = read(pretty([*marks, kernel(ts=20, dur=5, correlation=1), kernel(ts=55, dur=5, correlation=2)]))
    links = link(timeline)
    assert [(s.name, s.start_ns - BASE, s.end_ns - BASE) for s in links.steps] == [("a", 10, 50)]
    assert links.step[timeline.rows("kernel")].tolist() == [0, NONE]


def test_two_forward_threads_are_told_apart():
    """Autograd counts per thread, so numbers repeat; the arrows say which thread is meant."""
    events = []
    for number, tid in ((1, 10), (2, 11)):
        events += [
            op(f"fwd{tid}", ts=1_000 + tid, dur=100, external=tid, tid=tid, sequence=5),
            event("s", cat="fwdbwd", name="fwdbwd", id=number, pid=1, tid=tid, ts=1_000 + tid),
            op(f"Bwd{tid}", ts=9_000 + tid * 200, dur=100, external=100 + tid, tid=30, sequence=5, fwd=number),
            event("f", cat="fwdbwd", name="fwdbwd", id=number, pid=1, tid=30, ts=9_000 + tid * 200),
        ]
    timeline = read(pretty(events))
    links = link(timeline)
    for tid in (10, 11):
        assert links.forward_op[find(timeline, f"Bwd{tid}")] == find(timeline, f"fwd{tid}")


def test_recomputed_work_belongs_to_what_was_first_called():
    timeline = read(pretty([
        region("block", ts=0, dur=1_000), op("Checkpoint", ts=100, dur=500, external=1, sequence=1),
        op("CheckpointBackward", ts=5_000, dur=4_000, external=2, tid=20, sequence=1, fwd=1),
        op("aten::mm", ts=5_100, dur=100, external=3, tid=20, sequence=40),
        op("MmBackward0", ts=6_000, dur=500, external=4, tid=20, sequence=40, fwd=2),
        call(ts=6_100, dur=10, correlation=9, external=4, tid=20), kernel(ts=6_200, dur=10, correlation=9, external=4),
    ]))  # fmt: skip
    links = link(timeline)
    row = find(timeline, "gemm")
    assert timeline.name(links.forward_op[row]) == "aten::mm"
    assert timeline.name(links.forward_region[row]) == "block"


def brute_open(rows: list[tuple[int, int, int, int]], thread: int | None, at: int) -> int:
    """Of (row, thread, start, end): the last opened that is open."""
    hits = [(s, -e, r) for r, t, s, e in rows if (thread is None or t == thread) and s <= at < e]
    return max(hits)[2] if hits else NONE


def brute_parent(rows: list[tuple[int, int, int, int]], row: int) -> int:
    _, thread, start, end = next(x for x in rows if x[0] == row)
    before = [(s, -e, r) for r, t, s, e in rows if t == thread and (s, -e, r) < (start, -end, row) and e > start]
    hits = [x for x in before if 2 * (-x[1] - start) >= end - start]  # it holds at least half
    return max(hits)[2] if hits else NONE


small = st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 6))


@given(st.lists(small, max_size=14), st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 20)), max_size=10))
@settings(max_examples=400, deadline=None)
def test_nesting_is_what_brute_force_says(intervals_, questions):
    rows = [(i * 3, t, s, s + d) for i, (t, s, d) in enumerate(intervals_)]
    columns = [np.array([r[k] for r in rows], np.int64) for k in range(4)]
    nested = Nesting(*columns)
    assert nested.parent.tolist() == [brute_parent(rows, r[0]) for r in rows]
    asked = np.array(questions, np.int64).reshape(-1, 2)
    assert nested.at(asked[:, 0], asked[:, 1]).tolist() == [brute_open(rows, t, at) for t, at in questions]


def test_many_threads_are_nested_in_one_go(monkeypatch):
    """Each thread was a turn of its own, over all that was asked."""
    calls = []
    monkeypatch.setattr("tessera.timeline.intervals._tree", lambda *given: calls.append(1) or _tree(*given))
    rows = np.arange(3000)
    nested = Nesting(rows, rows // 2, 10 * (rows // 2), 10 * (rows // 2) + 9 - rows % 2)
    assert nested.parent.tolist() == [NONE if row % 2 == 0 else row - 1 for row in rows.tolist()]
    assert nested.at(rows // 2, 10 * (rows // 2) + 8).tolist() == (rows // 2 * 2).tolist()
    assert len(calls) == 1


@st.composite
def families(draw) -> list[tuple[int, int]]:
    """Intervals of which each that begins inside another ends in it, as operators of one thread do."""
    found: list[tuple[int, int]] = []
    rooms = [(0, 40)]
    for _ in range(draw(st.integers(0, 14))):
        low, high = rooms[draw(st.integers(0, len(rooms) - 1))]
        start = draw(st.integers(low, high))
        end = draw(st.integers(start, high))
        found.append((start, end))
        rooms.remove((low, high))
        rooms += [(low, start), (start, end), (end, high)]
    return draw(st.permutations(found))


@given(families())
@settings(max_examples=400, deadline=None)
def test_a_tree_of_intervals_needs_no_scan(intervals_):
    """`_tree` finds what `_scan` does where all are nested."""
    starts, ends = np.array(intervals_ or [(0, 0)], np.int64).reshape(-1, 2).T
    order = np.lexsort((np.arange(len(starts)), -ends, starts))
    starts, ends = starts[order], ends[order]
    found = _tree(starts, ends)
    parents, edges, tops = _scan([0] * len(starts), starts, ends)
    times = np.where(edges % 2, ends[edges // 2], starts[edges // 2])
    assert found[0].tolist() == parents.tolist()
    assert np.all(np.diff(found[1]) >= 0)
    innermost = []
    for changes, top in ((found[1], found[2]), (times, tops)):
        last = np.searchsorted(changes, np.arange(-1, 45), side="right") - 1
        innermost.append(np.append(top, NONE)[last].tolist())
    assert innermost[0] == innermost[1]


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(-1, 10), max_size=8))
@settings(max_examples=200, deadline=None)
def test_a_key_of_one_entry_is_found_and_one_of_two_is_left_to_others(keys, asked):
    found = single(np.array(keys, np.int64), np.array(asked, np.int64))
    if len(set(keys)) < len(keys):
        assert found is None
    else:
        assert found.tolist() == [keys.index(a) if a in keys else NONE for a in asked]


@given(st.lists(small, max_size=14), st.lists(small, max_size=10), st.booleans())
@settings(max_examples=300, deadline=None)
def test_latest_is_what_brute_force_says(entries, questions, strict):
    e, q = (np.array(x, np.int64).reshape(-1, 3) for x in (entries, questions))
    found = latest([e[:, 0], e[:, 2]], e[:, 1], [q[:, 0], q[:, 2]], q[:, 1], strict=strict)
    for (key, at, other), got in zip(questions, found.tolist(), strict=True):
        same = [(t, i) for i, (k, t, o) in enumerate(entries) if k == key and o == other]
        hits = [(t, i) for t, i in same if (t < at if strict else t <= at)]
        assert got == (max(hits)[1] if hits else NONE)


@st.composite
def timelines(draw) -> Timeline:
    """Properly nested or not: rows of every kind at small times, with numbers that sometimes fit."""
    builder = Builder()
    number = st.sampled_from([NONE, 1, 2, 3, 4, 5])
    thread = st.integers(1, 2)
    for kind in draw(st.lists(st.sampled_from(["op", "op", "region", "runtime", "kernel", "mark"]), max_size=18)):
        start = draw(st.integers(0, 20))
        given_: dict[str, int] = {}
        if kind in ("op", "runtime", "region"):
            given_["thread"] = draw(thread)
        if kind in ("runtime", "kernel"):
            given_["correlation"] = draw(number)
        if kind in ("op", "runtime", "kernel"):
            given_["external"] = draw(number)
        if kind == "op":
            given_["sequence"] = draw(number)
            given_["forward_thread"] = draw(st.sampled_from([NONE, 0, 0, 1]))
        builder.add(kind, f"{kind}{len(builder)}", start, start + draw(st.integers(0, 12)), **given_)
    timeline = builder.build()
    timeline.meta["forward_threads"] = draw(st.sampled_from([{}, {1: 1}]))
    return timeline


@given(timelines())
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_links_are_what_brute_force_says(timeline):
    links = link(timeline)
    kind = [timeline.kind(r) for r in range(len(timeline))]
    start, end, thread, correlation, external, sequence, made_on = (
        timeline[c].tolist()
        for c in ("start_ns", "end_ns", "thread", "correlation", "external", "sequence", "forward_thread")
    )
    of = {
        k: [(r, thread[r], start[r], end[r]) for r in range(len(kind)) if kind[r] == k] for k in {*kind, "op", "region"}
    }
    ops = of["op"]
    parent = {r: brute_parent(ops, r) for r, *_ in ops}

    def numbered(numbers: list[int], among: str, row: int, at: int) -> int:
        if numbers[row] == NONE:
            return NONE
        same = [(start[r], r) for r, *_ in of.get(among, []) if numbers[r] == numbers[row]]
        return max([x for x in same if x[0] <= at] or same or [(0, NONE)])[1]

    def up(row: int, test=lambda child, around: True) -> int:
        while parent[row] != NONE and test(row, parent[row]):
            row = parent[row]
        return row

    def forward(row: int) -> int:
        node = row
        while node != NONE and not (made_on[node] > 0 and sequence[node] >= 0):
            node = parent[node]
        if node == NONE:
            return NONE
        threads = timeline.meta["forward_threads"].get(made_on[node])
        hits = [
            (start[r], r) for r, *_ in ops
            if made_on[r] <= 0 and sequence[r] == sequence[node] and start[r] < start[node]
            and threads in (None, thread[r])
        ]  # fmt: skip
        if not hits:
            return NONE
        return up(max(hits)[1], lambda child, around: sequence[around] == sequence[child] and made_on[around] <= 0)

    for row, what in enumerate(kind):
        call_row, operator, at, on = NONE, row if what == "op" else NONE, start[row], thread[row]
        if what == "runtime":
            operator = numbered(external, "op", row, at)
            middle = (at + int(timeline["end_ns"][row])) // 2  # clocks of calls and operators differ a little
            operator = brute_open(ops, on, middle) if operator == NONE else operator
        elif what == "kernel":
            call_row = numbered(correlation, "runtime", row, at)
            if call_row != NONE:
                at, on = start[call_row], thread[call_row]
            operator = numbered(external, "op", row, at)
            if operator == NONE and call_row != NONE:
                operator = int(links.op[call_row])  # checked as a runtime row
            elif operator != NONE and call_row == NONE:
                at, on = start[operator], thread[operator]
        assert links.launch[row] == call_row
        assert links.op[row] == operator
        assert (links.launch_ns[row], links.launch_thread[row]) == (at, on)
        assert links.top_op[row] == (NONE if operator == NONE else up(operator))
        expected = NONE if operator == NONE else forward(operator)
        assert links.forward_op[row] == expected
        if what in ("op", "runtime", "kernel"):
            here = brute_open(of["region"], on, at)
            assert links.region[row] == (brute_open(of["region"], None, at) if here == NONE else here)
            assert links.parent[row] == (parent[row] if what == "op" else operator)
            while expected != NONE and forward(expected) != NONE:
                expected = forward(expected)
            assert links.forward_region[row] == (NONE if expected == NONE else links.region[expected])


# -- intervals -----------------------------------------------------------------------------------------------------

pairs = st.lists(st.tuples(st.integers(-10, 30), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def spans(found: list[tuple[int, int]]) -> Spans:
    both = np.array(found, np.int64).reshape(-1, 2)
    return union(both[:, 0], both[:, 1])


def points(found: list[tuple[int, int]]) -> set[int]:
    return {t for s, e in found for t in range(s, e)}


def of_spans(found: Spans) -> set[int]:
    assert (found.end_ns > found.start_ns).all()
    assert (found.start_ns[1:] >= found.end_ns[:-1]).all()
    return points(list(zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True)))


@given(pairs, pairs)
@settings(max_examples=400, deadline=None)
def test_intervals_are_sets_of_nanoseconds(a, b):
    left, right = spans(a), spans(b)
    assert of_spans(left) == points(a)
    assert (left.start_ns[1:] > left.end_ns[:-1]).all()
    assert left.total_ns == len(points(a))
    assert of_spans(intervals.intersection(left, right)) == points(a) & points(b)
    assert of_spans(intervals.difference(left, right)) == points(a) - points(b)
    both = np.array(b, np.int64).reshape(-1, 2)
    covered = intervals.covered_ns(left, both[:, 0], both[:, 1])
    assert covered.tolist() == [len(points(a) & set(range(s, e))) for s, e in b]


# -- records -------------------------------------------------------------------------------------------------------


def test_records_say_what_is_known():
    timeline = read(pretty(training()))
    timeline.energy_j = np.where(np.arange(len(timeline)) == find(timeline, "gemm_fwd"), 0.0091, np.nan)
    timeline.error_j = timeline.energy_j / 10
    timeline.extra = {find(timeline, "gemm_fwd"): {"sm_occupancy": 42.0}}
    found = {r.name: r for r in timeline.records()}
    assert [r.start_ns for r in timeline.records()] == sorted(r.start_ns for r in timeline.records())
    gemm = found["gemm_fwd"]
    assert (gemm.op, gemm.region, gemm.shapes, gemm.stream_id) == ("aten::mm", "forward", "[8,16]bf16 [16,4]bf16", 7)
    assert gemm.power_w == pytest.approx(0.0091 / 30.333e-6) and gemm.error_j == pytest.approx(0.00091)
    assert gemm.sm_occupancy == 42.0 and gemm.why("sm_occupancy") is None
    assert found["gemm_bwd"].energy_j is None
    copied = found["Memcpy HtoD (Pageable -> Device)"]
    assert (copied.memcpy_gbps, copied.memcpy_dir, copied.pinned, copied.bytes) == (25.0, "HtoD", False, 25_000)
    gather = next(r for r in timeline.records() if r.kind == "collective")
    assert gather.collective_overlap_pct == 25.0  # 5 of its 20 us: gemm_bwd ends at 60 us, in_graph has another 5 ns
    assert (gather.collective_type, gather.collective_bytes) == ("all_gather", 16_000)
    assert (found["GPU 0 power"].value, found["GPU 0 power"].unit, found["GPU 0 power"].device) == (312.5, "W", 0)
    assert found["aten::linear"].op is None and found["MmBackward0"].op.startswith("autograd::engine")
    assert [r.name for r in timeline.records([3, 1])] == [timeline.name(3), timeline.name(1)]


SEED_EVENTS = [
    event(cat="kernel", name="gemm", ts=12_000, dur=8_000, args={"sm_occupancy": 0.71, "tc_util_pct": 0.83}),
    event(cat="collective", name="all_reduce", ts=14_000, dur=4_000, args={"bytes": 134_217_728, "overlap_pct": 0.46}),
]


def test_counters_and_bytes_of_another_tools_trace():
    timeline = read(by_line(SEED_EVENTS))
    gemm, reduced = timeline.records()
    assert gemm.sm_occupancy == pytest.approx(71.0) and gemm.tc_util_pct == pytest.approx(83.0)
    assert (reduced.collective_type, reduced.collective_bytes) == ("all_reduce", 134_217_728)
    assert any("read as percent: sm_occupancy, tc_util_pct" in note for note in timeline.notes)
    # Neither says on which device it ran: records and the analysis of collectives give one answer.
    (row,) = timeline.rows("collective").tolist()
    assert reduced.collective_overlap_pct == measure_overlap(timeline, [])[row] == 100.0


@pytest.mark.parametrize("head", ["", '"tessera": {}, '])
def test_one_counter_alone_is_read(head):
    alone = [event(cat="kernel", name="k", ts=1_000, dur=1_000, args={"l2_hit_rate": 50.0, "warps_active": 0.5})]
    (found,) = read(pretty(alone, head=head)).records()
    assert (found.l2_hit_rate, found.warps_active, found.sm_occupancy) == (50.0, 0.5, None)


def test_percentages_of_our_own_file_are_percent_however_small():
    small = [event(cat="kernel", name="k", ts=1_000, dur=1_000, args={"tc_util_pct": 0.5})]
    (found,) = read(pretty(small, head='"tessera": {},')).records()
    assert found.tc_util_pct == 0.5


def test_counters_that_are_no_numbers_are_not_read():
    odd = {"sm_occupancy": "high", "tc_util_pct": True, "stall_reasons": [1], "l2_gbps": 1e999, "l2_hit_rate": None}
    text = by_line([event(cat="kernel", name="k", ts=1_000, dur=1_000, args=odd)])
    assert not read(text).extra


# -- recordings ----------------------------------------------------------------------------------------------------


def check_cpu(timeline: Timeline) -> None:
    links = link(timeline)
    assert timeline.start_ns > 10**18
    backward = find(timeline, "AddmmBackward0")
    assert timeline.name(links.forward_op[backward]) == "aten::addmm"
    assert timeline.name(links.forward_region[backward]) == "inner"
    first = next(timeline.records([find(timeline, "aten::linear")]))
    assert (first.region, first.shapes) == ("inner", "[8,16]f32 [32,16]f32 [32]f32")
    inner = int(links.region[find(timeline, "aten::linear")])
    assert [timeline.name(r) for r in links.path(inner)] == ["forward", "inner"]


def test_our_own_recording():
    """Two steps of a small model on a CPU, recorded with torch 2.13; Python frames were cut out, modules were not."""
    timeline = read(DATA / "cpu_train.kineto.json.gz")
    check_cpu(timeline)
    assert len(timeline) == 370
    links = timeline.linked
    record = next(timeline.records([find(timeline, "AddmmBackward0")]))
    assert record.module == "Sequential_0/Linear_1"
    assert timeline.name(links.module[find(timeline, "aten::relu")]) == "nn.Module: ReLU_0"
    assert links.op[find(timeline, "nn.Module: ReLU_0")] == NONE
    assert sum(timeline.name(r) == "memory allocated" for r in timeline.rows("counter")) == 88


def test_a_recording_made_on_the_spot(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    x = torch.randn(8, 16)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True) as recorded:
        with record_function("forward"):
            with record_function("inner"):
                y = model(x)
            loss = y.square().mean()
        loss.backward()
    path = tmp_path / "t.json.gz"
    recorded.export_chrome_trace(str(path))
    check_cpu(read(path))
    kept = read(path, frames=True)
    assert kept.meta["frames"] and not any("python_function" in n for n in kept.notes)
    links = link(kept)
    assert kept.name(links.op[find(kept, "aten::addmm")]) == "aten::addmm"
    frame = next(r for r in range(len(kept)) if kept["name"][r] in kept.meta["frames"] and links.parent[r] != NONE)
    assert kept["name"][links.parent[frame]] in {*kept.meta["frames"], *kept.meta["modules"]}


@pytest.mark.skipif(not GPT2.exists(), reason=f"the recording of a GPT-2 training is not at {GPT2}")
def test_gpt2_on_an_h200():
    timeline = read(GPT2)
    with gzip.open(GPT2) as file:
        plain = json.load(file, parse_float=Decimal)
    wanted = [e for e in plain["traceEvents"] if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    rows = timeline.device_rows
    base = plain["baseTimeNanoseconds"]
    assert timeline["start_ns"][rows].tolist() == [base + int(e["ts"] * 1000) for e in wanted]
    assert (timeline["end_ns"] - timeline["start_ns"])[rows].tolist() == [int(e["dur"] * 1000) for e in wanted]
    assert [timeline.name(r) for r in rows[:500]] == [e["name"] for e in wanted[:500]]
    links = link(timeline)
    for linked in (links.op, links.launch, links.region, links.step, links.top_op):
        assert (linked[rows] != NONE).all()
    assert (links.launch_ns[rows] <= timeline["start_ns"][rows]).mean() > 0.999
    assert len(links.steps) == 12
    # Every kernel under a numbered backward node finds its forward operator, in the region of the same step.
    behind = rows[links.forward_op[rows] != NONE]
    assert len(behind) == 6732
    forward_step = links.step[links.forward_op[behind]]
    assert (forward_step == links.step[behind]).all()
    seconds = math.fsum(r.seconds for r in timeline.records(rows))
    assert seconds == pytest.approx(float(sum(e["dur"] for e in wanted)) * 1e-6, rel=1e-12)


@pytest.mark.parametrize(("profiled", "expected"), [(2, "step_"), (8, "ProfilerStep#")])
def test_a_profiler_of_the_programs_own_names_the_steps_only_where_it_saw_most(profiled: int, expected: str) -> None:
    built = Builder()
    for i in range(8):
        built.add("region", f"step_{i}", i * 100, i * 100 + 100)
        if i < profiled:
            built.add("region", f"ProfilerStep#{i}", i * 100, i * 100 + 90)
    assert [s.name for s in steps_of(built.build())] == [f"{expected}{i}" for i in range(8)]
