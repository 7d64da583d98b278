"""Seconds of kernels that move data: elementwise, copies, reductions, norms, pooling, gathers, optimizers.

Three rates bound such a kernel: bytes across device memory, bytes through the cache, and elements the SMs can issue,
which depends on what is done with each (a GELU costs more than an add) and on how many blocks there are to run it. The
constants of the calibrated H200 are in `data/h200_stream.json`; other chips use the same fractions of their bandwidth
and the same elements per SM and cycle.

An operator's family is a dotted name, from the general to the particular ("elementwise.strided.mul"). Constants are
looked up from the right, so that an operator nobody measured runs at the rates of its kind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log2
from typing import Any

import numpy as np

from ..joules import Floats
from .kernel_time import Chip, KernelTime, Trees, find_correction, load_fit

DATA = "h200_stream.json"
ALIKE = ("foreach", "copy.im2col", "scatter.col2im", "copy.col2im")
"""Families whose operators launch one kernel several times, each on a part of the data."""


@dataclass(frozen=True, slots=True)
class DataMovement:
    """The work of a data-moving kernel.

    `family` names its constants; `elements` are those it computes on, `blocks` the independent pieces it can be cut
    into, `bytes` all it reads and writes, `hbm_bytes` those that cross device memory, `kernels` the launches. `width`
    is the length of the runs it works on: a row that is normalised or summed, elements that lie together in a copy.
    `alone_s` is the time of a part that one block, or one warp, does alone, step by step.
    """

    family: str
    elements: float
    bytes: float
    hbm_bytes: float
    blocks: float
    kernels: int = 1
    width: float = 1.0
    itemsize: float = 4.0
    alone_s: float = 0.0


def movement_time(of: Chip, work: DataMovement, unit: str = "vector.fp32") -> KernelTime:
    """The time of a data-moving kernel at the boost clock, with the correction learned on the H200 where it applies."""
    time, trees = _time_by_rates(of, work, unit), _trees()
    if trees is None:
        return time

    def features_on(chip: Chip) -> Floats:
        seconds = time.seconds if chip is of else _time_by_rates(chip, work, unit).seconds
        return features(work, constants(work.family), seconds)[None]

    correction = find_correction(of, trees, features_on)
    if correction is None:
        return time
    factor = math.exp(float(correction.log))
    return replace(time, seconds=time.seconds * factor, clock_s=time.clock_s * factor)


def _time_by_rates(of: Chip, s: DataMovement, unit: str) -> KernelTime:
    data = load_fit(DATA)
    c = constants(s.family)
    start_s = float(c["start_s"]) * (s.kernels if s.family.startswith(ALIKE) else 1) + s.alone_s
    p = data["exponent"]
    occupied = min(1.0, s.blocks / of.units)
    hbm_s = s.hbm_bytes / (c["bandwidth"] * of.bandwidth)
    cycles_hz = of.units * of.clock_hz * of.feed_factor
    cache_s = s.bytes / (data["cache_bytes_per_cycle"] * cycles_hz * c["cache"])
    issue_s = s.elements / (c["elements_per_cycle"] * cycles_hz * max(occupied, 1.0 / of.units))
    moved_s = (hbm_s**p + cache_s**p) ** (1 / p)
    if not (of.calibrated or of.same_units):
        # A stream that both slow down reaches 0.85 of the bandwidth by this sum, and 0.905 with the learned correction;
        # chips without it take the slower of both.
        moved_s = max(hbm_s, cache_s)
    whole = moved_s**p + issue_s**p
    body_s = whole ** (1 / p)
    seconds, width = start_s + body_s, float(c["relative_error"])
    memory_share = min(1.0, hbm_s**p / whole) if whole > 0 else 0.0
    return KernelTime(
        seconds=seconds,
        overhead_s=start_s,
        compute_s=issue_s,
        memory_s=moved_s,
        clock_s=body_s * (1.0 - memory_share),
        busy=occupied * body_s / seconds,
        flops=c.get("flops_per_element", 1.0) * s.elements,
        unit=unit,
        hbm_bytes=s.hbm_bytes,
        l2_bytes=s.bytes,
        relative_error=width if of.calibrated else min(0.95, (1.6 if of.nvidia else 2.5) * width),
        provenance=f"rates by family, {'fitted on' if of.calibrated else 'carried over from'} the H200",
    )


def features(s: DataMovement, c: Mapping[str, float], seconds: float) -> Floats:
    """The inputs of the trees: sizes, shares, and the constants of the family."""
    values = [
        *(log2(s.elements), log2(s.bytes), s.hbm_bytes / s.bytes, log2(s.blocks), log2(s.elements / s.blocks)),
        *(s.bytes / s.elements, log2(seconds), log2(c["start_s"]), log2(c["bandwidth"]), log2(c["cache"])),
        *(log2(c["elements_per_cycle"]), log2(max(1.0, s.width)), s.itemsize),
    ]
    return np.array(values, float)


@functools.cache
def _trees() -> Trees | None:
    data = load_fit(DATA).get("trees")
    return Trees.of(data) if data else None


@functools.lru_cache(maxsize=1024)
def constants(family: str) -> dict[str, Any]:
    """The constants of a family: for "elementwise.gelu" those of "elementwise" where GELU has none."""
    families = load_fit(DATA)["families"]
    while family not in families and "." in family:
        family = family.rpartition(".")[0]
    return {**families["elementwise"], **families.get(family, {})}
