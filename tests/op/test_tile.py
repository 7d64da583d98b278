"""Tiles: what the compiler says of them, what is refused, and the nearest tile that is not."""

from __future__ import annotations

import re
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

from tessera import op  # noqa: E402
from tessera.errors import ArgumentError, TileError  # noqa: E402
from tessera.op import hints, tile  # noqa: E402
from tessera.op.kernels.matmul import (  # noqa: E402
    _too_large,
    compile_conv,
    compile_matmul,
)
from tessera.op.tile import Tile  # noqa: E402

op.conv2d, op.matmul  # noqa: B018 - registers the kernels


@pytest.mark.parametrize(
    ("dtype", "sides", "shared"),
    # Three stages of (BM + BN) x BK elements: wgmma reads both from shared memory.
    [("bf16", (128, 128, 64), 98304), ("fp16", (128, 256, 64), 147456), ("tf32", (64, 128, 32), 73728)],
)
def test_shared_memory_is_what_the_compiler_says(dtype: str, sides: tuple[int, int, int], shared: int) -> None:
    fit = tile.check("matmul", Tile(*sides), dtype, 3, tile.default_warps(Tile(*sides)), 90)
    assert not fit.note and fit.shared_bytes == shared == tile.operand_bytes(Tile(*sides), dtype, 3)


@pytest.mark.parametrize(
    ("arch", "sides", "dtype"),
    [(80, (128, 64, 32), "bf16"), (90, (32, 64, 32), "fp32"), (90, (64, 64, 64), "fp8"), (100, (64, 64, 64), "bf16")],
)
def test_the_formula_bounds_what_is_compiled(arch: int, sides: tuple[int, int, int], dtype: str) -> None:
    fit = tile.check("matmul", Tile(*sides), dtype, 3, 4, arch)
    # Blackwell keeps two barriers of 8 bytes beside the tiles.
    assert 0 < fit.shared_bytes <= tile.operand_bytes(Tile(*sides), dtype, 3) + 16


