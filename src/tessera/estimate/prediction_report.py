"""From a solved iteration to the `EnergyReport`: components, subgraphs, errors, the bottleneck, and provenance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..device import Device
from ..graph.ir import Graph, Op
from ..graph.op_kinds import MATRIX_KINDS
from ..joules import Floats
from ..notes import Note
from ..schema import Domain, Energy, EnergyDescriptor, EnergyReport, Prediction, Work
from .host import CPU_NOTE, NO_GRAPHS_NOTE, HostModel, has_graphs, is_cpu
from .iteration import SolvedIteration, find_peak
from .kernel_time import ELEMENT_BYTES, KernelTime, chip
from .memory import MemoryReport
from .ops import is_unmodelled
from .power import PowerModel, note_exceeded

# The share of a kernel's error that all kernels of its kind have in common: with it the intervals hold 90% of the whole
# models that were left out of the fits (benchmarks/fit/fit_ops.py).
SHARED = 0.8
# The share of the joules that follows the time: static energy and busy units do, FLOPs and bytes do not.
PER_SECOND = 0.6
# The share of a device's error that remains where it waits for the host: a longer kernel then shortens the wait.
_BEHIND_HOST = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A solved iteration: its operators, their kernels, and the time, energy and memory they take."""

    ops: tuple[Op, ...]
    kernels: tuple[KernelTime, ...]
    solved: SolvedIteration
    power: PowerModel
    memory: MemoryReport
    host: HostModel | None


def build_report(
    graph: Graph,
    device: Device,
    estimate: Estimate,
    *,
    precision: str | None,
    launch: str,
    state: str,
    again: Callable[..., EnergyReport],
    notes: Sequence[str] = (),
) -> EnergyReport:
    """The report of a solved iteration; `again` predicts it with some options changed, `notes` come first."""
    solved, busy = estimate.solved, _utilization(estimate, device)
    descriptors = tuple(_descriptors(estimate, busy))
    joules = math.fsum(d.total_energy_j for d in descriptors)
    seconds, latency_error = solved.seconds, _latency_error(estimate, device)
    time_error = PER_SECOND * latency_error / seconds if seconds else 0.0
    error_j = joules * math.hypot(estimate.power.relative_error, time_error)
    energy = Energy(
        energy_j=joules, error_j=error_j, time_s=seconds, source=f"predicted for {device.id}", basis="predicted"
    )
    average = float((busy * solved.device_s).sum() / seconds) if seconds else 0.0
    peak_w, peak_notes = find_peak(solved, estimate.power, measured=chip(device).calibrated, burst=state == "burst")
    prediction = Prediction(
        device=device.id,
        precision=precision,
        mode=graph.mode,
        launch=launch,
        state=state,
        batch=graph.samples,
        error_s=latency_error,
        device_s=float(solved.device_s.sum()),
        host_s=solved.host_s,
        clock=solved.clock,
        bound=_find_bound(estimate, device),
        average_utilization=min(1.0, average),
        wasted_energy_j=_wasted_j(solved, busy),
        flops=float(graph.flops),
        parameters=graph.parameters or None,
        mfu=_find_mfu(estimate, device, seconds),
        hbm_bytes=sum(k.hbm_bytes for k in estimate.kernels),
        peak_memory_bytes=estimate.memory.peak_bytes,
        memory_bytes=dict(estimate.memory.by_category),
        memory_capacity_bytes=int(device.memory.capacity_bytes.value) if device.memory.capacity_bytes else None,
        provenance=_provenance(estimate, device),
        assumptions=graph.assumptions,
        again=again,
    )
    return EnergyReport(
        name=graph.name,
        total=energy,
        by_domain={device.id: energy},
        domains=(
            Domain(name=device.id, source="predicted", resolution_s=seconds, basis="predicted", label=device.name),
        ),
        work=_work(graph),
        peak_w=peak_w,
        idle_w=device.idle_w.value if device.idle_w else None,
        notes=(*notes, *_notes(graph, estimate, device, launch, state), *peak_notes),
        descriptors=descriptors,
        prediction=prediction,
    )


def _find_mfu(estimate: Estimate, device: Device, seconds: float) -> float | None:
    """FLOPs over what the chip could do in the time, in the format and on the units that run most of them."""
    by_unit: dict[str, float] = {}
    for op, kernel in zip(estimate.ops, estimate.kernels, strict=True):
        by_unit[kernel.unit] = by_unit.get(kernel.unit, 0.0) + op.flops
    unit, most = max(by_unit.items(), key=lambda pair: pair[1], default=("", 0.0))
    kind, _, name = unit.partition(".")
    peak = (device.matrix if kind == "matrix" else device.vector).get(name)
    if not most or peak is None or seconds <= 0:
        return None
    return sum(by_unit.values()) / (seconds * peak.value)


