"""Measures commands several times, in turns: their means, their outliers, and which one uses fewer joules.

::

    warm-up   A B
    turn 1    A B      if a machine slowly warms up, later runs cost more: since every second turn is reversed,
    turn 2    B A      both commands have as many late runs
    turn 3    A B ...

For two commands the ratio of their means is compared. Its interval comes from how each turn differs from that ratio (W.
G. Cochran, "Sampling Techniques", 1977, chapter 6): what is common to a whole turn cancels, and so does the error of
the sensor's level.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from ..config import find_cost
from ..joules import Floats
from ..schema import EnergyReport, Work
from ..units import format_duration, format_energy, format_error
from .benchmark import find_level_error
from .command import measure_command
from .core import Monitor
from .steady_state import Uncertain, find_drift, mean_interval

OUTLIER = 7.0
"""An outlier is this many robust standard deviations from the median. By chance, 10 normal runs have one in 0.8% of all
cases, 5 runs in 6%."""
LEAST_ERROR = 1e-3
"""An interval is shown with one digit of a percent and rounded up, so that it is never ± 0.0%."""
FEWEST = 5
"""Fewer runs have no outliers, since their median deviation tells too little."""
LEAST = 0.05
"""An outlier is also at least this share away from the median; smaller deviations are not worth a line."""
_TO_SIGMA = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
SHORT = 3.0
"""A command shorter than this many samples of the sensor is too short to measure."""
INTERRUPTED = 130

Progress = Callable[[int, int, str], None]
"""Called before each run with its number, the number of all runs, and what runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutlier:
    """A run far from the median of its command, and what may have caused it. Runs are numbered from 1."""

    run: int
    energy_j: float
    time_s: float
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedCommand:
    """The runs of one command; the means include the scatter of the runs and the error of the sensor's level."""

    label: str
    command: Sequence[str]
    reports: Sequence[EnergyReport]
    level_error: float
    outliers: Sequence[RunOutlier] = ()
    notes: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The command as it would be typed."""
        return shlex.join(self.command)

    @property
    def joules(self) -> Floats:
        """Joules of each run."""
        return np.array([r.total.energy_j for r in self.reports])

    @property
    def seconds(self) -> Floats:
        """Seconds of each run."""
        return np.array([r.total.time_s for r in self.reports])

    @property
    def energy_j(self) -> Uncertain:
        """Mean joules of a run. A single run has the error of its one measurement."""
        if len(self.reports) == 1:
            return Uncertain(self.reports[0].total.energy_j, self.reports[0].total.error_j)
        return mean_interval(self.joules).with_level(self.level_error)

    @property
    def time_s(self) -> Uncertain:
        """Mean seconds of a run."""
        return mean_interval(self.seconds)

    @property
    def power_w(self) -> Uncertain:
        """Mean watts of all runs: their joules over their seconds, so that it equals `energy_j` over `time_s`."""
        mean_s, watts = float(self.seconds.mean()), float(self.joules.sum() / self.seconds.sum())
        # The scatter of a ratio of means: W. G. Cochran, "Sampling Techniques", 1977, chapter 6.
        scatter = mean_interval(self.joules - watts * self.seconds).times(1 / mean_s)
        return Uncertain(watts, scatter.error).with_level(self.level_error)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        energy, time, power = self.energy_j, self.time_s, self.power_w
        return {
            "label": self.label,
            "command": list(self.command),
            "energy_j": energy.value,
            "error_j": energy.error,
            "min_j": float(self.joules.min()),
            "max_j": float(self.joules.max()),
            "time_s": time.value,
            "error_s": time.error,
            "min_s": float(self.seconds.min()),
            "max_s": float(self.seconds.max()),
            "power_w": power.value,
            "error_w": power.error,
            "cost": find_cost(energy.value, energy.error),
            "basis": self.reports[0].basis,
            "source": self.reports[0].total.source,
            "outliers": list(self.outliers),
            "notes": list(self.notes),
            "reports": list(self.reports),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandComparison:
    """How the mean of a later command differs from that of the first, as a share of the first's mean."""

    label: str
    reference: str
    energy_share: Uncertain
    time_share: Uncertain
    runs: int

    @property
    def significant(self) -> bool:
        """Whether the joules differ by more than noise."""
        return _differs(self.energy_share)

    @property
    def text(self) -> str:
        """The verdict in one sentence."""
        share, time = self.energy_share, self.time_share
        if share.error is None:
            return f"no difference can be told from one run of each: repeat both with --runs {2 * FEWEST}"
        took = f"takes {_compare_amounts(time, 'less', 'time', self.reference)}"
        took = took if _differs(time) else "takes as long within noise"
        if self.significant:
            return f"{self.label} uses {_compare_amounts(share, 'fewer', 'joules', self.reference)}, and {took}"
        seen = f"{self.label} measured {share.value:+.1%}, within ± {max(share.error, LEAST_ERROR):.1%}"
        repeat = f"--runs {4 * self.runs} would show a difference of about {max(share.error / 2, LEAST_ERROR):.1%}"
        return f"no difference in joules can be told: {seen}; {repeat}. {self.label} {took}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        shares = {"energy": self.energy_share, "time": self.time_share}
        plain = {f"{k}_{part}": v for k, s in shares.items() for part, v in (("share", s.value), ("error", s.error))}
        about = {"label": self.label, "reference": self.reference}
        return {**about, **plain, "significant": self.significant, "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedRuns:
    """All commands. `returncode` is 0, or that of the run that failed; no run was started after it."""

    commands: Sequence[RepeatedCommand]
    runs: int
    warmup: int
    returncode: int = 0
    failed: str | None = None

    @property
    def comparisons(self) -> list[CommandComparison]:
        """Every command compared with the first."""
        return [_compare(self.commands[0], other) for other in self.commands[1:]]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what `tessera measure --runs --json` prints."""
        data: dict[str, Any] = {"returncode": self.returncode, "failed": self.failed}
        data |= {"runs": self.runs, "warmup": self.warmup}
        data["commands"] = [c.to_dict() for c in self.commands]
        return data | {"comparisons": [c.to_dict() for c in self.comparisons]}


def measure_repeatedly(
    commands: Sequence[Sequence[str]],
    monitor: Monitor,
    *,
    runs: int = 10,
    warmup: int = 0,
    work: Sequence[Work] = (),
    output: IO[bytes] | None = None,
    quiet: bool = False,
    progress: Progress | None = None,
) -> RepeatedRuns:
    """Run commands in turns, `runs` times each after `warmup` turns that do not count, and measure every run.

    Ends at the first run that fails, or at Ctrl-C, with what was measured until then. `output` takes what the commands
    print, and contains only the last run's; without it, `quiet` sends that to standard error.
    """
    reports: list[list[EnergyReport]] = [[] for _ in commands]
    order = range(len(commands))
    places = [(turn, i) for turn in range(-warmup, runs) for i in (order if turn % 2 == 0 else reversed(order))]
    returncode, failed = 0, None
    for number, (turn, i) in enumerate(places):
        what = f"{label_of(i)}, warm-up" if turn < 0 else f"{label_of(i)}, run {turn + 1}"
        try:
            if progress:
                progress(number, len(places), what)
            if output:
                output.seek(0)
                output.truncate()
            run = measure_command(commands[i], monitor, work=work, output=output, quiet=quiet)
            returncode = run.returncode
        except KeyboardInterrupt:
            returncode = INTERRUPTED
        if returncode:
            failed = what
            break
        if turn >= 0:
            reports[i].append(run.report)
    measured = _describe_commands(commands, reports, monitor, warmup)
    return RepeatedRuns(commands=measured, runs=runs, warmup=warmup, returncode=returncode, failed=failed)


def label_of(which: int) -> str:
    """Return A, B, C ..., and #27 after Z."""
    return chr(ord("A") + which) if which < 26 else f"#{which + 1}"


# -- what it comes to -----------------------------------------------------------------------------------------------


def _describe_commands(
    commands: Sequence[Sequence[str]], reports: Sequence[Sequence[EnergyReport]], monitor: Monitor, warmup: int
) -> list[RepeatedCommand]:
    """Return the commands that have at least one run."""
    resolution_s = max((d.resolution_s for d in monitor.sampler.domains if d.counted), default=0.0)
    return [
        RepeatedCommand(
            label=label_of(i),
            command=tuple(command),
            reports=tuple(own),
            level_error=find_level_error([r.total for r in own]),
            outliers=find_outliers(own, warmup),
            notes=_find_weak_points(own, resolution_s),
        )
        for i, (command, own) in enumerate(zip(commands, reports, strict=True))
        if own
    ]


def _compare(first: RepeatedCommand, other: RepeatedCommand) -> CommandComparison:
    turns = min(len(first.reports), len(other.reports))  # one may have one run more, if a run of the other failed
    return CommandComparison(
        label=other.label,
        reference=first.label,
        energy_share=_relative_change(first.joules[:turns], other.joules[:turns]),
        time_share=_relative_change(first.seconds[:turns], other.seconds[:turns]),
        runs=turns,
    )


def _relative_change(before: Floats, after: Floats) -> Uncertain:
    """Return the mean of `after` over that of `before`, less 1; equal indices are the same turn."""
    mean = float(before.mean())
    if not mean:
        return Uncertain(math.nan, None)
    ratio = float(after.mean()) / mean
    error = mean_interval(after - ratio * before).error
    return Uncertain(ratio - 1.0, None if error is None else error / mean)


def _differs(share: Uncertain) -> bool:
    return share.error is not None and abs(share.value) > share.error


def _compare_amounts(share: Uncertain, less: str, what: str, reference: str) -> str:
    """Return a change in words: "12.0 ± 3.0% fewer joules than A", "4.20 ± 0.11 times the joules of A"."""
    error = share.error or 0.0
    if share.value > 1:
        return f"{format_error(1 + share.value, error)} times the {what} of {reference}"
    digits = 1 if error < 0.1 else 0
    percent = f"{100 * abs(share.value):.{digits}f} ± {100 * max(error, LEAST_ERROR):.{digits}f}%"
    return f"{percent} {'more' if share.value > 0 else less} {what} than {reference}"


def find_outliers(reports: Sequence[EnergyReport], warmup: int) -> list[RunOutlier]:
    """Return the runs far from the median in joules or seconds (modified z-score of Iglewicz and Hoaglin, 1993)."""
    if len(reports) < FEWEST:
        return []
    joules, seconds = (np.array(v) for v in zip(*((r.total.energy_j, r.total.time_s) for r in reports), strict=True))
    far_j, far_s = _scores(joules), _scores(seconds)
    found = np.flatnonzero((np.abs(far_j) > OUTLIER) | (np.abs(far_s) > OUTLIER)).tolist()
    medians = float(np.median(joules)), float(np.median(seconds))
    return [
        RunOutlier(
            run=i + 1,
            energy_j=float(joules[i]),
            time_s=float(seconds[i]),
            cause=_guess_cause(i, reports[i], medians, warmup, is_slow=abs(float(far_s[i])) > OUTLIER),
        )
        for i in found
    ]


def _scores(values: Floats) -> Floats:
    """Return distances from the median in robust standard deviations; 0 for values near it."""
    median = float(np.median(values))
    deviation = np.where(np.abs(values - median) < LEAST * median, 0.0, values - median)
    spread = _TO_SIGMA * float(np.median(np.abs(values - median)))
    return deviation / max(spread, 1e-9 * median) if median > 0 else np.zeros(len(values))


def _guess_cause(run: int, report: EnergyReport, medians: tuple[float, float], warmup: int, *, is_slow: bool) -> str:
    total, (energy_j, time_s) = report.total, medians
    usual = f"the median run uses {format_energy(energy_j, 3)} in {format_duration(time_s, 3)}"
    if total.coverage < 0.95:
        return f"{usual}; the sensor saw only {total.coverage:.0%} of this run"
    if run == 0 and warmup == 0 and total.energy_j > energy_j:
        return f"{usual}; the first run fills caches: --warmup 1 leaves it out"
    if is_slow and total.time_s > time_s:
        return f"{usual}; something slowed this run down: another program, a disk, or a hot chip's lower clock"
    if is_slow:
        return f"{usual}; this run ended early: does the command do the same work each time?"
    counted = [d for d in report.domains if d.counted]
    if counted and all(d.source == "modelled" and d.scope == "process" for d in counted):
        cpu = f"{'more' if total.energy_j > energy_j else 'less'} CPU time, from which its joules are modelled"
        return f"{usual}; this run took about as long and used {cpu}: does the command do the same work each time?"
    other = "another program used power meanwhile, or the chip ran at another clock"
    return f"{usual}; this run took about as long, so {other}"


def _find_weak_points(reports: Sequence[EnergyReport], resolution_s: float) -> list[str]:
    """Return what a reader should know before trusting the means."""
    notes = []
    time_s = float(np.mean([r.total.time_s for r in reports]))
    if time_s < SHORT * resolution_s:
        every = format_duration(resolution_s)
        notes.append(f"takes {format_duration(time_s, 3)}, and the sensor is read every {every}: give it more work")
    drift = find_drift(np.array([r.total.energy_j for r in reports]))
    if drift is not None:
        notes.append(f"its joules drift by {drift:+.1%} over the runs: --warmup, or let the machine settle")
    return notes
