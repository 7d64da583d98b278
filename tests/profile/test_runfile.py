from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from calls import list_calls
from tessera.errors import ArgumentError, RecordingError
from tessera.profile.runfile import RunFile, RunWriter
from tessera.profile.runfile_checksum import unseal
from tessera.profile.runfile_open import RunDatabase
from tessera.record import KINDS
from tessera.schema import Domain, Gap, Hold, Telemetry
from tessera.timeline.columns import INTEGERS, Builder, Launch, Timeline

from waiting import wait_until

T0 = 1_760_000_000_000_000_000
GPU = Domain(name="gpu0", source="nvml", resolution_s=0.02, lag_s=0.015, hold=Hold.MEAN, label="H200")


def make_timeline(count: int, seed: int = 0) -> Timeline:
    rng = np.random.default_rng(seed)
    b = Builder()
    for i in range(50):
        b.intern(f"kernel_{i}<float, {i}>")
        b.intern_launch(Launch(grid=(i + 1, 1, 1), block=(128, 1, 1), registers=i))
    start = T0 + np.cumsum(rng.integers(1_000, 20_000, count))
    b.extend(
        {
            "kind": rng.integers(0, 4, count), "name": rng.integers(0, 50, count), "start_ns": start,
            "end_ns": start + rng.integers(0, 9_000, count), "device": rng.integers(0, 8, count),
            "stream": rng.integers(0, 4, count), "correlation": np.arange(count), "external": np.arange(count) // 3,
            "parent": rng.integers(-1, count, count), "bytes": rng.integers(0, 1 << 40, count),
            "launch": rng.integers(-1, 50, count), "shapes": rng.integers(-1, 50, count),
            "value": np.where(rng.random(count) < 0.5, np.nan, rng.random(count)),
        },
        count,
    )  # fmt: skip
    return b.build()


def same(a: Timeline, b: Timeline) -> None:
    assert set(a.columns) == set(b.columns)
    for name, values in a.columns.items():
        np.testing.assert_array_equal(values, b.columns[name], err_msg=name)
        assert values.dtype == b.columns[name].dtype
    assert a.names == b.names
    assert a.launches == b.launches


def side_files(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir() if p != path)


def test_100k_rows_come_back_as_they_were(tmp_path):
    path = tmp_path / "runs" / "a.tessera"
    timeline = make_timeline(100_000)
    timeline.rank = 3
    timeline.notes.append("a note")
    timeline.meta["kineto"] = 1
    timeline.energy_j = np.where(np.arange(100_000) % 3 == 0, np.nan, np.arange(100_000) * 1e-3)
    timeline.error_j = timeline.energy_j * 0.1
    timeline.extra = {5: {"sm_occupancy": 40.0}, 99_999: {"tc_util_pct": 2.5}}
    with RunWriter(path, meta={"command": ["python", "x.py"]}) as run:
        run.add_timeline(timeline)
    assert side_files(path) == []
    with RunFile(path) as back:
        found = back.timeline()
        same(timeline, found)
        np.testing.assert_array_equal(found.energy_j, timeline.energy_j)
        np.testing.assert_array_equal(found.error_j, timeline.error_j)
        assert found.extra == timeline.extra
        assert (found.rank, found.meta["kineto"], found.notes) == (3, 1, ["a note"])
        assert not back.crashed
        assert back.rows == 100_000
        assert back.meta == {"command": ["python", "x.py"]}
        assert "recorded by Tessera" in back.about["description"]
    assert path.stat().st_size < 4_000_000  # 136 bytes a row would be 13.6 MB


