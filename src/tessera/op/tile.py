"""Tiles: what a kernel computes at a time, whether it fits the chip, and the nearest one that does.

The shared memory a tile needs is not estimated: the kernel is compiled for the target (Triton makes a cubin without a
GPU) and asked. A closed formula only orders the search for a neighbour, and stands in, with a note, where Triton is not
installed or runs as an interpreter.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, TileError
from . import hints

DEFAULT_ARCH = 90
"""The target where there is no GPU: Hopper, the chip our figures are from."""

STAGES = 3
"""Tiles in flight: one multiplied while two load. `hints.cp_async_depth` overrides it."""

SIDES = (16, 32, 64, 128, 256)
"""Sides a tile may have: tl.dot needs 16, and above 256 the accumulators do not fit in registers (below)."""

ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

# Registers of an SM and of a thread (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", the
# same from 7.0 to 12.0), and what a thread needs beside accumulators: ptxas refuses 128 of 128 and takes 128 of 255.
_SM_REGISTERS, _THREAD_REGISTERS, _OTHER_REGISTERS = 65536, 255, 32
_TENSOR_MEMORY = range(100, 120)  # capabilities whose accumulators lie in tensor memory (PTX ISA, tcgen05)

# Shared memory one block may have, by compute capability: the same table. Used where the catalogue has no figure.
_BLOCK_BYTES = {
    70: 98304, 75: 65536, 80: 166912,
    86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376,
}  # fmt: skip
_RESERVED_BYTES = 1024  # of an SM's shared memory the system keeps 1 KiB a block (same guide, 8.0 on)

# Rows one tensor-core instruction of a warp (group) computes: wgmma m64 on Hopper, mma.sync m16 before it and on
# consumer Blackwell, tcgen05 m64 on Blackwell (PTX ISA, the chapters on these instructions). Columns come in eights.
_FRAGMENT_ROWS = {90: (64, "wgmma"), 100: (64, "tcgen05.mma")}
_FRAGMENT_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of the result a block computes, and the depth it takes at a time."""

    bm: int
    bn: int
    bk: int

    @classmethod
    def of(cls, op: str, value: Any) -> Tile:
        """From `tile_shape=(BM, BN, BK)`; a tile stays what it is."""
        if isinstance(value, Tile):
            return value
        sides = tuple(value) if isinstance(value, (tuple, list)) else ()
        if len(sides) != 3 or any(not isinstance(side, int) or isinstance(side, bool) for side in sides):
            raise ArgumentError(
                f"op.{op}: tile_shape={value!r}", fix="tile_shape is (BM, BN, BK), such as (128, 128, 64)"
            )
        return cls(*sides)

    @property
    def sides(self) -> tuple[int, int, int]:
        """(BM, BN, BK)."""
        return self.bm, self.bn, self.bk

    def __str__(self) -> str:
        return f"({self.bm}, {self.bn}, {self.bk})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """That a tile fits, and how: `compiled` is False where only the formula was asked, and `note` says why."""

    shared_bytes: int
    limit_bytes: int
    stages: int
    warps: int
    arch: int
    compiled: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Kernel:
    compiled: Callable[[Tile, str, int, int, Any], Any]
    free: tuple[bool, bool, bool]
    formula: Callable[[Tile, str, int], int]
    sides: int


_kernels: dict[str, _Kernel] = {}
_ASKED = 8  # neighbours compiled before we give up: each takes about half a second


def operand_bytes(tile: Tile, dtype: str, stages: int) -> int:
    """What the operands of a matrix product take with `stages` tiles in flight: an upper bound of what is compiled."""
    return max(1, stages) * (tile.bm + tile.bn) * tile.bk * ITEM_BYTES[dtype]


def register(
    name: str,
    compile_fn: Callable[[Tile, str, int, int, Any], Any],
    *,
    free: tuple[bool, bool, bool] = (True, True, True),
    formula: Callable[[Tile, str, int], int] = operand_bytes,
    sides: int = 3,
) -> None:
    """Tell how the kernel `name` is compiled: (tile, precision, stages, warps, GPUTarget) -> metadata with `.shared`.

    `free` says which sides a nearest tile may change (attention's third is the head's size); `formula` gives bytes for
    ordering the search, and `sides` is how many of a tile's sides a caller writes.
    """
    _kernels[name] = _Kernel(compile_fn, free, formula, sides)
    _fit.cache_clear()


def pipeline(tile: Tile) -> tuple[int, int]:
    """(stages, warps) of a launch: what a schedule hints, else our own choice."""
    asked = hints.current()
    stages = asked.cp_async_depth or STAGES
    if asked.warp_mma_concurrency:
        return stages, 4 * asked.warp_mma_concurrency
    return stages, default_warps(tile)


def default_warps(tile: Tile) -> int:
    """Enough warps that a thread holds at most 128 of its 255 registers' worth of accumulators; a power of two."""
    wanted = tile.bm * tile.bn / (32 * 128)
    return 16 if wanted > 8 else 8 if wanted > 4 else 4


