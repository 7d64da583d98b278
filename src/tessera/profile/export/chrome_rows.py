"""Writes the rows of a run as Chrome trace events. Arguments have Kineto's names, so that its readers work."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...joules import Ints
from ...record import CODE, KINDS
from ...timeline.columns import NONE, Chunk, Launch
from ...timeline.intervals import Spans, covered_ns, union
from ...timeline.shapes import DTYPES
from ...timeline.transfers import DTYPE_BYTES
from ..runfile_format import NAME_LISTS

if TYPE_CHECKING:
    from ...attribute.table import EnergyTable
    from ...recording import Rows


class Overlap:
    """For each device: how much of a copy's or collective's time kernels ran too, and the other way round."""

    def __init__(self, parts: Sequence[Sequence[NDArray[Any]]]) -> None:
        """Take (kind, start_ns, end_ns, device) of device rows, in any number of pieces."""
        self._unions: dict[tuple[int, bool], Spans] = {}
        # One device and one of the two sorts at a time, so that not everything is copied at once.
        for number in sorted({n for part in parts for n in np.unique(part[3]).tolist()}):
            for is_kernel in (True, False):
                chosen = [((p[3] == number) & ((p[0] == CODE["kernel"]) == is_kernel), p[1], p[2]) for p in parts]
                start, end = (np.concatenate([part[i][part[0]] for part in chosen]) for i in (1, 2))
                if len(start):
                    self._unions[number, is_kernel] = union(start, end)

    def pct(self, kind: NDArray[Any], start: Ints, end: Ints, device: NDArray[Any]) -> NDArray[np.float64]:
        """Return a percentage for each row; NaN if the device has no rows of the other sort or the row took no time."""
        out = np.full(len(kind), np.nan)
        kernels = kind == CODE["kernel"]
        for (number, is_kernel), spans in self._unions.items():
            these = np.flatnonzero((device == number) & (kernels != is_kernel) & (end > start))
            if these.size:
                s, e = start[these], end[these]
                out[these] = 100.0 * covered_ns(spans, s, e) / (e - s)
        return out


CATEGORY = {
    "kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset", "collective": "collective",
    "runtime": "cuda_runtime", "graph_launch": "cuda_runtime", "op": "cpu_op", "region": "user_annotation",
    "python": "python_function",
}  # fmt: skip
DEVICE_CODES = [CODE[k] for k in ("kernel", "memcpy", "memset", "collective")]
LAUNCHERS = [CODE[k] for k in ("runtime", "graph_launch")]
COMMS = "record_param_comms"
NAMED_TRACKS = 1 << 31  # above any thread number of Linux, and within the 32 bits that Perfetto keeps
_RANK_BITS = 48  # a merged run has the rank above these bits of a thread number
_RANK_PIDS = 100  # process numbers for each rank: more than a machine has GPUs
_LIST = re.compile(r"\(([^()]*)\)|\[([\d,]*)\](\w*)")
_KINETO_DTYPE: dict[str, str] = {}
for _kineto, _short in DTYPES.items():
    _KINETO_DTYPE.setdefault(_short, _kineto)


class RowWriter:
    """Makes events of chunks. Names, launches and shapes, which many rows share, are turned into JSON once."""

    def __init__(
        self,
        rows: Rows,
        table: EnergyTable | None,
        base_ns: int,
        host_pid: int,
        overlap: Overlap,
        critical: Container[int],
    ) -> None:
        """`critical` are the numbers of the rows on the critical path."""
        self._critical = critical
        self._base_ns = base_ns
        self._pid = host_pid
        self._overlap = overlap
        self._own_joules = rows.has_energy
        self.columns = (
            "kind", "name", "start_ns", "end_ns", "device", "stream", "thread", "correlation", "external", "sequence",
            "forward_thread", "bytes", "shapes", "launch", "unit", "value", "rank", *(("energy_j", "energy_error_j") if
            self._own_joules else ()),
        )  # fmt: skip
        self._texts = rows.names
        self._names = [json.dumps(n) for n in self._texts]
        self._run_launches = rows.launches
        self._launches = [_launch_args(launch) for launch in self._run_launches]
        python = {name for key in NAME_LISTS for name in rows.row_meta.get(key, ())}
        self._categories = dict.fromkeys(python, "python_function")  # modules and frames of the Python tracer
        self._shapes: dict[int, str] = {}
        number = {n: i for i, n in enumerate(self._texts)}
        regions = (*table.regions, *table.steps) if table is not None else ()
        self._regions = {number[r.name]: _region_args(r) for r in regions if r.name in number}
        self._linked = np.zeros(0, np.int64)

    def link(self, launched: NDArray[np.int64], ran: NDArray[np.int64]) -> None:
        """Prepare arrows for the correlations that both a runtime call and a device row have."""
        self._linked = np.intersect1d(launched, ran)

    def events(self, chunk: Chunk) -> Iterator[str]:
        kind, start, end = chunk["kind"], chunk["start_ns"], chunk["end_ns"]
        at = device_pid(chunk["rank"], chunk["device"])
        percent = _fields("overlap_pct", self._overlap.pct(kind, start, end, at), 4)
        joules, errors = self._joules(chunk)
        energy, error = _fields("energy_j", joules, 6), _fields("energy_error_j", errors, 3)
        linked = np.isin(chunk["correlation"], self._linked) & np.isin(kind, [*DEVICE_CODES, *LAUNCHERS])
        since, lasts = start - self._base_ns, np.maximum(end - start, 0)
        ids = zip(chunk["external"].tolist(), chunk["correlation"].tolist(), strict=True)
        times = zip((since // 1000).tolist(), (since % 1000).tolist(), lasts.tolist(), strict=True)
        sizes, launches = chunk["bytes"].tolist(), chunk["launch"].tolist()
        devices, streams, threads, ranks = (chunk[c].tolist() for c in ("device", "stream", "thread", "rank"))
        places = np.where(chunk["device"] == NONE, host_pid(self._pid, chunk["rank"]), at).tolist()
        rows = zip(kind.tolist(), chunk["name"].tolist(), times, ids, linked.tolist(), strict=True)
        for i, (code, name, (us, ns, lasts_ns), (external, correlation), arrow) in enumerate(rows):
            text, ts = self._names[name], f"{us}.{ns:03d}"
            if code > CODE["region"]:
                yield self._instant(chunk, i, text, ts, places[i], track(threads[i]))
                continue
            args = "" if external == NONE else f',"External id":{external}'
            if correlation != NONE:
                args += f',"correlation":{correlation}'
            if code <= CODE["collective"]:
                pid, tid = (0 if devices[i] == NONE else places[i]), max(streams[i], 0)
                args += f',"device":{max(devices[i], 0)},"stream":{tid}'
                if launches[i] != NONE:
                    args += self._launches[launches[i]]
                if sizes[i] != NONE:
                    args += _format_bandwidth(sizes[i], lasts_ns)
                args += percent[i] + energy[i] + error[i]
            else:
                pid, tid = host_pid(self._pid, ranks[i]), track(threads[i])
                args += self._host_args(chunk, i, code, name)
            if ranks[i] != NONE:
                args += f',"rank":{ranks[i]}'
            if chunk.first_row + i in self._critical:
                args += ',"critical":1'
            if i in chunk.extra:
                args += _inside(chunk.extra[i])
            category = self._categories.get(name, "cpu_op") if code == CODE["op"] else CATEGORY[KINDS[code]]
            yield (
                f'{{"ph":"X","cat":"{category}","name":{text},"pid":{pid},"tid":{tid},"ts":{ts},'
                f'"dur":{lasts_ns // 1000}.{lasts_ns % 1000:03d},"args":{{{args[1:]}}}}}'
            )
            if arrow:
                phase = '"ph":"f","bp":"e"' if code <= CODE["collective"] else '"ph":"s"'
                yield f'{{{phase},"cat":"ac2g","name":"ac2g","id":{correlation},"pid":{pid},"tid":{tid},"ts":{ts}}}'

    def _joules(self, chunk: Chunk) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if self._own_joules:
            return chunk["energy_j"], chunk["energy_error_j"]
        return np.full(len(chunk), np.nan), np.full(len(chunk), np.nan)

    def _instant(self, chunk: Chunk, i: int, name: str, ts: str, pid: int, tid: int) -> str:
        if chunk["kind"][i] == CODE["mark"]:
            return f'{{"ph":"i","s":"t","name":{name},"pid":{pid},"tid":{tid},"ts":{ts}}}'
        value, unit = float(chunk["value"][i]), int(chunk["unit"][i])
        key = self._names[unit] if unit != NONE else '"value"'
        shown = repr(value) if np.isfinite(value) else "null"
        return f'{{"ph":"C","name":{name},"pid":{pid},"tid":0,"ts":{ts},"args":{{{key}:{shown}}}}}'

    def _host_args(self, chunk: Chunk, i: int, code: int, name: int) -> str:
        if code == CODE["region"]:
            return self._regions.get(name, "")
        if code != CODE["op"]:
            return ""
        args = ""
        for key, column in (("Sequence number", "sequence"), ("Fwd thread id", "forward_thread")):
            if (value := int(chunk[column][i])) != NONE:
                args += f',"{key}":{value}'
        if (shapes := int(chunk["shapes"][i])) != NONE:
            if shapes not in self._shapes:
                self._shapes[shapes] = shape_args(self._texts[shapes])
            args += self._shapes[shapes]
        launch = int(chunk["launch"][i])
        if self._texts[name] == COMMS:
            args += comms_args(Launch() if launch == NONE else self._run_launches[launch])
        elif launch != NONE:  # a collective that ran on the host
            args += self._launches[launch]
        return args


def track(thread: int) -> int:
    """Return the track of a thread. Threads without a number share track 0; threads with only a name come last."""
    return thread % (1 << _RANK_BITS) if thread >= 0 else 0 if thread == NONE else NAMED_TRACKS - thread


def device_pid(rank: NDArray[Any], device: NDArray[Any]) -> NDArray[Any]:
    """Return the process number of a device: its own number, as in Kineto's traces; in a merged run one per rank."""
    pid: NDArray[Any] = np.maximum(device, 0) + np.where(rank == NONE, 0, (rank + 1) * _RANK_PIDS)
    return pid