def test_two_timelines_share_names_and_keep_their_parents(tmp_path):
    path = tmp_path / "a.tessera"
    first, second = Builder(), Builder()
    for b, name in ((first, "one"), (second, "two")):
        parent = b.add("op", "aten::mm", T0, T0 + 10)
        b.add("kernel", name, T0 + 1, T0 + 2, parent=parent, launch=b.intern_launch(Launch(grid=(1, 1, 1))))
    with RunWriter(path) as run:
        run.add_timeline(first.build())
        run.add_row("mark", "between", T0 + 5, T0 + 5)
        run.flush()
        run.add_timeline(second.build())
    found = RunFile(path).timeline()
    assert [found.name(i) for i in range(5)] == ["between", "aten::mm", "one", "aten::mm", "two"] or [
        found.name(i) for i in range(5)
    ] == ["aten::mm", "one", "between", "aten::mm", "two"]
    for row in found.rows("kernel"):
        assert found.name(int(found["parent"][row])) == "aten::mm"
        assert found["parent"][row] == row - 1
    assert found.names == sorted(set(found.names), key=found.names.index)
    assert found.launches == [Launch(grid=(1, 1, 1))]


def test_live_rows_keep_their_columns(tmp_path):
    path = tmp_path / "a.tessera"
    with RunWriter(path) as run:
        run.add_row("region", "step", T0, T0 + 10**9, thread=7)
        run.add_row("counter", "loss", T0 + 5, T0 + 5, value=0.25, unit="nats", thread=8)
        run.add_row("mark", "é\udce9\n", T0 - 10**12, T0 - 10**12)
    found = RunFile(path).timeline()
    assert [found.kind(i) for i in range(3)] == ["region", "counter", "mark"]
    assert found["thread"].tolist() == [7, 8, -1]
    assert found["end_ns"].tolist() == [T0 + 10**9, T0 + 5, T0 - 10**12]
    assert found["value"][1] == 0.25
    assert math.isnan(found["value"][0])
    assert [found.text("unit", i) for i in range(3)] == [None, "nats", None]
    assert found.name(2).startswith("é")


def test_rows_that_come_a_few_at_a_time_lie_together(tmp_path):
    path = tmp_path / "a.tessera"
    with RunWriter(path) as run:
        for i in range(1_500):
            run.add_row("counter", "c", T0 + i, T0 + i, value=float(i))
            if i % 5 == 4:
                run.flush()
            if i == 700:
                with RunFile(path) as live:
                    assert live.timeline()["value"][:700].tolist() == list(range(700))
                run.add_timeline(make_timeline(10))
        db = sqlite3.connect(path)
        assert db.execute("SELECT count(*) FROM chunks").fetchone()[0] == 3  # around the timeline, and a full one
        db.close()
    found = RunFile(path).timeline()
    assert found["value"][found.rows("counter")].tolist() == list(range(1_500))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_kept(tmp_path, kind):
    with RunWriter(tmp_path / "a.tessera") as run:
        run.add_row(
            kind, "x", T0, T0 + 1, **{c: 5 for c in INTEGERS if c not in ("kind", "name", "start_ns", "end_ns")}
        )
    found = RunFile(tmp_path / "a.tessera").timeline()
    assert found.kind(0) == kind
    assert found["bytes"][0] == 5


def test_extreme_values_survive(tmp_path):
    with RunWriter(tmp_path / "a.tessera") as run:
        for value in (-(1 << 62), 0, (1 << 62)):
            run.add_row("op", "x", value, value, bytes=value, sequence=-value)
    found = RunFile(tmp_path / "a.tessera").timeline()
    assert found["bytes"].tolist() == [-(1 << 62), 0, 1 << 62]
    assert found["end_ns"].tolist() == found["start_ns"].tolist() == found["bytes"].tolist()


def test_a_bad_row_is_refused_alone(tmp_path):
    run = RunWriter(tmp_path / "a.tessera")
    run.add_row("region", "good", T0, T0 + 1)
    run.add_row("no such kind", "bad", T0, T0 + 1)  # type: ignore[arg-type]
    run.add_row("region", "bad", T0, T0 + 1, nonsense=3)
    run.add_row("region", "bad", "now", T0 + 1)  # type: ignore[arg-type]
    run.add_row("region", "good", T0, T0 + 1)
    with pytest.raises(RecordingError, match="3 of the things") as caught:
        run.flush()
    assert caught.value.fix
    run.close()
    found = RunFile(tmp_path / "a.tessera").timeline()
    assert [found.name(i) for i in range(len(found))] == ["good", "good"]


