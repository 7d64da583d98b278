"""`Timeline`: a million records as columns. Rows are in the order they were added; `by_time` sorts them.

Columns, not objects: a training step has thousands of events, a run millions. `records()` makes a `Record` of a row
only when somebody looks at it. Values that many rows share (names, shapes, launch configurations) are stored once.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..joules import Ints as Ints
from ..record import APART as APART
from ..record import CODE, KINDS, ON_DEVICE, Kind, Record
from ..schema import DeviceId
from .distinct import rank_values

if TYPE_CHECKING:
    from ..trace import PowerTrace
    from .link import Links

CHUNK_ROWS = 65_536
"""Rows of one chunk."""
NONE = -1
"""The value of an integer column that means "nothing"."""
UNTRACED = -2
"""In the column `external`: listed by CUPTI, which knows no operators. `launch_alignment` finds the operators."""
MOST_NUMBER = 2**31 - 1
"""The largest number of a device or a rank. In some traces a device's number is a process's."""


class Launch(msgspec.Struct, frozen=True, omit_defaults=True):
    """What device rows of one launch configuration share. Stored once: `Timeline.launches[row.launch]`."""

    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    memcpy_dir: str | None = None
    pinned: bool | None = None
    collective_type: str | None = None
    collective_bytes: int | None = None
    group: str | None = None
    group_size: int | None = None
    dtype: str | None = None
    group_label: str | None = None


INTEGERS = (
    "kind",  # code of the kind, tessera.record.CODE
    "name",  # -> names
    "start_ns", "end_ns",  # epoch
    "device",  # -1: the host
    "stream",  # of device rows
    "thread",  # of host rows
    "correlation",  # links a device row to the call that launched it; for a host's collective: its number in its group
    "external",  # links device and runtime rows to the operator that made them (Kineto's External id)
    "parent",  # -> row: the operator a device/runtime row comes from, or the one that an operator is inside; or -1
    "sequence",  # autograd's sequence number of an operator; links backward to forward
    "forward_thread",  # of a backward operator: the thread its forward ran on
    "bytes",  # of copies, memsets and collectives
    "shapes",  # -> names: input shapes and dtypes of an operator
    "launch",  # -> launches
    "unit",  # -> names, of counters
    "rank",  # of rows of a merged timeline; -1: `Timeline.rank` is the rank of all rows
    "graph_node",  # of a kernel that a CUDA graph launched: its node, the same in each launch of that graph
    "captured",  # -> names: the kernel that a call put into a CUDA graph; the call's launch has that kernel's grid
    "count",  # of a row that stands for many kernels (profile.kernel_history): how many; -1: just itself
)  # fmt: skip
TEXTS = ("name", "shapes", "unit", "captured")
"""Columns that refer to names; every row has the first."""
FLOATS = ("value",)  # of counters; APART for regions that are apart; else NaN
KINETO_MARKS = {"Iteration Start: PyTorch Profiler": "tracing begins", "Record Window End": "tracing ends"}
"""Kineto's own marks -> words that need no knowledge of Kineto."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of a timeline, as exporters read them."""

    first_row: int
    columns: Mapping[str, NDArray[Any]]
    extra: Mapping[int, Mapping[str, Any]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self.columns[column]


@dataclass(slots=True)
class Timeline:
    """Records as columns. `notes` says what a reader should know (a truncated file, a clock that was stepped).

    Attribution fills `energy_j` and `error_j`; they are NaN for rows that spend nothing of their own.
    """

    columns: dict[str, NDArray[Any]]
    names: list[str]
    launches: list[Launch]
    rank: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    energy_j: NDArray[np.float64] | None = None
    error_j: NDArray[np.float64] | None = None
    extra: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Fields of single rows that have no column (hardware counters, overlap): row -> {Record field: value}."""
    links: Links | None = field(default=None, repr=False, compare=False)
    """The result of `tessera.timeline.link.link`; `linked` sets it."""

    def __len__(self) -> int:
        return len(self.columns["kind"])

    def __repr__(self) -> str:
        seconds = (self.end_ns - self.start_ns) * 1e-9 if len(self) else 0.0
        return f"<Timeline {len(self)} rows over {seconds:.3f} s, {len(self.names)} names>"

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self.columns[column]

    def rows(self, *kinds: Kind) -> Ints:
        """Return the row numbers of some kinds."""
        asked = np.zeros(len(KINDS) + 1, bool)  # one more, for NONE
        asked[[CODE[k] for k in kinds]] = True
        return np.flatnonzero(asked[self.columns["kind"]])

    @property
    def device_rows(self) -> Ints:
        """Rows of everything that ran on an accelerator."""
        return self.rows(*ON_DEVICE)

    @property
    def python_names(self) -> list[int]:
        """Names of modules and of Python frames: their rows have the kind of operators, but are not operators."""
        return [*self.meta.get("modules", ()), *self.meta.get("frames", ())]

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank if ranks of several hosts were merged; else empty."""
        hosts = {int(r["rank"]): str(r["host"]) for r in self.meta.get("ranks", ()) if r.get("host")}
        return hosts if len(set(hosts.values())) > 1 else {}

    def by_device(self, rows: Ints | None = None) -> dict[DeviceId, Ints]:
        """Group rows (by default all that ran on a device) by the device they ran on."""
        rows = self.device_rows if rows is None else rows
        hosts, parts = self.hosts, defaultdict[DeviceId, list[Ints]](list)
        ranks = self.columns["rank"][rows]
        for rank in np.unique(ranks).tolist() if hosts else [NONE]:
            own = rows[ranks == rank] if hosts else rows
            numbers = self.columns["device"][own]
            for index in rank_values(numbers)[0].tolist():
                parts[DeviceId(hosts.get(rank, ""), "gpu", index)].append(own[numbers == index])
        joined = {device: np.concatenate(parts[device]) for device in sorted(parts)}
        return {device: own if (np.diff(own) > 0).all() else np.sort(own) for device, own in joined.items()}

    @property
    def devices(self) -> list[DeviceId]:
        return list(self.by_device())

    def name(self, row: int) -> str:
        return self.names[int(self.columns["name"][row])]

    def kind(self, row: int) -> Kind:
        return KINDS[int(self.columns["kind"][row])]

    def text(self, column: str, row: int) -> str | None:
        """Return the text that an integer column refers to; None if there is none."""
        index = int(self.columns[column][row])
        return None if index == NONE else self.names[index]

    @property
    def linked(self) -> Links:
        """Operators, regions, modules and steps of the rows."""
        from .link import link

        return link(self) if self.links is None else self.links

    def records(self, rows: Sequence[int] | Ints | None = None) -> Iterator[Record]:
        """Yield `Record`s of some rows (by default of all, in time order)."""
        from .view import records

        return records(self, rows)

    @property
    def start_ns(self) -> int:
        return int(self.columns["start_ns"].min()) if len(self) else 0

    @property
    def end_ns(self) -> int:
        return int(self.columns["end_ns"].max()) if len(self) else 0

    @property
    def traced_span(self) -> tuple[int, int]:
        """From the first to the last row that a tracer made; of all rows, if there was no tracer.

        A program's own regions, marks and counters continue while nothing is traced: a time without kernels means
        nothing there.
        """
        code, names = self.columns["kind"], self.columns["name"]
        by_tracer = [i for i, name in enumerate(self.names) if name in KINETO_MARKS or name.startswith("ProfilerStep#")]
        own = np.isin(code, [CODE[kind] for kind in ("region", "mark", "counter")])
        rows = np.flatnonzero(~own | np.isin(names, by_tracer))
        if not np.any(~own):
            return self.start_ns, self.end_ns
        return int(self.columns["start_ns"][rows].min()), int(self.columns["end_ns"][rows].max())

    @property
    def device_properties(self) -> list[dict[str, Any]]:
        """What the tracer wrote about each device; empty if nothing, or nothing that can be read."""
        written = self.meta.get("deviceProperties")
        return [p for p in written if isinstance(p, dict)] if isinstance(written, list) else []

    @property
    def row_meta(self) -> Mapping[str, Any]:
        return self.meta

    @property
    def has_energy(self) -> bool:
        return self.energy_j is not None

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Yield the rows in chunks. `columns` selects columns; `energy_j` and `energy_error_j` can be selected too."""
        wanted = (*INTEGERS, *FLOATS) if columns is None else tuple(columns)
        spent = {"energy_j": self.energy_j, "energy_error_j": self.error_j}
        for first in range(0, len(self), CHUNK_ROWS):
            count = min(CHUNK_ROWS, len(self) - first)
            values: dict[str, NDArray[Any]] = {}
            for column in wanted:
                whole = spent[column] if column in spent else self.columns.get(column)
                missing = np.full(count, np.nan if column in spent else _missing(column), _dtype(column))
                values[column] = missing if whole is None else whole[first : first + count]
            extra = {row - first: fields for row, fields in self.extra.items() if first <= row < first + count}
            yield Chunk(first, values, extra)

    def correlate(self, power: PowerTrace, **options: Any) -> Any:
        """Link spikes of a power trace to kernels and collectives: see `tessera.analyze.correlate`."""
        from ..analyze.correlate import correlate

        return correlate(self, power, **options)


def _missing(column: str) -> Any:
    return float("nan") if column in FLOATS else NONE


def _dtype(column: str) -> Any:
    return np.float64 if column in FLOATS or column not in INTEGERS else np.int64


def keep_rows(timeline: Timeline, keep: NDArray[np.bool_]) -> Timeline:
    """Return the timeline with only those rows for which `keep` is true."""
    if keep.all():
        return timeline
    # Rows get new numbers. The extra cell at the end maps NONE (-1) to NONE.
    number = np.append(np.where(keep, np.cumsum(keep) - 1, NONE), NONE)
    columns = {name: values[keep] for name, values in timeline.columns.items()}
    columns["parent"] = number[columns["parent"]]
    return replace(
        timeline,
        columns=columns,
        energy_j=None if timeline.energy_j is None else timeline.energy_j[keep],
        error_j=None if timeline.error_j is None else timeline.error_j[keep],
        extra={int(number[row]): fields for row, fields in timeline.extra.items() if keep[row]},
        links=None,
    )


class Builder:
    """Collects rows one by one and makes a `Timeline`. Names and launches are stored once."""

    def __init__(self) -> None:
        self._rows = 0
        # A column is made when its first value comes: most traces have no counters, parents or ranks.
        self._columns: dict[str, array[Any]] = {}
        for column in ("kind", "name", "start_ns", "end_ns"):
            self._begin(column)
        self._names: dict[str, int] = {}
        self._launches: dict[Launch, int] = {}
        self.notes: list[str] = []
        self.meta: dict[str, Any] = {}

    def __len__(self) -> int:
        return self._rows

    def intern(self, text: str) -> int:
        return self._names.setdefault(text, len(self._names))

    def intern_launch(self, launch: Launch) -> int:
        return self._launches.setdefault(launch, len(self._launches))

    def add(
        self, kind: Kind, name: str, start_ns: int, end_ns: int, *, value: float = float("nan"), **integers: int
    ) -> int:
        """Append a row; integer columns that are not given are `NONE`. Return the row's number."""
        row = len(self)
        cells = {"kind": CODE[kind], "name": self.intern(name), "start_ns": start_ns, "end_ns": end_ns, **integers}
        if not math.isnan(value):
            cells["value"] = value  # type: ignore[assignment]
        for column in cells.keys() - self._columns.keys():
            self._begin(column)
        for column, values in self._columns.items():
            values.append(cells.get(column, _missing(column)))
        self._rows += 1
        return row

    def extend(self, columns: Mapping[str, Any], count: int) -> None:
        """Append many rows at once from arrays (missing columns are `NONE`)."""
        for column in columns.keys() - self._columns.keys():
            self._begin(column)
        for column, values in self._columns.items():
            cells = columns.get(column, _missing(column))
            values.frombytes(np.ascontiguousarray(np.broadcast_to(cells, count), _dtype(column)).tobytes())
        self._rows += count

    def _begin(self, column: str) -> None:
        if column not in INTEGERS and column not in FLOATS:
            raise KeyError(column)
        self._columns[column] = array("d" if column in FLOATS else "q", [_missing(column)]) * self._rows

    def build(self, *, last: bool = False) -> Timeline:
        """Return the timeline so far. With `last` it takes the memory of the rows, so nothing can be added later."""
        columns: dict[str, NDArray[Any]] = {}
        for column in INTEGERS + FLOATS:
            values, dtype = self._columns.get(column), _dtype(column)
            if values is not None:
                columns[column] = np.frombuffer(values, dtype) if last else np.array(values, dtype)
            else:  # one value for all rows takes no memory, and is read-only
                columns[column] = np.broadcast_to(np.array(_missing(column), dtype), self._rows)
        return Timeline(
            columns=columns, names=list(self._names), launches=list(self._launches), meta=dict(self.meta),
            notes=list(self.notes),
        )  # fmt: skip
