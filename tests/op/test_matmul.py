"""op.matmul, gemm, linear and conv2d: what torch computes, by whatever way it runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from forked import run_forked  # noqa: E402
from tessera import op, stream  # noqa: E402
from tessera.errors import ArgumentError, TileError, ToleranceError  # noqa: E402
from tessera.op import bounded, hints, padding, product_cost, tiled_matmul  # noqa: E402
from tessera.op.conv import tiled_conv2d  # noqa: E402

TILE = (64, 64, 32)
pytestmark = pytest.mark.usefixtures("formula_only")
few = settings(max_examples=25, deadline=None)


def rand(*shape: int, dtype: Any = torch.float64, grad: bool = False) -> Any:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def error(found: Any, true: Any) -> float:
    found, true = found.detach(), true.detach().double()
    return float((found.double() - true).norm() / true.norm().clamp_min(1e-30))


# -- shapes ----------------------------------------------------------------------------------------------------------

side = st.integers(1, 9)
shapes = st.one_of(
    st.tuples(side, side, side).map(lambda s: ((s[0], s[1]), (s[1], s[2]))),
    st.tuples(side, side, side, side).map(lambda s: ((s[3], s[0], s[1]), (s[1], s[2]))),
    st.tuples(side, side, side, side).map(lambda s: ((s[0], s[1]), (s[3], s[1], s[2]))),
    st.tuples(side, side, side, side).map(lambda s: ((s[3], 1, s[0], s[1]), (2, s[1], s[2]))),
    st.tuples(side, side).map(lambda s: ((s[0],), (s[0], s[1]))),
    st.tuples(side, side).map(lambda s: ((s[1], s[0]), (s[0],))),
    side.map(lambda s: ((s,), (s,))),
)


@few
@given(shapes=shapes, tiled=st.booleans(), seed=st.integers(0, 99))
def test_matmul_has_torchs_shapes_and_values(shapes: Any, tiled: bool, seed: int) -> None:
    torch.manual_seed(seed)
    a, b = rand(*shapes[0]), rand(*shapes[1])
    found = op.matmul(a, b, tile_shape=TILE if tiled else None)
    assert found.shape == torch.matmul(a, b).shape
    torch.testing.assert_close(found, torch.matmul(a, b))


def test_empty_products() -> None:
    for a, b in ((rand(0, 3), rand(3, 2)), (rand(2, 0), rand(0, 4)), (rand(0, 2, 3), rand(0, 3, 1))):
        for shape in (None, TILE):
            torch.testing.assert_close(op.matmul(a, b, tile_shape=shape), torch.matmul(a, b))


@pytest.mark.parametrize("shape", [None, TILE])
@pytest.mark.parametrize("c_shape", [(5,), (3, 5), (2, 3, 5), (3, 1), ()])
def test_gemm_is_alpha_a_b_plus_beta_c(shape: Any, c_shape: tuple[int, ...]) -> None:
    a, b, c = rand(2, 3, 4), rand(2, 4, 5), rand(*c_shape)
    true = 1.5 * a @ b - 0.5 * c
    torch.testing.assert_close(op.gemm(a, b, c, alpha=1.5, beta=-0.5, tile_shape=shape), true)
    torch.testing.assert_close(op.gemm(a, b, alpha=1.5, tile_shape=shape), 1.5 * a @ b)
    if len(c_shape) < 3:
        found = op.gemm(a[0], b[0], c, alpha=1.5, beta=-0.5, tile_shape=shape)
        torch.testing.assert_close(found, 1.5 * a[0] @ b[0] - 0.5 * c)


ACTS = {"relu": torch.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}


@pytest.mark.parametrize("activation", [None, *ACTS])
@pytest.mark.parametrize("shape", [None, TILE])
def test_linear_and_its_gradients(activation: str | None, shape: Any) -> None:
    x, w, b = rand(2, 3, 7, grad=True), rand(5, 7, grad=True), rand(5, grad=True)
    act = ACTS.get(activation or "", lambda y: y)
    found, true = op.linear(x, w, b, activation=activation, tile_shape=shape), act(F.linear(x, w, b))
    torch.testing.assert_close(found, true)
    seed = torch.randn_like(true)
    for one, other in zip(*(torch.autograd.grad(y, (x, w, b), seed) for y in (found, true)), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():  # the tile fuses the activation only here
        torch.testing.assert_close(op.linear(x, w, b, activation=activation, tile_shape=shape), true)


def test_half_precision_sums_are_fp32() -> None:
    a, b = rand(33, 4096, dtype=torch.bfloat16), rand(4096, 17, dtype=torch.bfloat16)
    assert error(op.matmul(a, b, tile_shape=TILE), a.double() @ b.double()) < 3e-3


# -- what torch must see ---------------------------------------------------------------------------------------------


def test_the_tiled_product_is_a_proper_operator() -> None:
    a, b, c = rand(2, 7, 9, grad=True), rand(1, 9, 5, grad=True), rand(2, 7, 5, grad=True)
    torch.library.opcheck(tiled_matmul.tiled_mm, (a, b, "", list(TILE), 3, 4))
    options = {"alpha": 2.0, "beta": 3.0, "tile_shape": TILE}
    assert torch.autograd.gradcheck(lambda *t: op.gemm(*t, **options), (a, b, c))


def test_the_tiled_convolution_is_a_proper_operator() -> None:
    x, w = rand(2, 6, 5, 4, grad=True), rand(8, 3, 3, 2, grad=True)
    torch.library.opcheck(tiled_conv2d, (x, w, [1, 2], [1, 1], [1, 1], 2, list(TILE), 3, 4))
    lies_otherwise = x.detach().to(memory_format=torch.channels_last)
    torch.library.opcheck(tiled_conv2d, (lies_otherwise, w, [1, 1], [0, 0], [1, 1], 2, list(TILE), 3, 4))


def everything(x: Any, w: Any, image: Any, filters: Any, shape: Any) -> Any:
    y = op.linear(op.matmul(x, w, tile_shape=shape), w, activation="gelu", tile_shape=shape)
    y = op.gemm(y, w, y, alpha=0.5, tile_shape=shape)
    return y.sum() + op.conv2d(image, filters, padding=1, tile_shape=shape).square().sum()


@pytest.mark.parametrize("shape", [None, TILE])
def test_compiled_whole_and_the_same(shape: Any) -> None:
    given = (rand(4, 6, grad=True), rand(6, 6, grad=True), rand(1, 2, 5, 5, grad=True), rand(3, 2, 3, 3, grad=True))
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True)
    one, other = compiled(*given, shape), everything(*given, shape)
    torch.testing.assert_close(one, other)
    for g, true in zip(*(torch.autograd.grad(y, given) for y in (one, other)), strict=True):
        torch.testing.assert_close(g, true)


def test_a_bad_tile_is_refused_while_compiling() -> None:
    compiled = torch.compile(lambda a: op.matmul(a, a, tile_shape=(24, 64, 32)), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"tile_shape=\(24, 64, 32\) cannot work"):
        compiled(rand(4, 4))


def test_on_meta_tensors() -> None:
    a, b = (
        torch.empty(4, 8, 16, device="meta", dtype=torch.bfloat16),
        torch.empty(16, 33, device="meta", dtype=torch.bfloat16),
    )
    for shape in (None, TILE):
        assert op.matmul(a, b, tile_shape=shape).shape == (4, 8, 33)
        assert op.linear(a, b.mT, activation="relu", tile_shape=shape).is_meta
        image, filters = torch.empty(1, 4, 9, 9, device="meta"), torch.empty(8, 4, 3, 3, device="meta")
        assert op.conv2d(image, filters, stride=2, tile_shape=shape).shape == (1, 8, 4, 4)


# -- convolutions ----------------------------------------------------------------------------------------------------


@few
@given(data=st.data())
def test_conv2d_equals_torchs(data: Any) -> None:
    groups, each = data.draw(st.sampled_from([(1, 3), (2, 2), (4, 1)]))
    kernel = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    pairs = st.one_of(st.integers(1, 2), st.tuples(st.integers(1, 2), st.integers(1, 2)))
    options = {"stride": data.draw(pairs), "dilation": data.draw(pairs), "padding": data.draw(pairs), "groups": groups}
    x, w = rand(2, groups * each, 7, 6), rand(groups * 2, each, *kernel)
    x = x.to(memory_format=torch.channels_last) if data.draw(st.booleans()) else x
    bias = rand(groups * 2) if data.draw(st.booleans()) else None
    true = F.conv2d(x, w, bias, **options)
    torch.testing.assert_close(op.conv2d(x, w, bias, **options, tile_shape=TILE), true)
    torch.testing.assert_close(op.conv2d(x[0], w, bias, **options), true[0])


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_conv2d_pads_by_name(padding: str) -> None:
    x, w = rand(3, 4, 6, 7), rand(5, 4, 2, 3)
    torch.testing.assert_close(op.conv2d(x, w, padding=padding, tile_shape=TILE), F.conv2d(x, w, padding=padding))


def test_conv2d_gradients_are_torchs() -> None:
    x, w, b = rand(2, 4, 6, 6, grad=True), rand(6, 2, 3, 3, grad=True), rand(6, grad=True)
    options = {"stride": 2, "padding": 1, "groups": 2}
    found, true = op.conv2d(x, w, b, **options, tile_shape=TILE), F.conv2d(x, w, b, **options)
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), (x, w, b)) for y in (found, true)), strict=True):
        torch.testing.assert_close(one, other)


# -- padding ---------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.sampled_from([1, 5, 8, 17, 2051]),
    k=st.integers(1, 40),
    turned=st.integers(0, 3),
    bias=st.booleans(),
)
def test_a_padded_product_is_the_product(m: int, n: int, k: int, turned: int, bias: bool) -> None:
    a = rand(k, m, dtype=torch.bfloat16).t() if turned & 1 else rand(m, k, dtype=torch.bfloat16)
    w = rand(k, n, dtype=torch.bfloat16).t() if turned & 2 else rand(n, k, dtype=torch.bfloat16)
    c = rand(n, dtype=torch.bfloat16).requires_grad_() if bias else None
    leaves = [a.requires_grad_(), w.requires_grad_(), *([] if c is None else [c])]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with padding.use("always"):
        found = padding.linear(a, w, c)
        seed = rand(m, n, dtype=torch.bfloat16)
        gradients = torch.autograd.grad(found, leaves, seed)
    true = F.linear(wide[0], wide[1], wide[2] if bias else None)
    for one, other in zip((found, *gradients), (true, *torch.autograd.grad(true, wide, seed.double())), strict=True):
        assert one.shape == other.shape and bool(torch.isfinite(one).all()) and error(one, other) < 8e-3


def test_an_unaligned_result_is_a_view_with_aligned_rows() -> None:
    x, w = rand(2, 16, 64, dtype=torch.bfloat16), rand(2501, 64, dtype=torch.bfloat16)
    with padding.use("always"):
        y = op.linear(x, w)
    assert y.shape == (2, 16, 2501) and not y.is_contiguous() and y.stride(-2) == 2560
    assert error(y, x.double() @ w.double().t()) < 4e-3
    assert op.linear(x, w).is_contiguous()  # a CPU pads nothing by itself


def test_the_gradient_of_a_weight_lies_as_the_weight() -> None:
    x, w = rand(16, 64, dtype=torch.bfloat16), rand(2501, 64, dtype=torch.bfloat16).requires_grad_()
    with padding.use("always"):
        op.linear(x, w).sum().backward()
    assert w.grad is not None and w.grad.stride() == w.stride()


def test_gradients_of_gradients_through_padding() -> None:
    x, w = (rand(3, 5, dtype=torch.bfloat16).requires_grad_() for _ in range(2))

    def second(mode: Any) -> Any:
        with padding.use(mode):
            (g,) = torch.autograd.grad(padding.linear(x, w).square().sum(), x, create_graph=True)
            return torch.autograd.grad(g.square().sum(), w)[0]

    assert error(second("always"), second("never")) < 3e-2


def test_aligned_products_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "multiply_padded", lambda *_: pytest.fail("padded"))
    a, b = rand(8, 16, dtype=torch.bfloat16), rand(16, 24, dtype=torch.bfloat16)
    with padding.use("always"):
        op.matmul(a, b), op.linear(a, b.t().contiguous()), op.matmul(a.t(), a), op.matmul(rand(3, 5), rand(5, 7))


@pytest.mark.parametrize(
    ("m", "n", "k", "layout", "pays"),
    [  # the first five measured on an H200: benchmarks/data/h200_ops.jsonl.gz, 6.6, 4.5, 4.3, 0.56 ms and 3 us
        (8192, 50257, 768, "nt", True),
        (8192, 768, 50257, "nn", True),
        (50257, 768, 8192, "tn", True),
        (8192, 4097, 1023, "nt", True),
        (1, 650, 650, "nt", False),
        (16, 50257, 768, "nt", False),  # copying the weight takes longer
        (8192, 4096, 1024, "nt", False),
    ],
)
def test_padding_is_done_where_the_predictor_sees_a_gain(m: int, n: int, k: int, layout: str, pays: bool) -> None:
    def matrix(rows: int, cols: int, turned: bool) -> Any:
        size = (cols, rows) if turned else (rows, cols)
        made = torch.empty(size, dtype=torch.bfloat16, device="meta")
        return made.t() if turned else made

    a, b = matrix(m, k, layout == "tn"), matrix(k, n, layout == "nt")
    assert padding.is_worth_padding(a, b, "NVIDIA H200") is pays


def test_an_unknown_chip_is_judged_as_an_h200() -> None:
    assert product_cost.lookup_chip("Some GPU of next year").id == product_cost.lookup_chip("NVIDIA H200").id == "h200"
    for chip in ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090", "Some GPU of next year"):
        assert padding._is_faster_padded(chip, 8192, 50257, 768, "nt", 0)
    assert not padding._is_faster_padded("Tesla T4", 8192, 50257, 768, "nt", 0)  # no tensor cores for bf16 to feed


def test_empty_products_are_not_padded() -> None:
    a, b = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((0, 5), (5, 7)))
    assert not padding.is_worth_padding(a, b, "NVIDIA H200")
    with padding.use("always"):
        assert op.matmul(rand(0, 5, dtype=torch.bfloat16), rand(5, 7, dtype=torch.bfloat16)).shape == (0, 7)


# -- options and errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [None, TILE])
def test_precision_rounds_the_operands(shape: Any) -> None:
    a, b = rand(40, 64, dtype=torch.float32), rand(64, 24, dtype=torch.float32)
    true = a.double() @ b.double()
    # On random data fp8 (e4m3) errs by 3.3-3.7e-2, bf16 by 2.9e-3, tf32 by 2.9e-4 (issue 6).
    for precision, low, high in (("fp8", 2e-2, 5e-2), ("bf16", 1e-3, 5e-3), ("tf32", 1e-4, 5e-4), ("fp32", 0.0, 1e-6)):
        assert low <= error(op.matmul(a, b, precision=precision, tile_shape=shape), true) <= high
        assert low <= error(op.linear(a, b.mT, precision=precision, tile_shape=shape), true) <= high
    assert op.matmul(a[0], b, precision="bf16", tile_shape=shape).shape == (24,)


@pytest.mark.parametrize("tolerance", [5e-2, 1e-2, 1e-3])
def test_a_tolerance_holds_with_and_without_a_tile(tolerance: float) -> None:
    a, b = rand(96, 128, dtype=torch.float32), rand(128, 80, dtype=torch.float32)
    for options in ({}, {"tile_shape": TILE}, {"tile_shape": TILE, "precision": "fp8"}):
        assert error(op.matmul(a, b, error_tolerance=tolerance, **options), a.double() @ b.double()) <= tolerance


def test_the_guides_call() -> None:
    a, b = rand(64, 64, dtype=torch.float32), rand(64, 64, dtype=torch.float32)
    s = stream.create(name="compute", device="cpu")
    c = op.matmul(a, b, tile_shape=(128, 128, 64), precision="fp8", accumulate="fp32", error_tolerance=5e-2, stream=s)
    assert error(c, a.double() @ b.double()) <= 5e-2


def test_hints_choose_tile_and_precision() -> None:
    a, b = rand(8, 8, dtype=torch.float32), rand(8, 8, dtype=torch.float32)
    with hints.use(hints.Hints(tiles={"matmul": (24, 64, 32)})), pytest.raises(TileError, match="24"):
        op.matmul(a, b)
    with hints.use(hints.Hints(precisions={"linear": "bf16"})):
        torch.testing.assert_close(op.linear(a, b), op.linear(a, b, precision="bf16"))
        torch.testing.assert_close(op.matmul(a, b), a @ b)


A, B = torch.zeros(3, 4), torch.zeros(4, 5)
ELSEWHERE = stream.Stream(name="other", device=torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: op.matmul(A, 3), r"op\.matmul: b is a int, not a tensor"),
        (lambda: op.matmul(A, B.mT), r"a is 3x4, b is 5x4.*\n.*\n.*b\.mT would fit"),
        (lambda: op.matmul(A, B.double()), r"b is torch\.float64"),
        (lambda: op.matmul(A, B.to("meta")), r"b is on meta, a on cpu"),
        (lambda: op.matmul(A, torch.zeros(())), r"b has no dimension"),
        (lambda: op.matmul(torch.zeros(2, 3, 4), torch.zeros(3, 4, 5)), r"leading dimensions do not broadcast"),
        (lambda: op.matmul(A, B, precision="fp9"), r"precision='fp9' is not known; did you mean 'fp8'"),
        (lambda: op.matmul(A, B, precision="bf16", accumulate="bf16"), r"accumulate='bf16'"),
        (lambda: op.matmul(A, B, precision="bf16", accumulate="fast", tile_shape=TILE), r"accumulate='fast'"),
        (lambda: op.matmul(A, B, error_tolerance=-1.0), r"tolerance"),
        (lambda: op.matmul(A, B, stream=ELSEWHERE), r"stream='other' is on cuda:0"),
        (lambda: op.matmul(A, B, stream="s"), r"stream='s' is not a tessera stream"),
        (lambda: op.gemm(A, B, torch.zeros(4)), r"op\.gemm: c is 4"),
        (lambda: op.gemm(A, B, torch.zeros(2, 3, 5)), r"op\.gemm: c is 2x3x5"),
        (lambda: op.linear(A, B), r"op\.linear: x is 3x4.*\n.*weight is 4x5"),
        (lambda: op.linear(A, torch.zeros(4)), r"weight is 4"),
        (lambda: op.linear(A, B.mT, torch.zeros(4)), r"bias is 4"),
        (lambda: op.linear(A, B.mT, activation="gleu"), r"activation='gleu' is not known; did you mean 'gelu'"),
        (lambda: op.conv2d(A, torch.zeros(1, 1, 1, 1)), r"op\.conv2d: x is 3x4"),
        (lambda: op.conv2d(torch.zeros(1, 3, 4, 4), torch.zeros(2, 2, 1, 1)), r"weight takes 2 channels"),
        (lambda: op.conv2d(torch.zeros(1, 3, 4, 4), torch.zeros(2, 3, 1, 1), groups=3), r"groups=3"),
        (lambda: op.conv2d(torch.zeros(1, 3, 4, 4), torch.zeros(2, 3, 1, 1), stride=0), r"stride=0"),
        (lambda: op.conv2d(torch.zeros(1, 3, 4, 4), torch.zeros(2, 3, 5, 5), tile_shape=TILE), r"0x0 pixels"),
        (lambda: op.conv2d(torch.zeros(1, 3, 4, 4), torch.zeros(2, 3, 1, 1), padding="samee"), r"did you mean 'same'"),
    ],
)
def test_wrong_arguments_are_named(call: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        call()


def test_autocast_may_mix_types() -> None:
    x, w = rand(3, 8, dtype=torch.bfloat16), rand(4, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for shape in (None, TILE):
            found = op.linear(x, w, tile_shape=shape), op.matmul(x, w.mT, tile_shape=shape)
            assert all(y.dtype is torch.bfloat16 for y in found)
        with padding.use("always"):
            assert op.linear(rand(3, 5, dtype=torch.bfloat16), rand(7, 5, dtype=torch.float32)).shape == (3, 7)


# -- the package and the kernels -------------------------------------------------------------------------------------


def test_an_operator_is_not_hidden_by_its_file() -> None:
    module = importlib.import_module("tessera.op.matmul")
    assert callable(op.matmul) and op.matmul is module.matmul
    with pytest.raises(AttributeError, match="did you mean 'matmul'"):
        op.matmull  # noqa: B018
    assert set(op.__all__) == set(dir(op))


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, tessera.op; assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


INTERPRETED = """
import random, warnings
import torch
from torch.nn.functional import conv2d
from tessera.op.kernels import matmul
from tessera.op.tile import Tile

