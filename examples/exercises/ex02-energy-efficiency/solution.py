"""Exercise 2, solved: implementations of one thing, by energy. The task is in README.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812

from tessera import EnergyBenchmark
from tessera.monitor import BenchmarkResult

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
    """The names of those that do not compute what the first one does."""
    results = {name: run() for name, run in implementations.items()}
    first = next(iter(results.values()))
    return [
        name for name, result in results.items()
        if result.shape != first.shape or not float((result - first).norm()) <= tolerance * float(first.norm())
    ]  # fmt: skip


def compare(implementations: Mapping[str, Implementation], samples: int, seconds: float = 1.0) -> list[Row]:
    """Joules per sample of each, the cheapest first; each is measured for `seconds` or more."""
    bench = EnergyBenchmark(target=0.05, min_s=seconds, budget_s=max(4 * seconds, 4.0))
    for name, run in implementations.items():
        bench.measure(samples=samples, name=name)(run)()
    rows = [_row(result, samples) for result in bench.results]
    return sorted(rows, key=lambda row: row.joules_per_sample)


def _row(result: BenchmarkResult, samples: int) -> Row:
    # The error of the sensor's level is common to all rows; what repeating left unknown is not. Too few repetitions to
    # know even that is no zero: nothing can be told then.
    error_j = math.inf if result.spread_j is None else result.spread_j
    return Row(
        name=result.name,
        joules_per_sample=result.energy_per_call_j.value / samples,
        error_j=error_j / samples,
        time_per_call_s=result.time_per_call_s.value,
        basis=result.basis,
    )


def cheaper(a: Row, b: Row) -> bool | None:
    """Whether a is cheaper than b; None where the difference may be noise."""
    difference = b.joules_per_sample - a.joules_per_sample
    return difference > 0 if abs(difference) > a.error_j + b.error_j else None


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