def host_pid(pid: int, rank: Any) -> Any:
    """Return the process number of a rank's host rows; `rank` is `NONE` if the run has only one."""
    return pid + rank - NONE


def _fields(key: str, values: NDArray[np.float64], digits: int) -> list[str]:
    """Return each value as an argument; an empty text for values that are not known."""
    finite = np.isfinite(values).tolist()
    return [f',"{key}":{v:.{digits}g}' if k else "" for v, k in zip(values.tolist(), finite, strict=True)]


def _format_bandwidth(size: int, lasts_ns: int) -> str:
    rate = f',"memory bandwidth (GB/s)":{size / lasts_ns:.6g}' if lasts_ns else ""
    return f',"bytes":{size}{rate}'


def _launch_args(launch: Launch) -> str:
    """Return a launch as JSON without braces, with Kineto's names."""
    fields: dict[str, Any] = {
        "grid": launch.grid, "block": launch.block, "registers per thread": launch.registers,
        "shared memory": launch.shared_bytes, "memcpy_dir": launch.memcpy_dir, "pinned": launch.pinned,
        "collective_bytes": launch.collective_bytes, **_collective(launch),
    }  # fmt: skip
    return _inside({k: v for k, v in fields.items() if v is not None})


def _collective(launch: Launch) -> dict[str, Any]:
    size = DTYPE_BYTES.get((launch.dtype or "").lower())
    count = launch.collective_bytes // size if launch.collective_bytes is not None and size else None
    # The message is the larger of input and output; which of the two depends on the collective.
    side = "In msg nelems" if launch.collective_type == "reduce_scatter" else "Out msg nelems"
    return {
        "Collective name": launch.collective_type, "dtype": launch.dtype, side: count,
        "Process Group Name": launch.group, "Process Group Description": launch.group_label,
        "Group size": launch.group_size,
    }  # fmt: skip