def arch_of(device: Any = None) -> int:
    """The compute capability of a CUDA device (90 for 9.0), by default the current one; Hopper's without any."""
    torch: Any = sys.modules.get("torch")
    if torch is None or (device is not None and torch.device(device).type != "cuda") or not torch.cuda.is_available():
        return DEFAULT_ARCH
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * int(major) + int(minor)


@functools.cache
def limit_bytes(arch: int) -> int:
    """The shared memory one block may have: the catalogue's figure of that capability, else CUDA's table."""
    from ..hardware import catalogue

    for device in catalogue().values():
        shared = device.caches.shared_bytes
        if device.compute_capability == f"sm{arch}" and shared is not None and arch >= 80:
            return int(shared.value) - _RESERVED_BYTES
    if arch in _BLOCK_BYTES:
        return _BLOCK_BYTES[arch]
    return _BLOCK_BYTES[max((known for known in _BLOCK_BYTES if known <= arch), default=70)]


def check(
    name: str, tile: Tile, dtype: Any, stages: int, warps: int, arch: int | None = None, *, op: str | None = None
) -> Fit:
    """How `tile` fits the kernel `name` on a chip; `TileError` with the bytes it needs and the nearest tile that does.

    `dtype` is torch's or a name ("bf16"), `op` the operator that was called where it is not `name`. Answers are kept:
    the first costs a compilation of about 0.3 s.
    """
    try:
        return _fit(name, tile, precision_name(dtype), stages, warps, arch or arch_of())
    except TileError as e:
        if op is not None and op != name:
            raise TileError(e.what.replace(f"op.{name}:", f"op.{op}:", 1), why=e.why, fix=e.fix) from e
        raise


def precision_name(dtype: Any) -> str:
    """The name of a dtype; a name stays what it is."""
    if isinstance(dtype, str):
        return dtype
    from .arguments import PRECISION_OF

    if dtype not in PRECISION_OF:
        raise ArgumentError(f"no kernel of ours computes in {dtype}", fix=f"one of {', '.join(map(str, PRECISION_OF))}")
    return PRECISION_OF[dtype]


@functools.lru_cache(maxsize=1024)
def _fit(name: str, tile: Tile, dtype: str, stages: int, warps: int, arch: int) -> Fit:
    kernel, limit = _kernels[name], limit_bytes(arch)
    wrong = next((side for side, free in zip(tile.sides, kernel.free, strict=True) if free and side not in SIDES), None)
    if wrong is not None:
        why = f"{wrong} is no power of two from {SIDES[0]} to {SIDES[-1]}"
        raise _error(name, tile, why, _nearest(name, tile, dtype, stages, warps, arch))
    fit = _spilled(tile, warps, arch) or _asked(name, tile, dtype, stages, warps, arch)
    if isinstance(fit, str):
        raise _error(name, tile, fit, _nearest(name, tile, dtype, stages, warps, arch))
    if fit.shared_bytes > limit:
        why = (
            f"it needs {fit.shared_bytes:,} bytes of shared memory with {stages} tiles in flight; "
            f"a block of sm_{arch} has {limit:,}"
        )
        raise _error(name, tile, why, _nearest(name, tile, dtype, stages, warps, arch))
    return fit


def _error(name: str, tile: Tile, why: str, nearest: Tile | None) -> TileError:
    other = "no tile near it works either: another precision, or fewer tiles in flight (cp_async_depth)"
    fix = f"tile_shape={written(name, nearest)} is the nearest that fits" if nearest else other
    return TileError(f"op.{name}: tile_shape={written(name, tile)} cannot work", why=why, fix=fix)


def written(name: str, tile: Tile) -> tuple[int, ...]:
    """A tile as a caller of the kernel `name` writes it."""
    return tile.sides[: _kernels[name].sides]


def _spilled(tile: Tile, warps: int, arch: int) -> str:
    """Why the accumulators do not fit in registers; empty where they do."""
    each, room = tile.bm * tile.bn // (32 * warps), min(_THREAD_REGISTERS, _SM_REGISTERS // (32 * warps))
    if arch in _TENSOR_MEMORY or each + _OTHER_REGISTERS <= room:
        return ""
    return f"a thread of its {warps} warps would hold {each} accumulators and has {room} registers for everything"


