"""Exercise 1, to fill in: watts at idle and under load. The task is in README.md; `python check.py` checks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

SIZES = {"light": 128, "medium": 512, "heavy": 1024}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One row: mean watts with their 90% half-width, and what was achieved meanwhile."""

    name: str
    power_w: float
    power_error_w: float
    seconds: float
    basis: str
    tflops: float | None = None


def idle(seconds: float) -> Reading:
    """Task 1: the power while nothing runs."""
    raise NotImplementedError("task 1: open an energy_scope, sleep, read the watts")


def loaded(name: str, work: Callable[[], object], flops: float, seconds: float) -> Reading:
    """Task 2: the power while `work` is called again and again; its first call does not count."""
    raise NotImplementedError("task 2: warm up, then call work() inside a scope until the seconds are over")


def efficiency(reading: Reading) -> tuple[float, float] | None:
    """Task 3: TFLOPS per watt and its 90% half-width; None where no work was done."""
    raise NotImplementedError("task 3: the relative error of the watts is that of the quotient")


def main() -> None:
    """Print the table of this machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [idle(1.0)]
    for name, size in SIZES.items():
        a = torch.randn(size, size, device=device)
        rows.append(loaded(f"{name}, {size}³", lambda a=a: a @ a, 2.0 * size**3, 1.0))  # type: ignore[misc]
    print(f"{'load':14} {'W':>15} {'TFLOPS':>8} {'TFLOPS/W':>18}  basis")
    for row in rows:
        found = efficiency(row)
        each = "-" if found is None else f"{found[0]:.4f} ± {found[1]:.4f}"
        work = "-" if row.tflops is None else f"{row.tflops:.3f}"
        print(f"{row.name:14} {row.power_w:7.1f} ± {row.power_error_w:5.1f} {work:>8} {each:>18}  {row.basis}")


if __name__ == "__main__":
    main()
