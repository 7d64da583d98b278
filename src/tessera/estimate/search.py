"""Predict one model on many chips, in many precisions and batches, and choose the best: `sweep` and `batch_for`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec

from ..config import EnergyCost, find_cost
from ..device import PRECISIONS, Device
from ..errors import ArgumentError, CaptureError, PredictionError, TesseraError, did_you_mean, needs_extra
from ..graph.ir import WEIGHT_ONLY, WHAT_IFS, Graph, Launch
from ..hardware import catalogue, lookup
from ..schema import SCHEMA_VERSION, EnergyReport
from ..units import format_bytes, format_duration
from .ops import QUANTISED, precision_name
from .power import PowerModel
from .predict import State, check_launch, check_state, default_launch, import_capture, predict
from .prediction_errors import PredictedCost

Mode = Literal["infer", "train"]
Progress = Callable[[int, int, str], None]
"""Called before each combination with the number done, the number in all, and the next one."""

# Quantised formats keep bf16 between their products: one capture serves all.
_CAPTURED_AS = {name: stored for name, stored in WHAT_IFS.items() if name in (*QUANTISED, *WEIGHT_ONLY)}
# `batch_for` stops doubling here by default: a small model may gain beyond it, but captures take ever longer.
LARGEST_BATCH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One combination: its predicted time and energy, or the `reason` why it is not possible (and None for the rest).

    `time_s` and `energy_j` are those of one iteration, `error_s` and `error_j` their 90% half-widths; `batch` is the
    number of samples in it. `cost` has the errors that rows share, for `difference_error`.
    """

    on: str
    precision: str | None
    batch: int | None
    time_s: float | None = None
    error_s: float | None = None
    energy_j: float | None = None
    error_j: float | None = None
    compute_energy_j: float | None = None
    memory_energy_j: float | None = None
    static_energy_j: float | None = None
    average_power_w: float | None = None
    peak_memory_bytes: int | None = None
    memory_capacity_bytes: int | None = None
    bound: str | None = None
    accuracy: float | None = None
    reason: str | None = None
    cost: PredictedCost | None = field(default=None, repr=False, compare=False)

    @property
    def feasible(self) -> bool:
        """Whether the combination is possible."""
        return self.reason is None

    @property
    def samples(self) -> int:
        """Samples of one iteration; a program without a batch counts as one."""
        return self.batch or 1

    @property
    def energy_per_sample_j(self) -> float | None:
        """Joules of one sample."""
        return None if self.energy_j is None else self.energy_j / self.samples

    @property
    def error_per_sample_j(self) -> float | None:
        """90% half-width of the joules of one sample."""
        return None if self.error_j is None else self.error_j / self.samples

    @property
    def throughput_per_s(self) -> float | None:
        """Samples per second."""
        return self.samples / self.time_s if self.time_s else None

    def difference_error(self, other: SweepRow) -> tuple[float, float]:
        """90% half-widths of the difference in seconds and in joules per sample, as `tessera diff` gives them."""
        if self.cost is None or other.cost is None:
            return (
                math.hypot(self.error_s or 0.0, other.error_s or 0.0),
                math.hypot(self.error_per_sample_j or 0.0, other.error_per_sample_j or 0.0),
            )
        one, two = self.cost.scale(1.0 / self.samples), other.cost.scale(1.0 / other.samples)
        return self.cost.difference_error(other.cost)[0], one.difference_error(two)[1]

    @property
    def million_cost(self) -> EnergyCost | None:
        """What a million samples cost by the user's factors: one costs too little to read."""
        return None if self.energy_j is None else find_cost(1e6 * self.energy_j / self.samples)

    def to_dict(self) -> dict[str, Any]:
        """Every field and derived figure by name."""
        names = ("energy_per_sample_j", "error_per_sample_j", "throughput_per_s")
        cost = None if self.million_cost is None else dataclasses.asdict(self.million_cost)
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "cost"}
        return {**own, **{name: getattr(self, name) for name in names}, "million_cost": cost}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Every combination, in the order chip, precision, batch."""

    name: str
    mode: str
    launch: str
    rows: Sequence[SweepRow]
    schema_version: int = field(default=SCHEMA_VERSION)

    def __repr__(self) -> str:
        return f"<Sweep of {self.name}: {len(self.feasible)} of {len(self.rows)} combinations are possible>"

    def __str__(self) -> str:
        from ..report.sweep import text

        return text(self)

    @property
    def feasible(self) -> list[SweepRow]:
        """The rows that are possible."""
        return [row for row in self.rows if row.feasible]

    def pareto(self) -> list[SweepRow]:
        """The rows that no other row beats in joules per sample, latency and (where both have it) accuracy at once."""
        rows = self.feasible
        front = [row for row in rows if not any(_dominates(other, row) for other in rows)]
        return sorted(front, key=lambda row: (_round_6(_time(row)), _joules(row)))

    def fastest(self) -> SweepRow | None:
        """The row with the least latency; among equals (bound by the same host) the one with the fewest joules."""
        return min(self.feasible, key=lambda row: (_round_6(_time(row)), _joules(row)), default=None)

    def most_throughput(self) -> SweepRow | None:
        """The row with the most samples per second; among equals the one with the fewest joules."""
        return min(self.feasible, key=_slowness, default=None)

    def best_batch(
        self, *, latency_s: float | None = None, on: str | None = None, precision: str | None = None
    ) -> SweepRow | None:
        """The row with the fewest joules per sample within a latency bound; None where no row is within it.

        `on` and `precision` narrow the choice; the row's `throughput_per_s` shows the price of the bound.
        """
        rows = [r for r in self._rows_on(on) if precision in (None, r.precision)]
        return min((r for r in rows if latency_s is None or _time(r) <= latency_s), key=_joules, default=None)

    def best_precision(self, *, energy_per_sample_j: float, on: str | None = None) -> SweepRow | None:
        """The most accurate row with at most so many joules per sample; None where there is none.

        Accuracy decides where it was given, otherwise the width of the number format; then the fewest joules.
        """
        rows = [row for row in self._rows_on(on) if _joules(row) <= energy_per_sample_j]
        return min(rows, key=lambda row: (*_loss(row), _joules(row)), default=None)

    def best_device(self, *, energy_per_sample_j: float) -> SweepRow | None:
        """The row with the most samples per second and at most so many joules per sample; None where there is none."""
        return min((r for r in self.feasible if _joules(r) <= energy_per_sample_j), key=_slowness, default=None)

    def _rows_on(self, on: str | None) -> list[SweepRow]:
        return self.feasible if on is None else [row for row in self.feasible if row.on == lookup(on).id]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the rows with their derived figures, each marked if it is on the Pareto frontier."""
        head = {"name": self.name, "mode": self.mode, "launch": self.launch, "schema_version": self.schema_version}
        front = set(map(id, self.pareto()))
        return {**head, "rows": [{**row.to_dict(), "pareto": id(row) in front} for row in self.rows]}

    def to_json(self) -> str:
        """`to_dict()` as JSON."""
        return msgspec.json.encode(self.to_dict()).decode()

    def to_frame(self) -> Any:
        """The rows as a pandas DataFrame."""
        with needs_extra("pandas", "frame", "Sweep.to_frame"):
            import pandas
        return pandas.DataFrame(self.to_dict()["rows"])


