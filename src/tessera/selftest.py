"""Tests how accurate Tessera is on this machine. Each check compares it with a truth that can be known here.

::

    integral         samples against the energy counter          if a sensor has a counter
    scope, sampler   the cost of measuring                       everywhere
    simulated        joules of kernels on a simulated board      everywhere: tests the arithmetic
    mixture          joules of kernels against each one alone    on a CUDA device with a sensor: tests the physics
    prediction       predicted against measured kernels          on a CUDA device in the catalogue

A check that fails to run is reported, never hidden.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .attribute.fit import RING_BOX_S, RING_TAU_S, Response
from .attribute.solve import attribute
from .errors import ArgumentError, MissingExtra, TesseraError
from .joules import DomainSamples
from .monitor import EnergyBenchmark, power_trace
from .monitor.core import Monitor, default
from .monitor.scope import EnergyScope
from .schema import Domain
from .timeline.columns import Builder, Launch
from .trace import PowerTrace

Verdict = Literal["pass", "fail", "skipped"]
Progress = Callable[[int, int, str], None]

# The limits are the project's own on its machine (benchmarks/README.md), with room for others. There, a scope costs
# 21 us, the integral is 0.3 to 1.8% off on ten loads, a mixture of kernels 1.7% and kernels 12% in the mean.
SAME_SPEED = 0.1
"""A kernel of the mixture counts if its speed differs by at most this from its speed alone. A softmax took 2 to 7%
longer in recorded mixtures, a product at the power limit 16% less (benchmarks/measure/attribution.py)."""
SCOPE_US, SAMPLER_PCT, INTEGRAL_PCT, SIMULATED_PCT, MIXTURE_PCT, PREDICTION_PCT = 60.0, 1.0, 3.0, 5.0, 15.0, 25.0
BOARD_SAMPLER_PCT = 0.5  # for each GPU that is read, in place of `SAMPLER_PCT`
_SCOPES = 2000
# NVML's counter is read densely until its ticks are found (sensors/_nvml_counter.py): half a second if undisturbed.
_TICKS_S = 4.0
_SAMPLER_S = 4.0
_ALONE_S = 1.2
# Seconds of the checks with a fixed length; then, for integral, mixture and prediction, the least seconds and the share
# of the remaining time.
_FIXED_S = 1.0 + 2.0 + _SAMPLER_S + 6 * _ALONE_S
_SHARES = ((4.0, 0.35), (6.0, 0.35), (4.0, 0.3))
STEPS = 7
"""The six checks, and the loading before them."""
_KERNEL_GROUPS = ("gemm.bf16", "attention", "copy", "norm")  # groups of estimate.calibration_kernels that are measured

# Microseconds and watts of kernels, rounded from recordings on an H200 (benchmarks/device/record_kernels.py).
SIMULATED_KERNELS: Mapping[str, tuple[int, float]] = {
    "gemm": (170, 690.0),
    "softmax": (220, 515.0),
    "copy": (128, 590.0),
    "attention": (185, 640.0),
    "conv": (80, 620.0),
}
_IDLE_W = 118.0
_SIMULATED_S = 5.0
_CELL_NS = 100_000
_START_NS = 1_790_000_000_000_000_000
_NOISE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """One check: how far off, what is allowed, and the verdict. With `value` None, `why` gives the reason."""

    name: str
    what: str
    verdict: Verdict
    value: float | None = None
    limit: float | None = None
    unit: str = "%"
    why: str = ""


def judge(name: str, what: str, value: float, limit: float, unit: str = "%", why: str = "") -> SelfCheck:
    """Return a check that could be made. NaN fails."""
    verdict: Verdict = "pass" if value <= limit else "fail"
    return SelfCheck(name=name, what=what, verdict=verdict, value=value, limit=limit, unit=unit, why=why)


def skip(name: str, what: str, why: str) -> SelfCheck:
    """Return a check that needs something this machine does not have."""
    return SelfCheck(name=name, what=what, verdict="skipped", why=why)


def run_checks(
    *, budget_s: float = 45.0, limit_s: float = math.inf, progress: Progress | None = None,
    monitor: Monitor | None = None,
) -> list[SelfCheck]:  # fmt: skip
    """Run all checks in about `budget_s` seconds; skip those that would end after `limit_s`.

    `progress` is called before each step with its number (from 0), the number of steps, and its name.
    """
    tell, begun_s = progress or (lambda *_: None), time.monotonic()
    until_s = begun_s + limit_s
    tell(0, STEPS, "loading torch and the sensors")
    _warm_up()
    own = monitor or default()
    _find_ticks(own)
    left_s = budget_s - (time.monotonic() - begun_s) - _FIXED_S  # loading CUDA alone may take half a minute
    integral_s, mixture_s, prediction_s = (max(least, share * left_s) for least, share in _SHARES)
    checks: Sequence[tuple[str, float, Callable[[], SelfCheck]]] = (
        ("scope", 1.0, lambda: check_scope(own)),
        ("simulated", 2.0, check_simulated),
        ("integral", integral_s, lambda: check_integral(own, integral_s)),
        ("sampler", _SAMPLER_S, lambda: check_sampler(own)),
        ("mixture", mixture_s + 6 * _ALONE_S, lambda: check_mixture(own, mixture_s)),
        ("prediction", prediction_s, lambda: check_prediction(prediction_s)),
    )
    results = []
    for at, (name, lasts_s, check) in enumerate(checks, 1):
        tell(at, STEPS, f"{name}, about {lasts_s:.0f} s")
        late = time.monotonic() + lasts_s > until_s
        why = f"there was no time left: --seconds {2 * budget_s:.0f} gives it more"
        results.append(skip(name, name, why) if late else _run_check(name, check))
    return results


def _run_check(name: str, check: Callable[[], SelfCheck]) -> SelfCheck:
    try:
        return check()
    except TesseraError as exc:
        return SelfCheck(name=name, what=name, verdict="fail", why=exc.what)
    except Exception as exc:  # noqa: BLE001  (a driver, a profiler, a device that is lost: reported, never hidden)
        line = next(iter(str(exc).splitlines()), "")
        return SelfCheck(name=name, what=name, verdict="fail", why=f"{type(exc).__name__}: {line}")


def to_dict(checks: Sequence[SelfCheck]) -> dict[str, Any]:
    """Return plain data, with the machine that they are about."""
    from . import __version__

    return {
        "tessera": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "passed": not any(c.verdict == "fail" for c in checks),
        "checks": [dataclasses.asdict(c) for c in checks],
    }


# -- measuring --------------------------------------------------------------------------------------------------


def check_scope(monitor: Monitor) -> SelfCheck:
    """Measure what entering and leaving a scope costs the program."""
    costs = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(_SCOPES):
            with EnergyScope("selftest", monitor=monitor):
                pass
        costs.append((time.perf_counter() - start) / _SCOPES * 1e6)
    return judge("scope", "energy_scope, enter and exit", statistics.median(costs), SCOPE_US, "us")


def check_sampler(monitor: Monitor) -> SelfCheck:
    """Measure how much of one core the sampling thread takes."""
    start, cpu_s = time.monotonic(), monitor.sampler.cpu_time_s
    time.sleep(_SAMPLER_S)
    share = 100 * (monitor.sampler.cpu_time_s - cpu_s) / (time.monotonic() - start)
    boards = sum(d.counted and d.device.is_gpu for d in monitor.sampler.domains)
    return judge("sampler", "of one core, for sampling", share, boards * BOARD_SAMPLER_PCT or SAMPLER_PCT)


def check_integral(monitor: Monitor, seconds: float) -> SelfCheck:
    """Compare the integral of the samples with the energy counter, under load."""
    what = "power samples integrated, against the energy counter"
    with power_trace(monitor=monitor) as trace, EnergyScope("selftest", monitor=monitor) as scope:
        _load(seconds)
    start, end = trace.to_epoch(scope.start_ns), trace.to_epoch(scope.end_ns)
    shares = [
        100 * abs(trace.energy(name, start, end).energy_j / energy.energy_j - 1)
        for name, energy in scope.by_domain.items()
        if energy.energy_j > 0 and energy.source.endswith("+counter")
    ]
    if not shares:
        return skip("integral", what, "no sensor here has samples and a counter whose ticks were found")
    return judge("integral", what, max(shares), INTEGRAL_PCT)


def _find_ticks(monitor: Monitor) -> None:
    """Wait until NVML's counter is usable, since the integral is compared with it from the first second on."""
    boards = [d.name for d in monitor.sampler.domains if d.counted and d.source.startswith("nvml")]
    deadline = time.monotonic() + _TICKS_S
    while boards and not any(len(monitor.sampler.anchors[b]) for b in boards) and time.monotonic() < deadline:
        time.sleep(0.02)


