"""What near shapes have in common: a correction of a formula by Gaussian processes, read from a fitted file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..joules import Floats, Ints


@dataclass(frozen=True, slots=True)
class Kriging:
    """A smooth correction: shapes that are near each other differ from a formula alike.

    Gaussian-process regression with the Matern 3/2 covariance. `points` are shapes that were timed, by the columns
    `features` in units of `lengths` (a data file has tenths of them); `weights` come from the fit. Far from every point
    the sum is 0, and the formula holds as it is. It is held within `bound` either way.
    """

    features: Ints
    lengths: Floats
    points: Floats
    weights: Floats
    bound: float

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Kriging:
        """The correction of a data file."""
        lengths, tenths, weights = (np.array(data[name], float) for name in ("lengths", "points", "weights"))
        return cls(np.array(data["features"], np.int64), lengths, tenths / 10, weights, float(data["bound"]))

    def __call__(self, rows: Floats) -> Floats:
        """The correction for each row of features."""
        near = covariance(rows[:, self.features] / self.lengths, self.points)
        return np.asarray(np.clip(near @ self.weights, -self.bound, self.bound))


def covariance(a: Floats, b: Floats) -> Floats:
    """How alike the errors of shapes are, by their distance: Matern 3/2, from 1 to 0."""
    square = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2.0 * a @ b.T
    distance = np.sqrt(np.maximum(0.0, square))
    return np.asarray((1.0 + distance) * np.exp(-distance))