def _joules(row: SweepRow) -> float:
    assert row.energy_per_sample_j is not None  # feasible rows have it
    return row.energy_per_sample_j


def _time(row: SweepRow) -> float:
    assert row.time_s is not None
    return row.time_s


def _slowness(row: SweepRow) -> tuple[float, float]:
    """A sort key, smallest first: samples per second, then joules."""
    return -_round_6(row.throughput_per_s or 0.0), _joules(row)


def _loss(row: SweepRow) -> tuple[float, int]:
    """A sort key, smallest first: accuracy where it is known, then the width of the format (None: the widest)."""
    width = PRECISIONS.index(row.precision) if row.precision in PRECISIONS else -1
    return (-row.accuracy if row.accuracy is not None else 0.0, width)


def _dominates(a: SweepRow, b: SweepRow) -> bool:
    pairs = [(_round_6(_joules(a)), _round_6(_joules(b))), (_round_6(_time(a)), _round_6(_time(b)))]
    if a.accuracy is not None and b.accuracy is not None:
        pairs.append((-a.accuracy, -b.accuracy))
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)


def _round_6(value: float) -> float:
    """To six digits: two iterations that wait for the same host are equally long, apart from rounding."""
    return float(f"{value:.6g}")


# -- searching ------------------------------------------------------------------------------------------------------