def test_tiles_are_double_buffered_and_reach_the_tensor_cores() -> None:
    ptx = compile_matmul(Tile(64, 64, 64), "bf16", 3, 4, GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async" in ptx
    ptx = compile_conv(Tile(64, 64, 64), "fp16", 3, 4, GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async" in ptx


def test_too_much_shared_memory_names_the_bytes_and_the_nearest_tile() -> None:
    a = torch.zeros(8, 8, dtype=torch.bfloat16)
    with pytest.raises(TileError) as refused:
        op.matmul(a, a, tile_shape=(128, 256, 128))
    said = str(refused.value)
    assert "294,912 bytes" in said and "sm_90 has 232,448" in said
    assert "tile_shape=(128, 128, 128)" in said
    assert tile.check("matmul", Tile(128, 128, 128), torch.bfloat16, 3, 4, 90).shared_bytes <= 227 * 1024


@pytest.mark.parametrize("warps", [4, 8])
def test_the_nearest_tile_of_whole_fragments_is_one_too(warps: int) -> None:
    with pytest.raises(TileError) as refused:
        tile.check("matmul", Tile(64, 256, 256), "bf16", 3, warps, 90)
    found = re.search(r"tile_shape=\((\d+), (\d+), (\d+)\)", str(refused.value.fix))
    assert found is not None
    nearest = Tile(*map(int, found.groups()))
    assert nearest.bm % 64 == 0  # where `advise` has nothing to say
    assert tile.check("matmul", nearest, "bf16", 3, warps, 90).shared_bytes <= 227 * 1024


def test_the_nearest_tile_of_a_small_chip_is_smaller() -> None:
    with pytest.raises(TileError, match="101,376") as refused:
        tile.check("matmul", Tile(128, 256, 64), "bf16", 4, 8, 86)
    assert "tile_shape=(" in str(refused.value.fix)


def test_accumulators_beyond_the_registers_are_refused_before_ptxas_does(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TileError, match="accumulators") as refused:
        tile.check("matmul", Tile(256, 256, 32), "bf16", 2, 16, 90)
    assert "(128, 256, 32)" in str(refused.value) or "(256, 128, 32)" in str(refused.value)
    assert not capfd.readouterr().out  # Triton prints the whole program when ptxas fails


@pytest.mark.parametrize("sides", [(100, 64, 32), (8, 64, 32), (64, 512, 32), (0, 64, 32)])
def test_a_side_that_is_no_power_of_two_in_range(sides: tuple[int, int, int]) -> None:
    with pytest.raises(TileError, match="not a power of two from 16 to 256") as refused:
        tile.check("matmul", Tile(*sides), "fp16", 3, 4, 90)
    assert "nearest" in str(refused.value.fix)


@pytest.mark.parametrize("wrong", [64, (64, 64), (64, 64, 32.0), "64x64x32", (64, 64, True)])
def test_a_tile_is_three_ints(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="tile_shape"):
        Tile.of("matmul", wrong)


def test_a_depth_the_compiler_refuses_says_what_it_said() -> None:
    with pytest.raises(TileError, match="does not compile it for sm_90"):
        tile.check("matmul", Tile(64, 64, 16), "fp8", 3, 4, 90)


def test_a_chip_without_the_format_has_no_nearest_tile() -> None:
    with pytest.raises(TileError, match="does not compile it for sm_80") as refused:
        tile.check("matmul", Tile(64, 64, 32), "fp8", 3, 4, 80)
    assert "another precision" in str(refused.value.fix)


def test_limits_come_from_the_catalogue_else_from_the_table() -> None:
    assert tile.limit_bytes(90) == 227 * 1024  # the H200's 228 KiB less the 1 KiB a block keeps
    assert tile.limit_bytes(80) == 163 * 1024
    assert tile.limit_bytes(86) == 99 * 1024
    assert tile.limit_bytes(91) == tile.limit_bytes(90)


def test_without_triton_the_formula_answers_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "_why_not_compiled", lambda: "Triton is not installed")
    tile._fit.cache_clear()
    fit = tile.check("matmul", Tile(64, 64, 32), "bf16", 3, 4, 90)
    assert "not installed" in fit.note and fit.shared_bytes == 24576
    with pytest.raises(TileError, match="393,216"):
        tile.check("matmul", Tile(128, 128, 256), "bf16", 3, 4, 90)
    tile._fit.cache_clear()


def test_a_small_fragment_warns_once_per_line_that_calls() -> None:
    a = torch.zeros(8, 8, dtype=torch.float16)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            op.matmul(a, a, tile_shape=(32, 64, 32))
        op.linear(a, a, tile_shape=(32, 64, 32))
    seen = [w for w in seen if "tile_shape" in str(w.message)]
    assert len(seen) == 2 and all(w.filename == __file__ for w in seen)
    assert "BM=32 is not a multiple of 64" in str(seen[0].message) and "wgmma" in str(seen[0].message)


def test_a_whole_fragment_does_not_warn() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tile.advise("matmul", Tile(64, 16, 16), torch.bfloat16, 90)
        tile.advise("matmul", Tile(16, 16, 16), torch.bfloat16, 80)  # mma.sync has 16 rows
    assert not seen
    with pytest.warns(UserWarning, match="BM=16 is not a multiple of 64"):  # the same tile where the fragment is larger
        tile.advise("matmul", Tile(16, 16, 16), torch.bfloat16, 90)


@pytest.mark.parametrize("sides", [(192, 256, 64), (256, 160, 64), (100, 512, 32)])
def test_a_tile_of_odd_sides_is_a_tile_error(sides: tuple[int, int, int]) -> None:
    warps = tile.default_warps(tile.Tile(*sides))
    assert warps & (warps - 1) == 0 and 4 <= warps <= 16
    with pytest.raises(TileError, match="not a power of two") as caught:
        tile.check("matmul", tile.Tile(*sides), "bf16", 3, warps, 90)
    assert "is the nearest that fits" in str(caught.value.fix)


def test_hints_set_the_pipeline() -> None:
    shape = Tile(128, 128, 64)
    assert tile.pipeline(shape) == (3, 4)
    with hints.use(hints.Hints(cp_async_depth=2, warp_mma_concurrency=2)):
        assert tile.pipeline(shape) == (2, 8)
    assert [tile.default_warps(Tile(*s, 64)) for s in ((64, 64), (128, 256), (256, 256))] == [4, 8, 16]


def test_hints_too_deep_for_the_chip_are_refused() -> None:
    a = torch.zeros(8, 8, dtype=torch.bfloat16)
    with hints.use(hints.Hints(cp_async_depth=8)), pytest.raises(TileError, match="8 tiles in flight"):
        op.matmul(a, a, tile_shape=(128, 128, 64))


def test_convolutions_have_tiles_of_their_own() -> None:
    fit = tile.check("conv2d", Tile(64, 64, 32), "bf16", 3, 4, 90)
    assert fit.shared_bytes == 3 * 128 * 32 * 2
    x, w = torch.zeros(1, 8, 4, 4, dtype=torch.bfloat16), torch.zeros(8, 8, 3, 3, dtype=torch.bfloat16)
    with pytest.raises(TileError, match=r"op\.conv2d.*\(256, 128, 128\)"):
        op.conv2d(x, w, tile_shape=(256, 128, 128))


def test_a_refusal_at_the_launch_is_a_tile_error_too() -> None:
    class Refused(Exception):
        required, limit, name = 300000, 232448, "shared memory"

    assert "300,000 of shared memory" in str(_too_large("matmul", Tile(128, 128, 64), Refused()))


def test_a_kernel_may_keep_a_side_as_it_is() -> None:
    class Metadata:
        def __init__(self, shared: int) -> None:
            self.shared = shared

    tile.register("fixed_depth", lambda t, *_: Metadata(tile.operand_bytes(t, "bf16", 3)), free=(True, True, False))
    assert tile.check("fixed_depth", Tile(64, 64, 80), "bf16", 3, 4, 90).shared_bytes == 3 * 128 * 80 * 2
    with pytest.raises(TileError) as refused:
        tile.check("fixed_depth", Tile(128, 128, 320), "bf16", 3, 4, 90)
    assert ", 320)" in str(refused.value.fix)


def test_fp8_sums_are_brought_to_fp32_once_a_step() -> None:
    """Hopper's fp8 units keep about 14 bits of a sum: Triton leaves the whole depth to them unless told not to."""
    found = compile_matmul(Tile(64, 64, 64), "fp8", 3, 4, GPUTarget("cuda", 90, 32)).asm["ttir"]
    assert "maxNumImpreciseAcc = 64" in found
