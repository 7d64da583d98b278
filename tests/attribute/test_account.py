"""The joules of a run without kernels: passes that overlap or nest, and the errors that they share."""

from __future__ import annotations

import math

import pytest

from tessera.attribute.account import account_run, account_samples, account_trace
from tessera.joules import DomainSamples
from tessera.record import APART
from tessera.report.energy import idle_row
from tessera.schema import Domain, Hold
from tessera.timeline import Builder, Timeline
from tessera.trace import PowerTrace

S = 1_000_000_000
MS = 1_000_000
T0 = 1_790_000_000 * S


def power(gain_error: float = 0.0, name: str = "gpu0") -> PowerTrace:
    """A steady 100 W for ten seconds."""
    domain = Domain(name=name, source="script", resolution_s=0.01, basis="modelled", gain_error=gain_error)
    times = range(T0, T0 + 10 * S + 1, 10 * MS)
    return PowerTrace({name: DomainSamples.of(domain, times, [100.0] * len(times))}, start_ns=T0, end_ns=T0 + 10 * S)


def regions(*passes: tuple[str, float, float, int], value: float = math.nan) -> Timeline:
    """Regions by name, start, end and thread."""
    build = Builder()
    for name, start_s, end_s, thread in passes:
        build.add("region", name, T0 + round(start_s * S), T0 + round(end_s * S), thread=thread, value=value)
    return build.build()


def test_passes_of_several_threads_count_each_moment_once() -> None:
    table = account_samples(regions(*(("worker", 1.0 + i, 7.0 + i, i) for i in range(4)), ("alone", 0, 1, 0)), power())
    rows = {r.name: r for r in table.regions}
    assert (rows["worker"].calls, rows["worker"].overlaps) == (4, True)
    assert rows["worker"].energy_j == pytest.approx(900.0) and rows["worker"].share <= 1.0
    assert rows["worker"].wall_s == pytest.approx(9.0)
    assert not rows["alone"].overlaps
    assert [note for note in table.notes if "worker" in note and "overlap" in note and "alone" not in note]


def test_tasks_of_one_thread_are_a_call_each_and_nested_passes_are_none() -> None:
    inside = (("a", 1.0, 6.0, 1), ("a", 2.0, 4.0, 1))
    (task,) = account_samples(regions(*inside, value=APART), power()).regions
    (nested,) = account_samples(regions(*inside), power()).regions
    assert (task.calls, task.overlaps) == (2, True)
    assert (nested.calls, nested.overlaps) == (1, False)
    assert task.energy_j == nested.energy_j == pytest.approx(500.0)


def test_the_idle_time_of_a_host_is_given_to_overlapping_passes_once() -> None:
    build = Builder()
    for thread in range(4):
        build.add("region", "worker", T0 + S, T0 + 9 * S, thread=thread)
    build.add("op", "aten::mm", T0 + 4 * S, T0 + 5 * S, thread=1)
    table = account_run(build.build(), power(name="cpu0"), [(T0, T0 + 10 * S)])
    (row,) = table.regions
    assert (row.calls, row.overlaps) == (4, True)
    assert row.energy_j == pytest.approx(800.0) and row.wall_s == pytest.approx(8.0)
    assert any("worker" in note and "overlap" in note for note in table.notes)


def test_the_error_of_the_level_is_shared_by_all_passes() -> None:
    (row,) = account_samples(regions(*(("load", i, i + 0.5, 1) for i in range(9))), power(0.81)).regions
    assert row.error_j == pytest.approx(0.81 * row.energy_j, rel=1e-3)


def two_ranks(late_s: float = 0.0) -> tuple[Timeline, PowerTrace]:
    """Ten steps of one second on two boards of 100 W; the ranks end every step late in turns."""
    build = Builder()
    for rank in range(2):
        edges = [i + late_s * ((i + rank) % 2) * (0 < i < 10) for i in range(11)]
        for step in range(10):
            start_ns, end_ns = (T0 + round(edge * S) for edge in edges[step : step + 2])
            build.add("region", f"ProfilerStep#{step}", start_ns, end_ns, rank=rank)
            launch = {"correlation": 2 * step + rank + 1, "rank": rank}
            build.add("runtime", "cudaLaunchKernel", start_ns + 100 * MS, start_ns + 101 * MS, **launch)
            build.add("kernel", "gemm", start_ns + 200 * MS, start_ns + 600 * MS, device=rank, stream=7, **launch)
    columns = {**power(name="gpu0").columns, **power(name="gpu1").columns}
    return build.build(), PowerTrace(columns, start_ns=T0, end_ns=T0 + 10 * S)


def test_ranks_of_a_trace_take_a_step_together() -> None:
    """As those of a merged run do: two boards of 100 W spend 200 J in a second."""
    timeline, both = two_ranks()
    for table in (account_trace(timeline, both), account_run(timeline, both, [(T0, T0 + 10 * S)])):
        assert [s.name for s in table.steps] == [f"ProfilerStep#{i}" for i in range(10)]
        middle = table.steps[4]
        assert middle.energy_j == pytest.approx(200.0, rel=0.02) and middle.devices == 2
        assert sum(s.energy_j for s in table.steps) == pytest.approx(table.energy_j, rel=0.1)


