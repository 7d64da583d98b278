"""`Advice`: one change that would save joules, whether a recording or a prediction suggests it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .units import format_duration, format_energy

SavingBy = Literal["prediction", "roofline", "counters", "energy table", "recorded times", "experience"]
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do (`action`), the `evidence` for it, and what it would save for one `unit` of work.

    The unit is the recorded "run", or a predicted "iteration" or "sample". `saves_share` is the saving as a share of
    the unit's joules. `saves_s` may be negative: the change then costs time. `error_j` and `error_s` are half-widths of
    90% intervals; None if unknown. `energy_j` and `share` are the joules that the advice is about, `time_s` the seconds
    of a predicted iteration after the change. Without power, `energy_j` is None and shares are of the devices' time.
    `by` says how the saving was computed: "prediction" by the models of `tessera.estimate`, "roofline" by the chip's
    ceilings, "counters" by what ncu measured, "energy table" and "recorded times" by adding up joules or seconds that
    were spent for nothing, "experience" by the share that the same change saved elsewhere.
    """

    kind: str
    action: str
    evidence: str = ""
    saves_j: float = 0.0
    error_j: float | None = None
    saves_share: float = 0.0
    saves_s: float | None = None
    error_s: float | None = None
    unit: str = "run"
    energy_j: float | None = None
    share: float | None = None
    time_s: float | None = None
    by: SavingBy = "experience"
    confidence: Confidence = "low"

    @property
    def text(self) -> str:
        """Evidence, action and the computed saving in one sentence."""
        saving = self.saving if self.by != "experience" else None
        return f"{self.evidence}: {self.action}" + (f" ({saving})" if saving else "")

    @property
    def saving(self) -> str | None:
        """What the change would save, in words; None if that is unknown or nothing."""
        if self.energy_j is None and not self.saves_j > 0 and (self.saves_s or 0.0) > 0:
            return f"about {format_duration(self.saves_s or 0.0, 2)} less, by {self.by}"
        if not self.saves_j > 0:
            return None
        time = f" and {format_duration(self.saves_s, 2)}" if self.saves_s is not None and self.saves_s > 0 else ""
        return f"about {format_energy(self.saves_j, 2)}{time} less, by {self.by}"
