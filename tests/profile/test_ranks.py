"""Several ranks on one clock: exchanges, matched collectives, merged files. Two real processes where it matters."""

from __future__ import annotations

import json
import math
import random
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gloo_ranks import GlooRanks
from tessera import profile
from tessera.analyze import job_summary
from tessera.analyze.job_summary import summarize_job
from tessera.analyze.run_energy import outside, whole_of
from tessera.attribute.table import EnergyTable
from tessera.cli.merge import command
from tessera.errors import ArgumentError, MeasurementError, RecordingError
from tessera.notes import Note
from tessera.profile.ranks import ClockReading, Offset, align, exchange, merge, settle
from tessera.profile.ranks.align import END_BIAS_NS, fit, line_up, lines
from tessera.profile.ranks.clocks import read
from tessera.profile.ranks.collectives import Meeting, summarize
from tessera.profile.ranks.merge import STRIDE, select_rank
from tessera.profile.ranks.sequences import CollectiveSequence
from tessera.profile.runfile import RunFile, RunWriter
from tessera.profile.runfile_checksum import unseal
from tessera.profile.runfile_store import Store
from tessera.report.job import job_notes
from tessera.schema import Domain, Hold, Telemetry
from tessera.timeline import Builder, Launch, Timeline

T0 = 1_790_000_000_000_000_000
MS = 1_000_000


# -- Exchanges ------------------------------------------------------------------------------------------------------


def ping(offset_ns: int, delays_us: Sequence[tuple[float, float]]) -> list[tuple[int, int, int, int]]:
    """Rounds with known ways there and back; rank 0's clock is `offset_ns` ahead of ours."""
    out, now = [], T0
    for there, back in delays_us:
        received = now + round(there * 1e3) + offset_ns
        out.append((now, received, received + 500, now + round((there + back) * 1e3) + 500))
        now += 1 * MS
    return out


DELAY = st.floats(1.0, 5000.0)


@given(st.integers(-(10**17), 10**17), st.lists(st.tuples(DELAY, DELAY), min_size=1, max_size=40))
def test_the_true_offset_is_always_within_the_error(offset_ns: int, delays: list[tuple[float, float]]) -> None:
    found = read(1, ping(offset_ns, delays))
    assert abs(found.offset_ns - offset_ns) <= found.error_ns + 1 + abs(offset_ns) * 2e-16
    quickest = min(a + b for a, b in delays) * 1e3
    assert found.error_ns <= quickest / 2 + 1


def test_a_step_of_the_clock_during_the_exchange_widens_the_error() -> None:
    rounds = ping(0, [(20.0, 20.0)] * 10) + ping(3 * MS, [(20.0, 20.0)] * 10)
    found = read(1, rounds)
    assert found.error_ns >= 1 * MS


def reading(offset_ns: float, at_ns: int, error_ns: float = 2000.0) -> ClockReading:
    return ClockReading(rank=3, offset_ns=offset_ns, error_ns=error_ns, at_ns=at_ns)


def test_two_exchanges_give_offset_and_drift() -> None:
    hour = 3600 * 10**9
    offset = settle(reading(50_000.0, T0), reading(50_000.0 + 7.2e7, T0 + hour))
    assert offset.drift_ppm == pytest.approx(20.0)
    assert offset.apply(np.array([T0, T0 + hour]))[1] == T0 + hour + 50_000 + 72_000_000
    assert any("drifts by +20 ppm" in n for n in offset.notes)
    steady = settle(reading(1000.0, T0), reading(2500.0, T0 + hour))
    assert steady.drift_ppm == 0.0 and steady.error_ns == pytest.approx(2750.0) and not steady.notes
    alone = settle(reading(2.5e6, T0))
    assert "2.5 ms behind" in alone.notes[0]
    assert "is 100 s ahead" in settle(reading(-100e9, T0)).notes[0]
    assert Offset.from_dict(json.loads(json.dumps(offset.to_dict())) | {"later": 1}) == offset


def test_without_other_ranks_an_exchange_says_what_to_do() -> None:
    with pytest.raises(MeasurementError) as caught:
        exchange()
    assert "init_process_group" in str(caught.value)


AHEAD_NS = 7 * 10**9
"""Of the second rank's clock: far more than any exchange takes on a busy machine."""


