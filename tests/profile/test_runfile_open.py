"""Run files made to do harm, and run files that were damaged: refused or right."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tessera.errors import RecordingError
from tessera.profile.export.tensorboard import _copy_run
from tessera.profile.runfile import RunFile, RunWriter
from tessera.profile.runfile_checksum import seal, unseal
from tessera.profile.runfile_format import APPLICATION_ID
from tessera.profile.runfile_open import DDL
from tessera.schema import Domain

T0 = 1_790_000_000_000_000_000
GPU = Domain(name="gpu0", source="nvml-samples", resolution_s=0.02)


def write_run(path: Path, rows: int = 300) -> Path:
    with RunWriter(path, meta={"a": 1}) as run:
        for i in range(rows):
            run.add_row("region", f"step {i % 7}", T0 + i * 10**6, T0 + i * 10**6 + 900_000 + i)
        times = T0 + np.arange(500) * 20_000_000
        run.add_samples(GPU, times, 300.0 + np.arange(500) % 17)
        run.add_stacks([(T0, 1, "a;b", 2), (T0 + 5, 1, "a;b", 1)])
        run.set("start_ns", T0)
        run.set("end_ns", T0 + 10**10)
    return path


def read_all(path: Path) -> tuple[object, ...]:
    with RunFile(path) as run:
        timeline = run.timeline()
        columns = {name: values.tobytes() for name, values in timeline.columns.items()}
        return columns, timeline.names, run.power().energy_j, run.facts, run.about, run.stacks(), run.telemetry()


# -- A journal ------------------------------------------------------------------------------------------------------


def write_journal(run: Path, victim: Path | None) -> None:
    """A hot journal beside a run, which names a file that SQLite deletes after it has rolled back."""
    magic = bytes.fromhex("d9d505f920a163d7")
    pages = run.stat().st_size // 4096
    journal = (magic + struct.pack(">IIIII", 0, 0, pages, 512, 4096)).ljust(512, b"\0")
    if victim is not None:
        name = str(victim).encode()
        lock_page = 0x40000000 // 4096 + 1
        journal += struct.pack(">I", lock_page) + name + struct.pack(">II", len(name), sum(name)) + magic
    Path(f"{run}-journal").write_bytes(journal)


def use(path: Path, how: str, folder: Path) -> None:
    if how == "read":
        RunFile(path).close()
    elif how == "append":
        RunWriter(path, mode="append").close()
    else:
        _copy_run(path, 0, folder)


@pytest.mark.parametrize("how", ["read", "append", "tensorboard"])
def test_a_journal_that_names_a_file_deletes_nothing(tmp_path, how):
    run = write_run(tmp_path / "a.tessera")
    unseal(run)
    victim = tmp_path / "thesis.tex"
    victim.write_text("ten years of work")
    write_journal(run, victim)
    with pytest.raises(RecordingError, match=r"a\.tessera-journal names another file") as caught:
        use(run, how, tmp_path / "tb")
    assert victim.read_text() == "ten years of work"
    assert "do not trust" in str(caught.value.fix)


def test_the_journal_of_a_killed_run_is_recovered(tmp_path):
    """Where a file system has no shared memory, SQLite keeps a rollback journal; a kill leaves it."""
    path = tmp_path / "a.tessera"
    script = f"""
        import os, sqlite3
        db = sqlite3.connect({str(path)!r}, isolation_level=None)
        db.execute("PRAGMA cache_size=1")
        db.execute("BEGIN")
        db.execute("DELETE FROM chunks"); db.execute("UPDATE facts SET value = '[]'")
        db.executemany("INSERT INTO names VALUES (?, ?)", [(1000 + i, "x" * 3000) for i in range(50)])
        os._exit(9)
    """
    write_run(path)
    unseal(path)
    expected = read_all(path)
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert Path(f"{path}-journal").stat().st_size > 512
    assert read_all(path) == expected


# -- Foreign tables -------------------------------------------------------------------------------------------------

HANG = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i, i, i, i FROM n"


@pytest.mark.parametrize(
    "statement",
    [
        f"DROP TABLE gaps; CREATE VIEW gaps AS {HANG}",
        f"CREATE VIEW other AS {HANG}",
        "CREATE TRIGGER t AFTER INSERT ON names BEGIN DELETE FROM chunks; END",
        "DROP TABLE stacks; CREATE VIRTUAL TABLE stacks USING fts4(epoch_ns, thread, stack, count)",
        "DROP TABLE gaps; CREATE TABLE gaps (domain TEXT, start_ns AS (length(zeroblob(1e9))), end_ns, reason)",
        "CREATE INDEX own ON names (length(text))",
    ],
)
def test_only_our_own_tables_are_read(tmp_path, statement):
    run = write_run(tmp_path / "a.tessera")
    unseal(run)
    with closing(sqlite3.connect(run)) as db:
        db.executescript(statement)
    with pytest.raises(RecordingError, match="that Tessera does not make"):
        RunFile(run)


def test_nothing_but_reading_our_tables_is_allowed(tmp_path):
    with RunFile(write_run(tmp_path / "a.tessera")) as run:
        for sql in (
            "SELECT load_extension('x')",
            "ATTACH '/tmp/x' AS x",
            "PRAGMA writable_schema=1",
            "DELETE FROM names",
        ):
            with pytest.raises(RecordingError):
                run._db.rows(sql)


def test_a_long_query_hears_ctrl_c(tmp_path):
    with RunFile(write_run(tmp_path / "a.tessera", rows=3000)) as run:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        old = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        try:
            with pytest.raises(KeyboardInterrupt):
                run._db.rows(
                    "SELECT max(a.epoch_ns) FROM " + ", ".join(f"stacks {c}" for c in "abcdefghijklmnopqrstuvwxyz")
                )
        finally:
            signal.signal(signal.SIGALRM, old)


def test_a_query_that_takes_too_long_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("tessera.read_limits.SECONDS", 0.01)
    with RunFile(write_run(tmp_path / "a.tessera")) as run, pytest.raises(RecordingError, match="too long"):
        run._db.rows("SELECT max(a.epoch_ns) FROM " + ", ".join(f"stacks {c}" for c in "abcdefghijklmnopqrstuvwxyz"))


# -- Small files that are large -------------------------------------------------------------------------------------


def test_a_small_run_of_many_rows_is_refused(tmp_path):
    path = tmp_path / "a.tessera"
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA application_id={APPLICATION_ID}")
        for statement in DDL.values():
            db.execute(statement)
        heads = '[["kind",0],["name",0],["start_ns",5],["end_ns",0]]'
        db.executemany("INSERT INTO chunks VALUES (?, ?, ?, x'')", [(i << 18, 1 << 18, heads) for i in range(400)])
        db.execute("INSERT INTO names VALUES (0, 'a')")
        db.commit()
    assert path.stat().st_size < 100_000
    with RunFile(path) as run, pytest.raises(RecordingError, match="104,857,600 rows"):
        run.timeline()


def test_pages_that_are_listed_again_and_again_are_refused(tmp_path):
    """A page of a table's tree may name one leaf a hundred times: four levels of that are a hundred million rows."""
    path = tmp_path / "a.tessera"
    with RunWriter(path) as run:
        run.add_gaps([], 0)
    unseal(path)
    with closing(sqlite3.connect(path)) as db:
        root = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'gaps'").fetchone()[0]
        db.executemany("INSERT INTO gaps VALUES ('gpu0', 1, 2, ?)", [("x" * 20,)] * 20)
        db.commit()
        db.execute("CREATE TABLE more (a)")  # pages of our own
        db.executemany("INSERT INTO more VALUES (zeroblob(3000))", [()] * 8)
        db.commit()
        db.execute("PRAGMA writable_schema=ON")
        db.execute("DELETE FROM sqlite_master WHERE name = 'more'")
        db.commit()
    data = bytearray(path.read_bytes())
    leaf = data[(root - 1) * 4096 : root * 4096]
    last = len(data) // 4096
    pages = [root, last, last - 1, last - 2]
    for at, below in zip(pages, [*pages[1:], 0], strict=True):
        if not below:
            data[(at - 1) * 4096 : at * 4096] = leaf
            continue
        page = bytearray(4096)
        count = 400
        page[0], page[3:5], page[5:7] = 5, struct.pack(">H", count), struct.pack(">H", 4096 - 5 * count)
        page[8:12] = struct.pack(">I", below)
        for i in range(count):
            offset = 4096 - 5 * (i + 1)
            page[12 + 2 * i : 14 + 2 * i] = struct.pack(">H", offset)
            page[offset : offset + 5] = struct.pack(">IB", below, 127)
        data[(at - 1) * 4096 : at * 4096] = page
    path.write_bytes(bytes(data))
    with RunFile(path) as run, pytest.raises(RecordingError, match="again and again"):
        run.power()


