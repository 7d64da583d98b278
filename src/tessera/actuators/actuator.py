"""Reads and sets one GPU's power limit and clocks, and finds that GPU by its name ("gpu0", a UUID, 0).

An actuator only reads and sets. `hold` restores.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..errors import ActuatorError, did_you_mean

_NAME = re.compile(r"(?:gpu|cuda:)?(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLimit:
    """A board's power limit: the current value, the factory default, and the range the driver accepts."""

    now_w: float
    default_w: float
    min_w: float
    max_w: float

    def check(self, gpu: str, cap_w: float) -> None:
        """Raise ActuatorError if a cap is outside the range."""
        if not self.min_w <= cap_w <= self.max_w:  # also NaN
            raise ActuatorError(
                f"cap_w={cap_w:g} cannot be set on {gpu}",
                why=f"its driver accepts {self.min_w:g} W to {self.max_w:g} W",
                fix="use a cap in that range; only pacing can hold a lower one (cap_policy='token_bucket')",
            )


def check_clocks(gpu: str, supported_mhz: tuple[int, ...], low_mhz: int, high_mhz: int) -> None:
    """Raise ActuatorError if the board does not have these clocks."""
    # If the driver does not list its clocks, it refuses a wrong one itself.
    lowest, highest = min(supported_mhz, default=1), max(supported_mhz, default=high_mhz)
    if not lowest <= low_mhz <= high_mhz <= highest:
        raise ActuatorError(
            f"clocks of {low_mhz} to {high_mhz} MHz cannot be set on {gpu}",
            why=f"it supports {lowest} to {highest} MHz",
            fix=f"low <= high, both within {lowest}..{highest}",
        )


@runtime_checkable
class Actuator(Protocol):
    """One GPU that can be controlled. Methods raise ActuatorError, or ActuatorPermission if rights are missing."""

    gpu: str
    """Its name on this machine, the same as the sensors use: "gpu0"."""
    vendor: str
    """The vendor whose library it needs: "nvidia" or "amd"."""
    uuid: str
    """Its UUID, which does not depend on how GPUs are numbered."""
    node: Path | None
    """Its device node, which containers that share the GPU can lock; None if it has none."""

    def power_limit(self) -> PowerLimit:
        """Read the limit and its range."""

    def set_power_limit_w(self, limit_w: float) -> None:
        """Set the board's limit."""

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Return the supported SM clocks, highest first; empty if the driver lists none."""

    def locked_clocks_mhz(self) -> tuple[int, int] | None:
        """Return the range that the clocks are locked to; None if not locked, or if the driver cannot tell."""

    def lock_clocks_mhz(self, low_mhz: int, high_mhz: int) -> None:
        """Keep the SM clock within a range."""

    def reset_clocks(self) -> None:
        """Unlock the clocks. Does nothing on a board that cannot lock them."""

    def close(self) -> None:
        """Release the library."""


def list_gpus() -> dict[str, str]:
    """Return the GPUs this process may control: UUIDs by name, in the order of CUDA's (or HIP's) device numbers.

    Names use the machine's numbering, like the sensors ("gpu3" may be cuda:0). Boards that are divided into MIG slices
    are left out, because a board's limit would affect the other tenants.
    """
    return {name: uuid for name, (uuid, _) in _list_boards().items()}


def find_gpu(gpu: str | int) -> Actuator:
    """Return the actuator of a GPU: "gpu0" (the machine's number, as the sensors use it), 0, or its UUID."""
    boards = _list_boards()
    text = str(gpu)
    match = _NAME.match(text)
    name = f"gpu{match[1]}" if match else next((n for n, (uuid, _) in boards.items() if uuid == text), text)
    if name not in boards:
        raise ActuatorError(
            f"there is no GPU {text!r} to control{did_you_mean(name, boards)}",
            why=f"this process may use {', '.join(boards) or 'none'} (boards split into MIG slices are left out)",
            fix="use a name that `tessera doctor` shows; check CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES",
        )
    uuid, vendor = boards[name]
    return open_uuid(uuid, vendor, name)


def open_uuid(uuid: str, vendor: str, gpu: str | None = None) -> Actuator:
    """Return the actuator of a GPU by its UUID, even if the GPU is not visible to this process."""
    if vendor == "amd":
        from .amd import AmdActuator

        return AmdActuator(uuid, gpu=gpu)
    from .nvml import NvmlActuator

    return NvmlActuator(uuid, gpu=gpu)


def _list_boards() -> dict[str, tuple[str, str]]:
    """Return (UUID, vendor) by name. Raises ActuatorError if neither vendor's library works."""
    from . import amd, nvml

    try:
        visible = nvml.list_boards()
    except ActuatorError as no_nvml:
        try:
            return {name: (uuid, "amd") for name, uuid in amd.list_boards().items()}
        except ActuatorError as no_amd:
            raise ActuatorError(
                "no GPU here can be controlled", why=f"{no_nvml.what}; {no_amd.what}", fix=no_nvml.fix
            ) from no_nvml
    whole = [v.board for v in visible if not (v.mig or v.board.mig_uuids)]
    return {f"gpu{board.index}": (board.uuid, "nvidia") for board in whole}
