"""Fourier transforms of a signal that is cut over ranks, by the four-step algorithm.

::

    rank r has x[r M : (r + 1) M]     the row r of a matrix of P rows
    exchange columns                  transform along the ranks (length P), multiply by twiddle factors
    exchange back                     transform along the row (length M): rank r has X[r], X[r + P], X[r + 2 P] ...
    exchange once more (ordered)      rank r has X[r M : (r + 1) M]

The first two exchanges go in chunks of columns: while one chunk is transformed, the next one travels.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as c10d

from ..errors import ArgumentError
from .agreement import agree, check_device, count_ranks, describe_call, is_connected, tell_refusal
from .liveness import explain_failure
from .mesh import Mesh, find_mesh
from .records import note
from .reduction import Sent


def fft(
    x: torch.Tensor,
    *,
    axis: str | None = None,
    mesh: Mesh | None = None,
    group: Any = None,
    ordered: bool = True,
    chunks: int = 2,
) -> torch.Tensor:
    """Return the Fourier transform along the last dimension, which is cut over the ranks of a group in equal parts.

    The result is that of torch.fft.fft for the whole signal; each rank has its own part of the input and of the result.
    `ordered=False` saves the last of three exchanges: rank r then has X[r], X[r + P], X[r + 2 P]..., which
    `ifft(ordered=False)` takes.
    """
    return _transform("fft", x, axis, mesh, group, ordered, chunks)


def ifft(
    x: torch.Tensor,
    *,
    axis: str | None = None,
    mesh: Mesh | None = None,
    group: Any = None,
    ordered: bool = True,
    chunks: int = 2,
) -> torch.Tensor:
    """Return the inverse of `fft`, with the same arguments."""
    return _transform("ifft", x, axis, mesh, group, ordered, chunks)


def _transform(
    kind: str, x: torch.Tensor, axis: str | None, mesh: Mesh | None, group: Any, ordered: bool, chunks: int
) -> torch.Tensor:
    if axis is not None:
        group = find_mesh(mesh, axis).process_group(axis) if is_connected() else None
    x = x if x.is_complex() else x.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
    with tell_refusal(kind, group):
        ranks = count_ranks(group)
        if ranks == 1:
            return torch.fft.fft(x) if kind == "fft" else torch.fft.ifft(x)
        check_device(x, group)
        if not x.dim() or x.shape[-1] % ranks or not x.shape[-1] or chunks < 1:
            raise ArgumentError(
                f"{kind}: a part of shape {tuple(x.shape)}, {ranks} ranks and chunks={chunks}",
                why="each rank's part is exchanged in as many equal pieces as there are ranks",
                fix=f"a last dimension that is a multiple of {ranks} on every rank (pad the signal); chunks=1 or more",
            )
    how = _FourStep(group=group, ranks=ranks, rank=c10d.get_rank(group), ordered=ordered, chunks=chunks)
    return _Fourier.apply(x, how, kind == "ifft")


class _Fourier(torch.autograd.Function):
    """The transform is linear: gradients go through its conjugate transpose, which is the inverse times the length."""

    @staticmethod
    def forward(ctx: Any, x: Any, how: _FourStep, inverse: bool) -> Any:
        ctx.how, ctx.inverse = how, inverse
        return how.run(x, inverse)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        length = gradients[0].shape[-1] * ctx.how.ranks
        scale = 1 / length if ctx.inverse else length
        return ctx.how.run(gradients[0], not ctx.inverse) * scale, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _FourStep:
    group: Any
    ranks: int
    rank: int
    ordered: bool
    chunks: int

    def run(self, x: torch.Tensor, inverse: bool) -> torch.Tensor:
        begun, kind = time.perf_counter(), "ifft" if inverse else "fft"
        rows = x.reshape(-1, x.shape[-1])
        with explain_failure(kind, self.group):
            agree(describe_call(kind, x, "ordered" * self.ordered, f"chunks={self.chunks}"), 0, self.group, x.device)
            if inverse:
                strided = self._deal_out(rows) if self.ordered else rows
                y = self._transform_across(torch.fft.ifft(strided), inverse=True)
            else:
                y = torch.fft.fft(self._transform_across(rows, inverse=False))
                y = self._put_in_order(y) if self.ordered else y
        exchanges = 3 if self.ordered else 2
        sent = Sent(exchanges * x.numel() * x.element_size() * (self.ranks - 1) / self.ranks)
        note(kind, "four_step", self.ranks, x, sent, time_s=time.perf_counter() - begun)
        return y.view(x.shape)

    def _transform_across(self, rows: torch.Tensor, *, inverse: bool) -> torch.Tensor:
        """Transform along the ranks in chunks of columns: all travel at once, and each is processed when it arrives."""
        width = rows.shape[1] // self.ranks
        pieces = rows.view(-1, self.ranks, width)
        result = torch.empty_like(pieces)
        bounds = [round(i * width / self.chunks) for i in range(self.chunks + 1)]
        spans = [span for span in itertools.pairwise(bounds) if span[1] > span[0]]
        coming = [self._start(pieces[:, :, slice(*span)].permute(1, 0, 2)) for span in spans]
        going = []
        for span, (work, columns) in zip(spans, coming, strict=True):
            work.wait()
            twiddle = self._twiddle(width, span, columns)
            if inverse:
                done = torch.fft.ifft(columns * twiddle.conj(), dim=0)
            else:
                done = torch.fft.fft(columns, dim=0) * twiddle
            going.append(self._start(done))
        for span, (work, columns) in zip(spans, going, strict=True):
            work.wait()
            result[:, :, slice(*span)] = columns.permute(1, 0, 2)
        return result.view(rows.shape)

    def _twiddle(self, width: int, span: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        """Return exp(-2 pi i k n / N) for k along the ranks and n over this rank's columns."""
        columns = torch.arange(*span, device=like.device, dtype=torch.float64) + self.rank * width
        turns = torch.outer(torch.arange(self.ranks, device=like.device, dtype=torch.float64), columns)
        angle = turns * (-2 * math.pi / (width * self.ranks**2))
        return torch.polar(torch.ones_like(angle), angle).to(like.dtype)[:, None, :]

    def _start(self, pieces: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Begin to send piece r (along the first dimension) to rank r."""
        sending = pieces.contiguous()
        arriving = torch.empty_like(sending)
        return c10d.all_to_all_single(arriving, sending, group=self.group, async_op=True), arriving

    def _exchange(self, pieces: torch.Tensor) -> torch.Tensor:
        work, arriving = self._start(pieces)
        work.wait()
        return arriving

    def _put_in_order(self, y: torch.Tensor) -> torch.Tensor:
        """Reorder from X[r], X[r + P], ... to X[r M : (r + 1) M]."""
        arrived = self._exchange(y.view(len(y), self.ranks, -1).permute(1, 0, 2))
        return arrived.permute(1, 2, 0).reshape(y.shape)

    def _deal_out(self, y: torch.Tensor) -> torch.Tensor:
        """Undo `_put_in_order`."""
        arrived = self._exchange(y.view(len(y), -1, self.ranks).permute(2, 0, 1))
        return arrived.permute(1, 0, 2).reshape(y.shape)
