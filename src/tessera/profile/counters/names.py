"""What the counter tables of all vendors share: their rows, units, the counters of one kernel, and kernel names.

The common schema is `tessera.record.Record`. The modules nvidia, amd and intel have a table each, from a raw metric's
name to a field of the schema. A value that has no field but is worth keeping (seconds, bytes) is called a figure.
Percentages are 0 to 100.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...errors import RecordingError
from ...read_limits import COUNTER_BYTES, read_bytes
from ...record import Record
from ..demangle import demangle

FIELDS = frozenset(Record.__struct_fields__)
"""The fields of the schema. A row of a table whose field is not among these gives a figure."""
PERCENT = frozenset(f for f in FIELDS if f.endswith("_pct")) | {"sm_occupancy", "l2_hit_rate"}
OVERSHOOT_PCT = 2.0
"""A percentage at most this much over 100 (two passes disagree) is cut to 100; a larger one is not believed."""


def same(value: float) -> float:
    """Return the raw value: it already is what the field means."""
    return value


def giga(value: float) -> float:
    """Convert "per second" to "1e9 per second" (GB/s are decimal everywhere)."""
    return value * 1e-9


def complement_pct(value: float) -> float:
    """Convert the percentage that does to the percentage that does not."""
    return 100.0 - value


class CounterMetric(NamedTuple):
    """One row of a vendor's table: what a raw metric becomes."""

    field: str
    """A field of `Record`, or the name of a figure."""
    convert: Callable[[float], float]
    """Converts the raw value, which is in SI units (bytes, seconds, percent, counts)."""
    unit: str
    """The unit of the field."""
    source: str
    """Where the vendor describes the raw metric."""


class Normalised(NamedTuple):
    """What a table made of the raw metrics of one kernel."""

    values: dict[str, Any]
    figures: dict[str, float]
    missing: dict[str, str]
    """Field -> why it is None."""


class KernelCounters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters of one launch of one kernel, or the mean of several launches.

    `values` are fields of `Record`. `figures` are other values; their names include the unit unless it is plain.
    """

    name: str
    """The demangled name, as Kineto writes it, if the profiler gave the mangled one."""
    grid: tuple[int, ...] | None = None
    """Blocks in x, y, z; a single number if the profiler gives only the total (AMD)."""
    block: tuple[int, ...] | None = None
    values: dict[str, Any] = {}
    figures: dict[str, float] = {}
    missing: dict[str, str] = {}
    source: str = "ncu"
    device: int | None = None
    launches: int = 1


def apply(table: Mapping[str, CounterMetric], raw: Mapping[str, float], largest: Iterable[str] = ()) -> Normalised:
    """Convert raw metrics in SI units by a table.

    Several rows with the same field are alternatives, the preferred one first (chips differ in names). Fields in
    `largest` take the largest value instead: of several pipes, that of the busiest.
    """
    converted: dict[str, float] = {}
    missing: dict[str, str] = {}
    busiest = frozenset(largest)
    for name, metric in table.items():
        value = raw.get(name)
        if value is None or not math.isfinite(value) or (metric.field in converted and metric.field not in busiest):
            continue
        value = metric.convert(value)
        if metric.field in PERCENT:
            if not -OVERSHOOT_PCT <= value <= 100.0 + OVERSHOOT_PCT:
                missing[metric.field] = f"{name} gave {value:.4g} %"
                continue
            value = min(100.0, max(0.0, value))
        converted[metric.field] = max(value, converted[metric.field]) if metric.field in converted else value
    for field in {m.field for m in table.values()} & FIELDS - converted.keys() - missing.keys():
        names = [n for n, m in table.items() if m.field == field]
        missing[field] = f"the profiler gave no {' or '.join(names[:2])}"
    values = {f: v for f, v in converted.items() if f in FIELDS}
    figures = {f: v for f, v in converted.items() if f not in FIELDS}
    return Normalised(values, figures, {f: why for f, why in missing.items() if f not in values})


def put(result: Normalised, field: str, value: Any) -> None:
    """Set a field that was computed from several raw metrics."""
    result.values[field] = value
    result.missing.pop(field, None)


_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SECONDS = {"s": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIME = re.compile(r"([mun]?)s(?:econd|ec)?s?$")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")


def unit_factor(unit: str) -> float:
    """Return the factor from a unit such as "Gbyte/s" or "usecond" to SI; 1 if the text is not a known unit."""
    top, _, bottom = unit.strip().partition("/")
    return _factor(top) / (_factor(bottom) if bottom else 1.0)


def _factor(unit: str) -> float:
    unit = unit.strip()
    time = _TIME.match(unit)
    if time:
        return _SECONDS[time[1] or "s"]
    scaled = re.match(r"([KMGTP]?)(?:byte|bytes|B|hz|Hz)$", unit)
    return _PREFIXES[scaled[1]] if scaled else 1.0


def number(text: str) -> float | None:
    """Read a number as profilers print it ("1,234.5", "12.3 (1; 2)"); None for "n/a", "nan", "1e999" or nothing."""
    match = _NUMBER.match(text.strip())
    if match is None:
        return None
    value = float(match[0].replace(",", ""))
    return value if math.isfinite(value) else None


def text_of(path: str | Path) -> str:
    """Read the text of a counter file."""
    try:
        return read_bytes(Path(path), COUNTER_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise RecordingError(f"cannot read {path}", why=why, fix="give the CSV the profiler wrote") from exc


def dimensions(text: str) -> tuple[int, ...] | None:
    """Read a launch size as profilers print it, "(128, 1, 1)"; None if there is none."""
    return tuple(int(n) for n in re.findall(r"\d{1,18}", text)) or None


_REWRITES = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"^(?:static )?void ", ""),
        (r"\(anonymous namespace\)|<unnamed>|_GLOBAL__N__\w+", "{anonymous}"),
        (r"\[lambda(\([^\]]*\)) \(instance (\d+)\)\]", r"{lambda\1#\2}"),
        (r"\(\s*[A-Za-z_][\w: ]*\s*\)(?=-?\d)", ""),  # (int)4: NVIDIA's demangler writes the type of a constant
        (r"\btrue\b", "1"),
        (r"\bfalse\b", "0"),
        (r"\b(\d+)(?:ull|ul|ll|u|l)\b", r"\1"),  # 4ul: the C++ runtime's demangler writes a suffix instead
        (r"\bconst\b", ""),  # some demanglers write it before the type, others after it
        (r"\s+", ""),
    )
)
_PARAMETERS = re.compile(r"\([^()]*\)")


@lru_cache(maxsize=16384)
def canonical(name: str) -> str:
    """Return a kernel's name without the parts that demanglers write differently: spaces, casts, suffixes, parameters.

    NVIDIA's: `void f<(int)4, (bool)1>(T2, const float *)`; the C++ runtime's: `void f<4, true>(int, float const*)`.
    """
    text = demangle(name)
    for pattern, by in _REWRITES:
        text = pattern.sub(by, text)
    while True:
        shorter = _PARAMETERS.sub("", text)
        if shorter == text:
            return text
        text = shorter
