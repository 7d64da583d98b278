"""Reads a device from its TOML file, checks it, and reports each mistake with the file and the key.

A figure is `{ value = 4.8e12, source = "..." }`, with `error` (90% half-width) and `assumed = true` if they apply. A
source that begins with "@name" is looked up in the file's `[sources]` table, so that a long citation is written only
once; the text after the name is added to it.

`check` looks for mistakes that such tables have had: teraflops instead of flops, a sparse peak among dense ones, an
assumed idle power without an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args

from ..device import ASSUMED_ERROR, PRECISIONS, Caches, Clocks, Device, Figure, Kind, Link, Memory, OperatingPoint
from ..errors import ArgumentError, BadDevice, did_you_mean, is_integer, is_number
from ..read_limits import parse_toml, quote_value

_TEXTS = ("id", "name", "kind", "vendor", "architecture", "compute_capability", "unit_name")
_FIGURES = ("units", "tdp_w", "idle_w", "idle_context_w")
_TABLES = ("peaks", "memory", "caches", "clocks", "interconnect", "energy", "notes", "sources")
_KEYS = (*_TEXTS, "aliases", "threads", *_FIGURES, *_TABLES, "operating_points")
_FIGURE_KEYS = ("value", "source", "error", "assumed")
_MOST_LEVELS = 20  # of a key; the deepest of the catalogue has five
_DIRECTIONS = ("per direction", "total")

Table = dict[str, Any]
_Part = TypeVar("_Part", Memory, Caches, Clocks)


def bad(file: str, key: str, problem: str, fix: str | None = None) -> BadDevice:
    """Return the error for a device file: the file, the key and the problem."""
    return BadDevice(
        f"{file}: {key}: {problem}" if key else f"{file}: {problem}",
        fix=fix or "compare with a device of the catalogue: tessera hardware show h200 --json",
    )


def read(text: str, file: str) -> Table:
    """Read a device file's table: expand its sources and check its keys. `build` checks its figures."""
    try:
        raw = parse_toml(text.encode())
    except ValueError as exc:
        raise bad(file, "", f"not TOML: {exc}") from None
    check_keys(raw, _KEYS, file, "")
    sources = _table(raw, "sources", file)
    expanded: Table = expand_sources(raw, sources, file, "")
    expanded.pop("sources", None)
    if not isinstance(raw.get("id"), str):
        raise bad(file, "id", "is missing", fix='give it an id of its own: id = "my-chip"')
    return expanded


def merge(base: Table, over: Table) -> Table:
    """Return the base table with the figures of `over` in place of its own."""
    merged = dict(base)
    for key, value in over.items():
        under = merged.get(key)
        tables = isinstance(value, dict) and isinstance(under, dict) and "value" not in value
        merged[key] = merge(under or {}, value) if tables else value
    return merged


def build(raw: Table, file: str, origin: tuple[str, ...]) -> Device:
    """Check a table from `read`, and return its device."""
    for key in ("id", "name", "kind", "vendor"):
        if key not in raw:
            raise bad(file, key, "is missing", fix="id, name, kind and vendor are needed; the rest may be unknown")
    for key in _TEXTS:
        if key in raw and not (isinstance(raw[key], str) and raw[key]):
            raise bad(file, key, f"must be text, not {quote_value(raw[key])}")
    kinds = get_args(Kind)
    if raw["kind"] not in kinds:
        raise bad(file, "kind", f"no kind {raw['kind']!r}{did_you_mean(raw['kind'], kinds)}", f"one of {kinds}")
    peaks = _table(raw, "peaks", file)
    check_keys(peaks, ("vector", "matrix"), file, "peaks")
    texts: Table = {key: raw[key] for key in _TEXTS if key in raw}
    figures: Table = {key: read_figure(raw, key, file, key) for key in _FIGURES}
    device = Device(
        **texts,
        **figures,
        aliases=_aliases(raw, file),
        vector=_figures(peaks, "vector", file, "peaks.vector", PRECISIONS),
        matrix=_figures(peaks, "matrix", file, "peaks.matrix", PRECISIONS),
        memory=_part(Memory, raw, "memory", file),
        caches=_part(Caches, raw, "caches", file),
        clocks=_part(Clocks, raw, "clocks", file),
        interconnect=_links(raw, file),
        energy=_figures(raw, "energy", file, "energy"),
        operating_points=_points(raw, file),
        threads=_threads(raw, file),
        notes=_notes(raw, file),
        origin=origin,
    )
    for key, problem in check(device):
        raise bad(file, key, problem)
    return device


def check_keys(table: Mapping[str, Any], allowed: tuple[str, ...], file: str, where: str) -> None:
    """Raise an error for an unknown key, with the nearest known one."""
    for key in table:
        if key not in allowed:
            path = f"{where}.{key}" if where else key
            raise bad(file, path, f"no such key{did_you_mean(key, allowed)}", fix=f"known: {', '.join(allowed)}")