def sweep(
    model: Callable[..., Any],
    inputs: Any = (),
    *,
    on: Sequence[str | Device] | str | Device,
    precisions: Sequence[str | None] = (None,),
    batches: Sequence[int | None] = (None,),
    mode: Mode = "infer",
    launch: Launch | None = None,
    optimizer: Any = "sgd",
    state: State = "sustained",
    accuracy: Mapping[str | None, float] | None = None,
    progress: Progress | None = None,
    name: str | None = None,
) -> Sweep:
    """Predict every combination of chips, precisions and batches; the model is captured once per precision and batch.

    `on` may be "all": every chip of the catalogue but CPUs. A combination that is not possible (no units for the
    precision, too large for the memory, a model that does not run in it) is a row with its reason. `accuracy` gives the
    model's accuracy by precision, as you measured it; the Pareto frontier and `best_precision` then consider it. A
    wrong name is an error before anything is captured.
    """
    launch = launch or default_launch(model)
    check_launch(launch)
    names = [on] if isinstance(on, (str, Device)) else on
    names = [chip for name in names for chip in (list_chips() if name == "all" else [name])]
    chips = {d.id: d for d in (lookup(d) if isinstance(d, str) else d for d in names)}
    check_state(state, *chips.values())
    points = _combinations(chips, precisions, batches, accuracy)
    by_point: dict[tuple[str, str | None, int | None], SweepRow] = {}
    failures: list[CaptureError] = []
    titles: list[str] = []
    graphs: dict[tuple[str | None, int | None], Graph | CaptureError] = {}
    capture = partial(import_capture(), model, inputs, mode=mode, optimizer=optimizer, launch=launch, name=name)
    for done, (batch, precision, chip) in enumerate(points):
        if progress:
            progress(done, len(points), _label(chip.id, precision, batch))
        key = (_CAPTURED_AS.get(precision or "", precision), batch)
        if key not in graphs:
            graphs = {k: g for k, g in graphs.items() if k[1] == batch}  # those of the last batch are not needed again
            try:
                graphs[key] = capture(precision=key[0], batch=batch)
            except CaptureError as exc:
                graphs[key] = exc
        graph = graphs[key]
        row = SweepRow(on=chip.id, precision=precision, batch=batch, accuracy=(accuracy or {}).get(precision))
        if isinstance(graph, CaptureError):
            failures.append(graph)
            row = dataclasses.replace(row, reason=graph.what)
        else:
            titles.append(graph.name)
            row = _predict_row(row, graph, chip, launch, state)
        by_point[chip.id, precision, batch] = row
    if len(failures) == len(points):
        raise failures[0]  # nothing ran at all: the reason is the model, not the combination
    if progress:
        progress(len(points), len(points), "")
    rows = [by_point[chip, p, b] for chip in chips for p in dict.fromkeys(precisions) for b in dict.fromkeys(batches)]
    return Sweep(name=name or titles[0], mode=mode, launch=launch, rows=tuple(rows))


def list_chips() -> list[str]:
    """Every chip of the catalogue that can be predicted, CPUs aside: what "all" stands for."""
    return [
        device.id
        for device in catalogue().values()
        if device.kind != "cpu"
        and device.memory.bandwidth_bytes_per_s
        and device.tdp_w
        and (device.vector or device.matrix)
    ]


def list_limits(device: Device, count: int = 9) -> list[str]:
    """Names of a chip at power limits from 40% of its own up to all of it, in steps of whole 10 W.

    Of a system on a chip, which takes modes instead of limits: at each of its modes.
    """
    if device.kind == "soc":
        return [f"{device.id}@{point.name}" for point in device.operating_points] or [device.id]
    if device.tdp_w is None:
        raise ArgumentError(
            f"the power limit of {device.id} is not known", fix="give tdp_w in a device file of your own"
        )
    whole = device.tdp_w.value
    least = max(0.4 * whole, 1.3 * PowerModel.from_device(device).static_w)
    watts = {round((least + i * (whole - least) / (count - 1)) / 10) * 10 for i in range(count)}
    return [f"{device.id}@{w}W" for w in sorted(w for w in watts if device.least_limit_w < w < whole)] + [device.id]


