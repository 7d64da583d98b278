"""Seconds of kernels that move data: elementwise, copies, reductions, norms, pooling, gathers, optimizers.

Three rates bound such a kernel: bytes across device memory, bytes through the cache, and elements the SMs can issue,
which depends on what is done with each (a GELU costs more than an add) and on how many blocks there are to run it.
Families share these rates; the constants of the calibrated H200 are in `data/h200_stream.json`, and on other chips the
same fractions of their bandwidth and the same elements per SM and cycle are used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .kernel_time import Chip, KernelTime, learnt_on
from .residual import Array, Trees, fitted, trees

DATA = "h200_stream.json"


@dataclass(frozen=True, slots=True)
class Stream:
    """What a data-moving kernel is asked to do.

    `family` names its constants; `elements` are those it computes on, `blocks` the independent pieces it can be cut
    into, `bytes` all it reads and writes, `hbm_bytes` those that cross device memory, `kernels` the launches. `width`
    is the length of the runs it works on: a row that is normalised or summed, elements that lie together in a copy.
    """

    family: str
    elements: float
    bytes: float
    hbm_bytes: float
    blocks: float
    kernels: int = 1
    width: float = 1.0
    itemsize: float = 4.0


def stream_time(of: Chip, s: Stream, unit: str = "vector.fp32") -> KernelTime:
    """The time of a data-moving kernel at the boost clock; what the rates leave over is learnt on the H200."""
    found, ensemble, there = _time(of, s, unit), _ensemble(), learnt_on(of)
    if there is None or ensemble is None:
        return found
    fitted_s = found.seconds if there is of else _time(there, s, unit).seconds
    factor = math.exp(float(ensemble(features(s, constants(s.family), fitted_s)[None])[0]))
    return replace(found, seconds=found.seconds * factor, clock_s=found.clock_s * factor, busy=found.busy)


def _time(of: Chip, s: Stream, unit: str) -> KernelTime:
    data = fitted(DATA)
    c = constants(s.family)
    start_s = float(c["start_s"]) * (s.kernels if s.family.startswith("foreach") else 1)
    p = data["exponent"]
    occupied = min(1.0, s.blocks / of.units)
    hbm_s = s.hbm_bytes / (c["bandwidth"] * of.bandwidth)
    cache_s = s.bytes / (data["cache_bytes_per_cycle"] * of.units * of.clock_hz * c["cache"])
    issue_s = s.elements / (c["elements_per_cycle"] * of.units * of.clock_hz * max(occupied, 1.0 / of.units))
    whole = hbm_s**p + cache_s**p + issue_s**p
    body_s = whole ** (1 / p)
    seconds = start_s + body_s
    memory_share = hbm_s**p / whole if whole > 0 else 0.0
    return KernelTime(
        seconds=seconds,
        overhead_s=start_s,
        compute_s=issue_s,
        memory_s=(hbm_s**p + cache_s**p) ** (1 / p),
        clock_s=body_s * (1.0 - memory_share),
        busy=occupied * body_s / seconds,
        flops=c.get("flops_per_element", 1.0) * s.elements,
        unit=unit,
        hbm_bytes=s.hbm_bytes,
        l2_bytes=s.bytes,
        relative_error=_error(of, c),
        provenance="rates by family, fitted on the H200"
        if of.calibrated
        else "rates by family, carried over from the H200",
    )


def features(s: Stream, c: Mapping[str, float], seconds: float) -> Array:
    """What the trees look at: sizes, shares, and the constants of the family."""
    log = math.log2
    return np.array([
        log(s.elements), log(s.bytes), s.hbm_bytes / s.bytes, log(s.blocks), log(s.elements / s.blocks),
        s.bytes / s.elements, log(seconds), log(c["start_s"]), log(c["bandwidth"]), log(c["cache"]),
        log(c["elements_per_cycle"]), log(max(1.0, s.width)), s.itemsize,
    ], float)  # fmt: skip


@functools.cache
def _ensemble() -> Trees | None:
    data = fitted(DATA).get("trees")
    return trees(data) if data else None


def _error(of: Chip, c: dict[str, Any]) -> float:
    width = float(c["relative_error"])
    if of.calibrated:
        return width
    return min(0.95, (1.6 if of.nvidia else 2.5) * width)


@functools.lru_cache(maxsize=1024)
def constants(family: str) -> dict[str, Any]:
    """The constants of a family; of "elementwise.gelu" those of "elementwise" where GELU has none of its own."""
    families = fitted(DATA)["families"]
    while family not in families and "." in family:
        family = family.rpartition(".")[0]
    found: dict[str, Any] = {**families["elementwise"], **families.get(family, {})}
    return found
