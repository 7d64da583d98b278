"""What a kernel class may be expected to draw, before the samples are looked at.

A training step is shorter than the sensor's memory: there the samples know the sum well and the parts hardly, and what
the parts should be comes from here: watts from the energy model of the chip, the kernel's duration, and what its
operator's shapes say it computed and moved. A 1 us memset is close to a waiting board, whatever stands beside it.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..device import Device
from ..errors import TesseraError
from ..estimate.power import PowerModel
from ..joules import Floats
from ..timeline import Timeline
from ..timeline.columns import NONE
from ..timeline.link import Links
from ..timeline.shapes import CAUSAL
from .work import work_of

# How far a class may lie from its prior (relative standard deviation of what it draws above a waiting board): where its
# FLOPs and bytes are known, and where only its name and duration are. Kernels of the H200 in steady state scatter by
# about 15% around the power model with known work (benchmarks/README.md, energy of single kernels); doubled, as clocks
# and data are not known here.
KNOWN_SPREAD, GUESSED_SPREAD = 0.3, 0.45
# Without shapes: the share of the room between a waiting board and its limit that long kernels of a kind take. From
# steady-state powers of h200/kernels.jsonl: products 0.7-1.0, streams of device memory 0.65-0.9, the rest less.
_GUESSED_SHARE = {"matrix": 0.85, "memory": 0.7}
# A kernel of this length is half latency (launch, tail, drain), in which little switches.
_HALF_S = 3e-6
# Kernels run above the limit for tens of milliseconds before the board's governor acts: 900 W on a board of 700 W.
_BURST = 1.35
_MATRIX = re.compile(
    r"gemm|nvjet|cutlass|xmma|wgmma|matmul|sdpa|flash|fmha|attention|conv(?!ert)|winograd|implicit|mma_|dot_kernel|gemv|ampere_|"
    r"sm\d+_xmma|lstm|rnn",
    re.IGNORECASE,
)
_BYTES = {"f32": 4, "i32": 4, "f64": 8, "i64": 8, "c64": 8, "c128": 16, "f16": 2, "bf16": 2, "i16": 2}
_UNIT = {"bf16": "matrix.bf16", "f16": "matrix.fp16", "f32": "vector.fp32", "f64": "matrix.fp64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A board as the prior needs it: watts while waiting, the limit, and its power model where the chip is known."""

    static_w: float
    limit_w: float
    model: PowerModel | None = None
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Expected watts by class and their standard deviations."""

    watts: Floats
    sd_w: Floats


def board_of(name: str | None, samples_w: Floats) -> Board:
    """The board a trace or a power log names; what the catalogue lacks is read off the samples."""
    device = _device(name or "")
    low, high = (float(np.percentile(samples_w, q)) for q in (1.0, 99.5)) if len(samples_w) else (100.0, 400.0)
    if device is None:
        return Board(static_w=low, limit_w=max(high, 1.2 * low))
    model = PowerModel.from_device(device)
    bandwidth = device.memory.bandwidth_bytes_per_s
    return Board(
        static_w=model.static_w, limit_w=model.limit_w, model=model, bandwidth=bandwidth.value if bandwidth else None
    )


@functools.lru_cache(maxsize=32)
def _device(name: str) -> Device | None:
    """The catalogue's chip for a driver's name such as "NVIDIA H200"; None where none fits."""
    from ..hardware import identify_board

    if not name:
        return None
    try:
        return identify_board(name)
    except TesseraError:
        return None


def prior(timeline: Timeline, first: NDArray[np.int64], seconds: Floats, links: Links, board: Board) -> Prior:
    """Expected watts of classes: `first` is a row of each, `seconds` its typical duration."""
    expected = [_one(timeline, int(row), float(s), links, board) for row, s in zip(first, seconds, strict=True)]
    watts, spread = (np.array([f[i] for f in expected]) for i in (0, 1))
    floor_w = 0.05 * (board.limit_w - board.static_w)
    return Prior(watts=watts, sd_w=np.maximum(spread * (watts - board.static_w), floor_w))


def _one(timeline: Timeline, row: int, seconds: float, links: Links, board: Board) -> tuple[float, float]:
    """Watts and their relative spread of one class."""
    room_w = board.limit_w - board.static_w
    latency = seconds / (seconds + _HALF_S)
    name = timeline.name(row)
    matrix = timeline.kind(row) == "kernel" and _MATRIX.search(name) is not None
    above_static_w = _known_w(timeline, row, seconds, links, board, matrix)
    if above_static_w is not None:
        return board.static_w + min(above_static_w, _BURST * room_w), KNOWN_SPREAD
    share = _GUESSED_SHARE["matrix" if matrix else "memory"]
    return board.static_w + share * latency * room_w, GUESSED_SPREAD


def _known_w(timeline: Timeline, row: int, seconds: float, links: Links, board: Board, matrix: bool) -> float | None:
    """Watts above a waiting board from what is known of the work; None where nothing is."""
    model = board.model
    if model is None or seconds <= 0:
        return None
    active_w = model.active_w * seconds / (seconds + _HALF_S)
    moved = int(timeline["bytes"][row])
    if timeline.kind(row) in ("memcpy", "memset") and moved > 0:
        rate = min(moved * (2 if timeline.kind(row) == "memcpy" else 1) / seconds, board.bandwidth or math.inf)
        return 0.3 * active_w + rate * model.hbm_j_per_byte  # a copy engine or a few SMs do it
    shapes = int(links.shapes[row])
    if shapes == NONE or not matrix:
        return None
    flops, dtype = matrix_flops(timeline.name(int(links.op[row])), timeline.names[shapes])
    if not flops:
        return None
    joules = flops * model.j_per_flop.get(_UNIT.get(dtype, ""), max(model.j_per_flop.values(), default=0.0))
    return active_w + joules / seconds


def matrix_flops(op: str, shapes: str) -> tuple[float, str]:
    """FLOPs and dtype of a product, a convolution or an attention; 0 where name and shapes do not say."""
    # The joules per FLOP were fitted with attention counted in full, causal or not.
    work = work_of(op, shapes.removesuffix(f" {CAUSAL}"))
    return (work.flops, work.dtype) if work and work.matrix and work.flops else (0.0, "")
