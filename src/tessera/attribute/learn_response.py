"""Learns how a sensor responds, from what ran and the power samples of the same time.

::

    what ran ──► seconds of each class in each millisecond before a sample ──┐
    samples ─────────────────────────────────────────────────────────────────┼──► dead time, boxcar, exponential
    prior watts by class ────────────────────────────────────────────────────┘    ──► lag, blur, idle power, errors

Watts by class and the three times of a `Response` are fitted together (least squares, Levenberg and Marquardt). The
split of a response into its parts is hardly determined, but its mean (the lag) and its standard deviation (the blur)
are. A load without edges determines neither: then the fit is refused.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from ..errors import MeasurementError
from ..joules import Z90, Floats, Ints
from ..sensors.response_store import ResponseFit
from .fit import RING_DELAY_ERROR_S, Response, running_seconds

# Milliseconds that are looked at before a sample; and after it, since its time may be early.
CELLS, EARLY_CELLS = 200, 5
# More of these do not sharpen the response, but cost time. Classes with the least seconds are joined.
MOST_SAMPLES, MOST_CLASSES = 1000, 40
# Least samples, least samples on an edge of the power, and the least share of the samples' variance that what ran must
# explain. (Another process on the GPU would explain the rest.)
LEAST_SAMPLES, LEAST_EDGES, LEAST_EXPLAINED = 40, 12.0, 0.5
# Results with a larger error (90% half-width: seconds, or a share of the lag) are useless.
WORST_LAG_S, WORST_BLUR_S, WORST_SHARE = 0.003, 0.004, 0.2
# Least error of a fit. Fits of eight recorded mixtures of an H200 scatter by 0.8 ms, about their own errors
# (benchmarks/measure/learn_sensor.py): kernels are not quite as steady as their class.
FLOOR_S, FLOOR_SHARE = 0.0008, 0.03
# The learnt response is used only if the known delay has a larger error (90%) than `VAGUE_S`, or if the known response
# explains the run worse by more than `PLAIN_GAIN`. Otherwise one run does not decide: in a loop, errors of its watts
# look like another response. In a simulated loop of 46 ms (benchmarks/measure/light_joules.py) they looked like a lag
# of 92 ms, known to only 13 ms.
VAGUE_S, PLAIN_GAIN = 0.004, 30.0
# The fit begins from the best of these lags (s, times the scale of the sensor) and shapes (dead time, boxcar and
# exponential, each times the lag).
_LAGS_S = np.array([3, 5, 8, 12, 16, 21, 27, 34, 42, 52, 64, 80]) * 1e-3
_SHAPES = np.array([(0.0, 0.6, 0.7), (0.0, 2.0, 0.0), (0.6, 0.2, 0.3), (0.0, 1.2, 0.4)])
_STARTS, _SCANNED = 5, 300
_ROUNDS, _TRIES, _CLOSE = 25, 8, 1e-4
# The fit is refused if a lag that differs by one of these (s) fits about as well (difference of two chi-squares): a
# loop looks the same one period later, and in a short loop other watts compensate for another lag.
_APART_S, _AS_GOOD = np.array([-40, -30, -22, -16, -12, -9, -6, 6, 9, 12, 16, 22, 30, 40, 50, 60, 75, 90]) * 1e-3, 12.0
# For that comparison the prior of the watts is this many times wider than in the fit: the power of a class is a guess,
# and the response must not be learnt from a guess.
_WIDER = 4.0
# The noise of a sample, as in `fit.solve`: watts, share of the level, and seconds of its time. The residuals scale it.
_NOISE_W, _NOISE_SHARE, _JITTER_S = 4.0, 0.03, 0.0015
# Power drifts over seconds, with temperature and clocks: by this share of the level (standard deviation), with a knot
# every so many seconds. Treated as noise of single samples, the drift would look like a longer tail of the response.
_WANDER, _KNOT_S = 0.01, 1.0
# Times of samples are mostly right and sometimes far off, so residuals have the tails of a Student's t with this many
# degrees of freedom. Plain least squares would take the tails for a wider response. (Lange, Little and Taylor, "Robust
# statistical modeling using the t distribution", 1989: weights, and the information (v + 1) / (v + 3) of each sample.)
_TAILS, _SCALINGS = 4.0, 20
_BLOCKS = 20
_UNSEEN = 1e-7
"""Smaller shares of a sample count as 0, since the rounding errors of the others are larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntResponse:
    """A learnt response, and what to keep of it: lag, blur and idle power with their errors.

    `gain` is how much better it explains the samples than the response known before (difference of two chi-squares).
    """

    response: Response
    fit: ResponseFit
    gain: float

    def corrects(self, known: Response) -> bool:
        """Return whether to use it instead of the known response: that one is vague, or it is clearly wrong."""
        return known.delay_error_s > VAGUE_S or (self.gain > PLAIN_GAIN and self.fit.lag_error_s <= VAGUE_S)

    def combine(self, known: Response) -> Response:
        """Return the learnt shape at the most likely lag, combined from both by their errors."""
        own, before = (1.0 / max(r.delay_error_s, 1e-6) ** 2 for r in (self.response, known))
        lag_s = (own * self.response.delay_s + before * known.delay_s) / (own + before)
        moved = self.response.later(lag_s - self.response.delay_s)
        return dataclasses.replace(moved, delay_error_s=max((own + before) ** -0.5, RING_DELAY_ERROR_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """What ran, as intervals of classes (the last class is the idle board), and the expected watts of each class."""

    start_ns: Ints
    end_ns: Ints
    seconds: Floats
    cls: Ints
    prior_w: Floats
    sd_w: Floats

    def join_small(self, most: int) -> Exposed:
        """Join the classes with the least seconds into one, weighted by expected watts; keep at most `most` classes."""
        classes = len(self.prior_w)
        if classes <= most:
            return self
        total_s = np.bincount(self.cls, self.seconds, minlength=classes)
        total_s[-1] = np.inf  # the idle board
        kept = np.sort(np.argsort(-total_s, kind="stable")[: most - 1])
        number = np.zeros(classes, np.int64)  # class 0 is the joined class
        number[kept] = np.arange(1, most)
        rest = np.setdiff1d(np.arange(classes), kept)
        mean_w = float(np.average(self.prior_w[rest], weights=np.maximum(total_s[rest], 1e-9)))
        relative = np.ones(classes)
        relative[rest] = self.prior_w[rest] / mean_w
        sd_w = float(np.average(self.sd_w[rest], weights=np.maximum(total_s[rest], 1e-9)))
        return Exposed(
            start_ns=self.start_ns, end_ns=self.end_ns, seconds=self.seconds * relative[self.cls], cls=number[self.cls],
            prior_w=np.concatenate([[mean_w], self.prior_w[kept]]), sd_w=np.concatenate([[sd_w], self.sd_w[kept]]),
        )  # fmt: skip


def learn_response(times_ns: Ints, samples_w: Floats, ran: Exposed, known: Response) -> LearntResponse:
    """Fit the response of a sensor; `ran` must cover `horizon_s(known)` before each sample.

    Raise MeasurementError if the samples do not determine it.
    """
    if len(times_ns) < LEAST_SAMPLES:
        raise _refuse(f"there are {len(times_ns)} samples, fewer than {LEAST_SAMPLES}")
    if len(times_ns) > MOST_SAMPLES:
        chosen = np.linspace(0, len(times_ns) - 1, MOST_SAMPLES).astype(np.int64)
        times_ns, samples_w = times_ns[chosen], samples_w[chosen]
    problem = _ResponseSolver(times_ns, samples_w, ran.join_small(MOST_CLASSES), _cell_s(known))
    found = problem.solve()
    lag_s, blur_s = _moments(found)
    problem.check(lag_s)
    covariance = problem.covariance(found)
    floor_s = math.hypot(FLOOR_S, FLOOR_SHARE * lag_s)
    lag_error_s, blur_error_s = (math.hypot(Z90 * sd, floor_s) for sd in np.sqrt(np.diag(covariance)[:2]))
    for name, error_s, worst_s in (("lag", lag_error_s, WORST_LAG_S), ("blur", blur_error_s, WORST_BLUR_S)):
        if error_s > max(worst_s, WORST_SHARE * lag_s):
            raise _refuse(f"its {name} is known to ±{error_s * 1e3:.1f} ms only: the load has too few edges")
    dead_s, box_s, tau_s = found.tolist()
    idle_sd_w = math.sqrt(covariance[2, 2])
    has_idle = idle_sd_w < 0.5 * float(ran.sd_w[-1])  # otherwise the result is mostly the prior
    response = Response(tau_s=tau_s, box_s=box_s, dead_s=dead_s, delay_error_s=lag_error_s)
    fit = ResponseFit(
        start_ns=int(times_ns[0]), seconds=float(times_ns[-1] - times_ns[0]) * 1e-9, lag_s=lag_s,
        lag_error_s=lag_error_s, blur_s=blur_s, blur_error_s=blur_error_s, idle_w=problem.idle_w if has_idle else None,
        idle_error_w=Z90 * idle_sd_w if has_idle else None,
    )  # fmt: skip
    return LearntResponse(response=response, fit=fit, gain=problem.gain_over(known))


def horizon_s(known: Response) -> float:
    """Return how far back samples may look while their response is learnt."""
    return CELLS * _cell_s(known)


def _cell_s(known: Response) -> float:
    """Return a millisecond; more for sensors that average over a second."""
    return max(1e-3, known.delay_s / 50)


def _refuse(why: str) -> MeasurementError:
    return MeasurementError(
        "the response of the power sensor cannot be learnt here", why=why,
        fix="trace some seconds of a load that rises and falls, with no other program on the GPU",
    )  # fmt: skip


def _response(found: Floats) -> Response:
    dead_s, box_s, tau_s = found.tolist()
    return Response(tau_s=tau_s, box_s=box_s, dead_s=dead_s)


def _moments(found: Floats) -> tuple[float, float]:
    """Return lag and blur."""
    response = _response(found)
    return response.delay_s, response.blur_s


class _ResponseSolver:
    """Solves the least squares of one sensor: dead time, boxcar and exponential (s), with the best watts for each."""

    def __init__(self, times_ns: Ints, samples_w: Floats, ran: Exposed, cell_s: float) -> None:
        self._ran, self._cell_s, self._samples_w = ran, cell_s, samples_w
        self._edges: Floats = np.arange(-EARLY_CELLS, CELLS + 1, dtype=np.float64) * cell_s
        self._lagged = _lag_classes(times_ns, ran, self._edges)
        self._every = max(len(samples_w) // _SCANNED, 1)
        self._scanned = np.ascontiguousarray(self._lagged[:, :: self._every])
        self._knots = _list_knots(times_ns)
        self._wander = float(np.mean(samples_w)) * self._knots
        wanders = self._knots.shape[1]
        self._prior_w = np.concatenate([ran.prior_w, np.zeros(wanders)])
        self._precision = np.diag(np.concatenate([ran.sd_w, np.full(wanders, _WANDER)]) ** -2.0)
        self._least = np.array([-EARLY_CELLS * cell_s / 2, 0.0, 0.0])
        self._most = 0.75 * CELLS * cell_s
        self._weight = (_NOISE_W**2 + (_NOISE_SHARE * samples_w) ** 2) ** -1.0 / 4.0
        self._others: list[Floats] = []

    @property
    def idle_w(self) -> float:
        return float(self._watts[-1])

    @property
    def _watts(self) -> Floats:
        return self._solved[: len(self._ran.prior_w)]

    def _expose(self, *found: Floats, every: int = 1) -> Floats:
        """Return the designs of some responses: how much of each sample is each class."""
        steps = [np.diff(_response(one).step_response(self._edges)) for one in found]
        weights = np.array([step / max(step.sum(), 1e-9) for step in steps], np.float32)
        seen = np.flatnonzero(weights.max(axis=0) > _UNSEEN)  # skip the cells without weight
        cells = slice(seen[0], seen[-1] + 1) if len(seen) else slice(0, 1)
        lagged = (self._lagged if every == 1 else self._scanned)[cells]
        shares = weights[:, cells] @ lagged.reshape(len(lagged), -1)
        return np.asarray(shares.reshape(len(found), *lagged.shape[1:]), np.float64)

    def _misfit(self, found: Floats, every: int = 1) -> float:
        """Return the sum of squares at the best watts, including the prior; keep watts, design and residuals."""
        design = np.column_stack([*self._expose(found, every=every), self._wander[::every]])
        weight, samples_w = self._weight[::every], self._samples_w[::every]
        hessian = design.T @ (design * weight[:, None]) + self._precision
        solved = np.linalg.solve(hessian, design.T @ (weight * samples_w) + self._precision @ self._prior_w)
        residuals, off = samples_w - design @ solved, solved - self._prior_w
        self._design, self._solved, self._residuals = design, solved, residuals
        return float(np.sum(weight * residuals**2) + off @ self._precision @ off)

    def solve(self) -> Floats:
        """Return dead time, boxcar and exponential of the best fit, with weights from its residuals."""
        every = self._every
        best = [
            min((shape * lag_s * self._cell_s * 1e3 for shape in _SHAPES), key=lambda start: self._misfit(start, every))
            for lag_s in _LAGS_S
        ]
        starts = sorted(best, key=lambda start: self._misfit(start, every))[:_STARTS]
        ends = sorted((self._descend(start) for start in starts), key=lambda end: end[0])
        found = ends[0][1]
        for _ in range(3):
            self._reweigh(found)
            _, found = self._descend(found)
        # With the weights, another local minimum may be the best.
        others = [end for _, end in ends[1:] if abs(_moments(end)[0] - _moments(found)[0]) > 4 * self._cell_s]
        ends = sorted((self._descend(end) for end in (found, *others)), key=lambda end: end[0])
        found, self._others = ends[0][1], [end for _, end in ends[1:]]
        self._misfit(found)
        self._slopes, self._found = self._find_slopes(found), found
        return found

    def _reweigh(self, found: Floats) -> None:
        """Set the weights from level and slope of the fit and from the residuals, scaled to the residuals."""
        self._misfit(found)
        level, later = self._find_level(), self._find_slopes(found)[:, 0]
        self._wander = level[:, None] * self._knots
        variance = _NOISE_W**2 + (_NOISE_SHARE * level) ** 2 + (_JITTER_S * later) ** 2
        square = self._residuals**2 / variance
        scale = float(np.mean(square))
        for _ in range(_SCALINGS):
            scale = max(float(np.mean(square * (_TAILS + 1.0) / (_TAILS + square / scale))), 0.02)
        spare = max(len(level) - 0.5 * len(self._watts) - 3.0, 0.3 * len(level)) / len(level)
        near = (_TAILS + 1.0) / (_TAILS + square / scale) * (_TAILS + 1.0) / (_TAILS + 3.0)
        self._weight = spare * near / (variance * scale)

    def _find_slopes(self, found: Floats) -> Floats:
        """Return how the samples would change with each of the three times (W/s)."""
        step_s = 0.5 * self._cell_s
        level = self._find_level()
        moved = self._expose(*(found + step_s * unit for unit in np.eye(3)))
        return np.column_stack([(design @ self._watts - level) / step_s for design in moved])

    def _find_level(self) -> Floats:
        """Return the samples as they would be without noise and drift."""
        level: Floats = self._design[:, : len(self._watts)] @ self._watts
        return level

    def _normal(self, slopes: Floats) -> tuple[Floats, Floats]:
        """Return the columns of watts, drift and times together, and their normal matrix."""
        columns = np.column_stack([self._design, slopes])
        normal = columns.T @ (columns * self._weight[:, None])
        linear = len(self._solved)
        normal[:linear, :linear] += self._precision
        normal[range(linear, linear + 3), range(linear, linear + 3)] += (30 * self._cell_s) ** -2.0
        return columns, normal

    def _descend(self, found: Floats) -> tuple[float, Floats]:
        """Descend from a start to a local minimum; return the misfit and the times there."""
        misfit, damping = self._misfit(found), 1e-2
        linear = len(self._solved)
        for _ in range(_ROUNDS):
            columns, normal = self._normal(self._find_slopes(found))
            right = columns.T @ (self._weight * self._residuals)
            right[:linear] += self._precision @ (self._prior_w - self._solved)
            for _ in range(_TRIES):
                damped = normal.copy()
                damped[range(linear, linear + 3), range(linear, linear + 3)] *= 1.0 + damping
                step = np.clip(np.linalg.solve(damped, right)[linear:], -30 * self._cell_s, 30 * self._cell_s)
                tried = np.clip(found + step, self._least, self._most)
                lower = self._misfit(tried)
                if lower < misfit:
                    break
                damping *= 4.0
            else:
                self._misfit(found)
                break
            gained, misfit, found, damping = misfit - lower, lower, tried, max(damping / 8.0, 1e-6)
            if gained < _CLOSE * misfit:
                break
        return misfit, found

    def check(self, lag_s: float) -> None:
        """Refuse a load without edges, a load that something else explains, and one that another lag fits as well."""
        later = self._slopes[:, 0]
        edges = float(np.sum(later**2)) ** 2 / max(float(np.sum(later**4)), 1e-30)
        if not edges >= LEAST_EDGES:
            raise _refuse(f"{edges:.0f} samples lie on an edge of the power, fewer than {LEAST_EDGES:.0f}")
        explained = 1.0 - float(np.var(self._residuals)) / max(float(np.var(self._samples_w)), 1e-9)
        if explained < LEAST_EXPLAINED:
            raise _refuse(f"what ran explains {max(explained, 0.0):.0%} of the changes of the power")
        classes = len(self._watts)
        self._precision[:classes, :classes] /= _WIDER**2
        best, alike = self._misfit(self._found), self._alike
        moved = [self._found + np.array([apart_s, 0.0, 0.0]) for apart_s in _APART_S * self._cell_s * 1e3]
        for other in (*self._others, *moved):
            other_s = _moments(other)[0]
            worse = (self._misfit(other) - best) * (1.0 - alike) / (1.0 + alike)
            if other_s > 0.0 and abs(other_s - lag_s) > 4 * self._cell_s and worse < _AS_GOOD:
                raise _refuse(f"lags of {lag_s * 1e3:.0f} and {other_s * 1e3:.0f} ms explain it alike")
        self._misfit(self._found)
        self._edges_seen = edges

    def gain_over(self, known: Response) -> float:
        """Return how much better the fit explains the samples than a known response does."""
        at_known = np.array([known.dead_s, known.box_s, known.tau_s])
        better = self._misfit(at_known) - self._misfit(self._found)
        return better * (1.0 - self._alike) / (1.0 + self._alike)

    @property
    def _alike(self) -> float:
        """Correlation of the residuals of neighbouring samples."""
        scaled = self._residuals * np.sqrt(self._weight)
        return min(max(float(np.sum(scaled[1:] * scaled[:-1]) / np.sum(scaled**2)), 0.0), 0.9)

    def covariance(self, found: Floats) -> Floats:
        """Return the covariance of lag, blur and idle power, by residuals of samples or, if larger, of blocks."""
        columns, normal = self._normal(self._slopes)
        classes, linear = len(self._watts), len(self._solved)
        free = np.ones(linear + 3, bool)
        free[linear:] = found > self._least + 1e-3 * self._cell_s
        inverse = np.zeros_like(normal)
        inverse[np.ix_(free, free)] = np.linalg.inv(normal[np.ix_(free, free)])
        blur_s = max(_moments(found)[1], 1e-6)
        turn = np.zeros((3, linear + 3))  # from watts and times to lag, blur and idle power
        turn[0, linear:] = 1.0, 0.5, 1.0
        turn[1, linear:] = 0.0, found[1] / 12.0 / blur_s, found[2] / blur_s
        turn[2, classes - 1] = 1.0
        expected = np.diag(turn @ inverse @ turn.T) * (1.0 + self._alike) / (1.0 - self._alike)
        moves = (columns * (self._weight * self._residuals)[:, None]) @ inverse @ turn.T
        blocks = np.array([part.sum(axis=0) for part in np.array_split(moves, min(_BLOCKS, len(moves) // 4))])
        seen = np.sum(blocks**2, axis=0) * len(blocks) / (len(blocks) - 1)
        few = self._edges_seen / (self._edges_seen - 0.6 * LEAST_EDGES)
        return np.diag(np.maximum(expected, seen) * few)


def _list_knots(times_ns: Ints) -> Floats:
    """Return how much each sample (rows) belongs to each knot (columns) of a line through them."""
    place = (times_ns - times_ns[0]) * 1e-9 / _KNOT_S
    knots: Floats = np.maximum(1.0 - np.abs(place[:, None] - np.arange(int(place[-1]) + 2)), 0.0)
    return knots


def _lag_classes(times_ns: Ints, ran: Exposed, edges_s: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return the share of each class (last axis) in each cell (first axis) before each sample."""
    asked = times_ns[:, None] - np.round(edges_s * 1e9).astype(np.int64)[None, :]
    classes, cell_s = len(ran.prior_w), edges_s[1] - edges_s[0]
    lagged = np.zeros((len(edges_s) - 1, len(times_ns), classes), np.float32)
    for number, sums in running_seconds(asked, ran.start_ns, ran.end_ns, ran.seconds, ran.cls, classes):
        lagged[:, :, number] = ((sums[:, :-1] - sums[:, 1:]) / cell_s).T
    return lagged
