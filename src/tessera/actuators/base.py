"""What every actuator is: one GPU's power limit and clocks, read and set. That they are put back is `hold`'s part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..errors import ActuatorError


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLimit:
    """A board's power limit: what holds now, what it was shipped with, and what may be set."""

    now_w: float
    default_w: float
    min_w: float
    max_w: float

    def check(self, gpu: str, cap_w: float) -> None:
        """Raise ActuatorError for a cap the board cannot be set to."""
        if not self.min_w <= cap_w <= self.max_w:  # also NaN
            raise ActuatorError(
                f"cap_w={cap_w:g} cannot be set on {gpu}",
                why=f"its driver takes {self.min_w:g} W to {self.max_w:g} W",
                fix="a cap within that; a lower one only pacing can hold (cap_policy='token_bucket')",
            )


def check_clocks(gpu: str, supported_mhz: tuple[int, ...], low_mhz: int, high_mhz: int) -> None:
    """Raise ActuatorError for clocks the board does not have."""
    # A driver that does not list its clocks will say itself what it does not have.
    lowest, highest = min(supported_mhz, default=1), max(supported_mhz, default=high_mhz)
    if not lowest <= low_mhz <= high_mhz <= highest:
        raise ActuatorError(
            f"clocks of {low_mhz} to {high_mhz} MHz cannot be set on {gpu}",
            why=f"it has {lowest} to {highest} MHz",
            fix=f"low <= high, both within {lowest}..{highest}",
        )


@runtime_checkable
class Actuator(Protocol):
    """One GPU that may be controlled. Every method raises ActuatorError, or ActuatorPermission where that is why."""

    @property
    def gpu(self) -> str:
        """Its name on this machine: "gpu0", as the sensors call it."""
        ...

    @property
    def vendor(self) -> str:
        """Whose library it needs: "nvidia" or "amd"."""
        ...

    @property
    def uuid(self) -> str:
        """What it is called by whoever numbers the GPUs otherwise."""
        ...

    def power_limit(self) -> PowerLimit:
        """Read the limit and its range."""
        ...

    def set_power_limit_w(self, limit_w: float) -> None:
        """Set the limit of the board."""
        ...

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """The SM clocks there are, highest first; empty where the driver lists none."""
        ...

    def locked_clocks_mhz(self) -> tuple[int, int] | None:
        """The range the clocks are locked to; None: not locked, or the driver cannot tell."""
        ...

    def lock_clocks_mhz(self, low_mhz: int, high_mhz: int) -> None:
        """Keep the SM clock within a range."""
        ...

    def reset_clocks(self) -> None:
        """Give the clocks back to the driver. A board that cannot lock them has nothing to give back: no error."""
        ...

    def close(self) -> None:
        """Release the library."""
        ...