def close(found, true, dtype, what):
    assert torch.isfinite(found).all(), what       # it was filled with NaN: every element is written
    error = ((found.double() - true).norm() / true.norm().clamp_min(1e-30)).item()
    assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype], (error, what)

pick = random.Random(0)
torch.manual_seed(0)
for i in range(15):
    batch, m, n, k = pick.choice([1, 2]), pick.randint(1, 70), pick.randint(1, 70), pick.randint(0, 70)
    dtype = pick.choice([torch.float32, torch.float16])
    make = lambda b, r, c: (torch.randn(b, c, r).mT if pick.random() < 0.5 else torch.randn(b, r, c)).to(dtype)
    a, b = make(pick.choice([1, batch]), m, k), make(batch, k, n)
    out = torch.full((batch, m, n + 3), float("nan"), dtype=dtype)[:, :, :n]
    by_matrix = torch.arange(1.0, batch + 1)
    scales = (torch.tensor([2.0]), 0.25 * by_matrix if batch > 1 else torch.tensor(0.25)) if i % 4 == 0 else None
    tile = Tile(*pick.choice([(16, 16, 16), (32, 16, 32), (64, 32, 16)]))
    true = a.double() @ b.double()
    true = true * 0.5 * by_matrix[:, None, None] if scales else true
    matmul.launch_matmul(a, b, out, tile=tile, stages=3, warps=4, scales=scales, dot="ieee")
    close(out, true, dtype, (batch, m, n, k, dtype, tile, i))