def comms_args(launch: Launch) -> str:
    """Return all fields that torch's trace validator expects of a `record_param_comms`, and name those not recorded."""
    empty = {"Collective name": "", "dtype": "", "In msg nelems": 0, "Out msg nelems": 0, "Group size": 0}
    recorded = {k: v for k, v in _collective(launch).items() if v is not None}
    return _inside({**empty, **recorded, "not recorded": [k for k in empty if k not in recorded]})


def _region_args(row: Any) -> str:
    """Return a region's joules: its own if it was entered once, otherwise the mean of its calls."""
    key = "energy_j" if row.calls == 1 else "energy_j_mean_of_calls"
    fields: Mapping[str, Any] = {key: row.j_per_call, "calls": row.calls, "energy_j_of_all_calls": row.energy_j}
    return _inside({k: v for k, v in fields.items() if math.isfinite(v)})


def shape_args(text: str) -> str:
    """Convert '[8,768]bf16 ([2] [3])' to Kineto's "Input Dims" and "Input type"."""
    dims: list[Any] = []
    types: list[str] = []
    for group, shape, dtype in _LIST.findall(text):
        if shape or dtype or not group:
            dims.append([int(d) for d in shape.split(",") if d])
            types.append(_KINETO_DTYPE.get(dtype, dtype))
        else:
            dims.append([[int(d) for d in s.split(",") if d] for s in re.findall(r"\[([\d,]*)\]", group)])
            types.append("TensorList")
    return _inside({"Input Dims": dims, "Input type": types})


def _inside(fields: Mapping[str, Any]) -> str:
    """Return further arguments: a comma and the JSON without its braces."""
    return f",{json.dumps(fields, separators=(',', ':'), default=list)[1:-1]}" if fields else ""
