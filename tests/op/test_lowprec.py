"""Products in low precision, weights kept in fp8, and the kernels that cast."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forked import run_forked
from tessera import op
from tessera.errors import ArgumentError
from tessera.op import casting, lowprec

# What rounding does to normal data (measured, docs): the product may not be better than half or worse than that.
TYPICAL = {"fp8": 3.8e-2, "fp8_row": 3.8e-2, "bf16": 2.4e-3, "fp16": 2.9e-4, "tf32": 2.9e-4, "fp32": 2.5e-7}


def pair(*shape: int, dtype=torch.float32, seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    m, n, k = shape
    return torch.randn(m, k, generator=rng).to(dtype), torch.randn(k, n, generator=rng).to(dtype)


def relative(c, a, b) -> float:
    exact = a.double() @ b.double()
    return float((c.double() - exact).norm() / exact.norm())


# -- the product ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", TYPICAL)
@pytest.mark.parametrize("shape", [(128, 96, 256), (33, 47, 65)])
def test_the_error_of_a_precision_is_what_its_mantissa_says(precision, shape):
    a, b = pair(*shape)
    c = lowprec.mm(a, b, precision)
    assert c.dtype == torch.float32 and c.shape == (shape[0], shape[1])
    assert 0.4 * TYPICAL[precision] < relative(c, a, b) < 1.15 * TYPICAL[precision]


def test_tf32_rounds_to_ten_bits_nearest_even():
    one = 2.0**-10
    x = torch.tensor([1 + one, 1 + 0.5 * one, 1 + 1.5 * one, 1 + 0.51 * one, -(1 + 1.5 * one), float("inf"), 0.0])
    rounded, scale = casting.cast(x, "tf32")
    assert scale is None
    assert rounded.tolist() == [1 + one, 1.0, 1 + 2 * one, 1 + one, -(1 + 2 * one), float("inf"), 0.0]


@pytest.mark.parametrize("name", ["fp8", "fp16"])
@given(amax=st.floats(min_value=2.0**-110, max_value=2.0**120, width=32))
@settings(max_examples=60, deadline=None)
def test_a_scale_is_a_power_of_two_that_just_fits(name, amax):
    scale = float(casting.power_of_two(torch.tensor([amax]), name))
    limit = 448.0 if name == "fp8" else 2.0**15
    assert torch.frexp(torch.tensor(scale))[0] == 0.5
    assert amax * scale <= limit < 2 * amax * scale or (name == "fp16" and amax * scale < limit)


@pytest.mark.parametrize("value", [0.0, 1e-45, 3e38, float("inf"), float("nan")])
def test_scales_are_never_zero_or_infinite(value):
    for precision in ("fp8", "fp8_row", "fp16"):
        _, scale = casting.cast(torch.full((4, 4), value), precision)
        assert torch.isfinite(scale).all() and (scale > 0).all()


def test_rows_of_their_own_scale_keep_tiny_rows():
    a, b = pair(64, 64, 64)
    a = a * torch.logspace(-9, 3, 64)[:, None]
    rows = lambda c: (c.double() - a.double() @ b.double()).norm(dim=1) / (a.double() @ b.double()).norm(dim=1)  # noqa: E731
    assert rows(lowprec.mm(a, b, "fp8"))[0] > 0.5  # under the smallest number of a tensor-wide scale
    assert rows(lowprec.mm(a, b, "fp8_row")).max() < 0.06


@pytest.mark.parametrize("precision", ["fp8", "fp8_row", "fp16"])
def test_what_is_not_finite_never_becomes_a_number(precision):
    a, b = pair(8, 8, 8)
    a[0, 0], a[1, 1] = float("inf"), float("nan")
    c = lowprec.mm(a, b, precision)
    assert torch.isnan(c[:2]).all() and torch.isfinite(c[2:]).all()


def test_sixteen_bit_operands_do_not_overflow_or_vanish():
    a, b = pair(32, 32, 32)
    for size in (1e20, 1e-20):
        assert relative(lowprec.mm(a * size, b / size, "fp16"), a * size, b / size) < 4e-4


def test_batches_and_stacks_equal_their_matrices():
    a, b = torch.randn(2, 3, 8, 16), torch.randn(3, 16, 5)
    for precision in casting.PRECISIONS:
        whole = lowprec.mm(a, b, precision)
        assert whole.shape == (2, 3, 8, 5)
        if precision in ("fp8", "fp8_row", "bf16"):  # scales by matrix, so each is as if alone
            alone = torch.stack(
                [torch.stack([lowprec.mm(x, y, precision) for x, y in zip(z, b, strict=True)]) for z in a]
            )
            torch.testing.assert_close(whole, alone)
    folded = lowprec.mm(a, b[0], "bf16")
    torch.testing.assert_close(folded, torch.matmul(a.bfloat16().float(), b[0].bfloat16().float()))


@pytest.mark.parametrize("way", ["fp8", "fp8_row in the product", "fp8_row after it"])
@pytest.mark.parametrize("shape", [(33, 47, 65), (64, 32, 128), (1, 5, 3)])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_path_of_a_gpu_with_fp8_units_pads_and_scales_right(way, shape, out, monkeypatch):
    """torch._scaled_mm exists on a CPU too, with the same layout: what a GPU would be given is computed for real."""
    precision, _, where = way.partition(" ")
    a, b = pair(*shape)
    a, b = a * torch.logspace(-3, 1, shape[0])[:, None], b * torch.logspace(1, -2, shape[1])  # rows of their own size
    want = lowprec.mm(a, b, precision, out_dtype=out)
    products = seen_products(monkeypatch)
    if where == "after it":
        monkeypatch.setattr(lowprec, "has_row_scaling", lambda *_: False)
    got = lowprec.mm(a, b, precision, "fast", out_dtype=out)
    assert got.shape == want.shape and got.dtype == out and got.is_contiguous()
    by_rows = where == "in the product"
    assert products[-1]["scale_a"].dim() == products[-1]["scale_b"].dim() == (2 if by_rows else 0)
    assert products[-1]["use_fast_accum"] and products[-1]["out_dtype"] == (
        torch.float32 if out == torch.float64 or (out == torch.float16 and where == "after it") else out
    )
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(out, 1e-5)
    least = 6e-8 if out == torch.float16 else 0.0  # its smallest step
    sizes = want.double().abs().amax(1, keepdim=True) if by_rows else want.double().abs().max()
    assert ((got.double() - want.double()).abs() <= tolerance * sizes + least).all()


def count_casts(monkeypatch):
    """The shapes of the matrices that are cast from now on."""
    casts, real = [], casting.quantize
    for module in (casting, lowprec):
        monkeypatch.setattr(module, "quantize", lambda m, *more: casts.append(tuple(m.shape)) or real(m, *more))
    return casts


def seen_products(monkeypatch):
    """What torch._scaled_mm is called with, on a device that multiplies e4m3 itself."""
    seen, real = [], torch._scaled_mm
    monkeypatch.setattr(lowprec, "multiplies_fp8", lambda _: True)
    assert lowprec.has_row_scaling(torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **more: seen.append(more) or real(*args, **more))
    return seen


def test_whether_a_product_takes_scales_of_rows_is_asked_once_for_each_type(monkeypatch):
    """As torch built with an older cuBLAS answers: bf16 alone."""
    a, b = pair(32, 48, 64)
    want = lowprec.mm(a, b, "fp8_row")
    asked, real = [], torch._scaled_mm

    def older(*args, **more):
        if more["scale_a"].dim() == 2:
            asked.append(more["out_dtype"])
            if more["out_dtype"] != torch.bfloat16:
                raise ValueError("Only bf16 high precision output types are supported for row-wise scaling.")
        return real(*args, **more)

    lowprec._try_row_scaling.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", older)
    assert not lowprec.has_row_scaling(torch.device("cpu"), torch.bfloat16) and not asked  # no units: nothing to ask
    monkeypatch.setattr(lowprec, "multiplies_fp8", lambda _: True)
    for _ in range(2):
        torch.testing.assert_close(lowprec.mm(a, b, "fp8_row"), want)
        narrow = lowprec.mm(a, b, "fp8_row", out_dtype=torch.bfloat16)
        torch.testing.assert_close(narrow.float(), want, rtol=1e-2, atol=1e-2)
    assert asked.count(torch.float32) == 1 and asked.count(torch.bfloat16) == 3  # the question, and two products
    lowprec._try_row_scaling.cache_clear()


def test_a_weight_kept_by_rows_goes_into_the_product_with_its_scales(monkeypatch):
    layer, x = torch.nn.Linear(24, 40).bfloat16(), torch.randn(8, 24, dtype=torch.bfloat16)
    want = op.linear(x, layer.weight, layer.bias, precision="fp8_row")
    products = seen_products(monkeypatch)
    casting.prepare(layer.weight.mT, "fp8_row")
    casts = count_casts(monkeypatch)
    for _ in range(2):
        got = op.linear(x, layer.weight, layer.bias, precision="fp8_row", accumulate="fast")
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert casts.count((40, 24)) == 1 and casts.count((8, 24)) == 2
    assert [p["scale_b"].shape for p in products] == [(1, 48)] * 2  # padded to 16
    casting.forget(layer.weight.mT)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", "fp32", "fp64"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_the_path_of_a_gpu_scales_and_casts_right(precision, out):
    a, b = pair(24, 36, 40)
    batch = torch.stack([a, a * 3]), torch.stack([b, -b])
    for x, y in ((a, b), batch):
        got = lowprec._multiply_on_cuda(x * 1e7, y * 1e-7, precision, "fp32", out)
        assert got.dtype == out
        error = (got.double() - x.double() @ y.double()).norm() / (x.double() @ y.double()).norm()
        assert error < {"bf16": 6e-3, "fp16": 3e-3 if out == torch.bfloat16 else 5e-4}.get(precision, 3e-3)


def test_empty_matrices_have_empty_or_zero_products():
    for precision in casting.PRECISIONS:
        assert lowprec.mm(torch.ones(0, 4), torch.ones(4, 3), precision).shape == (0, 3)
        assert lowprec.mm(torch.ones(2, 0), torch.ones(0, 3), precision).abs().sum() == 0


@pytest.mark.parametrize(("precision", "error"), [("fp8", 1e-2), ("bf16", 1e-2), ("tf32", 1e-3), ("fp32", 1e-6)])
def test_gradients_are_products_at_least_as_fine(precision, error):
    a, b = (x.requires_grad_() for x in pair(16, 12, 24))
    seed = torch.randn(16, 12)
    got = torch.autograd.grad(lowprec.mm(a, b, precision), (a, b), seed)
    want = torch.autograd.grad(a @ b, (a, b), seed)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.float32
        assert float((x - y).norm() / y.norm()) < error


def test_torch_knows_the_operator():
    a, b = pair(8, 8, 16)
    torch.library.opcheck(lowprec.lowprec_mm, (a.requires_grad_(), b, "bf16", "fp32", torch.float32, "fp32"))
    meta = lowprec.mm(a.to("meta"), b.to("meta"), "fp8", out_dtype=torch.bfloat16)
    assert meta.shape == (8, 8) and meta.dtype == torch.bfloat16 and meta.is_meta


def test_autocast_does_not_reach_inside():
    a, b = pair(16, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lowprec.mm(a, b, "tf32"), lowprec.mm(a, b, "tf32").float())
        inside = lowprec.mm(a, b, "fp32")
    assert relative(inside, a, b) < 1e-6


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda a, b: lowprec.mm(a, b, "fp9"), "precision"),
        (lambda a, b: lowprec.mm(a, b, "fp8", "fp16"), "accumulate"),
        (lambda a, b: lowprec.mm(a, b.double(), "fp8"), "a is"),
        (lambda a, b: lowprec.mm(a, a, "fp8"), "columns"),
        (lambda a, b: lowprec.mm(a.int(), b, "fp8"), "a is not a matrix"),
        (lambda a, b: lowprec.mm(a, b, "fp8", backward="x"), "backward"),
        (lambda a, b: casting.cast(a, "int3"), "precision"),
    ],
)
def test_wrong_arguments_are_named(call, named):
    a, b = pair(4, 5, 6)
    with pytest.raises(ArgumentError, match=named):
        call(a, b)


# -- weights that are kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp8", "fp8_row"])
def test_a_prepared_weight_is_quantised_once_and_again_when_it_changes(precision, monkeypatch):
    layer, x = torch.nn.Linear(24, 40, bias=False), torch.randn(8, 24)
    plain = lowprec.mm(x, layer.weight.mT, precision)
    casts = count_casts(monkeypatch)
    casting.prepare(layer.weight.mT, precision)
    for _ in range(3):
        assert torch.equal(lowprec.mm(x, layer.weight.mT, precision), plain)
    assert casts.count((40, 24)) == 1 and casts.count((8, 24)) == 3
    where = casting.find_prepared(layer.weight.mT, precision == "fp8_row").values.data_ptr()
    with torch.no_grad():
        layer.weight.mul_(2.0)
    assert torch.equal(lowprec.mm(x, layer.weight.mT, precision), 2.0 * plain)
    assert casts.count((40, 24)) == 2
    # A CUDA graph that was captured reads the same memory.
    assert casting.find_prepared(layer.weight.mT, precision == "fp8_row").values.data_ptr() == where
    casting.forget(layer.weight.mT)
    lowprec.mm(x, layer.weight.mT, precision)
    assert casts.count((40, 24)) == 3


def test_a_prepared_weight_goes_with_its_owner():
    layer = torch.nn.Linear(24, 40)
    casting.prepare(layer.weight.mT)
    assert casting.find_prepared(layer.weight.mT, False) is not None
    layer.weight.data = torch.randn(40, 24)  # other memory: the old entry may not be taken for it or for its successor
    assert casting.find_prepared(layer.weight.mT, False) is None
    before = len(casting._weights)
    del layer
    assert len(casting._weights) == before - 1
    with pytest.raises(ArgumentError, match="precision"):
        casting.prepare(torch.ones(2, 2), "bf16")
    with pytest.raises(ArgumentError, match="dimensions"):
        casting.prepare(torch.ones(2))


def test_a_list_cannot_be_prepared():
    with pytest.raises(ArgumentError, match="b is a list"):
        casting.prepare([1.0])


# -- the kernels ---------------------------------------------------------------------------------------------------

INTERPRETED = """
import torch
from tessera.op import casting
from tessera.op.kernels.quantize import quantize
rng = torch.Generator().manual_seed(0)
import tessera.op.kernels.quantize as kernels
kernels.HELD = 512  # longer rows are cast in strips
for shape in ((45, 77), (1, 1), (3, 700)):
    # Values that e4m3 holds: Triton's interpreter rounds others wrongly (carries, subnormals); fp16 it rounds right.
    exact = torch.randint(-15, 16, shape, generator=rng) * 2.0 ** torch.randint(-3, 4, shape, generator=rng)
    wild = torch.randn(shape, generator=rng) * torch.exp(4 * torch.randn(shape, generator=rng))
    for name, x in (("fp8", exact), ("fp16", wild)):
        x = x * 2.0**20
        # NaN and inf in one row: the interpreter's maximum does not see a NaN, and its e4m3 has none of its own.
        x[0, 0], x[0, 2:3], x[2:3, 0] = float("nan"), float("inf"), float("inf")
        x[-1, -1] = float("inf")
        for view in (x, x.t(), x[:, ::2]):
            for by_row in (False, True):
                for pad in ((16, 16),) if by_row else ((1, 1),):
                    y, scale = quantize(view, name, by_row=by_row, pad=pad)
                    rows, cols = view.shape
                    assert y.shape[0] % pad[0] == 0 and y.shape[1] % pad[1] == 0 and y.is_contiguous()
                    want, want_scale = casting.quantize(view, name, by_row, (1, 1))
                    got = y.float()[:rows, :cols]
                    assert torch.equal(got.isnan(), want.float().isnan())
                    assert torch.equal(got.nan_to_num(), want.float().nan_to_num()), (name, by_row)
                    assert torch.equal(scale[:rows] if by_row else scale, want_scale)
                    assert not y.float()[rows:].any() and not y.float()[:, cols:].any()
