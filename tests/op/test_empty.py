"""Operators on tensors without elements: torch's shapes, whatever options are given, and gradients of zeros."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from tessera import op  # noqa: E402

TILE = (64, 64, 32)
pytestmark = pytest.mark.usefixtures("formula_only")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"precision": "fp8"},
    {"precision": "fp16"},
    {"precision": "bf16"},
    {"error_tolerance": 1e-2},
    {"error_tolerance": 0.1, "precision": "fp8"},
    {"tile_shape": TILE},
    {"tile_shape": TILE, "precision": "fp8"},
    {"tile_shape": TILE, "error_tolerance": 1e-2},
]
SHAPES = [
    ((0, 7), (7, 4)),
    ((5, 7), (7, 0)),
    ((5, 0), (0, 4)),
    ((0, 7), (3, 7, 4)),
    ((3, 0, 7), (7, 4)),
    ((0, 5, 7), (0, 7, 4)),
    ((5, 7), (0, 7, 4)),
    ((0, 5, 7), (7, 4)),
    ((2, 0, 5, 7), (2, 1, 7, 4)),
    ((3, 5, 0), (3, 0, 4)),
    ((0,), (0, 4)),
    ((5, 0), (0,)),
    ((0,), (0,)),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_products_have_torchs_shape(shapes: Any, options: dict[str, Any]) -> None:
    a, b = (torch.ones(shape, requires_grad=True) for shape in shapes)
    true = torch.matmul(a, b)
    for call in (op.matmul, op.gemm):
        found = call(a, b, **options)
        assert found.shape == true.shape and found.dtype is true.dtype
        assert not found.detach().any()
        for mine, theirs in zip(
            torch.autograd.grad(found.sum(), (a, b)), torch.autograd.grad(true.sum(), (a, b)), strict=True
        ):
            assert torch.equal(mine, theirs)
            true = torch.matmul(a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_sum_of_nothing_is_what_is_added(options: dict[str, Any]) -> None:
    bias = torch.arange(4.0)
    assert torch.equal(op.linear(torch.ones(5, 0), torch.ones(4, 0), bias, **options), bias.expand(5, 4))
    assert op.linear(torch.ones(0, 7), torch.ones(4, 7), bias, activation="relu", **options).shape == (0, 4)


def test_a_compiled_tiled_product_of_none() -> None:
    run = torch.compile(lambda a, b: op.matmul(a, b, tile_shape=TILE), fullgraph=True, backend="aot_eager")
    assert run(torch.ones(5, 7), torch.ones(0, 7, 4)).shape == (0, 5, 4)


@pytest.mark.parametrize("padding", [0, "same"])
def test_spectral_convolutions_of_no_images(padding: Any) -> None:
    x, w = torch.ones(0, 2, 9, 9), torch.ones(3, 2, 3, 3, requires_grad=True)
    found = op.spectral_conv2d(x, w, torch.ones(3), padding=padding)
    assert found.shape == F.conv2d(x, w, padding=padding).shape
    (gradient,) = torch.autograd.grad(found.sum(), w)
    assert gradient.shape == w.shape and not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_transforms_of_no_rows(dtype: Any) -> None:
    found = op.fft(torch.ones(0, 8, dtype=dtype))
    assert found.shape == (0, 8) and found.dtype is (dtype if dtype.is_complex else torch.complex64)


@pytest.mark.parametrize("gqa", [False, True])
def test_attention_without_keys_has_the_dtype_of_q(gqa: bool) -> None:
    q, k = torch.ones(2, 4, 5, 8), torch.ones(2, 2 if gqa else 4, 0, 8)
    found = op.flash_attention(q, k, k, precision="bf16", enable_gqa=gqa)
    assert found.dtype is torch.float32 and found.shape == q.shape and not found.any()
