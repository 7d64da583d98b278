"""The passes of regions: which of them are inside another of their name, however deep they are nested."""

from __future__ import annotations

import random

from calls import list_calls
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


def count_calls(depth: int) -> int:
    timeline = nest(depth)
    timeline.linked  # noqa: B018  (linked before the calls are counted)

    def analyze() -> None:
        assert len(region_passes(timeline)["ProfilerStep"]) == 1
        _, paths = region_paths(timeline, timeline.rows("kernel"))
        assert paths == [("ProfilerStep",)]

    return len(list_calls(analyze))


def test_steps_inside_each_other_take_time_in_proportion_to_their_depth() -> None:
    """Walked from each of them outward, thousands took minutes."""
    assert count_calls(800) < 2.1 * count_calls(400)


def test_a_step_begun_by_a_hook_is_not_inside_an_optimizer_that_ends_late() -> None:
    ms, timeline = 1_000_000, Builder()
    begun = [0, 10 * ms, 30 * ms]  # the hook of the first step's end waits 15 ms for a core
    for i, (start, end) in enumerate(zip(begun, [*begun[1:], 40 * ms], strict=True)):
        timeline.add("region", f"step_{i}", T0 + start, T0 + end, thread=1)
        late = 15 * ms if i == 0 else 50_000
        timeline.add("region", "Optimizer.step#SGD.step", T0 + end - 2 * ms, T0 + end + late, thread=1)
    timeline.add("op", "aten::mm", T0 + 26 * ms, T0 + 27 * ms, thread=1)
    made = timeline.build()
    mm = int(made.rows("op")[0])
    assert [made.name(row) for row in made.linked.path(made.linked.region[mm])] == ["step_1"]
    assert len(region_passes(made)["Optimizer.step#SGD.step"]) == 3
    assert [made.name(made.linked.parent[row]) for row in region_passes(made)["Optimizer.step#SGD.step"]] == [
        f"step_{i}" for i in range(3)
    ]
