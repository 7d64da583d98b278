"""Operators that know their precision, their tile and their joules: torch tensors in and out.

::

    from tessera import op

    y = op.matmul(a, b)                                             # torch's best path
    y = op.matmul(a, b, tile_shape=(128, 128, 64))                  # our Triton kernel of that tile
    y = op.matmul(a, b, error_tolerance=1e-2, stream=s)             # the cheapest precision within the bound

Names are loaded when first used; torch is imported with the first of them, Triton with the first tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import load_lazily

if TYPE_CHECKING:
    from .attention import flash_attention as flash_attention
    from .bounded import PrecisionChoice as PrecisionChoice
    from .bounded import choices as choices
    from .collective import all_reduce as all_reduce
    from .conv import conv2d as conv2d
    from .matmul import gemm as gemm
    from .matmul import linear as linear
    from .matmul import matmul as matmul
    from .moe import moe as moe
    from .normalize import layer_norm as layer_norm
    from .normalize import rms_norm as rms_norm
    from .normalize import softmax as softmax
    from .rounding import StochasticRounding as StochasticRounding
    from .rounding import stochastic_round as stochastic_round
    from .spectral import fft as fft
    from .spectral import ifft as ifft
    from .spectral import spectral_conv2d as spectral_conv2d
    from .spectral import spectral_wins as spectral_wins
    from .training import PrecisionSchedule as PrecisionSchedule
    from .training import dual_precision as dual_precision
    from .training import precision_schedule as precision_schedule

__all__ = load_lazily(  # noqa: PLE0605 - a list of strings, which the linter cannot see
    __name__,
    {
        "attention": "flash_attention",
        "bounded": "PrecisionChoice choices",
        "collective": "all_reduce",
        "conv": "conv2d",
        "matmul": "gemm linear matmul",
        "moe": "moe",
        "normalize": "layer_norm rms_norm softmax",
        "rounding": "StochasticRounding stochastic_round",
        "spectral": "fft ifft spectral_conv2d spectral_wins",
        "training": "PrecisionSchedule dual_precision precision_schedule",
    },
    needs="torch",
)
