"""Tiles: what a kernel computes at a time, whether it fits the chip, and the nearest one that does.

The shared memory that a tile needs is not estimated: the kernel is compiled for the target (Triton makes a cubin
without a GPU), and the compiler tells. A formula orders the search for a neighbour, and is used if Triton cannot
compile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, TileError, find_caller
from . import hints

DEFAULT_ARCH = 90
"""The target if there is no GPU: Hopper, the chip on which our figures were measured."""

STAGES = 3
"""Tiles in flight: one multiplied while two load. `hints.cp_async_depth` overrides it."""

SIDES = (16, 32, 64, 128, 256)
"""Sides a tile may have: tl.dot needs 16, and above 256 the accumulators do not fit in registers."""

ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

# Registers of an SM and of a thread (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", the
# same from 7.0 to 12.0), and what a thread needs beside its accumulators: ptxas refuses 128 accumulators in 128
# registers and accepts 128 in 255.
_SM_REGISTERS, _THREAD_REGISTERS, _OTHER_REGISTERS = 65536, 255, 32
_TENSOR_MEMORY = range(100, 120)  # capabilities whose accumulators lie in tensor memory (PTX ISA, tcgen05)

# KiB of shared memory that one block may have, by compute capability (the same table), for chips that are not in the
# catalogue.
_BLOCK_KIB = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}
_RESERVED_BYTES = 1024  # of an SM's shared memory the system keeps 1 KiB per block (same guide, 8.0 on)

# Rows that one tensor-core instruction computes: wgmma m64 on Hopper, tcgen05 m64 on Blackwell, else mma.sync m16 (PTX
# ISA, the chapters on these instructions).
_INSTRUCTION = {90: (64, "wgmma"), 100: (64, "tcgen05.mma")}
_NEIGHBOURS = 8  # tiles that are compiled before the search gives up: each takes about half a second


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of the result that a block computes, and the depth that it takes at a time."""

    bm: int
    bn: int
    bk: int

    @classmethod
    def of(cls, op: str, value: Any) -> Tile:
        """Make a tile from `tile_shape=(BM, BN, BK)`; a tile is returned as it is."""
        if isinstance(value, Tile):
            return value
        sides = tuple(value) if isinstance(value, (tuple, list)) else ()
        if len(sides) != 3 or any(not isinstance(side, int) or isinstance(side, bool) for side in sides):
            fix = "tile_shape is (BM, BN, BK), such as (128, 128, 64)"
            raise ArgumentError(f"op.{op}: tile_shape={value!r}", fix=fix)
        return cls(*sides)

    @property
    def sides(self) -> tuple[int, int, int]:
        """Return (BM, BN, BK)."""
        return self.bm, self.bn, self.bk

    def __str__(self) -> str:
        return f"({self.bm}, {self.bn}, {self.bk})"


@dataclass(frozen=True, slots=True)
class TileFit:
    """The shared memory of a tile that fits. `note` says why only the formula was used and nothing was compiled."""

    shared_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class _TiledKernel:
    compile_fn: Callable[[Tile, str, int, int, Any], Any]
    free: tuple[bool, bool, bool]
    formula: Callable[[Tile, str, int], int]
    sides: int


@dataclass(frozen=True, slots=True)
class _Query:
    """A kernel and how it would run; the same query is made for one tile after another."""

    name: str
    dtype: str
    stages: int
    warps: int
    arch: int


_kernels: dict[str, _TiledKernel] = {}


def operand_bytes(tile: Tile, dtype: str, stages: int) -> int:
    """Return an upper bound of the operands' shared memory, for a matrix product with `stages` tiles in flight."""
    return max(1, stages) * (tile.bm + tile.bn) * tile.bk * ITEM_BYTES[dtype]


def register(
    name: str,
    compile_fn: Callable[[Tile, str, int, int, Any], Any],
    *,
    free: tuple[bool, bool, bool] = (True, True, True),
    formula: Callable[[Tile, str, int], int] = operand_bytes,
    sides: int = 3,
) -> None:
    """Register how a kernel is compiled: (tile, precision, stages, warps, GPUTarget) -> metadata with `.shared`.

    `free` says which sides a nearest tile may change (attention's third is the head's size); `formula` estimates the
    bytes, and `sides` is how many sides a caller writes.
    """
    _kernels[name] = _TiledKernel(compile_fn, free, formula, sides)
    _fit.cache_clear()


