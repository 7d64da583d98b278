"""Rows one inside the other, in an order in which a row and all it holds are neighbours."""

from __future__ import annotations

import random

import numpy as np

from tessera.timeline.columns import NONE
from tessera.timeline.intervals import Forest


def plant(count: int, seed: int) -> tuple[Forest, list[int]]:
    """A random forest of rows 0, 2, 4...; and the parent of each row of a timeline."""
    rng = random.Random(seed)
    parent = [NONE] * (2 * count)
    for i in range(1, count):
        if rng.random() < 0.9:
            parent[2 * i] = 2 * rng.randrange(max(0, i - 3), i)
    return Forest(np.arange(0, 2 * count, 2), np.array(parent)), parent


def climb_path(parent: list[int], row: int) -> list[int]:
    path = []
    while row != NONE:
        path.append(row)
        row = parent[row]
    return path


def test_what_a_row_holds_follows_it():
    forest, parent = plant(200, 1)
    for row in range(0, 400, 2):
        place = forest.place[row]
        held = {int(r) for r in forest.rows[place : forest.end[place]]}
        assert held == {r for r in range(0, 400, 2) if row in climb_path(parent, r)}
    assert forest.place[1] == NONE


def test_the_innermost_row_around_two():
    forest, parent = plant(120, 2)
    rows = np.array([(a, b) for a in range(0, 240, 2) for b in range(0, 240, 6)])
    common = forest.find_common(forest.place[rows[:, 0]], forest.place[rows[:, 1]])
    for (a, b), found in zip(rows.tolist(), common.tolist(), strict=True):
        around_b = climb_path(parent, b)
        expected = next((row for row in climb_path(parent, a) if row in around_b), NONE)
        assert (int(forest.rows[found]) if found != NONE else NONE) == expected
    assert forest.find_common(np.array([NONE, 3]), np.array([4, NONE])).tolist() == [NONE, NONE]


def test_sums_of_rows_and_all_they_hold():
    forest, parent = plant(150, 3)
    rng = np.random.default_rng(0)
    rows = 2 * rng.integers(0, 150, 300)
    columns, values = rng.integers(0, 3, 300), rng.random(300)
    found = dict(forest.sum_upwards([(forest.place[rows], columns, values), (forest.place[rows], 3, 1.0)], 4))
    for row in range(0, 300, 2):
        inside = [i for i in range(300) if row in climb_path(parent, int(rows[i]))]
        sums = found.get(int(forest.place[row]))
        if not inside:
            assert sums is None
            continue
        expected = [sum(values[i] for i in inside if columns[i] == c) for c in range(3)]
        assert np.allclose(sums, [*expected, len(inside)])


def test_an_empty_forest_has_no_sums():
    forest = Forest(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert list(forest.sum_upwards([(np.array([NONE]), 0, 1.0)], 1)) == []


def test_a_deep_chain_is_numbered_once():
    rows = np.arange(50_000)
    forest = Forest(rows, rows - 1)
    assert forest.find_common(np.array([49_999]), np.array([20_000])).tolist() == [20_000]
    assert sum(1 for _ in forest.sum_upwards([(np.array([49_999]), 0, 1.0)], 1)) == 50_000