def test_a_row_is_only_put_down_for_the_thread_that_writes(tmp_path):
    with RunWriter(tmp_path / "a.tessera") as run:
        called = list_calls(lambda: run.add_row("region", "step", 1, 2, thread=1))
    assert called == ["add_row", "append"]


def test_power_comes_back_as_a_trace(tmp_path):
    path = tmp_path / "a.tessera"
    times = T0 + np.arange(101) * 20_000_000
    with RunWriter(path, meta={"start_ns": T0}) as run:
        run.add_samples(GPU, times[:50], np.full(50, 500.0))
        run.add_samples(GPU, times[49:], np.full(52, 500.0))  # one was handed over twice
        run.add_anchors("gpu0", [T0, T0 + 10**9], [10.0, 510.0])
        run.add_gaps([Gap(domain="gpu0", start_ns=5, end_ns=None, reason="lost")], T0)
        run.set("end_ns", T0 + 2 * 10**9)
        run.set("asked_ms", 20.0)
    with RunFile(path) as back:
        trace = back.power()
        assert (trace.start_ns, trace.end_ns) == (T0, T0 + 2 * 10**9)
        assert trace.domains == [GPU]
        assert len(trace.columns["gpu0"].times_ns) == 101
        assert trace.energy_j == pytest.approx(1000.0, rel=0.02)
        assert trace.gaps == (Gap(domain="gpu0", start_ns=T0 + 5, end_ns=None, reason="lost"),)
        assert trace.asked_ms == 20.0
        assert back.anchors("gpu0")[1].tolist() == [10.0, 510.0]
        assert back.samples("nothing")[0].size == 0


def test_a_domain_may_learn(tmp_path):
    with RunWriter(tmp_path / "a.tessera") as run:
        run.add_anchors("gpu0", [T0], [1.0])  # before anybody described it
        run.add_samples(GPU, [T0], [1.0])
        later = Domain(name="gpu0", source="nvml", resolution_s=0.1)
        run.add_samples(later, [T0 + 1], [2.0])
    back = RunFile(tmp_path / "a.tessera")
    assert back.domains == {"gpu0": later}
    assert back.samples("gpu0")[1].tolist() == [1.0, 2.0]
    assert back.anchors("gpu0")[1].tolist() == [1.0]


def test_without_meta_the_span_is_that_of_the_data(tmp_path):
    with RunWriter(tmp_path / "a.tessera") as run:
        run.add_samples(GPU, [T0, T0 + 100], [1.0, math.nan])
        run.add_row("mark", "m", T0 - 50, T0 - 50)
    back = RunFile(tmp_path / "a.tessera")
    assert back.span_ns == (T0 - 50, T0 + 100)
    assert math.isnan(back.power().columns["gpu0"].watts[1])


@pytest.mark.parametrize("value", [True, -1, {}, [1, None], "x"])
def test_facts_of_other_types_are_missing(tmp_path, value):
    with RunWriter(tmp_path / "a.tessera", meta={"mode": value}) as run:
        run.set("command", value)
        run.set("tracing_s", value)
    with RunFile(run.path) as back:
        facts = back.recording().facts
    text = value if isinstance(value, str) else None
    assert (facts.mode, facts.command, facts.tracing_s) == (text, text, -1.0 if value == -1 else None)


@pytest.mark.parametrize("column", ["device", "rank"])
def test_a_device_or_rank_of_an_impossible_number_is_refused(tmp_path, column):
    with RunWriter(tmp_path / "a.tessera") as run:
        run.add_row("kernel", "k", 1, 2, **{column: 2**63 - 1})
    with (
        RunFile(run.path) as back,
        pytest.raises(RecordingError, match=f"a {column} of theirs has an impossible number"),
    ):
        back.timeline()


