"""How far off a predicted server may be: the scatter of engines, and what is unknown about a chip's kernels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..estimate.kernel_time import chip
from ..estimate.power import PowerModel
from ..estimate.prediction_report import PER_SECOND
from ..hardware import lookup
from .deployment import Deployment
from .forward_pass import PassWork, decode_pass, prefill_pass
from .served_model import ServedModel

# Relative half-widths of 90% intervals: on the half of the published servers on which the constants were chosen, 90% of
# the rows are within these (benchmarks/measure/published_serving.py; the other half is the test).
ERROR_STEP, ERROR_FIRST, ERROR_ENERGY = 0.36, 0.9, 0.36
# Chips of those servers: errors of their kernels are included in the scatter of the rows.
_SERVED = ("h200", "h100", "b200")
_MOST = 0.95  # as a kernel's (tessera.estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingErrors:
    """Relative 90% half-widths for one deployment: seconds of a step, of a prefill and to the first token, and joules.

    On chips without published servers, and over several nodes, the error of kernels and exchanges is added to the
    scatter of engines, as far as it is larger than that of the same kernels on a chip with such servers.
    """

    step: float
    prefill: float
    first: float
    energy: float
    power: float


def find_errors(
    served: ServedModel, on: Deployment, decode: PassWork, prefill: PassWork, *, batch: int, prompt: int, generate: int
) -> ServingErrors:
    """Return the errors of a server's two passes."""
    own = kernels = (0.0, 0.0)
    if _chip_with_servers(on) is None or on.count_nodes(on.gpus) > 1:
        like = replace(on, device=lookup("b200" if "fp4" in (on.weights, on.experts) else "h100"))
        passes = (
            decode_pass(served, like, batch=batch, context=prompt + generate / 2),
            prefill_pass(served, like, batch=1, prompt=prompt),
        )
        own = (decode.relative_error, prefill.relative_error)
        more = [max(0.0, a**2 - b.kernel_error**2) for a, b in zip(own, passes, strict=True)]
        kernels = (math.sqrt(more[0]), math.sqrt(more[1]))
    widest = max(kernels)
    return ServingErrors(
        step=_join(ERROR_STEP, kernels[0], own[0]),
        prefill=_join(ERROR_STEP, kernels[1], own[1]),
        first=_join(ERROR_FIRST, widest, max(own)),
        energy=_join(ERROR_ENERGY, PER_SECOND * widest),
        # Joules and seconds are mostly wrong together, so their ratio has a smaller error.
        power=_join(0.5 * ERROR_ENERGY, (1.0 - PER_SECOND) * widest),
    )


def _join(scatter: float, kernels: float, least: float = 0.0) -> float:
    return min(_MOST, max(least, math.hypot(scatter, kernels)))


def _chip_with_servers(on: Deployment) -> str | None:
    of = chip(on.device)
    name = on.device.id.partition("@")[0]
    return name if name in _SERVED and (of.calibrated or of.fitted) else None


def find_provenance(on: Deployment, decode: PassWork, prefill: PassWork) -> Mapping[str, str]:
    """Return where each part of a prediction comes from, in words, as `predict` has it."""
    of = chip(on.device)
    seconds: Counter[str] = Counter()
    for part in (decode.products, decode.attention, prefill.products, prefill.attention):
        seconds.update(part.sources)
    out = {
        "device": ", ".join(on.device.origin) or on.device.id,
        "power": PowerModel.from_device(on.device).provenance,
        "latency": max(seconds, key=lambda name: seconds[name], default=""),
    }
    experts = [name for name in decode.experts.sources if name not in decode.products.sources]
    if experts:
        out["experts"] = experts[0]
    chips = ", ".join(name.upper() for name in _SERVED)
    carried = "" if _chip_with_servers(on) else f", carried over: none on {on.device.id}"
    out["engine"] = f"overheads chosen on published servers of {chips}{carried}"
    assumed = [name for name, figure in on.device.figures() if figure.assumed]
    assumed += [f"{name} (not in the catalogue)" for name in of.assumed]
    if assumed:
        out["assumed"] = ", ".join(assumed)
    return out
