"""What a formula leaves over: tree ensembles fitted on the H200 and read from data files, evaluated with numpy.

The files under `data/` are written by `benchmarks/fit/fit_kernels.py`; each says what it was fitted on and how well it
holds on shapes it has not seen.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kernel_time import Chip

Array = NDArray[np.float64]


@functools.cache
def fitted(name: str) -> dict[str, Any]:
    """A data file of the calibrated H200."""
    text = (resources.files(__package__) / "data" / name).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@dataclass(frozen=True, slots=True)
class Trees:
    """A sum of regression trees of one depth; every tree is a full binary tree laid out by level.

    `split` holds feature numbers and `threshold` their limits, each (trees, 2^depth - 1); `leaf` is (trees, 2^depth).
    A row goes right where its feature is above the limit. The sum is held within `bound` either way.
    """

    split: NDArray[np.int64]
    threshold: Array
    leaf: Array
    bound: float

    def __call__(self, rows: Array) -> Array:
        """The sum over the trees for each row of features."""
        trees, inner = self.split.shape
        depth = (inner + 1).bit_length() - 1
        split, threshold, leaf = self.split.ravel(), self.threshold.ravel(), self.leaf.ravel()
        first = np.arange(trees) * inner  # where a tree's inner nodes begin
        found = np.empty(len(rows))
        for i, row in enumerate(rows):
            node = np.zeros(trees, np.int64)
            for _ in range(depth):
                at = first + node
                node = 2 * node + 1 + (row.take(split.take(at)) > threshold.take(at))
            # Leaves are one more than inner nodes, so a tree's leaves begin at its number of trees further on.
            found[i] = leaf.take(first + np.arange(trees) + node - inner).sum()
        return np.clip(found, -self.bound, self.bound)


def trees(data: Mapping[str, Any]) -> Trees:
    """The trees of a data file."""
    return Trees(
        split=np.array(data["split"], np.int64),
        threshold=np.array(data["threshold"], float),
        leaf=np.array(data["leaf"], float),
        bound=float(data["bound"]),
    )


def table(columns: Sequence[Any], rows: int) -> Array:
    """Columns, each an array or one number, side by side."""
    found = np.empty((rows, len(columns)))
    for i, column in enumerate(columns):
        found[:, i] = column
    return found


def interval(data: Mapping[str, Any], of: Chip, native: bool, seconds: float, source: str) -> float:
    """The 90% half-width for a kernel: by its length on the calibrated chip, one wide figure elsewhere.

    A precision the chip has no unit for widens it by half, each figure that had to be assumed by 15%.
    """
    if of.calibrated:
        table = data["calibrated"][source]
        width = float(np.interp(math.log10(max(seconds, 1e-9)), table["log10_s"], table["half_width"]))
    else:
        width = float(data["same_vendor"] if of.nvidia else data["other_vendor"])
    width *= 1.15 ** len(of.assumed) * (1.0 if native else 1.5)
    return min(width, 0.95)
