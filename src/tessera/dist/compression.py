"""Smaller numbers for collectives: how values are rounded, what error that makes, and how the error is compensated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..errors import ArgumentError, check_choice

Format = Literal["fp16", "bf16", "fp8"]
FORMATS: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
BLOCK = 256
"""Number of values that share a scale. fp16 and fp8 have few exponents, so each block is scaled to use them."""
_SCALED = {"fp16": 65504.0, "fp8": 448.0}  # the largest finite number of each
_TINY = torch.finfo(torch.float32).tiny


@dataclass(slots=True)
class ErrorFeedback:
    """The rounding errors of one tensor's sums, which are added back at the next call with the same shape.

    Give each tensor (each gradient bucket) its own `ErrorFeedback`. Then errors do not add up over steps: the sum of
    what was sent follows the sum of what should have been sent.
    """

    _residuals: dict[str, torch.Tensor] = field(default_factory=dict)

    def add_to(self, stage: str, x: torch.Tensor) -> torch.Tensor:
        """Return the values plus the errors that are still owed to them."""
        before = self._residuals.get(stage)
        return x if before is None or before.shape != x.shape else x + before

    def keep(self, stage: str, residual: torch.Tensor) -> None:
        """Remember what could not be sent; values that are not finite are dropped, or no later sum would be finite."""
        self._residuals[stage] = torch.nan_to_num(residual, nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True, slots=True)
class Codec:
    """Rounds float32 values to a format: `encode` gives bytes, `decode` gives the values back.

    `stochastic`: unbiased.
    """

    format: Format
    stochastic: bool = False

    def __post_init__(self) -> None:
        check_choice("compress", self.format, FORMATS)
        if self.stochastic and self.format != "bf16":
            raise ArgumentError(
                f"stochastic rounding to {self.format} is not built", fix='compress="bf16", the format it works with'
            )

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the bytes of flat float32 values: scales first, if there are any, then the numbers."""
        if self.format == "bf16":
            return (round_by_chance(x) if self.stochastic else x.to(torch.bfloat16)).view(torch.uint8)
        padded = torch.nn.functional.pad(x, (0, _blocks(len(x)) * BLOCK - len(x))).view(-1, BLOCK)
        finite = torch.isfinite(padded)
        scale = torch.where(finite, padded, 0.0).abs().amax(1).clamp_min(_TINY) / _SCALED[self.format]
        padded = torch.where(finite, padded, torch.nan)  # fp8 has no infinity, and would send its largest number
        numbers = (padded / scale[:, None]).view(-1)[: len(x)].to(FORMATS[self.format])
        return torch.cat([scale.view(torch.uint8), numbers.contiguous().view(torch.uint8)])

    def decode(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        """Return the float32 values of some bytes."""
        dtype = FORMATS[self.format]
        if self.format == "bf16":
            return payload.clone().view(dtype).float()
        edge = 4 * _blocks(count)
        scale = payload[:edge].clone().view(torch.float32)
        numbers = payload[edge : edge + count * dtype.itemsize].clone().view(dtype).float()
        return numbers * scale.repeat_interleave(BLOCK)[:count]


def make_codec(compress: str | Codec | None) -> Codec | None:
    """Return the codec of a name; "bf16-stochastic" rounds up or down at random."""
    if compress is None or isinstance(compress, Codec):
        return compress
    name, _, how = compress.partition("-")
    if how not in ("", "stochastic"):
        raise ArgumentError(f"compress={compress!r} is not known", fix="fp16, bf16, fp8 or bf16-stochastic")
    return Codec(name, stochastic=how == "stochastic")  # type: ignore[arg-type]


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def round_by_chance(x: torch.Tensor, **options: torch.Generator) -> torch.Tensor:
    """Round float32 to bf16, up or down with the chance that makes the mean right; `options` are those of randint.

    bf16 is the upper half of a float32: add 16 random bits below it and cut them off. This is exact, for subnormals
    too.
    """
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, device=x.device, dtype=torch.int32, **options)
    rounded = ((bits + noise) & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(torch.bfloat16)


def largest(x: torch.Tensor) -> Any:
    """Return the largest magnitude, as a float32 scalar tensor; 0 for an empty tensor."""
    return x.abs().amax().float().reshape(1) if x.numel() else torch.zeros(1, device=x.device)
