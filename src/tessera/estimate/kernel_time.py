"""The noun `KernelTime`: how long one kernel runs on a device, and what that says about its power.

`chip(device)` boils a `Device` down to the plain numbers the kernel models need. A figure the catalogue lacks is
filled by a stated rule, named in `Chip.assumed`, and widens the error of everything predicted from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..device import Device, Figure, Unit
from ..errors import ArgumentError, PredictionError

ELEMENT_BYTES = {
    "fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "int8": 1.0,
    "fp6": 0.75, "fp4": 0.5, "int4": 0.5,
}  # fmt: skip
"""Bytes of one operand element by precision; `fp8_block` is fp8 with a scale for each 128 elements."""

# What a precision runs on where the chip has no unit of its own, nearest first, with the factor on that unit's peak:
# wider formats hold the values; fp32 from bf16 matrix units costs three to nine products, six here.
_FALLBACK: dict[str, tuple[tuple[str, float], ...]] = {
    "fp64": (("fp32", 1 / 32), ("bf16", 1 / 256)),
    "fp32": (("bf16", 1 / 6), ("fp16", 1 / 6)),
    "tf32": (("fp32", 1.0), ("bf16", 1 / 3)),
    "bf16": (("fp16", 1.0), ("fp32", 1.0)),
    "fp16": (("bf16", 1.0), ("fp32", 1.0)),
    "fp8": (("bf16", 1.0), ("fp16", 1.0), ("fp32", 1.0)),
    "int8": (("bf16", 1.0), ("fp16", 1.0), ("fp32", 1.0)),
    "fp6": (("fp8", 1.0), ("bf16", 1.0), ("fp16", 1.0), ("fp32", 1.0)),
    "fp4": (("fp8", 1.0), ("bf16", 1.0), ("fp16", 1.0), ("fp32", 1.0)),
    "int4": (("int8", 1.0), ("bf16", 1.0), ("fp16", 1.0), ("fp32", 1.0)),
}

# Cache of the H200 per byte/s of bandwidth, for chips that do not state theirs: 62.9 MB at 4.8 TB/s (h200.toml).
_CACHE_S = 62914560 / 4.8e12


CALIBRATED = "h200"
"""The device whose constants are fitted; others are reached from it by ratios."""


SAME_UNITS = ", which has the same SMs"
"""Said of a residual that is used on a chip it was not learnt on."""

_FITTED_ON = (132, 1.98e9, 4.8e12, 62914560)  # SMs, clock, bandwidth, cache of hardware/catalog/h200.toml


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One kernel's time at the boost clock, before any power limit, and what the power model needs to know of it.

    `clock_s` is the part of `seconds` that stretches when the clock falls; `busy` is occupied-SM seconds over all SM
    seconds (1: every SM held work all the time). `flops` run on `unit` ("matrix.bf16", "vector.fp32"), `vector_flops`
    are fp32 operations beside them (exponentials of attention). `activity` is what its FLOPs cost relative to the
    constants, `draw` what its busy SMs draw relative to those of a matrix product, apart from FLOPs and bytes.
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
    kind: str
    architecture: str
    nvidia: bool
    calibrated: bool
    units: int
    clock_hz: float
    bandwidth: float
    cache_bytes: float
    boost_over_quoted: float
    peaks: tuple[tuple[str, float, str], ...]
    assumed: tuple[str, ...]

    @property
    def same_units(self) -> bool:
        """Whether it is the fitted chip with less bandwidth: as many SMs of the same kind at the same clock.

        With all figures alike it is the fitted one under another name, which asks for what the datasheet alone says.
        """
        units, clock_hz, bandwidth, _ = _FITTED_ON
        alike = (self.architecture, self.units, self.clock_hz) == ("hopper", units, clock_hz)
        return alike and self.bandwidth < bandwidth and not {"units", "clocks.boost_hz"} & set(self.assumed)

    @property
    def asynchronous(self) -> bool:
        """Whether matrix units run beside the threads that feed them, as from Hopper on: kernels then overlap more."""
        return self.architecture in ("hopper", "blackwell")

    def fastest_s(self, flops: float, hbm_bytes: float, precision: str) -> float:
        """Seconds under which the peak at the boost clock and the memory's bandwidth do not allow to go."""
        peak, unit, _ = self.peak(precision)
        peak *= self.boost_over_quoted if unit.startswith("matrix") else 1.0
        return max(flops / peak, hbm_bytes / self.bandwidth)

    @property
    def launch_factor(self) -> float:
        """What a launch takes over the H200's: of its latencies half follow the SM clock, half clocks of their own."""
        return math.sqrt(1.98e9 / self.clock_hz)

    def peak(self, precision: str, unit: Unit | None = None) -> tuple[float, str, bool]:
        """FLOP/s of a precision, the unit it runs on ("matrix.bf16"), and whether the chip has it at all."""
        wanted = "fp8" if precision == "fp8_block" else precision
        if wanted not in _FALLBACK:
            raise ArgumentError(f"no precision {precision!r}", fix=f"one of {', '.join(ELEMENT_BYTES)}")
        for name, factor in ((wanted, 1.0), *_FALLBACK[wanted]):
            found = [(v, k) for n, v, k in self.peaks if n == name and (unit is None or k == unit)]
            if found:
                value, kind = max(found)
                return value * factor, f"{kind}.{name}", name == wanted
        if unit is not None:
            return self.peak(precision)
        raise ArgumentError(
            f"{self.id} has no peak that could run {precision}",
            why="the catalogue gives no FLOP/s for it",
            fix="give [peaks.vector] or [peaks.matrix] in a device file of your own",
        )


