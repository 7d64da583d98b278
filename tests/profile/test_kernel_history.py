"""Kernels of a long run: old ones become sums, and counts, seconds and joules stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.attribute.account import account_run
from tessera.joules import DomainSamples
from tessera.profile import kernel_history
from tessera.profile.kernel_history import MINUTE_NS, SECOND_NS, SUMMED, sum_kernels
from tessera.profile.runfile import RunFile, RunWriter
from tessera.record import CODE
from tessera.schema import Domain
from tessera.timeline.columns import NONE, Builder, Timeline
from tessera.trace import PowerTrace

BEGIN_NS = 1_790_000_000_000_000_000
KERNEL = st.tuples(st.integers(0, 5 * SECOND_NS), st.integers(1, 10**6), st.integers(0, 3), st.integers(0, 1))


def make_kernels(start_ns: int, count: int, *, names: int = 7, period_ns: int = 10_000) -> Timeline:
    """Kernels one after the other, every third on another stream."""
    builder = Builder()
    number = np.arange(count)
    ids = np.array([builder.intern(f"kernel_{i}") for i in range(names)])
    columns = {
        "kind": np.full(count, CODE["kernel"]),
        "name": ids[number % names],
        "start_ns": start_ns + number * period_ns,
        "end_ns": start_ns + number * period_ns + 2_000 + 500 * (number % names),
        "device": np.zeros(count, int),
        "stream": np.where(number % 3, 7, 9),
    }
    builder.extend(columns, count)
    return builder.build()


@given(st.lists(KERNEL, max_size=60), st.sampled_from([SECOND_NS, MINUTE_NS]))
def test_sums_have_the_counts_and_nanoseconds_of_their_kernels(
    kernels: list[tuple[int, int, int, int]], period_ns: int
) -> None:
    rows = np.array(kernels, np.int64).reshape(-1, 4)
    columns = {c: np.full(len(rows), NONE, np.int64) for c in SUMMED}
    columns |= {"kind": np.full(len(rows), CODE["kernel"]), "device": np.zeros(len(rows), np.int64)}
    columns |= {"start_ns": BEGIN_NS + rows[:, 0], "end_ns": BEGIN_NS + rows[:, 0] + rows[:, 1]}
    columns |= {"name": rows[:, 2], "stream": rows[:, 3]}
    sums = sum_kernels(columns, period_ns)
    expected: dict[tuple[int, ...], list[int]] = {}
    for start, length, name, stream in kernels:
        total = expected.setdefault(((BEGIN_NS + start) // period_ns, name, stream), [0, 0])
        total[0] += 1
        total[1] += length
    length_ns = sums["end_ns"] - sums["start_ns"]
    fields = (sums["start_ns"] // period_ns, sums["name"], sums["stream"], sums["count"], length_ns)
    found = {(int(p), int(n), int(s)): [int(c), int(t)] for p, n, s, c, t in zip(*fields, strict=True)}
    assert found == expected
    for stream in (0, 1):  # on a stream, one after the other
        own = np.flatnonzero(sums["stream"] == stream)
        own = own[np.argsort(sums["start_ns"][own], kind="stable")]
        assert (sums["start_ns"][own][1:] >= sums["end_ns"][own][:-1]).all()
    assert (sums["bytes"] == NONE).all()


def test_old_kernels_of_a_long_run_become_sums_and_the_file_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_history, "MOST_EVENTS", 3_000)
    monkeypatch.setattr(kernel_history, "MOST_SUMS", 600)
    path, seconds, rate = tmp_path / "a.tessera", 1_500, 100
    with RunWriter(path) as writer:
        calls = Builder()
        calls.add("runtime", "cudaLaunchKernel", BEGIN_NS, BEGIN_NS + 10, thread=1, correlation=1)
        calls.add("kernel", "first", BEGIN_NS, BEGIN_NS + 10, device=0, stream=7, correlation=1)
        writer.add_timeline(calls.build())
        for second in range(0, seconds, 2):
            part = make_kernels(BEGIN_NS + second * SECOND_NS, 2 * rate, period_ns=SECOND_NS // rate)
            writer.add_timeline(part, may_shrink=True)
            if second % 100 == 0:
                writer.flush()
    with RunFile(path) as run:
        timeline = run.timeline()
    kernels = timeline.rows("kernel")
    counts = np.where(timeline["count"] == NONE, 1, timeline["count"])[kernels]
    assert counts.sum() == seconds * rate + 1
    assert len(kernels) < 3_000 + 2_500 + 600 + 2_000 < seconds * rate / 10
    newest = kernels[timeline["start_ns"][kernels] > BEGIN_NS + (seconds - 20) * SECOND_NS]
    assert (timeline["count"][newest] == NONE).all()
    busy_ns = (timeline["end_ns"] - timeline["start_ns"])[kernels].sum()
    truth = make_kernels(BEGIN_NS, 2 * rate)
    assert busy_ns == seconds // 2 * int((truth["end_ns"] - truth["start_ns"]).sum()) + 10
    assert len(timeline.rows("runtime")) == 1  # what teaches operators is kept
    minutes = kernels[timeline["count"][kernels] > 2 * rate]
    assert len(minutes) and set((timeline["start_ns"][minutes] // MINUTE_NS).tolist())


def test_a_table_counts_what_a_sum_stands_for() -> None:
    events = make_kernels(BEGIN_NS, 2_000, period_ns=1_000_000)
    sums = sum_kernels({c: events.columns[c] for c in SUMMED}, SECOND_NS)
    builder = Builder()
    for name in events.names:
        builder.intern(name)
    builder.extend(sums, len(sums["kind"]))
    window = (BEGIN_NS, BEGIN_NS + 2 * SECOND_NS)
    times = np.arange(window[0] - SECOND_NS, window[1] + SECOND_NS, SECOND_NS // 50)
    samples = DomainSamples.of(Domain(name="gpu0", source="test", resolution_s=0.02), times, np.full(len(times), 300.0))
    power = PowerTrace({"gpu0": samples}, start_ns=window[0], end_ns=window[1])
    one, many = (account_run(timeline, power, [window]) for timeline in (events, builder.build()))
    assert {r.name: r.calls for r in one.kernels} == {r.name: r.calls for r in many.kernels}
    assert sum(r.calls for r in many.kernels) == 2_000
    assert one.energy_j == pytest.approx(many.energy_j, rel=1e-9)
    assert one.busy_s == pytest.approx(many.busy_s, rel=0.01)
