"""Search before anything runs: one model on many chips, in many precisions and batches, and which of them is best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..device import PRECISIONS, Device
from ..errors import ArgumentError, CaptureError, MissingExtra, PredictionError, TesseraError, did_you_mean
from ..graph.ir import WHAT_IFS
from ..hardware import lookup
from ..schema import SCHEMA_VERSION, EnergyReport
from ..units import format_bytes, format_duration

if TYPE_CHECKING:
    from ..graph.ir import Graph
    from .predict import Launch

Mode = Literal["infer", "train"]
Progress = Callable[[int, int, str], None]
"""Called before each point with the number done, the number in all, and what comes now."""

# fp8 and int8 keep bf16 between their products: one capture serves all three.
_CAPTURED_AS = {"fp8": "bf16", "int8": "bf16"}
# `batch_for` stops doubling here unless told otherwise: a small model may gain beyond it, at ever longer captures.
LARGEST_BATCH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One combination: what it would take, or, where it cannot be, the `reason` (and None for what is not known).

    Energy and latency are those of one iteration, with 90% half-widths; `batch` is the number of samples in it.
    """

    device: str
    precision: str | None
    batch: int | None
    latency_s: float | None = None
    latency_error_s: float | None = None
    energy_j: float | None = None
    energy_error_j: float | None = None
    compute_energy_j: float | None = None
    memory_energy_j: float | None = None
    static_energy_j: float | None = None
    average_power_w: float | None = None
    peak_memory_bytes: int | None = None
    memory_capacity_bytes: int | None = None
    bound: str | None = None
    accuracy: float | None = None
    reason: str | None = None

    @property
    def feasible(self) -> bool:
        """Whether the combination can be."""
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
    def energy_per_sample_error_j(self) -> float | None:
        """90% half-width of the joules of one sample."""
        return None if self.energy_error_j is None else self.energy_error_j / self.samples

    @property
    def throughput_per_s(self) -> float | None:
        """Samples a second."""
        return self.samples / self.latency_s if self.latency_s else None

    def as_dict(self) -> dict[str, Any]:
        """Every field and derived figure by name."""
        names = ("energy_per_sample_j", "energy_per_sample_error_j", "throughput_per_s")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Every combination that was asked for, in the order device, precision, batch."""

    name: str
    mode: str
    launch: str
    rows: Sequence[SweepRow]
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def feasible(self) -> list[SweepRow]:
        """The rows that can be."""
        return [row for row in self.rows if row.feasible]

    def pareto(self) -> list[SweepRow]:
        """The rows that no other beats in joules per sample, latency and (where both have one) accuracy at once."""
        rows = self.feasible
        front = [row for row in rows if not any(_dominates(other, row) for other in rows)]
        return sorted(front, key=lambda row: (_rounded(_latency(row)), _joules(row)))

    def fastest(self) -> SweepRow | None:
        """The row of the least latency; of equals (they wait for the same host) the one of the fewest joules."""
        return min(self.feasible, key=lambda row: (_rounded(_latency(row)), _joules(row)), default=None)

    def most_throughput(self) -> SweepRow | None:
        """The row of most samples a second; of equals the one of the fewest joules."""
        return min(self.feasible, key=_slowness, default=None)

    def best_batch(
        self, *, latency_s: float | None = None, device: str | None = None, precision: str | None = None
    ) -> SweepRow | None:
        """The row of the fewest joules per sample within a latency bound; None where no row keeps it.

        `device` and `precision` narrow the choice; the row's `throughput_per_s` says what the bound costs.
        """
        name = lookup(device).id if device else None
        kept = [
            row
            for row in self.feasible
            if (latency_s is None or _latency(row) <= latency_s)
            and name in (None, row.device)
            and precision in (None, row.precision)
        ]
        return min(kept, key=_joules, default=None)

    def best_precision(self, *, energy_j_per_sample: float, device: str | None = None) -> SweepRow | None:
        """The most accurate row that keeps to so many joules per sample; None where none does.

        Accuracy decides where it was given, otherwise the width of the number format; then the fewest joules.
        """
        name = lookup(device).id if device else None
        kept = [row for row in self.feasible if _joules(row) <= energy_j_per_sample and name in (None, row.device)]
        return min(kept, key=lambda row: (*_loss(row), _joules(row)), default=None)

    def best_device(self, *, energy_budget_j: float) -> SweepRow | None:
        """The row of most samples a second among those within a budget of joules per sample; None where none is."""
        kept = [row for row in self.feasible if _joules(row) <= energy_budget_j]
        return min(kept, key=_slowness, default=None)

    def to_json(self) -> str:
        """The sweep as JSON: its rows with their derived figures, each marked if it is on the Pareto frontier."""
        import msgspec

        front = set(map(id, self.pareto()))
        rows = [{**row.as_dict(), "pareto": id(row) in front} for row in self.rows]
        head = {"name": self.name, "mode": self.mode, "launch": self.launch, "schema_version": self.schema_version}
        return msgspec.json.encode({**head, "rows": rows}).decode()

    def to_frame(self) -> Any:
        """The rows as a pandas DataFrame."""
        try:
            import pandas
        except ImportError as e:
            raise MissingExtra("pandas", "frame", "Sweep.to_frame") from e
        front = set(map(id, self.pareto()))
        return pandas.DataFrame([{**row.as_dict(), "pareto": id(row) in front} for row in self.rows])


def _joules(row: SweepRow) -> float:
    assert row.energy_per_sample_j is not None  # rows that can be have it
    return row.energy_per_sample_j


def _latency(row: SweepRow) -> float:
    assert row.latency_s is not None
    return row.latency_s


def _slowness(row: SweepRow) -> tuple[float, float]:
    """The less the better: samples a second, then joules."""
    return -_rounded(row.throughput_per_s or 0.0), _joules(row)


def _loss(row: SweepRow) -> tuple[float, int]:
    """The less the better: accuracy where it is known, then the width of the format (as it is: the widest)."""
    width = PRECISIONS.index(row.precision) if row.precision in PRECISIONS else -1
    return (-row.accuracy if row.accuracy is not None else 0.0, width)


def _dominates(a: SweepRow, b: SweepRow) -> bool:
    pairs = [(_rounded(_joules(a)), _rounded(_joules(b))), (_rounded(_latency(a)), _rounded(_latency(b)))]
    if a.accuracy is not None and b.accuracy is not None:
        pairs.append((-a.accuracy, -b.accuracy))
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)


def _rounded(value: float) -> float:
    """To six digits: two iterations that wait for the same host are equally long, whatever the last bit says."""
    return float(f"{value:.6g}")


# -- searching ------------------------------------------------------------------------------------------------------


def sweep(
    model: Callable[..., Any],
    inputs: Any = (),
    *,
    devices: Sequence[str | Device] | str | Device,
    precisions: Sequence[str | None] = (None,),
    batches: Sequence[int | None] = (None,),
    mode: Mode = "infer",
    launch: Launch = "eager",
    optimizer: Any = "sgd",
    burst: bool = False,
    accuracy: Mapping[str | None, float] | None = None,
    progress: Progress | None = None,
    name: str | None = None,
) -> Sweep:
    """Predict every combination of devices, precisions and batches; the model is captured once per precision and batch.

    A combination that cannot be (no units for the precision, too large for the memory, a model that does not run in
    it) is a row with its reason. `accuracy` gives the model's accuracy by precision, measured by you: the Pareto
    frontier and `best_precision` then weigh it. A wrong name is an error before anything is captured.
    """
    named = [devices] if isinstance(devices, (str, Device)) else devices
    chips = {d.id: d for d in (lookup(d) if isinstance(d, str) else d for d in named)}
    points = _points(chips, precisions, batches, accuracy)
    found: dict[tuple[str, str | None, int | None], SweepRow] = {}
    failures: list[CaptureError] = []
    titles: list[str] = []
    graphs: dict[tuple[str | None, int | None], Graph | CaptureError] = {}
    for done, (batch, precision, chip) in enumerate(points):
        if progress:
            progress(done, len(points), _label(chip.id, precision, batch))
        key = (_CAPTURED_AS.get(precision or "", precision), batch)
        if key not in graphs:
            graphs = {k: g for k, g in graphs.items() if k[1] == batch}  # those of the batch before are done with
            graphs[key] = _capture(model, inputs, key, mode=mode, launch=launch, optimizer=optimizer, name=name)
        graph = graphs[key]
        row = SweepRow(device=chip.id, precision=precision, batch=batch, accuracy=(accuracy or {}).get(precision))
        if isinstance(graph, CaptureError):
            failures.append(graph)
            row = dataclasses.replace(row, reason=graph.what)
        else:
            titles.append(graph.name)
            row = _filled(row, graph, chip, launch, burst)
        found[chip.id, precision, batch] = row
    if len(failures) == len(points):
        raise failures[0]  # nothing ran at all: the reason is the model, not the combination
    if progress:
        progress(len(points), len(points), "")
    rows = [found[chip, p, b] for chip in chips for p in dict.fromkeys(precisions) for b in dict.fromkeys(batches)]
    return Sweep(name=name or titles[0], mode=mode, launch=launch, rows=tuple(rows))


def batch_for(
    model: Callable[..., Any],
    inputs: Any = (),
    *,
    on: str | Device = "h200",
    latency_s: float,
    precision: str | None = None,
    mode: Mode = "infer",
    launch: Launch = "eager",
    largest: int = LARGEST_BATCH,
) -> SweepRow:
    """The batch of the fewest joules per sample whose iteration takes no longer than `latency_s`, found by doubling."""
    best: SweepRow | None = None
    batch = 1
    while batch <= largest:
        tried = sweep(
            model, inputs, devices=(on,), precisions=(precision,), batches=(batch,), mode=mode, launch=launch
        ).rows[0]
        if batch == 1 and not tried.feasible:
            raise PredictionError(f"one sample cannot be run on {tried.device}", why=tried.reason)
        if not tried.feasible or _latency(tried) > latency_s:
            break
        best = tried if best is None or _joules(tried) < _joules(best) else best
        batch *= 2
    if best is None:
        raise PredictionError(
            f"one sample takes {format_duration(_latency(tried))} on {tried.device}, "
            f"longer than {format_duration(latency_s)}",
            fix="a looser latency_s, a faster chip, a narrower precision, or launch='graph'",
        )
    return best


def _points(
    chips: Mapping[str, Device],
    precisions: Sequence[str | None],
    batches: Sequence[int | None],
    accuracy: Mapping[str | None, float] | None,
) -> list[tuple[int | None, str | None, Device]]:
    """The combinations, in the order that keeps the fewest captures alive."""
    for what, given in (("devices", chips), ("precisions", precisions), ("batches", batches)):
        if isinstance(given, str) or not given:
            raise ArgumentError(f"{what}={given!r}", fix=f"a list of at least one of the {what}")
    for p in precisions:
        if p is not None and p not in WHAT_IFS:
            raise ArgumentError(f"no precision {p!r}{did_you_mean(p, WHAT_IFS)}", fix=f"one of {', '.join(WHAT_IFS)}")
    _check_accuracy(accuracy, precisions)
    chosen = dict.fromkeys(precisions)
    return [(b, p, chip) for b in dict.fromkeys(batches) for p in chosen for chip in chips.values()]


def _check_accuracy(accuracy: Mapping[str | None, float] | None, precisions: Iterable[str | None]) -> None:
    known = list(precisions)
    for p in accuracy or ():
        if p not in known:
            names = [q for q in known if q is not None]
            raise ArgumentError(
                f"an accuracy for {p!r}, which is not among the precisions{did_you_mean(str(p), names)}",
                fix=f"precisions here: {', '.join(map(str, known))}",
            )


def _capture(
    model: Any,
    inputs: Any,
    key: tuple[str | None, int | None],
    *,
    mode: Any,
    launch: str,
    optimizer: Any,
    name: str | None,
) -> Graph | CaptureError:
    from .predict import check_launch

    check_launch(launch)
    try:
        from ..graph.capture import capture
    except ImportError as e:
        raise MissingExtra("torch", "torch", "predicting a model") from e
    precision, batch = key
    try:
        return capture(
            model, inputs, mode=mode, precision=precision, optimizer=optimizer, batch=batch, replay=launch == "graph",
            name=name,
        )  # fmt: skip
    except CaptureError as e:
        return e


def _filled(row: SweepRow, graph: Graph, chip: Device, launch: Any, burst: bool) -> SweepRow:
    from .predict import predict

    row = dataclasses.replace(row, batch=graph.samples if row.batch is None else row.batch)
    try:
        report = predict(
            graph, on=chip, precision=row.precision, launch=launch, burst=burst, check_memory=False, name=graph.name
        )
    except TesseraError as e:
        return dataclasses.replace(row, reason=e.what)
    return _from_report(row, report)


def _from_report(row: SweepRow, report: EnergyReport) -> SweepRow:
    of = report.prediction
    assert of is not None  # `predict` gives one
    needs, has = of.peak_memory_bytes, of.memory_capacity_bytes
    row = dataclasses.replace(row, peak_memory_bytes=needs, memory_capacity_bytes=has)
    if needs is not None and has is not None and needs > has:
        return dataclasses.replace(row, reason=f"does not fit: needs {format_bytes(needs)}, has {format_bytes(has)}")
    return dataclasses.replace(
        row,
        latency_s=report.total_latency_s,
        latency_error_s=of.latency_error_s,
        energy_j=report.total_energy_j,
        energy_error_j=report.total.error_j,
        compute_energy_j=report.compute_energy_j,
        memory_energy_j=report.memory_energy_j,
        static_energy_j=report.static_energy_j,
        average_power_w=report.average_power_w,
        bound=of.bound,
    )


def _label(device: str, precision: str | None, batch: int | None) -> str:
    return " ".join(part for part in (device, precision or "", f"batch {batch}" if batch else "") if part)
