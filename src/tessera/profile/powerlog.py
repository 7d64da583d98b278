"""Reads power logs: our own CSV, and those of the vendors' tools (`smi_log`).

A log has watts and times, but not how its sensor lags and smears, which decides to which kernels a sample belongs. That
is inferred: NVML's ring is recognised by its spacing of 20 ms.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import RecordingError
from ..joules import DomainSamples, Floats, Ints
from ..schema import Basis, Domain, Hold
from ..sensors._nvml_power import (
    OTHER_LAG_ERROR_S,
    RING_BLUR_S,
    RING_GAIN_ERROR,
    RING_LAG_S,
    RING_NOISE,
    RING_RESOLUTION_S,
)
from ..sensors.modelled import IDLE_PART, MODEL_ERROR, ModelledSensor
from ..trace import PowerTrace, open_csv, read_csv
from ..units import format_power
from .smi_log import Samples, find_tool, read_smi_log

_RING_SPACING_S = (0.012, 0.030)
# A longer time without a sample is a hole, since the logger stood still. NVML's ring has spacings of up to 46 ms.
_HOLE_S, _HOLE_SPACINGS = 0.25, 6.0
_OTHER_NAMES = "timestamp (seconds since 1970, or date and time), power_w and index (of the GPU)"


def read_power(path: str | Path, *, of_nvidia: bool = True) -> PowerTrace:
    """Read a power log as a trace in epoch time: columns epoch_us, domain, watts, or those of a vendor's tool.

    `of_nvidia` False: the chip is known not to be NVIDIA's, so no spacing is taken for NVML's ring.
    """
    source = Path(path)
    with open_csv(source) as reader:
        head = [c.strip() for c in next(reader, [])]
    tool = None if "epoch_us" in head else find_tool(head)
    samples = _own(source, of_nvidia) if tool is None else read_smi_log(source, head, tool)
    if not samples:
        raise RecordingError(f"{source} contains no power sample", fix="record it while the program runs")
    columns = {name: _column(*logged) for name, logged in samples.items()}
    if not any(c.known.any() for c in columns.values()):
        _refuse_impossible(source, samples)
    times = np.concatenate([c.times_ns for c in columns.values()])
    return PowerTrace(columns, start_ns=int(times.min()), end_ns=int(times.max()))


def _refuse_impossible(source: Path, samples: Mapping[str, Samples]) -> None:
    """Raise an error that shows the samples if all were refused; do nothing if there was no number."""
    for domain, _, watts in samples.values():
        numbers = watts[~np.isnan(watts)]
        if len(numbers):
            most = f" to {format_power(domain.max_w, 3)}" if math.isfinite(domain.max_w) else " or more"
            raise RecordingError(
                f"{source} has no possible power: {domain.name} draws {numbers.min():.6g} W to {numbers.max():.6g} W",
                why=f"all {len(numbers)} samples were refused: a board draws 0 W{most}",
                fix="check the unit of the power column: it must be W",
            )


def _own(source: Path, of_nvidia: bool) -> dict[str, Samples]:
    samples, logged = {}, read_csv(source, other_names=_OTHER_NAMES)
    for name, (logged_ns, logged_w, basis) in logged.items():
        once = np.append(True, np.diff(logged_ns) > 0)  # a line that was written twice is one sample
        times_ns, watts = logged_ns[once], logged_w[once]
        domain = _domain(name, times_ns, basis, of_nvidia)
        if name + IDLE_PART in logged:  # only the power of a program's own CPU time has this part
            domain = dataclasses.replace(domain, scope="process")
        samples[name] = (domain, times_ns, watts)
    return samples


def _column(domain: Domain, times_ns: Ints, watts: Floats) -> DomainSamples:
    """Return the samples with their holes marked by NaN: the power is unknown if nothing was logged for long."""
    hole_ns = max(_HOLE_S, _HOLE_SPACINGS * domain.resolution_s) * 1e9
    after = np.flatnonzero(np.diff(times_ns) > hole_ns) + 1
    # NaN says that the power since the sample before is unknown. The sample after it covers as long as any other.
    times_ns = np.insert(times_ns, after, times_ns[after] - max(round(domain.resolution_s * 1e9), 1))
    return DomainSamples.of(domain, times_ns, np.insert(watts, after, np.nan))


def _domain(name: str, times_ns: Ints, basis: Basis | None, of_nvidia: bool) -> Domain:
    """Infer a domain from its name and the spacing of its samples."""
    spacing_s = float(np.median(np.diff(times_ns))) * 1e-9 if len(times_ns) > 1 else 0.0
    stated_basis = basis or "measured"
    if stated_basis == "modelled":  # a recording divides its samples at regions
        spacing_s = max(spacing_s, ModelledSensor.period_s)
    counted = "." not in name
    low, high = _RING_SPACING_S
    if of_nvidia and name.startswith("gpu") and low <= spacing_s <= high and stated_basis == "measured":
        return Domain(
            name=name, source="csv", resolution_s=RING_RESOLUTION_S, lag_s=RING_LAG_S, blur_s=RING_BLUR_S,
            lag_error_s=OTHER_LAG_ERROR_S, sample_noise=RING_NOISE, gain_error=RING_GAIN_ERROR, counted=counted,
            taken_as="nvml-samples", note="taken as NVML's ring: 20 ms apart",
        )  # fmt: skip
    if name.startswith(("cpu", "dram", "package")):  # differences of an energy counter
        return Domain(
            name=name, source="csv", resolution_s=spacing_s, hold=Hold.MEAN, counted=counted, basis=stated_basis,
            gain_error=MODEL_ERROR if stated_basis == "modelled" else 0.0,
        )  # fmt: skip
    return Domain(
        name=name, source="csv", resolution_s=spacing_s, lag_s=0.5 * spacing_s, blur_s=spacing_s / math.sqrt(12),
        counted=counted, basis=stated_basis, gain_error=MODEL_ERROR if stated_basis == "modelled" else 0.02,
        note="a sensor that is not known: each sample is taken as the mean since the one before",
    )  # fmt: skip
