"""One recording, one answer: faults that existed while a recording was six different things."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tessera import profile
from tessera.analyze.answer import answer
from tessera.attribute.solve import attribute
from tessera.errors import MeasurementError
from tessera.joules import DomainSamples
from tessera.profile.open_recording import open_recording
from tessera.profile.ranks.merge import merge
from tessera.profile.runfile import RunWriter
from tessera.profile.runfile_checksum import unseal
from tessera.recording import Facts, Recording
from tessera.schema import DeviceId, Domain, Hold
from tessera.timeline import Builder, Launch, Timeline
from tessera.trace import PowerTrace

from command_line import invoke

T0 = 1_790_000_000_000_000_000
MS = 1_000_000


def make_timeline(rank: int = 0, *, device: int = 0, steps: int = 20, jitter_ms: float = 0.0) -> Timeline:
    """Steps of 50 ms: a kernel of 30 ms, a collective of 10, and a region around them."""
    rng, b = np.random.default_rng(rank + 1), Builder()
    launch = b.intern_launch(Launch(collective_type="all_reduce", collective_bytes=1 << 20, group="0", group_size=2))
    for i in range(steps):
        start = T0 + i * 50 * MS
        end = start + 45 * MS + round(rng.uniform(0.0, jitter_ms) * MS)
        b.add("region", f"step_{i}", start, start + 50 * MS, thread=1)
        b.add("kernel", f"gemm_of_rank{rank}", start, start + 30 * MS, device=device, stream=7)
        b.add("collective", "ncclAllReduce", start + 35 * MS, end, device=device, stream=7, launch=launch)
    timeline = b.build()
    timeline.rank = rank
    return timeline


def make_samples(name: str = "gpu0", watts: float = 300.0, seconds: float = 1.2) -> DomainSamples:
    times = np.arange(T0 - 100 * MS, T0 + round(seconds * 1e9), 20 * MS)
    return DomainSamples.of(Domain(name=name, source="test", resolution_s=0.02), times, np.full(len(times), watts))


def write_rank(path: Path, rank: int, host: str, *, watts: float = 300.0, jitter_ms: float = 0.0) -> Path:
    samples = make_samples(watts=watts)
    with RunWriter(path) as run:
        run.add_timeline(make_timeline(rank, jitter_ms=jitter_ms))
        run.add_samples(samples.domain, samples.times_ns, samples.watts)
        for key, value in {"rank": rank, "start_ns": T0, "end_ns": T0 + 1000 * MS}.items():
            run.set(key, value)
    unseal(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE about SET value = ? WHERE key IN ('host', 'boot')", (host,))
        db.commit()
    return path


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[list[Path]]:
    yield [
        write_rank(tmp_path / "rank0.tessera", 0, "node6", watts=300.0),
        write_rank(tmp_path / "rank1.tessera", 1, "node7", watts=500.0),
    ]


def test_kernels_of_every_host_have_joules(two_hosts: list[Path], tmp_path: Path) -> None:
    merged = merge(two_hosts)
    assert merged.timeline.devices == [DeviceId("node6", "gpu", 0), DeviceId("node7", "gpu", 0)]
    for recording in (merged, merged.write(tmp_path / "all.tessera").recording()):
        by_name = {r.name: r for r in recording.energy().kernels}
        assert by_name["gemm_of_rank0"].power_w == pytest.approx(300.0, rel=0.02)
        assert by_name["gemm_of_rank1"].power_w == pytest.approx(500.0, rel=0.02)
        assert recording.energy().energy_j == pytest.approx(800.0, rel=0.05)
    hosts = {r.host for r in merged.records() if r.kind == "kernel" and r.energy_j is not None}
    assert hosts == {"node6", "node7"}


def test_ranks_that_take_a_step_together_have_one_step(two_hosts: list[Path], tmp_path: Path) -> None:
    alone = open_recording(two_hosts[0])
    for recording in (merge(two_hosts), merge(two_hosts).write(tmp_path / "all.tessera").recording()):
        steps = recording.energy().steps
        assert [row.name for row in steps] == [row.name for row in alone.energy().steps]
        assert steps[3].energy_j == pytest.approx(800.0 * 0.05, rel=0.02) and steps[3].wall_s == pytest.approx(0.05)
        assert answer(recording).whole.steps == answer(alone).whole.steps == 20


def test_a_merge_keeps_what_was_traced(tmp_path: Path) -> None:
    paths = [write_rank(tmp_path / f"rank{r}.tessera", r, "one") for r in (0, 1)]
    for path in paths:
        with RunWriter(path, mode="append") as run:
            run.set("windows", [[T0 + 100 * MS, T0 + 600 * MS]])
    merged = merge(paths).write(tmp_path / "all.tessera").recording()
    assert merged.accounted_windows == [(T0 + 100 * MS, T0 + 600 * MS)]
    assert merged.energy().energy_j == pytest.approx(150.0, rel=0.02), "what came before the trace is not idle"


def test_a_merge_does_not_call_time_idle_that_no_rank_traced(tmp_path: Path) -> None:
    """Rank 0 traced two windows, rank 1 another one: what lies between them is not traced."""
    windows = {0: [[T0 + 100 * MS, T0 + 200 * MS], [T0 + 800 * MS, T0 + 900 * MS]], 1: [[T0 + 150 * MS, T0 + 250 * MS]]}
    paths = [write_rank(tmp_path / f"rank{r}.tessera", r, "one") for r in (0, 1)]
    for rank, path in enumerate(paths):
        with RunWriter(path, mode="append") as run:
            run.set("windows", windows[rank])
            run.set("scheduled", True)
    traced = [(T0 + 100 * MS, T0 + 250 * MS), (T0 + 800 * MS, T0 + 900 * MS)]
    merged = merge(paths)
    for recording in (merged, merged.write(tmp_path / "all.tessera").recording()):
        assert recording.accounted_windows == traced
        table = recording.energy()
        assert table.time_s == pytest.approx(0.25)
        assert table.untraced_s == pytest.approx(0.75)
        assert table.untraced_j == pytest.approx(225.0, rel=0.02)


def test_cpu_power_of_the_ranks_own_processes_is_added_up(tmp_path: Path) -> None:
    paths = [write_rank(tmp_path / f"rank{r}.tessera", r, "one") for r in (0, 1)]
    cpu = Domain(name="cpu0", source="modelled", resolution_s=0.1, hold=Hold.MEAN, basis="modelled", scope="process")
    for rank, path in enumerate(paths):
        first = T0 + (0, 37)[rank] * MS
        times = [first + i * 100 * MS for i in range(11 - rank)]
        with RunWriter(path, mode="append") as run:
            run.add_samples(cpu, times, [math.nan, *[20.0 + 10.0 * rank] * (len(times) - 1)])
    merged = merge(paths)
    assert merged.power is not None
    assert merged.power.columns["gpu0"].watts[0] == 300.0, "a board is one board"
    joules = merged.power.columns["cpu0"].energy(T0, T0 + 1000 * MS).energy_j
    assert joules == pytest.approx(20.0 * 1.0 + 30.0 * 0.9)


def test_regions_and_counters_do_not_make_a_trace_longer() -> None:
    """0.5 s were traced; the program's own steps and counters went on for a second."""
    traced, all_steps = make_timeline(steps=10), make_timeline(steps=20)
    build = Builder()
    for r in all_steps.rows("region").tolist():
        build.add("region", all_steps.name(r), int(all_steps["start_ns"][r]), int(all_steps["end_ns"][r]), thread=1)
    build.add("counter", "loss", T0 + 1000 * MS, T0 + 1000 * MS, value=1.0)
    for r in traced.device_rows.tolist():
        build.add("kernel", traced.name(r), int(traced["start_ns"][r]), int(traced["end_ns"][r]), device=0, stream=7)
    power = PowerTrace({"gpu0": make_samples()}, start_ns=T0, end_ns=T0 + 1000 * MS)
    table = Recording(build.build(), power).energy()
    assert table.time_s == pytest.approx(0.495)
    assert table.idle_j / table.energy_j < 0.25
    assert (table.untraced_s, table.untraced_j) == (pytest.approx(0.505), pytest.approx(151.5, rel=0.02))
    assert "not traced: 152 J in 505 ms of the power log" in " ".join(str(table).split())
    assert "not traced" in table._repr_html_()
    data = table.to_json()
    assert (data["covers"], data["untraced_s"]) == ("trace", pytest.approx(0.505))
    assert len(data["steps"]) == 10 and not data["regions"], "a step is no region"


