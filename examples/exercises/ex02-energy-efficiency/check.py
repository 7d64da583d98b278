"""Checks an answer to exercise 2 against a sensor whose watts are known.

python check.py [starter.py]

Three pretended implementations run 2, 4 and 4 ms at 100, 100 and 30 W, so a sample of eight costs 25, 50 and 15 mJ: the
slowest is not the dearest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from tessera.schema import Capability, Domain
from tessera.sensors.base import Batch

sys.path.insert(0, str(Path(__file__).parents[1]))
from grading import finish, graded

SAMPLES = 8
COSTS = {"quick": (0.002, 100.0), "slow": (0.004, 100.0), "frugal": (0.004, 30.0)}
WITHIN = 0.25  # of the joules: a benchmark leaves out what comes before the steady state


class Bench:
    """A device and the sensor on it: the implementation that runs decides what is drawn."""

    name = "known"
    period_s = 0.01

    def __init__(self) -> None:
        self.power_w = 100.0
        self.took_s: dict[str, list[float]] = {name: [] for name in COSTS}

    def implementation(self, name: str) -> Callable[[], torch.Tensor]:
        """One that takes its time, draws its power, and gives the right answer."""
        seconds, power_w = COSTS[name]

        def run() -> torch.Tensor:
            self.power_w = power_w
            started = time.monotonic()
            time.sleep(seconds)
            self.took_s[name].append(time.monotonic() - started)
            return torch.ones(4)

        return run

    def start(self) -> None:
        """Nothing to open."""

    def domains(self) -> Sequence[Domain]:
        return [Domain(name="gpu0", source="known", resolution_s=self.period_s, gain_error=0.05)]

    def capabilities(self) -> Sequence[Capability]:
        return []

    def read(self) -> Batch:
        """One sample, now."""
        batch = Batch()
        batch.add("gpu0", time.monotonic_ns(), self.power_w)
        return batch

    def stop(self) -> None:
        """Nothing to close."""


def checks(answer: Any, bench: Bench) -> list[tuple[str, Callable[[], str | None]]]:
    """Each task with what is wrong with it, or None."""

    def agree() -> str | None:
        right = torch.tensor([1.0, 100.0])
        ways = {
            "first": lambda: right,
            "rounded": lambda: right * (1 + 1e-5),
            "wrong": lambda: right * 1.01,
            "short": lambda: right[:1],
            "nan": lambda: right * float("nan"),
        }
        found = answer.agree(ways, 1e-3)
        return None if found == ["wrong", "short", "nan"] else f"['wrong', 'short', 'nan'] differ, you found {found}"

    def compare() -> str | None:
        rows = answer.compare({name: bench.implementation(name) for name in COSTS}, SAMPLES, 0.6)
        joules = [row.joules_per_sample for row in rows]
        if {row.name for row in rows} != set(COSTS) or joules != sorted(joules):
            return f"one row each of {', '.join(COSTS)}, the cheapest first; you have {[row.name for row in rows]}"
        for row in rows:
            # A busy machine sleeps longer than it was asked, not always as long: then any of its calls may be right.
            # But none is right that took many times their mean.
            took_s, each = bench.took_s[row.name], COSTS[row.name][1] / SAMPLES
            least_j, most_j = each * min(took_s), each * min(max(took_s), 3.0 * fmean(took_s))
            if not (1.0 - WITHIN) * least_j <= row.joules_per_sample <= (1.0 + WITHIN) * most_j:
                wanted, found_mj = f"{1e3 * least_j:.3g} to {1e3 * most_j:.3g}", 1e3 * row.joules_per_sample
                return f"{row.name} costs {wanted} mJ per sample, you have {found_mj:.3g} mJ"
            if not 0 < row.error_j < 0.5 * row.joules_per_sample and most_j < 2.0 * least_j:
                return f"{row.name}: a half-width of {1e3 * row.error_j:.3g} mJ"
        return None if rows[0].basis == "measured" else f"the check's sensor measures; you say {rows[0].basis!r}"

    def cheaper() -> str | None:
        def row(joules: float, error_j: float) -> Any:
            return answer.Row(
                name="x", joules_per_sample=joules, error_j=error_j, time_per_call_s=1.0, basis="measured"
            )

        for a, b, wanted in (
            (row(1.0, 0.1), row(2.0, 0.1), True),
            (row(2.0, 0.1), row(1.0, 0.1), False),
            (row(1.0, 0.3), row(1.5, 0.3), None),
        ):
            found = answer.cheaper(a, b)
            if found is not wanted:
                values = f"{a.joules_per_sample} ± {a.error_j} J and {b.joules_per_sample} ± {b.error_j} J"
                return f"{values}: {wanted}, not {found}"
        return None

    return [
        ("task 1: who computes the same", agree),
        ("task 2: joules per sample", compare),
        ("task 3: more than noise", cheaper),
    ]


def run(path: Path) -> int:
    """Check one answer; how many tasks are not done."""
    return graded(path, Bench(), checks)


if __name__ == "__main__":
    finish(run, Path(__file__).with_name("starter.py"))