def _table(raw: Table, key: str, file: str, where: str | None = None) -> Table:
    table = raw.get(key, {})
    if not isinstance(table, dict):
        raise bad(file, where or key, f"must be a table, not {quote_value(table)}")
    return table


def expand_sources(value: Any, sources: Table, file: str, where: str) -> Any:
    """Replace each "@name" in a source with the text that [sources] has for it."""
    if where.count(".") > _MOST_LEVELS:
        raise bad(file, where[:40], "is nested too deeply")
    if isinstance(value, list):
        return [expand_sources(item, sources, file, f"{where}.[]") for item in value]
    if not isinstance(value, dict):
        return value
    expanded = {
        key: expand_sources(item, sources, file, f"{where}.{key}" if where else key) for key, item in value.items()
    }
    source = expanded.get("source")
    if isinstance(source, str) and source.startswith("@"):
        name, _, rest = source[1:].partition(" ")
        if name not in sources:
            raise bad(file, f"{where}.source", f"no source {name!r} in [sources]{did_you_mean(name, sources)}")
        expanded["source"] = f"{sources[name]}; {rest}" if rest else sources[name]
    return expanded


def read_figure(table: Table, key: str, file: str, where: str) -> Figure | None:
    """Return the figure of a key, or None if the table has none."""
    entry = table.get(key)
    if entry is None:
        return None
    if not isinstance(entry, dict) or "value" not in entry:
        raise bad(file, where, "a figure is { value = ..., source = ... }")
    check_keys(entry, _FIGURE_KEYS, file, where)
    for name in ("value", "error"):
        number = entry.get(name)
        if number is not None and not is_number(number):
            raise bad(file, f"{where}.{name}", f"must be a number, not {quote_value(number)}")
    if not isinstance(entry.get("assumed", False), bool):
        raise bad(file, f"{where}.assumed", "must be true or false")
    if not isinstance(entry.get("source"), str):
        raise bad(file, f"{where}.source", "is missing", fix="say where the number comes from")
    error = entry.get("error")
    try:
        return Figure(
            value=float(entry["value"]),
            source=entry["source"],
            error=None if error is None else float(error),
            assumed=entry.get("assumed", False),
        )
    except OverflowError:
        raise bad(file, where, "the number is too large") from None
    except ArgumentError as exc:
        raise bad(file, where, exc.what) from None


def _figures(
    table: Table, key: str, file: str, where: str, allowed: tuple[str, ...] | None = None
) -> dict[str, Figure]:
    entries = _table(table, key, file, where)
    if allowed is not None:
        check_keys(entries, allowed, file, where)
    figures = {name: read_figure(entries, name, file, f"{where}.{name}") for name in entries}
    return {name: figure for name, figure in figures.items() if figure is not None}


def _part(kind: type[_Part], raw: Table, key: str, file: str) -> _Part:
    entries = _table(raw, key, file)
    names = tuple(entry.name for entry in dataclasses.fields(kind))
    check_keys(entries, names, file, key)
    values: Table = {name: read_figure(entries, name, file, f"{key}.{name}") for name in names if name != "kind"}
    if "kind" in entries:
        if not isinstance(entries["kind"], str):
            raise bad(file, f"{key}.kind", f"must be text, not {quote_value(entries['kind'])}")
        values["kind"] = entries["kind"]
    return kind(**values)


def _links(raw: Table, file: str) -> dict[str, Link]:
    links = {}
    for name, entry in _table(raw, "interconnect", file).items():
        where = f"interconnect.{name}"
        if not isinstance(entry, dict) or entry.get("direction") not in _DIRECTIONS:
            raise bad(file, f"{where}.direction", f"must be one of {_DIRECTIONS}", fix="state how the source counts")
        figure = {key: value for key, value in entry.items() if key != "direction"}
        bytes_per_s = read_figure({name: figure}, name, file, where)
        assert bytes_per_s is not None
        links[name] = Link(bytes_per_s=bytes_per_s, direction=entry["direction"])
    return links


def _points(raw: Table, file: str) -> tuple[OperatingPoint, ...]:
    points = []
    entries = raw.get("operating_points", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise bad(file, "operating_points", "must be a list of tables: [[operating_points]]")
    names = tuple(f.name for f in dataclasses.fields(OperatingPoint))
    for i, entry in enumerate(entries):
        where = f"operating_points[{i}]"
        check_keys(entry, names, file, where)
        power_w = read_figure(entry, "power_w", file, f"{where}.power_w")
        if power_w is None or not isinstance(entry.get("name"), str):
            raise bad(file, where, "needs a name and power_w")
        rest = {n: read_figure(entry, n, file, f"{where}.{n}") for n in names if n not in ("name", "power_w")}
        points.append(OperatingPoint(name=entry["name"], power_w=power_w, **rest))
    return tuple(points)


def _aliases(raw: Table, file: str) -> tuple[str, ...]:
    aliases = raw.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(a, str) and a for a in aliases):
        raise bad(file, "aliases", "must be a list of names")
    return tuple(alias.lower() for alias in aliases)