def _wasted_j(solved: SolvedIteration, busy: Floats) -> float:
    """Static joules times the unused share of the tighter roof, waits included."""
    latency = solved.device_s + solved.wait_s
    share = np.divide(busy * solved.device_s, latency, out=np.zeros_like(latency), where=latency > 0)
    return float((solved.static_j * (1.0 - share)).sum())


def _work(graph: Graph) -> tuple[Work, ...]:
    amounts = {"step": 1 if graph.mode != "infer" else 0, "sample": graph.samples, "token": graph.tokens}
    return tuple(Work(amount=float(amount), unit=unit) for unit, amount in amounts.items() if amount)


def _descriptors(estimate: Estimate, busy: Floats) -> Iterator[EnergyDescriptor]:
    solved = estimate.solved
    for i, (op, kernel) in enumerate(zip(estimate.ops, estimate.kernels, strict=True)):
        static, compute, memory = float(solved.static_j[i]), float(solved.compute_j[i]), float(solved.memory_j[i])
        seconds = float(solved.device_s[i])
        joules = static + compute + memory
        yield EnergyDescriptor(
            subgraph_name=op.label,
            compute_energy_j=compute,
            memory_energy_j=memory,
            static_energy_j=static,
            latency_s=seconds + float(solved.wait_s[i]),
            error_j=joules * math.hypot(estimate.power.relative_error, PER_SECOND * kernel.relative_error),
            device_s=seconds,
            error_s=seconds * kernel.relative_error,
            utilization=float(busy[i]),
            kind=op.kind,
            flops=float(op.flops),
            hbm_bytes=kernel.hbm_bytes,
            provenance=kernel.provenance,
        )


def _utilization(estimate: Estimate, device: Device) -> Floats:
    """The share of the tighter roof each operator reaches on the device, between 0 and 1."""
    bandwidth = device.memory.bandwidth_bytes_per_s
    rate = bandwidth.value if bandwidth else math.inf
    reached = []
    for op, kernel, seconds in zip(estimate.ops, estimate.kernels, estimate.solved.device_s, strict=True):
        peak = device.peak(kernel.unit.partition(".")[2]) if op.flops else None
        roof = max(op.flops / peak.value if peak else 0.0, kernel.hbm_bytes / rate)
        reached.append(min(1.0, roof / seconds) if seconds > 0 else 0.0)
    return np.array(reached)


def _latency_error(estimate: Estimate, device: Device) -> float:
    """90% half-width of the iteration: like kernels err alike, unlike ones independently; the host on its own."""
    if is_cpu(device):  # nobody knows which of its errors are correlated: assume that all are
        own = zip(estimate.kernels, estimate.solved.device_s, strict=True)
        dispatch = estimate.host.relative_error * estimate.solved.host_s if estimate.host is not None else 0.0
        return math.fsum(kernel.relative_error * float(seconds) for kernel, seconds in own) + dispatch
    waits = float(estimate.solved.wait_s.sum()) > 0
    kernels = zip(estimate.ops, estimate.kernels, estimate.solved.device_s, strict=True)
    errors = [(op.kind, kernel.relative_error * float(seconds)) for op, kernel, seconds in kernels]
    limited_s = _limit_error_s(estimate, device)
    if estimate.host is None:
        return math.hypot(device_error_s(errors, waits=False), limited_s)
    host = estimate.host.relative_error * estimate.solved.host_s
    slack = max(
        0.0, estimate.solved.host_s * (1 + estimate.host.relative_error) - float(estimate.solved.device_s.sum())
    )
    return math.hypot(device_error_s(errors, waits), host if waits else min(host, slack), limited_s)


def _limit_error_s(estimate: Estimate, device: Device) -> float:
    """What an error of the watts does to the time where the power limit holds the clock.

    A program that draws a tenth more runs about a twentieth slower there: the clock falls, and with it the voltage. The
    half-widths of kernels on the H200 were found under its limit, and include it.
    """
    held = estimate.solved.clock < 0.98 * estimate.power.most_clock
    if not held or chip(device).calibrated:
        return 0.0
    return 0.5 * estimate.power.relative_error * float(estimate.solved.device_s.sum())


