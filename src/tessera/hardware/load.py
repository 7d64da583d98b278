"""A device from its TOML file: every key is known, every figure checked, every mistake named with file and key.

A figure is `{ value = 4.8e12, source = "..." }`, with `error` (90% half-width) and `assumed = true` where they
apply. A source that begins with "@name" is looked up in the file's `[sources]` table, so that a long citation
stands there once; what follows the name is added to it.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from ..device import PRECISIONS, Caches, Clocks, Device, Figure, Kind, Link, Memory, OperatingPoint
from ..errors import ArgumentError, BadDevice, did_you_mean
from .check import check

_TEXTS = ("id", "name", "kind", "vendor", "architecture", "compute_capability", "unit_name")
_FIGURES = ("units", "tdp_w", "idle_w", "idle_context_w")
_TABLES = ("peaks", "memory", "caches", "clocks", "interconnect", "energy", "notes", "sources")
_KEYS = (*_TEXTS, "aliases", "threads", *_FIGURES, *_TABLES, "operating_points")
_FIGURE_KEYS = ("value", "source", "error", "assumed")
_DIRECTIONS = ("per direction", "total")

Table = dict[str, Any]
_Part = TypeVar("_Part", Memory, Caches, Clocks)


def bad(file: str, key: str, problem: str, fix: str | None = None) -> BadDevice:
    """The error for a device file: the file, the key and what is wrong with it."""
    return BadDevice(
        f"{file}: {key}: {problem}" if key else f"{file}: {problem}",
        fix=fix or "compare with a device that is known: tessera hardware show h200 --json",
    )


def read(text: str, file: str) -> Table:
    """The table of a device file, its sources expanded and its keys known; figures are not yet checked."""
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise bad(file, "", f"not TOML: {exc}") from None
    _known(raw, _KEYS, file, "")
    sources = _table(raw, "sources", file)
    expanded: Table = _expand(raw, sources, file, "")
    expanded.pop("sources", None)
    if not isinstance(raw.get("id"), str):
        raise bad(file, "id", "is missing", fix='give it an id of its own: id = "my-chip"')
    return expanded


def merge(base: Table, over: Table) -> Table:
    """The base with what the overlay says instead, figure by figure."""
    merged = dict(base)
    for key, value in over.items():
        under = merged.get(key)
        tables = isinstance(value, dict) and isinstance(under, dict) and "value" not in value
        merged[key] = merge(under or {}, value) if tables else value
    return merged


def build(raw: Table, file: str, origin: tuple[str, ...]) -> Device:
    """The device of a table that `read` returned, checked."""
    for key in ("id", "name", "kind", "vendor"):
        if key not in raw:
            raise bad(file, key, "is missing", fix="id, name, kind and vendor are needed; the rest may be unknown")
    for key in _TEXTS:
        if key in raw and not (isinstance(raw[key], str) and raw[key]):
            raise bad(file, key, f"is text, not {raw[key]!r}")
    kinds = get_args(Kind)
    if raw["kind"] not in kinds:
        raise bad(file, "kind", f"no kind {raw['kind']!r}{did_you_mean(raw['kind'], kinds)}", f"one of {kinds}")
    peaks = _table(raw, "peaks", file)
    _known(peaks, ("vector", "matrix"), file, "peaks")
    texts: Table = {key: raw[key] for key in _TEXTS if key in raw}
    figures: Table = {key: _figure(raw, key, file, key) for key in _FIGURES}
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


def _known(table: Mapping[str, Any], known: tuple[str, ...], file: str, where: str) -> None:
    for key in table:
        if key not in known:
            path = f"{where}.{key}" if where else key
            raise bad(file, path, f"no such key{did_you_mean(key, known)}", fix=f"known: {', '.join(known)}")


def _table(raw: Table, key: str, file: str, where: str | None = None) -> Table:
    table = raw.get(key, {})
    if not isinstance(table, dict):
        raise bad(file, where or key, f"is a table, not {table!r}")
    return table


def _expand(value: Any, sources: Table, file: str, where: str) -> Any:
    if isinstance(value, list):
        return [_expand(item, sources, file, where) for item in value]
    if not isinstance(value, dict):
        return value
    expanded = {key: _expand(item, sources, file, f"{where}.{key}" if where else key) for key, item in value.items()}
    source = expanded.get("source")
    if isinstance(source, str) and source.startswith("@"):
        name, _, rest = source[1:].partition(" ")
        if name not in sources:
            raise bad(file, f"{where}.source", f"no source {name!r} in [sources]{did_you_mean(name, sources)}")
        expanded["source"] = f"{sources[name]}; {rest}" if rest else sources[name]
    return expanded


def _figure(table: Table, key: str, file: str, where: str) -> Figure | None:
    entry = table.get(key)
    if entry is None:
        return None
    if not isinstance(entry, dict) or "value" not in entry:
        raise bad(file, where, "a figure is { value = ..., source = ... }")
    _known(entry, _FIGURE_KEYS, file, where)
    for name in ("value", "error"):
        number = entry.get(name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise bad(file, f"{where}.{name}", f"is a number, not {number!r}")
    if not isinstance(entry.get("assumed", False), bool):
        raise bad(file, f"{where}.assumed", "is true or false")
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
    except ArgumentError as exc:
        raise bad(file, where, exc.what) from None


def _figures(table: Table, key: str, file: str, where: str, known: tuple[str, ...] | None = None) -> dict[str, Figure]:
    entries = _table(table, key, file, where)
    if known is not None:
        _known(entries, known, file, where)
    found = {name: _figure(entries, name, file, f"{where}.{name}") for name in entries}
    return {name: figure for name, figure in found.items() if figure is not None}


def _part(kind: type[_Part], raw: Table, key: str, file: str) -> _Part:
    entries = _table(raw, key, file)
    names = tuple(entry.name for entry in dataclasses.fields(kind))
    _known(entries, names, file, key)
    values: Table = {name: _figure(entries, name, file, f"{key}.{name}") for name in names if name != "kind"}
    if "kind" in entries:
        if not isinstance(entries["kind"], str):
            raise bad(file, f"{key}.kind", f"is text, not {entries['kind']!r}")
        values["kind"] = entries["kind"]
    return kind(**values)


def _links(raw: Table, file: str) -> dict[str, Link]:
    links = {}
    for name, entry in _table(raw, "interconnect", file).items():
        where = f"interconnect.{name}"
        if not isinstance(entry, dict) or entry.get("direction") not in _DIRECTIONS:
            raise bad(file, f"{where}.direction", f"is one of {_DIRECTIONS}", fix="say how the source counts")
        figure = {key: value for key, value in entry.items() if key != "direction"}
        bytes_per_s = _figure({name: figure}, name, file, where)
        assert bytes_per_s is not None
        links[name] = Link(bytes_per_s=bytes_per_s, direction=entry["direction"])
    return links


def _points(raw: Table, file: str) -> tuple[OperatingPoint, ...]:
    points = []
    entries = raw.get("operating_points", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise bad(file, "operating_points", "is a list of tables: [[operating_points]]")
    names = tuple(f.name for f in dataclasses.fields(OperatingPoint))
    for i, entry in enumerate(entries):
        where = f"operating_points[{i}]"
        _known(entry, names, file, where)
        power_w = _figure(entry, "power_w", file, f"{where}.power_w")
        if power_w is None or not isinstance(entry.get("name"), str):
            raise bad(file, where, "needs a name and power_w")
        rest = {n: _figure(entry, n, file, f"{where}.{n}") for n in names if n not in ("name", "power_w")}
        points.append(OperatingPoint(name=entry["name"], power_w=power_w, **rest))
    return tuple(points)


def _aliases(raw: Table, file: str) -> tuple[str, ...]:
    aliases = raw.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(a, str) and a for a in aliases):
        raise bad(file, "aliases", "is a list of names")
    return tuple(alias.lower() for alias in aliases)


def _threads(raw: Table, file: str) -> int | None:
    threads = raw.get("threads")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise bad(file, "threads", f"is a number of hardware threads, not {threads!r}")
    return threads


def _notes(raw: Table, file: str) -> dict[str, str]:
    notes = _table(raw, "notes", file)
    for key, text in notes.items():
        if not isinstance(text, str):
            raise bad(file, f"notes.{key}", "is text")
    return notes