for i in range(12):
    groups, each = pick.choice([1, 1, 2]), pick.choice([1, 3, 16, 32])
    filters, taps = groups * pick.choice([1, 5, 17]), (pick.choice([1, 2, 3]), pick.choice([1, 3]))
    options = dict(stride=(pick.choice([1, 2]), 1), padding=(pick.choice([0, 1, 2]), 1), groups=groups,
                   dilation=(2 if taps[0] < 3 else 1, 1))
    dtype = pick.choice([torch.float32, torch.float16])
    x = torch.randn(2, groups * each, pick.randint(3, 9), pick.randint(3, 9)).to(dtype)
    x = x.to(memory_format=torch.channels_last)
    w = torch.randn(filters, each, *taps).to(dtype)
    true = conv2d(x.double(), w.double(), **options)
    out = torch.full((2, *true.shape[2:], filters), float("nan"), dtype=dtype)
    matmul.launch_conv(x.permute(0, 2, 3, 1), w.permute(0, 2, 3, 1).contiguous(), out, **options,
                tile=Tile(16, 16, pick.choice([16, 32])), stages=2, warps=4, dot="ieee")
    close(out.permute(0, 3, 1, 2), true, dtype, (x.shape, w.shape, options, i))
print("kernels agree")
"""


def test_kernels_in_the_interpreter() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    assert "kernels agree" in run_forked(INTERPRETED, interpreted=True)


@pytest.mark.parametrize("precision", ["fp8", "fp16"])
@pytest.mark.parametrize("tolerance", [None, 5e-2])
def test_a_tile_scales_each_matrix_of_a_stack(precision: str, tolerance: float | None) -> None:
    torch.manual_seed(5)
    small = torch.tensor([1.0, 1e-6])[:, None, None]
    a, b = torch.randn(2, 64, 64) * small, torch.randn(2, 64, 64) * small.flip(0)
    found = op.matmul(a, b, precision=precision, error_tolerance=tolerance, tile_shape=TILE)
    assert error(found, a.double() @ b.double()) <= {"fp8": 5e-2, "fp16": 1e-3}[precision]
    shared = op.matmul(a[0], b, precision=precision, error_tolerance=tolerance, tile_shape=TILE)
    assert error(shared[0], a[0].double() @ b[0].double()) <= 5e-2
    assert error(shared[1], a[0].double() @ b[1].double()) <= 5e-2


def test_what_is_probed_is_the_product_of_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    bounded.forget()
    small = torch.tensor([1.0, 1e-12])[:, None, None]  # one scale for both would lose the second
    a, b = torch.randn(2, 64, 64) * small, torch.randn(2, 64, 64) * small.flip(0)
    op.matmul(a, b, precision="fp16", error_tolerance=1e-3, tile_shape=TILE)
    assert op.choices()[-1].precision == "fp16"
    op.matmul(a, b, precision="fp16", error_tolerance=1e-3)
    assert op.choices()[-1].precision != "fp16"  # nor is the tile's choice taken for another product
    right = tiled_matmul._product
    monkeypatch.setattr(tiled_matmul, "_product", lambda *given: 1.1 * right(*given))
    with pytest.raises(ToleranceError):
        op.matmul(a[0], b[0], error_tolerance=1e-2, tile_shape=TILE)


@pytest.mark.parametrize("options", [{"error_tolerance": 4e-3}, {"accumulate": "fp32"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_that_were_checked_or_asked_for_are_not_the_librarys_own(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Those of 16-bit operands may be split and rounded: where products cancel, one was off by 0.4 on a CPU."""
    torch.manual_seed(3)
    bounded.forget()
    a, b = torch.randn(64, 48).to(dtype), torch.randn(48, 32).to(dtype)
    right = padding.matmul
    monkeypatch.setattr(padding, "matmul", lambda a, b: 1.1 * right(a, b))
    true = a.double() @ b.double()
    assert error(op.matmul(a, b), true) > 0.09
    for call in (op.matmul, op.gemm, lambda a, b, **how: op.linear(a, b.mT, **how)):
        assert error(call(a, b, **options), true) <= 4e-3
    assert error(op.matmul(a, b, accumulate="fast"), true) > 0.09