def test_a_table_of_a_whole_run_says_so() -> None:
    power = PowerTrace({"gpu0": make_samples()}, start_ns=T0, end_ns=T0 + 1000 * MS)
    assert Recording(make_timeline(), power).energy().to_json()["covers"] == "run"


def test_what_kineto_marks_is_a_part_of_its_trace() -> None:
    build = Builder()
    build.add("mark", "Iteration Start: PyTorch Profiler", T0, T0)
    build.add("kernel", "gemm", T0 + 100 * MS, T0 + 200 * MS, device=0, stream=7)
    build.add("mark", "Record Window End", T0 + 300 * MS, T0 + 300 * MS)
    build.add("mark", "epoch", T0 + 900 * MS, T0 + 900 * MS)
    assert build.build().traced_span == (T0, T0 + 300 * MS)


def test_any_recording_is_opened_by_load(two_hosts: list[Path]) -> None:
    assert profile.load(two_hosts[0]).energy().energy_j == profile.open_recording(two_hosts[0]).energy().energy_j
    assert {"load", "chrome"} <= set(dir(profile))


def test_ranks_of_one_host_are_never_shifted(tmp_path: Path) -> None:
    """Collectives of two processes end up to 24 ms apart on a busy machine, and its clock is still one clock."""
    paths = [write_rank(tmp_path / f"rank{r}.tessera", r, "one", jitter_ms=24.0 * r) for r in (0, 1)]
    merged = merge(paths)
    assert [o.offset_ns for o in merged.offsets] == [0.0, 0.0]
    assert merged.offsets[1].source == "same host" and merged.offsets[1].error_ns == 0.0
    assert not any("chrony" in note for note in merged.notes)
    both = [write_rank(tmp_path / f"b{r}.tessera", r, "one" if r < 2 else "two", jitter_ms=r) for r in range(4)]
    offsets = merge(both).offsets
    assert offsets[2].offset_ns == offsets[3].offset_ns, "one offset for all ranks of a host"


