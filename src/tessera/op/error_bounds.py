"""How wrong a product in low precision is: predicted from the rounding of its operands, and measured by random probes.

`predict_error` needs no product. If the rounding errors dA, dB of the operands are independent along k, the expected
square of the product's error is the sum over l of |dA[:, l]|^2 |B[l, :]|^2 + |A[:, l]|^2 |dB[l, :]|^2; the rounding of
sums and result is added. Equal entries round alike, and then the error can be sqrt(k) times larger.

`measure_error` bounds |C' - AB| of a computed product C' by random vectors, after Freivalds (1977): E[|Mx|^2] = |M|^2
for Gaussian x. Sixteen probes find the strong directions of M, whose share is computed exactly (Hutch++: Meyer, Musco,
Musco, Woodruff 2021), sixteen more measure the rest. The estimate has the law of a mean of chi squares whose degrees of
freedom follow from the probes' own Gram matrix; the upper end is taken at one in 100,000. docs/precision.md has more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .casting import cast

PROBES = 16
Z = 4.265  # one in 100,000 of a normal law lies beyond
# The predicted error is a mean over roundings. Single products of 64 and more exceed it by up to 40% where few entries
# carry the norm (benchmarks/measure/error_bounds.py prints it). It only drops what is not worth running: probes decide.
MARGIN = 1.1
_SEED = 0x7E55E7A  # of the probes: fixed, so that a program chooses the same twice; unlikely to be the data's own
_CHUNK = 1 << 24  # elements converted to fp64 at a time
_EXACT = 1 << 19  # products of fewer multiplications are checked against the whole product in fp64
# Hopper's tensor cores sum fp8 products in about 14 bits (DeepSeek-V3 technical report, 2024, 3.3.2), 32 of them along
# k with each instruction (PTX ISA, wgmma: .k32), and cut the rest off: towards zero, so that the losses add up.
_FAST_ROUNDOFF = 2.0**-14
_FAST_STEP = 32
_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """What is known before a product is made: squared norms along k, the norm of the product, the largest values."""

    a: torch.Tensor
    b: torch.Tensor
    a_squares: torch.Tensor
    b_squares: torch.Tensor
    norm: float
    amax: tuple[float, float]
    rounded: dict[str, float] = field(default_factory=dict)
    """The squared error predicted for a precision, computed once."""
    each: bool = False
    """Whether each matrix of a stack has a scale of its own in fp16 too, as with a tile."""

    @property
    def is_finite(self) -> bool:
        """Whether every entry is finite."""
        return all(math.isfinite(x) for x in self.amax)


@dataclass(frozen=True, slots=True)
class MeasuredError:
    """The likely relative error, and the one it exceeds once in 100,000 times."""

    error: float
    upper: float


def inspect_operands(a: torch.Tensor, b: torch.Tensor, *, each: bool = False) -> Operands:
    """Read both matrices (or batches of matrices); waits for the device."""
    a, b = a.detach(), b.detach()
    some = a.numel() and b.numel()
    amax = tuple(float(torch.linalg.vector_norm(x, math.inf)) if some else 0.0 for x in (a, b))
    norm = 0.0
    if all(math.isfinite(x) and x > 0 for x in amax):
        norm = _estimate_norm(_ProductError(a, b, None))[0]
    return Operands(
        a=a,
        b=b,
        a_squares=_squares(a, -2),
        b_squares=_squares(b, -1),
        norm=norm,
        amax=(amax[0], amax[1]),
        each=each,
    )


def predict_error(operands: Operands, precision: str, out_dtype: torch.dtype, accumulate: str = "fp32") -> float:
    """The relative Frobenius error to expect of a precision, times a margin; see the module."""
    if operands.norm == 0.0:
        return 0.0 if min(operands.amax) == 0.0 else math.inf
    if precision not in operands.rounded:
        operands.rounded[precision] = _predict_rounding(operands, precision)
    k = operands.a.shape[-1]
    sums = _ROUNDOFF[torch.float64 if precision == "fp64" else torch.float32] ** 2 * k
    if accumulate == "fast" and precision in ("fp8", "fp8_row"):
        # After j steps of J a running sum has about sqrt(j / J) of the last one's size: two thirds in the mean.
        sums += (_FAST_ROUNDOFF * 2 / 3 * math.ceil(k / _FAST_STEP)) ** 2
    rounded = operands.rounded[precision] + sums * float((operands.a_squares * operands.b_squares).sum())
    # Values spread evenly over a binade round by 0.4 unit roundoffs in the root mean square.
    return MARGIN * math.hypot(math.sqrt(rounded) / operands.norm, 0.4 * 2 * _ROUNDOFF[out_dtype])


def _predict_rounding(operands: Operands, precision: str) -> float:
    """The expected square of what rounding the operands does to the product."""
    total = 0.0
    for x, other in ((operands.a, operands.b_squares), (operands.b.mT, operands.a_squares)):
        if not _is_exact(x.dtype, precision):
            total += float((_rounding_squares(x, precision, operands.each) * other).sum())
    return total


def measure_error(operands: Operands, c: torch.Tensor) -> MeasuredError:
    """Probe the computed product `c`: its relative Frobenius error against the exact product of the same operands."""
    c = c.detach()
    size = math.sqrt(float(sum(x.double().square().sum() for x in _split_rows(c)))) if c.numel() else 0.0
    if not math.isfinite(size):
        return MeasuredError(math.inf, math.inf)
    if (
        operands.a.shape[-2] * operands.a.shape[-1] * c.numel() // max(1, c.shape[-2]) <= _EXACT
        or c.shape[-1] <= 2 * PROBES
    ):
        exact = _multiply_fp64(operands.a, operands.b.double())
        error = _divide(float((c.double() - exact).norm()), float(exact.norm()))
        return MeasuredError(error, error)
    likely, upper = _estimate_norm(_ProductError(operands.a, operands.b, c))
    # |AB| >= |C'| - |C' - AB|: no second estimate is needed. fp64 itself rounds: a millionth covers it.
    return MeasuredError(_divide(likely, size), _divide(upper * (1 + 1e-6), size - upper))


def _divide(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return part / whole if whole > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class _ProductError:
    """C - AB, or AB where C is None, known by what it does to a few columns or rows."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None

    def times(self, x: torch.Tensor) -> torch.Tensor:
        y = _multiply_fp64(self.a, _multiply_fp64(self.b, x))
        return y if self.c is None else _multiply_fp64(self.c, x) - y

    def under(self, q: torch.Tensor) -> torch.Tensor:
        """Its transpose times q."""
        y = _multiply_fp64(self.b.mT, _multiply_fp64(self.a.mT, q))
        return y if self.c is None else _multiply_fp64(self.c.mT, q) - y

    def probe(self, generator: torch.Generator) -> torch.Tensor:
        shape = (*self.b.shape[:-2], self.b.shape[-1], PROBES)
        return torch.randn(shape, generator=generator, device=self.b.device, dtype=torch.float64)


