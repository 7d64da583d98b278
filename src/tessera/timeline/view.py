"""Makes `Record`s of rows: from what columns and links know, with None for what nobody measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..record import CODE, KINDS, ON_DEVICE, Record
from .columns import NONE, Ints, Launch, Timeline
from .intervals import covered_ns, union
from .kineto import MODULE
from .link import Links

_BLOCK = 4096  # rows that are converted to lists at once: reading single numbers from numpy arrays is slow
_DEVICE = frozenset(CODE[kind] for kind in ON_DEVICE)
_FROM_LAUNCH = tuple(f for f in Launch.__struct_fields__ if f in Record.__struct_fields__)
_FROM_LINKS = ("op", "region", "module", "parent", "shapes")


def records(timeline: Timeline, rows: Sequence[int] | Ints | None = None) -> Iterator[Record]:
    """Yield `Record`s of some rows (by default of all, in time order)."""
    if rows is None:
        chosen: Ints = np.lexsort((-timeline["end_ns"], timeline["start_ns"]))
    else:
        chosen = np.asarray(rows, np.int64)
    links = timeline.linked
    overlap = collective_overlap_pct(timeline, chosen)
    modules: dict[int, str] = {}
    hosts, frames = timeline.hosts, frozenset(timeline.meta.get("frames", ()))
    for begin in range(0, len(chosen), _BLOCK):
        block = chosen[begin : begin + _BLOCK]
        columns = {name: values[block].tolist() for name, values in timeline.columns.items()}
        columns |= {name: getattr(links, name)[block].tolist() for name in _FROM_LINKS}
        columns["energy_j"] = _joules(timeline.energy_j, block)
        columns["error_j"] = _joules(timeline.error_j, block)
        for i, row in enumerate(block.tolist()):
            one = {name: values[i] for name, values in columns.items()}
            fields = _fields(timeline, one, links, modules, hosts, frames)
            if row in overlap:
                fields["collective_overlap_pct"] = overlap[row]
            yield Record(**(fields | dict(timeline.extra.get(row, {}))))


def module_name(timeline: Timeline, row: int, links: Links) -> str:
    """Return the modules around a row, outermost first: 'GPT2_0/Block_3/Linear_12'."""
    return "/".join(timeline.name(r).removeprefix(MODULE) for r in links.path(row))


def collective_overlap_pct(timeline: Timeline, rows: Ints) -> dict[int, float]:
    """Return for which percentage of each collective's time a compute kernel ran on the same device."""
    asked = rows[timeline["kind"][rows] == CODE["collective"]]
    asked = asked[timeline["end_ns"][asked] > timeline["start_ns"][asked]]
    start, end = timeline["start_ns"], timeline["end_ns"]
    kernels = timeline.by_device(timeline.rows("kernel")) if len(asked) else {}
    overlap_pct: dict[int, float] = {}
    for device, rows_here in timeline.by_device(asked).items():
        busy = kernels.get(device, asked[:0])
        beside = covered_ns(union(start[busy], end[busy]), start[rows_here], end[rows_here])
        overlap_pct |= dict(
            zip(rows_here.tolist(), (100.0 * beside / (end[rows_here] - start[rows_here])).tolist(), strict=True)
        )
    return overlap_pct


def _joules(values: NDArray[np.float64] | None, rows: Ints) -> list[float | None]:
    if values is None:
        return [None] * len(rows)
    return [None if isnan(joules) else joules for joules in values[rows].tolist()]


def _fields(
    timeline: Timeline,
    one: dict[str, Any],
    links: Links,
    modules: dict[int, str],
    hosts: Mapping[int, str],
    frames: frozenset[int],
) -> dict[str, Any]:
    """Return the fields of one record."""
    names, code = timeline.names, one["kind"]
    on_device = code in _DEVICE
    lasts_ns = one["end_ns"] - one["start_ns"]
    operator = one["parent"] if code == CODE["op"] else one["op"]  # for an operator, the one around it

    def name_of(row: int) -> str | None:
        return None if row == NONE else timeline.name(row)

    module = one["module"]
    if module != NONE and module not in modules:
        modules[module] = module_name(timeline, module, links)
    shapes = one["shapes"]
    value, joules = one["value"], one["energy_j"]
    rank = timeline.rank if one["rank"] == NONE else one["rank"]
    fields: dict[str, Any] = {
        "kind": "python" if code == CODE["op"] and one["name"] in frames else KINDS[code],
        "name": names[one["name"]], "start_ns": one["start_ns"], "end_ns": one["end_ns"],
        "kernel_name": names[one["name"]] if on_device else None, "device": _none_if_missing(one["device"]),
        "stream_id": _none_if_missing(one["stream"]), "thread_id": _none_if_missing(one["thread"]), "rank": rank,
        "host": None if rank is None else hosts.get(rank),
        "op": name_of(operator), "region": name_of(one["region"]), "module": modules.get(module),
        "shapes": None if shapes == NONE else names[shapes], "bytes": _none_if_missing(one["bytes"]),
        "value": None if isnan(value) or code == CODE["region"] else value,
        "unit": None if one["unit"] == NONE else names[one["unit"]],
        "energy_j": joules, "error_j": one["error_j"],
        "power_w": None if joules is None or lasts_ns <= 0 else joules / lasts_ns * 1e9,
    }  # fmt: skip
    if one["launch"] != NONE:
        launch = timeline.launches[one["launch"]]
        fields |= {name: getattr(launch, name) for name in _FROM_LAUNCH}
    if code == CODE["memcpy"] and lasts_ns > 0 and one["bytes"] != NONE:
        fields["memcpy_gbps"] = one["bytes"] / lasts_ns
    return fields


def _none_if_missing(number: int) -> int | None:
    return None if number == NONE else number
