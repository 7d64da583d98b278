"""What would save joules: each change is predicted, not guessed, and told with what it would save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..errors import TesseraError
from ..hardware import catalogue, lookup
from ..schema import EnergyReport, Opportunity

# What a model is usually run in next, cheapest last: each is tried where the chip has it.
_NARROWER = {None: ("bf16", "fp8"), "fp64": ("fp32", "bf16"), "fp32": ("tf32", "bf16"), "tf32": ("bf16",),
             "bf16": ("fp8",), "fp16": ("fp8",), "fp8": (), "int8": ()}  # fmt: skip
_LEAST_SHARE = 0.02  # savings below this are within any interval we can give


def opportunities(report: EnergyReport) -> list[Opportunity]:
    """Changes that would save energy per unit of work, dearest first: launch, precision, batch, chip."""
    prediction = report.prediction
    if prediction is None or prediction.again is None:
        return []
    found = [o for o in _candidates(report, prediction.again) if o.saves_share >= _LEAST_SHARE]
    return sorted(found, key=lambda o: o.saves_j, reverse=True)


def _candidates(report: EnergyReport, again: Callable[..., EnergyReport]) -> Iterator[Opportunity]:
    for change in (_launch, _quantise, _batch, _chip):
        yield from change(report, again)


def _tried(again: Callable[..., EnergyReport], **changes: Any) -> EnergyReport | None:
    """The prediction with a change, or None where it cannot be (the chip lacks a format, it does not fit)."""
    try:
        return again(**changes)
    except TesseraError:
        return None


def _per_unit(report: EnergyReport) -> tuple[float, float, str]:
    """Joules and their half-width for one sample where there are samples, else for the iteration."""
    for unit, joules, error in report.per_work():
        if unit == "sample":
            return joules, error, unit
    return report.total.joules, report.total.error_j, "iteration"


def _compared(name: str, action: str, before: EnergyReport, after: EnergyReport) -> Opportunity:
    old, old_error, unit = _per_unit(before)
    new, new_error, _ = _per_unit(after)
    return Opportunity(
        name=name,
        action=action,
        saves_j=old - new,
        saves_share=(old - new) / old if old > 0 else 0.0,
        # Both predictions err alike: what is left of the errors is that of the smaller part that changed.
        error_j=0.5 * (old_error + new_error) * abs(old - new) / max(old, 1e-30),
        latency_s=after.total.seconds,
        unit=unit,
    )


def _launch(report: EnergyReport, again: Callable[..., EnergyReport]) -> Iterator[Opportunity]:
    prediction = report.prediction
    if prediction is None or prediction.launch != "eager" or prediction.host_s <= prediction.device_s:
        return
    other = _tried(again, launch="graph")
    if other is not None:
        share = 1.0 - prediction.device_s / report.total.seconds
        yield _compared(
            "reduce latency",
            f"replay a CUDA graph (torch.compile mode='reduce-overhead'): the GPU waits {share:.0%} of the time",
            report,
            other,
        )


def _quantise(report: EnergyReport, again: Callable[..., EnergyReport]) -> Iterator[Opportunity]:
    prediction = report.prediction
    assert prediction is not None
    best: tuple[float, str, EnergyReport] | None = None
    for precision in _NARROWER.get(prediction.precision, ()):
        other = _tried(again, precision=precision)
        if other is not None and (best is None or other.total.joules < best[0]):
            best = (other.total.joules, precision, other)
    if best is not None:
        yield _compared("quantise", f"run in {best[1]} (check that the accuracy holds)", report, best[2])


def _batch(report: EnergyReport, again: Callable[..., EnergyReport]) -> Iterator[Opportunity]:
    prediction = report.prediction
    assert prediction is not None
    if not prediction.batch:
        return
    best: tuple[float, int, EnergyReport] | None = None
    for times in (2, 4, 8, 16):
        other = _tried(again, batch=prediction.batch * times)
        if other is None:
            break
        joules = _per_unit(other)[0]
        if best is not None and joules > 0.97 * best[0]:
            break
        best = (joules, prediction.batch * times, other)
    if best is not None:
        used = prediction.average_utilization
        yield _compared(
            "raise utilisation",
            f"batch {best[1]} instead of {prediction.batch} ({used:.0%} utilised now)",
            report,
            best[2],
        )


# Chips a model of any size may be moved to: one of each class (lookup by id; what does not fit is left out).
_CHIPS = ("b200", "h200", "h100", "a100", "mi300x", "l40s", "l4", "jetson-orin", "gaudi3")


def _chip(report: EnergyReport, again: Callable[..., EnergyReport]) -> Iterator[Opportunity]:
    prediction = report.prediction
    assert prediction is not None
    best: tuple[float, str, EnergyReport] | None = None
    known = set(catalogue())
    for name in _CHIPS:
        if name not in known or name == prediction.device.partition("@")[0]:
            continue
        other = _tried(again, on=name)
        if other is not None and (best is None or other.total.joules < best[0]):
            best = (other.total.joules, name, other)
    if best is not None:
        yield _compared("change chip", f"run it on {lookup(best[1]).name}", report, best[2])
