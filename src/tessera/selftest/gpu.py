"""What can be checked on a CUDA device: joules of a mixture against each kernel alone, and predictions."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, MissingExtra

if TYPE_CHECKING:
    from ..monitor.core import Monitor
    from .checks import Check

_ALONE_S = 1.2
_KERNELS = ("gemm.bf16", "attention", "copy", "norm")  # groups of estimate.calibration_kernels that are measured


def _torch() -> Any | None:
    """The torch with a CUDA device; None where there is none."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def warm_up() -> None:
    """Load torch, CUDA and a kernel, before sampling begins.

    Loading keeps other threads from running for seconds, longer than the driver's ring of samples reaches back.
    """
    torch = _torch()
    if torch is not None:
        with contextlib.suppress(RuntimeError):  # a device that fails here fails in the checks too, which say so
            a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
            a @ a
            torch.cuda.synchronize()


def load(seconds: float) -> None:
    """Work for so long: products on the GPU, else sums on the CPU."""
    torch = _torch()
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


def mixture(monitor: Monitor, seconds: float) -> Check:
    """Kernels in random runs under a session: joules a call against each of them alone."""
    from .checks import MIXTURE_PCT, judged, skipped

    what = "joules of kernels in a mixture, against each alone: mean"
    torch = _torch()
    if torch is None:
        return skipped("mixture", what, "no CUDA device")
    if not any(d.counted and d.name.startswith("gpu") for d in monitor.sampler.domains):
        return skipped("mixture", what, "no sensor of the GPU can be read: tessera doctor")
    works = _works(torch)
    alone = {name: _alone(monitor, work) for name, work in works.items()}
    together = _together(torch, works, alone, seconds)
    errors = [100 * abs(together[n] / alone[n][0] - 1) for n in works if n in together]
    if len(errors) < len(works):
        return skipped("mixture", what, "Kineto recorded no kernels: is another profiler running?")
    told = ", ".join(f"{n} {100 * (together[n] / alone[n][0] - 1):+.0f}%" for n in works)
    return judged("mixture", what, statistics.mean(errors), MIXTURE_PCT, why=told)


def _works(torch: Any) -> dict[str, Callable[[], Any]]:
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(64 << 20, device="cuda", dtype=torch.bfloat16)
    c, d = torch.empty_like(b), torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    return {"product": lambda: a @ a, "copy": lambda: c.copy_(b), "softmax": lambda: d.softmax(-1)}


def _alone(monitor: Monitor, work: Callable[[], Any]) -> tuple[float, float]:
    """Joules and seconds of a call in steady state."""
    from ..monitor import EnergyBenchmark

    bench = EnergyBenchmark(target=0.02, min_s=_ALONE_S, budget_s=2 * _ALONE_S, monitor=monitor)
    bench.measure(work)()
    row = bench.results[-1]
    return row.energy_per_call_j.value, row.time_per_call_s.value


def _together(
    torch: Any, works: dict[str, Callable[[], Any]], alone: dict[str, tuple[float, float]], seconds: float
) -> dict[str, float]:
    """Joules a call of each, attributed from one session of random runs."""
    import random

    from ..profile.region import region
    from ..profile.session import session

    rng, names, calls = random.Random(7), list(works), dict.fromkeys(works, 0)
    with tempfile.TemporaryDirectory() as folder:
        with session(record_shapes=False, path=Path(folder, "selftest.tessera")) as sess:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                name = rng.choice(names)
                times = max(1, round(0.002 * 30 ** rng.random() / alone[name][1]))
                with region(name):
                    for _ in range(times):
                        works[name]()
                calls[name] += times
                torch.cuda.synchronize()
                if rng.random() < 0.25:
                    time.sleep(0.002 * 30 ** rng.random())
        table = sess.energy()
    return {r.name: r.energy_j / calls[r.name] for r in table.regions if calls.get(r.name)}


def prediction(seconds: float) -> Check:
    """A few kernels predicted for this chip, and measured."""
    from .checks import PREDICTION_PCT, judged, skipped

    what = "predicted seconds of kernels, against measured: median"
    if _torch() is None:
        return skipped("prediction", what, "no CUDA device")
    from ..estimate.calibrate import predict_point
    from ..estimate.calibration_bench import CudaBench
    from ..estimate.calibration_kernels import kernel_points, repeat
    from ..hardware import identify_board

    try:
        with CudaBench() as bench:
            device = identify_board(bench.machine().board)
            points = [next(p for p in kernel_points(device) if p.group == g) for g in _KERNELS]
            errors = []
            for point in points:
                case, copies = predict_point(device, point, "graph")
                with point.set_tf32():
                    fn, inputs = point.make(bench.where)
                    sample = bench.run(repeat(fn, copies), inputs, launch="graph", seconds=seconds / len(points))
                errors.append((point.name, 100 * (case.found.solved.seconds / sample.seconds - 1)))
    except (ArgumentError, MissingExtra) as exc:
        return skipped("prediction", what, exc.what)
    told = ", ".join(f"{name} {error:+.0f}%" for name, error in errors)
    return judged("prediction", what, statistics.median(abs(e) for _, e in errors), PREDICTION_PCT, why=told)
