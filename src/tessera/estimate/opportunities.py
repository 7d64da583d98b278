"""Changes that would save energy, each with its savings, found by predicting it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..advice import Advice
from ..errors import TesseraError
from ..hardware import catalogue, lookup
from ..notes import kind_of
from ..schema import EnergyReport, Prediction
from .prediction_errors import PredictedCost

Again = Callable[..., EnergyReport]
"""Predicts the same program again with some options changed."""

# The next narrower formats, the one that is nearest to the program's own first: each is tried where the chip has it.
# fp16 is for chips without units for bf16, such as V100, T4 and Apple's: elsewhere it saves no more than bf16.
_NARROWER: dict[str | None, tuple[str, ...]] = {
    None: ("bf16", "fp16", "fp8", "int8"),
    "fp64": ("fp32", "bf16", "fp16"),
    "fp32": ("tf32", "bf16", "fp16"),
    **dict.fromkeys(("bf16", "fp16"), ("fp8", "int8")),
    "tf32": ("bf16", "fp16"),
}
_LEAST_SHARE = 0.02  # smaller savings are below any interval of a prediction


def opportunities(report: EnergyReport) -> list[Advice]:
    """Changes that would save energy per unit of work, the largest saving first: launch, precision, batch, chip."""
    prediction = report.prediction
    if prediction is None or prediction.again is None:
        return []
    changes = (change(report, prediction, prediction.again) for change in (_launch, _quantise, _batch, _chip))
    worthwhile = [o for o in changes if o is not None and o.saves_share >= _LEAST_SHARE]
    return sorted(worthwhile, key=lambda o: o.saves_j, reverse=True)


def _try_change(again: Again, **changes: Any) -> EnergyReport | None:
    """The prediction with a change, or None where it is not possible (the chip lacks a format, it does not fit)."""
    try:
        return again(**changes)
    except TesseraError:
        return None


def _per_unit(report: EnergyReport) -> tuple[PredictedCost, str]:
    """The cost of one sample where there are samples, else of the iteration."""
    cost = PredictedCost.of(report)
    samples = next((w.amount for w in report.work if w.unit == "sample" and w.amount > 0), None)
    return (cost, "iteration") if samples is None else (cost.scale(1.0 / samples), "sample")


def _compare(kind: str, action: str, before: EnergyReport, after: EnergyReport) -> Advice:
    old, unit = _per_unit(before)
    new, _ = _per_unit(after)
    error_s, error_j = old.difference_error(new)
    saves_j = old.energy_j - new.energy_j
    return Advice(
        kind=kind,
        action=action,
        evidence="predicted with the change",
        saves_j=saves_j,
        saves_share=saves_j / old.energy_j if old.energy_j > 0 else 0.0,
        error_j=error_j,
        saves_s=old.time_s - new.time_s,
        error_s=error_s,
        unit=unit,
        energy_j=old.energy_j,
        share=1.0,
        time_s=after.total.time_s,
        by="prediction",
        # Within its interval the saving may be none, as `tessera diff` of the two says.
        confidence="medium" if saves_j > error_j else "low",
    )


def _least(options: dict[Any, EnergyReport | None]) -> tuple[Any, EnergyReport] | None:
    """The option of the fewest joules, the first of equals; None where none is possible."""
    possible = [(key, report) for key, report in options.items() if report is not None]
    return min(possible, key=lambda pair: pair[1].total.energy_j, default=None)


def _launch(report: EnergyReport, prediction: Prediction, again: Again) -> Advice | None:
    if prediction.launch != "eager" or prediction.host_s <= prediction.device_s:
        return None
    other = _try_change(again, launch="graph")
    if other is None:
        return None
    share = 1.0 - prediction.device_s / report.total.time_s
    action = f"replay a CUDA graph (torch.compile mode='reduce-overhead'): the GPU waits {share:.0%} of the time"
    return _compare("reduce latency", action, report, other)


def _quantise(report: EnergyReport, prediction: Prediction, again: Again) -> Advice | None:
    best, best_j = None, report.total.energy_j
    for precision in _NARROWER.get(prediction.precision, ()):
        other = _try_change(again, precision=precision)
        # A format that loses more digits must save more: fp8 is no advice where bf16 saves as much.
        if other is not None and best_j - other.total.energy_j >= _LEAST_SHARE * report.total.energy_j:
            best, best_j = (precision, other), other.total.energy_j
    if best is None:
        return None
    return _compare("quantise", f"run in {best[0]} (check that the accuracy is good enough)", report, best[1])


def _batch(report: EnergyReport, prediction: Prediction, again: Again) -> Advice | None:
    if not prediction.batch:
        return None
    best: tuple[float, int, EnergyReport] | None = None
    for times in (2, 4, 8, 16):
        other = _try_change(again, batch=prediction.batch * times)
        if other is None:
            break
        joules = _per_unit(other)[0].energy_j
        if best is not None and joules > 0.97 * best[0]:
            break
        best = (joules, prediction.batch * times, other)
    if best is None:
        return None
    used = prediction.average_utilization
    action = f"batch {best[1]} instead of {prediction.batch} ({used:.0%} utilised now)"
    return _compare("raise utilisation", action, report, best[2])


# Chips that a model may move to: one of each class. Chips that the model does not fit on are skipped, and those that
# would run it in another format, which is another change.
_CHIPS = ("b200", "h200", "h100", "a100", "mi300x", "l40s", "l4", "jetson-orin", "gaudi3")


def _chip(report: EnergyReport, prediction: Prediction, again: Again) -> Advice | None:
    own = prediction.device.partition("@")[0]
    others = {name: _try_change(again, on=name) for name in _CHIPS if name in catalogue() and name != own}
    best = _least({name: other for name, other in others.items() if other is not None and _as_written(other)})
    if best is None:
        return None
    return _compare("change chip", f"run it on {lookup(best[0]).name}", report, best[1])


def _as_written(report: EnergyReport) -> bool:
    """Whether a program was predicted in its own formats and launch; if not, a note of the report says so."""
    return not any(kind_of(note) == "replaced" for note in report.notes)