def learnt_on(of: Chip) -> Chip | None:
    """The chip at which a learnt residual is looked up for `of`: itself, or the fitted one that has the same SMs.

    An H100 SXM is the H200's GPU with less bandwidth. What its kernels take beside the formula is what they take there,
    and it cannot be the faster of the two. On other chips the residual would be noise: None.
    """
    from ..hardware import lookup

    if of.calibrated:
        return of
    if not of.same_units:
        return None
    fitted_one = chip(lookup(CALIBRATED))
    return fitted_one if fitted_one.calibrated else None


_CHIPS: dict[int, tuple[Device, Chip]] = {}


def chip(device: Device) -> Chip:
    """The device as plain numbers; made once per device object."""
    found = _CHIPS.get(id(device))
    # The device is kept beside its chip, so that its id cannot come back as another device's.
    if found is None or found[0] is not device:
        if len(_CHIPS) > 256:
            _CHIPS.clear()
        found = _CHIPS[id(device)] = (device, _boil_down(device))
    return found[1]


def _boil_down(device: Device) -> Chip:
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
    peaks = [(n, f.value, k) for k, table in (("vector", device.vector), ("matrix", device.matrix))
             for n, f in table.items()]  # fmt: skip
    return Chip(
        id=device.id,
        kind=device.kind,
        architecture=device.architecture or "",
        nvidia=device.vendor.lower() == "nvidia" and device.kind != "cpu",
        calibrated=_is_the_fitted_one(device),
        units=_units(device, figure(device.units, "units", 132.0)),
        clock_hz=figure(device.clocks.boost_hz, "clocks.boost_hz", 1.98e9),
        bandwidth=bandwidth.value,
        cache_bytes=figure(cache, "caches.l2_bytes", _CACHE_S * bandwidth.value),
        boost_over_quoted=_boost_over_quoted(device),
        peaks=tuple(peaks),
        assumed=tuple(assumed),
    )


def _is_the_fitted_one(device: Device) -> bool:
    """Whether a device is the H200 the constants were fitted on: a user's file may change what that name means."""
    if device.id != CALIBRATED:
        return False
    figures = (device.units, device.clocks.boost_hz, device.memory.bandwidth_bytes_per_s, device.caches.l2_bytes)
    return tuple(f.value if f else None for f in figures) == _FITTED_ON


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
    """Units that work is dealt out to. An accelerator's few wide cores count as the SMs of an H200 they amount to.

    Such an SM does 4096 16-bit FLOPs in a cycle; a clock that is not stated is taken as the H200's 1.98 GHz.
    """
    if device.kind == "accelerator":
        clock = device.clocks.boost_hz.value if device.clocks.boost_hz else 1.98e9
        quoted = max((f.value for f in device.matrix.values()), default=0.0)
        stated = max(stated, quoted / (4096 * clock))
    return max(1, round(stated))