def power_curve(
    model: Callable[..., Any],
    inputs: Any = (),
    *,
    on: str | Device = "h200",
    limits_w: Sequence[float] | None = None,
    precision: str | None = None,
    batch: int | None = None,
    **options: Any,
) -> Sweep:
    """Seconds and joules of a program over power limits of one chip: which limit is best for it.

    The rows' `on` is the chip at a limit ("h200@400W") or a mode ("jetson-orin@30W"), the last the chip as it is.
    `best_batch()` gives the limit of least energy, `fastest()` that of least time, `pareto()` all that are worth
    considering.
    """
    device = lookup(on) if isinstance(on, str) else on
    names = list_limits(device) if limits_w is None else [f"{device.id}@{w:g}W" for w in limits_w]
    chips = [device.at(name.partition("@")[2]) if "@" in name else device for name in names]
    return sweep(model, inputs, on=chips, precisions=(precision,), batches=(batch,), **options)


def batch_for(
    model: Callable[..., Any],
    inputs: Any = (),
    *,
    on: str | Device = "h200",
    latency_s: float,
    precision: str | None = None,
    mode: Mode = "infer",
    launch: Launch | None = None,
    largest: int = LARGEST_BATCH,
) -> SweepRow:
    """The batch with the fewest joules per sample whose iteration takes at most `latency_s`, found by doubling."""
    best: SweepRow | None = None
    batch = 1
    while batch <= largest:
        row = sweep(model, inputs, on=on, precisions=(precision,), batches=(batch,), mode=mode, launch=launch).rows[0]
        if batch == 1 and not row.feasible:
            raise PredictionError(f"one sample cannot run on {row.on}", why=row.reason)
        if not row.feasible or _time(row) > latency_s:
            break
        best = row if best is None or _joules(row) < _joules(best) else best
        batch *= 2
    if best is None:
        raise PredictionError(
            f"one sample takes {format_duration(_time(row))} on {row.on}, longer than {format_duration(latency_s)}",
            fix="use a larger latency_s, a faster chip, a narrower precision, or launch='graph'",
        )
    return best


def _combinations(
    chips: Mapping[str, Device],
    precisions: Sequence[str | None],
    batches: Sequence[int | None],
    accuracy: Mapping[str | None, float] | None,
) -> list[tuple[int | None, str | None, Device]]:
    """The combinations, in the order that keeps the fewest captures alive."""
    for what, values in (("on", chips), ("precisions", precisions), ("batches", batches)):
        if isinstance(values, str) or not values:
            raise ArgumentError(f"{what}={values!r}", fix=f"give {what} a list with at least one entry")
    for p in precisions:
        if p is not None:
            precision_name(p)
    for p in accuracy or ():
        if p not in precisions:
            names = [q for q in precisions if q is not None]
            raise ArgumentError(
                f"an accuracy for {p!r}, which is not among the precisions{did_you_mean(str(p), names)}",
                fix=f"the precisions are {', '.join(map(str, precisions))}",
            )
    chosen = dict.fromkeys(precisions)
    return [(b, p, chip) for b in dict.fromkeys(batches) for p in chosen for chip in chips.values()]


def _predict_row(row: SweepRow, graph: Graph, chip: Device, launch: Any, state: State) -> SweepRow:
    row = dataclasses.replace(row, batch=graph.samples if row.batch is None else row.batch)
    try:
        report = predict(
            graph, on=chip, precision=row.precision, launch=launch, state=state, check_memory=False, name=graph.name
        )
    except TesseraError as e:
        return dataclasses.replace(row, reason=e.what)
    return _fill_from_report(row, report)


def _fill_from_report(row: SweepRow, report: EnergyReport) -> SweepRow:
    of = report.prediction
    assert of is not None  # a predicted report has one
    needs, has = of.peak_memory_bytes, of.memory_capacity_bytes
    row = dataclasses.replace(row, peak_memory_bytes=needs, memory_capacity_bytes=has)
    if needs is not None and has is not None and needs > has:
        return dataclasses.replace(row, reason=f"does not fit: needs {format_bytes(needs)}, has {format_bytes(has)}")
    return dataclasses.replace(
        row,
        time_s=report.total_latency_s,
        error_s=of.error_s,
        energy_j=report.total_energy_j,
        error_j=report.total.error_j,
        compute_energy_j=report.compute_energy_j,
        memory_energy_j=report.memory_energy_j,
        static_energy_j=report.static_energy_j,
        average_power_w=report.average_power_w,
        bound=of.bound,
        cost=PredictedCost.of(report),
    )


def _label(on: str, precision: str | None, batch: int | None) -> str:
    return " ".join(part for part in (on, precision or "", f"batch {batch}" if batch else "") if part)