def test_telemetry_stacks_and_facts(tmp_path):
    path = tmp_path / "a.tessera"
    rows = [
        Telemetry(time_ns=2, domain="gpu1"),
        Telemetry(
            time_ns=1, domain="gpu0", temperature_c=55.0, clocks_mhz={"sm": 1980.0}, throttle=("power",),
            memory_used_bytes=10, throttled_s={"power": 0.5},
        ),
    ]  # fmt: skip
    with RunWriter(path, meta={"model": "gpt2"}) as run:
        run.add_telemetry(rows, T0)
        run.add_stacks([(T0, "MainThread", "main;train;step", 3), (T0 + 1, 42, "main;train", 1)])
        run.set("steps", np.int64(3))
        run.set("list", [np.float32(0.5), {"a": None}])
        run.set("steps", 4)
        with pytest.raises(ArgumentError, match="cannot be kept"):
            run.set("bad", object())
    back = RunFile(path)
    first, second = back.telemetry()
    assert (first.time_ns, first.temperature_c, first.clocks_mhz) == (T0 + 1, 55.0, {"sm": 1980.0})
    assert (first.throttle, first.throttled_s, second.time_ns) == (("power",), {"power": 0.5}, T0 + 2)
    assert [t.domain for t in back.telemetry("gpu1")] == ["gpu1"]
    assert [tuple(s) for s in back.stacks()] == [
        (T0, "MainThread", "main;train;step", 3), (T0 + 1, 42, "main;train", 1),
    ]  # fmt: skip
    assert (back.get("steps"), back.get("list"), back.get("model"), back.get("no", 7)) == (
        4,
        [0.5, {"a": None}],
        "gpt2",
        7,
    )
    assert back.facts == {"steps": 4, "list": [0.5, {"a": None}]}


def test_an_empty_run_is_empty(tmp_path):
    RunWriter(tmp_path / "a.tessera").close()
    back = RunFile(tmp_path / "a.tessera")
    assert len(back.timeline()) == 0
    assert back.power().columns == {}
    assert back.span_ns == (0, 0)
    assert back.telemetry() == []


def test_many_threads_lose_nothing(tmp_path):
    path = tmp_path / "a.tessera"
    run = RunWriter(path)

    def work(number: int) -> None:
        for i in range(5_000):
            run.add_row("counter", f"thread {number}", T0 + i, T0 + i, value=float(i))
            if i % 500 == 0:
                run.add_samples(Domain(name=f"d{number}", source="t", resolution_s=1.0), [T0 + i], [float(i)])
                run.add_timeline(make_timeline(100, seed=i))
                run.flush()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    run.close()
    found = RunFile(path).timeline()
    assert len(found) == 6 * 5_000 + 6 * 10 * 100
    for n in range(6):
        mine = found["value"][found["name"] == found.names.index(f"thread {n}")]
        assert mine.tolist() == list(range(5_000))