# -- attribution on a simulated board ---------------------------------------------------------------------------


def check_simulated() -> SelfCheck:
    """Attribute joules where the truth is known: on a simulated board, seen through a sensor's lag and noise."""
    return judge("simulated", "joules of simulated kernels, worst of five", simulate_worst_error(), SIMULATED_PCT)


def simulate_worst_error(seed: int = 7) -> float:
    """Return the error of the worst kernel's joules, in percent."""
    rng = np.random.default_rng(seed)
    rows, now = [], _START_NS
    names = list(SIMULATED_KERNELS)
    while now < _START_NS + _SIMULATED_S * 1e9:
        name = names[int(rng.integers(len(names)))]
        each_us, _ = SIMULATED_KERNELS[name]
        for _ in range(max(1, round(2000 * 30 ** rng.random() / each_us))):
            rows.append((name, now, now + each_us * 1000))
            now += each_us * 1000 + 1000
        if rng.random() < 0.25:
            now += round(2e6 * 30 ** rng.random())
    build = Builder()
    launch = build.intern_launch(Launch(grid=(1,)))
    for name, start, end in rows:
        build.add("kernel", name, start, end, device=0, stream=7, launch=launch)
    table = attribute(build.build(), _simulate_samples(rows, now, rng))
    truth = {name: watts for name, (_, watts) in SIMULATED_KERNELS.items()}
    return max(100 * abs(r.energy_j / (truth[r.name] * r.time_s) - 1) for r in table.kernels)


