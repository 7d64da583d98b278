"""How wrong a computed product is: an upper bound of |C' - AB| / |AB| in Frobenius norms, by the cheapest check.

1. By norms, if the operands lost nothing: sums in fp32 err by at most k 2^-23 |A| |B|, whatever the data.
2. By 32 random vectors x, after Freivalds (1977): E[|Mx|^2] = |M|^2 for M = C' - AB. This reads A, B and C' once. The
worst M for it has rank one (Szekely and Bakirov 2003), whose distribution gives the upper bound.
3. By Hutch++ (Meyer, Musco, Musco, Woodruff 2021), if 2 does not decide: sixteen probes find the strong directions of
M, whose share is computed exactly, and sixteen more measure the rest. This reads the three matrices three times.

The error exceeds the upper bounds of 2 and 3 once in 100,000 times. Small products are compared with the whole product
in fp64.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from .arguments import without_autocast
from .dispatch import force_fp32_sums, set_tf32
from .lowprec import has_wide_results, multiply_wide

PROBES = 16
Z = 4.265  # one in 100,000 values of a normal distribution is larger
_QUICK_PROBES = 32
# seed of the probes: fixed, so that a program chooses the same twice; unlikely to be the seed of the data
_SEED = 0x7E55E7A
_CHUNK = 1 << 24  # elements converted to fp64 at a time
_EXACT = 1 << 19  # products of fewer multiplications are checked against the whole product in fp64
_LEAST, _LEAST_FP64 = 1e-15, 1e-150  # norms below it may have lost squares that are nothing in fp32, or fp64
_FINE = 1e-3  # tolerances below it are probed in fp64: fp32 probes err by 1e-7 of |A| |B| themselves


@dataclass(frozen=True, slots=True)
class MeasuredError:
    """The likely relative error, and an upper bound that the error exceeds once in 100,000 times."""

    error: float
    upper: float


def bound_error(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, tolerance: float, *, lossless: bool) -> float:
    """Return an upper bound of the relative error of `c`, only as sharp as the tolerance needs.

    Takes matrices or stacks of matrices; waits for the device. `lossless` says that the operands were multiplied as
    they are.
    """
    a, b, c = a.detach(), b.detach(), c.detach()
    with torch.no_grad(), without_autocast(a):
        worst = _bound_by_norms(a, b, c) if lossless and c.numel() else math.inf
        if worst <= tolerance:
            return worst
        if _is_small(a, b):
            error = measure_error(a, b, c).upper
        else:
            quick = _probe_once(a, b, c, tolerance)
            error = quick.upper
            if quick.upper > tolerance >= 0.5 * quick.error or math.isinf(quick.error):
                error = measure_error(a, b, c).upper
    if a.dtype == torch.float64 and lossless and c.numel():
        # The probes are in fp64 themselves. Errors of many sums grow with the root of their length, not with their
        # length.
        error = max(error, worst / math.sqrt(max(1, a.shape[-1])))
    return error


def _bound_by_norms(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> float:
    left, right, size = torch.stack([_norm(x) for x in (a, b, c)]).tolist()
    is_fp64 = a.dtype == torch.float64
    if not (min(left, right, size) > (_LEAST_FP64 if is_fp64 else _LEAST) and max(left, right, size) < math.inf):
        is_zero = not (c.any() or (a.any() and b.any()))  # products with a matrix of zeros are not rounded
        return 0.0 if is_zero else math.inf
    k, out = a.shape[-1], torch.finfo(c.dtype)
    # A tensor core cuts sums off, which loses twice what rounding does: 2^-23. Below the normal numbers steps are even.
    rounding, step = (2.0**-52, 2.0**-1074) if is_fp64 else (2.0**-23, 2.0**-149)
    sums = k * rounding * left * right / size
    underflow = math.sqrt(c.numel()) / size * (out.tiny * out.eps + k * step)
    return float(sums + out.eps / 2 + underflow)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).double()


def _is_small(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.numel() * b.shape[-1] <= _EXACT or b.shape[-1] <= 2 * PROBES)


def _probe_once(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, tolerance: float) -> MeasuredError:
    """Return the error from one pass of probes, with the upper bound for an error of rank one."""
    multiply = _multiply_fp64 if tolerance < _FINE else _multiply_columns
    x = _draw_probes(b.shape[:-2], b.shape[-1], _QUICK_PROBES, b.device)
    rest = multiply(c, x) - multiply(a, multiply(b, x))
    size, mean = torch.stack([_norm(c), _norm(rest) / math.sqrt(_QUICK_PROBES)]).tolist()
    if not (size > _LEAST and math.isfinite(size + mean)):  # then fp64 decides
        return MeasuredError(math.inf, math.inf)
    upper = mean / math.sqrt(_chi_square_quantile(_QUICK_PROBES))
    return MeasuredError(_divide(mean, size), _divide(upper, size - upper))


def measure_error(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> MeasuredError:
    """Return the relative Frobenius error of the computed product `c`, as sharp as possible. Waits for the device."""
    a, b, c = a.detach(), b.detach(), c.detach()
    size = math.sqrt(float(sum(x.double().square().sum() for x in _split_rows(c)))) if c.numel() else 0.0
    if not math.isfinite(size):
        return MeasuredError(math.inf, math.inf)
    if _is_small(a, b):
        exact = _multiply_fp64(a, b.double())
        error = _divide(float((c.double() - exact).norm()), float(exact.norm()))
        return MeasuredError(error, error)
    likely, upper = _estimate_norm(_ProductError(a, b, c))
    # |AB| >= |C'| - |C' - AB|, so no second estimate is needed. fp64 rounds, too: a millionth covers that.
    return MeasuredError(_divide(likely, size), _divide(upper * (1 + 1e-6), size - upper))


def _divide(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return part / whole if whole > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class _ProductError:
    """C - AB, known only by its products with a few columns or rows."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return _multiply_fp64(self.c, x) - _multiply_fp64(self.a, _multiply_fp64(self.b, x))

    def under(self, q: torch.Tensor) -> torch.Tensor:
        """Return its transpose times q."""
        return _multiply_fp64(self.c.mT, q) - _multiply_fp64(self.b.mT, _multiply_fp64(self.a.mT, q))


