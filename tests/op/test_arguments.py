"""Errors of the operators: each names its argument, also where torch's own would not; torch's other errors stay."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tessera import op, stream  # noqa: E402
from tessera.errors import ArgumentError  # noqa: E402
from tessera.op import padding  # noqa: E402
from tessera.rewrite import checkpoint  # noqa: E402

TILE = (64, 64, 32)
pytestmark = pytest.mark.usefixtures("formula_only")
a, q, x, w = torch.ones(4, 4), torch.ones(2, 4, 5, 8), torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)
ints, missing = torch.ones(4, 4, dtype=torch.int64), None


WRONG = [
    (lambda: op.matmul(missing, a), "op.matmul: a is None"),
    (lambda: op.matmul(a, missing), "op.matmul: b is None"),
    (lambda: op.linear(missing, a), "op.linear: x is None"),
    (lambda: op.linear(a, missing), "op.linear: weight is None"),
    (lambda: op.flash_attention(q, missing, q), "op.flash_attention: k is None"),
    (lambda: op.conv2d(x, missing), "op.conv2d: weight is None"),
    (lambda: op.softmax(missing), "op.softmax: x is None"),
    (lambda: op.layer_norm(missing), "op.layer_norm: x is None"),
    (lambda: op.moe(a, missing, a, a), "op.moe: router is None"),
    (lambda: op.moe(a, a, missing, a), "op.moe: w1 is None"),
    (lambda: op.fft(missing), "op.fft: x is None"),
    (lambda: op.spectral_conv2d(x, missing), "op.spectral_conv2d: w is None"),
    (lambda: op.stochastic_round([1.0]), "op.stochastic_round: x is a list"),
    (lambda: op.matmul(ints, ints, tile_shape=TILE), "op.matmul: a is torch.int64"),
    (lambda: op.matmul(ints, ints, precision="fp8"), "op.matmul: a is torch.int64"),
    (lambda: op.linear(ints, ints, error_tolerance=0.1), "op.linear: x is torch.int64"),
    (lambda: op.matmul(a, a, accumulate="fp16"), "op.matmul: accumulate='fp16'"),
    (lambda: op.matmul(a, a, precision="fp64", tile_shape=TILE), "op.matmul: precision='fp64'"),
    (lambda: op.linear(a, a, tile_shape=(100, 64, 32)), "op.linear: tile_shape=(100, 64, 32)"),
    (lambda: op.gemm(a, a, tile_shape=(100, 64, 32)), "op.gemm: tile_shape=(100, 64, 32)"),
    (lambda: op.flash_attention(q, q[:1].expand(3, 4, 5, 8), q), "k is 3x4x5x8"),
    (lambda: op.flash_attention(q, q, q[:, :3]), "v is 2x3x5x8"),
    (lambda: op.flash_attention(q, q, q, attn_mask=torch.ones(5, 6, dtype=torch.bool)), "attn_mask is 5x6"),
    (lambda: op.flash_attention(q, q, q, attn_mask=torch.ones(5, dtype=torch.bool)), "attn_mask is 5"),
    (lambda: op.flash_attention(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.int64)), "attn_mask is torch.int64"),
    (lambda: op.flash_attention(q, q, q, attn_mask=torch.ones(5, 5).double()), "attn_mask is torch.float64"),
    (
        lambda: op.flash_attention(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.int64), tile_shape=(64, 32)),
        "attn_mask is torch.int64",
    ),
    (lambda: op.flash_attention(q, q, q, scale="a"), "scale='a'"),
    (lambda: op.flash_attention(q, q, q, scale="a", tile_shape=(64, 32)), "scale='a'"),
    (lambda: op.flash_attention(q, q, q, dropout_p="x"), "dropout_p='x'"),
    (lambda: op.conv2d(x, w, groups="1"), "groups='1'"),
    (lambda: op.conv2d(x[..., :2, :2], w), "op.conv2d: x is 1x3x2x2"),
    (lambda: op.conv2d(x, w, dilation=4, padding="valid"), "op.conv2d: x is 1x3x8x8"),
    (lambda: op.conv2d(x, w, stride=2, padding="same"), "op.conv2d: padding='same' with stride=(2, 2)"),
    (lambda: op.spectral_conv2d(x.cfloat(), w.cfloat()), "x is torch.complex64"),
    (lambda: op.spectral_conv2d(x, torch.ones(3), padding="same"), "w is 3"),
    (lambda: op.fft(a, None), "dims=None"),
    (lambda: op.softmax(a, None), "dim=None"),
    (lambda: op.layer_norm(a, torch.ones(4)), "normalized_shape is a tensor of 4"),
    (lambda: op.rms_norm(a, torch.ones(4, dtype=torch.complex64)), "weight is torch.complex64"),
    (lambda: op.softmax(a, True), "dim=True"),
    (lambda: op.softmax(a, dtype=torch.int32), "dtype=torch.int32"),
    (lambda: op.softmax(a.cfloat()), "op.softmax: x is torch.complex64"),
    (lambda: op.layer_norm(a.cfloat()), "op.layer_norm: x is torch.complex64"),
    (lambda: op.flash_attention(q.cfloat(), q.cfloat(), q.cfloat(), precision="fp32"), "q is torch.complex64"),
    (lambda: op.flash_attention(q, q, q, attn_mask=q[0, 0] @ q[0, 0].mT, dropout_p=missing), "dropout_p=None"),
    (lambda: op.gemm(ints, ints, ints, alpha=0.5), "op.gemm: alpha=0.5"),
    (lambda: op.gemm(ints, ints, ints, alpha=1j), "op.gemm: alpha=1j"),
    (lambda: op.gemm(ints, ints, ints, beta=float("nan")), "op.gemm: beta=nan"),
    (lambda: op.gemm(a, a, a, beta="1"), "op.gemm: beta='1'"),
    (lambda: op.matmul(a, a, error_tolerance=True), "error_tolerance=True"),
    (lambda: op.conv2d(x, w, groups=True), "groups=True"),
    (lambda: op.fft(a.to(torch.float8_e4m3fn)), "op.fft: x is torch.float8_e4m3fn"),
    (lambda: op.fft(a, True), "dims=True"),
    (lambda: op.fft(torch.tensor(1.0)), "op.fft: x is a scalar"),
    (lambda: op.fft(torch.ones(3, 0)), "op.fft: x is 3x0"),
    (lambda: op.moe(a.cfloat(), a, w[:, :1, 0].cfloat(), w.cfloat()), "op.moe: x is torch.complex64"),
    (lambda: op.moe(a, a.cfloat(), a[:, None], a[:, :, None]), "op.moe: router is torch.complex64"),
    (lambda: op.moe(a, a, torch.ones(0, 2, 4), torch.ones(0, 4, 2)), "op.moe: w1 is 0x2x4"),
    (lambda: op.moe(a.to(torch.float8_e4m3fn), a, *[torch.ones(4, 4, 4).to(torch.float8_e4m3fn)] * 2), "fp8 needs"),
    (lambda: stream.create(priority="high"), "priority='high'"),
    (lambda: stream.create(device="cud"), "device='cud'"),
    (lambda: checkpoint.plan(3, a), "model is a int"),
]


@pytest.mark.parametrize(("call", "named"), WRONG, ids=[named for _, named in WRONG])
def test_the_argument_is_named(call: Any, named: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert named in str(caught.value) and caught.value.fix


def test_a_misspelt_way_of_padding() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'never'"), padding.use("nevr"):  # type: ignore[arg-type]
        pass


def test_what_torch_refused_is_kept_as_the_cause() -> None:
    with pytest.raises(ArgumentError) as caught:
        op.flash_attention(q, q, q[:, :3])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_torchs_other_errors_pass() -> None:
    with pytest.raises(RuntimeError) as caught:
        op.conv2d(x, torch.ones(0, 3, 3, 3))
    assert not isinstance(caught.value, ArgumentError)
    with pytest.raises(RuntimeError) as caught:
        op.flash_attention(q, q, q, causal=True, attn_mask=torch.ones(5, 5).to_sparse())
    assert not isinstance(caught.value, ArgumentError)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    one = numpy.int64(1)
    assert torch.equal(op.softmax(a, one), torch.softmax(a, 1))
    assert torch.equal(op.fft(a, one), torch.fft.fft(a, dim=1))
    assert torch.equal(op.layer_norm(a, numpy.array(a.shape)), op.layer_norm(a, a.shape))
    assert torch.equal(op.conv2d(x, w, stride=one, padding=one, groups=one), op.conv2d(x, w, padding=1))
    assert op.moe(a, a, torch.ones(4, 2, 4), torch.ones(4, 4, 2), top_k=one).shape == a.shape


def test_integers_where_torch_has_them() -> None:
    assert torch.equal(op.softmax(ints, dtype=torch.float64), torch.softmax(ints, -1, dtype=torch.float64))
    stack = ints.expand(2, 4, 4)
    found = op.gemm(stack, stack, ints, alpha=2.0, beta=3)
    assert found.dtype is torch.int64 and torch.equal(found, 2 * stack @ stack + 3 * ints)


def test_a_mixture_of_tokens_without_width() -> None:
    found = op.moe(torch.ones(3, 0), torch.ones(4, 0), torch.ones(4, 2, 0), torch.ones(4, 0, 2))
    assert found.shape == (3, 0)