def _simulate_samples(rows: list[tuple[str, int, int]], end_ns: int, rng: np.random.Generator) -> PowerTrace:
    """Return the samples that an NVML ring would give for these kernels."""
    grid = np.arange(_START_NS - 200_000_000, end_ns + 200_000_000, _CELL_NS)
    true_w = np.full(len(grid), _IDLE_W)
    for name, start, end in rows:
        a, b = (start - grid[0]) / _CELL_NS, (end - grid[0]) / _CELL_NS
        for cell in range(int(a), int(b) + 1):  # by shares of a cell, since kernels may be shorter than one
            true_w[cell] += (SIMULATED_KERNELS[name][1] - _IDLE_W) * max(0.0, min(b, cell + 1) - max(a, cell))
    lags = np.arange(0, 0.1, _CELL_NS * 1e-9)
    weights = np.diff(Response(tau_s=RING_TAU_S, box_s=RING_BOX_S).step_response(np.append(lags, 0.1)))
    blurred_w = np.convolve(true_w, weights / weights.sum())[: len(grid)]
    picks = np.arange(1200, len(grid) - 100, 200)
    picks = picks + rng.integers(-60, 60, len(picks))
    watts = blurred_w[picks] * (1 + _NOISE * rng.standard_normal(len(picks)))
    domain = Domain(name="gpu0", source="nvml-samples", resolution_s=0.02)
    column = DomainSamples.of(domain, grid[picks], watts)
    return PowerTrace({"gpu0": column}, start_ns=int(grid[picks[0]]), end_ns=int(grid[picks[-1]]))


# -- on a CUDA device -------------------------------------------------------------------------------------------


def check_mixture(monitor: Monitor, seconds: float) -> SelfCheck:
    """Run kernels in random order under a session; compare the joules of a call with the same kernel alone."""
    what = "joules of kernels in a mixture, against each alone: mean"
    torch = _find_torch()
    if torch is None:
        return skip("mixture", what, "no CUDA device")
    if not any(d.counted and d.name.startswith("gpu") for d in monitor.sampler.domains):
        return skip("mixture", what, "no sensor of the GPU can be read: tessera doctor")
    from .profile.mixture import make_kernels, run_mixture

    kernels = make_kernels(torch)
    alone = {name: _measure_alone(monitor, kernel) for name, kernel in kernels.items()}
    table, calls = run_mixture(torch, kernels, {name: each_s for name, (_, each_s) in alone.items()}, seconds)
    together = {
        r.name: (r.energy_j / calls[r.name], r.time_s / calls[r.name]) for r in table.regions if calls.get(r.name)
    }
    if not kernels.keys() <= together.keys():
        return skip("mixture", what, "Kineto recorded no kernels: is another profiler running?")
    return judge_mixture(alone, together)


