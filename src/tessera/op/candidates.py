"""What a product within a tolerance may run in: precisions, how they are summed, and their joules, cheapest first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import lowprec, prepared
from .product_cost import chip_of, energy_j, layout_of


class Way(NamedTuple):
    """A precision, how its products are summed ("fp32" or "fast"), and the joules that are predicted for it."""

    precision: str
    accumulate: str
    energy_j: float


def order(
    a: Any,
    b: Any,
    out: Any,
    *,
    allowed: Sequence[str] | None,
    first: str | None,
    accumulate: str | None,
    costs: Mapping[str, float] | None,
) -> list[Way]:
    """Cheapest first, full precision among them and nothing dearer than it after it.

    `accumulate` None tries fp8 with fast sums too, where the device has them. `costs` replaces the predicted joules of
    a precision, and of "fp8 fast" where it has that.
    """
    full = lowprec.FULL[a.dtype]
    names = [p for p in lowprec.PRECISIONS if p == full or _runs(p, a, full)]
    for name in allowed or ():
        if name not in lowprec.PRECISIONS:
            raise lowprec.unknown("allowed", name)
    names = [p for p in names if allowed is None or p in allowed or p == full]
    if first is not None:
        names = names[names.index(first) :] if first in names else [full]
    found = []
    for name in names:
        both = accumulate is None and name in ("fp8", "fp8_row") and lowprec.fast_sums(a.device)
        for sums in ("fast", "fp32") if both else (accumulate or "fp32",):
            found.append(Way(name, sums, _joules(a, b, out, name, sums, costs)))
    found.sort(key=lambda way: (way.precision != first, way.energy_j))
    return found[: [way.precision for way in found].index(full) + 1]


def _joules(a: Any, b: Any, out: Any, precision: str, sums: str, costs: Mapping[str, float] | None) -> float:
    given = (costs or {}).get(f"{precision} {sums}", (costs or {}).get(precision))
    if given is not None:
        return given
    batch, m, n, k = math.prod(a.shape[:-2]), a.shape[-2], b.shape[-1], a.shape[-1]
    chip = chip_of(a.device.index if a.device.type == "cuda" else None)
    kept = precision in ("fp8", "fp8_row") and prepared.find(b, precision == "fp8_row") is not None
    inside = lowprec.rows_in_product(a.device, out) if precision == "fp8_row" and a.device.type == "cuda" else None
    return energy_j(
        precision, m, n, k, batch, a.dtype, out, chip, accumulate=sums, layout=layout_of(a, b), prepared=kept,
        rows_in_product=inside,
    )  # fmt: skip


def _runs(precision: str, a: Any, full: str) -> bool:
    """Whether a precision can be cheaper than full on this device: narrower, and with units of its own."""
    wider = {"bf16": ("bf16",), "fp16": ("fp16",), "fp32": lowprec.PRECISIONS[:6], "fp64": lowprec.PRECISIONS}
    if precision not in (*wider[full], "fp8", "fp8_row"):
        return False
    if a.device.type != "cuda":
        return True
    if precision in ("fp8", "fp8_row"):
        return lowprec.fp8_units(a.device.index)
    return precision not in ("bf16", "tf32") or bool(torch.cuda.get_device_capability(a.device.index) >= (8, 0))