@pytest.mark.parametrize("call", [op.matmul, op.gemm, lambda a, b, **how: op.linear(a, b.mT, **how)])
def test_a_tile_and_a_tolerance_choose_when_a_compiled_graph_runs(call: Any) -> None:
    torch.manual_seed(3)
    bounded.forget()
    torch._dynamo.reset()
    a, b = torch.randn(128, 64), torch.randn(64, 96)
    how = {"tile_shape": TILE, "precision": "fp8", "error_tolerance": 5e-2}
    run = torch.compile(lambda a, b: call(a, b, **how), backend="aot_eager", fullgraph=True)
    found = run(a, b)
    assert op.choices()[-1].precision == "fp8"
    assert torch.equal(found, call(a, b, **how))
    assert 1e-3 < error(found, a.double() @ b.double()) <= 5e-2
    a.requires_grad_()
    run(a, b).sum().backward()
    assert error(a.grad, torch.ones(128, 96).double() @ b.mT.double()) <= 5e-2


@pytest.mark.parametrize("call", [op.matmul, op.gemm, lambda a, b, **how: op.linear(a, b.mT, **how)])
def test_gradients_are_within_the_tolerance_too(call: Any) -> None:
    torch.manual_seed(0)
    a, half, g = torch.randn(200, 200), torch.randn(200, 100), torch.randn(200, 100)
    b = torch.cat([half, half * (1 + 1e-3 * torch.randn(200, 100))], 1)  # fp8 and bf16 lose what g lets remain
    a, b, g = a.requires_grad_(), b.requires_grad_(), torch.cat([g, -g], 1)
    call(a, b, error_tolerance=5e-2, precision="fp8").backward(g)
    assert error(a.grad, g.double() @ b.detach().double().mT) <= 5e-2
    assert error(b.grad, a.detach().double().mT @ g.double()) <= 5e-2