def judge_mixture(alone: Mapping[str, tuple[float, float]], together: Mapping[str, tuple[float, float]]) -> SelfCheck:
    """Compare joules and seconds of a call in the mixture with those alone.

    A product alone runs at the power limit: its clock falls, and a call takes longer and fewer joules than in a
    mixture. So kernels that run at a different speed tell nothing about the attribution.
    """
    what = "joules of kernels in a mixture, against each alone: mean"
    errors, others = dict[str, float](), dict[str, float]()
    for name, (energy_j, each_s) in together.items():
        alone_j, alone_s = alone[name]
        is_alike = abs(each_s / alone_s - 1) <= SAME_SPEED
        (errors if is_alike else others)[name] = 100 * (energy_j / alone_j - 1)
    if not errors:
        return skip("mixture", what, "no kernel runs as fast alone as in a mixture: the power limit holds them")
    said = _list_errors(errors.items())
    if others:
        said += f"; at another clock than alone, so not counted: {_list_errors(others.items())}"
    return judge("mixture", what, statistics.mean(abs(error) for error in errors.values()), MIXTURE_PCT, why=said)


def check_prediction(seconds: float) -> SelfCheck:
    """Predict a few kernels for this chip, and measure them."""
    what = "predicted seconds of kernels, against measured: median"
    if _find_torch() is None:
        return skip("prediction", what, "no CUDA device")
    from .estimate.calibrate import predict_point
    from .estimate.calibration_bench import CudaBench
    from .estimate.calibration_kernels import kernel_points, repeat
    from .hardware import identify_board

    try:
        with CudaBench() as bench:
            device = identify_board(bench.machine().board)
            points = [next(p for p in kernel_points(device) if p.group == g) for g in _KERNEL_GROUPS]
            errors = []
            for point in points:
                case, copies = predict_point(device, point, "graph")
                with point.set_tf32():
                    fn, inputs = point.make(bench.where)
                    sample = bench.run(repeat(fn, copies), inputs, launch="graph", seconds=seconds / len(points))
                errors.append((point.name, 100 * (case.estimate.solved.seconds / sample.seconds - 1)))
    except (ArgumentError, MissingExtra) as exc:
        return skip("prediction", what, exc.what)
    median = statistics.median(abs(error) for _, error in errors)
    return judge("prediction", what, median, PREDICTION_PCT, why=_list_errors(errors))


def _find_torch() -> Any | None:
    """Return torch if it has a CUDA device, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _warm_up() -> None:
    """Load torch, CUDA and a kernel before sampling begins.

    Loading stops other threads for seconds, longer than the driver's ring of samples reaches back.
    """
    torch = _find_torch()
    if torch is not None:
        with contextlib.suppress(RuntimeError):  # if the device fails here, it fails in the checks, which report it
            a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
            a @ a
            torch.cuda.synchronize()


def _load(seconds: float) -> None:
    """Work for some seconds: products on the GPU, or sums on the CPU."""
    torch = _find_torch()
    end = time.monotonic() + seconds
    if torch is None:
        while time.monotonic() < end:
            sum(range(100_000))
        return
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    while time.monotonic() < end:
        for _ in range(50):
            a @ a
        torch.cuda.synchronize()


def _measure_alone(monitor: Monitor, kernel: Callable[[], Any]) -> tuple[float, float]:
    """Return joules and seconds of a call in steady state."""
    bench = EnergyBenchmark(target=0.02, min_s=_ALONE_S, budget_s=2 * _ALONE_S, monitor=monitor)
    bench.measure(kernel)()
    row = bench.results[-1]
    return row.energy_per_call_j.value, row.time_per_call_s.value


def _list_errors(errors: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {error:+.0f}%" for name, error in errors)
