"""What a product costs in each precision, by the energy model of `predict`: the product, and the casts around it.

Casts are counted in passes over memory, each with a launch: the largest value of a matrix, the cast by its scale, and,
where the product cannot multiply by the scales of its rows and columns itself, the result by them. A pass is bound by
the bytes that cross device memory and the cache, at the rates fitted for products (`h200_gemm.json`), times what an
H200 took more (`_MORE`). With that, casts of 4096 and 8192 come within 3% of their joules there; the product by rows
itself costs what the one by matrices does (within 6%).
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ..device import Device
from ..errors import ArgumentError
from ..estimate.gemm import gemm_time
from ..estimate.kernel_time import ELEMENT_BYTES, Chip, chip, load_fit
from ..estimate.power import DeviceWork, PowerModel
from ..hardware import lookup
from . import lowprec

# Without fast accumulation the tensor core's short sums go to fp32 registers every so many products along k: one fp32
# addition each (DeepSeek-V3 technical report, 2024, 3.3.2: 128 is the least that hides behind the products).
_PROMOTED_EVERY = 128
_LAUNCH_S = 1.5e-6  # from the end of a kernel to the work of the next in a CUDA graph, by the casts of 2048 on the H200
_EXPONENT = 3.0  # of device memory against cache, as in `estimate/data_movement.py`
# fp32 operations on an element: its magnitude, whether it is finite, the maximum; and then the scale, two clamps, the
# comparison, the choice and the conversion.
_AMAX_FLOPS, _CAST_FLOPS = 3.0, 6.0
# Measured joules of casts alone over those of their passes, the mean of 4096 and 8192 (H200, 2026-11-16,
# ops_precision.py), by (a scale a row?, does it transpose?). What transposes goes through shared memory, and by rows
# reads short runs for the largest values. Under one: the operations above are those of a value that is looked at
# closely, and most are not since.
_MORE = {(False, False): 0.97, (False, True): 1.13, (True, False): 0.95, (True, True): 1.34}


@functools.cache
def chip_of(index: int | None) -> str:
    """The catalogue's name of a CUDA device; an H200 for a CPU, or for a device the catalogue does not have."""
    if index is not None:
        try:
            return lookup(torch.cuda.get_device_name(index)).id
        except ArgumentError:
            pass
    return "h200"


def layout_of(a: torch.Tensor, b: torch.Tensor) -> str:
    """How the operands lie, as `gemm_time` names it: "nn" row by row, "nt" the right transposed, "tn" the left."""
    if a.stride(-1) > a.stride(-2):
        return "tn"
    return "nt" if b.stride(-1) > b.stride(-2) else "nn"


@functools.lru_cache(maxsize=4096)
def energy_j(
    precision: str,
    m: int,
    n: int,
    k: int,
    batch: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    on: str = "h200",
    *,
    accumulate: str = "fp32",
    layout: str = "nn",
    prepared: bool = False,
    rows_in_product: bool | None = None,
) -> float:
    """Predicted joules of a product in a precision: the product, and the casts of its operands from `dtype`.

    `layout` is that of the operands (fp8's casts transpose them into the one its product takes). A `prepared` right
    operand is in fp8 already. `rows_in_product` is `lowprec.rows_in_product` of the device; None takes it for bf16
    results, which every torch that has such products writes.
    """
    if min(m, n, k, batch) == 0:
        return 0.0
    device, name = lookup(on), precision.removesuffix("_row")
    of, model, out_bytes = chip(device), PowerModel.from_device(device), float(out_dtype.itemsize)
    work = _product(device, name, m, n, k, batch, out_bytes, layout)
    lossless = lowprec.FULL[dtype] == name or (name == "tf32" and dtype == torch.float32)
    if not lossless:
        inside = out_dtype == torch.bfloat16 if rows_in_product is None else rows_in_product
        unscaled = name == "fp16" or (precision == "fp8_row" and not inside)
        work = work + _casts(of, precision, m, n, k, batch, dtype.itemsize, out_bytes, layout, prepared, unscaled)
    joules = model.estimate(work).energy_j
    if name == "fp8" and accumulate == "fast":
        joules -= float(batch) * m * n * k / _PROMOTED_EVERY * model.j_per_flop.get("vector.fp32", 0.0)
    return joules


