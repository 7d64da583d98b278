"""Predicts what a kernel class should draw, before the samples are used.

A training step is shorter than the sensor's memory, so the samples tell the sum well but hardly the parts. What the
parts should be is predicted here: from the chip's energy model, the kernel's duration, and what its operator's shapes
tell it computed and moved. For example, a 1 us memset draws little more than a waiting board, whatever runs beside it.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
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
from .work import OpWork, work_of


@dataclass(frozen=True, slots=True)
class Draw:
    """What kernels of a family draw above a waiting board, as factors of the chip's power model.

    `active` while they occupy all SMs, `flop` for each FLOP, `hbm` and `l2` for each byte of device memory or cache;
    `spread` is the relative standard deviation of the result.
    """

    active: float
    flop: float
    hbm: float
    l2: float
    spread: float


# Fitted to 500 kernels of an H200, each alone on random numbers (benchmarks/fit/fit_prior.py). The fitted kernels are
# 11 to 21% off (root mean square; reductions 33%), kernels recorded separately 3 to 13%, loads in bursts beside others
# 4 to 25%. In 60 s of GPT-2's training, the six kernels whose watts the samples knew best were 11 to 25% off, 19% root
# mean square; six kernels do not distinguish that from 25%, which is used. The sums of whole models
# (benchmarks/fit/fit_prior_spread.py) agree with 25%, and also with less: they do not tell what belongs to one kernel.
# Convolutions are not fitted; models of them are 42% off.
DRAWS = {
    "gemm": Draw(0.81, 2.01, 1.52, 0.80, 0.25),
    "attention": Draw(1.49, 1.25, 1.86, 1.24, 0.25),
    "elementwise": Draw(1.87, 0.0, 0.92, 2.58, 0.25),
    "norm": Draw(1.34, 0.0, 2.05, 3.98, 0.25),
    "softmax": Draw(1.10, 0.0, 2.69, 1.00, 0.25),
    "copy": Draw(1.89, 0.0, 1.04, 2.33, 0.25),
    "reduce": Draw(1.07, 0.0, 1.52, 2.48, 0.4),
    "memcpy": Draw(0.69, 0.0, 1.65, 1.65, 0.25),
    "conv": Draw(1.0, 1.0, 0.0, 0.0, 0.45),
}
GUESSED_SPREAD = 0.45
"""Relative standard deviation if only name and duration are known."""
# Without shapes: the share of the power between a waiting board and its limit that long kernels of a kind take. From
# steady-state powers of h200/kernels.jsonl: products 0.7-1.0, streams of device memory 0.65-0.9, the rest less.
_GUESSED_SHARE = {"matrix": 0.85, "memory": 0.7}
_L2_BYTES = 40e6
"""Less than this may be in the cache of an H200 (50 MB)."""
# A kernel of this length is half latency (launch, tail, drain, SMs without work), in which little power is drawn. Of 3,
# 8, 12, 16, 20 and 30 us, this is the longest with which single kernels fit as well as with 3 (20% off). The joules of
# 46 development models were 60% off with 3 us and are 35% off now, those of 50 held-out ones 42% and 22%
# (benchmarks/fit/fit_prior_spread.py).
HALF_S = 12e-6
# Kernels run above the limit for tens of milliseconds before the board's governor acts: products draw 930 W in bursts
# on a board of 700 W (benchmarks/data/h200_mixture_dev-11.json.gz).
_BURST = 1.45
# What a waiting board draws, as a share of its limit: 0.08 to 0.42 on the GPUs of the catalogue (hardware/catalog),
# mostly between these two. If the lowest sample is above the second share of the highest, the board was never waiting.
_WAITING, _STATIC_SD_W = (0.1, 0.3), 40.0
_MATRIX = re.compile(
    r"gemm|nvjet|cutlass|xmma|wgmma|matmul|sdpa|flash|fmha|attention|conv(?!ert)|winograd|implicit|(?<!ga)mma_|dot_kernel|gemv|ampere_|"
    r"sm\d+_xmma|lstm|rnn",
    re.IGNORECASE,
)
UNITS = {"bf16": "matrix.bf16", "f16": "matrix.fp16", "f32": "vector.fp32", "f64": "matrix.fp64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What the prior needs to know of a board: watts while waiting, the limit, and its power model if known."""

    static_w: float
    limit_w: float
    static_sd_w: float = _STATIC_SD_W
    model: PowerModel | None = None
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Expected watts by class and their standard deviations."""

    watts: Floats
    sd_w: Floats


def board_of(name: str | None, samples_w: Floats) -> Board:
    """Return the board that a trace or a power log names; the samples tell what the catalogue does not have."""
    device = _device(name or "")
    low, high = (float(np.percentile(samples_w, q)) for q in (1.0, 99.5)) if len(samples_w) else (100.0, 400.0)
    if device is None:
        static_w, sd_w = low, _STATIC_SD_W
        if low > _WAITING[1] * high:  # it was never seen waiting, so it waits at less than the lowest sample
            static_w, sd_w = 0.5 * (low + _WAITING[0] * high), max(0.5 * (low - _WAITING[0] * high), _STATIC_SD_W)
        return Board(static_w=static_w, limit_w=max(high, 1.2 * low), static_sd_w=sd_w)
    model = PowerModel.from_device(device)
    bandwidth = device.memory.bandwidth_bytes_per_s
    return Board(
        static_w=model.static_w, limit_w=model.limit_w, model=model, bandwidth=bandwidth.value if bandwidth else None
    )


@functools.lru_cache(maxsize=32)
def _device(name: str) -> Device | None:
    """Return the catalogue's chip for a driver's name such as "NVIDIA H200"; None if none fits."""
    from ..hardware import identify_board

    if not name:
        return None
    try:
        return identify_board(name)
    except TesseraError:
        return None


def prior(timeline: Timeline, first: NDArray[np.int64], seconds: Floats, links: Links, board: Board) -> Prior:
    """Return the expected watts of classes: `first` is a row of each, `seconds` its typical duration."""
    works = _find_works(timeline, first, links)
    expected = [
        _one(timeline, int(row), float(s), work, board) for row, s, work in zip(first, seconds, works, strict=True)
    ]
    watts, spread = (np.array([f[i] for f in expected]) for i in (0, 1))
    floor_w = 0.05 * (board.limit_w - board.static_w)
    return Prior(watts=watts, sd_w=np.maximum(spread * (watts - board.static_w), floor_w))


def _find_works(timeline: Timeline, first: NDArray[np.int64], links: Links) -> list[OpWork | None]:
    """Return the work of each class, if its operator's shapes tell it and this class alone does that work."""
    keys: list[tuple[str, str, bool] | None] = []
    for row in first.tolist():
        op, shapes = int(links.op[row]), int(links.shapes[row])
        known = NONE not in (op, shapes) and timeline.kind(row) == "kernel"
        keys.append((timeline.name(op), timeline.names[shapes], _is_matrix(timeline, row)) if known else None)
    sharing = Counter(keys)
    works: list[OpWork | None] = []
    for key in keys:
        work = None
        # If an operator has several kernels (a norm's backward), shapes do not tell each one's part; for a product,
        # they do.
        if key is not None and (sharing[key] == 1 or key[2]):
            work = work_of(key[0], key[1])
        works.append(work if work is not None and key is not None and work.matrix == key[2] else None)
    return works