def _estimate_norm(product: _ProductError) -> tuple[float, float]:
    """Return the Frobenius norm: the likely value and the upper bound."""
    b = product.b
    x, y = _draw_probes(b.shape[:-2], b.shape[-1], 2 * PROBES, b.device).split(PROBES, dim=-1)
    basis = torch.linalg.qr(product.times(x))[0]
    strong = float(product.under(basis).square().sum())
    rest = product.times(y)
    rest = rest - basis @ (basis.mT @ rest)
    gram = (rest.mT @ rest).reshape(-1, PROBES, PROBES).sum(0)
    mean = float(gram.diagonal().mean())
    if mean <= 0.0:
        return math.sqrt(strong), math.sqrt(strong)
    # E[(x' M'M y)^2] = |M'M|^2 for independent x, y; trace^2 / |M'M|^2 is the effective rank, halved for caution.
    crossed = float((gram - gram.diagonal().diag()).square().sum()) / (PROBES * (PROBES - 1))
    rank = max(1.0, 0.5 * mean * mean / crossed) if crossed > 0.0 else 1.0
    return math.sqrt(strong + mean), math.sqrt(strong + mean / _chi_square_quantile(PROBES * rank))


def _chi_square_quantile(freedom: float) -> float:
    """Return the value, over the mean, that one in 100,000 of a chi square is below (Wilson and Hilferty 1931)."""
    step = 2.0 / (9.0 * freedom)
    return max(1.0 - step - Z * math.sqrt(step), 0.25) ** 3


@functools.lru_cache(maxsize=16)
def _draw_probes(lead: tuple[int, ...], length: int, count: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(_SEED)
    return torch.randn((*lead, length, count), generator=generator, device=device, dtype=torch.float64)


# -- products with a few columns -------------------------------------------------------------------------------------


def _multiply_columns(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return `x @ y` to about 1e-7, without a copy of `x` in another type if `x` can be multiplied with wide sums."""
    if x.dtype == torch.float32:
        with set_tf32(False):
            return (x @ y.float()).double()
    if x.dtype != torch.bfloat16 or x.dim() > 2 or not has_wide_results():
        return _multiply_fp64(x, y)
    parts, rest = [], y
    for _ in range(3):  # three bf16 numbers hold the 24 bits of an fp32
        parts.append(rest.to(x.dtype))
        rest = rest - parts[-1].double()
    with force_fp32_sums("bf16"):
        wide = multiply_wide(x, torch.cat(parts, dim=-1), torch.float32).double()
    return sum(wide.split(y.shape[-1], dim=-1), torch.zeros((), device=x.device, dtype=torch.float64))


def _split_rows(x: torch.Tensor) -> Any:
    """Split into blocks of rows that are small enough to convert to fp64 without much memory."""
    rows = max(1, _CHUNK * x.shape[-2] // max(1, x.numel()))
    return x.split(rows, dim=-2)


def _multiply_fp64(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parts = [piece.double() @ y for piece in _split_rows(x)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
