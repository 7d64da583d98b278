"""`RunFile`: reads what `RunWriter` wrote, even if the writer was killed or the directory is read-only."""

from __future__ import annotations

import contextlib
import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..clock import EpochNs
from ..joules import DomainSamples
from ..notes import kind_of, restore_kinds
from ..read_limits import JSON_BYTES, RUN_BYTES_PER_ROW
from ..recording import CpuUse, Facts, Recording, Stack
from ..schema import Domain, Gap, Pause, PowerEvent, Telemetry
from ..timeline.columns import CHUNK_ROWS, FLOATS, INTEGERS, Chunk, Launch, Timeline
from ..trace import PowerTrace
from .runfile_format import (
    DAMAGE,
    FACTS,
    as_text,
    check_columns,
    check_domain,
    check_pairs,
    check_time,
    join_columns,
    let_go,
    merge_meta,
    points_beyond,
    renumber_rows,
    row_count,
    unpack,
)
from .runfile_open import DAMAGED_FIX, RunDatabase, bad_file, size_with_log

ENERGY = ("energy_j", "energy_error_j")
_FIRST = itemgetter(0)  # we sort rows ourselves: SQLite would keep any number of them in memory


class RunFile:
    """A recorded run. All times are nanoseconds of the wall clock (epoch).

    `crashed` is True if the writer has not closed the file: it was killed, or still writes. `notes` says so, and what
    else a reader should know.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._db = RunDatabase(self.path)
        try:
            self.about: dict[str, str] = dict(self._db.rows(f"SELECT {as_text('key')}, {as_text('value')} FROM about"))
        except BaseException:
            self.close()
            raise
        self.crashed = "closed_epoch_ns" not in self.about
        self._lost: list[str] = []
        self._unpacked = 0

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> RunFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_db"):
            self.close()  # otherwise Python warns of an open file, or a temporary copy stays

    def __repr__(self) -> str:
        return f"<RunFile {self.path}: {self.rows} rows, {', '.join(self.domains) or 'no power'}>"

    def recording(self) -> Recording:
        """Return the run as a `Recording`; its parts are read when they are asked for."""
        facts = self._facts()
        return Recording(
            self.timeline,
            self.power,
            self.telemetry,
            facts,
            stacks=self.stacks,
            events=self.events,
            # Counters of a replay belong to rows of the whole timeline, so exporters must not read the file's rows.
            rows=None if self.get("counters") else self,
            close=self.close,
        )

    def _facts(self) -> Facts:
        start_ns, end_ns = self.span_ns
        notes = [*self.notes, *(self.get("notes") or ())]
        return Facts(
            name=self.path.name,
            kind="run",
            path=self.path,
            host=self.about.get("host", ""),
            pid=self.pid,
            mode=self._get_as(str, "mode"),
            command=self._get_as(str | list[str], "command") or self._get_as(list[str], "argv"),
            device=str(self.get("device") or ""),
            span_ns=(EpochNs(start_ns), EpochNs(end_ns)),
            windows=sorted((int(a), int(b)) for a, b in self.get("windows") or ()),
            operator_windows=sorted((int(a), int(b)) for a, b in self.get("operator_windows") or ()),
            collectors=self._get_as(dict[str, str | None], "collectors") or {},
            scheduled=bool(self.get("scheduled")),
            tracing_s=self._get_as(float, "tracing_s"),
            pauses=[Pause(start_ns, seconds) for start_ns, seconds in self.get("pauses") or ()],
            time_limit_reached=any(kind_of(note) == "time_limit" for note in notes),
            crashed=self.crashed,
            returncode=self.get("returncode"),
            work=self.get("work"),
            summary=self.get("summary"),
            cpu_use=self._convert(used, CpuUse) if (used := self.get("cpu_use")) is not None else None,
            version=self.about.get("tessera", ""),
            meta=self.meta,
            notes=notes,
        )

    # Facts ------------------------------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:
        """Return a fact that `RunWriter.set` kept, or that is in the run's meta; else the default."""
        rows = self._db.rows("SELECT value FROM facts WHERE key = ?", key)
        return self._fact(key, rows[0][0]) if rows else self.meta.get(key, default)

    def _get_as(self, kind: Any, key: str) -> Any:
        """Return a fact whose name a program may also use; None if its type is not ours."""
        try:
            return msgspec.convert(self.get(key), kind)
        except msgspec.ValidationError:
            return None

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The facts that the session stored when it began."""
        rows = self._db.rows("SELECT value FROM facts WHERE key = 'meta'")
        meta: dict[str, Any] = self._fact("meta", rows[0][0]) if rows else {}
        return meta

    @property
    def pid(self) -> int:
        """The process that was recorded; 0 if unknown."""
        text = self.about.get("pid", "")
        return int(text) if text.isdecimal() and len(text) < 10 else 0

    @property
    def facts(self) -> dict[str, Any]:
        rows = self._db.rows("SELECT key, value FROM facts WHERE key NOT IN ('meta', 'timelines')")
        return {str(key): self._fact(str(key), text) for key, text in rows}

    def _fact(self, key: str, text: str) -> Any:
        with self._reading(f"the fact {key!r} is"):
            if len(text) > JSON_BYTES:
                raise ValueError(f"{len(text):,} characters are too many")
            return msgspec.json.decode(text, type=FACTS.get(key, Any))

    @property
    def notes(self) -> list[str]:
        """What a reader should know of this file."""
        notes = [f"{name} beside it is not of this run, which is complete: not read" for name in self._db.foreign]
        if lost := self._db.checked.lost_bytes:
            lost_text = f"the last {lost / 1024:,.0f} KB of it, and what was recorded in them, are left out"
            notes.append(f"{self.path.name}-wal is damaged: {lost_text}")
        if self.crashed:
            notes.append(
                "the file was never closed: its program was killed, is still running, or could not write to the disk;"
                " the last half second is missing, or all since the disk was full"
            )
            notes += self.get("write_stalls") or ()
            if self._db.log_is_missing:
                notes.append(f"{self.path.name}-wal is not beside it: what was recorded last is in that file")
            elif not self._db.checked.is_checked:
                notes.append("it has no checksums, since its writer was killed: damage to it would not be noticed")
        return notes + [n for part in self.timelines for n in restore_kinds(part["notes"], part.get("kinds") or {})]

    @property
    def timelines(self) -> list[dict[str, Any]]:
        """Where each added timeline lies: first_row, rows, rank, meta, notes."""
        rows = self._db.rows("SELECT value FROM facts WHERE key = 'timelines'")
        parts: list[dict[str, Any]] = self._fact("timelines", rows[0][0]) if rows else []
        return parts

    # Rows -------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        with self._reading("its number of rows is"):
            return int(self._db.rows("SELECT coalesce(sum(rows), 0) FROM chunks")[0][0])

    @property
    def names(self) -> list[str]:
        """The texts that the columns `name`, `shapes` and `unit` refer to."""
        rows = self._db.rows(f"SELECT id, {as_text('text')} FROM names ORDER BY id")
        if any(number != i for i, (number, _) in enumerate(rows)):
            raise bad_file(self.path, "some of its names are lost", DAMAGED_FIX)
        return [text for _, text in rows]

    @property
    def launches(self) -> list[Launch]:
        """The launch configurations that the column `launch` refers to."""
        rows = self._db.rows("SELECT value FROM launches ORDER BY id")
        return [self._decode(text, Launch) for (text,) in rows]

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Yield the rows in chunks; the memory needed does not grow with the run. `columns` selects columns.

        `energy_j` and `energy_error_j` can be selected too; NaN if nothing was attributed. `first_row` and `parent` are
        row numbers of the file, which has holes if a writer was killed; `timeline()` has no holes.
        """
        wanted = (*INTEGERS, *FLOATS) if columns is None else tuple(columns)
        self._unpacked = 0
        self._db.budget.size = size_with_log(self.path)  # a live run grows
        self._db.budget.check_rows(self.rows, RUN_BYTES_PER_ROW)
        plain = [c for c in wanted if c not in ENERGY]
        joules = [c for c in wanted if c in ENERGY]
        names, launches = self._count("names"), self._count("launches")
        # One query for a few chunks: an open cursor would keep a live writer from checkpointing.
        for low, high in self._group_chunks():
            sql = "SELECT first_row, rows, columns, data FROM chunks WHERE first_row BETWEEN ? AND ? ORDER BY first_row"
            stored = self._db.rows(sql, low, high)
            with self._reading(f"the rows from {low} on are"):  # with a damaged index, other rows than listed are found
                end = max((first + row_count(rows) for first, rows, *_ in stored), default=low)
                extra = self._db.rows("SELECT row, value FROM extra WHERE row >= ? AND row < ? ORDER BY row", low, end)
                energies = self._energy(stored, low, end, joules) if joules else []
            for i, (first, rows, heads, data) in enumerate(stored):
                if not rows:
                    continue  # no writer makes an empty chunk, but a file may have a hundred thousand of them
                with self._reading(f"the rows from {first} on are"):
                    values = unpack(heads, data, rows, plain)
                    if points_beyond(values, names=names, launches=launches):  # a live writer has added names
                        names, launches = self._count("names"), self._count("launches")
                    self._lost += check_columns(values, names=names, launches=launches)
                    if joules:
                        values |= energies[i]
                    own = extra[bisect_left(extra, (first,)) : bisect_left(extra, (first + rows,))]
                    fields = {row - first: msgspec.json.decode(text, type=dict[str, Any]) for row, text in own}
                yield Chunk(first, values, fields)

    def _group_chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the first and last `first_row` of consecutive chunks that together have at most `CHUNK_ROWS` rows."""
        low, held, last = None, 0, 0
        for first, rows in self._db.rows("SELECT first_row, rows FROM chunks ORDER BY first_row"):
            with self._reading(f"the rows from {first} on are"):
                if low is None or held + row_count(rows) > CHUNK_ROWS:
                    if low is not None:
                        yield low, last
                    low, held = first, 0
                held, last = held + rows, first
        if low is not None:
            yield low, last

    def _energy(
        self, chunks: Sequence[tuple[Any, ...]], low: int, end: int, columns: Sequence[str]
    ) -> list[dict[str, NDArray[Any]]]:
        """Return the joules of each of these chunks, whose rows lie between `low` and `end`; NaN if unknown."""
        firsts = [first for first, *_ in chunks]
        out = [{c: np.full(rows, np.nan) for c in columns} for _, rows, *_ in chunks]
        sql = "SELECT first_row, rows, columns, data FROM energy WHERE first_row < ? AND first_row + rows > ?"
        for start, count, heads, data in self._db.rows(sql, end, low):
            self._unpacked += row_count(count)
            # Joules are stored in chunks like rows, so each is unpacked once or twice.
            self._db.budget.check_rows(self._unpacked // 8, RUN_BYTES_PER_ROW)
            unpacked = unpack(heads, data, count, columns)
            for i in range(max(bisect_right(firsts, start) - 1, 0), bisect_left(firsts, start + count)):
                first, rows = chunks[i][:2]
                begin, stop = max(start, first), min(start + count, first + rows)
                if begin < stop:
                    for name, values in unpacked.items():
                        out[i][name][begin - first : stop - first] = values[begin - start : stop - start]
        return out

    @property
    def row_meta(self) -> dict[str, Any]:
        return {**merge_meta([p["meta"] for p in self.timelines]), **self.meta}

    @property
    def has_energy(self) -> bool:
        return bool(self._db.rows("SELECT 1 FROM energy LIMIT 1"))

    def timeline(self) -> Timeline:
        """Return all rows as one `Timeline`, in the order in which they were added."""
        wanted = (*INTEGERS, *FLOATS, *(ENERGY if self.has_energy else ()))
        self._lost = []
        chunks = list(self.chunks(wanted))
        columns = {c: join_columns([k[c] for k in chunks]) if chunks else _empty(c) for c in wanted}
        self._db.budget.check_devices(columns["device"])
        firsts = np.array([c.first_row for c in chunks], np.int64)
        counts = np.array([len(c) for c in chunks], np.int64)
        starts = np.cumsum(counts) - counts
        if not np.array_equal(firsts, starts):  # a killed writer left holes in the numbers
            columns["parent"] = renumber_rows(columns["parent"], firsts, counts, starts)
        joules = [columns.pop(c, None) for c in ENERGY]
        parts, names, launches = self.timelines, self.names, self.launches
        lost = [*self._lost, *let_go(columns, "parent", len(columns["kind"]))]
        timeline = Timeline(
            columns=columns,
            names=names,
            launches=launches,
            rank=self.get("rank", next((p["rank"] for p in parts if p["rank"] is not None), None)),
            meta=self.row_meta,
            notes=self.notes + lost,
            energy_j=joules[0],
            error_j=joules[1],
            extra={
                int(at) + row: fields for at, c in zip(starts, chunks, strict=True) for row, fields in c.extra.items()
            },
        )
        self._merge_counters(timeline)
        return timeline

    def _merge_counters(self, timeline: Timeline) -> None:
        """Add the hardware counters of a replay, if there was one."""
        replayed = self.get("counters")
        if replayed:
            from .counters import KernelCounters, merge

            counters = merge(timeline, self._convert(replayed, list[KernelCounters]))
            timeline.extra = counters.extra
            timeline.notes += counters.notes()

    # Power ------------------------------------------------------------------------------------------------------

    @property
    def domains(self) -> dict[str, Domain]:
        rows = self._db.rows(f"SELECT {as_text('name')}, value FROM domains WHERE value != '' ORDER BY id")
        with self._reading("a domain is"):
            return {name: check_domain(self._decode(text, Domain)) for name, text in rows}

    def samples(self, domain: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return epoch nanoseconds and watts of one domain, in order; empty if there are none."""
        return self._pairs("samples", "watts", domain)

    def anchors(self, domain: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return epoch nanoseconds and joules of the ticks of a domain's energy counter."""
        return self._pairs("anchors", "joules", domain)

    def _pairs(self, table: str, column: str, domain: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        number = "(SELECT id FROM domains WHERE name = ?)"
        rows = self._db.rows(f"SELECT epoch_ns, {column} FROM {table} WHERE domain = {number} ORDER BY rowid", domain)
        with self._reading(f"the {table} of {domain} are"):
            times = np.frombuffer(b"".join(t for t, _ in rows), "<i8").astype(np.int64)
            values = np.frombuffer(b"".join(v for _, v in rows), "<f8").astype(np.float64)
            check_pairs(times, values, rows)
        if len(times) > 1 and not (np.diff(times) > 0).all():
            # The same time twice means that a sample was handed over twice.
            times, first = np.unique(times, return_index=True)
            values = values[first]
        return times, values

    def power(self) -> PowerTrace:
        """Return the power samples as a trace in epoch time.

        It covers the facts `start_ns` to `end_ns` if they were set, else all rows and samples.
        """
        columns = {name: self._column(domain) for name, domain in self.domains.items()}
        columns = {name: c for name, c in columns.items() if len(c.times_ns)}
        start_ns, end_ns = self.span_ns
        rows = self._db.rows("SELECT start_ns, end_ns, domain, reason FROM gaps")
        with self._reading("a Gap is"):
            gaps = [
                msgspec.convert({"domain": domain, "start_ns": start, "end_ns": end, "reason": reason}, Gap)
                for start, end, domain, reason in sorted(rows, key=_FIRST)
            ]
        asked_ms = self.get("asked_ms")
        return PowerTrace(columns, start_ns=start_ns, end_ns=end_ns, gaps=gaps, asked_ms=asked_ms)

    def _column(self, domain: Domain) -> DomainSamples:
        samples = DomainSamples.of(domain, *self.samples(domain.name))
        ticks_ns, ticks_j = self.anchors(domain.name)
        return dataclasses.replace(samples, ticks_ns=ticks_ns, ticks_j=ticks_j)

    @cached_property
    def span_ns(self) -> tuple[int, int]:
        """Start and end of the run, as its session stored them, else of its rows and samples; (0, 0) if empty."""
        start, end = self.get("start_ns"), self.get("end_ns")
        lows, highs = [], []
        if start is None or end is None:
            for times, _ in (self.samples(d) for d in self.domains):
                lows += times[:1].tolist()
                highs += times[-1:].tolist()
            for chunk in (c for c in self.chunks(("start_ns", "end_ns")) if len(c)):
                lows.append(int(chunk["start_ns"].min()))
                highs.append(int(chunk["end_ns"].max()))
        with self._reading("its start or end is"):
            start = min(lows, default=0) if start is None else start
            # A sample may be older than the run: a sensor's last value.
            end = max([start, *highs]) if end is None else end
            check_time(start, end)
        return int(start), int(end)

    def telemetry(self, domain: str | None = None) -> list[Telemetry]:
        """Return clocks, temperatures and the like, of one domain or all, in time order; `time_ns` is epoch."""
        where, args = ("WHERE domain = ?", (domain,)) if domain is not None else ("", ())
        rows = self._db.rows(f"SELECT epoch_ns, domain, value FROM telemetry {where}", *args)
        # One decode per row, directly into the dataclass: time and domain are put in front of the JSON text.
        with self._reading("its telemetry is"):
            return [
                self._decode(f'{{"time_ns":{t},"domain":{msgspec.json.encode(d).decode()}{"," if v != "{}" else ""}'
                             f'{v[1:]}', Telemetry)
                for t, d, v in sorted(rows, key=_FIRST)
            ]  # fmt: skip

    def events(self) -> list[PowerEvent]:
        """Return what power supplies, PDUs and BMCs reported, in time order; times are epoch."""
        events: list[PowerEvent] = self._convert(self.get("events") or [], list[PowerEvent])
        return sorted(events, key=lambda e: e.time_ns)

    def stacks(self) -> list[Stack]:
        rows = self._db.rows("SELECT epoch_ns, thread, stack, count FROM stacks")
        with self._reading("a stack is"):
            rows.sort(key=_FIRST)
            names = dict(enumerate(self.names))
            return [msgspec.convert((t, thread, names[stack], count), Stack) for t, thread, stack, count in rows]

    # SQLite -----------------------------------------------------------------------------------------------------

    def _count(self, table: str) -> int:
        """Return the present number of names or launches; a writer adds them before the rows that refer to them."""
        return int(self._db.rows(f"SELECT coalesce(max(id) + 1, 0) FROM {table}")[0][0])

    def _decode(self, text: str, kind: Any) -> Any:
        try:  # this runs for each row of telemetry: a context manager would cost more than the decoding
            return msgspec.json.decode(text, type=kind)
        except DAMAGE as exc:
            raise bad_file(self.path, f"a {kind.__name__} is damaged: {exc}", DAMAGED_FIX) from exc

    def _convert(self, value: Any, kind: Any) -> Any:
        with self._reading(f"a {kind.__name__} is"):
            return msgspec.convert(value, kind)

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Turn every error that damage causes into one `RecordingError`."""
        try:
            yield
        except DAMAGE as exc:
            raise bad_file(self.path, f"{what} damaged: {exc}", DAMAGED_FIX) from exc


def _empty(column: str) -> NDArray[Any]:
    return np.zeros(0, np.int64 if column in INTEGERS else np.float64)
