"""Hostile and damaged files through the commands that read them, each in a process of its own with limits.

    python benchmarks/fuzz/fuzz_files.py 10000 [--jobs 4] [--tried FILE]

Run files (flips, cuts, views, journals, rows without end, nested facts, damaged tables, a killed run's log), traces
(bombs, cut lists, nesting, wrong JSON, odd values), power logs, reports in JSON and chip files. A case is bounded by 5
s of CPU and 2 s for each 10 MB of each file that it reads, and by 1 GB of memory. It ends refused (one of our errors),
right (the answer of the undamaged file, where it can be known; else an answer), wrong, as a traceback, too slow or too
big. Every case is made from its number: --case N. `--tried` names a file that gets a line for each case as it ends; a
case that has one there is not run again, so that a long series may be stopped and gone on with.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import hashlib
import io
import json
import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from click.testing import CliRunner

import fuzz_parsers
import fuzz_traces
from result_file import write_result
from tessera.cli.main import cli
from tessera.errors import TesseraError
from tessera.profile.runfile import RunFile
from tessera.profile.runfile_format import APPLICATION_ID
from tessera.profile.runfile_open import DDL

from synthetic_run import make

BENCHMARKS = Path(__file__).resolve().parents[1]
MB = 1 << 20
BASE_S, S_PER_BYTE, MOST_BYTES = 5.0, 2.0 / 10e6, 1 << 30
ANALYSES = ("breakdown", "overlap", "roofline", "stalls", "collectives", "kernels", "critical_path", "memcpy", "memory",
            "power", "advise")  # fmt: skip
Words = Sequence[str]


@dataclass(frozen=True)
class Kind:
    """A sort of file: its name, how it is made from a random generator, and the commands that read it."""

    file: str
    build: Callable[[random.Random, Path], None]
    commands: Sequence[Words]
    exact: bool = False
    """Whether an answer must be that of the undamaged file."""


# -- Run files ------------------------------------------------------------------------------------------------------


@functools.cache
def sound_run() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.tessera"
        make(steps=3, layers=2).write(path).close()
        return path.read_bytes()


def _unsealed() -> bytes:
    whole = sound_run()
    return whole[: len(whole) // 4096 * 4096]


def _flip(rng: random.Random, path: Path) -> None:
    data = bytearray(sound_run())
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


def _cut(rng: random.Random, path: Path) -> None:
    path.write_bytes(sound_run()[: rng.randrange(len(sound_run()))])


def _tables(rng: random.Random, path: Path) -> None:
    path.write_bytes(fuzz_parsers.damaged_database(rng, _unsealed()))


def _statements(rng: random.Random, path: Path) -> None:
    path.write_bytes(_unsealed())
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i, i, i, i FROM n"
    table = rng.choice(("gaps", "stacks", "telemetry", "names", "facts", "about", "chunks"))
    script = rng.choice((
        f"DROP TABLE {table}; CREATE VIEW {table} AS {endless}",
        f"CREATE TRIGGER t AFTER INSERT ON {table} BEGIN DELETE FROM names; END",
        f"DROP TABLE {table}; CREATE VIRTUAL TABLE {table} USING fts4(a, b, c, d)",
        f"DROP TABLE {table}; CREATE TABLE {table} (a AS (zeroblob(1e9)), b)",
    ))  # fmt: skip
    with closing(sqlite3.connect(path)) as db:
        db.executescript(script)


def _rows(rng: random.Random, path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA application_id={APPLICATION_ID}")
        for statement in DDL.values():
            db.execute(statement)
        each, count = rng.choice(((1 << 18, 400), (1 << 16, 60), (0, 50_000), (1, 20_000), (1 << 24, 3)))
        heads = '[["kind",0],["name",0],["start_ns",5],["end_ns",0]]'
        rows = [(i * max(each, 1), each, heads) for i in range(count)]
        for table in rng.choice((("chunks",), ("chunks", "energy"))):
            db.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, x'')", rows)
        db.execute("INSERT INTO names VALUES (0, 'a')")
        nested = rng.choice(("[" * 100_000, "[" * 900 + "]" * 900, "[]," * 10, '{"a":' * 50_000))
        db.execute("INSERT INTO facts VALUES (?, ?)", (rng.choice(("meta", "timelines", "notes", "work", "x")), nested))
        db.commit()


def _journal(rng: random.Random, path: Path) -> None:
    path.write_bytes(rng.choice((sound_run(), _unsealed())))
    magic = bytes.fromhex("d9d505f920a163d7")
    pages = path.stat().st_size // 4096
    journal = (magic + struct.pack(">IIIII", 0, 0, rng.choice((pages, 1, 2**31)), 512, 4096)).ljust(512, b"\0")
    name = str(path.with_name("victim")).encode()
    journal += struct.pack(">I", 0x40000000 // 4096 + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    Path(f"{path}-journal").write_bytes(journal if rng.random() < 0.7 else fuzz_traces.flip(rng, journal))


@functools.cache
def _killed_run() -> tuple[bytes, bytes]:
    script = """
        import os, sys
        sys.path.insert(0, sys.argv[2])
        from tessera.profile.runfile import RunWriter
        run = RunWriter(sys.argv[1])
        for i in range(3000):
            run.add_row("region", f"step {i % 7}", 10**18 + i * 10**6, 10**18 + i * 10**6 + 9)
            if i % 500 == 0:
                run.flush()
        run.flush()
        os._exit(9)
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.tessera"
        words = [sys.executable, "-c", "\n".join(line[8:] for line in script.splitlines()), str(path), "src"]
        subprocess.run(words, check=False)
        return path.read_bytes(), Path(f"{path}-wal").read_bytes()


