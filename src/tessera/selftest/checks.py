"""The checks in order, each with its limit; one that fails to run is reported, never hidden."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import TesseraError
from ..monitor.core import Monitor, default
from ..monitor.scope import EnergyScope
from .simulated import worst_error_pct

Verdict = Literal["pass", "fail", "skipped"]
Progress = Callable[[int, int, str], None]

# Limits are what the project holds itself to on its own machine (benchmarks/README.md), with room for others: a scope
# 21 us there, the integral 0.3 to 1.8% on ten loads, a mixture of kernels 1.7% in the mean, kernels 12% in the mean.
SCOPE_US, SAMPLER_PCT, INTEGRAL_PCT, SIMULATED_PCT, MIXTURE_PCT, PREDICTION_PCT = 60.0, 1.0, 3.0, 5.0, 15.0, 25.0
_SCOPES = 2000
# NVML's counter is read densely until its ticks are found (sensors/_nvml_counter.py): half a second of reads in peace.
_TICKS_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: how far off, what is allowed, and the verdict. `value` None: `why` says what stood in the way."""

    name: str
    what: str
    verdict: Verdict
    value: float | None = None
    limit: float | None = None
    unit: str = "%"
    why: str = ""


def judged(name: str, what: str, value: float, limit: float, unit: str = "%", why: str = "") -> Check:
    """A check that could be made. A value that is no number fails."""
    good: Verdict = "pass" if value <= limit else "fail"
    return Check(name=name, what=what, verdict=good, value=value, limit=limit, unit=unit, why=why)


def skipped(name: str, what: str, why: str) -> Check:
    """A check that needs what this machine has not."""
    return Check(name=name, what=what, verdict="skipped", why=why)


def run(*, seconds: float = 45.0, progress: Progress | None = None, monitor: Monitor | None = None) -> list[Check]:
    """All checks in about so many seconds."""
    from . import gpu

    gpu.warm_up()
    own = monitor or default()
    find_ticks(own)
    checks: Sequence[tuple[str, Callable[[], Check]]] = (
        ("scope", lambda: scope(own)),
        ("simulated", simulated),
        ("integral", lambda: integral(own, max(4.0, 0.3 * seconds))),
        ("sampler", lambda: sampler(own)),
        ("mixture", lambda: gpu.mixture(own, max(6.0, 0.3 * seconds))),
        ("prediction", lambda: gpu.prediction(max(4.0, 0.25 * seconds))),
    )
    found = []
    for at, (name, check) in enumerate(checks):
        if progress:
            progress(at, len(checks), name)
        found.append(_guarded(name, check))
    return found


def find_ticks(monitor: Monitor) -> None:
    """Wait until NVML's counter is of use: the integral is checked against it from its first second on."""
    boards = [d.name for d in monitor.sampler.domains if d.counted and d.source.startswith("nvml")]
    deadline = time.monotonic() + _TICKS_S
    while boards and not any(len(monitor.sampler.anchors[b]) for b in boards) and time.monotonic() < deadline:
        time.sleep(0.02)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except TesseraError as exc:
        return Check(name=name, what=name, verdict="fail", why=exc.what)
    except Exception as exc:  # noqa: BLE001  (a driver, a profiler, a device that is lost: reported, never hidden)
        line = next(iter(str(exc).splitlines()), "")
        return Check(name=name, what=name, verdict="fail", why=f"{type(exc).__name__}: {line}")


def scope(monitor: Monitor) -> Check:
    """What entering and leaving a scope costs the program."""
    costs = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(_SCOPES):
            with EnergyScope("selftest", monitor=monitor):
                pass
        costs.append((time.perf_counter() - begun) / _SCOPES * 1e6)
    return judged("scope", "energy_scope, enter and exit", statistics.median(costs), SCOPE_US, "us")


def sampler(monitor: Monitor) -> Check:
    """What the sampling thread takes of one core."""
    begun, cpu_s = time.monotonic(), monitor.sampler.cpu_time_s
    time.sleep(3.0)
    share = 100 * (monitor.sampler.cpu_time_s - cpu_s) / (time.monotonic() - begun)
    return judged("sampler", "of one core, for sampling", share, SAMPLER_PCT)


def simulated() -> Check:
    """Joules to kernels where the truth is known: a board of our own making, seen through a sensor's lag and noise."""
    return judged("simulated", "joules of simulated kernels, worst of five", worst_error_pct(), SIMULATED_PCT)


def integral(monitor: Monitor, seconds: float) -> Check:
    """The integral of the samples against the energy counter, under load."""
    from ..monitor import power_trace
    from . import gpu

    what = "power samples integrated, against the energy counter"
    with power_trace(monitor=monitor) as trace, EnergyScope("selftest", monitor=monitor) as energy:
        gpu.load(seconds)
    start, end = trace.to_epoch(energy.start_ns), trace.to_epoch(energy.end_ns)
    shares = [
        100 * abs(trace.energy(name, start, end).joules / found.joules - 1)
        for name, found in energy.by_domain.items()
        if found.joules > 0 and found.source.endswith("+counter")
    ]
    if not shares:
        return skipped("integral", what, "no sensor here has samples and a counter whose ticks were found")
    return judged("integral", what, max(shares), INTEGRAL_PCT)


def to_json(found: Sequence[Check]) -> dict[str, Any]:
    """Plain data, with the machine it holds for."""
    import dataclasses
    import platform

    from .. import __version__

    return {
        "tessera": __version__, "python": platform.python_version(), "machine": platform.machine(),
        "passed": not any(c.verdict == "fail" for c in found), "checks": [dataclasses.asdict(c) for c in found],
    }  # fmt: skip
