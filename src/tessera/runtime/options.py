"""What `@schedule` was asked for: parsed and checked when made, frozen after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import ArgumentError, did_you_mean
from ..units import ScopedPower, parse_fraction, parse_scoped_power, parse_temperature
from . import dvfs

POLICIES = ("latency", "throughput_per_watt", "energy", "peak_power")
CAP_POLICIES = ("token_bucket", "driver")
POINTS = ("auto", "op", "call")
TOKENS = ("joules", "launches", "warps", "cp_async")
# A window long enough for ten samples of an H200 (20 ms), and the one the project's goals are stated for.
CAP_WINDOW_MS = 200.0


def _one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        near = did_you_mean(value, known) if isinstance(value, str) else ""
        raise ArgumentError(f"{name}={value!r} is not known{near}", fix=f"one of {', '.join(map(repr, known))}")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high):
        raise ArgumentError(f"{name}={value!r} must be a whole number from {low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of `schedule`; see there. Powers, fractions and temperatures may be text with a unit."""

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
    points: str = "auto"
    allow_control: bool | None = None
    error_tolerance: float | None = None
    budget_s: float = 120.0
    search: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    per: str | None = None
    slow_compile: bool = False
    compile_modes: bool = True
    cache: bool = True
    dry_run: bool = False

    def __post_init__(self) -> None:
        self._check_cap()
        self._check_tokens()
        _one_of("policy", self.policy, POLICIES)
        _one_of("points", self.points, POINTS)
        # Triton pipelines up to a handful of tiles, and a block has at most 32 warps: 8 groups of four.
        _whole("cp_async_depth", self.cp_async_depth, 1, 16)
        _whole("warp_mma_concurrency", self.warp_mma_concurrency, 1, 8)
        self._check_goals()
        dvfs.parse(self.dvfs)  # refused now, not at the first call

    def _check_cap(self) -> None:
        cap = self.power_cap
        if cap is not None and not isinstance(cap, ScopedPower):
            cap = parse_scoped_power(cap)
            object.__setattr__(self, "power_cap", cap)
        if cap is not None and cap.scope not in ("gpu", "node"):
            raise ArgumentError(
                f"power_cap={str(cap)!r} is for a {cap.scope}", why="a schedule holds a GPU or the processes of a node",
                fix=f'"{cap.power_w:g}W" per GPU or "node:{cap.power_w:g}W"',
            )  # fmt: skip
        if cap is not None and cap.power_w <= 0:
            raise ArgumentError(f"power_cap={str(cap)!r} must be above 0 W")
        _one_of("cap_policy", self.cap_policy, CAP_POLICIES)
        if self.cap_policy and cap is None:
            raise ArgumentError(f"cap_policy={self.cap_policy!r} without a power_cap", fix='power_cap="275W"')
        if self.cap_policy == "driver" and cap is not None and cap.scope == "node":
            raise ArgumentError(
                "the driver limits GPUs, not a node", fix='cap_policy="token_bucket", or a power_cap per GPU'
            )
        window: object = self.cap_window_ms  # as it was given: nothing but these checks makes it a number
        if not isinstance(window, (int, float)) or isinstance(window, bool) or not 1.0 <= window <= 60_000.0:
            raise ArgumentError(f"cap_window_ms={window!r} must be a number of milliseconds from 1 to 60000")

    def _check_tokens(self) -> None:
        _one_of("tokens", self.tokens, TOKENS)
        if self.tokens is None:
            raise ArgumentError("tokens=None is not known", fix=f"one of {', '.join(map(repr, TOKENS))}")
        if self.tokens == "joules":
            return
        given = f"tokens={self.tokens!r}"
        if self.cap is None:
            raise ArgumentError(f"{given} without a power_cap", fix='power_cap="275W"')
        if self.cap_policy == "driver":
            raise ArgumentError(
                f'{given} is for waits, and cap_policy="driver" makes none', fix="leave one of them out"
            )
        if self.cap.scope == "node":
            raise ArgumentError(
                f"{given} with power_cap={str(self.cap)!r}",
                why="a node's processes share one bucket, and what they have in common is joules",
                fix=f'power_cap="{self.cap.power_w:g}W" per GPU, or tokens="joules"',
            )
        if self.points != "auto":
            raise ArgumentError(
                f"points={self.points!r} with {given}", why="waits then come after launches of Tessera's own kernels",
                fix="leave points out",
            )  # fmt: skip

    def _check_goals(self) -> None:
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
                    f"{name}= bounds what a policy may choose, and there is no policy",
                    fix=f"policy={POLICIES[1]!r}, or leave {name} out",
                )
        if not self.budget_s > 0:
            raise ArgumentError(f"budget_s={self.budget_s!r} must be above 0 seconds")

    @classmethod
    def refuse_unknown(cls, names: Iterable[str]) -> None:
        """Answer a keyword that is no option with the nearest one."""
        known = [f.name for f in fields(cls)]
        for name in names:
            if name not in known:
                raise ArgumentError(
                    f"schedule has no option {name!r}{did_you_mean(name, known)}", fix=f"options: {', '.join(known)}"
                )

    def wish(self) -> dict[str, Any]:
        """What the tuner is asked for."""
        names = ("policy", "max_slowdown", "max_temp_c", "error_tolerance", "budget_s", "search", "per",
                 "slow_compile", "compile_modes", "cache")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def cap(self) -> ScopedPower | None:
        """The cap, parsed."""
        return self.power_cap if isinstance(self.power_cap, ScopedPower) else None

    @property
    def bucket(self) -> bool:
        """Whether work is paced: a cap that is not left to the driver."""
        return self.cap is not None and self.cap_policy != "driver"

    @property
    def hints(self) -> bool:
        """Whether our own kernels are asked for something."""
        return self.cp_async_depth is not None or self.warp_mma_concurrency is not None

    @property
    def controls(self) -> bool:
        """Whether limits or clocks of the hardware are asked for."""
        return self.cap_policy == "driver" or self.dvfs is not None
