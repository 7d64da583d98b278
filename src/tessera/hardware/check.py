"""Whether a device makes sense: SI units, dense peaks, watts in the right order.

Each check stands for a mistake that has been made in such tables: teraflops for flops, a sparse peak among dense
ones, an assumed idle without an error bar.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..device import ASSUMED_ERROR, Device, Figure

# Below these a number is surely not in SI: "989" for 989 TFLOP/s, "141" for 141 GB, "1.98" for GHz.
_SMALLEST = {"peaks": 1e9, "capacity_bytes": 1e6, "_bytes_per_s": 1e8, "_hz": 1e6, "l2_bytes": 1e3, "l3_bytes": 1e3}
_LARGEST = {"_w": 1e5, "energy": 1e-6}

# (slower, faster, largest ratio): a format of half the width is at most twice as fast on the same units. Only int8
# may be four times fp16, where a GeForce halves what accumulates in fp32.
_LADDER = (
    ("tf32", "bf16", 2.1),
    ("tf32", "fp16", 2.1),
    ("bf16", "fp8", 2.1),
    ("fp16", "fp8", 2.1),
    ("fp16", "int8", 4.2),
    ("bf16", "int8", 4.2),
    ("fp8", "fp4", 2.1),
)


def check(device: Device) -> Iterator[tuple[str, str]]:
    """What is wrong with a device, as (key, problem)."""
    for key, figure in device.figures():
        yield from _figure(key, figure)
    yield from _peaks(device)
    yield from _watts(device)
    clocks = device.clocks
    if clocks.base_hz and clocks.boost_hz and clocks.base_hz.value > clocks.boost_hz.value:
        yield "clocks.base_hz", "is above boost_hz"
    names = [point.name.lower() for point in device.operating_points]
    if len(set(names)) != len(names):
        yield "operating_points", "two have the same name"
    if device.kind == "cpu" and device.threads is None:
        yield "threads", "a CPU needs its hardware threads: its power is shared among them"


def _figure(key: str, figure: Figure) -> Iterator[tuple[str, str]]:
    if figure.assumed:
        if not figure.source.startswith("assumed"):
            yield key, 'is assumed, but its source does not say "assumed: ..." and the reasoning'
        if figure.error is None or figure.error < ASSUMED_ERROR * figure.value * (1 - 1e-9):
            yield key, f"is assumed and needs an error of at least {ASSUMED_ERROR:.0%} of its value"
    if figure.error is not None and figure.error >= figure.value:
        yield key, f"has an error ({figure.error:g}) that reaches zero"
    for part, least in _SMALLEST.items():
        if (key.startswith(part) or key.endswith(part)) and figure.value < least:
            yield key, f"{figure.value:g} is too small to be in SI units"
    for part, most in _LARGEST.items():
        if (key.startswith(part) or key.endswith(part)) and figure.value > most:
            yield key, f"{figure.value:g} is too large to be in SI units"
    if key.startswith("energy.") and "_j_per_" not in key:
        yield key, "an energy constant is named ..._j_per_byte, ..._j_per_flop or ..._j_per_op"


def _peaks(device: Device) -> Iterator[tuple[str, str]]:
    for slow, fast, ratio in _LADDER:
        lower, upper = device.matrix.get(slow), device.matrix.get(fast)
        if lower is None or upper is None:
            continue
        if upper.value < lower.value * 0.999:
            yield f"peaks.matrix.{fast}", f"is below {slow}"
        if upper.value > lower.value * ratio:
            yield f"peaks.matrix.{fast}", f"is more than {ratio:.0f} times {slow}: is it the sparse figure?"
    for wide, narrow in (("fp64", "fp32"), ("fp32", "fp16")):
        lower, upper = device.vector.get(wide), device.vector.get(narrow)
        if lower and upper and upper.value < lower.value * 0.999:
            yield f"peaks.vector.{narrow}", f"is below {wide}"


def _watts(device: Device) -> Iterator[tuple[str, str]]:
    idle, context, full = device.idle_w, device.idle_context_w, device.tdp_w
    if idle and full and idle.value >= full.value:
        yield "idle_w", "is not below tdp_w"
    if idle and context and context.value < idle.value:
        yield "idle_context_w", "is below idle_w"
    for point in device.operating_points:
        if idle and point.power_w.value <= idle.value:
            yield "operating_points", f"{point.name} is not above idle_w"
