"""op.fft, op.ifft and op.spectral_conv2d: against torch, and the cost model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tessera import op, stream
from tessera.errors import ArgumentError
from tessera.op.spectral import fast_size, spectral_wins

CPU = stream.create(name="work", device="cpu")


def relative(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


# -- transforms --------------------------------------------------------------------------------------------------------


def test_fft_is_torchs_over_any_dimensions():
    x = torch.randn(3, 8, 5)
    assert torch.allclose(op.fft(x), torch.fft.fft(x), atol=1e-5)
    assert torch.allclose(op.fft(x, (0, 1), norm="ortho", stream=CPU), torch.fft.fftn(x, dim=(0, 1), norm="ortho"))
    assert relative(op.ifft(op.fft(x, (0, 1, 2)), (0, 1, 2)).real, x) < 1e-6
    half = op.fft(x.half())
    assert (
        half.dtype == torch.complex64
        and relative(torch.view_as_real(half), torch.view_as_real(torch.fft.fft(x))) < 1e-2
    )
    leaf = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: op.fft(t, (0, 1)), leaf)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: op.fft(x, 3), "dims=3"),
        (lambda x: op.fft(x, (0, -3)), "twice"),
        (lambda x: op.ifft(x, ()), r"dims=\(\)"),
        (lambda x: op.fft(x, norm="best"), "norm='best'"),
        (lambda x: op.fft(x.int()), "x is torch.int32"),
        (lambda x: op.fft(x, stream="s"), "stream='s'"),
    ],
)
def test_wrong_transforms_are_named(call, said):
    with pytest.raises(ArgumentError, match=said):
        call(torch.randn(3, 4, 5))


@given(st.integers(1, 5000))
def test_fast_sizes_are_the_next_smooth_ones(n):
    def smooth(m):
        for prime in (2, 3, 5, 7):
            while m % prime == 0:
                m //= prime
        return m == 1

    assert fast_size(n) == next(m for m in range(n, 2 * n + 1) if smooth(m))


# -- spectral convolution ----------------------------------------------------------------------------------------------

SIZES = st.integers(1, 9)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 3),
    groups=st.integers(1, 3),
    each=st.integers(1, 3),
    out=st.integers(1, 3),
    h=SIZES,
    w=SIZES,
    kh=st.integers(1, 5),
    kw=st.integers(1, 5),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    padding=st.one_of(st.tuples(st.integers(0, 4), st.integers(0, 4)), st.sampled_from(["same", "valid"])),
    bias=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's word on its own speed
def test_spectral_conv2d_is_conv2d(n, groups, each, out, h, w, kh, kw, dilation, padding, bias):
    torch.manual_seed(0)
    x = torch.randn(n, groups * each, h, w, dtype=torch.double)
    weight = torch.randn(groups * out, each, kh, kw, dtype=torch.double)
    b = torch.randn(groups * out, dtype=torch.double) if bias else None
    pads = (0, 0) if padding == "valid" else padding
    room = [
        s + (d * (k - 1) if pads == "same" else 2 * pads[i])
        for i, (s, d, k) in enumerate(zip((h, w), dilation, (kh, kw), strict=True))
    ]
    if any(d * (k - 1) + 1 > r for d, k, r in zip(dilation, (kh, kw), room, strict=True)):
        with pytest.raises(ArgumentError, match="w reaches over"):
            op.spectral_conv2d(x, weight, b, padding=padding, dilation=dilation, groups=groups)
        return
    wanted = F.conv2d(x, weight, b, padding=padding, dilation=dilation, groups=groups)
    found = op.spectral_conv2d(x, weight, b, padding=padding, dilation=dilation, groups=groups, stream=CPU)
    assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-10)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.half, 2e-3), (torch.bfloat16, 1e-2)])
def test_spectral_conv2d_keeps_the_dtype(dtype, most):
    torch.manual_seed(1)
    x, w = torch.randn(2, 4, 20, 17).to(dtype), torch.randn(6, 4, 7, 7).to(dtype)
    found = op.spectral_conv2d(x, w, padding=3)
    assert found.dtype == dtype
    assert relative(found.double(), F.conv2d(x.double(), w.double(), padding=3)) < most
    assert torch.equal(op.spectral_conv2d(x[0], w, padding=3), op.spectral_conv2d(x[:1], w, padding=3)[0])


def test_spectral_conv2d_has_conv2ds_gradients():
    x = torch.randn(2, 4, 6, 5, dtype=torch.double, requires_grad=True)
    for groups in (1, 2, 4):
        w = torch.randn(4, 4 // groups, 3, 2, dtype=torch.double, requires_grad=True)
        b = torch.randn(4, dtype=torch.double, requires_grad=True)
        seed = torch.randn(2, 4, 4, 5, dtype=torch.double)
        options = {"padding": (0, 1), "groups": groups, "dilation": (1, 2)}
        mine = torch.autograd.grad(op.spectral_conv2d(x, w, b, **options), (x, w, b), seed)
        theirs = torch.autograd.grad(F.conv2d(x, w, b, **options), (x, w, b), seed)
        assert all(torch.allclose(m, t, atol=1e-10) for m, t in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w": torch.randn(4, 3, 3, 3)}, "w is 4x3x3x3"),
        ({"groups": 3}, "groups=3"),
        ({"bias": torch.randn(3)}, "bias is 3"),
        ({"padding": -1}, "padding=-1"),
        ({"padding": "full"}, "padding='full'"),
        ({"dilation": 0}, "dilation=0"),
        ({"w": torch.randn(4, 2, 9, 9)}, "w reaches over 9"),
        ({"x": torch.randn(4)}, "x is 4"),
        ({"w": torch.randn(4, 2, 3, 3).half()}, "w is torch.float16"),
    ],
)
def test_wrong_convolutions_are_named(change, said):
    given = {"x": torch.randn(1, 2, 8, 8), "w": torch.randn(4, 2, 3, 3), **change}
    with pytest.raises(ArgumentError, match=said):
        op.spectral_conv2d(given.pop("x"), given.pop("w"), given.pop("bias", None), **given)


def test_the_cost_model_prefers_transforms_for_large_kernels_only():
    verdicts = [spectral_wins((8, 256, 64, 64), (256, 1, k, k), padding=k // 2, groups=256) for k in (3, 7, 15, 31)]
    assert not verdicts[0] and verdicts[-1]
    assert [bool(v) for v in verdicts] == sorted(bool(v) for v in verdicts)  # once it wins it goes on winning
    assert all(v.direct_s > 0 and v.spectral_j > 0 and "mJ" in v.reason for v in verdicts)
    # Products of half precision on tensor cores are hard to beat with a dense 3x3.
    assert not spectral_wins((32, 256, 56, 56), (256, 256, 3, 3), padding=1)
    assert not spectral_wins((32, 256, 56, 56), (256, 256, 3, 3), padding=1, on="a100", dtype="fp32")
    for wrong, said in (
        ({"x_shape": (1, 2, 3)}, "x_shape"),
        ({"dtype": "int8"}, "dtype"),
        ({"w_shape": (2, 5, 3, 3)}, "w takes 5 channels"),
        ({"w_shape": (2, 2, 9, 9)}, "w reaches over 9"),
        ({"groups": 0}, "groups=0"),
    ):
        with pytest.raises(ArgumentError, match=said):
            spectral_wins(**{"x_shape": (1, 2, 8, 8), "w_shape": (2, 2, 3, 3), **wrong})


def test_they_compile_in_one_graph():
    x, w = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)

    def program(x, w):
        return op.all_reduce(op.spectral_conv2d(x, w, padding=1)).sum() + op.fft(x, (2, 3)).abs().sum()

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x, w), program(x, w), rtol=1e-5)
