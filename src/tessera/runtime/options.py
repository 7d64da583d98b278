"""The options of `schedule`: parsed and checked when they are made, frozen afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError, check_choice, check_positive, is_integer, is_number
from ..units import (
    ScopedPower,
    parse_fraction,
    parse_power,
    parse_power_rate,
    parse_scoped_power,
    parse_temperature,
)
from .dvfs import parse_dvfs
from .node_lease import find_leased_power

POLICIES = ("latency", "throughput_per_watt", "energy", "peak_power", "temperature")
CAP_POLICIES = ("token_bucket", "driver")
TOKENS = ("joules", "launches", "warps", "cp_async")
# Milliseconds: long enough for ten samples of an H200 (20 ms).
CAP_WINDOW_MS = 200.0


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if value is not None and not (is_integer(value) and low <= value <= high):
        raise ArgumentError(f"{name}={value!r} must be a whole number from {low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """The arguments of `schedule`, which documents them. Powers, fractions and temperatures may be text with a unit."""

    power_cap: ScopedPower | str | float | None = None
    policy: str | None = None
    dvfs: str | Sequence[str] | None = None
    cap_policy: str | None = None
    cap_window_ms: float = CAP_WINDOW_MS
    max_slowdown: float | str | None = None
    max_temp_c: float | str | None = None
    cp_async_depth: int | None = None
    warp_mma_concurrency: int | None = None
    tokens: str = "joules"
    shaper: Any = None
    power_floor: str | float | None = None
    max_ramp: str | float | None = None
    allow_control: bool | None = None
    error_tolerance: float | None = None
    budget_s: float = 120.0
    search: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    per: str | None = None
    compile_modes: bool = True
    cache: bool = True
    dry_run: bool = False

    def __post_init__(self) -> None:
        self._check_cap()
        self._check_tokens()
        if self.policy is not None:
            check_choice("policy", self.policy, POLICIES)
        # Triton pipelines up to a handful of tiles, and a block has at most 32 warps: 8 groups of four.
        _check_integer("cp_async_depth", self.cp_async_depth, 1, 16)
        _check_integer("warp_mma_concurrency", self.warp_mma_concurrency, 1, 8)
        self._check_tuning()
        self._check_shaping()
        parse_dvfs(self.dvfs)  # raises now, not at the first call

    def _check_cap(self) -> None:
        cap = self.power_cap
        if cap is not None and not isinstance(cap, ScopedPower):
            cap = find_leased_power() if cap == "governor" else parse_scoped_power(cap)
            object.__setattr__(self, "power_cap", cap)
        if cap is not None and cap.scope not in ("gpu", "node"):
            raise ArgumentError(
                f"power_cap={str(cap)!r} is for a {cap.scope}, and a schedule sees one node only",
                why=f"a {cap.scope}'s watts are shared out among its nodes by a power governor",
                fix='power_cap="governor" under `tessera governor`, or this node\'s share as "node:..."',
            )
        if cap is not None and cap.power_w <= 0:
            raise ArgumentError(f"power_cap={str(cap)!r} must be above 0 W", fix='power_cap="275W"')
        if self.cap_policy is not None:
            check_choice("cap_policy", self.cap_policy, CAP_POLICIES)
            if cap is None:
                raise ArgumentError(f"cap_policy={self.cap_policy!r} without a power_cap", fix='power_cap="275W"')
        if self.cap_policy == "driver" and cap is not None and cap.scope == "node":
            raise ArgumentError(
                "the driver limits GPUs, not a node", fix='cap_policy="token_bucket", or a power_cap per GPU'
            )
        window = self.cap_window_ms
        if not (is_number(window) and 1.0 <= window <= 60_000.0):
            raise ArgumentError(f"cap_window_ms={window!r} must be a number of milliseconds from 1 to 60000")

    def _check_tokens(self) -> None:
        check_choice("tokens", self.tokens, TOKENS)
        if self.tokens == "joules":
            return
        option = f"tokens={self.tokens!r}"
        if self.cap is None:
            raise ArgumentError(f"{option} without a power_cap", fix='power_cap="275W"')
        if self.cap_policy == "driver":
            raise ArgumentError(
                f'{option} needs waits, and cap_policy="driver" makes none', fix="leave one of them out"
            )
        if self.cap.scope == "node":
            raise ArgumentError(
                f"{option} with power_cap={str(self.cap)!r}",
                why="the processes of a node share one bucket, which counts joules",
                fix=f'power_cap="{self.cap.power_w:g}W" per GPU, or tokens="joules"',
            )

    def _check_tuning(self) -> None:
        if self.max_slowdown is not None:
            slowdown = parse_fraction(self.max_slowdown)
            if slowdown < 0:
                raise ArgumentError(f"max_slowdown={self.max_slowdown!r} must not be negative", fix='"5%" or 0.05')
            object.__setattr__(self, "max_slowdown", slowdown)
        if self.max_temp_c is not None:
            object.__setattr__(self, "max_temp_c", parse_temperature(self.max_temp_c))
        for name in ("max_slowdown", "max_temp_c", "error_tolerance"):
            if getattr(self, name) is not None and self.policy is None:
                raise ArgumentError(
                    f"{name}= limits what a policy may choose, but there is no policy",
                    fix=f"policy={POLICIES[1]!r}, or leave {name} out",
                )
        if self.search and self.policy is None:
            raise ArgumentError(
                "search= has values for a policy to choose from, but there is no policy", fix=f"policy={POLICIES[1]!r}"
            )
        tolerance = self.error_tolerance
        if tolerance is not None and not (is_number(tolerance) and 0 < tolerance < math.inf):
            raise ArgumentError(
                f"error_tolerance={tolerance!r} is not a bound",
                why="it is the error of a result relative to it: 0.01 is one percent",
                fix="a number above 0, such as error_tolerance=1e-2",
            )
        check_positive("budget_s", self.budget_s, fix="seconds of search: budget_s=120")
        if self.per is not None and self.per not in self.search:
            raise ArgumentError(
                f"per={self.per!r} is not among the arguments in search=", fix=f'search={{"{self.per}": [8, 16]}}'
            )

    def _check_shaping(self) -> None:
        for name, parse in (("power_floor", parse_power), ("max_ramp", parse_power_rate)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse(getattr(self, name)))
                if not getattr(self, name) > 0:
                    raise ArgumentError(f"{name} must be above 0", fix='power_floor="400W", max_ramp="200W/s"')
        cap, floor_w = self.cap, self.floor_w
        if floor_w is not None and cap is not None and cap.scope == "gpu" and floor_w >= cap.power_w:
            raise ArgumentError(
                f"power_floor={floor_w:g} W is not below power_cap={cap.power_w:g} W",
                why="ballast would draw what the cap forbids",
                fix="a lower power_floor or a higher power_cap",
            )

    @property
    def floor_w(self) -> float | None:
        """Return the parsed floor."""
        return None if self.power_floor is None else float(self.power_floor)

    @property
    def ramp_w_per_s(self) -> float | None:
        """Return the parsed ramp."""
        return None if self.max_ramp is None else float(self.max_ramp)

    @property
    def has_ballast(self) -> bool:
        """Return whether a floor or a ramp is asked for."""
        return self.power_floor is not None or self.max_ramp is not None

    @property
    def cap(self) -> ScopedPower | None:
        """Return the parsed cap."""
        return self.power_cap if isinstance(self.power_cap, ScopedPower) else None

    @property
    def paces(self) -> bool:
        """Return whether waits hold the cap: there is a cap, and the driver does not hold it."""
        return self.cap is not None and self.cap_policy != "driver"

    @property
    def driver_cap_w(self) -> float | None:
        """Return the cap for the driver, in watts."""
        return self.cap.power_w if self.cap is not None and self.cap_policy == "driver" else None

    @property
    def hints(self) -> dict[str, Any]:
        """Return the hints for Tessera's own kernels."""
        hints = {"cp_async_depth": self.cp_async_depth, "warp_mma_concurrency": self.warp_mma_concurrency}
        return {name: value for name, value in hints.items() if value is not None}

    @property
    def controls(self) -> bool:
        """Return whether limits or clocks of the hardware are asked for."""
        return self.cap_policy == "driver" or self.dvfs is not None

    @property
    def limits(self) -> bool:
        """Return whether anything is done around a call."""
        return self.cap is not None or bool(self.hints) or self.controls or self.dry_run or self.shapes

    @property
    def shapes(self) -> bool:
        """Return whether a shaper, a floor or a ramp is asked for."""
        return self.shaper is not None or self.has_ballast
