"""What all kernel models share: `KernelTime`, `Chip`, and the corrections that were learned on the H200.

`chip(device)` reduces a `Device` to the plain numbers the kernel models need. A figure that the catalogue lacks is
filled by a stated rule, named in `Chip.assumed`, and widens the error of everything predicted from it.

The files under `data/` hold fitted constants and tree ensembles. `benchmarks/fit/fit_kernels.py`, `fit_chips.py` and
`fit_ops.py` write them; each file says what it was fitted on and how well it holds on shapes it has not seen.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from ..device import Device, Figure, Unit
from ..errors import ArgumentError, PredictionError
from ..hardware import lookup
from ..joules import Floats, Ints

ELEMENT_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0} | {
    "fp8": 1.0,
    "fp8_block": 1.0,
    "int8": 1.0,
    "fp6": 0.75,
    "fp4": 0.5,
    "int4": 0.5,
}
"""Bytes of one operand element by precision; `fp8_block` is fp8 with a scale for each 128 elements."""

# What a precision runs on where the chip has no unit for it, nearest first, with the factor on that unit's peak: wider
# formats can hold the values; fp32 on bf16 matrix units takes three to nine products, six here. fp16 cannot hold the
# range of bf16: a V100 or T4 converts bf16 and multiplies on its fp32 units, at 0.74 and 0.54 of their fp32 rate
# (github.com/zzc0721/torch-performance-test-data, issues 140 and 90: a V100-SXM2, a Turing board, torch 2.7 and 2.8).
_SIXTEEN_BITS = (("bf16", 1.0), ("fp16", 1.0), ("fp32", 1.0))
_FALLBACK: dict[str, tuple[tuple[str, float], ...]] = {
    "fp64": (("fp32", 1 / 32), ("bf16", 1 / 256)),
    "fp32": (("bf16", 1 / 6), ("fp16", 1 / 6)),
    "tf32": (("fp32", 1.0), ("bf16", 1 / 3)),
    "bf16": (("fp32", 0.63), ("fp16", 1.0)),
    "fp16": (("bf16", 1.0), ("fp32", 1.0)),
    **dict.fromkeys(("fp8", "int8"), _SIXTEEN_BITS),
    **dict.fromkeys(("fp6", "fp4"), (("fp8", 1.0), *_SIXTEEN_BITS)),
    "int4": (("int8", 1.0), *_SIXTEEN_BITS),
}

# Cache of the H200 per byte/s of bandwidth, for chips that do not state theirs: 62.9 MB at 4.8 TB/s (h200.toml).
_CACHE_S = 62914560 / 4.8e12

CALIBRATED = "h200"
"""The device whose constants are fitted; other chips are reached from it by ratios."""

FITTED = ("h100", "b200", "rtx-pro-6000", "a100")
"""Other chips whose matrix products, attention and experts were fitted (chip_fits.py)."""

STREAM_SHARE = 0.905
"""Of the bandwidth that long streams reach: 4.34 TB/s of 4.8 on an H200 (660 W at 152 pJ/byte, h200.toml).