def _product(
    device: Device, name: str, m: int, n: int, k: int, batch: int, out_bytes: float, layout: str
) -> DeviceWork:
    if name == "fp8":  # matrix by matrix
        return DeviceWork.of(gemm_time(device, m, n, k, 1, name, out_bytes=out_bytes, layout="nt"), batch)
    found = gemm_time(device, m, n, k, batch, name, out_bytes=out_bytes, layout=layout)
    if found.unit.startswith("vector"):
        # The formula may take a narrow tile for a large product, whose reads pass what the cache gives in the time.
        most = _cache_rate(chip(device)) * found.seconds
        found = replace(found, l2_bytes=min(found.l2_bytes, most))
    return DeviceWork.of(found)


def _casts(
    of: Chip, precision: str, m: int, n: int, k: int, batch: int, size: int, out_bytes: float, layout: str,
    prepared: bool, unscaled: bool,
) -> DeviceWork:  # fmt: skip
    """The passes before and after a product of rounded operands."""
    name = precision.removesuffix("_row")
    narrow, launches = ELEMENT_BYTES[name], batch if name == "fp8" else 1
    elements = [batch * m * k] if prepared else [batch * m * k, batch * n * k]
    result = batch * m * n * out_bytes
    touched = sum(elements) * (size + narrow) + (batch * n * k * narrow if prepared else 0.0) + result
    spilt = _spilt(of, touched)
    scaled = name in ("fp8", "fp16")
    work = DeviceWork()
    guessed = precision == "fp8"  # one scale, guessed: no pass for the largest value, one launch to mend (`centred.py`)
    for index, count in enumerate(elements):
        read, written = float(count * size), float(count * narrow)
        # A row that lies along memory waits in registers for its scale; every other cast reads its matrix again, of
        # which the cache still holds what it can.
        along = layout != "tn" if index == 0 else layout == "nt"
        by_row = precision == "fp8_row"
        twice = scaled and not guessed and not (by_row and along)
        passes = DeviceWork()
        if twice:
            passes = passes + _pass(of, read, read * spilt, _AMAX_FLOPS * count, launches)
        again = max(0.0, read - _kept(of)) if twice else read * spilt
        passes = passes + _pass(of, read + written, again + written * spilt, _CAST_FLOPS * count, launches)
        work = work + (_times(passes, _MORE[by_row, not along]) if name == "fp8" else passes)
    if guessed:
        work = work + DeviceWork(fixed_s=launches * _LAUNCH_S * of.launch_factor)
    if unscaled:  # the result is multiplied by its scales
        fresh = max(0.0, result - _kept(of))
        work = work + _pass(of, 2.0 * result, fresh + result * spilt, 2.0 * batch * m * n, launches)
    return work


def _times(work: DeviceWork, factor: float) -> DeviceWork:
    """The same work, taking and drawing more."""
    flops = {unit: factor * value for unit, value in work.flops.items()}
    more = {
        name: factor * getattr(work, name) for name in ("clock_s", "fixed_s", "busy_s", "hbm_bytes", "l2_bytes")
    }  # fmt: skip
    return replace(work, flops=flops, **more)


def _kept(of: Chip) -> float:
    """Bytes of what was touched last that the cache still has."""
    return float(load_fit("h200_gemm.json")["constants"]["cache_kept"]) * of.cache_bytes


def _spilt(of: Chip, touched: float) -> float:
    """The share of what a warm loop touches that is not in the cache when its turn comes again."""
    c = load_fit("h200_gemm.json")["constants"]
    return float(min(1.0, max(0.0, (touched / of.cache_bytes - c["cache_kept"]) / c["cache_spill"])))


def _cache_rate(of: Chip) -> float:
    """Bytes a second between cache and SMs."""
    return float(load_fit("h200_gemm.json")["constants"]["cache_bytes_per_cycle"]) * of.units * of.clock_hz


def _pass(of: Chip, moved: float, crossing: float, flops: float, launches: int) -> DeviceWork:
    """A kernel that goes over memory once: `moved` bytes through the cache, `crossing` of them from or to memory."""
    hbm_s = crossing / (load_fit("h200_gemm.json")["constants"]["bandwidth"] * of.bandwidth)
    cache_s = moved / _cache_rate(of)
    whole = hbm_s**_EXPONENT + cache_s**_EXPONENT
    body_s = whole ** (1 / _EXPONENT)
    clock_s = body_s * (1.0 - hbm_s**_EXPONENT / whole)
    return DeviceWork(
        clock_s=clock_s,
        fixed_s=launches * _LAUNCH_S * of.launch_factor + body_s - clock_s,
        busy_s=body_s,
        flops={"vector.fp32": flops},
        hbm_bytes=crossing,
        l2_bytes=moved,
    )