# -- Damage ---------------------------------------------------------------------------------------------------------


def test_a_bit_that_flips_is_never_a_wrong_answer(tmp_path):
    path = write_run(tmp_path / "a.tessera")
    whole = path.read_bytes()
    expected = read_all(path)
    rng = random.Random(1)
    refused = 0
    for _ in range(100):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data))
        try:
            assert read_all(path) == expected
        except RecordingError as error:
            assert error.fix
            refused += 1
    assert refused >= 99  # a flip in the seal's own mark leaves a file without a checksum, and right


def kill_run(path: Path, most_frames: int = 16_384, flushes: int = 12) -> Path:
    """A run whose writer is killed; few `most_frames` make it empty its log into the file meanwhile."""
    script = f"""
        import os, sys
        from tessera.profile import runfile_checksum
        from tessera.profile.runfile import RunWriter
        from tessera.schema import Domain
        runfile_checksum.MOST_FRAMES = {most_frames}
        run = RunWriter({str(path)!r})
        gpu = Domain(name="gpu0", source="nvml-samples", resolution_s=0.02)
        run.set("start_ns", {T0})
        for i in range({flushes}):
            for j in range(300):
                start_ns = {T0} + (300 * i + j) * 10**6
                run.add_row("region", f"step {{j % 7}}", start_ns, start_ns + 900 + j)
            run.add_samples(gpu, [{T0} + (50 * i + j) * 10**7 for j in range(50)], [300.0 + i + j for j in range(50)])
            run.flush()
        os._exit(9)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False).returncode == 9
    return path


def flip_and_read(path: Path, side: str, bits: list[int]) -> dict[str, int]:
    """How reading ends after each bit is flipped; nothing but right, refused and said is allowed."""
    files = {s: Path(f"{path}{s}").read_bytes() for s in ("", "-wal")}
    expected = read_all(path)
    ends = {"right": 0, "refused": 0, "said": 0}
    for bit in bits:
        for name, whole in files.items():
            data = bytearray(whole)
            if name == side:
                data[bit // 8] ^= 1 << bit % 8
            Path(f"{path}{name}").write_bytes(data)
        try:
            found = read_all(path)
        except RecordingError as error:
            assert error.fix
            ends["refused"] += 1
            continue
        with RunFile(path) as run:
            said = any("-wal is damaged" in note for note in run.notes)
        assert said or found == expected, (side, bit)
        ends["said" if said else "right"] += 1
    for name, whole in files.items():
        Path(f"{path}{name}").write_bytes(whole)
    return ends


def pick_bits(path: Path, count: int) -> list[int]:
    rng, size = random.Random(3), path.stat().st_size
    return [rng.randrange(8 * size) for _ in range(count)]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("tessera.profile.runfile_checksum._PAUSE_S", 0.0)


def test_a_flip_in_the_log_of_a_killed_run_is_said(tmp_path):
    path = kill_run(tmp_path / "a.tessera")
    log = Path(f"{path}-wal")
    ends = flip_and_read(path, "-wal", pick_bits(log, 60))
    assert ends["said"] > 40, ends  # those in the frames of the first commits leave no tables: refused
    salts = [8 * (log.stat().st_size - 4120 + byte) + 3 for byte in (4, 8, 12, 16, 20)]  # the head of the last frame
    assert flip_and_read(path, "-wal", salts)["said"] == len(salts)
    assert flip_and_read(path, "-wal", [8 * byte for byte in range(32)])["refused"] == 32  # the head of the log
    assert flip_and_read(path, "", pick_bits(path, 20))["said"] == 0


def test_a_flip_in_a_killed_run_that_left_its_log_is_refused(tmp_path):
    path = kill_run(tmp_path / "a.tessera", most_frames=40, flushes=30)
    pages = path.stat().st_size // 4096
    assert pages > 20
    assert flip_and_read(path, "", pick_bits(path, 60))["refused"] > 30  # the others are in the log too
    ends = flip_and_read(path, "-wal", pick_bits(Path(f"{path}-wal"), 60))
    assert ends["refused"] == 0, ends  # the file is whole without it


def test_a_killed_run_without_checksums_says_so(tmp_path):
    path = kill_run(tmp_path / "a.tessera", most_frames=40, flushes=30)
    expected = read_all(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 4096 * 4096])  # as it is while the log is emptied
    with RunFile(path) as run:
        assert any("it has no checksums" in note for note in run.notes)
    assert read_all(path) == expected
    log = bytearray(Path(f"{path}-wal").read_bytes())
    log[100] ^= 1
    Path(f"{path}-wal").write_bytes(log)
    with pytest.raises(RecordingError, match="not whole without it"):
        RunFile(path)


def test_a_damaged_log_that_is_already_in_the_file_changes_nothing(tmp_path):
    path = tmp_path / "a.tessera"
    writer = RunWriter(path)
    for i in range(2000):
        writer.add_row("region", f"step {i}", T0 + i, T0 + i + 1)
    writer.flush()
    writer._store._checkpointer.empty_log(writer._store.db)
    copy = Path(shutil.copy(path, tmp_path / "b.tessera"))
    log = bytearray(Path(f"{path}-wal").read_bytes())
    log[50] ^= 1
    Path(f"{copy}-wal").write_bytes(log)
    expected = read_all(path)
    assert read_all(copy) == expected
    with RunFile(copy) as run:
        assert not any("damaged" in note for note in run.notes)
    writer.close()


def test_a_damaged_run_is_not_added_to(tmp_path):
    path = kill_run(tmp_path / "a.tessera")
    log = bytearray(Path(f"{path}-wal").read_bytes())
    log[-100] ^= 1
    Path(f"{path}-wal").write_bytes(log)
    with pytest.raises(RecordingError, match=r"a\.tessera-wal beside it is damaged"):
        RunWriter(path, mode="append")
    assert Path(f"{path}-wal").read_bytes() == log


def test_a_live_run_is_read_while_its_log_is_emptied(tmp_path, monkeypatch):
    """Its checksums come and go; what is just being written is not damage."""
    monkeypatch.setattr("tessera.profile.runfile_checksum.MOST_FRAMES", 8)
    path = tmp_path / "a.tessera"
    with RunWriter(path) as writer:
        for i in range(20):
            writer.add_row("region", f"step {i}", T0 + i, T0 + i + 1)
            writer.add_samples(GPU, T0 + np.arange(3000) + 3000 * i, np.full(3000, 300.0))
            writer.flush()
            with RunFile(path) as run:
                assert len(run.samples("gpu0")[0]) == 3000 * (i + 1)
                assert not any("damaged" in note for note in run.notes)
    with RunFile(path) as run:
        assert (run.rows, run.notes) == (20, [])


def test_reading_leaves_no_file_behind(tmp_path):
    path = kill_run(tmp_path / "a.tessera")
    Path(f"{path}-shm").unlink()  # as where the two others were copied
    expected = read_all(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tessera", "a.tessera-wal"]
    for whole in (write_run(tmp_path / "b.tessera"), unsealed(write_run(tmp_path / "c.tessera"))):
        data = bytearray(whole.read_bytes())
        data[18:20] = b"\2\2"  # closed while somebody read it
        whole.write_bytes(data)
        if whole.name == "b.tessera":
            unseal(whole)
            seal(whole)
        read_all(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tessera", "a.tessera-wal", "b.tessera", "c.tessera"]
    assert read_all(path) == expected


def unsealed(path: Path) -> Path:
    unseal(path)
    return path


def test_a_file_without_a_checksum_is_read(tmp_path):
    path = write_run(tmp_path / "a.tessera")
    expected = read_all(path)
    unseal(path)  # as those of earlier versions are
    assert path.stat().st_size % 4096 == 0
    assert read_all(path) == expected
    unseal(path)
    assert read_all(path) == expected


def plant_log(path: Path, folder: Path) -> None:
    """Put the -wal of another run, which is still written to, beside a run."""
    writer = RunWriter(folder / "other.tessera")
    writer.add_row("mark", "of another run", 1, 2)
    writer.flush()
    shutil.copy(f"{writer.path}-wal", f"{path}-wal")
    writer.close()


def test_a_log_beside_a_sealed_run_is_not_read(tmp_path):
    path = write_run(tmp_path / "a.tessera")
    expected, bytes_before = read_all(path), path.read_bytes()
    plant_log(path, tmp_path)
    planted = Path(f"{path}-wal").read_bytes()
    assert read_all(path) == expected
    with RunFile(path) as run:
        assert run.notes == ["a.tessera-wal beside it is not of this run, which is complete: not read"]
    _copy_run(path, 0, tmp_path / "tb")
    assert read_all(tmp_path / "tb/plugins/tessera/a.0.tessera") == expected
    with pytest.raises(RecordingError, match=r"a\.tessera-wal beside it is not of this run") as caught:
        RunWriter(path, mode="append")
    assert caught.value.fix == "move a.tessera-wal away"
    assert (path.read_bytes(), Path(f"{path}-wal").read_bytes()) == (bytes_before, planted)


def test_a_journal_beside_a_sealed_run_is_not_read(tmp_path):
    path = write_run(tmp_path / "a.tessera")
    expected = read_all(path)
    write_journal(path, None)
    with RunFile(path) as run:
        assert "a.tessera-journal beside it" in run.notes[0]
    assert read_all(path) == expected


def test_a_run_that_somebody_reads_while_it_is_closed_is_whole(tmp_path):
    """Its end is in the -wal then, so that it has no seal."""
    path = tmp_path / "a.tessera"
    writer = RunWriter(path)
    writer.flush()
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM chunks").fetchone() == (0,)
        writer.add_row("mark", "the last", 1, 2)
        writer.close()
        with RunFile(path) as run:
            assert (run.rows, run.crashed, run.notes) == (1, False, [])


def test_a_run_that_is_added_to_is_sealed_again(tmp_path):
    path = write_run(tmp_path / "a.tessera")
    with RunWriter(path, mode="append") as run:
        assert path.read_bytes()[-20:-12] != b"TESSCRC1"
        run.set("more", 1)
    assert path.stat().st_size % 4096 == 20
    with RunFile(path) as back:
        assert back.get("more") == 1


def test_a_killed_run_without_its_log_says_which_file_to_copy(tmp_path):
    home = tmp_path / "node"
    home.mkdir()
    path = home / "train.tessera"
    script = f"""
        import os
        from tessera.profile.runfile import RunWriter
        run = RunWriter({str(path)!r})
        run.add_row("mark", "m", 1, 2)
        run.flush()
        os._exit(9)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    copy = Path(shutil.copy(path, tmp_path))
    with pytest.raises(RecordingError, match=r"its data are in train\.tessera-wal") as caught:
        RunFile(copy)
    assert "copy train.tessera-wal too" in str(caught.value.fix)
    shutil.copy(f"{path}-wal", tmp_path)
    assert RunFile(copy).rows == 1


def test_a_run_whose_log_was_lost_later_says_so(tmp_path):
    path = tmp_path / "a.tessera"
    writer = RunWriter(path)
    writer.add_row("mark", "m", 1, 2)
    writer.flush()
    writer._store.db.execute("PRAGMA wal_checkpoint")  # as it does by itself after 64 MB
    copy = Path(shutil.copy(path, tmp_path / "b.tessera"))
    writer.close()
    with RunFile(copy) as run:
        assert run.rows == 1
        assert any("b.tessera-wal is not beside it" in note for note in run.notes)


def test_reading_takes_little_memory(tmp_path):
    """No query holds more than the file has."""
    run = write_run(tmp_path / "a.tessera")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read_all(run)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
