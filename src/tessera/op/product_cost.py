"""What a product costs in each precision, by the energy model of `predict`: the product, and the casts before it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..errors import ArgumentError
from ..estimate.gemm import gemm_time
from ..estimate.kernel_time import ELEMENT_BYTES, chip
from ..estimate.power import PowerModel, Work
from ..estimate.stream import Stream, stream_time
from ..hardware import lookup
from . import lowprec


@functools.cache
def chip_of(index: int | None) -> str:
    """The catalogue's name of a CUDA device; an H200 for a CPU, or for a device the catalogue does not have."""
    if index is not None:
        try:
            return lookup(torch.cuda.get_device_name(index)).id
        except ArgumentError:
            pass
    return "h200"


@functools.lru_cache(maxsize=4096)
def energy_j(
    precision: str, m: int, n: int, k: int, batch: int, dtype: torch.dtype, out_dtype: torch.dtype, on: str = "h200"
) -> float:
    """Predicted joules of a product in a precision: the product, and the casts of its operands from `dtype`."""
    if min(m, n, k, batch) == 0:
        return 0.0
    device, name = lookup(on), precision.removesuffix("_row")
    work = Work.of(gemm_time(device, m, n, k, batch, name, out_bytes=float(out_dtype.itemsize)))
    if lowprec.FULL[dtype] == name or (name == "tf32" and dtype == torch.float32):
        return PowerModel.from_device(device).estimate(work).energy_j
    scaled = name == "fp8" or (name == "fp16" and dtype != torch.bfloat16)
    for elements in (batch * m * k, batch * n * k):
        if scaled and precision != "fp8_row":  # the largest value first; by rows it is found on the way
            work = work + _pass(device, "reduce.inner.amax", elements, dtype.itemsize, k)
        work = work + _pass(device, "copy.down", elements, dtype.itemsize + ELEMENT_BYTES[name], k)
    if precision == "fp8_row" or (scaled and name == "fp16"):  # the result is multiplied by its scales
        work = work + _pass(device, "elementwise.dense.mul", batch * m * n, 2.0 * out_dtype.itemsize, n)
    return PowerModel.from_device(device).estimate(work).energy_j


def _pass(device: Any, family: str, elements: float, bytes_each: float, width: float) -> Any:
    """A kernel that goes over a matrix once; one that fits half the cache is found there."""
    of, total = chip(device), elements * bytes_each
    crossing = total if total > 0.5 * of.cache_bytes else 0.0
    asked = Stream(family, elements, total, crossing, max(1.0, elements / 4096), width=width)
    return Work.of(stream_time(of, asked))
