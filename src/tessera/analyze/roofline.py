"""`roofline`: what kernels and operators achieve under the ceilings of the chip, in FLOP/s and in FLOP/J."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..device import Device
from ..errors import ArgumentError, did_you_mean
from ..record import NEEDS_SHAPES
from ..timeline.columns import NONE, Ints, Timeline
from .ceilings import Ceilings, ceilings, device_of
from .devices import no_device, no_power
from .kernel_work import Calls, Floats, calls_of
from .result import Column, Result
from .source import Progress, open_source

BY = ("kernel", "op")

# What decides comes first: a narrow screen cuts what comes last.
_COLUMNS = (
    Column(key="calls", title="Calls"),
    Column(key="time_s", title="Time", unit="s"),
    Column(key="share_pct", title="Of device time", unit="%"),
    Column(key="bound", title="Bound by", help="the roof at this intensity: compute or memory; cache where more bytes "
           "a second moved than HBM has"),
    Column(key="roof_pct", title="Of its roof", unit="%"),
    Column(key="unit", title="Unit", help="what runs its FLOPs: tensor cores (matrix) or vector units, and precision"),
    Column(key="intensity", title="Intensity", unit="FLOP/B"),
    Column(key="flop_per_s", title="FLOP/s", unit="FLOP/s"),
    Column(key="bytes_per_s", title="Bytes/s", unit="B/s"),
    Column(key="energy_j", title="Energy", unit="J"),
    Column(key="flop_per_j", title="FLOP/J", unit="FLOP/J"),
    Column(key="bytes_per_j", title="Bytes/J", unit="B/J"),
    Column(key="energy_pct", title="Of the best FLOP/J or B/J", unit="%"),
    Column(key="flops_pct", title="Of the unit's peak", unit="%"),
    Column(key="hbm_pct", title="Of HBM", unit="%"),
    Column(key="l2_pct", title="Of L2", unit="%"),
    Column(key="ridge", title="Ridge", unit="FLOP/B", help="above it the unit is the limit, below it the memory"),
    Column(key="flops_per_call", title="FLOPs a call", unit="FLOP"),
    Column(key="bytes_per_call", title="Bytes a call", unit="B"),
    Column(key="bytes_from", title="Bytes from", help="ncu: measured in device memory; shapes: each tensor once"),
)  # fmt: skip
_OF_AN_OP = (Column(key="name", title="Operator"), Column(key="shapes", title="Shapes"))
_OF_A_KERNEL = (Column(key="name", title="Kernel"),)
# A host's rows are operators, and mostly without roofs: what they achieve comes first there.
_OF_A_HOST = ("calls", "time_s", "share_pct", "flop_per_s", "intensity", "energy_j", "flop_per_j", "bytes_per_s")
_SAID_OF_A_HOST = (
    Column(key="share_pct", title="Share", unit="%"), Column(key="hbm_pct", title="Of memory bandwidth", unit="%"),
    Column(key="bound", title="Bound by", help="the roof at this intensity: compute or memory; cache where more bytes "
           "a second moved than memory can give"),
)  # fmt: skip
_BESIDE_A_KERNEL = (Column(key="op", title="Operator", help="of its longest call; the row has its shapes too"),)


def roofline(
    trace: Any,
    *,
    power: Any = None,
    arch: str | Device | None = None,
    by: str = "kernel",
    progress: Progress | None = None,
) -> Result:
    """Each kernel (or operator with its shapes) under the roofs of the chip, those with most device time first.

    FLOPs and bytes are from recorded shapes; bytes are measured where counters were merged in. `arch` is a chip of
    the catalogue ("h200"), a capability ("sm90"), or None for the one the trace names. `facts` has the ceilings, and
    `on_host`: rows are operators of the CPU where nothing ran on a device.
    """
    if by not in BY:
        raise ArgumentError(f"by={by!r}{did_you_mean(by, BY)}", fix=f"one of: {', '.join(BY)}")
    source = open_source(trace, power=power, progress=progress)
    source.energy()
    timeline = source.timeline
    labels = [d.label for d in source.power.domains if d.label] if source.power else []
    device = device_of(timeline, arch, labels[0] if labels else None)
    roofs = ceilings(device) if device is not None else None
    calls = calls_of(timeline)
    rows = rows_of(timeline, calls, roofs, by)
    on_host = not len(timeline.device_rows)
    notes = [*source.notes]
    missing: dict[str, str] = {}
    if not len(calls.rows):
        missing["kernels"] = no_device(source)
        return Result(
            kind="roofline", title="Roofline", columns=_COLUMNS, rows=[], facts={"by": by}, notes=notes, missing=missing
        )  # fmt: skip
    if device is None:
        missing["ceilings"] = _which_chip(on_host)
    elif roofs is not None and roofs.l2_bytes_per_s is None:
        missing["l2_pct"] = f"the catalogue has no L2 bandwidth of {device.id}"
    if not calls.shapes_recorded:
        missing["flops"] = f"the trace has no shapes: {NEEDS_SHAPES}"
    if timeline.energy_j is None:
        missing["energy"] = no_power(source)
    if not np.any(calls.counted):
        how = "of a CPU none are counted" if on_host else "measured: tessera run --counters script.py"
        missing["dram_bytes"] = f"bytes are the least that shapes ask for; {how}"
    if any(w.family == "attention" for w in calls.works):
        notes.append("attention is counted in full: shapes do not say whether it was causal (then half is computed)")
    known_s = float(calls.seconds[~np.isnan(calls.flops)].sum())
    total_s = float(calls.seconds.sum())
    if total_s > 0 and calls.shapes_recorded and known_s < 0.995 * total_s:
        notes.append(f"the work of {1.0 - known_s / total_s:.0%} of the time is not known (fused kernels, lists, NCCL)")
    facts = {**(roofs.facts() if roofs else {}), "by": by, "time_s": total_s, "known_time_s": known_s}
    facts |= {"on_host": on_host, **_totals(calls, roofs)}
    columns = _columns(by, on_host=on_host)
    return Result(
        kind="roofline", title="Roofline", columns=columns, rows=rows, facts=facts, notes=notes, missing=missing
    )  # fmt: skip


def _which_chip(on_host: bool) -> str:
    if on_host:
        return "the trace does not name its CPU: arch='epyc-9654' (any of `tessera hardware list --kind cpu`)"
    return "the trace does not name its chip: arch='h200' (any of `tessera hardware list`)"


def _columns(by: str, *, on_host: bool) -> tuple[Column, ...]:
    if not on_host:
        return (*_OF_AN_OP, *_COLUMNS) if by == "op" else (*_OF_A_KERNEL, *_COLUMNS, *_BESIDE_A_KERNEL)
    named = {c.key: c for c in _COLUMNS} | {c.key: c for c in _SAID_OF_A_HOST}
    first = tuple(named.pop(key) for key in _OF_A_HOST)
    return (*(_OF_AN_OP if by == "op" else _OF_AN_OP[:1]), *first, *named.values())


def _totals(calls: Calls, roofs: Ceilings | None) -> dict[str, Any]:
    """FLOPs by unit, and what of the peak the whole device time reached (model FLOPs utilisation)."""
    by_unit: dict[str, float] = {}
    for number, unit in enumerate(calls.units):
        spent = float(np.nansum(calls.flops[calls.unit == number]))
        if spent > 0:
            by_unit[unit] = spent
    seconds = float(calls.seconds.sum())
    needed = sum(n / roofs.flops_per_s[u] for u, n in by_unit.items() if u in roofs.flops_per_s) if roofs else None
    return {"flops": by_unit, "mfu_pct": 100.0 * needed / seconds if needed is not None and seconds > 0 else None}


def rows_of(timeline: Timeline, calls: Calls, roofs: Ceilings | None, by: str = "kernel") -> list[dict[str, Any]]:
    """The rows of a roofline, most device time first."""
    rows = calls.rows
    if not len(rows):
        return []
    total_s = float(calls.seconds.sum()) or 1.0
    keys: Ints = timeline["name"][rows][:, None]
    if by == "op":
        has = calls.op != NONE
        op_name = np.where(has, timeline["name"][calls.op], NONE)
        keys = np.stack([op_name, np.where(has, timeline["shapes"][calls.op], NONE)], axis=1)
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = np.asarray(inverse).reshape(-1)
    joules = np.full(len(rows), np.nan) if timeline.energy_j is None else _joules(timeline, rows)
    groups = _Groups(calls, inverse, len(distinct), joules, by)
    found = []
    for i in np.argsort(-groups.seconds, kind="stable").tolist():
        first = int(groups.first[i])
        op = int(calls.op[first])
        named = timeline.name(op) if op != NONE else None
        head = {
            "name": timeline.name(int(rows[first])) if by == "kernel" else named or "(no operator)",
            "op": named,
            "shapes": timeline.text("shapes", op) if op != NONE else None,
            "calls": round(float(groups.calls[i])), "time_s": float(groups.seconds[i]),
            "share_pct": 100.0 * float(groups.seconds[i]) / total_s,
        }  # fmt: skip
        found.append(head | _under(groups, i, calls, roofs))
    return found


def _joules(timeline: Timeline, rows: Ints) -> Floats:
    """The joules of calls. A call of the host has those of the operators inside it, as it has their seconds."""
    assert timeline.energy_j is not None
    if len(timeline.device_rows):
        return np.asarray(timeline.energy_j[rows], np.float64)
    parent = timeline.linked.parent
    place = np.full(len(timeline) + 1, NONE, np.int64)  # one more, for NONE
    place[rows] = np.arange(len(rows))
    spends = np.flatnonzero(~np.isnan(timeline.energy_j))
    owner = spends.copy()
    while np.any(lost := (owner != NONE) & (place[owner] == NONE)):
        owner[lost] = parent[owner[lost]]
    found = owner != NONE
    at, spent = place[owner[found]], timeline.energy_j[spends[found]]
    known = np.bincount(at, minlength=len(rows)) > 0
    return np.where(known, np.bincount(at, spent, minlength=len(rows)), np.nan)


class _Groups:
    """Sums over the calls of each group; rates are over the seconds, or joules, of the calls whose work is known."""

    def __init__(self, calls: Calls, inverse: Ints, count: int, joules: Floats, by: str) -> None:
        each = np.ones(len(inverse))
        if by == "op":  # an operator that launches three kernels was called once
            _, place, copies = np.unique(calls.op, return_inverse=True, return_counts=True)
            each = np.where(calls.op == NONE, 1.0, 1.0 / copies[np.asarray(place).reshape(-1)])

        def total(values: Floats, keep: Any = None) -> Floats:
            kept = ~np.isnan(values) if keep is None else keep & ~np.isnan(values)
            return np.asarray(np.bincount(inverse, np.where(kept, np.nan_to_num(values), 0.0), count), np.float64)

        self.seconds = total(calls.seconds)
        self.calls = np.bincount(inverse, each, count)
        # The longest call stands for its group: its operator and unit are shown.
        order = np.lexsort((-calls.seconds, inverse))
        self.first = order[np.searchsorted(inverse[order], np.arange(count))]
        knows_flops, knows_bytes = ~np.isnan(calls.flops), ~np.isnan(calls.bytes)
        spent = ~np.isnan(joules)
        self.flops, self.bytes, self.l2 = total(calls.flops), total(calls.bytes), total(calls.l2_bytes)
        self.flops_s, self.bytes_s = total(calls.seconds, knows_flops), total(calls.seconds, knows_bytes)
        self.l2_s = total(calls.seconds, ~np.isnan(calls.l2_bytes))
        self.flops_calls = np.bincount(inverse, each * knows_flops, count)
        self.bytes_calls = np.bincount(inverse, each * knows_bytes, count)
        self.joules, self.flops_j, self.bytes_j = total(joules), total(joules, knows_flops), total(joules, knows_bytes)
        # Of the calls that have joules: those outside the power log computed, and no joule of it is theirs.
        self.flops_spent, self.bytes_spent = total(calls.flops, spent), total(calls.bytes, spent)
        self.counted = np.bincount(inverse, calls.counted, count) > 0


def _rate(amount: float, per: float, known: bool) -> float | None:
    return amount / per if known and per > 0 else None


def _pct(value: float | None, most: float | None) -> float | None:
    return 100.0 * value / most if value is not None and most else None


def _under(g: _Groups, i: int, calls: Calls, roofs: Ceilings | None) -> dict[str, Any]:
    """One group under the roofs."""
    number = int(calls.unit[int(g.first[i])])
    unit = calls.units[number] if number != NONE else None
    knows_flops, knows_bytes = bool(g.flops_calls[i]), bool(g.bytes_calls[i])
    flop_per_s = _rate(g.flops[i], g.flops_s[i], knows_flops)
    bytes_per_s = _rate(g.bytes[i], g.bytes_s[i], knows_bytes)
    intensity = None
    if flop_per_s is not None and bytes_per_s:
        intensity = flop_per_s / bytes_per_s
    has_joules = g.joules[i] > 0
    flop_per_j = _rate(g.flops_spent[i], g.flops_j[i], knows_flops and has_joules)
    bytes_per_j = _rate(g.bytes_spent[i], g.bytes_j[i], knows_bytes and has_joules)
    row: dict[str, Any] = {
        "unit": unit, "flops_per_call": _rate(g.flops[i], float(g.flops_calls[i]), knows_flops),
        "bytes_per_call": _rate(g.bytes[i], float(g.bytes_calls[i]), knows_bytes),
        "bytes_from": ("ncu" if g.counted[i] else "shapes") if knows_bytes else None,
        "intensity": intensity, "flop_per_s": flop_per_s, "bytes_per_s": bytes_per_s,
        "energy_j": float(g.joules[i]) if has_joules else None, "flop_per_j": flop_per_j, "bytes_per_j": bytes_per_j,
    }  # fmt: skip
    row |= dict.fromkeys(("ridge", "flops_pct", "hbm_pct", "l2_pct", "bound", "roof_pct", "energy_pct"))
    if roofs is not None:
        row |= _limits(row, roofs, _rate(g.l2[i], g.l2_s[i], g.l2[i] > 0))
    return row


def _limits(row: Mapping[str, Any], roofs: Ceilings, l2_per_s: float | None) -> dict[str, Any]:
    """Percentages of the roofs, and which of them binds."""
    unit, ridge = row["unit"], roofs.ridge(row["unit"])
    flops_pct = _pct(row["flop_per_s"], roofs.flops_per_s.get(unit or ""))
    hbm_pct = _pct(row["bytes_per_s"], roofs.bytes_per_s)
    bound = None
    if row["intensity"] is not None and ridge is not None:
        bound = "compute" if row["intensity"] >= ridge else "memory"
    elif flops_pct is None and hbm_pct is not None:
        bound = "memory"
    roof_pct = (flops_pct if bound == "compute" else hbm_pct) if bound else None
    if bound == "memory" and row["bytes_from"] == "shapes" and hbm_pct is not None and hbm_pct > 100.0:
        bound = "cache"  # more than HBM can give: the tensors were in the L2 still
        roof_pct = _pct(row["bytes_per_s"], roofs.l2_bytes_per_s)
    energy_pct = None
    if row["energy_j"] is not None:
        parts = (_pct(row["flop_per_j"], roofs.flop_per_j.get(unit or "")), _pct(row["bytes_per_j"], roofs.bytes_per_j))
        best = [p for p in parts if p is not None]
        energy_pct = max(best) if best else None
    return {
        "ridge": ridge, "flops_pct": flops_pct, "hbm_pct": hbm_pct, "l2_pct": _pct(l2_per_s, roofs.l2_bytes_per_s),
        "bound": bound, "roof_pct": roof_pct, "energy_pct": energy_pct,
    }  # fmt: skip
