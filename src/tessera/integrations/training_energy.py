"""Measures a training loop between its log lines: the joules of its steps, and apart those of evaluation and saving.

::

    begin ── steps ── log ── steps ─┬─ evaluation ─┬─ saving ─┬─ steps ── log ── steps ── log(last) ── end
                                    └─ phase(...) ─┴──────────┘

A line covers all steps since the last line that had joules. Joules must wait up to a tenth of a second for the sensor,
so a line has them only if its steps took `LEAST_S` or more, or if it is the last line.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..joules import sum_windows
from ..monitor.core import Monitor
from ..monitor.scope import EnergyScope
from ..schema import Energy, EnergyReport, RegionEnergy, Work

LEAST_S = 1.0
"""How long the steps of a line with joules must take: waiting for the sensor then costs a few percent at most."""
STEPS, EVALUATION, SAVING = "steps", "evaluation", "saving"


class TrainingEnergy:
    """Counts work and joules: call `begin`, then `add` for every step, `log` for every log line, and `end`.

    Everything inside `with energy.phase(EVALUATION)` does not count as steps. `switch` does the same for a framework
    that only says when something begins.
    """

    def __init__(self, name: str, monitor: Monitor | None = None, *, least_s: float = LEAST_S) -> None:
        self._name = name
        self._monitor = monitor
        self._least_s = least_s
        self._current: EnergyScope | None = None
        self._phase = STEPS
        self._scopes: dict[str, list[EnergyScope]] = {}
        self._logged: dict[str, int] = {}  # how many scopes of each phase were in a line
        self._line: dict[str, float] = {}
        self._line_s = 0.0
        self._opened_s = 0.0
        self.counts: dict[str, float] = {}

    def begin(self) -> None:
        """Start counting; a second call starts again from zero."""
        self._scopes = {phase: [] for phase in (STEPS, EVALUATION, SAVING)}
        self._logged = dict.fromkeys(self._scopes, 0)
        self.counts, self._line, self._line_s = {}, {}, 0.0
        self._open(STEPS)

    def add(self, **work: float | None) -> None:
        """Add work that was done: step=1, sample=64, token=8192. None means unknown, and is not counted."""
        for counts in (self.counts, self._line):
            for unit, amount in work.items():
                if amount is not None:
                    counts[unit] = counts.get(unit, 0.0) + amount

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Measure the block apart from the steps."""
        before = self._phase
        self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def switch(self, phase: str) -> None:
        """Note that steps, evaluation or saving begin now; does nothing before `begin` and after `end`."""
        if self._current is not None and phase != self._phase:
            self._close()
            self._open(phase)

    def log(self, *, last: bool = False) -> dict[str, float]:
        """Return the figures of the steps since the last line that had any; empty if they took too short a time."""
        if self._current is None:
            return {}
        open_s = time.monotonic() - self._opened_s if self._phase == STEPS else 0.0
        if not last and (not self._line or self._line_s + open_s < self._least_s):
            return {}
        if in_steps := self._phase == STEPS:
            self._close()
        figures = _list_figures(self._take_new(STEPS), self._line) if self._line else {}
        for other in (EVALUATION, SAVING):
            if spent := self._take_new(other):
                figures[f"{other}_energy_j"] = sum_windows([s.energy for s in spent]).energy_j
        self._line, self._line_s = {}, 0.0
        if in_steps:
            self._open(STEPS)
        return figures

    def end(self) -> EnergyReport | None:
        """Return the steps from begin to end, with evaluation and saving as regions; waits for the sensor."""
        if self._current is None:
            return None
        self._close()
        steps = self._scopes[STEPS]
        names = dict.fromkeys(name for scope in steps for name in scope.by_domain)
        return dataclasses.replace(
            steps[-1].report(),
            name=self._name,
            total=sum_windows([s.energy for s in steps]),
            by_domain={name: sum_windows([s.by_domain[name] for s in steps if name in s.by_domain]) for name in names},
            regions=[_describe_phase(phase, scopes) for phase, scopes in self._scopes.items() if scopes],
            gaps=list(dict.fromkeys(gap for s in steps for gap in s.report().gaps)),
            work=[Work(unit=unit, amount=amount) for unit, amount in self.counts.items()],
        )

    def _open(self, phase: str) -> None:
        self._phase, self._opened_s = phase, time.monotonic()
        self._current = EnergyScope(f"{self._name} {phase}", monitor=self._monitor)
        self._current.__enter__()

    def _close(self) -> None:
        assert self._current is not None
        self._current.__exit__(None, None, None)
        self._scopes[self._phase].append(self._current)
        self._line_s += self._current.host_time_s if self._phase == STEPS else 0.0
        self._current = None

    def _take_new(self, phase: str) -> Sequence[EnergyScope]:
        scopes, since = self._scopes[phase], self._logged[phase]
        self._logged[phase] = len(scopes)
        return scopes[since:]


def _describe_phase(phase: str, scopes: Sequence[EnergyScope]) -> RegionEnergy:
    energy = sum_windows([s.energy for s in scopes])
    return RegionEnergy(
        name=phase,
        calls=len(scopes),
        energy=energy,
        start_ns=scopes[0].start_ns,
        end_ns=scopes[-1].end_ns,
        apart=phase != STEPS,
    )


def _list_figures(scopes: Sequence[EnergyScope], work: dict[str, float]) -> dict[str, float]:
    energy: Energy = sum_windows([s.energy for s in scopes])
    if not energy.energy_j >= 0:
        return {}
    figures = {"energy_j": energy.energy_j, "error_j": energy.error_j}
    if energy.power_w is not None:
        figures["power_w"] = energy.power_w
    return figures | {f"j_per_{unit}": energy.energy_j / n for unit, n in work.items() if n > 0}
