"""`EnergyDiff`: two energy reports side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRow:
    """One line of a comparison: joules and seconds before and after, and whether the change is more than noise."""

    name: str
    before_j: float
    after_j: float
    before_s: float
    after_s: float
    error_j: float
    significant: bool

    @property
    def change_j(self) -> float:
        """Joules after less joules before."""
        return self.after_j - self.before_j


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyDiff:
    """Two reports side by side: the total, the components, and the subgraphs that changed most."""

    before: str
    after: str
    total: DiffRow
    components: Sequence[DiffRow]
    subgraphs: Sequence[DiffRow]
    note: str = ""