def test_a_run_that_was_not_closed_does_not_claim_to_be_complete(tmp_path):
    """A full disk leaves the same file as a kill; a stall that ended is in it."""
    with RunWriter(tmp_path / "a.tessera") as run:
        run.add_row("mark", "m", T0, T0)
        run.flush()
        with run._lock:
            run._store.db.execute("PRAGMA busy_timeout=1")
        with contextlib.closing(sqlite3.connect(run.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            run.add_row("mark", "n", T0, T0)
            with pytest.raises(RecordingError, match="could not be written"):
                run.flush()
            other.execute("ROLLBACK")
        run.flush()
        run.flush()
        with RunFile(run.path) as back:
            first, stall = back.notes
    assert "or all since the disk was full" in first
    assert "complete" not in first
    assert "the run file could not be written for" in stall
    assert RunFile(run.path).notes == []


def test_it_is_committed_without_being_asked(tmp_path):
    run = RunWriter(tmp_path / "a.tessera")
    run.add_row("mark", "m", T0, T0)
    deadline = time.monotonic() + 600.0
    while True:
        with RunFile(tmp_path / "a.tessera") as back:  # of a writer that is alive
            assert back.crashed
            assert "never closed" in back.notes[0]
            if back.rows:
                break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.close()


CHILD = """
    import sys, time
    from tessera.profile.runfile import RunWriter
    from tessera.schema import Domain
    run = RunWriter(sys.argv[1], meta={"a": 1})
    print("ready", flush=True)
    domain = Domain(name="gpu0", source="child", resolution_s=0.02)
    i = 0
    while True:
        now = time.time_ns()
        run.add_row("counter", "sequence", now, now, value=float(i))
        if i % 10 == 0:
            run.add_samples(domain, [now], [float(i)])
        i += 1
        time.sleep(0.001)
"""


def killed(path: Path, after_s: float = 1.2) -> int:
    """Kill a child in the middle of writing, and say when."""
    code = textwrap.dedent(CHILD)
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(after_s)
        at = time.time_ns()
        child.send_signal(signal.SIGKILL)
    return at


def test_a_run_that_was_killed_before_its_first_sample_did_not_end_before_it_began(tmp_path):
    with RunWriter(tmp_path / "a.tessera") as run:
        run.add_samples(GPU, [T0], [100.0])
        run.set("start_ns", T0 + 10**7)
    with RunFile(tmp_path / "a.tessera") as back:
        assert back.span_ns == (T0 + 10**7, T0 + 10**7)


def test_kill_9_loses_less_than_a_second(tmp_path):
    path = tmp_path / "a.tessera"
    at = killed(path)
    assert side_files(path)  # the log was not checkpointed: the reader must look into it
    with RunFile(path) as back:
        assert back.crashed
        assert back.meta == {"a": 1}
        found = back.timeline()
        assert at - int(found["end_ns"].max()) < 10**9
        assert found["value"].tolist() == list(range(len(found)))  # nothing is missing in the middle
        assert at - back.power().columns["gpu0"].times_ns[-1] < 10**9
    # The file can be gone on with.
    with RunWriter(path, mode="append") as run:
        run.add_row("counter", "sequence", T0, T0, value=float(len(found)))
        run.set("mended", True)
    with RunFile(path) as back:
        assert back.timeline()["value"].tolist() == list(range(len(found) + 1))
        assert back.get("mended")
        assert not back.crashed
    assert side_files(path) == []


@pytest.mark.parametrize("with_index", [True, False])
def test_a_killed_run_in_a_directory_nobody_may_write(tmp_path, with_index, monkeypatch):
    home = tmp_path / "ro"
    home.mkdir()
    path = home / "a b#?.tessera"  # a name that is no URI
    killed(path, 0.5)
    rows = RunFile(path).rows
    if not with_index:  # e.g. copied from elsewhere
        Path(f"{path}-shm").unlink()
    if os.getuid() == 0:  # nothing is read-only for root: SQLite's refusal is played
        real = RunDatabase._connect

        def refuse(self, at, mode):
            if at.parent == home:
                raise sqlite3.OperationalError("attempt to write a readonly database")
            return real(self, at, mode)

        monkeypatch.setattr(RunDatabase, "_connect", refuse)
    home.chmod(0o555)
    before = sorted(p.name for p in home.iterdir())
    try:
        with RunFile(path) as back:
            assert back.rows == rows > 0
            copy = back._db.folder
        assert copy is None or not Path(copy.name).exists()
        assert sorted(p.name for p in home.iterdir()) == before
    finally:
        home.chmod(0o755)


def test_a_timeline_cut_by_a_kill_has_no_wrong_parents(tmp_path):
    path = tmp_path / "a.tessera"
    with RunWriter(path) as run:
        run.add_timeline(make_timeline(200_000))
        run.flush()
        run.add_row("mark", "after", T0, T0)
    unseal(path)
    db = sqlite3.connect(path)
    db.execute("DELETE FROM chunks WHERE first_row = 65536")  # as if it had never been committed
    db.commit()
    db.close()
    found = RunFile(path).timeline()
    whole = make_timeline(200_000)
    kept = np.r_[0:65_536, 131_072:200_000]
    assert len(found) == len(kept) + 1
    np.testing.assert_array_equal(found["start_ns"][:-1], whole["start_ns"][kept])
    for row in range(0, len(kept), 997):
        old = int(whole["parent"][kept[row]])
        new = int(found["parent"][row])
        assert (new == -1) == (old == -1 or 65_536 <= old < 131_072)
        if new != -1:
            assert kept[new] == old


def test_a_run_is_not_overwritten_unasked(tmp_path):
    path = tmp_path / "a.tessera"
    RunWriter(path).close()
    with pytest.raises(RecordingError, match="already exists") as caught:
        RunWriter(path)
    assert caught.value.fix
    with RunWriter(path, mode="replace") as run:
        run.add_row("mark", "m", T0, T0)
    assert RunFile(path).rows == 1
    with RunWriter(path, mode="append") as run:
        run.add_row("mark", "m", T0, T0)
    back = RunFile(path).timeline()
    assert back.names == ["m"] and len(back) == 2


def test_what_is_no_run_is_refused(tmp_path):
    path = tmp_path / "x.tessera"
    with pytest.raises(RecordingError, match="no run file"):
        RunFile(path)
    path.write_bytes(b"")
    with pytest.raises(RecordingError, match="empty"):
        RunFile(path)
    path.write_bytes(b"hello, this is no database" * 100)
    with pytest.raises(RecordingError, match="not a database"):
        RunFile(path)
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE mine (a)")
    db.commit()
    db.close()
    with pytest.raises(RecordingError, match="another program") as caught:
        RunFile(path)
    assert caught.value.fix
    with pytest.raises(RecordingError, match="another program"):
        RunWriter(path, mode="append")
    with pytest.raises(RecordingError):
        RunFile(tmp_path)


def test_a_newer_version_is_refused(tmp_path):
    path = tmp_path / "a.tessera"
    RunWriter(path).close()
    unseal(path)
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(RecordingError, match="version 99") as caught:
        RunFile(path)
    assert "pip install -U" in str(caught.value.fix)


def test_a_damaged_file_says_so(tmp_path):
    path = tmp_path / "a.tessera"
    with RunWriter(path) as run:
        run.add_timeline(make_timeline(50_000))
    unseal(path)  # as a killed run, and one of an old version, is
    whole = path.read_bytes()
    for size in (100, 5_000, len(whole) // 2):  # cut
        path.write_bytes(whole[:size])
        with pytest.raises(RecordingError):
            RunFile(path).timeline()
    rng = np.random.default_rng(1)
    for _ in range(20):  # bytes turned over: an answer or our error, never another
        broken = bytearray(whole)
        for at in rng.integers(0, len(whole), 200):
            broken[at] ^= 0xFF
        path.write_bytes(bytes(broken))
        with contextlib.suppress(RecordingError):
            RunFile(path).timeline()


def test_rows_that_are_other_than_they_were_listed_are_refused(tmp_path):
    """A damaged index finds other rows than the list of them has; here a second program changes the file."""
    path = tmp_path / "a.tessera"
    with RunWriter(path) as run:
        run.add_timeline(make_timeline(150_000))
    unseal(path)
    with RunFile(path) as run:
        chunks = run.chunks()
        next(chunks)
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE chunks SET rows = -4611686018427387904 WHERE first_row > 0")
        with pytest.raises(RecordingError, match="the rows from 65536 on are"):
            next(chunks)


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match="cannot write") as caught:
        RunWriter(tmp_path / "file" / "a.tessera")
    assert caught.value.why
    assert caught.value.fix


def fill(run, full):
    """Make the database full, or not any more."""
    with run._lock:
        pages = run._store.db.execute("PRAGMA page_count").fetchone()[0]
        run._store.db.execute(f"PRAGMA max_page_count={pages if full else 1 << 30}")


def test_a_disk_that_is_full_for_a_while_delays_and_loses_nothing(tmp_path):
    path = tmp_path / "a.tessera"
    with RunWriter(path) as run:
        run.add_row("mark", "before", 1, 1)
        run.flush()
        fill(run, full=True)
        for i in range(40):
            run.add_row("region", f"meanwhile_{i}" * 500, 10 * i, 10 * i + 5)
        run.add_timeline(make_timeline(1000))
        with pytest.raises(RecordingError, match="could not be written"):
            run.flush()
        fill(run, full=False)
        run.add_row("mark", "after", 9, 9)
        run.flush()
        assert run.error is None and len(run.stalls) == 1
        assert "nothing was lost" in run.stalls[0] and "full" in run.stalls[0]
    with RunFile(path) as found:
        rows = found.timeline()
        names = [rows.name(i)[:12] for i in range(len(rows))]
        assert not found.crashed
    ours = [n for n in names if n.startswith(("before", "meanwhile_", "after"))]
    assert sorted(ours) == sorted(["before", *((f"meanwhile_{i}" * 2)[:12] for i in range(40)), "after"]), "each once"
    assert len(names) == 1042


def test_a_lock_that_lasts_delays_and_loses_nothing(tmp_path):
    path = tmp_path / "a.tessera"
    with RunWriter(path) as run:
        run._store.db.execute("PRAGMA busy_timeout=1")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        run.add_row("mark", "meanwhile", 1, 1)
        with pytest.raises(RecordingError, match="could not be written"):
            run.flush()
        other.execute("ROLLBACK")
        other.close()
        run.flush()
        assert "locked" in run.stalls[0] and run.error is None
    with RunFile(path) as found:
        assert len(found.timeline()) == 1


def test_kernels_are_written_when_they_come(tmp_path, monkeypatch):
    """Not with the next of the writer's rounds: a killed program would lose them."""
    monkeypatch.setattr("tessera.profile.runfile_write.COMMIT_S", 1e6)
    with RunWriter(tmp_path / "a.tessera") as writer:
        writer.add_timeline(make_timeline(100))
        wait_until(lambda: RunFile(tmp_path / "a.tessera").rows == 100)


def test_a_timeline_that_is_half_committed_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr("tessera.profile.runfile_write.COMMIT_S", 0.0)  # a commit after each chunk
    monkeypatch.setattr("tessera.profile.runfile_store.CHUNK_ROWS", 2)
    path = tmp_path / "a.tessera"
    with RunWriter(path) as run, run._lock:  # the writer's own thread waits
        run.add_timeline(make_timeline(7))
        run.add_row("mark", "live", 1, 1)
        chunk, left = run._store._chunk, [2]

        def fail_third(*args):
            left[0] -= 1
            if left[0] < 0:
                raise sqlite3.OperationalError("disk I/O error")
            chunk(*args)

        monkeypatch.setattr(run._store, "_chunk", fail_third)
        with pytest.raises(RecordingError, match="disk I/O"):
            run.flush()
        monkeypatch.setattr(run._store, "_chunk", chunk)
        run.flush()
    with RunFile(path) as found:
        rows = found.timeline()
        assert len(rows) == 8 and sum(rows.name(i) == "live" for i in range(8)) == 1
        assert len(found.get("timelines")) == 1


def test_what_does_not_fit_into_memory_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("tessera.profile.runfile_write.MAX_WAITING", 10)
    monkeypatch.setattr("tessera.profile.runfile_write.LAST_TRY_S", 0.0)
    run = RunWriter(tmp_path / "a.tessera")
    fill(run, full=True)
    for i in range(30):
        run.add_row("mark", f"{i}" * 5000, i, i)
    with pytest.raises(RecordingError) as caught:
        run.close()
    assert "30 entries are lost" in str(caught.value.why)


def test_a_full_disk_does_not_stop_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr("tessera.profile.runfile_write.LAST_TRY_S", 0.0)
    run = RunWriter(tmp_path / "a.tessera")
    run.add_row("mark", "before", T0, T0)
    run.flush()
    pages = run._store.db.execute("PRAGMA page_count").fetchone()[0]
    run._store.db.execute(f"PRAGMA max_page_count={pages}")  # what ENOSPC looks like to SQLite
    run.add_timeline(make_timeline(100_000))
    with pytest.raises(RecordingError, match="could not be written") as caught:
        run.flush()
    assert "full" in str(caught.value.why)
    for _ in range(100):
        run.add_row("mark", "after", T0, T0)
    with pytest.raises(RecordingError):
        run.close()
    run.close()  # said once
    back = RunFile(tmp_path / "a.tessera")
    assert back.crashed
    assert back.rows == 1


def test_after_close_nothing_is_kept_and_nothing_breaks(tmp_path):
    run = RunWriter(tmp_path / "a.tessera")
    run.close()
    run.close()
    run.add_row("mark", "late", T0, T0)
    run.add_timeline(make_timeline(10))
    run.set("a", 1)
    run.flush()
    assert RunFile(tmp_path / "a.tessera").rows == 0


def test_a_forked_child_leaves_the_file_alone(tmp_path):
    code = """
        import os, sys, time
        from tessera.profile.runfile import RunWriter
        run = RunWriter(sys.argv[1])
        run.add_row("mark", "parent", 1, 1)
        pid = os.fork()
        if pid == 0:
            run.add_row("mark", "child", 1, 1)
            run.flush()
            run.close()
            sys.exit(0)
        os.waitpid(pid, 0)
        time.sleep(0.5)
        run.add_row("mark", "parent", 2, 2)   # closed by nobody: at exit
    """
    path = tmp_path / "a.tessera"
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(path)], check=True, timeout=300)
    back = RunFile(path)
    found = back.timeline()
    assert [found.name(i) for i in range(len(found))] == ["parent", "parent"]
    assert not back.crashed
    assert side_files(path) == []