def test_what_is_multiplied_by_zero_does_not_count() -> None:
    a, b, c = rand(3, 5, 7, dtype=torch.float32), rand(7, 4, dtype=torch.float32), torch.full((5, 4), torch.nan)
    for x in (a[0], a):
        for options in ({}, {"precision": "fp32"}, {"tile_shape": TILE}, {"error_tolerance": 1e-2}):
            assert not op.gemm(x, b, c, beta=0.0, **options).isnan().any(), options


def test_a_compiled_product_keeps_its_bound() -> None:
    a, b = torch.randn(48, 64), torch.randn(64, 32)
    run = torch.compile(lambda a, b: op.matmul(a, b, error_tolerance=1e-2), backend="aot_eager", fullgraph=True)
    for scale in (1.0, 1e30):  # the second does not fit 16 bits: the choice is made when the graph runs
        exact = (a.double() * scale) @ b.double()
        assert float((run(a * scale, b).double() - exact).norm() / exact.norm()) <= 1e-2


def _error(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    exact = a.double() @ b.double()
    return float((c.double() - exact).norm() / exact.norm())


def test_promised_fp32_is_fp32_whatever_the_program_allows() -> None:
    """On a processor with AMX (Intel's Xeons since 2023) torch rounds fp32 operands to bf16 here."""
    a, b = torch.randn(32, 64), torch.randn(64, 32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert _error(op.matmul(a, b, precision="fp32"), a, b) < 1e-6
        assert _error(op.matmul(a, b, error_tolerance=1e-5), a, b) < 1e-5
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_product_in_fp32_sets_the_switch_of_the_cpu_and_puts_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor: what the product runs under is asked, not what it gives."""
    switch, seen = torch.backends.mkldnn.matmul, []
    before, product = switch.fp32_precision, torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda *args: (seen.append(switch.fp32_precision), product(*args))[1])
    switch.fp32_precision = "bf16"
    try:
        op.matmul(torch.randn(32, 64), torch.randn(64, 32), precision="fp32")
        assert seen == ["ieee"] and switch.fp32_precision == "bf16"
    finally:
        switch.fp32_precision = before


def test_an_addend_of_fixed_shape_beside_a_product_of_any() -> None:
    a, b, c = torch.randn(4, 6), torch.randn(6, 8), torch.randn(1, 8)
    torch._dynamo.maybe_mark_dynamic(b, 1)
    run = torch.compile(lambda b: op.gemm(a, b, c), backend="aot_eager", fullgraph=True)
    assert torch.allclose(run(b), a @ b + c, atol=1e-5)