def _log(rng: random.Random, path: Path) -> None:
    main, log = _killed_run()
    path.write_bytes(main if rng.random() < 0.7 else fuzz_traces.flip(rng, main))
    damage = rng.choice((fuzz_traces.flip, fuzz_traces.cut, lambda _, data: data))
    Path(f"{path}-wal").write_bytes(damage(rng, log))


# -- Traces ---------------------------------------------------------------------------------------------------------

_EVENT = b'{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":%d,"dur":1}'
_START = b'{"traceEvents":['


def _damaged_trace(rng: random.Random, path: Path) -> None:
    path.write_bytes(fuzz_traces.case(rng.randrange(10**9)))


def _hostile_trace(rng: random.Random, path: Path) -> None:
    events = b",".join(_EVENT % i for i in range(10))
    size = rng.choice((1 << 12, 1 << 16, MB, 2 * MB))
    filler = rng.choice((b"[", b"{", b'{"a":', b"[],", b'{"a":1},', b'"', b'\\"', b" ", b"1.", b"x", b'{"ph":"X",', events,
                         b'{"ph":"X","name":"a"b"},', b'{{"ph":"X"},', b'"traceEvents":[', b'{"traceEvents":[1]},'))  # fmt: skip
    middle = (filler * (size // len(filler) + 1))[:size]
    end = rng.choice((b"", b"]}", b'],"a":[', b'],"traceName":"x"}', b"}]}"))
    text = rng.choice((_START, _START + events + b",", b"[", b"", b'{"a":[')) + middle + end
    if rng.random() < 0.3:
        text = _START + events + b"]," + rng.choice((b'"a":[', b"")) + middle
    path.write_bytes(text)


@functools.cache
def _packed(start: bytes, piece: bytes, size: int) -> bytes:
    return gzip.compress(start + piece * (size // len(piece)), 1)


def _bomb(rng: random.Random, path: Path) -> None:
    counter = b'{"ph":"C","ts":1,"args":{"a":1}},'
    piece = rng.choice((b" ", b"\0", b"[],", _EVENT % 5 + b",", b'{"a":', b'"aaaa', counter))
    start = rng.choice((_START, b"[", b"", b'{"a":[', _START + _EVENT % 1 + b'],"x":['))
    packed = _packed(start, piece, rng.choice((4, 80)) * MB)
    path.write_bytes(packed if rng.random() < 0.8 else fuzz_traces.cut(rng, packed))


# -- Others ---------------------------------------------------------------------------------------------------------


@functools.cache
def _sound_trace() -> bytes:
    """Two seconds of kernels, at the time of the power logs below."""
    kernel = '{"ph":"X","cat":"kernel","name":"k%d","pid":0,"tid":7,"ts":%d,"dur":9000,"args":{"device":0,"stream":7}}'
    events = ",".join(kernel % (i % 3, 10_000 * i) for i in range(200))
    return f'{{"baseTimeNanoseconds":1790857026000000000,"traceEvents":[{events}]}}'.encode()


def _power(rng: random.Random, path: Path) -> None:
    start = 1_790_857_026_000_000
    rows = [f"{start + 20_000 * i},gpu0,{300 + i}" for i in range(100)]
    head = "epoch_us,domain,watts"
    if rng.random() < 0.4:
        head = rng.choice(("timestamp, index, power.draw [W]", "timestamp, power.draw.instant, name", "timestamp"))
        stamps = (datetime.fromtimestamp(start / 1e6 + 0.02 * i) for i in range(100))
        rows = [f"{stamp:%Y/%m/%d %H:%M:%S.%f}, 0, {300 + i}.25 W" for i, stamp in enumerate(stamps)]
    for _ in range(rng.randint(0, 4)):
        odd = ("", ",,", "x,gpu0,1", f"{start},gpu0,4294967.295", f"{start},gpu0,-5", f"{2**70},gpu0,1", f"{start},,nan",
               f"{start},gpu{'9' * 30},5", f"{start},gpu0,1e999", "9" * 5000 + ",gpu0,1", '"' * 7, "2026/02/30 09:30:00, 0, 1 W",
               "0001/01/01 00:00:00.000, 0, 5 W", "2026/11/15 09:30:00.000, x, 5e5 W", f"{start},a.b.c,5", "\0")  # fmt: skip
        rows.insert(rng.randrange(len(rows) + 1), rng.choice(odd))
    if rng.random() < 0.1:
        rows = [f"{start + i},d{i},1" for i in range(20_000)]
    data = "\n".join([head, *rows]).encode()
    path.write_bytes(rng.choice((lambda _, d: d, lambda _, d: d, fuzz_traces.flip, fuzz_traces.cut))(rng, data))


def _report(rng: random.Random, path: Path) -> None:
    text = rng.choice((
        b'{"report": {"total": {"energy_j": 5, "error_j": 1, "time_s": 1}}}', b'{"energy_j": 5, "kernels": [{"name": "a"}]}',
        b'{"total_j": 5}', b'{"report":' * 100_000, b'{"report": [' + b"[]," * 200_000,
    ))  # fmt: skip
    data = rng.choice((lambda _, d: d, fuzz_traces.flip, fuzz_traces.cut))(rng, text)
    path.write_bytes(data)


def _chip(rng: random.Random, path: Path) -> None:
    seed = (Path(__file__).parents[2] / "src/tessera/hardware/catalog/h200.toml").read_bytes()
    config = path.parent / "config" / "tessera" / "hardware"
    config.mkdir(parents=True)
    data = rng.choice((fuzz_traces.flip, fuzz_traces.cut, lambda _, d: d + b"\nx = " + rng.choice((
        b"[" * 5000, b"1" * 5000, b"{a=" * 3000, b"a.b.c" * 9, b"1979-99-99", b'"' * 3 + b"x" * 100_000))))(rng, seed)  # fmt: skip
    (config / "mine.toml").write_bytes(data)


RUN = (("report", "{}"), ("report", "{}", "--json"), ("export", "{}", "--chrome", "{}.json"), ("diff", "{}", "{}"),
       *(("analyze", kind, "{}") for kind in ANALYSES))  # fmt: skip
TRACE = (
    *(("analyze", kind, "{}") for kind in ANALYSES),
    ("diff", "{}", "{}"),
    ("analyze", "breakdown", "{}", "--json"),
)
POWER = (("attribute", "{dir}/trace.json", "--power", "{}"), ("analyze", "power", "{dir}/trace.json", "--power", "{}"),
         ("analyze", "advise", "{dir}/trace.json", "--power", "{}"))  # fmt: skip
KINDS = {
    "run: flips": Kind("run.tessera", _flip, RUN, exact=True),
    "run: cut": Kind("run.tessera", _cut, RUN, exact=True),
    "run: tables": Kind("run.tessera", _tables, RUN),
    "run: views": Kind("run.tessera", _statements, RUN),
    "run: rows": Kind("run.tessera", _rows, RUN),
    "run: journal": Kind("run.tessera", _journal, RUN, exact=True),
    "run: killed": Kind("run.tessera", _log, RUN),
    "trace: damaged": Kind("trace.json", _damaged_trace, TRACE),
    "trace: hostile": Kind("trace.json", _hostile_trace, TRACE),
    "trace: bomb": Kind("trace.json.gz", _bomb, TRACE),
    "power log": Kind("power.csv", _power, POWER),
    "report": Kind("report.json", _report, (("diff", "{}", "{}"),)),
    "chip": Kind("chip.toml", _chip, (("hardware", "list"), ("hardware", "show", "h200"))),
}


# -- Running --------------------------------------------------------------------------------------------------------


def read_run(path: Path) -> str:
    """Everything a run file says, as one number."""
    with RunFile(path) as run:
        timeline, power = run.timeline(), run.power()
        parts = [values.tobytes() for _, values in sorted(timeline.columns.items())]
        rest = (timeline.names, run.telemetry(), run.stacks(), run.facts, run.about, power.energy_j, timeline.launches)
        return hashlib.sha256(b"".join(parts) + repr(rest).encode()).hexdigest()


@functools.cache
def _expected(name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.tessera"
        if name == "run: killed":
            main, log = _killed_run()
            path.write_bytes(main)
            Path(f"{path}-wal").write_bytes(log)
        else:
            path.write_bytes(sound_run())
        return read_run(path)


def _says_damage(path: Path) -> bool:
    """Whether a killed run says that something is left out. A log that is shorter is that of a run killed earlier."""
    log = Path(f"{path}-wal")
    with RunFile(path) as run:
        is_cut = log.exists() and log.stat().st_size != len(_killed_run()[1])
        return is_cut or any("-wal is damaged" in note for note in run.notes)


def prepare(number: int, folder: Path) -> tuple[str, Path, Words]:
    """Write the files of a case; its kind, its main file and the words of its command."""
    rng = random.Random(number)
    name = list(KINDS)[number % len(KINDS)]
    kind = KINDS[name]
    path = folder / kind.file
    (folder / "victim").write_text("precious")
    if name == "power log":
        (folder / "trace.json").write_bytes(_sound_trace())
    kind.build(rng, path)
    return name, path, [w.format(path, dir=folder) for w in rng.choice(kind.commands)]


def try_case(name: str, path: Path, words: Words) -> str:
    """How the case ends, in a child."""
    os.environ["XDG_CONFIG_HOME"] = str(path.parent / "config")
    os.environ["XDG_CACHE_HOME"] = str(path.parent / "cache")
    if KINDS[name].exact or name == "run: killed":
        try:
            if read_run(path) != _expected(name) and not _says_damage(path):
                return "wrong"
        except TesseraError:
            return "refused"
    result = CliRunner().invoke(cli, list(words), standalone_mode=False)
    if (path.parent / "victim").read_text() != "precious":
        return "wrong"
    error = result.exception
    if error is None:
        return "refused" if result.return_value == 2 else "right"  # diff prints its error itself
    if isinstance(error, (TesseraError, SystemExit)) or type(error).__module__.startswith("click"):
        return "refused"
    if isinstance(error, MemoryError):
        return "too big"
    lines = traceback.format_exception(error)
    return f"traceback: {lines[-1].strip()[:120]} {lines[-2].strip().splitlines()[0][-90:]}"


def run(number: int) -> tuple[str, str, float]:
    """The kind of a case, how it ended and its CPU seconds."""
    with tempfile.TemporaryDirectory(prefix="tessera-fuzz-", dir="/dev/shm") as folder:
        name, path, words = prepare(number, Path(folder))
        size = sum(p.stat().st_size for p in Path(folder).iterdir() if p.is_file())
        limit_s = (BASE_S + S_PER_BYTE * size) * max(words.count(str(path)), 1)  # diff reads the file twice
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES + (1 << 28), resource.RLIM_INFINITY))
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 2))
            signal.alarm(int(120 * limit_s))  # waits without end; a busy machine gives a case little of the time
            try:
                how = try_case(name, path, words)
            except BaseException as error:  # noqa: BLE001  (a fuzzer reports whatever comes)
                how = (
                    "too big" if isinstance(error, MemoryError) else f"traceback: {type(error).__name__}: {error}"[:200]
                )
            os.write(writer, how.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            how = pipe.read().decode()
        _, status, usage = os.wait4(pid, 0)
        seconds = usage.ru_utime + usage.ru_stime
        if not how:
            how = (
                "too slow"
                if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)
                else "traceback: died"
            )
        return name, "too slow" if seconds > limit_s else how, seconds


def run_numbered(number: int) -> tuple[int, str, str, float]:
    """A case's number before its kind, how it ended and its CPU seconds."""
    return number, *run(number)


class Tried:
    """How each case ended, kept in a file where one is given: one line of JSON a case."""

    def __init__(self, path: Path | None) -> None:
        self.ends: dict[int, tuple[str, str, float]] = {}
        lines = path.read_text().splitlines() if path and path.exists() else []
        for number, *end in map(json.loads, lines):
            self.ends[number] = tuple(end)
        self._file = path.open("a", buffering=1) if path else contextlib.nullcontext()

    def __enter__(self) -> Tried:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def run(self, numbers: Sequence[int], jobs: int) -> None:
        """Run the cases, some at a time (each is a process of its own in any case), until all are done or SIGTERM."""
        stopping: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
        seen: set[str] = set()
        with multiprocessing.get_context("fork").Pool(jobs, signal.signal, (signal.SIGTERM, signal.SIG_DFL)) as pool:
            for number, *end in pool.imap_unordered(run_numbered, numbers, chunksize=8):
                self.ends[number] = name, how, _ = tuple(end)
                if isinstance(self._file, io.TextIOBase):
                    self._file.write(json.dumps([number, *end]) + "\n")
                if is_bad(how) and how not in seen:
                    seen.add(how)
                    print(number, name, how, flush=True)
                if stopping:
                    break

    def figures(self) -> dict[str, Any]:
        """How many ended how, by kind; what was bad; the slowest."""
        ends: dict[str, Counter[str]] = defaultdict(Counter)
        for name, how, _ in self.ends.values():
            ends[name][how.partition(":")[0]] += 1
        bad = {number: how for number, (_, how, _) in sorted(self.ends.items()) if is_bad(how)}
        slowest_s, slowest = max(((end[2], number) for number, end in self.ends.items()), default=(0.0, -1))
        total = sum(ends.values(), Counter[str]())
        return {"cases": len(self.ends), "ends": {k: dict(v) for k, v in ends.items()}, "total": dict(total),
                "bad": dict(Counter(bad.values())), "bad_cases": list(bad), "slowest_cpu_s": slowest_s, "slowest_case": slowest}  # fmt: skip


def is_bad(how: str) -> bool:
    """Whether a case ended neither refused nor right."""
    return how not in ("right", "refused")


def import_all() -> None:
    """Run each command once on sound files here: the children then need not import what it needs."""
    with tempfile.TemporaryDirectory() as folder:
        run_file, trace = Path(folder) / "run.tessera", Path(folder) / "trace.json"
        run_file.write_bytes(sound_run())
        trace.write_bytes(_sound_trace())
        (Path(folder) / "power.csv").write_text(
            "epoch_us,domain,watts\n1790857026000000,gpu0,300\n1790857027000000,gpu0,300\n"
        )
        for path, commands in ((run_file, RUN), (trace, TRACE), (Path(folder) / "power.csv", POWER)):
            for words in commands:
                CliRunner().invoke(cli, [w.format(path, dir=folder) for w in words], standalone_mode=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--case", type=int, help="run one case here and show how it ends")
    parser.add_argument("--tried", type=Path, help="cases tried already; what is tried is added")
    parser.add_argument("--save", type=Path, default=BENCHMARKS / "results" / "fuzz_files.json")
    given = parser.parse_args()
    if given.case is not None:
        folder = Path(tempfile.mkdtemp(prefix="tessera-fuzz-"))
        name, path, words = prepare(given.case, folder)
        print(name, *words)
        print(try_case(name, path, words))
        print(CliRunner().invoke(cli, list(words), standalone_mode=False).exc_info)
        return
    import_all()
    _expected("run: flips"), _expected("run: killed")
    begun = time.perf_counter()
    with Tried(given.tried) as tried:
        before = len(tried.ends)
        tried.run([n for n in range(given.first, given.first + given.count) if n not in tried.ends], given.jobs)
        figures = tried.figures()
    for name, counted in figures["ends"].items():
        print(f"{name:15}", "  ".join(f"{how} {n}" for how, n in sorted(counted.items())))
    totals = "  ".join(f"{how} {n}" for how, n in sorted(figures["total"].items()))
    print(f"{figures['cases']} of {given.count} files: {totals}  slowest {figures['slowest_cpu_s']:.1f} CPU s,",
          f"case {figures['slowest_case']}")  # fmt: skip
    figures |= {"asked": given.count, "first": given.first, "tried_before": before}
    if figures["cases"] >= 1000:
        write_result(given.save, figures | {"seconds": time.perf_counter() - begun})
    raise SystemExit(1 if figures["bad"] else 0)


if __name__ == "__main__":
    main()
