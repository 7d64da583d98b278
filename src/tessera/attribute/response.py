r"""What a power sensor shows of what was drawn: late, smeared, and only now and then.

    drawn     ____/‾‾‾‾‾‾\______
    shown     _____/⎺⎺⎺⎺⎺⎺\_____      an exponential (the sensor's filter) after a boxcar (its averaging)

A sample at time t is the sum over lags u of `weights` times the power drawn at t - u.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..integral import Floats
from ..schema import Domain, Hold

# NVML's ring on an H200: of exponentials and boxcars with a dead time those that fit four recorded mixtures of kernels
# best (benchmarks/measure/attribution.py --fit; the fall of the power in h200/waves.json is met at +26 and +45 ms). The
# mean delay is well determined (16 ms, +-1), the split between exponential and boxcar is not.
RING_TAU_S = 0.011
RING_BOX_S = 0.010
RING_DELAY_ERROR_S = 0.001
# Nine tenths of a percent of an edge are still to come after so many time constants: enough for a sum of watts.
_TAIL = 4.7
_STEP_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A boxcar of `box_s`, then an exponential of `tau_s`, then a dead time. `delay_error_s` is its 90% half-width."""

    tau_s: float
    box_s: float
    dead_s: float = 0.0
    delay_error_s: float = RING_DELAY_ERROR_S

    @property
    def delay_s(self) -> float:
        return self.tau_s + 0.5 * self.box_s + self.dead_s

    @property
    def memory_s(self) -> float:
        """How far back a sample looks."""
        return max(self.dead_s + self.box_s + _TAIL * self.tau_s, _STEP_S)

    def later(self, seconds: float) -> Response:
        return replace(self, dead_s=self.dead_s + seconds)

    def step_response(self, since_s: Floats) -> Floats:
        """The share of a step that is shown so long after it."""
        t = since_s - self.dead_s
        box = max(self.box_s, 1e-6)
        return (_ramp(t, self.tau_s) - _ramp(t - box, self.tau_s)) / box

    def lags(self) -> tuple[Floats, Floats]:
        """Edges of lag (s, ascending) and the weights of the power drawn between them, which sum to 1."""
        count = max(2, round((self.memory_s - self.dead_s) / _STEP_S))
        edges = self.dead_s + np.linspace(0.0, self.memory_s - self.dead_s, count + 1)
        weights = np.diff(self.step_response(edges))
        return edges, weights / weights.sum()


def _ramp(t: Floats, tau_s: float) -> Floats:
    """The integral of an exponential's step response."""
    t = np.maximum(t, 0.0)
    return t - tau_s * -np.expm1(-t / tau_s) if tau_s > 0 else t


def response_of(domain: Domain, spacing_s: float) -> Response:
    """The response of a domain's sensor: the ring's is fitted, others follow from what the domain says of itself."""
    if domain.source.startswith("nvml-samples"):
        return Response(tau_s=RING_TAU_S, box_s=RING_BOX_S)
    if domain.hold is Hold.MEAN:  # each sample is the mean since the one before
        return Response(tau_s=0.0, box_s=max(spacing_s, 1e-3), dead_s=max(domain.lag_s, 0.0))
    box_s = max(domain.blur_s * np.sqrt(12.0), min(domain.resolution_s, spacing_s), 1e-3)
    dead_s = domain.lag_s - 0.5 * box_s
    return Response(tau_s=0.0, box_s=box_s, dead_s=dead_s, delay_error_s=max(0.1 * box_s, RING_DELAY_ERROR_S))
