"""The arguments of `tessera.optimize`, kept together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..device import Device

OptimizeMode = Literal["infer", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeOptions:
    """The arguments of `optimize`."""

    mode: OptimizeMode = "infer"
    tolerance: float | None = None
    on: str | Device | None = None
    explain: bool | Literal["modelled"] = True
    budget_s: float = 120.0
    variants: Sequence[str] | None = None
    progress: Callable[[str], None] | None = None
