"""`roofline`: what kernels and operators achieve under the ceilings of the chip, in FLOP/s and in FLOP/J."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device import Device
from ..errors import ArgumentError, TesseraError, check_choice, did_you_mean
from ..hardware import catalogue, identify_board, lookup
from ..joules import Floats
from ..profile.open_recording import Progress, open_recording
from ..record import NEEDS_SHAPES
from ..timeline.columns import NONE, Ints, Timeline
from ..timeline.distinct import distinct
from .devices import count_launches, explain_no_device, explain_no_power
from .kernel_work import Calls, list_calls
from .result import Result, ResultColumn, columns

BY = ("kernel", "op")
_BOUND = "the roof at this intensity: compute or memory; cache if more bytes per second were moved than {} can"
# The deciding columns come first, because a narrow screen cuts the last ones.
_COLUMNS = columns(
    ("calls", "Calls"),
    ("time_s", "Time"),
    ("share_pct", "Of device time"),
    ("bound", "Bound by", _BOUND.format("HBM")),
    ("roof_pct", "Of its roof"),
    ("unit", "Unit", "what runs its FLOPs: tensor cores (matrix) or vector units, and precision"),
    ("intensity", "Intensity"),
    ("flop_per_s", "FLOP/s"),
    ("bytes_per_s", "Bytes/s"),
    ("energy_j", "Energy"),
    ("flop_per_j", "FLOP/J"),
    ("bytes_per_j", "Bytes/J"),
    ("energy_pct", "Of the best FLOP/J or B/J"),
    ("flops_pct", "Of the unit's peak"),
    ("hbm_pct", "Of HBM"),
    ("l2_pct", "Of L2"),
    ("ridge", "Ridge", "above it the unit is the limit, below it the memory"),
    ("flops_per_call", "FLOPs a call"),
    ("bytes_per_call", "Bytes a call"),
    ("bytes_from", "Bytes from", "ncu: measured in device memory; shapes: each tensor once"),
)
_OP_COLUMNS = columns(("name", "Operator"), ("shapes", "Shapes"))
_KERNEL_COLUMNS = columns(("name", "Kernel"))
_KERNELS_OP = columns(("op", "Operator", "of its longest call; the row has its shapes too"))
# The rows of a host are operators, mostly without roofs, so what they achieve comes first.
_FIRST_OF_HOST = ("calls", "time_s", "share_pct", "flop_per_s", "intensity", "energy_j", "flop_per_j", "bytes_per_s")
_HOST_COLUMNS = columns(
    ("share_pct", "Share"), ("hbm_pct", "Of memory bandwidth"), ("bound", "Bound by", _BOUND.format("memory"))
)


def roofline(
    trace: Any,
    *,
    power: Any = None,
    on: str | Device | None = None,
    arch: str | Device | None = None,
    by: str = "kernel",
    progress: Progress | None = None,
) -> Result:
    """Return each kernel (or operator with its shapes) under the roofs of the chip, those with most device time first.

    FLOPs and bytes come from recorded shapes; bytes are measured if counters were merged in. `on` (or `arch`) is a
    chip of the catalogue ("h200"), a capability ("sm90"), or None for the one the trace names. `facts` has the
    ceilings, and `on_host`: rows are operators of the CPU where nothing ran on a device.
    """
    check_choice("by", by, BY)
    recording = open_recording(trace, power=power, progress=progress)
    recording.find_energy()
    timeline = recording.timeline
    calls = list_calls(timeline)
    notes, missing = list(recording.notes), {}
    if not len(calls.rows) or (not len(timeline.device_rows) and count_launches(timeline)):
        missing["kernels"] = explain_no_device(recording)
        return Result(
            kind="roofline", title="Roofline", columns=_COLUMNS, rows=[], facts={"by": by}, notes=notes, missing=missing
        )
    labels = [d.label for d in recording.power.domains if d.label] if recording.power else []
    device = find_device(timeline, on or arch, labels[0] if labels else None)
    roofs = Ceilings.of(device) if device is not None else None
    on_host = not len(timeline.device_rows)
    if roofs is None:
        kind = "CPU: --on epyc-9654, in Python on='epyc-9654' (any of `tessera hardware list --kind cpu`)"
        chip = kind if on_host else "chip: --on h200, in Python on='h200' (any of `tessera hardware list`)"
        missing["ceilings"] = f"the trace does not name its {chip}"
    elif roofs.l2_bytes_per_s is None:
        missing["l2_pct"] = f"the catalogue has no L2 bandwidth of {roofs.device.id}"
    if not calls.shapes_recorded:
        missing["flops"] = f"the trace has no shapes: {NEEDS_SHAPES}"
    if timeline.energy_j is None:
        missing["energy"] = explain_no_power(recording)
    if not np.any(calls.counted):
        how = "a CPU's bytes are not counted" if on_host else "to measure them: tessera run --counters script.py"
        missing["dram_bytes"] = f"bytes are the least that the shapes require; {how}"
    if any(w.family == "attention" for w in calls.works) and not timeline.meta.get("tells_causal"):
        notes.append("attention is counted in full: shapes do not say whether it was causal (then half is computed)")
    worked_s, total_s = float(calls.seconds[~np.isnan(calls.flops)].sum()), float(calls.seconds.sum())
    if total_s > 0 and calls.shapes_recorded and worked_s < 0.995 * total_s:
        share = 1.0 - worked_s / total_s
        notes.append(f"the work of {share:.0%} of the time is not known (fused kernels, lists, NCCL)")
    facts = {**(roofs.facts() if roofs else {}), "by": by, "time_s": total_s, "known_time_s": worked_s}
    return Result(
        kind="roofline",
        title="Roofline",
        columns=_select_columns(by, on_host),
        rows=make_rows(timeline, calls, roofs, by),
        facts={**facts, "on_host": on_host, **_totals(calls, roofs)},
        notes=notes,
        missing=missing,
    )


def _select_columns(by: str, on_host: bool) -> tuple[ResultColumn, ...]:
    if not on_host:
        return (*_OP_COLUMNS, *_COLUMNS) if by == "op" else (*_KERNEL_COLUMNS, *_COLUMNS, *_KERNELS_OP)
    named = {c.key: c for c in (*_COLUMNS, *_HOST_COLUMNS)}
    first = tuple(named.pop(key) for key in _FIRST_OF_HOST)
    return (*(_OP_COLUMNS if by == "op" else _OP_COLUMNS[:1]), *first, *named.values())


def _totals(calls: Calls, roofs: Ceilings | None) -> dict[str, Any]:
    """Return FLOPs by unit, and the share of the peak that the whole device time reached (model FLOPs utilisation)."""
    sums = {unit: float(np.nansum(calls.flops[calls.unit == number])) for number, unit in enumerate(calls.units)}
    by_unit = {unit: flops for unit, flops in sums.items() if flops > 0}
    seconds = float(calls.seconds.sum())
    needed_s = sum(n / roofs.flops_per_s[u] for u, n in by_unit.items() if u in roofs.flops_per_s) if roofs else None
    return {"flops": by_unit, "mfu_pct": 100.0 * needed_s / seconds if needed_s is not None and seconds > 0 else None}


def make_rows(timeline: Timeline, calls: Calls, roofs: Ceilings | None, by: str) -> list[dict[str, Any]]:
    """Return the rows of a roofline, most device time first."""
    rows = calls.rows
    if not len(rows):
        return []
    total_s = float(calls.seconds.sum()) or 1.0
    keys = [timeline["name"][rows]]
    if by == "op":
        keys = [np.where(calls.op == NONE, NONE, timeline["name"][calls.op]), timeline.linked.shapes[rows]]
    first_calls, inverse = distinct(*keys)
    joules = sum_inside(timeline, rows, timeline.energy_j)
    groups = _CallGroups(calls, inverse, len(first_calls), joules, by)
    lines = []
    for i in np.argsort(-groups.seconds, kind="stable").tolist():
        first = int(groups.first[i])
        op = int(calls.op[first])
        op_name = timeline.name(op) if op != NONE else None
        name = timeline.name(int(rows[first])) if by == "kernel" else op_name or "(no operator)"
        shape = int(timeline.linked.shapes[rows[first]])
        shapes = timeline.names[shape] if shape != NONE else None
        line: dict[str, Any] = {"name": name, "op": op_name, "shapes": shapes}
        line |= {"calls": round(float(groups.calls[i])), "time_s": float(groups.seconds[i])}
        line["share_pct"] = 100.0 * float(groups.seconds[i]) / total_s
        lines.append(line | groups.figures(i, roofs))
    return lines


def sum_inside(timeline: Timeline, rows: Ints, values: Floats | None) -> Floats:
    """Return the joules, or errors, of calls; a call of the host includes the operators inside, as its seconds do."""
    if values is None:
        return np.full(len(rows), np.nan)
    if len(timeline.device_rows):
        return np.asarray(values[rows], np.float64)
    parent = timeline.linked.parent
    place = np.full(len(timeline) + 1, NONE, np.int64)  # one more, for NONE
    place[rows] = np.arange(len(rows))
    spends = np.flatnonzero(~np.isnan(values))
    owner = spends.copy()
    while np.any(climbing := (owner != NONE) & (place[owner] == NONE)):
        owner[climbing] = parent[owner[climbing]]
    inside = owner != NONE
    at = place[owner[inside]]
    is_known = np.bincount(at, minlength=len(rows)) > 0
    return np.where(is_known, np.bincount(at, values[spends[inside]], minlength=len(rows)), np.nan)


class _CallGroups:
    """Sums over the calls of each group; rates use the seconds, or joules, of the calls whose work is known."""

    def __init__(self, calls: Calls, inverse: Ints, count: int, joules: Floats, by: str) -> None:
        self._calls = calls
        each = np.ones(len(inverse))
        if by == "op":  # an operator that launches three kernels was called once
            copies = np.bincount(calls.op[~calls.repeated] + 1, minlength=int(calls.op.max(initial=NONE)) + 2)
            each = np.where(calls.op == NONE, 1.0, 1.0 / np.maximum(copies[calls.op + 1], 1))

        def total(values: Floats, chosen: Any = True) -> Floats:
            used = ~np.isnan(values) & chosen
            return np.asarray(np.bincount(inverse, np.where(used, np.nan_to_num(values), 0.0), count), np.float64)

        self.seconds = total(calls.seconds)
        self.calls = np.bincount(inverse, each, count)
        # The longest call stands for its group: its operator and unit are shown.
        longest_s = np.zeros(count)
        np.maximum.at(longest_s, inverse, calls.seconds)
        longest = np.flatnonzero(calls.seconds == longest_s[inverse])[::-1]
        self.first = np.zeros(count, np.int64)
        self.first[inverse[longest]] = longest  # the first one of several
        has_flops, has_bytes, has_joules = (~np.isnan(v) for v in (calls.flops, calls.bytes, joules))
        self.flops, self.bytes, self.l2 = total(calls.flops), total(calls.bytes), total(calls.l2_bytes)
        self.flops_s, self.bytes_s = total(calls.seconds, has_flops), total(calls.seconds, has_bytes)
        self.l2_s = total(calls.seconds, ~np.isnan(calls.l2_bytes))
        self.flops_calls = np.bincount(inverse, each * has_flops, count)
        self.bytes_calls = np.bincount(inverse, each * has_bytes, count)
        self.joules, self.flops_j, self.bytes_j = total(joules), total(joules, has_flops), total(joules, has_bytes)
        # Only calls that have joules: those outside the power log computed too, but none of its joules is theirs.
        self.flops_spent, self.bytes_spent = total(calls.flops, has_joules), total(calls.bytes, has_joules)
        self.counted = np.bincount(inverse, calls.counted, count) > 0

    def figures(self, i: int, roofs: Ceilings | None) -> dict[str, Any]:
        number = int(self._calls.unit[int(self.first[i])])
        has_flops, has_bytes = bool(self.flops_calls[i]), bool(self.bytes_calls[i])
        has_joules = self.joules[i] > 0
        flop_per_s = _rate(self.flops[i], self.flops_s[i], has_flops)
        bytes_per_s = _rate(self.bytes[i], self.bytes_s[i], has_bytes)
        row: dict[str, Any] = {
            "unit": self._calls.units[number] if number != NONE else None,
            "flops_per_call": _rate(self.flops[i], float(self.flops_calls[i]), has_flops),
            "bytes_per_call": _rate(self.bytes[i], float(self.bytes_calls[i]), has_bytes),
            "bytes_from": ("ncu" if self.counted[i] else "shapes") if has_bytes else None,
            "intensity": flop_per_s / bytes_per_s if flop_per_s is not None and bytes_per_s else None,
            "flop_per_s": flop_per_s,
            "bytes_per_s": bytes_per_s,
            "energy_j": float(self.joules[i]) if has_joules else None,
            "flop_per_j": _rate(self.flops_spent[i], self.flops_j[i], has_flops and has_joules),
            "bytes_per_j": _rate(self.bytes_spent[i], self.bytes_j[i], has_bytes and has_joules),
        }
        row |= dict.fromkeys(("ridge", "flops_pct", "hbm_pct", "l2_pct", "bound", "roof_pct", "energy_pct"))
        return row | (roofs.limits(row, _rate(self.l2[i], self.l2_s[i], self.l2[i] > 0)) if roofs else {})


def _rate(amount: float, per: float, is_known: bool) -> float | None:
    return amount / per if is_known and per > 0 else None


def _pct(value: float | None, most: float | None) -> float | None:
    return 100.0 * value / most if value is not None and most else None


# -- the chip ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The most that a device can do. `flops_per_s` and `flop_per_j` are by unit ("matrix.bf16")."""

    device: Device
    flops_per_s: Mapping[str, float]
    bytes_per_s: float | None
    l2_bytes_per_s: float | None
    flop_per_j: Mapping[str, float]
    bytes_per_j: float | None
    sources: Mapping[str, str]

    @classmethod
    def of(cls, device: Device) -> Ceilings:
        """Return the roofs of a device.

        The best FLOP/J is measured if the catalogue has it, else peak over power limit.
        """
        tables = {"matrix": device.matrix, "vector": device.vector}
        peaks = {f"{unit}.{name}": peak.value for unit, table in tables.items() for name, peak in table.items()}
        bandwidth, l2 = device.memory.bandwidth_bytes_per_s, device.caches.l2_bandwidth_bytes_per_s
        watts = device.tdp_w.value if device.tdp_w else None
        best = {unit: peak / watts for unit, peak in peaks.items()} if watts else {}
        sources = dict.fromkeys(best, "peak FLOP/s over the board's limit")
        for unit in peaks:
            kind, _, precision = unit.partition(".")
            # fp16 runs at bf16's rate on the same units, int8 at fp8's, so they would take nearly the same joules.
            like = {"fp16": "bf16", "int8": "fp8"}.get(precision, precision) if kind == "matrix" else precision
            keys = (f"matmul_{name}_j_per_flop" for name in (precision, like))
            measured = next((device.energy[key] for key in keys if device.energy.get(key)), None)
            if measured is not None and (kind == "matrix" or precision == "fp32"):
                best[unit], sources[unit] = 1.0 / measured.value, measured.source
        stream = device.energy.get("stream_j_per_byte")
        sources["bytes"] = stream.source if stream else "peak bytes/s over the board's limit"
        return cls(
            device=device,
            flops_per_s=peaks,
            bytes_per_s=bandwidth.value if bandwidth else None,
            l2_bytes_per_s=l2.value if l2 else None,
            flop_per_j=best,
            bytes_per_j=1.0 / stream.value if stream else bandwidth.value / watts if bandwidth and watts else None,
            sources=sources,
        )

    def ridge(self, unit: str | None) -> float | None:
        """Return the FLOPs per byte above which the unit, and below which the memory, is the limit."""
        peak = self.flops_per_s.get(unit or "")
        return peak / self.bytes_per_s if peak and self.bytes_per_s else None

    def limits(self, row: Mapping[str, Any], l2_per_s: float | None) -> dict[str, Any]:
        """Return percentages of the roofs, and which roof limits."""
        unit, ridge = row["unit"] or "", self.ridge(row["unit"])
        flops_pct = _pct(row["flop_per_s"], self.flops_per_s.get(unit))
        hbm_pct = _pct(row["bytes_per_s"], self.bytes_per_s)
        bound = None
        if row["intensity"] is not None and ridge is not None:
            bound = "compute" if row["intensity"] >= ridge else "memory"
        elif flops_pct is None and hbm_pct is not None:
            bound = "memory"
        roof_pct = (flops_pct if bound == "compute" else hbm_pct) if bound else None
        if bound == "memory" and row["bytes_from"] == "shapes" and hbm_pct is not None and hbm_pct > 100.0:
            bound = "cache"  # more than HBM can deliver, so the tensors were still in the L2
            roof_pct = _pct(row["bytes_per_s"], self.l2_bytes_per_s)
        shares = [_pct(row["flop_per_j"], self.flop_per_j.get(unit)), _pct(row["bytes_per_j"], self.bytes_per_j)]
        best = [pct for pct in shares if pct is not None] if row["energy_j"] is not None else []
        percentages = {"flops_pct": flops_pct, "hbm_pct": hbm_pct, "l2_pct": _pct(l2_per_s, self.l2_bytes_per_s)}
        return percentages | {
            "ridge": ridge,
            "bound": bound,
            "roof_pct": roof_pct,
            "energy_pct": max(best, default=None),
        }

    def facts(self) -> dict[str, Any]:
        """Return plain data for a plot."""
        return {
            "device": self.device.id,
            "device_name": self.device.name,
            "ceilings_flop_per_s": dict(self.flops_per_s),
            "hbm_bytes_per_s": self.bytes_per_s,
            "l2_bytes_per_s": self.l2_bytes_per_s,
            "ridge_flop_per_byte": {u: r for u in self.flops_per_s if (r := self.ridge(u)) is not None},
            "best_flop_per_j": dict(self.flop_per_j),
            "best_bytes_per_j": self.bytes_per_j,
            "sources": dict(self.sources),
        }