def test_a_copy_of_a_closed_file_is_enough_while_somebody_reads(tmp_path):
    path = tmp_path / "a.tessera"
    run = RunWriter(path)
    run.add_row("mark", "m", T0, T0)
    run.flush()
    reader = RunFile(path)
    run.close()
    shutil.copy(path, tmp_path / "b.tessera")
    reader.close()
    assert RunFile(tmp_path / "b.tessera").rows == 1


def test_chunks_stream_the_columns_asked_for(tmp_path):
    path = tmp_path / "a.tessera"
    timeline = make_timeline(150_000)
    timeline.extra = {140_000: {"sm_occupancy": 1.0}}
    with RunWriter(path) as run:
        run.add_timeline(timeline)
    chunks = list(RunFile(path).chunks(("kind", "end_ns", "energy_j")))
    assert [(c.first_row, len(c)) for c in chunks] == [(0, 65_536), (65_536, 65_536), (131_072, 18_928)]
    assert set(chunks[0].columns) == {"kind", "end_ns", "energy_j"}
    np.testing.assert_array_equal(np.concatenate([c["end_ns"] for c in chunks]), timeline["end_ns"])
    assert np.isnan(chunks[0]["energy_j"]).all()
    assert chunks[2].extra == {140_000 - 131_072: {"sm_occupancy": 1.0}}


