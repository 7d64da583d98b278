"""Exercise 1, solved: watts at idle and under load. The task is in README.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tessera import monitor

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
    """The power while nothing runs."""
    with monitor.energy_scope("idle") as energy:
        time.sleep(seconds)
    return _reading("idle", energy)


def loaded(name: str, work: Callable[[], object], flops: float, seconds: float) -> Reading:
    """The power while `work` is called again and again; its first call does not count."""
    work()  # compiles, allocates, wakes the clocks
    _synchronize()  # on a GPU the call has only been launched: without this it would end inside the window
    calls, until = 0, time.monotonic() + seconds
    with monitor.energy_scope(name) as energy:
        while time.monotonic() < until:
            work()
            calls += 1
            _synchronize()  # else the host queues far more than the seconds it looks at
    return _reading(name, energy, calls * flops)


def efficiency(reading: Reading) -> tuple[float, float] | None:
    """TFLOPS per watt and its 90% half-width; None where no work was done."""
    if reading.tflops is None:
        return None
    value = reading.tflops / reading.power_w
    return value, value * reading.power_error_w / reading.power_w


def _reading(name: str, energy: monitor.EnergyScope, flops: float | None = None) -> Reading:
    assert energy.power_w is not None
    return Reading(
        name=name, power_w=energy.power_w, power_error_w=energy.error_j / energy.time_s, seconds=energy.time_s,
        basis=energy.basis, tflops=None if flops is None else flops / energy.time_s * 1e-12,
    )  # fmt: skip


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
