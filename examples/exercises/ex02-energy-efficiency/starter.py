"""Exercise 2, to fill in: implementations of one thing, by energy. The task is in README.md; check.py checks it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812

Implementation = Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation: joules per sample with what repeating left unknown of them."""

    name: str
    joules_per_sample: float
    error_j: float
    time_per_call_s: float
    basis: str


def agree(implementations: Mapping[str, Implementation], tolerance: float = 1e-3) -> list[str]:
    """Task 1: the names of those that do not compute what the first one does."""
    raise NotImplementedError("task 1: run each once, compare with the first")


def compare(implementations: Mapping[str, Implementation], samples: int, seconds: float = 1.0) -> list[Row]:
    """Task 2: joules per sample of each, the cheapest first; each is measured for `seconds` or more."""
    raise NotImplementedError("task 2: EnergyBenchmark().measure(samples=...)")


def cheaper(a: Row, b: Row) -> bool | None:
    """Task 3: whether a is cheaper than b; None where the difference may be noise."""
    raise NotImplementedError("task 3: the difference against both half-widths")


def attention(batch: int, heads: int, length: int, device: str) -> dict[str, Implementation]:
    """The same attention in three ways."""
    q, k, v = (torch.randn(batch, heads, length, 64, device=device) for _ in range(3))

    def by_query() -> torch.Tensor:
        rows = [(q[:, :, i : i + 1] @ k.mT * 0.125).softmax(-1) @ v for i in range(length)]
        return torch.cat(rows, 2)

    def by_product() -> torch.Tensor:
        return (q @ k.mT * 0.125).softmax(-1) @ v

    def fused() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    return {"by query": by_query, "three products": by_product, "fused": fused}


def show(rows: Sequence[Row]) -> None:
    """Print the rows, and what can be said of neighbours."""
    for row in rows:
        joules, error = 1e3 * row.joules_per_sample, 1e3 * row.error_j
        print(
            f"{row.name:16} {joules:8.3f} ± {error:.3f} mJ per sample, {1e3 * row.time_per_call_s:.2f} ms, {row.basis}"
        )
    for a, b in itertools.pairwise(rows):
        verdict = {True: "is cheaper than", False: "is dearer than", None: "cannot be told from"}[cheaper(a, b)]
        print(f"{a.name} {verdict} {b.name}")


def main() -> None:
    batch = 8
    ways = attention(batch, heads=4, length=64, device="cuda" if torch.cuda.is_available() else "cpu")
    wrong = agree(ways)
    print(f"different results: {', '.join(wrong)}" if wrong else "all compute the same")
    show(compare(ways, batch))


if __name__ == "__main__":
    main()