def _threads(raw: Table, file: str) -> int | None:
    threads = raw.get("threads")
    if threads is not None and not (is_integer(threads) and 1 <= threads < 1 << 20):
        raise bad(file, "threads", f"must be a number of hardware threads, not {quote_value(threads)}")
    return threads


def _notes(raw: Table, file: str) -> dict[str, str]:
    notes = _table(raw, "notes", file)
    for key, text in notes.items():
        if not isinstance(text, str):
            raise bad(file, f"notes.{key}", "must be text")
    return notes


# -- plausibility ----------------------------------------------------------------------------------------------

# A number below these is surely not in SI: "989" for 989 TFLOP/s, "141" for 141 GB, "1.98" for GHz.
_SMALLEST = {"peaks": 1e9, "capacity_bytes": 1e6, "_bytes_per_s": 1e8, "_hz": 1e6, "l2_bytes": 1e3, "l3_bytes": 1e3}
_LARGEST = {"_w": 1e5, "energy": 1e-6}

# (slower, faster, largest ratio): a format of half the width is at most twice as fast on the same units. Only int8
# may be four times fp16, because GeForce boards halve the rate of fp16 that accumulates in fp32.
_LADDER = (
    ("tf32", "bf16", 2.1),
    ("tf32", "fp16", 2.1),
    ("bf16", "fp8", 2.1),
    ("fp16", "fp8", 2.1),
    ("fp16", "int8", 4.2),
    ("bf16", "int8", 4.2),
    ("fp8", "fp4", 3.1),  # Blackwell Ultra has three times fp8
)


def check(device: Device) -> Iterator[tuple[str, str]]:
    """Yield the problems of a device, as (key, problem)."""
    for key, figure in device.figures():
        yield from _check_figure(key, figure)
    yield from _check_peaks(device)
    yield from _check_watts(device)
    clocks = device.clocks
    if clocks.base_hz and clocks.boost_hz and clocks.base_hz.value > clocks.boost_hz.value:
        yield "clocks.base_hz", "is above boost_hz"
    names = [point.name.lower() for point in device.operating_points]
    if len(set(names)) != len(names):
        yield "operating_points", "two have the same name"
    if device.kind == "cpu" and device.threads is None:
        yield "threads", "a CPU needs its number of hardware threads: its power is shared among them"


def _check_figure(key: str, figure: Figure) -> Iterator[tuple[str, str]]:
    if figure.assumed:
        if not figure.source.startswith("assumed"):
            yield key, 'is assumed, but its source does not say "assumed: ..." and the reasoning'
        if figure.error is None or figure.error < ASSUMED_ERROR * figure.value * (1 - 1e-9):
            yield key, f"is assumed and needs an error of at least {ASSUMED_ERROR:.0%} of its value"
    if figure.error is not None and figure.error >= figure.value:
        yield key, f"has an error ({figure.error:g}) that reaches zero"
    for part, least in _SMALLEST.items():
        if (key.startswith(part) or key.endswith(part)) and figure.value < least:
            yield key, f"{figure.value:g} is too small to be in SI units"
    for part, most in _LARGEST.items():
        if (key.startswith(part) or key.endswith(part)) and figure.value > most:
            yield key, f"{figure.value:g} is too large to be in SI units"
    if key.startswith("energy.") and "_j_per_" not in key:
        yield key, "an energy constant is named ..._j_per_byte, ..._j_per_flop or ..._j_per_op"


def _check_peaks(device: Device) -> Iterator[tuple[str, str]]:
    for slow, fast, ratio in _LADDER:
        lower, upper = device.matrix.get(slow), device.matrix.get(fast)
        if lower is None or upper is None:
            continue
        if upper.value < lower.value * 0.999:
            yield f"peaks.matrix.{fast}", f"is below {slow}"
        if upper.value > lower.value * ratio:
            yield f"peaks.matrix.{fast}", f"is more than {ratio:.0f} times {slow}: is it the sparse figure?"
    for wide, narrow in (("fp64", "fp32"), ("fp32", "fp16")):
        lower, upper = device.vector.get(wide), device.vector.get(narrow)
        if lower and upper and upper.value < lower.value * 0.999:
            yield f"peaks.vector.{narrow}", f"is below {wide}"


def _check_watts(device: Device) -> Iterator[tuple[str, str]]:
    idle, context, full = device.idle_w, device.idle_context_w, device.tdp_w
    if idle and full and idle.value >= full.value:
        yield "idle_w", "is not below tdp_w"
    if idle and context and context.value < idle.value:
        yield "idle_context_w", "is below idle_w"
    for point in device.operating_points:
        if idle and point.power_w.value <= idle.value:
            yield "operating_points", f"{point.name} is not above idle_w"