print("ok")
"""


def test_the_quantise_kernels_do_what_torch_does():
    assert run_forked(INTERPRETED, interpreted=True) == "ok\n"


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(
    ("kernel", "layout"),
    [
        ("tensor_amax", "rows"),
        ("row_amax", "rows"),
        ("row_amax", "columns"),
        ("tensor_cast", "rows"),
        ("tensor_cast", "columns"),
        ("strip_cast", "columns"),
        ("row_cast", "rows"),
    ],
)
def test_the_quantise_kernels_compile_for_the_gpu(arch, kernel, layout):
    """And read and write 16 bytes at a time."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tessera.op.kernels import quantize

    tiles = quantize.AMAX_TILES if kernel.endswith("amax") else quantize.TILES
    fn, tile = getattr(quantize, kernel), (4, 4096) if kernel == "row_cast" else tiles[layout]
    known = {**quantize.format_constants("fp8"), "ROWS": tile[0], "COLS": tile[1], "STRIPS": 8, "PARTS": quantize.PARTS}
    known |= {"DOWN_FIRST": layout == "columns", "stride_row" if layout == "columns" else "stride_col": 1}
    types = {"parts": "*fp32", "descale": "*fp32", "x": "*bf16", "y": "*u8"}
    signature = {name: "constexpr" if name in known else types.get(name, "i32") for name in fn.arg_names}
    # As at a launch on sizes that are multiples of 16.
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names) if name not in known}
    source = ASTSource(fn, signature, {name: value for name, value in known.items() if name in fn.arg_names}, even)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": quantize.WARPS})
    ptx = made.asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    if kernel.endswith("cast"):
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx  # nearest even in hardware
        assert "st.global.v4.b32" in ptx
    assert made.metadata.shared < 48 << 10


@pytest.mark.parametrize("precision", casting.PRECISIONS)
def test_a_product_of_meta_tensors_has_its_shape(precision):
    a, b = torch.randn(16, 32, device="meta"), torch.randn(32, 16, device="meta")
    found = lowprec.mm(a, b, precision)
    assert found.device.type == "meta" and found.shape == (16, 16)