def device_error_s(kernels: Iterable[tuple[str, float]], waits: bool) -> float:
    """90% half-width of the time of kernels, given as (kind, half-width); `waits`: the device waits for the host."""
    by_kind: dict[str, float] = {}
    for kind, error_s in kernels:
        by_kind[kind] = by_kind.get(kind, 0.0) + SHARED * error_s
    return math.hypot(*by_kind.values()) * (_BEHIND_HOST if waits else 1.0)


def _find_bound(estimate: Estimate, device: Device) -> str:
    """What limits the time: the host where the device waits for it, else where most of the time goes."""
    solved = estimate.solved
    if solved.host_s > float(solved.device_s.sum()):
        return "dispatch" if is_cpu(device) else "host"
    if solved.wait_s.sum() > 0.25 * solved.seconds and not is_cpu(device):
        return "host"
    if solved.clock < 0.98 * estimate.power.most_clock:
        return "power"
    sums = {"compute": 0.0, "memory": 0.0, "overhead": 0.0}
    for kernel, seconds in zip(estimate.kernels, solved.device_s, strict=True):
        parts = {"compute": kernel.compute_s, "memory": kernel.memory_s, "overhead": kernel.overhead_s}
        sums[max(parts, key=lambda name: parts[name])] += float(seconds)
    return max(sums, key=lambda name: sums[name])


def _provenance(estimate: Estimate, device: Device) -> Mapping[str, str]:
    kinds: dict[str, float] = {}
    for kernel, seconds in zip(estimate.kernels, estimate.solved.device_s, strict=True):
        kinds[kernel.provenance] = kinds.get(kernel.provenance, 0.0) + float(seconds)
    assumed = [name for name, figure in device.figures() if figure.assumed]
    assumed += [f"{name} (not in the catalogue)" for name in chip(device).assumed]
    out = {"device": ", ".join(device.origin) or device.id, "power": estimate.power.provenance}
    out["latency"] = max(kinds, key=lambda name: kinds[name], default="")
    if estimate.host is not None:
        out["dispatch" if is_cpu(device) else "host"] = estimate.host.provenance
    if assumed:
        out["assumed"] = ", ".join(assumed)
    return out


def _note_unmodelled(estimate: Estimate) -> list[str]:
    """A note that names the operators of which only the bytes are known."""
    names = list(dict.fromkeys(op.name.removeprefix("aten.") for op in estimate.ops if is_unmodelled(op)))
    if not names:
        return []
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    listed = ", ".join(names[:4]) + more
    return [f"not modelled, counted by the bytes moved, which is the least they can take: {listed}"]


def _note_missing_units(estimate: Estimate, device: Device) -> list[str]:
    """A note for formats of matrix products that the chip has no units for."""
    of, found = chip(device), dict.fromkeys(op.precision for op in estimate.ops if op.kind in MATRIX_KINDS)
    notes: list[str] = []
    for name in (name for name in found if name in ELEMENT_BYTES):
        _, unit, native = of.peak(name)
        if not native:
            kind, _, runs_as = unit.partition(".")
            text = f"{device.id} has no {name} units: {name} products run on its {runs_as} {kind} units"
            notes.append(Note(text, "replaced"))
    return notes


def _notes(graph: Graph, estimate: Estimate, device: Device, launch: str, state: str) -> tuple[str, ...]:
    notes: list[str] = [CPU_NOTE] if is_cpu(device) else []
    if launch == "graph" and not has_graphs(device):
        notes.append(Note(f"{device.id} {NO_GRAPHS_NOTE}", "replaced"))
    notes += [f"assumed while capturing: {line}" for line in graph.assumptions]
    notes += [*_note_missing_units(estimate, device), *_note_unmodelled(estimate)]
    if estimate.solved.clock < 0.98 and state == "sustained":
        set_by = (
            "the clock that was set is"
            if estimate.solved.clock >= estimate.power.most_clock
            else "the power limit holds the clock at"
        )
        notes.append(f"{set_by} {100 * estimate.solved.clock:.0f}% of boost")
    if estimate.solved.seconds > 0:
        notes += note_exceeded(device, estimate.solved.energy_j / estimate.solved.seconds)
    if not estimate.kernels:
        notes.append("nothing runs on the device: no operator of the program launches a kernel")
    if estimate.kernels and not any(k.hbm_bytes for k in estimate.kernels):
        notes.append("its data stay in the last-level cache between iterations: no bytes cross device memory")
    return tuple(notes)
