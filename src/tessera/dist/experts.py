"""Tokens to the ranks of their experts and back: `dispatch_tokens`, `combine_tokens`.

A token goes once to each rank that has any of its experts. That rank adds up the weighted outputs of its experts for
the token, and one row comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as c10d

from ..errors import ArgumentError
from .agreement import count_ranks, is_connected, tell_refusal
from .collectives import all_to_all
from .liveness import explain_failure
from .mesh import Mesh, find_mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedTokens:
    """Tokens that came to this rank. `experts` are this rank's own numbers, -1 if another rank has the expert."""

    tokens: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    sent_from: torch.Tensor  # rows of the caller's tokens, in the order in which they were sent
    sent_counts: list[int]
    received_counts: list[int]
    group: Any

    def run_experts(self, experts: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
        """Return the outputs of this rank's experts, weighted and added up for each token."""
        total = torch.zeros_like(self.tokens)
        for number, expert in enumerate(experts):
            rows, choices = torch.nonzero(self.experts == number, as_tuple=True)
            made = expert(self.tokens[rows]) * self.weights[rows, choices].unsqueeze(1)
            total = total.index_add(0, rows, made.to(total.dtype))
        return total


def dispatch_tokens(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    count: int,
    axis: str | None = None,
    mesh: Mesh | None = None,
    group: Any = None,
) -> DispatchedTokens:
    """Send each token (a row) to the ranks of its experts.

    `experts` and `weights` have a row for each token: the numbers of its experts, of `count` in all, and their weights.
    The ranks of the group (or of this rank's group along `axis`, "ep" for example) have equal parts of the experts, in
    order.
    """
    if axis is not None:
        group = find_mesh(mesh, axis).process_group(axis) if is_connected() else None
    ranks = count_ranks(group)
    with tell_refusal("dispatch_tokens", group):
        if experts.shape != weights.shape or experts.dim() != 2 or len(experts) != len(tokens) or tokens.dim() != 2:
            raise ArgumentError(
                f"dispatch_tokens: tokens {tuple(tokens.shape)}, experts {tuple(experts.shape)}, "
                f"weights {tuple(weights.shape)}",
                fix="(tokens, width), (tokens, k) and (tokens, k)",
            )
        if count % ranks or (experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < count):
            raise ArgumentError(
                f"dispatch_tokens: experts {_span(experts)} of {count} on {ranks} ranks",
                fix=f"numbers from 0 to {count - 1}, and a count that {ranks} ranks divide",
            )
    here = count // ranks
    owners = experts // here
    goes = torch.stack([(owners == rank).any(1) for rank in range(ranks)])  # (rank, token)
    destinations, sent_from = torch.nonzero(goes, as_tuple=True)
    sent_counts = torch.bincount(destinations, minlength=ranks).tolist()
    is_there = owners[sent_from] == destinations[:, None]
    numbers = torch.where(is_there, experts[sent_from] % here, -1)
    numbers, received_counts = all_to_all(numbers, sent_counts, group=group)
    chosen = torch.where(is_there, weights[sent_from], 0)
    return DispatchedTokens(
        tokens=_Exchange.apply(tokens[sent_from], sent_counts, received_counts, group),
        experts=numbers,
        weights=_Exchange.apply(chosen, sent_counts, received_counts, group),
        sent_from=sent_from,
        sent_counts=sent_counts,
        received_counts=received_counts,
        group=group,
    )


def combine_tokens(dispatched: DispatchedTokens, outputs: torch.Tensor, *, count: int) -> torch.Tensor:
    """Send the outputs back, and add up those of each of the caller's `count` tokens."""
    if len(outputs) != len(dispatched.tokens):
        raise ArgumentError(
            f"combine_tokens: {len(outputs)} outputs of {len(dispatched.tokens)} tokens", fix="one row for each token"
        )
    back = _Exchange.apply(outputs, dispatched.received_counts, dispatched.sent_counts, dispatched.group)
    return back.new_zeros(count, *back.shape[1:]).index_add(0, dispatched.sent_from, back)


class _Exchange(torch.autograd.Function):
    """Sends rows to other ranks; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Any, counts: list[int], arriving: list[int], group: Any) -> Any:
        ctx.counts, ctx.arriving, ctx.group = counts, arriving, group
        return _Exchange._move(rows, counts, arriving, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Exchange._move(gradients[0], ctx.arriving, ctx.counts, ctx.group), None, None, None

    @staticmethod
    def _move(rows: Any, counts: list[int], arriving: list[int], group: Any) -> Any:
        if len(counts) == 1:
            return rows.clone()
        out = rows.new_empty(sum(arriving), *rows.shape[1:])
        with explain_failure("all_to_all", group):
            c10d.all_to_all_single(out, rows.contiguous(), arriving, counts, group=group)
        return out


def _span(experts: torch.Tensor) -> str:
    return f"{int(experts.min())} to {int(experts.max())}" if experts.numel() else "none"
