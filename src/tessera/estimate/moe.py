"""Seconds of the fused experts of one layer: router's choice given, both products, activation, casts and sums.

    t = t0 + t_expert * reached + (Tc^p + Tm^p)^(1/p)

Tc are the products of all rows, padded for every expert that some token reached; Tm is the weights of those experts and
the rows' own bytes. Nobody has timed these kernels on an H200 here: constants are those of vLLM's kernels on other
chips (chip_fits.py, `benchmarks/fit/fit_chips.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device import Device
from ..errors import ArgumentError, PredictionError
from ..joules import Floats
from .chip_fits import find_fit
from .kernel_time import ELEMENT_BYTES, Chip, KernelTime, check_narrow_format, chip, stack_columns

_FORMATS = ("bf16", "fp8", "fp8_block", "fp4")
_SCALE_BYTES = {"fp8_block": 4.0 / 128**2, "fp4": 1.0 / 16}  # a scale for 128 x 128 and for 16 elements
_TILE = 128.0  # rows and columns of a block's tile
_MOST_RANKS = 128.0  # ranks at which the skew constant holds


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """The experts of one layer on one GPU, or many such calls: sizes are numbers, or arrays of one length.

    `width` is the expert's hidden size on this GPU, `experts` all of the layer, `ranks` the GPUs that share them.
    `skew` is the exponent of a power law by which tokens choose experts; 0: evenly.
    """

    tokens: Any
    hidden: Any
    width: Any
    topk: Any
    experts: Any
    ranks: Any
    skew: Any
    precision: str


def moe_time(
    device: Device,
    tokens: int,
    hidden: int,
    width: int,
    topk: int,
    experts: int,
    precision: str = "bf16",
    *,
    ranks: int = 1,
    skew: float = 0.0,
) -> KernelTime:
    """The time of the fused experts of one layer on one of `ranks` GPUs that share them, at the boost clock."""
    sizes = (tokens, hidden, width, topk, experts, ranks)
    if min(sizes) < 1 or topk > experts or ranks > experts:
        raise ArgumentError(
            f"experts have sizes of at least 1, not {sizes}", fix="topk and ranks are at most the experts"
        )
    if precision not in ELEMENT_BYTES:
        raise ArgumentError(f"no experts in {precision!r}", fix=f"one of {', '.join(_FORMATS)}")
    check_narrow_format(device, precision)
    return _moe(chip(device), ExpertCall(*sizes, skew, precision))


@functools.lru_cache(maxsize=65536)
def _moe(of: Chip, call: ExpertCall) -> KernelTime:
    _, unit, native = of.peak(call.precision)
    kernel = call.precision if native else unit.partition(".")[2]
    fit = find_fit(of, "moe", kernel) or find_fit(of, "moe", "bf16")  # as 16-bit ones where nobody timed the format
    if fit is None:
        raise PredictionError(
            f"fused experts in {call.precision} have no model on {of.id}",
            why="their kernels were timed on NVIDIA GPUs, in " + ", ".join(_FORMATS),
        )
    parts = formula(fit.constants, of, call)
    t = {name: float(value) for name, value in parts.items()}
    learned = fit.correct(features(call, parts))
    factor = 1.0 if learned is None else float(np.exp(learned.log))
    formula_s = t["overhead_s"] + t["body_s"]
    # Weights of experts are read once at least; no correction makes a kernel faster than the chip.
    factor = max(factor, of.fastest_s(t["flops"], t["weight_bytes"], call.precision) / formula_s)
    seconds = formula_s * factor
    return KernelTime(
        seconds=seconds,
        overhead_s=t["overhead_s"] * factor,
        compute_s=t["compute_s"] * factor,
        memory_s=t["memory_s"] * factor,
        clock_s=t["clock_s"] * factor,
        busy=min(1.0, t["tiles"] / of.units) * t["body_s"] / formula_s,
        flops=t["flops"],
        unit=unit,
        hbm_bytes=t["weight_bytes"],
        l2_bytes=t["moved_bytes"],
        relative_error=fit.relative_error(of, seconds, native=native),
        provenance=f"model of fused experts, {fit.provenance}",
    )


def formula(c: Mapping[str, Any], of: Chip, call: ExpertCall) -> dict[str, Floats]:
    """The physical model without the learned correction: seconds, bytes and rows by name."""
    sizes = (call.tokens, call.hidden, call.width, call.topk, call.experts, call.ranks, call.skew)
    tokens, hidden, width, topk, experts, ranks, skew = (np.asarray(value, float) for value in sizes)
    local = experts / ranks
    # The rank whose experts are chosen most is the one that others wait for.
    more = 1.0 + c["skew"] * skew * np.log2(ranks) / np.log2(_MOST_RANKS)
    rows = np.maximum(1.0, np.minimum(tokens * topk / ranks * more, tokens * np.minimum(topk, local)))
    by_chance = local * -np.expm1(-c["reach"] * rows / local)
    reached = np.maximum(1.0, np.where(skew > 0, by_chance, np.minimum(local, rows)))
    matrices = 3.0 * hidden * width  # gate, up and down
    weight_bytes = reached * matrices * (ELEMENT_BYTES[call.precision] + _SCALE_BYTES.get(call.precision, 0.0))
    moved = weight_bytes + rows * (hidden + width) * c["row_bytes"]
    padded = rows + reached * c["pad_rows"]
    tiles = np.maximum(padded / _TILE, reached) * np.maximum(1.0, 2.0 * width / _TILE)
    peak = of.peak(call.precision)[0] * of.boost_over_quoted * c["efficiency"]
    compute_s = 2.0 * matrices * padded / peak * (1.0 + c["wave"] * np.minimum(1.0, of.units / tiles))
    memory_s = moved / (of.bandwidth * c["bandwidth"])
    p = c["exponent"]
    whole = compute_s**p + memory_s**p
    body_s = whole ** (1 / p)
    return {
        "body_s": body_s,
        "overhead_s": (c["launch_us"] + c["expert_us"] * reached) * 1e-6 * of.launch_factor,
        "compute_s": compute_s,
        "memory_s": memory_s,
        "clock_s": body_s * compute_s**p / whole,
        "flops": 2.0 * matrices * rows,
        "weight_bytes": weight_bytes,
        "moved_bytes": moved,
        "rows": rows,
        "reached": reached,
        "tiles": tiles,
    }


def features(call: ExpertCall, t: Mapping[str, Floats]) -> Floats:
    """The inputs of the learned correction, one row per call."""
    sizes = (call.tokens, call.hidden, call.width, call.topk, call.experts, call.ranks)
    tokens, hidden, width, topk, experts, ranks = (np.atleast_1d(np.asarray(value, float)) for value in sizes)
    columns = [
        *(np.log2(tokens), np.log2(hidden), np.log2(width), topk, np.log2(experts / ranks), np.log2(ranks), call.skew),
        *(np.log2(t["rows"] / t["reached"]), np.log2(t["reached"]), np.log2(t["compute_s"] / t["memory_s"])),
        *(np.log2(t["body_s"]), np.log2(t["tiles"]), np.log2(t["overhead_s"] / t["body_s"])),
        _FORMATS.index(call.precision) if call.precision in _FORMATS else 0,
        np.log2(np.gcd(width.astype(np.int64), 256)),
    ]
    return stack_columns(columns, len(tokens))
