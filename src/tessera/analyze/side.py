"""`Side`: one of two things compared, whatever it was made from; `Cell`: one line of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..attribute.table import EnergyRow
from ..schema import Basis
from . import prediction_errors
from .step_rows import Stepped

Span = Literal["run", "trace", ""]
OUTSIDE = "outside the trace"
"""The row of what a run spent while nothing was traced."""
_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Runs:
    """Of a mean of several runs: how many, its standard errors, and the sensor's error, which runs do not show."""

    count: int
    joules: float
    seconds: float
    watts: float
    sensor_j: float
    sensor_w: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of one side: joules and seconds with 90% half-widths (NaN: unknown), calls, and its kind.

    `once`: it was measured once, so that its half-width is the sensor's alone and nobody knows how it scatters.
    `error_w` is that of its mean watts, whose joules and seconds err together; None where that is not known.
    """

    energy_j: float
    error_j: float
    seconds: float
    error_s: float
    calls: float
    kind: str = ""
    errors: prediction_errors.PredictionErrors | None = None  # of a prediction: what its half-widths consist of
    once: bool = False
    runs: Runs | None = None
    error_w: float | None = None

    @property
    def power_w(self) -> float:
        """Mean watts; NaN where there were no seconds."""
        return self.energy_j / self.seconds if self.seconds > 0 else _NAN

    @property
    def power_error_w(self) -> float:
        """Their half-width. Where nobody knows how joules and seconds err together, as if the seconds were exact."""
        return self.error_w if self.error_w is not None else self.error_j / self.seconds if self.seconds > 0 else _NAN

    def __add__(self, other: Cell) -> Cell:
        return Cell(
            self.energy_j + other.energy_j, math.hypot(self.error_j, other.error_j), self.seconds + other.seconds,
            math.hypot(self.error_s, other.error_s), self.calls + other.calls, self.kind,
            self.errors + other.errors if self.errors and other.errors else None, self.once or other.once,
        )  # fmt: skip

    def scaled(self, factor: float) -> Cell:
        """The same, of a part of the work."""
        return Cell(
            self.energy_j * factor, self.error_j * factor, self.seconds * factor, self.error_s * factor,
            self.calls * factor, self.kind, self.errors.scale(factor) if self.errors else None, self.once,
            error_w=self.error_w,
        )  # fmt: skip

    def __sub__(self, part: Cell) -> Cell:
        """What is left without a part; of the sensor's error, its share."""
        left_j = self.energy_j - part.energy_j
        level = self.error_j / self.energy_j if self.energy_j > 0 else 0.0
        return Cell(left_j, level * abs(left_j), max(self.seconds - part.seconds, 0.0), _NAN, 0.0, once=True)


ZERO = Cell(0.0, 0.0, 0.0, 0.0, 0.0, errors=prediction_errors.NONE)
UNSTATED = Cell(_NAN, _NAN, _NAN, _NAN, 0.0, "idle")
"""A row that a side may have spent, and does not tell apart: neither nothing, nor known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of two things compared. `work` has its steps, samples, tokens; `steps` each step where they were recorded.

    `total` is the whole of it, `traced` what its rows are of where that is a part of a run, `stepped` its rows step by
    step. `span` says what the whole is: a "run" from its start to its end, a "trace" of some part of one, or "" where
    nobody says. `gain` is the share of the joules by which their level may be off, of which `total.error_j` consists
    among others; sides of equal `sensors` are off by the same factor. `model` is what predicted it: equal ones err
    alike. `command` is what was run, word by word; empty where nobody says.
    """

    name: str
    basis: Basis
    total: Cell
    work: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[EnergyRow] = ()
    stepped: Stepped | None = None
    traced: Cell | None = None
    span: Span = ""
    views: Mapping[str, Mapping[str, Cell]] = field(default_factory=dict)
    components: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    sensors: str = ""
    gain: float = 0.0
    model: str = ""
    command: Sequence[str] = ()

    @property
    def predicted(self) -> bool:
        """A prediction, whose rows are subgraphs, not operators."""
        return self.basis == "predicted"