No chip without timings of its own gets more: SMs or a cache that are fast beside its memory are no reason for it.
"""

_MOST_EFFICIENCY = 0.97  # of the matrix peak: an A100's products, the highest share of any chip (fit_chips.py)
_FITTED_ON = (132, 1.98e9, 4.8e12, 62914560)  # SMs, clock, bandwidth, cache of hardware/catalog/h200.toml


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One kernel's time at the boost clock, before any power limit, and what the power model needs to know about it.

    `clock_s` is the part of `seconds` that stretches when the clock falls; `busy` is occupied-SM seconds over all SM
    seconds (1: every SM held work all the time). `flops` run on `unit` ("matrix.bf16", "vector.fp32"), `vector_flops`
    are fp32 operations beside them (exponentials of attention). `activity` is the cost of its FLOPs relative to the
    constants, `draw` the power of its busy SMs relative to those of a matrix product, apart from FLOPs and bytes.
    `relative_error` is the half-width of a 90% interval.
    """

    seconds: float
    overhead_s: float
    compute_s: float
    memory_s: float
    clock_s: float
    busy: float
    flops: float
    unit: str
    hbm_bytes: float
    l2_bytes: float
    relative_error: float
    provenance: str
    vector_flops: float = 0.0
    activity: float = 1.0
    draw: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """The plain numbers of a device that kernel times follow from; `assumed` names those the catalogue lacks."""

    id: str
    architecture: str
    capability: str
    nvidia: bool
    calibrated: bool
    fitted: str | None
    units: int
    clock_hz: float
    bandwidth: float
    cache_bytes: float
    boost_over_quoted: float
    tdp_w: float | None
    peaks: tuple[tuple[str, float, str], ...]
    assumed: tuple[str, ...]

    @property
    def same_units(self) -> bool:
        """Whether it is the fitted chip with less bandwidth: as many SMs of the same kind at the same clock.

        With the same bandwidth too it is the fitted chip under another name, used to predict from the datasheet alone.
        """
        units, clock_hz, bandwidth, _ = _FITTED_ON
        alike = (self.architecture, self.units, self.clock_hz) == ("hopper", units, clock_hz)
        return alike and self.bandwidth < bandwidth and not {"units", "clocks.boost_hz"} & set(self.assumed)

    @property
    def asynchronous(self) -> bool:
        """Whether matrix units run beside the threads that feed them: kernels then overlap more.

        Those of Hopper and of Blackwell for data centres do; Blackwell's for workstations multiplies as Ampere does.
        """
        return self.architecture in ("hopper", "blackwell") and self.capability != "sm120"

    def fastest_s(self, flops: float, hbm_bytes: float, precision: str) -> float:
        """The least seconds that the peak at the boost clock and the memory bandwidth allow."""
        peak, unit, _ = self.peak(precision)
        peak *= self.boost_over_quoted if unit.startswith("matrix") else 1.0
        return max(flops / peak, hbm_bytes / self.bandwidth)

    def least_s(self, flops: float, unit: str) -> float:
        """The least seconds of FLOPs on a unit ("matrix.bf16") at the boost clock."""
        kind, _, name = unit.partition(".")
        peak = next((v for n, v, k in self.peaks if (n, k) == (name, kind)), None)
        if not flops or peak is None:
            return 0.0
        return flops / (peak * (self.boost_over_quoted if kind == "matrix" else 1.0))

    @property
    def flops_per_j(self) -> float | None:
        """16-bit matrix FLOP/s at the boost clock for each watt of the board; None where either is not known."""
        peak = max((v for n, v, kind in self.peaks if kind == "matrix" and n in ("bf16", "fp16")), default=0.0)
        return peak * self.boost_over_quoted / self.tdp_w if peak and self.tdp_w else None

    def scale_efficiency(self, share: float, constants: Mapping[str, Any]) -> float:
        """The share of the matrix peak that large kernels reach, from that of the chip the constants are from.

        The more FLOPs a board's peak has for a watt, the less of it the power limit leaves: products reach 0.97 of the
        peak on an A100 (0.8 TFLOP/J), 0.7 on Hopper (1.5) and 0.63 on a B200 (2.2).
        """
        law, own = constants.get("watts"), self.flops_per_j
        if law is None or own is None:
            return share
        return float(min(max(share, _MOST_EFFICIENCY), share * (law["flops_per_j"] / own) ** law["exponent"]))

    @property
    def launch_factor(self) -> float:
        """A launch's time over the H200's: half of its latencies follow the SM clock, half have their own clocks."""
        return math.sqrt(1.98e9 / self.clock_hz)

    @property
    def narrow(self) -> bool:
        """Whether an SM has 64 fp32 lanes, as those of Pascal, Volta, Turing and the A100, and not 128."""
        peak = next((v for n, v, kind in self.peaks if (n, kind) == ("fp32", "vector")), 0.0)
        known = self.nvidia and peak > 0 and not {"units", "clocks.boost_hz"} & set(self.assumed)
        return known and peak / (2.0 * self.units * self.clock_hz) < 1.1 * 64

    @property
    def feed_factor(self) -> float:
        """Device memory's bytes per unit and cycle over the H200's, and at least 1.

        What its units load and issue in a cycle was seen on the H200 only up to what its memory delivers. Units behind
        a faster memory (or whose number or clock is not known) keep up with it: no kernel that runs at the memory's
        speed on the H200 is slower than the memory elsewhere.
        """
        units, clock_hz, bandwidth, _ = _FITTED_ON
        return max(1.0, self.bandwidth / (self.units * self.clock_hz) / (bandwidth / (units * clock_hz)))

    def cache_rate(self, bytes_per_cycle: float) -> float:
        """Bytes/s through the cache for bytes per SM and cycle; always a little above the device memory's."""
        return max(float(bytes_per_cycle) * self.units * self.clock_hz, 1.05 * self.bandwidth)

    def peak(self, precision: str, unit: Unit | None = None) -> tuple[float, str, bool]:
        """FLOP/s of a precision, the unit it runs on ("matrix.bf16"), and whether the chip has it at all."""
        wanted = "fp8" if precision == "fp8_block" else precision
        if wanted not in _FALLBACK:
            raise ArgumentError(f"no precision {precision!r}", fix=f"one of {', '.join(ELEMENT_BYTES)}")
        for name, factor in ((wanted, 1.0), *_FALLBACK[wanted]):
            peaks = [(v, k) for n, v, k in self.peaks if n == name and (unit is None or k == unit)]
            if peaks:
                value, kind = max(peaks)
                return value * factor, f"{kind}.{name}", name == wanted
        if unit is not None:
            return self.peak(precision)
        raise ArgumentError(
            f"{self.id} has no peak that could run {precision}",
            why="the catalogue gives no FLOP/s for it",
            fix="give [peaks.vector] or [peaks.matrix] in a device file of your own",
        )