def pipeline(tile: Tile) -> tuple[int, int]:
    """Return (stages, warps) of a launch: a schedule's hints, or else our own choice."""
    asked = hints.current()
    stages = asked.cp_async_depth or STAGES
    return stages, 4 * asked.warp_mma_concurrency if asked.warp_mma_concurrency else default_warps(tile)


def default_warps(tile: Tile) -> int:
    """Return enough warps that a thread holds at most 128 accumulators; a power of two."""
    wanted = tile.bm * tile.bn / (32 * 128)
    return 16 if wanted > 8 else 8 if wanted > 4 else 4


def arch_of(device: Any = None) -> int:
    """Return the compute capability of a CUDA device (90 for 9.0), by default the current one; Hopper's without any."""
    torch: Any = sys.modules.get("torch")
    if torch is None or (device is not None and torch.device(device).type != "cuda") or not torch.cuda.is_available():
        return DEFAULT_ARCH
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * int(major) + int(minor)


@functools.cache
def limit_bytes(arch: int) -> int:
    """Return the shared memory that one block may have: the catalogue's figure of the capability, or CUDA's table."""
    from ..hardware import catalogue

    for device in catalogue().values():
        shared = device.caches.shared_bytes
        if device.compute_capability == f"sm{arch}" and shared is not None and arch >= 80:
            return int(shared.value) - _RESERVED_BYTES
    return 1024 * _BLOCK_KIB[max((listed for listed in _BLOCK_KIB if listed <= arch), default=70)]


def check(
    name: str, tile: Tile, dtype: Any, stages: int, warps: int, arch: int | None = None, *, op: str | None = None
) -> TileFit:
    """Return how `tile` fits the kernel `name` on a chip; raise TileError with the nearest tile if it does not.

    `dtype` is torch's or a name ("bf16"), `op` the operator that was called if it is not `name`. The first answer takes
    a compilation of about 0.3 s; later ones are remembered.
    """
    fit = _fit(_Query(name, precision_name(dtype), stages, warps, arch or arch_of()), tile)
    if isinstance(fit, TileFit):
        return fit
    why, fix = fit
    raise TileError(f"op.{op or name}: tile_shape={format_tile(name, tile)} cannot work", why=why, fix=fix)


def plan_launch(
    name: str, tile: Tile, dtype: Any, device: Any, *, op: str | None = None, warn: bool = True
) -> tuple[int, int]:
    """Return (stages, warps) of a tile that fits a device; raise TileError if it does not, warn if it is slow."""
    stages, warps = pipeline(tile)
    arch = arch_of(device)
    check(name, tile, dtype, stages, warps, arch, op=op)
    if warn:
        advise(op or name, tile, dtype, arch)
    return stages, warps


def precision_name(dtype: Any) -> str:
    """Return the name of a dtype; a name is returned as it is."""
    if isinstance(dtype, str):
        return dtype
    from .arguments import PRECISION_OF

    if dtype not in PRECISION_OF:
        raise ArgumentError(f"no kernel of ours computes in {dtype}", fix=f"one of {', '.join(map(str, PRECISION_OF))}")
    return PRECISION_OF[dtype]


@functools.lru_cache(maxsize=1024)
def _fit(query: _Query, tile: Tile) -> TileFit | tuple[str, str]:
    """Return the fit, or why there is none and what to do."""
    free = _kernels[query.name].free
    wrong = [side for side, may in zip(tile.sides, free, strict=True) if may and side not in SIDES]
    fit: TileFit | str
    if wrong:
        fit = f"{wrong[0]} is not a power of two from {SIDES[0]} to {SIDES[-1]}"
    else:
        fit = _explain_spill(query, tile) or _measure(query, tile)
    if isinstance(fit, TileFit) and fit.shared_bytes > limit_bytes(query.arch):
        needs = f"it needs {fit.shared_bytes:,} bytes of shared memory with {query.stages} tiles in flight"
        fit = f"{needs}; a block of sm_{query.arch} has {limit_bytes(query.arch):,}"
    if isinstance(fit, TileFit):
        return fit
    nearest = _nearest(query, tile)
    if nearest is None:
        return fit, "no tile near it works either: another precision, or fewer tiles in flight (cp_async_depth)"
    return fit, f"tile_shape={format_tile(query.name, nearest)} is the nearest that fits"


