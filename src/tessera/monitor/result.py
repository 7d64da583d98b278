"""What a benchmark found, and what follows from it: TFLOPS per watt, samples per joule, kWh, cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..schema import Basis, Work

J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Uncertain:
    """A value with the half-width of its 90% interval; None when there is none (a single batch)."""

    value: float
    error: float | None

    @property
    def relative(self) -> float:
        """Half-width over value; infinite when unknown."""
        if self.error is None or self.value == 0:
            return float("inf")
        return abs(self.error / self.value)

    def with_level(self, gain_error: float) -> Uncertain:
        """The same with the sensor's own level error added: no repetition makes that smaller."""
        if self.error is None:
            return self
        return Uncertain(self.value, (self.error**2 + (gain_error * self.value) ** 2) ** 0.5)

    def inverse(self, amount: float = 1.0) -> Uncertain:
        """Amount divided by this value, with the relative error kept."""
        value = amount / self.value if self.value else float("nan")
        return Uncertain(value, None if self.error is None else value * self.relative)

    def times(self, factor: float) -> Uncertain:
        """This value scaled."""
        return Uncertain(self.value * factor, None if self.error is None else self.error * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What the user gives to turn joules into money and CO2, and how many nodes one run takes."""

    price_per_kwh: float | None = None
    gco2e_per_kwh: float | None = None
    nodes: int = 1

    @property
    def given(self) -> bool:
        """Whether the user gave any."""
        return self != Factors()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """One measured function. All per call; all with 90% half-widths. `converged`: it repeats within `target`."""

    name: str
    calls: int
    seconds_per_call: Uncertain
    joules_per_call: Uncertain
    power_w: Uncertain
    utilization_pct: float | None
    work: Mapping[str, Work]
    by_domain: Mapping[str, Uncertain]
    converged: bool
    target: float
    basis: Basis
    source: str
    factors: Factors = field(default_factory=Factors)
    notes: Sequence[str] = ()
    spread_j: float | None = None
    """What repetitions alone leave unknown of the joules a call: two rows of one sensor share the rest of the error."""
    level_error: float = 0.0
    """Relative 90% half-width of the sensor's level: in every ± of joules and watts, and not in `converged`."""

    def _amount(self, unit: str) -> float | None:
        return self.work[unit].amount if unit in self.work else None

    @property
    def tflops(self) -> Uncertain | None:
        """10^12 floating-point operations a second."""
        flops = self._amount("FLOP")
        return None if flops is None else self.seconds_per_call.inverse(flops * 1e-12)

    @property
    def tflops_per_w(self) -> Uncertain | None:
        """TFLOPS per watt, which is 10^12 operations per joule."""
        flops = self._amount("FLOP")
        return None if flops is None else self.joules_per_call.inverse(flops * 1e-12)

    def per_joule(self, unit: str) -> Uncertain | None:
        """Work of a unit ("sample", "token", your own) per joule; None if the benchmark was not told of it."""
        amount = self._amount(unit)
        return None if amount is None else self.joules_per_call.inverse(amount)

    @property
    def samples_per_j(self) -> Uncertain | None:
        """Samples per joule."""
        return self.per_joule("sample")

    @property
    def tokens_per_j(self) -> Uncertain | None:
        """Tokens per joule."""
        return self.per_joule("token")

    @property
    def kwh_per_call(self) -> Uncertain:
        """Kilowatt-hours of one call."""
        return self.joules_per_call.times(1 / J_PER_KWH)

    @property
    def node_hours_per_call(self) -> Uncertain:
        """Node-hours of one call."""
        return self.seconds_per_call.times(self.factors.nodes / 3600.0)

    @property
    def gco2e_per_call(self) -> Uncertain | None:
        """Grams of CO2 equivalent of one call; None without the grid's factor."""
        factor = self.factors.gco2e_per_kwh
        return None if factor is None else self.kwh_per_call.times(factor)

    @property
    def cost_per_call(self) -> Uncertain | None:
        """Price of the energy of one call; None without a price."""
        price = self.factors.price_per_kwh
        return None if price is None else self.kwh_per_call.times(price)

    def measures(self) -> dict[str, Uncertain]:
        """Every figure that is known, by name; kWh, node-hours, CO2 and cost when any factor was given."""
        found: dict[str, Uncertain | None] = {
            "power_w": self.power_w,
            "joules_per_call": self.joules_per_call,
            "seconds_per_call": self.seconds_per_call,
            "tflops": self.tflops,
            "tflops_per_w": self.tflops_per_w,
            **{f"{unit}_per_j": self.per_joule(unit) for unit in self.work if unit != "FLOP"},
            "kwh_per_call": self.kwh_per_call if self.factors.given else None,
            "node_hours_per_call": self.node_hours_per_call if self.factors.given else None,
            "gco2e_per_call": self.gco2e_per_call,
            "cost_per_call": self.cost_per_call,
        }
        return {k: v for k, v in found.items() if v is not None}

    def to_row(self) -> dict[str, Any]:
        """Flat, for a table: each measure and its `_error`."""
        row: dict[str, Any] = {"name": self.name, "calls": self.calls}
        for key, value in self.measures().items():
            row[key], row[f"{key}_error"] = value.value, value.error
        return {
            **row, "utilization_pct": self.utilization_pct, "converged": self.converged, "basis": self.basis,
            "source": self.source,
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Nested, for JSON."""
        return {
            **self.to_row(),
            "target": self.target,
            "level_error": self.level_error,
            "by_domain": {k: {"joules_per_call": v.value, "error": v.error} for k, v in self.by_domain.items()},
            "notes": list(self.notes),
        }
