"""Operators under autocast: as torch's own, and untouched by it where a precision or a tolerance is asked for."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from tessera import op  # noqa: E402

TILE = (64, 64, 32)
pytestmark = pytest.mark.usefixtures("formula_only")


def in_bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def apart(found: Any, true: Any) -> float:
    return float((found.double() - true).norm() / true.norm())


def products() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    a, b = torch.randn(50, 70), torch.randn(70, 40)
    return a, b, a.double() @ b.double()


@pytest.mark.parametrize("tile_shape", [None, TILE])
@pytest.mark.parametrize("asked", [{"error_tolerance": 1e-5}, {"precision": "fp32"}])
def test_what_is_asked_for_holds(tile_shape: Any, asked: dict[str, Any]) -> None:
    a, b, true = products()
    with in_bf16():
        found = (
            op.matmul(a, b, tile_shape=tile_shape, **asked),
            op.gemm(a, b, tile_shape=tile_shape, **asked),
            op.linear(a, b.mT, tile_shape=tile_shape, **asked),
        )
    for product in found:
        assert product.dtype is torch.float32 and apart(product, true) < 1e-6


@pytest.mark.parametrize("tile_shape", [None, TILE])
def test_a_tolerance_that_full_precision_meets_is_not_cast(tile_shape: Any) -> None:
    a, b, _ = products()
    a, b = a.half(), b.half()
    with in_bf16():  # fp16 is full precision here: bf16 would err by 2e-3
        found = op.matmul(a, b, error_tolerance=1e-3, tile_shape=tile_shape)
    assert found.dtype is torch.float16 and apart(found, a.double() @ b.double()) <= 1e-3


@pytest.mark.parametrize("options", [{}, {"tile_shape": TILE}, {"precision": "fp8"}, {"error_tolerance": 0.1}])
def test_dtypes_may_differ_in_products(options: dict[str, Any]) -> None:
    a, b, true = products()
    with in_bf16():
        found = (
            op.matmul(a.bfloat16(), b, **options),
            op.gemm(a, b.bfloat16(), torch.zeros(40).bfloat16(), **options),
            op.linear(a.bfloat16(), b.mT, torch.zeros(40), **options),
        )
    for product in found:
        assert product.dtype is (torch.float32 if options.keys() - {"tile_shape"} else torch.bfloat16)
        assert apart(product, true) < 0.1


@pytest.mark.parametrize("options", [{}, {"tile_shape": (64, 32)}])
def test_attention_is_torchs(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 9, 16) for _ in range(3))
    with in_bf16():
        true = F.scaled_dot_product_attention(q, k.bfloat16(), v)
        found = op.flash_attention(q, k.bfloat16(), v, **options)
    assert found.dtype is true.dtype is torch.bfloat16
    torch.testing.assert_close(found, true, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", [{}, {"tile_shape": (64, 32)}])
def test_attention_in_a_precision_that_was_asked_for(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 2, 9, 16)
    true = F.scaled_dot_product_attention(q.double(), q.double(), q.double())
    with in_bf16():
        found = op.flash_attention(q, q, q, precision="fp32", **options)
    assert found.dtype is torch.float32 and apart(found, true) < 1e-6


@pytest.mark.parametrize("mixed", [False, True])
def test_a_tiled_convolution_is_cast_as_torchs(mixed: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 8, 8, requires_grad=True), torch.randn(3, 4, 3, 3)
    w = (w.bfloat16() if mixed else w).requires_grad_()
    with in_bf16():
        true, found = F.conv2d(x, w), op.conv2d(x, w, tile_shape=TILE)
    assert found.dtype is true.dtype is torch.bfloat16
    torch.testing.assert_close(found, true, rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(
        torch.autograd.grad(found.float().sum(), (x, w)), torch.autograd.grad(true.float().sum(), (x, w)), strict=True
    ):
        assert mine.dtype is theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_experts_and_transforms_take_two_dtypes() -> None:
    torch.manual_seed(0)
    x, router, w1, w2 = torch.randn(6, 4), torch.randn(6, 3), torch.randn(3, 5, 4), torch.randn(3, 4, 5)
    true = op.moe(x, router, w1, w2)
    images, filters = torch.randn(1, 2, 9, 9), torch.randn(3, 2, 3, 3)
    with in_bf16():
        found = op.moe(x.bfloat16(), router, w1, w2)
        spectral = op.spectral_conv2d(images, filters.bfloat16())
    assert found.dtype is torch.bfloat16 and apart(found, true.double()) < 3e-2
    assert apart(spectral, F.conv2d(images.double(), filters.double())) < 1e-2