def test_steps_of_ranks_that_are_late_in_turns_do_not_overlap() -> None:
    timeline, both = two_ranks(late_s=0.2)
    table = account_run(timeline, both, [(T0, T0 + 10 * S)])
    assert sum(s.wall_s or 0.0 for s in table.steps) == pytest.approx(10.0)


def test_idle_seconds_are_those_of_all_boards_that_the_samples_saw() -> None:
    """Two boards, each busy for 4 s and idle for 6 s; then with a hole of 2 s in the samples of one."""
    timeline, both = two_ranks()
    assert account_trace(timeline, both).idle_s == pytest.approx(12.0, rel=0.01)
    seen = both.columns["gpu0"]
    times = [t for t in seen.times_ns.tolist() if not 4 * S < t - T0 < 6 * S]
    watts = [math.nan if t - T0 == 6 * S else 100.0 for t in times]  # the power since the sample before is not known
    columns = {**both.columns, "gpu0": DomainSamples.of(seen.domain, times, watts)}
    table = account_trace(timeline, PowerTrace(columns, start_ns=T0, end_ns=T0 + 10 * S))
    assert table.idle_s == pytest.approx(10.8, rel=0.02)
    row = idle_row(table)
    assert row is not None and row.power_w == pytest.approx(100.0, rel=0.02)


def test_seconds_outside_the_trace_are_those_whose_joules_are_known() -> None:
    """A sensor of 0.5 s delay tells nothing of the log's last half second."""
    late = Domain(name="gpu0", source="script", resolution_s=0.01, lag_s=0.5, hold=Hold.LINEAR)
    times = range(T0 - 2 * S, T0 + 13 * S, 10 * MS)
    column = DomainSamples.of(late, times, [100.0] * len(times))
    timeline, both = two_ranks()
    log = PowerTrace({**both.columns, "gpu0": column}, start_ns=times[0], end_ns=times[-1])
    table = account_trace(timeline, log)
    assert table.untraced_s == pytest.approx(4.49, abs=0.02)
    assert table.untraced_j == pytest.approx(100.0 * table.untraced_s, rel=0.01)


@pytest.mark.parametrize("offset_ms", [0, 4, 9, 14])
def test_a_sample_that_saw_more_than_a_short_trace_gives_it_its_part_only(offset_ms: int) -> None:
    """Two samples of 20 ms in 40 ms of work, at 100 W before, in and after it: no step draws twice as much."""
    build = Builder()
    for step in range(5):
        begin = T0 + step * 8 * MS
        build.add("region", f"ProfilerStep#{step}", begin, begin + 8 * MS)
        for start_ms, name in ((0, "aten::mm"), (4, "aten::addmm")):
            build.add("op", name, begin + start_ms * MS, begin + (start_ms + 3) * MS)
    domain = Domain(name="cpu0", source="csv", resolution_s=0.02)
    times = range(T0 - S + offset_ms * MS, T0 + S, 20 * MS)
    column = DomainSamples.of(domain, times, [100.0] * len(times))
    table = account_trace(build.build(), PowerTrace({"cpu0": column}, start_ns=times[0], end_ns=times[-1]))
    assert len(table.steps) == 5
    for row in (*table.steps, *table.ops):
        assert row.power_w == pytest.approx(100.0, abs=row.error_j / row.spent_s + 1e-6), row.name
    assert [row.power_w for row in table.steps] == pytest.approx([100.0] * 5, rel=0.1)


def test_a_short_trace_between_idle_times_has_no_kernel_at_idle_power() -> None:
    build = Builder()
    build.add("runtime", "cudaLaunchKernel", T0, T0 + MS, correlation=1)
    build.add("kernel", "gemm", T0, T0 + 30 * MS, device=0, stream=7, correlation=1)
    build.add("runtime", "cudaLaunchKernel", T0 + MS, T0 + 2 * MS, correlation=2)
    build.add("kernel", "relu", T0 + 30 * MS, T0 + 40 * MS, device=0, stream=7, correlation=2)
    domain = Domain(name="gpu0", source="csv", resolution_s=0.02, lag_s=0.01)
    times = range(T0 - S + 10 * MS, T0 + S, 20 * MS)

    def mean_w(end_ns: int) -> float:
        busy_ms = (min(end_ns, T0 + 40 * MS) - max(end_ns - 20 * MS, T0)) / MS
        return 100.0 + 500.0 * max(busy_ms, 0.0) / 20.0

    column = DomainSamples.of(domain, times, [mean_w(t) for t in times])
    table = account_trace(build.build(), PowerTrace({"gpu0": column}, start_ns=times[0], end_ns=times[-1]))
    assert {row.name for row in table.kernels} == {"gemm", "relu"}
    assert min(row.power_w or 0.0 for row in table.kernels) > 200.0


def test_power_of_no_host_says_how_to_name_a_host() -> None:
    build = Builder()
    build.add("op", "aten::mm", T0, T0 + S, thread=1)
    (note,) = [n for n in account_trace(build.build(), power(name="gpu0")).notes if "no kernel" in n]
    assert "column domain with cpu0" in note
