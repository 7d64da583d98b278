"""What was fitted on chips other than the H200, and which fit a chip gets: its own, a relative's, or the shared one.

`data/CHIP_kernels.json` has constants of the formulas in gemm.py, attention.py and moe.py for one chip, a small
correction by near shapes, and 90% half-widths from shapes that were not fitted. They come from public timings of vLLM's
kernels: short loops at full clock. `data/other_kernels.json` was fitted on all those chips together, and serves NVIDIA
GPUs of which there are no timings; its half-widths are those of chips that were left out. A chip with the compute
capability of a fitted one gets that one's constants, but for two: how a launch was timed, and the share of the peak
that its watts leave. Of the H100 and the H200, a relative takes the one whose bandwidth is nearer.
`benchmarks/fit/fit_chips.py` writes all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..hardware import lookup
from ..joules import Floats
from .kernel_time import CALIBRATED, Chip, LearnedCorrection, chip, load_fit, widen_error
from .kriging import Kriging

RELATIVES = {"sm80": "a100", "sm90": "h100", "sm100": "b200", "sm103": "b200", "sm120": "rtx-pro-6000"}
"""By compute capability, the chip with timings that runs the same kernels."""

_SHARED = "other"


@dataclass(frozen=True, slots=True)
class KernelFit:
    """Constants of one kernel family; `chip` is the chip they were fitted on, `own` whether it is this one."""

    constants: Mapping[str, Any]
    correction: Kriging | None
    half_widths: Mapping[str, Any]
    chip: str
    own: bool

    def relative_error(self, of: Chip, seconds: float, *, native: bool) -> float:
        """The relative 90% half-width by predicted length."""
        return widen_error(self.half_widths, of, native, seconds)

    def correct(self, features: Floats) -> LearnedCorrection | None:
        """The correction of one kernel, from its features; None where none was learned."""
        return None if self.correction is None else LearnedCorrection(self.correction(features)[0], self.provenance)

    @property
    def provenance(self) -> str:
        """Where the constants come from, in words."""
        if self.own:
            return f"fitted on public timings of the {self.chip}, full clock"
        if self.chip == _SHARED:
            return "constants shared by the chips with public timings, carried over by datasheet"
        return f"fitted on public timings of the {self.chip}, carried over by datasheet"


def find_fit(of: Chip, family: str, kernel: str) -> KernelFit | None:
    """The fit of a family's kernel ("bf16" of "gemm", "decode.bf16" of "attention") for a chip.

    None where the H200's constants are what is known: on the H200, its relatives, and chips of other vendors.
    """
    if not of.nvidia or _is_measured_on_h200(of, family, kernel):
        return None
    # Chips whose matrix units are synchronous share a library (FlashAttention-2), and constants of their own for it.
    shared = [f"{family}.synchronous", family] if not of.asynchronous else [family]
    places = [(of.fitted, family), (RELATIVES.get(of.capability), family), *((_SHARED, part) for part in shared)]
    for name, part in places:
        if name is not None and (fit := _read_fit(name, part, kernel, name == of.fitted, of.architecture)) is not None:
            return fit
    return None


def _is_measured_on_h200(of: Chip, family: str, kernel: str) -> bool:
    h100, h200 = load_fit("h100_kernels.json")["chip"][2], chip(lookup(CALIBRATED)).bandwidth
    hopper = of.capability == "sm90" and of.fitted is None and of.bandwidth**2 > h100 * h200
    return hopper and (family == "attention" or (family == "gemm" and kernel in ("bf16", "fp8_block")))


@functools.cache
def _read_fit(name: str, family: str, kernel: str, own: bool, architecture: str) -> KernelFit | None:
    data: Mapping[str, Any] = load_fit(f"{name}_kernels.json").get(family, {})
    if kernel not in data.get("constants", {}):
        return None
    constants, widths = data["constants"][kernel], data["interval"]
    shared = load_fit(f"{_SHARED}_kernels.json")[family]
    if name == _SHARED:  # vLLM's host takes other ways by architecture
        constants = {**constants, **shared.get("host_floors", {}).get(architecture, {})}
    elif not own:  # as uncertain as a relative that was left out
        changes = shared["changes"][name].get(kernel, {})
        if "launch_us" in changes:  # nobody knows how it will be timed, which makes no chip slower than its relative
            changes = {**changes, "launch_us": _take_least(constants["launch_us"], changes["launch_us"])}
        constants = {**constants, **changes}
        widths = shared["relatives"]
    return KernelFit(
        constants=constants,
        correction=_read_correction(name, family),
        half_widths=widths.get(kernel) or widths["any"],
        chip=name,
        own=own,
    )


def _take_least(a: Any, b: Any) -> Any:
    return {name: min(a[name], b[name]) for name in a} if isinstance(a, Mapping) else min(a, b)


@functools.cache
def _read_correction(name: str, family: str) -> Kriging | None:
    data: Mapping[str, Any] = load_fit(f"{name}_kernels.json")[family]
    return Kriging.of(data["correction"]) if "correction" in data else None