def test_a_session_and_its_report_show_the_same_steps(tmp_path: Path) -> None:
    """Tracing began in the middle of a step: that step is in neither."""
    path = tmp_path / "run.tessera"
    samples = make_samples()
    with RunWriter(path) as run:
        run.add_timeline(make_timeline())
        run.add_samples(samples.domain, samples.times_ns, samples.watts)
        run.set("windows", [[T0 + 75 * MS, T0 + 900 * MS]])
        run.set("start_ns", T0)
        run.set("end_ns", T0 + 1000 * MS)
    session = profile.Session.__new__(profile.Session)
    session._recording = open_recording(path)
    steps = {row.name for row in session.energy().steps}
    assert "step_1" not in steps and {"step_2", "step_17"} <= steps
    assert answer(session.recording()).traced_steps == len(steps)
    result = invoke(_report(), path, "--json")
    assert {row["name"] for row in _json(result.output)["steps"]} == steps


def _report() -> object:
    from tessera.cli.report import command

    return command


def _json(text: str) -> dict:
    import json

    return json.loads(text[text.index("{") :])


def test_power_of_another_device_is_named_as_the_reason() -> None:
    power = PowerTrace({"gpu0": make_samples("gpu0"), "gpu1": make_samples("gpu1")}, start_ns=T0, end_ns=T0 + 1000 * MS)
    with pytest.raises(MeasurementError) as caught:
        attribute(make_timeline(device=3), power)
    assert "gpu3" in str(caught.value.why) and "gpu0, gpu1" in str(caught.value.why)
    assert "within the trace" not in str(caught.value.why)


def test_one_boards_joules_are_not_given_to_two_devices() -> None:
    b = Builder()
    for device in (0, 1):
        b.add("kernel", f"on{device}", T0, T0 + 900 * MS, device=device)
    power = PowerTrace({"gpu0": make_samples("gpu0")}, start_ns=T0, end_ns=T0 + 1000 * MS)
    table = attribute(b.build(), power)
    assert [row.name for row in table.kernels] == ["on0"]
    assert any("gpu1 ran 1 kernels, but its power was not recorded" in note for note in table.notes)


def test_joules_between_two_times_are_the_same_wherever_they_are_asked(two_hosts: list[Path]) -> None:
    with open_recording(two_hosts[0]) as recording:
        assert recording.power is not None
        start, end = T0 + 100 * MS, T0 + 350 * MS
        column = recording.power.columns["gpu0"]
        assert recording.power.energy("gpu0", start, end) == column.energy(start, end)
        assert recording.power.energy(None, start, end).energy_j == column.energy(start, end).energy_j


def test_a_recording_without_power_says_what_it_lacks() -> None:
    trace = Recording(make_timeline())
    with pytest.raises(MeasurementError, match="no power"):
        trace.energy()
    assert trace.find_energy() is None
    run = Recording(make_timeline(), facts=Facts(kind="run"))
    assert np.isnan(run.energy().energy_j) and "no power was recorded" in run.energy().notes[0]