_CHIPS: dict[int, tuple[Device, Chip]] = {}


def chip(device: Device) -> Chip:
    """The device as plain numbers; computed once per device object."""
    entry = _CHIPS.get(id(device))
    # The device is stored beside its chip, so that its id cannot come back as another device's.
    if entry is None or entry[0] is not device:
        if len(_CHIPS) > 256:
            _CHIPS.clear()
        entry = _CHIPS[id(device)] = (device, _reduce_to_chip(device))
    return entry[1]


def _reduce_to_chip(device: Device) -> Chip:
    assumed: list[str] = []

    def figure(value: Figure | None, name: str, rule: float) -> float:
        if value is None:
            assumed.append(name)
            return rule
        return value.value

    bandwidth = device.memory.bandwidth_bytes_per_s
    if bandwidth is None:
        raise PredictionError(
            f"the memory bandwidth of {device.id} is not known",
            why="no kernel time can be predicted without it",
            fix="give memory.bandwidth_bytes_per_s in a device file of your own",
        )
    cache = device.caches.l3_bytes if device.kind == "cpu" else device.caches.l2_bytes
    tables = {"vector": device.vector, "matrix": device.matrix}
    return Chip(
        id=device.id,
        architecture=device.architecture or "",
        capability=device.compute_capability or "",
        nvidia=device.vendor.lower() == "nvidia" and device.kind != "cpu",
        calibrated=_is_fitted_chip(device),
        fitted=_find_fitted(device),
        units=_units(device, figure(device.units, "units", 132.0)),
        clock_hz=figure(device.clocks.boost_hz, "clocks.boost_hz", 1.98e9),
        bandwidth=bandwidth.value,
        cache_bytes=figure(cache, "caches.l2_bytes", _CACHE_S * bandwidth.value),
        boost_over_quoted=_boost_over_quoted(device),
        tdp_w=device.tdp_w.value if device.tdp_w else None,
        peaks=tuple((name, f.value, kind) for kind, table in tables.items() for name, f in table.items()),
        assumed=tuple(assumed),
    )