def _is_matrix(timeline: Timeline, row: int) -> bool:
    return timeline.kind(row) == "kernel" and _MATRIX.search(timeline.name(row)) is not None


def _one(timeline: Timeline, row: int, seconds: float, work: OpWork | None, board: Board) -> tuple[float, float]:
    """Return the watts of one class and their relative spread."""
    room_w = board.limit_w - board.static_w
    known = _known_w(timeline, row, seconds, work, board)
    if known is not None:
        return board.static_w + min(known[0], _BURST * room_w), known[1]
    share = _GUESSED_SHARE["matrix" if _is_matrix(timeline, row) else "memory"]
    return board.static_w + share * seconds / (seconds + HALF_S) * room_w, GUESSED_SPREAD


def _known_w(
    timeline: Timeline, row: int, seconds: float, work: OpWork | None, board: Board
) -> tuple[float, float] | None:
    """Return the watts above a waiting board by the known work, and their spread; None if the work is unknown."""
    model, most = board.model, board.bandwidth or math.inf
    if model is None or seconds <= 0:
        return None
    active_w = model.active_w * seconds / (seconds + HALF_S)
    moved = int(timeline["bytes"][row])
    if timeline.kind(row) in ("memcpy", "memset") and moved > 0:
        copying = DRAWS["memcpy"]
        rate = min(moved * (2 if timeline.kind(row) == "memcpy" else 1) / seconds, most)
        busy = rate / most if board.bandwidth else 1.0  # during a copy from the host the board mostly waits
        return copying.active * active_w * busy + copying.hbm * model.hbm_j_per_byte * rate, copying.spread
    draw = DRAWS.get(work.family) if work is not None else None
    if work is None or draw is None or (work.matrix and not work.flops) or (not work.matrix and not work.bytes):
        return None
    per_flop_j = model.j_per_flop.get(UNITS.get(work.dtype, ""), max(model.j_per_flop.values(), default=0.0))
    watts = draw.active * active_w + draw.flop * per_flop_j * (work.flops or 0.0) / seconds
    rate = (work.bytes or 0.0) / seconds
    from_hbm_w = draw.hbm * model.hbm_j_per_byte * min(rate, most)
    from_l2_w = draw.l2 * model.l2_j_per_byte * rate
    fits = (work.bytes or 0.0) < _L2_BYTES  # the data may still be in the cache, or not
    return watts + (0.5 * (from_hbm_w + from_l2_w) if fits else from_hbm_w), draw.spread
