"""Fourier transforms over ranks are torch's of the whole signal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gloo_ranks import GlooRanks
from tessera import dist
from tessera.dist import fourier as fourier  # imported once, not by every rank
from tessera.errors import ArgumentError


@pytest.fixture(scope="module", params=(2, 3, 4, 8))
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with GlooRanks(request.param) as pool:
        yield pool


def whole_signal(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 3, count * count * 5, dtype=dtype, generator=torch.Generator().manual_seed(1))


def part_of(x: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    return x.chunk(count, -1)[rank]


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    """As torch's, which imports five hundred modules."""
    near = 1e-10 if a.dtype in (torch.float64, torch.complex128) else 1e-4
    assert a.dtype == b.dtype and a.shape == b.shape
    assert float((a - b).abs().max()) <= near * (1 + float(b.abs().max()))


def transform(rank: int, count: int, dtype: torch.dtype, chunks: int) -> None:
    x = whole_signal(count, dtype)
    truth = torch.fft.fft(x)
    mine = part_of(x, rank, count)
    with dist.record_collectives() as records:
        y = dist.fft(mine, chunks=chunks)
    assert records[-1].sent_bytes == 3 * y.numel() * y.element_size() * (count - 1) / count
    assert_close(y, part_of(truth, rank, count).to(y.dtype))
    assert_close(dist.ifft(y, chunks=chunks), mine.to(y.dtype))
    strided = dist.fft(mine, ordered=False)
    assert_close(strided, truth[..., rank::count].to(y.dtype))
    assert_close(dist.ifft(strided, ordered=False, chunks=chunks), mine.to(y.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize("chunks", [1, 3])
def test_transforms_are_those_of_the_whole_signal(ranks: GlooRanks, dtype: torch.dtype, chunks: int) -> None:
    ranks.run(transform, ranks.count, dtype, chunks)


def differentiate(rank: int, count: int) -> None:
    x = whole_signal(count, torch.float64)
    weight = torch.arange(x.shape[-1], dtype=torch.float64)
    truth = x.clone().requires_grad_()
    (torch.fft.fft(truth).abs().square() * weight).sum().backward()
    mine = part_of(x, rank, count).clone().requires_grad_()
    (dist.fft(mine).abs().square() * part_of(weight, rank, count)).sum().backward()
    assert mine.grad is not None and truth.grad is not None
    assert_close(mine.grad, part_of(truth.grad, rank, count))


def test_gradients_are_those_of_the_whole_signal(ranks: GlooRanks) -> None:
    ranks.run(differentiate, ranks.count)


def refuse(rank: int, count: int) -> str:
    try:
        dist.fft(torch.ones(count + 1))
    except ArgumentError as exc:
        return str(exc)
    return ""


def test_parts_that_the_ranks_do_not_divide_are_refused(ranks: GlooRanks) -> None:
    assert all("multiple of" in text for text in ranks.run(refuse, ranks.count))


def test_one_process_is_torchs() -> None:
    x = torch.randn(3, 7)
    assert_close(dist.fft(x), torch.fft.fft(x))
    assert_close(dist.ifft(dist.fft(x)).real, x)