def lacks_units(device: Device, precision: str) -> PredictionError:
    """The error for a precision that the chip has no units for."""
    has = sorted({*device.vector, *device.matrix})
    return PredictionError(
        f"{device.id} has no {precision} units",
        why=f"the catalogue gives {device.name} peaks for {', '.join(has) or 'nothing'}",
        fix="choose one of those, or another chip: tessera hardware list",
    )


def check_narrow_format(device: Device, precision: str) -> None:
    """Refuse a kernel in a format under 16 bits that the chip has no units for: nothing would run it as such."""
    if ELEMENT_BYTES[precision] < 2.0 and not chip(device).peak(precision)[2]:
        raise lacks_units(device, "fp8" if precision == "fp8_block" else precision)


def _is_fitted_chip(device: Device) -> bool:
    """Whether a device is the H200 that the constants were fitted on; a user's file may change its figures."""
    if device.id.partition("@")[0] != CALIBRATED:
        return False
    figures = (device.units, device.clocks.boost_hz, device.memory.bandwidth_bytes_per_s, device.caches.l2_bytes)
    return tuple(f.value if f else None for f in figures) == _FITTED_ON


def _find_fitted(device: Device) -> str | None:
    """The name of the chip's own data file, where there is one and a user's file did not change its figures."""
    name = device.id.partition("@")[0]
    if name not in FITTED:
        return None
    figures = (device.units, device.clocks.boost_hz, device.memory.bandwidth_bytes_per_s, device.caches.l2_bytes)
    fitted_with = load_fit(f"{name}_kernels.json")["chip"]
    return name if [f.value if f else None for f in figures] == fitted_with else None


def _boost_over_quoted(device: Device) -> float:
    """The matrix peak at the boost clock over the quoted one: 1.08 on Hopper, whose 989 TFLOPS are at 1.83 GHz.

    Tensor cores do a power of two of FLOPs per SM and cycle; a quoted peak a little under it means a lower clock.
    """
    quoted = max((f.value for n, f in device.matrix.items() if n in ("bf16", "fp16")), default=0.0)
    if device.vendor.lower() != "nvidia" or not (quoted and device.units and device.clocks.boost_hz):
        return 1.0
    per_cycle = quoted / (device.units.value * device.clocks.boost_hz.value)
    whole = 2.0 ** round(math.log2(per_cycle))
    return whole / per_cycle if 0.88 < per_cycle / whole < 1.0 else 1.0


def _units(device: Device, stated: float) -> int:
    """Units that work is distributed to. An accelerator's few wide cores count as that many SMs of an H200.

    Such an SM does 4096 16-bit FLOPs in a cycle; a clock that is not stated is taken as the H200's 1.98 GHz.
    """
    if device.kind == "accelerator":
        clock = device.clocks.boost_hz.value if device.clocks.boost_hz else 1.98e9
        quoted = max((f.value for f in device.matrix.values()), default=0.0)
        stated = max(stated, quoted / (4096 * clock))
    return max(1, round(stated))


# -- what was fitted on the H200 --------------------------------------------------------------------------------


@functools.cache
def load_fit(name: str) -> dict[str, Any]:
    """A data file of the calibrated H200."""
    data: dict[str, Any] = json.loads((resources.files(__package__) / "data" / name).read_text(encoding="utf-8"))
    return data