def _worker(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    def clock() -> int:
        return time.time_ns() + AHEAD_NS * rank

    start = exchange(clock_ns=clock, by_host=False)
    builder = Builder()
    launch = builder.intern_launch(Launch(collective_type="all_reduce", collective_bytes=64, group="0", group_size=2))
    tensor = torch.ones(16)
    pauses = random.Random(0)  # uneven, and longer than a busy machine keeps a process waiting
    for step in range(20):
        time.sleep(pauses.uniform(0.0, 0.12) + (0.004 if rank == step % 2 else 0.001))
        begun = clock()
        dist.all_reduce(tensor)
        dist.barrier()  # gloo's ranks leave an all_reduce when their own part is done: a barrier makes the ends meet
        builder.add("collective", "allreduce", begun, clock(), device=0, stream=1, launch=launch)
    end = exchange(clock_ns=clock, by_host=False)
    shared = exchange()
    with RunWriter(Path(folder) / f"run-rank{rank}.tessera") as run:
        run.add_timeline(builder.build())
        run.set("rank", rank)
        run.set("clock", settle(start, end).to_dict())
        run.set("shared", [shared.offset_ns, shared.error_ns])


def _session_worker(rank: int, folder: str) -> None:
    import torch.distributed as dist

    with profile.session(["cpu"], path=Path(folder) / "job.tessera", align_clocks=True):
        dist.barrier()


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(2) as started:
        yield started


def test_a_session_compares_its_clock_with_the_other_ranks(tmp_path: Path, ranks: GlooRanks) -> None:
    ranks.run(_session_worker, str(tmp_path))
    clock = Offset.from_dict(RunFile(tmp_path / "job.rank1.tessera").get("clock"))
    assert clock.rank == 1 and clock.source == "exchange" and clock.offset_ns == 0.0, "one host has one clock"


def test_two_processes_find_each_others_clocks(tmp_path: Path, ranks: GlooRanks) -> None:
    ranks.run(_worker, str(tmp_path))
    clock = Offset.from_dict(RunFile(tmp_path / "run-rank1.tessera").get("clock"))
    # The error is a bound, however busy this machine is.
    assert clock.source == "exchange" and clock.error_ns is not None
    assert abs(clock.offset_ns + AHEAD_NS) <= clock.error_ns < 0.3 * AHEAD_NS
    assert any("ahead of" in n for n in clock.notes)
    assert RunFile(tmp_path / "run-rank1.tessera").get("shared") == [0.0, 0.0]  # one host has one clock
    move_to_host(tmp_path / "run-rank1.tessera", "another")
    merged = merge(tmp_path)
    assert [s.rank for s in merged.files] == [0, 1]
    assert merged.offsets[1].offset_ns == pytest.approx(-AHEAD_NS, abs=0.3 * AHEAD_NS)
    assert merged.collectives["count"] == 20
    ends = [merged.timeline["end_ns"][list(m.rows)] for m in merged.meetings]
    assert np.median([abs(int(e[0] - e[1])) for e in ends]) < 0.3 * AHEAD_NS  # AHEAD_NS before


# -- Matching -------------------------------------------------------------------------------------------------------


def rank_timeline(
    rank: int, *, offset_ns: int = 0, drift_ppm: float = 0.0, noise_us: float = 3.0, steps: int = 60, seed: int = 1,
    skip: int = 0, late_us: float = 0.0, outliers: int = 0, group: str = "0", even: bool = False,
) -> Timeline:  # fmt: skip
    """Training steps of one rank by its own clock, `offset_ns` behind the truth and slow by `drift_ppm`."""
    shared, own = np.random.default_rng(seed), np.random.default_rng(1000 + 7 * rank + seed)
    b = Builder()
    now = T0
    odd = set(own.choice(steps, outliers, replace=False).tolist()) if outliers else set()

    def local(t: float) -> int:
        return round(t - offset_ns - (t - T0) * drift_ppm * 1e-6 - 0.0)

    for step in range(steps):
        now += 50 * MS if even else int(shared.uniform(40, 60) * MS)
        for i, size in enumerate((1 << 20, 1 << 22, 1 << 20)):
            end = now + (i + 1) * 4 * MS
            jitter = own.normal(0.0, noise_us * 1e3) + (20 * MS if step in odd and i == 1 else 0)
            launch = b.intern_launch(
                Launch(collective_type="all_reduce", collective_bytes=size, group=group, group_size=2)
            )
            if step >= skip:
                start = end - 2 * MS + (late_us * 1e3)
                b.add("kernel", "gemm", local(end - 3 * MS), local(end - 1 * MS), device=0, stream=7, correlation=3)
                row = {"device": 0, "stream": 20, "launch": launch, "bytes": size, "correlation": 4}
                b.add("collective", "ncclAllReduce", local(start), local(end + jitter), **row)
    t = b.build()
    t.rank = rank
    return t


@settings(max_examples=25, deadline=None)
@given(
    st.integers(-(10**15), 10**15), st.floats(-80.0, 80.0), st.floats(0.5, 30.0), st.integers(0, 6), st.integers(0, 99)
)
def test_an_injected_offset_and_drift_are_recovered(
    offset_ns: int, drift_ppm: float, noise_us: float, outliers: int, seed: int
) -> None:
    truth = rank_timeline(0, noise_us=noise_us, seed=seed)
    other = rank_timeline(1, offset_ns=offset_ns, drift_ppm=drift_ppm, noise_us=noise_us, outliers=outliers, seed=seed)
    found = align([truth, other])[1]
    times = other["end_ns"][other.rows("collective")]
    right = truth["end_ns"][truth.rows("collective")]
    apart = found.apply(times[::30]) - right[::30]
    assert found.error_ns is not None and found.source == "collectives" and found.matched == 180
    # Twice the 90% half-width: one example in a thousand may lie beyond.
    assert np.median(np.abs(apart)) <= 2.0 * found.error_ns + 2e3 * noise_us
    # Drift and slope differ in whose second they count: a second-order difference.
    assert found.drift_ppm == pytest.approx(drift_ppm, abs=2.0 * noise_us)
    assert found.error_ns < END_BIAS_NS + 2e3 * noise_us


def test_intervals_of_the_fit_hold_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    times = T0 + np.sort(rng.integers(0, 30 * 10**9, 200))
    inside = 0
    for _ in range(200):
        noise = rng.normal(0.0, 50_000.0, 200)
        line = fit(times, times + 1_000_000 + np.rint(noise).astype(np.int64))
        inside += abs(line.offset_ns + line.drift * (times[0] - line.at_ns) - 1e6) <= line.error_ns
    assert inside >= 0.85 * 200


def test_a_clock_that_is_off_is_said() -> None:
    offsets = align([rank_timeline(0), rank_timeline(1, offset_ns=4 * MS), rank_timeline(2, drift_ppm=30.0)])
    assert offsets[0].source == "reference" and offsets[0].offset_ns == 0.0
    assert "rank 1's host clock is 4 ms behind" in offsets[1].notes[0]
    assert "rank 2's host clock drifts by +30" in offsets[2].notes[0]
    assert not align([rank_timeline(0), rank_timeline(1, offset_ns=200_000)])[1].notes


def test_recordings_that_begin_at_different_steps_are_laid_against_each_other() -> None:
    a, b = rank_timeline(0), rank_timeline(1, offset_ns=-3 * MS, skip=7)
    numbers: dict = {}
    (one,), (two,) = (list(lines(t, numbers).values()) for t in (a, b))
    assert line_up(one, two) == (21, 1)
    assert line_up(two, one) == (-21, 1)
    assert align([a, b])[1].offset_ns == pytest.approx(-3 * MS, abs=20_000)


def test_equal_sequences_are_not_shifted_where_ends_scatter_as_much_as_steps() -> None:
    """As on a machine with twenty busy processes: by spread alone, 83 of 200 were left where they are."""
    kept = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        steps = np.cumsum(rng.uniform(3e6, 9e6, 20))
        ends = (np.sort(steps + rng.exponential(5e6, 20)).astype(np.int64) for _ in range(2))
        same = np.zeros(20, np.int64)
        one, two = (CollectiveSequence(np.arange(20), same, same == 0, e - 1000, e, None) for e in ends)
        found = line_up(one, two)
        kept += found is not None and found[0] == 0
    assert kept >= 165


def test_even_steps_are_ambiguous_and_it_is_said() -> None:
    found = align([rank_timeline(0, even=True, steps=20), rank_timeline(1, even=True, steps=20, skip=2)])[1]
    assert found.offset_ns == pytest.approx(0.0, abs=20_000)
    assert any("ways" in n for n in found.notes)


def test_ranks_without_anything_in_common_are_left_alone() -> None:
    found = align([rank_timeline(0, group="a"), rank_timeline(1, group="b", offset_ns=MS)])[1]
    assert found.error_ns is None and found.offset_ns == 0.0 and "shares no collective" in found.notes[0]
    with pytest.raises(ArgumentError):
        align([])


def test_a_rank_is_reached_over_another() -> None:
    middle, far = rank_timeline(1, offset_ns=2 * MS), rank_timeline(2, offset_ns=5 * MS, group="b", seed=4)
    more = rank_timeline(1, offset_ns=2 * MS, group="b", seed=4)
    both = Builder()
    for t in (middle, more):
        for row in t.rows("collective"):
            launch = both.intern_launch(t.launches[int(t["launch"][row])])
            both.add("collective", "c", int(t["start_ns"][row]), int(t["end_ns"][row]), device=0, launch=launch)
    bridge = both.build()
    bridge.rank = 1
    found = align([rank_timeline(0), far, bridge])
    assert [o.rank for o in found] == [0, 2, 1]
    assert found[1].offset_ns == pytest.approx(5 * MS, abs=30_000)
    assert found[1].error_ns > found[2].error_ns


def test_groups_with_one_name_and_other_members_are_not_mixed() -> None:
    a, b = rank_timeline(0), rank_timeline(2, offset_ns=5 * MS)
    a.meta["distributedInfo"] = {"pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    b.meta["distributedInfo"] = {"pg_config": [{"pg_name": "0", "ranks": [2, 3]}]}
    assert align([a, b])[1].source == "none"


# -- Merging --------------------------------------------------------------------------------------------------------


def move_to_host(path: Path, host: str) -> Path:
    """Say that a run was recorded on another machine, which has a clock of its own."""
    unseal(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE about SET value = ? WHERE key IN ('host', 'boot')", (host,))
        db.commit()
    return path


def write_run(path: Path, timeline: Timeline, *, host: str = "", **facts: object) -> Path:
    with RunWriter(path) as run:
        run.add_timeline(timeline)
        for key, value in facts.items():
            run.set(key, value)
        domain = Domain(name="gpu0", source="test", resolution_s=0.02)
        times = np.arange(T0, T0 + 10**9, 20 * MS)
        run.add_samples(domain, times, np.full(len(times), 300.0))
        run.add_telemetry([Telemetry(time_ns=T0, domain="gpu0", temperature_c=40.0)], 0)
        run.add_stacks([(T0, 17, "main;step", 2)])
    return move_to_host(path, host) if host else path


def test_merging_onto_a_file_that_exists_names_the_option(tmp_path: Path) -> None:
    there = write_run(tmp_path / "m.tessera", rank_timeline(0))
    done = CliRunner().invoke(command, [str(tmp_path), "-o", str(there)])
    assert isinstance(done.exception, ArgumentError) and "--force overwrites it" in str(done.exception.fix)


def test_merged_rows_say_their_rank_and_stay_tied(tmp_path: Path) -> None:
    ranks = []
    for rank in range(3):
        t = rank_timeline(rank, offset_ns=rank * 3 * MS, late_us=500.0 if rank == 2 else 0.0)
        t.columns["parent"] = np.r_[-1, np.zeros(len(t) - 1, np.int64)]
        t.columns["thread"] = np.full(len(t), 9)
        t.extra = {1: {"tc_util_pct": 40.0}}
        t.energy_j = np.full(len(t), 0.5) if rank == 1 else None
        ranks.append(write_run(tmp_path / f"r{rank}.tessera", t, rank=rank, host=f"node{rank}"))
    merged = merge(ranks[::-1])
    t, n = merged.timeline, len(merged.timeline) // 3
    assert np.array_equal(t["rank"], np.repeat([0, 1, 2], n))
    assert t["parent"][n] == -1 and t["parent"][n + 1] == n
    assert set(t["thread"]) == {9, 9 + STRIDE, 9 + 2 * STRIDE}
    assert t.extra[n + 1]["tc_util_pct"] == 40.0
    assert np.isnan(t.energy_j[0]) and t.energy_j[n] == 0.5
    # Rank 2 starts 0.5 ms late every time; the others wait for it.
    assert len(merged.meetings) == 180
    meeting = merged.meetings[5]
    assert meeting.ranks == (0, 1, 2) and meeting.straggler == 2 and meeting.kind == "all_reduce"
    assert meeting.skew_s == pytest.approx(0.5e-3, abs=5e-5)
    assert meeting.wait_s == pytest.approx(1e-3, abs=1e-4)
    assert merged.collectives["stragglers"] == {2: {"times": 180, "wait_s": pytest.approx(0.18, rel=0.1)}}
    # A collective runs from -2 to 0 ms, its rank's gemm from -3 to -1, and bytes move from -1.5 on: 0.5 of 1.5 ms.
    assert t.extra[meeting.rows[0]]["collective_overlap_pct"] == pytest.approx(100 / 3, abs=3)
    one = select_rank(t, 1)
    assert len(one) == n and one.rank == 1 and one["parent"][1] == 0
    assert select_rank(merged.timeline, 1).extra[1]["tc_util_pct"] == 40.0
    with pytest.raises(ArgumentError, match="no rank 7"):
        select_rank(t, 7)


@pytest.mark.parametrize(
    ("codes", "first"), [([1, 1, 143], 1), ([0, 7, 0], 1), ([130, 130, 130], None), ([0, 0, 0], None)]
)
def test_the_rank_that_failed_first_is_named(tmp_path: Path, codes: list[int], first: int | None) -> None:
    ends_ns = [T0 + 3 * 10**9, T0 + 2 * 10**9, T0 + 10**9]  # the launcher's signals come last, whatever the clock says
    for rank, (code, end_ns) in enumerate(zip(codes, ends_ns, strict=True)):
        path = tmp_path / f"rank{rank}.tessera"
        write_run(path, rank_timeline(rank), rank=rank, start_ns=T0, end_ns=end_ns, returncode=code)
    job = summarize_job(merge(tmp_path))
    assert job is not None
    assert [row.rank for row in job.ranks if row.failed_first] == ([] if first is None else [first])
    assert ("rank 1 failed first" in job_notes(job)) == (codes == [1, 1, 143])


def test_a_merged_run_is_a_run(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"rank{r}.tessera", rank_timeline(r, offset_ns=r * 3 * MS), rank=r) for r in range(2)]
    with merge(paths).write(tmp_path / "merged.tessera") as run:
        t = run.timeline()
        assert set(t["rank"]) == {0, 1} and len(t) == 720
        assert run.get("collectives")["count"] == 180
        assert [r["rank"] for r in run.get("ranks")] == [0, 1]
        # Both ranks ran on this host and saw the same board: it is there once.
        assert list(run.domains) == ["gpu0"]
        assert run.power().energy_j == pytest.approx(300.0, rel=0.05)
        assert len(run.telemetry()) == 1 and len(run.stacks()) == 2
    with pytest.raises(RecordingError):
        merge(paths).write(tmp_path / "merged.tessera")
    merge(paths).write(tmp_path / "merged.tessera", replace=True).close()
    with pytest.raises(ArgumentError, match="one of the files"):
        merge(paths).write(paths[0], replace=True)


@pytest.mark.parametrize("stage", ["_open", "_begin"])
def test_a_full_disk_leaves_no_half_of_a_merged_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The next try was refused, because the file existed: full from the first page on, and after the tables."""
    monkeypatch.setattr("tessera.profile.runfile_write.LAST_TRY_S", 0.0)
    paths = [write_run(tmp_path / f"rank{rank}.tessera", rank_timeline(rank), rank=rank) for rank in range(2)]
    merged, target, real = merge(paths), tmp_path / "merged.tessera", getattr(Store, stage)

    def fill(store: Store, given: Any) -> Any:
        result = real(store, given)
        if stage == "_open":
            raise sqlite3.OperationalError("disk I/O error")  # what ENOSPC looks like to SQLite, then and later
        pages = store.db.execute("PRAGMA page_count").fetchone()[0]
        store.db.execute(f"PRAGMA max_page_count={pages}")
        return result

    with monkeypatch.context() as full:
        full.setattr(Store, stage, fill)
        with pytest.raises(RecordingError, match="cannot write") as caught:
            merged.write(target)
    assert "free space" in str(caught.value.fix)
    assert not list(tmp_path.glob("merged*"))
    merged.write(target).close()


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_joules_of_the_ranks_are_those_of_the_job(tmp_path: Path, hosts: int) -> None:
    """A rank's samples go on while it writes its file, and its tracer writes rows then: neither belongs to the run."""
    cpu = Domain(name="cpu0", source="modelled", resolution_s=0.1, hold=Hold.MEAN, basis="modelled", scope="process")
    times_ns = np.arange(T0 - 100 * MS, T0 + 4000 * MS, 100 * MS)
    for rank, end_ms in enumerate((2950, 2030)):
        b = Builder()
        b.add("op", "aten::mm", T0, T0 + 500 * MS, thread=1)
        b.add("mark", "Record Window End", T0 + 3700 * MS, T0 + 3700 * MS, thread=1)
        timeline = b.build()
        timeline.rank = rank
        with RunWriter(tmp_path / f"rank{rank}.tessera") as run:
            run.add_timeline(timeline)
            run.add_samples(cpu, times_ns, np.full(len(times_ns), 4.0 + rank))
            for key, value in {"rank": rank, "start_ns": T0 + rank * 40 * MS, "end_ns": T0 + end_ms * MS}.items():
                run.set(key, value)
        move_to_host(tmp_path / f"rank{rank}.tessera", f"node{rank % hosts}")
    merged = merge(tmp_path)
    job = summarize_job(merged)
    assert job is not None and [row.energy_j for row in job.ranks] == pytest.approx([4.0 * 2.95, 5.0 * 1.99])
    assert merged.power is not None and merged.span_ns == (T0, T0 + 2950 * MS)
    assert merged.power.energy_j == pytest.approx(4.0 * 2.95 + 5.0 * 1.99)
    assert merged.power.energy().coverage == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(6))
def test_operators_of_a_rank_have_the_joules_of_its_own_processes(tmp_path: Path, seed: int) -> None:
    """Modelled power of each rank's processes: the merged table is the sum of the ranks' tables."""
    rng, folder, hosts = np.random.default_rng(seed), tmp_path, 1 + seed % 2
    times_ns = np.arange(T0 - 100 * MS, T0 + 3100 * MS, 100 * MS)
    apart: dict[tuple[str, str], float] = {}
    for rank in range(2):
        b, at = Builder(), T0 + 50 * MS
        for step in range(8):
            begin = at
            for name in rng.choice(["aten::mm", "aten::add", "aten::sum"], 6):
                took = int(rng.integers(5, 60)) * MS
                b.add("op", str(name), at, at + took, thread=1)
                at += took + int(rng.integers(0, 10)) * MS
            b.add("region", f"step_{step}", begin, at, thread=1)
            b.add("region", "forward", begin, (begin + at) // 2, thread=1)
        timeline = b.build()
        timeline.rank = rank
        cpu = Domain(name="cpu", source="modelled", resolution_s=0.1, hold=Hold.MEAN, basis="modelled", scope="process")
        path = folder / f"rank{rank}.tessera"
        with RunWriter(path) as run:
            run.add_timeline(timeline)
            run.add_samples(cpu, times_ns, rng.uniform(0.2, 1.0, len(times_ns)) * (1.0 + 5.0 * rank))
            facts = {"rank": rank, "start_ns": T0, "end_ns": T0 + 3000 * MS, "windows": [(T0, T0 + 3000 * MS)]}
            for key, value in facts.items():
                run.set(key, value)
        move_to_host(path, f"node{rank % hosts}")
        with RunFile(path) as run:
            for key, joules in _sum_lines(run.recording().energy()).items():
                apart[key] = apart.get(key, 0.0) + joules
    with merge(folder).write(folder / "merged.tessera") as run:
        recording = run.recording()
        table = recording.energy()
        assert recording.power is not None and recording.power.energy_j == pytest.approx(table.energy_j, rel=1e-6)
        assert _sum_lines(table) == pytest.approx(apart, rel=0.01)


def _sum_lines(table: EnergyTable) -> dict[tuple[str, str], float]:
    """Joules of operators, regions and steps by their names, and of all."""
    lines = {(row.kind, row.name): row.energy_j for rows in (table.ops, table.regions, table.steps) for row in rows}
    return {**lines, ("all", ""): table.energy_j}


def test_a_rank_waits_no_longer_than_its_steps_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two collectives that wait at the same time, and one that waits into the steps: each moment counts once."""
    for rank in range(2):
        b = Builder()
        b.add("op", "aten::mm", T0, T0 + 1000 * MS, thread=1)
        b.add("region", "step_0", T0, T0 + 1000 * MS, thread=1)
        timeline = b.build()
        timeline.rank = rank
        write_run(tmp_path / f"rank{rank}.tessera", timeline, rank=rank, start_ns=T0, end_ns=T0 + 1000 * MS)
    waits_ms = [(0, 700), (100, 800), (850, 950)]
    met = [
        Meeting(
            group="world", kind="all_reduce", bytes=8, ranks=(0, 1), rows=(0, 1), start_ns=T0 + a * MS,
            ready_ns=T0 + b * MS, end_ns=T0 + b * MS, straggler=1, waits_s=((b - a) * 1e-3, 0.0),
        )
        for a, b in waits_ms
    ]  # fmt: skip
    monkeypatch.setattr(job_summary, "find_meetings", lambda _: met)
    job = summarize_job(merge(tmp_path))
    assert job is not None
    assert job.ranks[0].wait_share == pytest.approx(0.9) and job.ranks[1].wait_share == 0.0
    assert job.ranks[1].last == 3 and job.ranks[1].delays_s == pytest.approx(0.9)
    # The merge itself says the same of them.
    assert summarize(met, {})["stragglers"] == {1: {"times": 3, "wait_s": pytest.approx(0.9)}}


def test_tables_end_where_the_first_rank_stops_tracing(tmp_path: Path) -> None:
    """Rank 0 meets its limit after three of five steps: the others' later steps are not beside whole ones."""
    cpu = Domain(name="cpu", source="modelled", resolution_s=0.1, hold=Hold.MEAN, basis="modelled", scope="process")
    times_ns = np.arange(T0 - 100 * MS, T0 + 1100 * MS, 50 * MS)
    for rank, traced in enumerate((3, 5)):
        b = Builder()
        for step in range(5):
            begin = T0 + step * 200 * MS
            b.add("region", f"step_{step}", begin, begin + 200 * MS, thread=1)
            if step < traced:
                b.add("op", "aten::mm", begin + 10 * MS, begin + 150 * MS, thread=1)
        timeline = b.build()
        timeline.rank = rank
        if traced < 5:
            timeline.notes.append(Note("tracing stopped at its time limit", "time_limit"))
        facts = {"rank": rank, "start_ns": T0, "end_ns": T0 + 1000 * MS, "windows": [(T0, T0 + traced * 200 * MS)]}
        with RunWriter(tmp_path / f"rank{rank}.tessera") as run:
            run.add_timeline(timeline)
            run.add_samples(cpu, times_ns, np.full(len(times_ns), 2.0))
            for key, value in facts.items():
                run.set(key, value)
    with merge(tmp_path).write(tmp_path / "merged.tessera") as run:
        recording = run.recording()
        table, job = recording.energy(), summarize_job(recording)
        assert recording.facts.time_limit_reached
        assert [(row.name, row.energy_j) for row in table.steps] == [
            (f"step_{i}", pytest.approx(2 * 2.0 * 0.2, rel=0.01)) for i in range(3)
        ]
        assert [row.calls for row in table.ops] == [6]
        assert job is not None and [row.limited for row in job.ranks] == [True, False]
        assert "rank 0 stopped tracing at its time limit: the tables of all ranks end there" in job_notes(job)
        (after,) = outside(recording, table.energy_j, whole_of(recording, table, True, None))
        assert (after.where, after.steps) == ("after", 2)


def kineto_file(path: Path, timeline: Timeline, rank: int) -> Path:
    """A Kineto trace with the rows of a timeline."""
    events = []
    for row in range(len(timeline)):
        launch = timeline.launches[int(timeline["launch"][row])] if timeline["launch"][row] >= 0 else None
        start, end = int(timeline["start_ns"][row]) - T0, int(timeline["end_ns"][row]) - T0
        args = {"device": 0, "stream": int(timeline["stream"][row]), "correlation": row + 1}
        if launch:
            args |= {"Collective name": "allreduce", "In msg nelems": launch.collective_bytes // 2, "dtype": "BFloat16"}
            args |= {"Process Group Name": "0", "Group size": 2}
        events.append(
            {"ph": "X", "cat": "kernel", "name": timeline.name(row), "pid": 0, "tid": 7, "ts": start / 1e3,
             "dur": (end - start) / 1e3, "args": args}
        )  # fmt: skip
    head = {"schemaVersion": 1, "baseTimeNanoseconds": T0, "distributedInfo": {"rank": rank, "world_size": 2}}
    path.write_text(json.dumps({**head, "traceEvents": events}))
    return path


def test_the_command_merges_a_folder_of_kineto_traces(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in range(2):
        kineto_file(
            folder / f"host_{rank}.json", rank_timeline(rank, offset_ns=rank * 2 * MS, late_us=80.0 * rank), rank
        )
    out = tmp_path / "merged.tessera"
    result = CliRunner().invoke(command, [str(folder), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "2 ranks, 720 rows" in result.output and "180 collectives" in result.output
    assert "rank 1 is last" in result.output and "2 ms behind" in result.output
    result = CliRunner().invoke(command, [str(folder), "-o", str(out), "--force", "--json"])
    data = json.loads(result.output)
    assert data["ranks"][1]["offset_ns"] == pytest.approx(2 * MS, abs=20_000)
    assert data["collectives"]["stragglers"]["1"]["times"] > 170
    assert set(RunFile(out).timeline()["rank"]) == {0, 1}


def test_what_cannot_be_merged_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="there is no recording"):
        merge(tmp_path)
    one = write_run(tmp_path / "a.tessera", rank_timeline(0), rank=0)
    with pytest.raises(ArgumentError, match="1 recording"):
        merge(one)
    two = write_run(tmp_path / "b.tessera", rank_timeline(0), rank=0)
    with pytest.raises(ArgumentError, match="both of rank 0"):
        merge([one, two])


def test_one_recording_is_not_two_ranks(tmp_path: Path) -> None:
    run = _span(tmp_path / "a.tessera", T0, T0 + 5 * MS)
    copy = tmp_path / "rank1.tessera"
    copy.write_bytes(run.read_bytes())
    (tmp_path / "link.tessera").symlink_to(run)
    for other in (run, tmp_path / "link.tessera", copy):
        with pytest.raises(ArgumentError, match="the same recording"):
            merge([run, other])


def _span(path: Path, start_ns: int, end_ns: int) -> Path:
    with RunWriter(path) as out:
        out.add_row("region", "work", start_ns, end_ns)
    return path


def test_runs_one_after_the_other_are_no_ranks(tmp_path: Path) -> None:
    first = _span(tmp_path / "cnn.tessera", T0, T0 + 5 * MS)
    later = _span(tmp_path / "cnn-2.tessera", T0 + 7 * MS, T0 + 9 * MS)
    with pytest.raises(ArgumentError, match="one after the other") as caught:
        merge([later, first])
    assert f"tessera diff {first} {later}" in str(caught.value.fix) and "2 ms" in str(caught.value.why)
    beside = _span(tmp_path / "cnn-3.tessera", T0 + 4 * MS, T0 + 9 * MS)
    assert len(merge([first, beside]).files) == 2, "side by side they may be"
    named = _span(tmp_path / "cnn.rank1.tessera", T0 + 7 * MS, T0 + 9 * MS)
    assert len(merge([first, named]).files) == 2, "a clock may be off by more than the run"


def test_the_surer_clock_is_taken_and_a_contradiction_said(tmp_path: Path) -> None:
    def run(name: str, rank: int, offset_ns: float, error_ns: float, group: str) -> Path:
        t = rank_timeline(rank, offset_ns=rank * 3 * MS, group=group)
        clock = Offset(rank=rank, offset_ns=offset_ns, error_ns=error_ns, at_ns=T0, source="exchange").to_dict()
        return write_run(tmp_path / name, t, rank=rank, clock=clock, host=f"node{rank}")

    zero = run("0.tessera", 0, 0.0, 0.0, "g")
    agree = merge([zero, run("1.tessera", 1, 3.0 * MS, 40_000.0, "g")])
    assert agree.offsets[1].source == "collectives" and not any("differ by" in n for n in agree.notes)
    wrong = merge([zero, run("2.tessera", 1, 9.0 * MS, 1000.0, "g")])
    assert wrong.offsets[1].source == "exchange" and any("differ by" in n for n in wrong.notes)
    apart = merge([zero, run("3.tessera", 1, 3.0 * MS, 40_000.0, "other")])
    assert apart.offsets[1].source == "exchange" and apart.offsets[1].offset_ns == 3.0 * MS
    assert apart.collectives == {"count": 0}
    assert math.isclose(apart.offsets[1].error_ns or 0.0, 40_000.0)
