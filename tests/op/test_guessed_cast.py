"""The casts of fp8 products: a scale that is guessed, and mended where it does not fit."""

import pytest

from forked import run_forked

INTERPRETED = """
import math
import torch
from tessera.op.kernels import guessed_cast
guessed_cast.ALONG, guessed_cast.ACROSS, guessed_cast.REPAIR_PROGRAMS, guessed_cast.CHUNK = (16, 64), (32, 32), 2, 32
rng = torch.Generator().manual_seed(0)


def exact(rows, cols):  # values that e4m3 holds: Triton's interpreter rounds others wrongly (carries, subnormals)
    size = {"size": (rows, cols), "generator": rng}
    return torch.randint(-15, 16, **size) * 2.0 ** torch.randint(-2, 2, **size)


def cases():
    ordinary = exact(50, 72)
    yield "ordinary", ordinary, False
    yield "small", ordinary * 2.0**-60, False
    yield "large", ordinary * 2.0**60, False
    yield "one value", torch.full((1, 1), -3.0), False
    yield "one row", exact(1, 600), False
    yield "strides of one", exact(90, 1), False
    yield "strides of one, a row", exact(90, 1).t(), False
    yield "windows", exact(1, 90)[0].unfold(0, 40, 1), False
    yield "zeros", torch.zeros(33, 40), False
    far = ordinary.clone()
    far[49, 71] = 2.0**12
    yield "one far off", far, True
    lone = torch.zeros(50, 72)
    lone[1, 1] = 2.0
    yield "one among zeros", lone, True
    strange = ordinary.clone()
    strange[3, 4], strange[40, 60], strange[40, 61] = math.inf, math.nan, -math.inf
    yield "not finite", strange, True
    yield "not finite and far off", torch.where(strange.isfinite(), far, strange), True


def look(name, x, mended):
    largest = x[x.isfinite()].abs().max()
    other, across = exact(40, 24), x.t().contiguous().t()
    for view, given in ((x, [x]), (x, [other.t(), x]), (across, [across, other])):
        for matrix, (y, descale) in zip(given, guessed_cast.cast_by_guess(given, (16, 16))):
            rows, cols = matrix.shape
            assert y.dtype == torch.float8_e4m3fn and y.is_contiguous() and not any(s % 16 for s in y.shape)
            back = y.float()[:rows, :cols] * descale
            assert torch.equal(back.isnan(), ~matrix.isfinite()), name
            wanted = torch.where(matrix.isfinite(), matrix, 0.0)
            if mended and matrix is view:  # by the largest value, as `quantize` does it
                assert 224 < largest / descale <= 448, (name, largest / descale)
                assert ((back.nan_to_num() - wanted).abs() <= wanted.abs() / 8 + 2.0**-9 * descale).all(), name
            else:
                assert torch.equal(back, wanted), name
            assert not y.float()[rows:].any() and not y.float()[:, cols:].any(), name
            if matrix is view and not mended and largest > 0:
                assert 2 <= largest / descale <= 448, (name, largest / descale)


for case in cases():
    look(*case)
# What is sampled is far above the rest: half of the tiles would be rounded away, so the guess is not taken.
half = exact(256, 256) * 2.0**-14
half[16::32] = 1.0
y, descale = guessed_cast.cast_by_guess([half])[0]
assert 224 < half.abs().max() / descale <= 448
print("ok")
"""


def test_the_casts_hold_what_they_promise():
    pytest.importorskip("triton")
    assert run_forked(INTERPRETED, interpreted=True) == "ok\n"


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("kernel", ["guessed_cast", "repair_cast"])
@pytest.mark.parametrize("across", [False, True])
def test_the_casts_compile_for_the_gpu(arch, kernel, across):
    """And read and write 16 bytes at a time."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from tessera.op.kernels import compile_for, guessed_cast, quantize

    fn = getattr(guessed_cast, kernel)
    rows, cols = guessed_cast.ACROSS if across else guessed_cast.ALONG
    known = quantize.format_constants("fp8") | {"READ": 2048, "ACROSS": across, "ROWS": rows, "COLS": cols}
    known |= {"CHUNK": guessed_cast.CHUNK, "CHUNKS": guessed_cast.CHUNKS, "stride_row" if across else "stride_col": 1}
    known = {name: value for name, value in known.items() if name in fn.arg_names}
    types = {"x": "*bf16", "y": "*u8", "guess": "*i32", "notes": "*fp32", "descale": "*fp32"}
    signature = {name: types.get(name, "i32") for name in fn.arg_names if name not in known}
    target = GPUTarget("cuda", arch, 32)
    made = compile_for(fn, signature, known, ("count",), stages=3, warps=quantize.WARPS, target=target)
    ptx = made.asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx  # nearest even in hardware
    assert made.metadata.shared < 48 << 10
