"""`PowerTrace`: watts over time for named domains, with source, true resolution and gaps."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .clock import EpochNs
from .errors import MeasurementError, RecordingError, did_you_mean, needs_extra
from .joules import BASES, DomainSamples, Floats, Ints, sum_domains, worst_basis
from .output import replace_when_written
from .read_limits import open_file
from .schema import Basis, Domain, Energy, Gap, Hold, PowerEvent, Telemetry

CSV_COLUMNS = ("epoch_us", "domain", "watts")
"""Columns that every power log has; our logs also have `basis`: whether the power was measured or modelled."""

MOST_DOMAINS = 4096
"""Most domains of one power log; a rack has some hundreds."""
MOST_NS, MOST_W = 1 << 62, 1e12
"""Larger values are damage: differences of such times would not fit into 64 bits, and no power grid has such watts."""


class PowerTrace:
    """Watts over time. The samples are what the sensor really measured: a repeated reading is not a sample.

    Totals and statistics are over all counted domains together (`domain=` selects one). Times are epoch nanoseconds, as
    the sensor gave them; integrals correct them for its lag.
    """

    def __init__(
        self,
        columns: Mapping[str, DomainSamples],
        *,
        start_ns: int,
        end_ns: int,
        gaps: Sequence[Gap] = (),
        asked_ms: float | None = None,
    ) -> None:
        self._columns = dict(columns)
        self._start_ns = start_ns
        self._end_ns = end_ns
        self._gaps = tuple(gaps)
        self.asked_ms = asked_ms

    # A live trace overrides the following properties; everything else is computed from these.
    @property
    def columns(self) -> Mapping[str, DomainSamples]:
        """The samples by domain."""
        return self._columns

    @property
    def start_ns(self) -> EpochNs:
        """Start of the trace."""
        return EpochNs(self._start_ns)

    @property
    def end_ns(self) -> EpochNs:
        """End of the trace."""
        return EpochNs(self._end_ns)

    @property
    def gaps(self) -> Sequence[Gap]:
        """Times without data, each with its reason."""
        return self._gaps

    @property
    def events(self) -> Sequence[PowerEvent]:
        """Over-current and similar events during the trace; only a live trace has them."""
        return ()

    def telemetry(self, domain: str) -> list[Telemetry]:
        """Return clocks, temperature and throttling recorded beside a domain's samples; only a live trace has them."""
        return []

    @property
    def seconds(self) -> float:
        """Length of the trace."""
        return (self.end_ns - self.start_ns) * 1e-9

    @property
    def domains(self) -> list[Domain]:
        """The domains that have samples."""
        return [c.domain for c in self.columns.values()]

    @property
    def true_resolution_ms(self) -> float | None:
        """Median spacing of the real samples of the slowest counted domain; None without samples.

        It is never finer than the period at which the sensor has a new value.
        """
        spacings = [_spacing_ms(c) for c in self._select_counted(None)]
        known = [s for s in spacings if s is not None]
        return max(known) if known else None

    @property
    def basis(self) -> Basis:
        """Either "measured", or "modelled"/"simulated" as soon as one counted domain is."""
        return worst_basis(c.domain.basis for c in self._select_counted(None))

    @property
    def is_counted(self) -> bool:
        """Whether any domain adds to the total."""
        return any(c.domain.counted for c in self.columns.values())

    @property
    def by_rank(self) -> dict[int, DomainSamples]:
        """The power of each rank's own processes in a merged run, if known: the first such domain of each rank."""
        found: dict[int, DomainSamples] = {}
        for column in self.columns.values():
            if column.domain.rank is not None:
                found.setdefault(column.domain.rank, column)
        return found

    def _select_counted(self, domain: str | None) -> list[DomainSamples]:
        columns = self.columns
        if domain is None:
            return [c for c in columns.values() if c.domain.counted]
        if domain not in columns:
            raise MeasurementError(
                f"this trace has no domain {domain!r}{did_you_mean(domain, columns)}",
                fix=f"one of: {', '.join(columns) or 'none was recorded'}",
            )
        return [columns[domain]]

    def total(self, domain: str | None = None) -> tuple[Ints, Floats]:
        """Return times and watts of the counted domains added up, at all their samples, moved back by their lags."""
        moved = self._align_lag(domain)
        if not moved:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        if len(moved) == 1:
            times, column = moved[0]
            known = ~np.isnan(column.watts)
            return times[known], column.watts[known]
        grid = _shared_grid(moved)
        return grid, np.sum([_resample(t, c, grid) for t, c in moved], axis=0)

    def _align_lag(self, domain: str | None) -> list[tuple[Ints, DomainSamples]]:
        """Return the columns with any known sample, with their times moved back by the lag."""
        known = [self._at_resolution(c) for c in self._select_counted(domain) if not np.all(np.isnan(c.watts))]
        return [(c.times_ns - c.lag_ns, c) for c in known]

    def _at_resolution(self, column: DomainSamples) -> DomainSamples:
        """Return samples no finer than the sensor, without those before the trace, which would dilute its first one."""
        if column.at_resolution is column:
            return column
        return DomainSamples.of(column.domain, *_clip(column, self.start_ns, self.end_ns)).at_resolution

    def _pieces(self, domain: str | None) -> tuple[Floats, Floats, Floats]:
        """Return seconds, and watts at both ends, of the intervals in which every domain is known."""
        moved = self._align_lag(domain)
        if not moved:
            return np.zeros(0), np.zeros(0), np.zeros(0)
        grid = _shared_grid(moved)
        ends = [_between(t, c, grid) for t, c in moved]
        begin, end = np.sum([e[0] for e in ends], axis=0), np.sum([e[1] for e in ends], axis=0)
        known = ~np.isnan(end)
        return (np.diff(grid) * 1e-9)[known], begin[known], end[known]

    @property
    def peak_w(self) -> float | None:
        """Highest power seen by the sensor (a true peak shorter than the resolution is higher)."""
        return self._peak_w(None)

    def _peak_w(self, domain: str | None) -> float | None:
        moved = self._align_lag(domain)
        if len(moved) == 1:
            times_ns, column = moved[0]
            # A mean belongs to the time before it, so one at the very start of the trace is not part of the trace.
            inside = times_ns > self.start_ns if column.domain.hold is Hold.MEAN else np.ones(len(times_ns), bool)
            peaks = column.peaks_w[inside & ~np.isnan(column.peaks_w)]
            return float(peaks.max()) if len(peaks) else None
        watts = self.total(domain)[1]
        return float(watts.max()) if len(watts) else None

    @property
    def mean_w(self) -> float | None:
        """Mean power over the time that was seen, for each domain by itself, added up."""
        parts = [c.energy(self.start_ns, self.end_ns) for c in self._select_counted(None)]
        known = [e.energy_j / (e.time_s * e.coverage) for e in parts if e.time_s * e.coverage > 0]
        return sum(known) if known else None

    @property
    def energy_j(self) -> float:
        """Joules of the counted domains over the whole trace."""
        return self.energy().energy_j

    @property
    def error_j(self) -> float:
        """90% half-width of `energy_j`."""
        return self.energy().error_j

    def energy(self, domain: str | None = None, start_ns: int | None = None, end_ns: int | None = None) -> Energy:
        """Return the joules between two times (by default of the whole trace), lag-corrected and exact at the edges."""
        begin = self.start_ns if start_ns is None else start_ns
        end = self.end_ns if end_ns is None else end_ns
        return sum_domains([c.energy(begin, end) for c in self._select_counted(domain)], (end - begin) * 1e-9)

    def percentile(self, q: float, domain: str | None = None) -> float | None:
        """Return the power not exceeded q% of the time; weighted by time, since samples are not evenly spaced."""
        seconds, begin, end = self._pieces(domain)
        if len(seconds) == 0:
            watts = self.total(domain)[1]
            return float(np.percentile(watts, q)) if len(watts) else None
        watts, weights = np.concatenate([begin, end]), np.concatenate([seconds, seconds])
        order = np.argsort(watts)
        share = np.cumsum(weights[order])
        share = (share - 0.5 * weights[order]) / share[-1]
        return float(np.interp(q / 100.0, share, watts[order]))

    def crest_factor(self, domain: str | None = None) -> float | None:
        """Return I_peak / I_rms; current is proportional to power, because the board's supply voltage is regulated."""
        seconds, begin, end = self._pieces(domain)
        peak_w = self._peak_w(domain)
        if len(seconds) == 0 or peak_w is None:
            return None
        # The exact mean of the square of a straight line between two samples.
        square = (end**2 + end * begin + begin**2) / 3.0
        rms = float(np.sqrt(np.sum(square * seconds) / np.sum(seconds)))
        return peak_w / rms if rms > 0 else None

    def to_csv(self, path: str | Path) -> Path:
        """Write epoch_us, domain, watts (for `tessera attribute --power` and the replay sensor), basis, part_of.

        Only the trace itself is written, with a sample at each of its ends, so that the integral is `energy`. Times are
        the sensor's own, including its lag. `part_of` names the domain that already includes this one.
        """
        target = Path(path)
        with replace_when_written(target) as part, part.open("w", newline="") as f:
            out = csv.writer(f)
            out.writerow((*CSV_COLUMNS, "basis", "part_of"))
            for name, column in self.columns.items():
                part_of = "" if column.domain.counted else name.rpartition(".")[0]
                times_ns, watts = _clip(column, self.start_ns, self.end_ns)
                for t, w in zip(times_ns.tolist(), watts.tolist(), strict=True):
                    # "nan" ends a gap: the power since the sample before is unknown.
                    out.writerow((t // 1000, name, f"{w:.3f}", column.domain.basis, part_of))
        return target

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with time_ns, epoch_us, domain, watts."""
        with needs_extra("pandas", "frame", "PowerTrace.to_frame"):
            import pandas as pd
        parts = [
            pd.DataFrame(
                {
                    "time_ns": c.times_ns,
                    "epoch_us": c.times_ns // 1000,
                    "domain": name,
                    "watts": c.watts,
                }
            )
            for name, c in self.columns.items()
        ]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["time_ns", *CSV_COLUMNS])

    def __repr__(self) -> str:
        count = sum(len(c.times_ns) for c in self.columns.values())
        return f"<PowerTrace {', '.join(self.columns) or 'empty'}: {count} samples over {self.seconds:.3f} s>"


def read_csv(path: str | Path, *, other_names: str = "") -> dict[str, tuple[Ints, Floats, Basis | None]]:
    """Return epoch nanoseconds, watts and basis by domain, from a CSV as `PowerTrace.to_csv` writes it.

    The basis is None if the log does not say whether a domain was measured or modelled. The error names `other_names`,
    the columns that the caller also reads.
    """
    source = Path(path)
    rows: dict[str, list[tuple[int, float]]] = {}
    said: dict[str, str] = {}
    with open_csv(source) as reader:
        head: list[str] = next(reader, [])
        missing = set(CSV_COLUMNS) - set(head)
        if missing:
            is_json = bool(head) and head[0].lstrip().startswith(("{", "["))
            why = "it is JSON, and a log is CSV" if is_json else f"column {sorted(missing)[0]!r} is missing"
            fix = f"the columns are {', '.join(CSV_COLUMNS)}; a line: 1794705251357281,gpu0,124.6"
            fix += f"; or name them {other_names}" if other_names else ""
            raise RecordingError(f"{source} is not a power log: {why}", fix=fix)
        at, name_at, watts_at = (head.index(column) for column in CSV_COLUMNS)
        basis_at = head.index("basis") if "basis" in head else None
        for row in filter(None, reader):
            try:
                name = row[name_at]
                sample = _csv_sample(row[at], row[watts_at])
            except (IndexError, ValueError) as exc:
                raise RecordingError(
                    f"{source}, line {reader.line_num}: not a sample: {', '.join(row)[:120]}", why=str(exc)[:200],
                    fix="remove the line, or record the log again",
                ) from exc  # fmt: skip
            if name not in rows:
                check_domain_count(len(rows), source)
            rows.setdefault(name, []).append(sample)
            if basis_at is not None and basis_at < len(row):
                said[name] = row[basis_at]
    out = {}
    for name, pairs in rows.items():
        pairs.sort()
        times, watts = zip(*pairs, strict=True)
        basis = next((basis for basis in BASES if basis == said.get(name)), None)
        out[name] = (np.asarray(times, dtype=np.int64), np.asarray(watts, dtype=np.float64), basis)
    return out


@contextlib.contextmanager
def open_csv(source: Path) -> Iterator[Any]:
    """Open a power log as a CSV reader; every error while reading becomes a `RecordingError`."""
    try:
        with io.TextIOWrapper(open_file(source), newline="", encoding="utf-8-sig") as f:
            yield csv.reader(f, skipinitialspace=True)
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        why = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise RecordingError(f"cannot read {source}", why=why, fix="give a CSV power log") from exc


def check_domain_count(count: int, source: Path) -> None:
    """Refuse a power log with more domains than any machine has."""
    if count >= MOST_DOMAINS:
        raise RecordingError(
            f"{source} has more than {MOST_DOMAINS} domains", fix="give a log whose column 'domain' names devices"
        )


def _csv_sample(epoch_us: str, power_w: str) -> tuple[int, float]:
    time_ns, watts = int(epoch_us) * 1000, float(power_w)
    if abs(time_ns) >= MOST_NS or abs(watts) > MOST_W:
        raise ValueError("a time or a power that no sensor can have written")
    return time_ns, watts


def _spacing_ms(column: DomainSamples) -> float | None:
    """Return the median spacing of a column's samples, at least the sensor's period.

    The sensor is read once more when a block ends, so the spacing in a short block is that of the block.
    """
    known = column.times_ns[~np.isnan(column.watts)]
    if len(known) < 2:
        return None
    return max(float(np.median(np.diff(known)) * 1e-6), column.domain.resolution_s * 1e3)


def _shared_grid(moved: Sequence[tuple[Ints, DomainSamples]]) -> Ints:
    """Return all sample times at which every column has begun and none has ended."""
    grid = np.unique(np.concatenate([t for t, _ in moved]))
    shared: Ints = grid[(grid >= max(t[0] for t, _ in moved)) & (grid <= min(t[-1] for t, _ in moved))]
    return shared


def _between(times_ns: Ints, column: DomainSamples, grid: Ints) -> tuple[Floats, Floats]:
    """Return watts at both ends of each step of a grid within the samples; NaN if unknown."""
    i = np.searchsorted(times_ns, grid[1:], side="left")
    w0, w1 = column.watts[i - 1], column.watts[i]
    if column.domain.hold is Hold.MEAN:
        return w1, w1
    w0 = np.where(np.isnan(w0), w1, w0)  # constant after a gap, from its end on, as in `accumulate`
    begin, end = ((t - times_ns[i - 1]) / (times_ns[i] - times_ns[i - 1]) for t in (grid[:-1], grid[1:]))
    return w0 * (1.0 - begin) + w1 * begin, w0 * (1.0 - end) + w1 * end  # this form is exact at the samples


def _clip(column: DomainSamples, start_ns: int, end_ns: int) -> tuple[Ints, Floats]:
    """Return the samples of a window in the sensor's own time, with one at each edge; NaN only for gaps inside."""
    first_ns, last_ns = start_ns + column.lag_ns, end_ns + column.lag_ns
    times_ns = column.times_ns
    inside = (times_ns >= first_ns) & (times_ns <= last_ns)
    edges = [t for t in (first_ns, last_ns) if len(times_ns) and times_ns[0] <= t <= times_ns[-1]]
    grid = np.unique(np.concatenate([times_ns[inside], np.asarray(edges, dtype=np.int64)]))
    begin, end = _between(times_ns, column, grid)
    seen = np.flatnonzero(~np.isnan(end))
    if len(seen) == 0:  # no interval is known, at most single samples
        return times_ns[inside & column.known], column.watts[inside & column.known]
    a, b = seen[0], seen[-1] + 1
    clipped_ns, watts = grid[a : b + 1], np.append(begin[a], end[a:b])
    lone = (times_ns == grid[0]) & column.known & inside
    if a > 0 and column.domain.hold is not Hold.MEAN and lone.any():  # a gap follows the first sample
        return grid[: b + 1], np.append(column.watts[lone][:1], end[:b])
    return clipped_ns, watts


def _resample(times_ns: Ints, column: DomainSamples, grid: Ints) -> Floats:
    known = ~np.isnan(column.watts)
    if column.domain.hold is Hold.MEAN:
        i = np.clip(np.searchsorted(times_ns[known], grid, side="left"), 0, int(known.sum()) - 1)
        return column.watts[known][i]
    return np.interp(grid, times_ns[known], column.watts[known])
