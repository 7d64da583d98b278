"""Checks an answer to exercise 1 against a sensor whose watts are known.

python check.py [starter.py]

The sensor draws 40 W when nothing runs, 250 W during the first call of the work (which compiles) and 120 W after it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tessera.schema import Capability, Domain
from tessera.sensors.base import Batch

sys.path.insert(0, str(Path(__file__).parents[1]))
from grading import finish, graded

IDLE_W, FIRST_W, LOAD_W = 40.0, 250.0, 120.0
FIRST_S, CALL_S, FLOPS = 0.3, 0.01, 1e9


class Bench:
    """A device and the sensor on it: what runs decides what is drawn."""

    name = "known"
    period_s = 0.01

    def __init__(self) -> None:
        self.power_w = IDLE_W
        self.calls = 0

    def work(self) -> None:
        """What the answer measures: slow and hot the first time."""
        self.calls += 1
        first = self.calls == 1
        self.power_w = FIRST_W if first else LOAD_W
        time.sleep(FIRST_S if first else CALL_S)
        self.power_w = LOAD_W if first else self.power_w

    def start(self) -> None:
        """Nothing to open."""

    def domains(self) -> Sequence[Domain]:
        return [Domain(name="gpu0", source="known", resolution_s=self.period_s, gain_error=0.02)]

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

    def idle() -> str | None:
        row = answer.idle(0.5)
        if not 0.4 <= row.seconds <= 1.5:
            return f"asked for 0.5 s, the window was {row.seconds:.2f} s"
        return _near(row.power_w, IDLE_W, 0.05)

    def loaded() -> str | None:
        row = answer.loaded("load", bench.work, FLOPS, 0.6)
        if bench.calls < 3:
            return f"work() was called {bench.calls} times: one call is too short for a sensor"
        if row.seconds < 0.6:
            return f"asked for at least 0.6 s, the window was {row.seconds:.2f} s"
        wrong = _near(row.power_w, LOAD_W, 0.06)
        if wrong:
            return f"{wrong}. The first call draws {FIRST_W:g} W for {FIRST_S:g} s: is it in your window?"
        if row.tflops is None:
            return "it has no TFLOPS"
        done = (bench.calls - 1) * FLOPS / row.seconds * 1e-12
        if abs(row.tflops / done - 1.0) > 0.2:
            return f"{row.tflops:.3g} TFLOPS; {bench.calls - 1} calls of {FLOPS:g} FLOP in your window are {done:.3g}"
        return None

    def honest() -> str | None:
        row = answer.idle(0.3)
        if row.basis != "measured":
            return f"the check's sensor measures; the reading says {row.basis!r}"
        return None if row.power_error_w > 0 else "the half-width of the watts is 0: no sensor is that good"

    def efficiency() -> str | None:
        make = type(answer.idle(0.3))
        row = make(name="x", power_w=200.0, power_error_w=20.0, seconds=1.0, basis="measured", tflops=50.0)
        found = answer.efficiency(row)
        if found is None or abs(found[0] - 0.25) > 1e-9:
            return f"50 TFLOPS at 200 W are 0.25 TFLOPS/W, not {found}"
        if abs(found[1] - 0.025) > 0.003:
            return f"200 ± 20 W make it ± 0.025, not ± {found[1]:.3g}"
        nothing = make(name="x", power_w=50.0, power_error_w=5.0, seconds=1.0, basis="measured")
        return None if answer.efficiency(nothing) is None else "idle has no efficiency: return None"

    return [
        ("task 1: idle power", idle),
        ("task 2: power under load", loaded),
        ("task 2: interval and basis", honest),
        ("task 3: efficiency", efficiency),
    ]


def _near(value: float, wanted: float, within: float) -> str | None:
    off = value / wanted - 1.0
    return None if abs(off) <= within else f"{value:.1f} W, and it draws {wanted:g} W ({off:+.0%})"


def run(path: Path) -> int:
    """Check one answer; how many tasks are not done."""
    return graded(path, Bench(), checks)


if __name__ == "__main__":
    finish(run, Path(__file__).with_name("starter.py"))