@pytest.mark.parametrize("jitter_ns", [32, 400])
def test_replays_of_a_graph_are_read_though_their_rows_take_a_few_bytes(
    jitter_ns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.read_limits.ROWS", 0)
    rng, kernels, replays = np.random.default_rng(0), 334, 300
    count = kernels * replays
    lasts_ns = np.tile(rng.integers(1_500, 12_000, kernels), replays) + 32 * rng.integers(-1, 2, count)
    start_ns = T0 + np.cumsum(lasts_ns + 700 + jitter_ns * rng.integers(0, 2, count))
    builder = Builder()
    for number in range(20):
        builder.intern(f"kernel_{number}")
    which = np.tile(rng.integers(0, 20, kernels), replays)
    columns = {"name": which, "kind": 0, "start_ns": start_ns, "end_ns": start_ns + lasts_ns, "device": 0, "stream": 7}
    columns |= {
        "correlation": np.repeat(np.arange(replays), kernels),
        "graph_node": np.tile(np.arange(kernels), replays),
    }
    builder.extend({name: np.asarray(values) for name, values in columns.items()}, count)
    path = tmp_path / "graph.tessera"
    with RunWriter(path) as writer:
        writer.add_timeline(builder.build())
    assert path.stat().st_size / count < 6
    with RunFile(path) as run:
        assert len(run.timeline()) == count


def test_a_small_file_of_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.read_limits.ROWS", 1_000)
    builder = Builder()
    builder.intern("kernel")
    builder.extend(
        {"name": np.array(0), "kind": np.array(0), "start_ns": np.array(T0), "end_ns": np.array(T0)}, 200_000
    )
    path = tmp_path / "rows.tessera"
    with RunWriter(path) as writer:
        writer.add_timeline(builder.build())
    with RunFile(path) as run, pytest.raises(RecordingError, match="200,000 rows"):
        run.timeline()