@dataclass(frozen=True, slots=True)
class Trees:
    """A sum of regression trees of one depth; every tree is a full binary tree laid out by level.

    `split` holds feature numbers and `threshold` their limits, each (trees, 2^depth - 1); `leaf` is (trees, 2^depth).
    A row goes right where its feature is above the limit. The sum is held within `bound` either way.
    """

    split: Ints
    threshold: Floats
    leaf: Floats
    bound: float

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Trees:
        """The trees of a data file."""
        split = np.array(data["split"], np.int64)
        return cls(split, np.array(data["threshold"], float), np.array(data["leaf"], float), float(data["bound"]))

    def __call__(self, rows: Floats) -> Floats:
        """The sum over the trees for each row of features."""
        trees, inner = self.split.shape
        depth = (inner + 1).bit_length() - 1
        split, threshold, leaf = self.split.ravel(), self.threshold.ravel(), self.leaf.ravel()
        first = np.arange(trees) * inner  # where a tree's inner nodes begin
        sums = np.empty(len(rows))
        for i, row in enumerate(rows):
            node = np.zeros(trees, np.int64)
            for _ in range(depth):
                at = first + node
                node = 2 * node + 1 + (row.take(split.take(at)) > threshold.take(at))
            # A tree has one leaf more than inner nodes, so the leaves of tree i begin i places further on.
            sums[i] = leaf.take(first + np.arange(trees) + node - inner).sum()
        return np.clip(sums, -self.bound, self.bound)


CARRIED_OVER = "H200 constants carried over by datasheet"
"""The source of figures for which nothing was learned."""


@dataclass(frozen=True, slots=True)
class LearnedCorrection:
    """What the trees add to the logarithm of a formula's seconds; `source` says where it was learned."""

    log: Any
    source: str


def correction_chip(of: Chip) -> Chip | None:
    """The chip on which learned corrections are evaluated for `of`: itself, or the fitted chip with the same SMs.

    An H100 SXM is the H200's GPU with less bandwidth: its kernels differ from the formula as they do there. On other
    chips the corrections would be noise: None.
    """
    if of.calibrated:
        return of
    if not of.same_units:
        return None
    fitted_chip = chip(lookup(CALIBRATED))
    return fitted_chip if fitted_chip.calibrated else None


def find_correction(
    of: Chip, trees: Trees, features_on: Callable[[Chip], Floats], *, same_kernels: bool = False
) -> LearnedCorrection | None:
    """The learned correction of one kernel on a chip, from its features on the chip that the trees know.

    `same_kernels`: the H200 runs the same code for it, so that it differs from the formula as it does there.
    """
    fitted_chip = correction_chip(of) or (chip(lookup(CALIBRATED)) if same_kernels else None)
    if fitted_chip is None:
        return None
    alike = "runs the same kernels" if same_kernels else "has the same SMs"
    chips = "the H200" if fitted_chip is of else f"the H200, which {alike}"
    return LearnedCorrection(trees(features_on(fitted_chip))[0], f"with residual, fitted on {chips}")


def stack_columns(columns: Sequence[Any], rows: int) -> Floats:
    """Columns, each an array or one number, side by side."""
    return np.stack([np.broadcast_to(np.asarray(column, float), (rows,)) for column in columns], axis=1)


def kernel_error(data: Mapping[str, Any], of: Chip, native: bool, seconds: float, source: str) -> float:
    """The relative 90% half-width of a kernel: by its length on the calibrated chip, one wide figure elsewhere."""
    if of.calibrated:
        return widen_error(data["calibrated"][source], of, native, seconds)
    return _widen(float(data["same_vendor"] if of.nvidia else data["other_vendor"]), of, native)


def widen_error(table: Mapping[str, Any], of: Chip, native: bool, seconds: float) -> float:
    """The relative 90% half-width that a table has for a kernel's length, widened for what is not known of a chip."""
    return _widen(float(np.interp(math.log10(max(seconds, 1e-9)), table["log10_s"], table["half_width"])), of, native)


def _widen(width: float, of: Chip, native: bool) -> float:
    """A precision that the chip has no unit for widens it by half, each assumed figure by 15%."""
    return min(0.95, width * (1.15 ** len(of.assumed) * (1.0 if native else 1.5)))
