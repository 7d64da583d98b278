"""Classes of what ran: how many the solver is given, and what becomes of the rare ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.attribute.activity import MOST_CLASSES, activity, merge_rare_classes
from tessera.timeline.columns import Builder, Launch, Timeline


def kernels(count: int, names: int, launches: int) -> Timeline:
    """Kernels one after the other, as a program whose shapes change with its data runs them."""
    rng = np.random.default_rng(0)
    builder = Builder()
    for i in range(names):
        builder.intern(f"kernel_{i}")
    for i in range(launches):
        builder.intern_launch(Launch(grid=(i + 1, 1, 1), block=(128, 1, 1)))
    start = np.cumsum(np.full(count, 10_000))
    builder.extend(
        {
            "kind": np.zeros(count),
            "name": rng.integers(0, names, count),
            "start_ns": start,
            "end_ns": start + 9_000,
            "device": np.zeros(count),
            "launch": rng.integers(0, launches, count),
        },
        count,
    )
    return builder.build()


def test_a_program_of_changing_shapes_has_no_more_classes_than_the_solver_can_take() -> None:
    timeline = kernels(20_000, 50, 300)
    ran = activity(timeline, timeline.device_rows, timeline.linked)
    assert 50 < ran.classes <= MOST_CLASSES
    assert ran.busy_s > 0.17
    # A class has kernels of one name only: rare launches of a kernel join each other, not another kernel.
    for c in range(ran.classes):
        assert len(np.unique(timeline["name"][ran.rows[ran.cls == c]])) == 1


def test_a_program_of_too_many_kernel_names_joins_the_rare_ones_by_kind() -> None:
    timeline = kernels(5_000, 3_000, 1)
    ran = activity(timeline, timeline.device_rows, timeline.linked)
    assert ran.classes <= MOST_CLASSES


@given(st.lists(st.integers(0, 2_000), max_size=50), st.integers(1, 50))
def test_few_classes_stay_as_they_are(values: list[int], coarse: int) -> None:
    cls = np.array(values, np.int64)
    first, number = merge_rare_classes(cls, np.ones(len(cls)), cls % coarse)
    assert np.array_equal(cls[first][number], cls)