def find_device(timeline: Timeline, on: str | Device | None = None, label: str | None = None) -> Device | None:
    """Return the chip of a trace, from an id ("h200"), a compute capability ("sm90"), or the trace; None if unknown.

    Several chips have one capability: take the one that the trace names, else the one with the most bandwidth.
    """
    if isinstance(on, Device):
        return on
    named = _read_device(timeline, label)
    if on is None:
        return named
    wanted = on.strip().lower().replace("_", "")
    chips = catalogue().values()
    family = [d for d in chips if wanted in ((d.compute_capability or "").lower(), (d.architecture or "").lower())]
    if family:
        if named is not None and named in family:
            return named
        return max(family, key=lambda d: d.memory.bandwidth_bytes_per_s.value if d.memory.bandwidth_bytes_per_s else 0)
    try:
        return lookup(on)
    except ArgumentError as exc:
        names = sorted({n for d in chips for n in (d.id, d.compute_capability or d.id)})
        raise ArgumentError(
            f"there is no chip or architecture {on!r}{did_you_mean(wanted, names)}",
            why="ceilings come from the catalogue",
            fix="give a chip such as h200 or sm90; `tessera hardware list` shows all",
        ) from exc


def read_capability(timeline: Timeline) -> int | None:
    """Return the major compute capability of NVIDIA's chip, if the trace has it."""
    for properties in timeline.device_properties:
        if "NVIDIA" in _vendor(properties):
            major = properties.get("computeMajor")
            return major if isinstance(major, int) else None
    return None


def _vendor(properties: dict[str, Any]) -> str:
    """Return the vendor; NVIDIA's older boards do not have it in their names."""
    name = str(properties.get("name", ""))
    return "NVIDIA" if name.startswith(("NVIDIA", "Tesla", "Quadro", "GeForce", "TITAN")) else name


def _read_device(timeline: Timeline, label: str | None) -> Device | None:
    """Return the chip that the trace, or else the label of its power sensor, names."""
    names = [p.get("name") for p in timeline.device_properties]
    for name in (*names, label):
        if isinstance(name, str) and name:
            try:
                return identify_board(name.removesuffix(" VF"))  # a virtual function of the chip
            except TesseraError:
                continue
    return None
