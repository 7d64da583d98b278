"""What a Blackwell GPU's driver can do about power: smoothing (floor, ramps) and workload power profiles.

Power smoothing has presets of four parameters; one preset is active. We change the last preset and make it the active
one; the journal keeps what was before. NVML documents both for Blackwell or newer, for root only
(docs.nvidia.com/deploy/nvml-api, Power Smoothing Information, Power Profile Information). Not tested on hardware.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..errors import ActuatorError, ArgumentError, check_choice

# NVML_POWER_PROFILE_* of nvidia-ml-py 13.615, by number.
POWER_PROFILES = (
    "max_p", "max_q", "compute", "memory_bound", "network", "balanced", "llm_inference", "llm_training", "rbm",
    "dcpcie", "hmma_sparse", "hmma_dense", "sync_balanced", "hpc", "mig", "max_q_1", "network_bound",
    "high_throughput_inference", "medium_throughput_inference", "low_latency_inference", "training", "inference",
    "max_q_2", "max_q_3", "low_priority_background",
)  # fmt: skip
# The driver returns ramps in milliwatts per second, and may round what it was given by this share.
_ROUNDING = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSmoothing:
    """What is asked of the driver; None keeps the preset's value of a parameter.

    `floor_percent` is of the GPU's highest power, ramps are in watts per second, `hysteresis_ms` is how long power
    stays up before it ramps down.
    """

    floor_percent: float | None = None
    ramp_up_w_per_s: float | None = None
    ramp_down_w_per_s: float | None = None
    hysteresis_ms: float | None = None

    def __post_init__(self) -> None:
        least_of = {"floor_percent": 0.0, "ramp_up_w_per_s": 1e-3, "ramp_down_w_per_s": 1e-3, "hysteresis_ms": 0.0}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise ArgumentError(f"{name}={value!r} is not possible", fix=f"at least {least:g}")

    def __str__(self) -> str:
        parts = [] if self.floor_percent is None else [f"a floor of {self.floor_percent:g}%"]
        for name, value in (("up", self.ramp_up_w_per_s), ("down", self.ramp_down_w_per_s)):
            parts += [] if value is None else [f"ramps {name} of {value:g} W/s"]
        parts += [] if self.hysteresis_ms is None else [f"{self.hysteresis_ms:g} ms before them"]
        return ", ".join(parts) or "the preset as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothingState:
    """What is set on a GPU: whether it smooths, the active preset, and the parameters of preset `profile`."""

    enabled: bool
    active: int
    profile: int
    floor_percent: float
    ramp_up_w_per_s: float
    ramp_down_w_per_s: float
    hysteresis_ms: float

    def is_near(self, other: SmoothingState) -> bool:
        """Return whether another state is the same, even if the driver rounded it."""
        pairs = [(getattr(self, n), getattr(other, n)) for n in PARAMETERS]
        same = (self.enabled, self.active, self.profile) == (other.enabled, other.active, other.profile)
        return same and all(math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=_ROUNDING) for a, b in pairs)


PARAMETERS = ("floor_percent", "ramp_up_w_per_s", "ramp_down_w_per_s", "hysteresis_ms")
"""The parameters in NVML's order: a parameter's place is its paramId."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothingLimits:
    """What the driver accepts, and from whom: `privilege` is its own number for this process's rights."""

    min_floor_percent: float
    max_floor_percent: float
    presets: int
    privilege: int | None

    def check(self, gpu: str, smoothing: PowerSmoothing) -> None:
        """Raise ActuatorError if the floor is outside the range."""
        floor = smoothing.floor_percent
        if floor is not None and not self.min_floor_percent <= floor <= self.max_floor_percent:
            raise ActuatorError(
                f"a floor of {floor:g}% cannot be set on {gpu}",
                why=f"its driver accepts {self.min_floor_percent:g}% to {self.max_floor_percent:g}%",
                fix="use a floor in that range",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothingChange:
    """A changed preset: the GPU was `was` before us, and we set `ours`; not `done` while that is under way."""

    was: SmoothingState
    ours: SmoothingState
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChange:
    """The workload power profiles that we requested, and that nobody had requested before."""

    added: tuple[int, ...]


@runtime_checkable
class Smoother(Protocol):
    """A GPU whose driver can smooth its power and knows workload power profiles."""

    def smoothing_limits(self) -> SmoothingLimits:
        """Return what the driver accepts."""

    def smoothing_state(self, profile: int) -> SmoothingState:
        """Return what is set, with the parameters of a preset."""

    def set_smoothing(self, state: SmoothingState) -> None:
        """Set everything in `state`."""

    def power_profiles(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the workload power profiles of this GPU, and those that are requested now."""

    def request_profiles(self, profiles: Sequence[int]) -> None:
        """Request these profiles, beside those that are already requested."""

    def clear_profiles(self, profiles: Sequence[int]) -> None:
        """Take back the request for these profiles."""


def find_profiles(names: str | Iterable[str]) -> tuple[int, ...]:
    """Return the numbers of workload power profiles by their names, such as "llm_training"."""
    found = []
    for name in [names] if isinstance(names, str) else names:
        check_choice("workload power profile", name, POWER_PROFILES)
        found.append(POWER_PROFILES.index(name))
    if not found:
        raise ArgumentError("no workload power profile is named", fix='"llm_training"')
    return tuple(sorted(set(found)))


def describe_profiles(profiles: Sequence[int]) -> str:
    """Describe profiles in words."""
    return ", ".join(POWER_PROFILES[p] if p < len(POWER_PROFILES) else str(p) for p in profiles)