def _asked(name: str, tile: Tile, dtype: str, stages: int, warps: int, arch: int) -> Fit | str:
    """What the compiler says: the fit, or why it refuses."""
    kernel = _kernels[name]

    def fit(shared: int, note: str = "") -> Fit:
        return Fit(
            shared_bytes=shared, limit_bytes=limit_bytes(arch), stages=stages, warps=warps, arch=arch,
            compiled=not note, note=note,
        )  # fmt: skip

    missing = _uncompiled()
    if missing:
        return fit(kernel.formula(tile, dtype, stages), f"{missing}: an upper bound, nothing was compiled")
    from triton.backends.compiler import GPUTarget
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import PTXASError

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a failing ptxas has Triton print the whole program
            found = kernel.compiled(tile, dtype, stages, warps, GPUTarget("cuda", arch, 32))
    except (CompilationError, PTXASError) as e:
        said = getattr(e, "error_message", None) or str(e).strip().splitlines()[-1]
        return f"Triton does not compile it for sm_{arch}: {said}"
    return fit(int(found.shared))


def _uncompiled() -> str:
    """Why nothing can be compiled here; empty where it can."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set"
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def _nearest(name: str, tile: Tile, dtype: str, stages: int, warps: int, arch: int) -> Tile | None:
    """The valid tile the fewest halvings and doublings away that the compiler accepts.

    Of whole fragments where the one asked for is: another would be followed by the warning of `advise`.
    """
    kernel, limit = _kernels[name], limit_bytes(arch)
    # Small differences of the formula to what is compiled go both ways: half as much again is surely too much.
    candidates = [
        near
        for near in _neighbours(tile, kernel.free)
        if kernel.formula(near, dtype, stages) <= 1.5 * limit and not _spilled(near, warps, arch)
    ]
    # Among equally near ones, those that surely fit come first: each question is a compilation.
    candidates.sort(
        key=lambda near: (
            _whole_fragments(tile, arch) and not _whole_fragments(near, arch),
            _distance(tile, near),
            kernel.formula(near, dtype, stages) > limit,
            -near.bm * near.bn * near.bk,
        )
    )
    for near in candidates[:_ASKED]:
        fit = _asked(name, near, dtype, stages, warps, arch)
        if isinstance(fit, Fit) and fit.shared_bytes <= limit:
            return near
    return None


def _whole_fragments(tile: Tile, arch: int) -> bool:
    rows, _ = _fragment(arch)
    return tile.bm % rows == 0


def _fragment(arch: int) -> tuple[int, str]:
    """Rows of a fragment, and the instruction that computes it."""
    return _FRAGMENT_ROWS.get(arch, (16, "mma.sync"))


def _neighbours(tile: Tile, free: Sequence[bool]) -> Iterator[Tile]:
    ways = [SIDES if may else (side,) for side, may in zip(tile.sides, free, strict=True)]
    yield from itertools.starmap(Tile, itertools.product(*ways))


def _distance(a: Tile, b: Tile) -> float:
    return sum(abs(math.log2(max(1, x)) - math.log2(y)) for x, y in zip(a.sides, b.sides, strict=True))


def advise(op: str, tile: Tile, dtype: Any, arch: int | None = None) -> None:
    """Warn, once per line that calls, where a tile works but is no multiple of the tensor core's fragment."""
    arch = arch or arch_of()
    rows, instruction = _fragment(arch)
    text = ""
    if not _whole_fragments(tile, arch):
        text = (
            f"BM={tile.bm} is no multiple of {rows}, the rows of one {instruction} fragment of {precision_name(dtype)} "
            f"on sm_{arch}: slower instructions are used"
        )
    elif tile.bn % _FRAGMENT_COLUMNS:
        text = f"BN={tile.bn} is no multiple of {_FRAGMENT_COLUMNS}, the columns of one {instruction} fragment"
    if text:
        _warn_once(f"op.{op}: tile_shape={written(op, tile) if op in _kernels else tile}: {text}")


def _warn_once(text: str) -> None:
    """Warn at the first frame outside tessera.op, once for each line there.

    Python's own memory of what it warned of is emptied whenever a module changes the filters, as torch's do.
    """
    here, level, frame = str(Path(__file__).parent), 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    place = (frame.f_code.co_filename, frame.f_lineno, text)
    if place not in _warned:
        _warned.add(place)
        warnings.warn(text, UserWarning, stacklevel=level)


_warned: set[tuple[str, int, str]] = set()
