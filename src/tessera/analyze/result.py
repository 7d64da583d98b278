"""`Result`: what every analysis returns. Rows of plain values, what they mean, and what a reader should know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import MissingExtra


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: its key in the rows, a title for people, its unit ("s", "J", "W", "B", "B/s", "FLOP/s", "%", "")."""

    key: str
    title: str
    unit: str = ""
    help: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A table: `rows` are dictionaries by column key, in SI units; None is unknown. `facts` are single figures.

    `missing` says what could not be answered and which command would provide it.
    """

    kind: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Any:
        return iter(self.rows)

    def top(self, count: int = 10, by: str | None = None) -> list[Mapping[str, Any]]:
        """The rows with the largest values of a column; the first ones as they are, without one."""
        if by is None:
            return list(self.rows[:count])
        return sorted(self.rows, key=lambda r: -math.inf if r.get(by) is None else r[by], reverse=True)[:count]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "kind": self.kind, "title": self.title, "facts": dict(self.facts), "rows": [dict(r) for r in self.rows],
            "units": {c.key: c.unit for c in self.columns}, "notes": list(self.notes), "missing": dict(self.missing),
        }  # fmt: skip

    def to_frame(self) -> Any:
        """A pandas DataFrame of the rows."""
        try:
            import pandas as pd
        except ImportError as exc:
            raise MissingExtra("pandas", "frame", f"analyze.{self.kind}(...).to_frame") from exc
        return pd.DataFrame([dict(r) for r in self.rows], columns=[c.key for c in self.columns])

    def __str__(self) -> str:
        from ..report.analysis import text

        return text(self)

    def _repr_html_(self) -> str:
        from ..report.analysis import html

        return html(self)
