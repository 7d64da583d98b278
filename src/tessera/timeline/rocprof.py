"""Reads traces of AMD's rocprofv3: its JSON (`--output-format json`) and its CSV files (`--output-format csv`).

::

    908_results.json              everything
    908_kernel_trace.csv          kernels; read together with the files beside it that begin alike:
    908_memory_copy_trace.csv, 908_hip_api_trace.csv, 908_marker_api_trace.csv, 908_agent_info.csv

Times are nanoseconds since the machine started, by the clock that HIP calls and kernels share.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from ..errors import RecordingError
from ..notes import Note
from ..read_limits import ReadBudget
from .columns import NONE, Builder, Launch, Timeline
from .device_rows import add_call, add_copy, add_kernel, name_copy
from .events import LIMIT_NS, NO_WALL_CLOCK
from .source import open_source, read_whole

KEY = b'"rocprofiler-sdk-tool"'
"""How the JSON begins."""
KERNELS = "_kernel_trace.csv"
COLUMNS = (b"Kernel_Name", b"Start_Timestamp", b"End_Timestamp")
"""Columns of such a table, whatever the name of the file."""
_COPIES, _CALLS, _MARKERS, _AGENTS = (
    "_memory_copy_trace.csv", "_hip_api_trace.csv", "_marker_api_trace.csv", "_agent_info.csv",
)  # fmt: skip
_DISPATCH = ("Process_Id", "Agent_Id", "Dispatch_Id")
_NUMBER = re.compile(r"\d+")
_GPU = 2  # an agent's type


class _Handle(Struct, gc=False):
    handle: int = NONE


class _Correlation(Struct, gc=False):
    internal: int = NONE


class _Size(Struct, gc=False):
    x: int = 1
    y: int = 1
    z: int = 1


class _Dispatch(Struct, gc=False):
    agent_id: _Handle = field(default_factory=_Handle)
    queue_id: _Handle = field(default_factory=_Handle)
    kernel_id: int = NONE
    group_segment_size: int | None = None
    workgroup_size: _Size = field(default_factory=_Size)
    grid_size: _Size = field(default_factory=_Size)


class _Record(Struct, gc=False):
    """A kernel, a copy or a call; each has some of these fields."""

    kind: int = NONE
    operation: int = NONE
    thread_id: int = NONE
    correlation_id: _Correlation = field(default_factory=_Correlation)
    start_timestamp: int = 0
    end_timestamp: int = 0
    dispatch_info: _Dispatch = field(default_factory=_Dispatch)
    stream_id: _Handle = field(default_factory=_Handle)
    dst_agent_id: _Handle = field(default_factory=_Handle)
    src_agent_id: _Handle = field(default_factory=_Handle)
    bytes: int = NONE


class _Records(Struct, gc=False):
    kernel_dispatch: list[_Record] = field(default_factory=list)
    memory_copy: list[_Record] = field(default_factory=list)
    hip_api: list[_Record] = field(default_factory=list)
    marker_api: list[_Record] = field(default_factory=list)


class _Agent(Struct, gc=False):
    id: _Handle = field(default_factory=_Handle)
    type: int = NONE
    product_name: str = ""
    logical_node_type_id: int = NONE


class _Symbol(Struct, gc=False):
    kernel_id: int = NONE
    formatted_kernel_name: str = ""


class _Operations(Struct, gc=False):
    operations: list[str] = field(default_factory=list)


class _Message(Struct, gc=False):
    key: int = NONE
    value: str = ""


class _Strings(Struct, gc=False):
    buffer_records: list[_Operations] = field(default_factory=list)
    marker_api: list[_Message] = field(default_factory=list)


class _HostNode(Struct, gc=False):
    hostname: str = ""


class _Metadata(Struct, gc=False):
    node: _HostNode = field(default_factory=_HostNode)


class _Process(Struct, gc=False):
    metadata: _Metadata = field(default_factory=_Metadata)
    agents: list[_Agent] = field(default_factory=list)
    strings: _Strings = field(default_factory=_Strings)
    kernel_symbols: list[_Symbol] = field(default_factory=list)
    buffer_records: _Records = field(default_factory=_Records)


class _ToolOutput(Struct, gc=False):
    tool: list[_Process] = field(default_factory=list, name="rocprofiler-sdk-tool")


def read_json(path: Path) -> Timeline:
    """Read the trace of a process from rocprofv3's JSON."""
    budget, notes = open_source(path), list[str]()
    text = read_whole(path, budget, notes)
    try:
        processes = msgspec.json.decode(text, type=_ToolOutput).tool
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordingError(f"{path} is not rocprofv3's JSON", why=str(error)[:200], fix="record again") from error
    del text
    if len(processes) != 1:
        raise RecordingError(
            f"{path} has {len(processes)} processes", why="a trace is of one", fix="rocprofv3 writes a file for each"
        )
    builder, (process,) = Builder(), processes
    agents = {a.id.handle: a for a in process.agents}
    gpus = {handle: agent.logical_node_type_id for handle, agent in agents.items() if agent.type == _GPU}
    names = {symbol.kernel_id: symbol.formatted_kernel_name for symbol in process.kernel_symbols}
    records = process.buffer_records
    for r in _sound(records.kernel_dispatch):
        info = r.dispatch_info
        group, grid = info.workgroup_size, info.grid_size
        launch = Launch(
            grid=tuple(-(-n // max(1, w)) for n, w in zip(_axes(grid), _axes(group), strict=True)),
            block=_axes(group), shared_bytes=info.group_segment_size,
        )  # fmt: skip
        stream = r.stream_id.handle if r.stream_id.handle != NONE else info.queue_id.handle
        name = names.get(info.kernel_id) or f"kernel {info.kernel_id}"
        add_kernel(
            builder, name, r.start_timestamp, r.end_timestamp, device=gpus.get(info.agent_id.handle, NONE),
            stream=stream, correlation=r.correlation_id.internal, launch=launch,
        )  # fmt: skip
    operations = process.strings.buffer_records
    for r in _sound(records.memory_copy):
        device = next((gpus[a.handle] for a in (r.dst_agent_id, r.src_agent_id) if a.handle in gpus), NONE)
        add_copy(
            builder, name_copy(_operation(operations, r)), r.start_timestamp, r.end_timestamp, device=device,
            stream=max(r.stream_id.handle, 0), correlation=r.correlation_id.internal, size=r.bytes,
        )  # fmt: skip
    for r in _sound(records.hip_api):
        add_call(
            builder, _operation(operations, r), r.start_timestamp, r.end_timestamp, thread=r.thread_id,
            correlation=r.correlation_id.internal,
        )  # fmt: skip
    messages = {message.key: message.value for message in process.strings.marker_api}
    for r in _sound(records.marker_api):
        name = messages.get(r.correlation_id.internal) or _operation(operations, r)
        builder.add("region", name, r.start_timestamp, r.end_timestamp, thread=r.thread_id)
    properties = [{"id": gpus[a.id.handle], "name": a.product_name} for a in process.agents if a.id.handle in gpus]
    builder.meta |= {"deviceProperties": properties, "host": process.metadata.node.hostname}
    return _finish(builder, budget, notes, path)


def read_csv(path: Path) -> Timeline:
    """Read the trace of a process from rocprofv3's kernel_trace.csv and the files beside it."""
    budget, notes, builder = open_source(path), list[str](), Builder()
    stem = str(path).removesuffix(KERNELS)
    kernels = list(_read_table(path, budget, notes))
    if kernels and "Counter_Name" in kernels[0]:  # counter_collection.csv has a row for each counter of a dispatch
        kernels = list({tuple(row.get(c) for c in _DISPATCH): row for row in kernels}.values())
    agents = _read_agents(Path(stem + _AGENTS), kernels, notes)
    builder.meta["deviceProperties"] = [{"id": number, "name": name} for number, name in agents.values() if name]
    for row in kernels:
        group = tuple(_int(row, f"Workgroup_Size_{axis}", 1) for axis in "XYZ")
        grid = tuple(-(-_int(row, f"Grid_Size_{axis}", 1) // max(1, n)) for axis, n in zip("XYZ", group, strict=True))
        launch = Launch(grid=grid, block=group, shared_bytes=_int(row, "LDS_Block_Size", 0))
        add_kernel(
            builder, row.get("Kernel_Name", ""), *_times(row),
            device=agents.get(_agent(row.get("Agent_Id", "")), (NONE, ""))[0],
            stream=_int(row, "Stream_Id", _int(row, "Queue_Id", 0)), correlation=_int(row, "Correlation_Id"),
            launch=launch,
        )  # fmt: skip
    for row in _read_table(Path(stem + _COPIES), budget, notes):
        ends = (row.get("Destination_Agent_Id", ""), row.get("Source_Agent_Id", ""))
        device = next((agents[_agent(a)][0] for a in ends if _agent(a) in agents), NONE)
        add_copy(
            builder, name_copy(row.get("Direction", "")), *_times(row), device=device,
            stream=_int(row, "Stream_Id", 0), correlation=_int(row, "Correlation_Id"),
        )  # fmt: skip
    for row in _read_table(Path(stem + _CALLS), budget, notes):
        add_call(
            builder, row.get("Function", ""), *_times(row), thread=_int(row, "Thread_Id"),
            correlation=_int(row, "Correlation_Id"),
        )  # fmt: skip
    for row in _read_table(Path(stem + _MARKERS), budget, notes):
        builder.add("region", row.get("Function", ""), *_times(row), thread=_int(row, "Thread_Id"))
    return _finish(builder, budget, notes, path)


def _finish(builder: Builder, budget: ReadBudget, notes: list[str], path: Path) -> Timeline:
    if not len(builder):
        raise RecordingError(
            f"{path} contains no kernel, copy or call", why="rocprofv3 recorded nothing of that kind",
            fix="rocprofv3 --kernel-trace --memory-copy-trace --hip-trace --output-format json -- PROGRAM",
        )  # fmt: skip
    budget.check_rows(len(builder))
    timeline = builder.build(last=True)
    timeline.notes = [*notes, NO_WALL_CLOCK]
    timeline.meta["recorded_by"] = "rocprofv3"
    budget.check_devices(timeline["device"])
    return timeline


def _sound(records: list[_Record]) -> Iterator[_Record]:
    """Keep records with possible times; rocprofv3 writes 0 if a kernel had not ended."""
    return (r for r in records if 0 < r.start_timestamp <= r.end_timestamp < LIMIT_NS)


def _axes(size: _Size) -> tuple[int, int, int]:
    return size.x, size.y, size.z


def _operation(kinds: list[_Operations], record: _Record) -> str:
    """Return the name of a call or copy; records have only numbers into a table."""
    if 0 <= record.kind < len(kinds) and 0 <= record.operation < len(kinds[record.kind].operations):
        return kinds[record.kind].operations[record.operation]
    return f"operation {record.operation}"


def _read_table(path: Path, budget: ReadBudget, notes: list[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file with possible times; nothing if there is no such file."""
    if not path.exists():
        return
    text = read_whole(path, budget, notes).decode("utf-8", "replace")
    try:
        for count, row in enumerate(csv.DictReader(io.StringIO(text))):
            budget.check_rows(count)
            start_ns, end_ns = _times(row)
            if "Start_Timestamp" not in row or 0 < start_ns <= end_ns < LIMIT_NS:
                yield row
    except csv.Error as error:
        notes.append(Note(f"not read: the rest of {path.name} ({error})", "omission"))


def _read_agents(path: Path, kernels: list[dict[str, str]], notes: list[str]) -> dict[int, tuple[int, str]]:
    """Return number and name of each GPU by the agent's number; agents are the CPUs and GPUs of a machine."""
    rows = list(_read_table(path, open_source(path), notes)) if path.exists() else []
    gpus = [row for row in rows if row.get("Agent_Type") == "GPU"]
    if gpus:
        by_node = sorted((_int(row, "Node_Id"), row.get("Product_Name") or row.get("Name", "")) for row in gpus)
        return {node: (number, name) for number, (node, name) in enumerate(by_node)}
    seen = sorted({_agent(row.get("Agent_Id", "")) for row in kernels})
    return {agent: (number, "") for number, agent in enumerate(seen)}


def _agent(text: str) -> int:
    """Return the number in 'Agent 2' or '2'."""
    number = _NUMBER.search(text or "")
    return int(number[0][:18]) if number else NONE


def _times(row: Mapping[str, Any]) -> tuple[int, int]:
    return _int(row, "Start_Timestamp", 0), _int(row, "End_Timestamp", 0)


def _int(row: Mapping[str, Any], column: str, default: int = NONE) -> int:
    text = row.get(column)
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 19 else default