def _estimate_norm(product: _ProductError) -> tuple[float, float]:
    """The Frobenius norm, likely and at most."""
    generator = torch.Generator(product.b.device).manual_seed(_SEED)
    basis = torch.linalg.qr(product.times(product.probe(generator)))[0]
    strong = float(product.under(basis).square().sum())
    rest = product.times(product.probe(generator))
    rest = rest - basis @ (basis.mT @ rest)
    gram = (rest.mT @ rest).reshape(-1, PROBES, PROBES).sum(0)
    mean = float(gram.diagonal().mean())
    if mean <= 0.0:
        return math.sqrt(strong), math.sqrt(strong)
    # E[(x' M'M y)^2] = |M'M|^2 for independent x, y; trace^2 / |M'M|^2 is the rank that counts, halved for caution.
    crossed = float((gram - gram.diagonal().diag()).square().sum()) / (PROBES * (PROBES - 1))
    rank = max(1.0, 0.5 * mean * mean / crossed) if crossed > 0.0 else 1.0
    return math.sqrt(strong + mean), math.sqrt(strong + mean / _chi_square_quantile(PROBES * rank))


def _chi_square_quantile(freedom: float) -> float:
    """The quantile of a chi square over its mean that one in 100,000 falls under (Wilson and Hilferty 1931)."""
    step = 2.0 / (9.0 * freedom)
    return max(1.0 - step - Z * math.sqrt(step), 0.25) ** 3


# -- fp64 in pieces ------------------------------------------------------------------------------------------------


def _split_rows(x: torch.Tensor) -> Any:
    """Blocks of rows that are small enough to be converted to fp64 without much memory."""
    rows = max(1, _CHUNK * x.shape[-2] // max(1, x.numel()))
    return x.split(rows, dim=-2)


def _multiply_fp64(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parts = [piece.double() @ y for piece in _split_rows(x)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _squares(x: torch.Tensor, along: int) -> torch.Tensor:
    """Sums of squares along a dimension, in fp64."""
    if along == -1:
        return torch.cat([p.double().square().sum(-1) for p in _split_rows(x)], dim=-1)
    total: Any = sum(p.double().square().sum(-2) for p in _split_rows(x))
    return total


def _rounding_squares(x: torch.Tensor, precision: str, each: bool = False) -> torch.Tensor:
    """Sums of squares of what rounding does to each entry, for each column."""
    if x.dim() > 2 and (precision in ("fp8", "fp8_row") or (each and precision == "fp16")):  # scales of their own
        return torch.stack([_rounding_squares(matrix, precision) for matrix in x])
    rounded, scale = cast(x, precision)
    total: Any = 0.0
    row = 0
    for before, after in zip(_split_rows(x), _split_rows(rounded), strict=True):
        back = after.double()
        if scale is not None:
            back = back * (scale if scale.dim() == 0 else scale[..., row : row + after.shape[-2], :]).double()
        total = total + (back - before.double()).square().sum(-2)
        row += after.shape[-2]
    return total


def _is_exact(dtype: torch.dtype, precision: str) -> bool:
    """Whether a precision holds every value of a type."""
    holds = {
        torch.bfloat16: ("bf16", "tf32", "fp32", "fp64"),
        torch.float16: ("fp16", "tf32", "fp32", "fp64"),
        torch.float32: ("fp32", "fp64"),
        torch.float64: ("fp64",),
    }
    return precision in holds[dtype]
