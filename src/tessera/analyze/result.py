"""`Result`: what every analysis returns. Rows of plain values, what they mean, and what a reader should know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import needs_extra

_UNITS = {
    "w_per_s": "W/s",
    "tokens_per_s": "tokens/s",
    "bytes_per_s": "B/s",
    "flop_per_s": "FLOP/s",
    "bytes_per_j": "B/J",
    "flop_per_j": "FLOP/J",
    "flops_per_call": "FLOP",
    "bytes_per_call": "B",
    "intensity": "FLOP/B",
    "ridge": "FLOP/B",
    "sm_occupancy": "%",
    "l2_hit_rate": "%",
    "stall_reasons": "%",
    "bytes": "B",
    "pct": "%",
    "hz": "Hz",
    "s": "s",
    "j": "J",
    "w": "W",
}
"""The unit of a column, by the end of its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultColumn:
    """One column: its key in the rows, a title for people, its unit ("s", "J", "W", "B", "B/s", "FLOP/s", "%", "")."""

    key: str
    title: str
    unit: str = ""
    help: str = ""


def columns(*titles: tuple[str, str] | tuple[str, str, str]) -> tuple[ResultColumn, ...]:
    """Return columns from (key, title) or (key, title, help); the unit follows from the key."""
    return tuple(
        ResultColumn(key=key, title=title, unit=unit_of(key), help=more[0] if more else "")
        for key, title, *more in titles
    )


def unit_of(key: str) -> str:
    """Return the unit of a figure, by the end of its key: "energy_j" is in "J"."""
    return next((unit for end, unit in _UNITS.items() if key == end or key.endswith(f"_{end}")), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A table: `rows` are dictionaries by column key, in SI units; None is unknown. `facts` are single figures.

    `missing` says what could not be answered and which command would provide it.
    """

    kind: str
    title: str
    columns: Sequence[ResultColumn]
    rows: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Any:
        return iter(self.rows)

    def top(self, count: int = 10, by: str | None = None) -> list[Mapping[str, Any]]:
        """Return the rows with the largest values of a column; without one, the first rows."""
        if by is None:
            return list(self.rows[:count])
        return sorted(self.rows, key=lambda r: -math.inf if r.get(by) is None else r[by], reverse=True)[:count]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "kind": self.kind,
            "title": self.title,
            "facts": dict(self.facts),
            "rows": [dict(r) for r in self.rows],
            "units": {c.key: c.unit for c in self.columns},
            "notes": [str(note) for note in self.notes],
            "missing": dict(self.missing),
        }

    def to_json(self) -> str:
        """Return the result as JSON, with null for NaN."""
        return encode_json(self.to_dict())

    def to_frame(self) -> Any:
        """Return a pandas DataFrame of the rows."""
        return make_frame(self.rows, [c.key for c in self.columns], f"analyze.{self.kind}(...).to_frame")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind}: {self.title}; {len(self.rows)} rows; print() shows them>"

    def __str__(self) -> str:
        from ..report.analysis import text

        return text(self)

    def _repr_html_(self) -> str:
        from ..report.analysis import html

        return html(self)


def encode_json(data: Any) -> str:
    """Return plain data as JSON: numpy's numbers as numbers, NaN as null, anything unknown as text."""
    import msgspec

    def plain(value: Any) -> Any:
        return value.item() if hasattr(value, "item") else str(value)

    return msgspec.json.encode(data, enc_hook=plain).decode()


def make_frame(rows: Sequence[Mapping[str, Any]], keys: Sequence[str] | None, caller: str) -> Any:
    """Return a pandas DataFrame; the error for a missing pandas names `caller`."""
    with needs_extra("pandas", "frame", caller):
        import pandas as pd
    return pd.DataFrame([dict(r) for r in rows], columns=None if keys is None else list(keys))
