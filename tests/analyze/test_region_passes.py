"""The passes of regions: which of them are inside another of their name, however deep they are nested."""

from __future__ import annotations

import random
import time

from tessera.analyze.devices import _name_region, region_passes, region_paths
from tessera.timeline import Builder, Timeline

T0 = 1_790_000_000_000_000_000


def nest(depth: int) -> Timeline:
    """Steps inside steps, and a kernel inside each of the innermost ones."""
    timeline = Builder()
    for i in range(depth):
        timeline.add("region", f"ProfilerStep#{i}", T0 + i, T0 + 4 * depth - i, thread=1)
    for i in range(100):
        timeline.add("kernel", "k", T0 + depth + i, T0 + depth + i + 1, device=0, stream=7)
    return timeline.build()


def random_nest(rng: random.Random) -> Timeline:
    timeline = Builder()

    def fill(start: int, end: int, depth: int) -> None:
        edges = sorted(rng.sample(range(start, end), min(4, end - start)))
        for left, right in zip(edges[::2], edges[1::2], strict=False):
            timeline.add("region", rng.choice("abc"), T0 + left, T0 + right, thread=1)
            if depth and right - left > 6:
                fill(left + 1, right - 1, depth - 1)

    fill(0, 1000, 5)
    return timeline.build()


def test_a_pass_inside_one_of_its_name_is_not_another() -> None:
    rng = random.Random(5)
    for _ in range(40):
        timeline = random_nest(rng)
        expected: dict[str, list[int]] = {}
        for row in timeline.rows("region").tolist():
            *around, name = (_name_region(timeline, r, ()) for r in timeline.linked.path(row))
            if name not in around:
                expected.setdefault(name, []).append(row)
        assert region_passes(timeline) == expected


def test_thousands_of_steps_inside_each_other_take_no_minutes() -> None:
    timeline = nest(8000)
    timeline.linked  # noqa: B018  (linked before the clock starts)
    began_s = time.process_time()
    assert len(region_passes(timeline)["ProfilerStep"]) == 1
    _, paths = region_paths(timeline, timeline.rows("kernel"))
    assert paths == [("ProfilerStep",)]
    assert time.process_time() - began_s < 20.0  # before: minutes