def format_tile(name: str, tile: Tile) -> tuple[int, ...]:
    """Return a tile as a caller of the kernel `name` writes it."""
    return tile.sides[: _kernels[name].sides] if name in _kernels else tile.sides


def _explain_spill(query: _Query, tile: Tile) -> str:
    """Return why the accumulators do not fit in registers; empty if they do."""
    threads = 32 * query.warps
    each, room = tile.bm * tile.bn // threads, min(_THREAD_REGISTERS, _SM_REGISTERS // threads)
    if query.arch in _TENSOR_MEMORY or each + _OTHER_REGISTERS <= room:
        return ""
    return f"a thread of its {query.warps} warps would hold {each} accumulators and has {room} registers for everything"


def _measure(query: _Query, tile: Tile) -> TileFit | str:
    """Return what the compiler answers: the bytes, or why it refuses."""
    kernel = _kernels[query.name]
    missing = _why_not_compiled()
    if missing:
        bound = kernel.formula(tile, query.dtype, query.stages)
        return TileFit(bound, f"{missing}: an upper bound, nothing was compiled")
    from triton.backends.compiler import GPUTarget
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import PTXASError

    target = GPUTarget("cuda", query.arch, 32)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # when ptxas fails, Triton prints the whole program
            return TileFit(int(kernel.compile_fn(tile, query.dtype, query.stages, query.warps, target).shared))
    except (CompilationError, PTXASError) as e:
        message = getattr(e, "error_message", None) or str(e).strip().splitlines()[-1]
        return f"Triton does not compile it for sm_{query.arch}: {message}"


def _why_not_compiled() -> str:
    """Return why nothing can be compiled here; empty if it can."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set"
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def _nearest(query: _Query, tile: Tile) -> Tile | None:
    """Return the tile the fewest halvings and doublings away that the compiler accepts.

    It has whole fragments if the requested tile has them; otherwise the warning of `advise` would follow.
    """
    kernel, limit = _kernels[query.name], limit_bytes(query.arch)
    rows, _ = _INSTRUCTION.get(query.arch, (16, ""))

    def order(near: Tile) -> tuple[Any, ...]:
        steps = sum(abs(math.log2(max(1, x)) - math.log2(y)) for x, y in zip(tile.sides, near.sides, strict=True))
        # Among equally near tiles, those that surely fit come first, because each test is a compilation.
        too_large = kernel.formula(near, query.dtype, query.stages) > limit
        return tile.bm % rows == 0 and near.bm % rows != 0, steps, too_large, -near.bm * near.bn * near.bk

    sides = [SIDES if may else (side,) for side, may in zip(tile.sides, kernel.free, strict=True)]
    # The formula differs a little from what is compiled, in both directions: half as much again is surely too much.
    candidates = [
        near
        for near in itertools.starmap(Tile, itertools.product(*sides))
        if kernel.formula(near, query.dtype, query.stages) <= 1.5 * limit and not _explain_spill(query, near)
    ]
    for near in sorted(candidates, key=order)[:_NEIGHBOURS]:
        fit = _measure(query, near)
        if isinstance(fit, TileFit) and fit.shared_bytes <= limit:
            return near
    return None


_warned: set[tuple[str, int, str]] = set()


def advise(op: str, tile: Tile, dtype: Any, arch: int | None = None) -> None:
    """Warn, once per calling line, if a tile works but is not a multiple of the tensor core's fragment."""
    arch = arch or arch_of()
    rows, instruction = _INSTRUCTION.get(arch, (16, "mma.sync"))
    if tile.bm % rows == 0:
        return
    warn_once(
        f"op.{op}: tile_shape={format_tile(op, tile)}: BM={tile.bm} is not a multiple of {rows}, the rows of one "
        f"{instruction} fragment of {precision_name(dtype)} on sm_{arch}: slower instructions are used"
    )


def warn_once(text: str) -> None:
    """Warn at the first frame outside this package, once per line there.

    Python's own record of warnings is not used: it is emptied whenever a module changes the filters, as torch does.
    """
    if sys.modules["torch"].compiler.is_compiling():
        return
    file, line, level = find_caller()
    if (file, line, text) not in _warned:
        _warned.add((file, line, text))
        warnings.warn(text, UserWarning, stacklevel=level)
