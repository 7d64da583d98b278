"""Damaged input through every parser but the traces' (fuzz_traces.py): a result or one of our own errors, and soon.

    python benchmarks/fuzz/fuzz_parsers.py 100000                 prints how the cases of each parser ended
    python benchmarks/fuzz/fuzz_parsers.py --only runfile --case 17

Every case begins with something right (a recorded file, an answer of a BMC, a plan) and is damaged one to four times:
cut, flipped, spliced, cells and lines moved, values of wrong types, huge, negative, NaN, nested. Run files are damaged
inside their tables too. A case is made from its number, so that one that fails can be made again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

BENCHMARKS = Path(__file__).resolve().parents[1]
TESTS = BENCHMARKS.parent / "tests"
sys.path.insert(0, str(TESTS))

from fuzz_traces import cut, flip
from tessera.errors import TesseraError

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

LIMIT_S = 5.0
ODD: tuple[Any, ...] = (
    None, True, "", "x", "1e5", -1, 0, 1, 2**31, 2**63, 2**64, -(2**70), 1e308, -1e308, 0.5, 10**400, "9" * 30, [], {},
    [1, [2]], {"a": None}, "\x00", "é" * 40, "../../etc/passwd", "<script>", float("nan"), float("inf"),
)  # fmt: skip
TOKENS = (
    b"", b"NaN", b"inf", b"-inf", b"-1", b"0", b"1e999", b"9" * 400, b"\xff\xfe", b'"', b",", b"\n", b"\r", b"\x00", b"=",
    b"[" * 2000, b'{"a":' * 300, b"n/a", b"--", b"\xe2\x80\xa8", "²٣".encode(),
)  # fmt: skip


# -- damage ---------------------------------------------------------------------------------------------------------


def _spot(rng: random.Random, root: Any) -> tuple[Any, Any] | None:
    """A place in a JSON value: a container and a key of it."""
    here, key = {"": root}, ""
    for _ in range(rng.randint(1, 7)):
        inner = here[key]
        if isinstance(inner, dict) and inner:
            here, key = inner, rng.choice(list(inner))
        elif isinstance(inner, list) and inner:
            here, key = inner, rng.randrange(len(inner))
        else:
            break
    return None if here is root and not root else (here, key)


def _values(rng: random.Random, data: bytes) -> bytes:
    """Values of a JSON text replaced, dropped or nested; other texts as they are."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    for _ in range(rng.randint(1, 4)):
        spot = _spot(rng, value)
        if spot is None:
            continue
        here, key = spot
        if rng.random() < 0.2:
            with contextlib.suppress(KeyError, IndexError):
                del here[key]
        else:
            here[key] = copy.deepcopy(rng.choice(ODD))
    with contextlib.suppress(ValueError):  # 10**400 may not be written under Python's digit limit
        return json.dumps(value).encode("utf-8", "surrogatepass")
    return data


def _splice(rng: random.Random, data: bytes) -> bytes:
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    b = min(b, a + rng.choice((0, 4, 40, len(data))))
    return data[:a] + rng.choice(TOKENS) + data[b:]


def _lines(rng: random.Random, data: bytes) -> bytes:
    """A line dropped, doubled or moved, or a cell of one replaced."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    how = rng.randrange(4)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines[at:at] = [rng.choice(lines)] * rng.randint(1, 4)
    elif how == 2:
        rng.shuffle(lines)
    else:
        mark = rng.choice((b",", b"=", b":", b" "))
        cells = lines[at].split(mark)
        cells[rng.randrange(len(cells))] = rng.choice(TOKENS)
        lines[at] = mark.join(cells)
    return b"\n".join(lines)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A text damaged in one to four places."""
    ways: tuple[Callable[[random.Random, bytes], bytes], ...] = (
        _values,
        _values,
        _values,
        _lines,
        _lines,
        _splice,
        flip,
        cut,
    )
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(ways)(rng, data)
    return data


def damaged_database(rng: random.Random, data: bytes) -> bytes:
    """A run file with values of its tables replaced, or with its bytes damaged; mostly without a checksum."""
    if rng.random() < 0.1:
        return flip(rng, data)
    data = data[: len(data) // 4096 * 4096]
    if rng.random() < 0.3:
        return rng.choice((cut, flip, flip, _splice))(rng, data)
    db = sqlite3.connect(":memory:")
    try:
        db.deserialize(data)
        for _ in range(rng.randint(1, 3)):
            _damage_table(rng, db)
        return db.serialize()
    finally:
        db.close()


def _damage_table(rng: random.Random, db: sqlite3.Connection) -> None:
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    table = rng.choice(tables)
    column = rng.choice([row[1] for row in db.execute(f"PRAGMA table_info({table})")])
    rows = db.execute(f"SELECT {column} FROM {table}").fetchall()
    if not rows:
        return
    (old,) = rng.choice(rows)
    new: Any
    if isinstance(old, bytes) and rng.random() < 0.8:
        new = rng.choice((cut, flip))(rng, old)
    elif isinstance(old, str) and rng.random() < 0.8:
        new = rng.choice((_values, flip, cut))(rng, old.encode()).decode("utf-8", "replace")
    else:
        new = rng.choice((None, "", "x", -1, 0, 7, 2**62, -(2**62), 0.5, 1e308, b"", b"\x00\xff", b"{}", "{}", "[]"))
    with contextlib.suppress(sqlite3.Error):  # a key that is there twice
        if rng.random() < 0.1:
            db.execute(f"DELETE FROM {table} WHERE {column} IS ?", (old,))
        else:
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {column} IS ?", (new, old))
        db.commit()


# -- what is parsed -------------------------------------------------------------------------------------------------


def _units(data: bytes, _: Path) -> None:
    from tessera import units

    text = data.decode("utf-8", "replace")
    readers = [getattr(units, name) for name in dir(units) if name.startswith("parse_")]
    for read in readers:
        with contextlib.suppress(units.UnitError):
            read(text)


def _runfile(data: bytes, folder: Path) -> None:
    """All that `tessera report` and `tessera export` read."""
    from tessera.analyze.answer import answer
    from tessera.profile.export import Chrome, SummaryCsv
    from tessera.profile.runfile import RunFile
    from tessera.report.run_html import page

    path = folder / "run.tessera"
    path.write_bytes(data)
    with RunFile(path) as run:
        for look in (lambda: run.notes, lambda: run.facts, run.timeline, run.power, run.telemetry, run.stacks):
            with contextlib.suppress(TesseraError):
                look()
        recording = run.recording()
        list(recording.records())
        page(recording, result=answer(recording))
        for exporter in (Chrome(folder / "trace.json"), SummaryCsv(folder / "summary.csv")):
            exporter.write(recording)


def _power_log(data: bytes, folder: Path) -> None:
    from tessera.profile.powerlog import read_power

    path = folder / "power.csv"
    path.write_bytes(data)
    trace = read_power(path)
    trace.energy()
    with contextlib.suppress(TesseraError):
        _ = trace.peak_w, trace.mean_w


def _replay(data: bytes, folder: Path) -> None:
    from tessera.sensors.replay import ReplaySensor

    path = folder / "replay.csv"
    path.write_bytes(data)
    sensor = ReplaySensor.from_csv(path, speed=None)
    sensor.start()
    sensor.read()


def _ncu(data: bytes, _: Path) -> None:
    from tessera.profile.counters import ncu

    ncu.parse(data.decode("utf-8", "replace"))


def _counters(module: str) -> Callable[[bytes, Path], None]:
    def parse(data: bytes, folder: Path) -> None:
        import importlib

        path = folder / "counters.csv"
        path.write_bytes(data)
        importlib.import_module(f"tessera.profile.counters.{module}").read(path)

    return parse


def _redfish(data: bytes, _: Path) -> None:
    """A whole service whose resources are those of a JSON object; every answer is parsed as if it came by HTTP."""
    from tessera.sensors._redfish_http import RequestFailed, _parse, local_path
    from tessera.sensors._redfish_walk import Walker

    asked = Counter[str]()

    def get(uri: object) -> dict[str, Any]:
        path = local_path(uri, ("bmc", 443))
        asked[path] += 1
        assert sum(asked.values()) < 100_000, "a service that loops is asked without an end"
        if path not in service:
            raise RequestFailed("status", f"{path}: HTTP 404")
        return _parse(json.dumps(service[path]).encode(), path)

    try:
        service = _parse(data, "/")
        survey = Walker(get).walk()
        for point in survey.points:
            reading = point.parse(get(point.path))
            assert reading.power_w is not None or reading.problem or point.circuit
    except RequestFailed as error:
        assert error.reason


def _ipmi(data: bytes, _: Path) -> None:
    from tessera.sensors.ipmi import parse_power_reading

    with contextlib.suppress(ValueError):  # its contract; the sensor makes a gap of it
        parse_power_reading(data.decode("utf-8", "replace"))


def _dynolog(data: bytes, _: Path) -> None:
    from tessera.profile.attach import daemon

    kind, body = daemon.decode(data)
    if kind == daemon.REQUEST:
        assert len(daemon.decode_request(body).pids) <= 64


def _kineto_figures(data: bytes, _: Path) -> None:
    from tessera.profile.attach.request import figures
    from tessera.profile.attach.tracks import split

    figures(data)
    split(data)


def _plan(data: bytes, folder: Path) -> None:
    from tessera.runtime.tuning.plan import Plan

    path = folder / "plan.json"
    path.write_bytes(data)
    plan = Plan.load(path)
    _ = plan.baseline, plan.best
    str(plan)


def _calibration(data: bytes, folder: Path) -> None:
    from tessera.estimate import calibration

    path = folder / "h200.json"
    path.write_bytes(data)
    calibration._read.cache_clear()
    found = calibration._read(path, 0, 0, 0)
    _ = found.provenance
    found.energy_factor("gemm", "bf16")


def _device(data: bytes, folder: Path) -> None:
    """A user's file, alone and laid over the catalogue."""
    from tessera.hardware import load
    from tessera.hardware.index import _read_packaged, _sign, _text, _without_stale_notes

    path = folder / "mine.toml"
    path.write_bytes(data)
    table = load.read(_text(path), str(path))
    _sign(table, path)
    under = _read_packaged().get(table["id"]) or _read_packaged()["h200"]
    for raw in (table, _without_stale_notes(load.merge(under, table), table)):
        with contextlib.suppress(TesseraError):
            load.build(raw, str(path), (str(path),))


def _report(data: bytes, folder: Path) -> None:
    """What `tessera diff` takes."""
    from tessera import analyze

    path = folder / "report.json"
    path.write_bytes(data)
    found = analyze.diff(path, path)
    str(found)
    found.to_json()


def _regions(data: bytes, folder: Path) -> None:
    from tessera.monitor.regions import read_regions

    path = folder / "1.json"
    path.write_bytes(data)
    read_regions(folder)
    path.unlink()


def _journal(data: bytes, folder: Path) -> None:
    from tessera.actuators import journal, locks

    with mock.patch.dict(os.environ, {locks.VARIABLE: str(folder / "journals")}):
        locks.gpu_file("GPU-1", ".json").write_bytes(data)
        journal.read_journal("GPU-1")


def _address(data: bytes, _: Path) -> None:
    from tessera.cli.listen_address import _ADDRESS

    found = _ADDRESS.fullmatch(data.decode("utf-8", "replace").strip())
    assert found is None or int(found["port"]) <= 99_999


# -- what is right --------------------------------------------------------------------------------------------------


@functools.cache
def _run_seed() -> bytes:
    from synthetic_run import make

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.tessera"
        make(steps=2, layers=2).write(path).close()
        return path.read_bytes()


def _files(*names: str) -> Callable[[], list[bytes]]:
    return lambda: [(TESTS / "data" / "counters" / name).read_bytes()[:6000] for name in names]


def _power_seeds() -> list[bytes]:
    own = "epoch_us,domain,watts,basis\n" + "".join(
        f"{1_790_000_000_000_000 + 20_000 * i},gpu0,{300 + i}.5,measured\n" for i in range(12)
    )
    smi = "timestamp, index, name, power.draw.instant [W]\n" + "".join(
        f"2026/11/15 09:30:00.{i:03d}, {i % 2}, NVIDIA H200, {300 + i}.25 W\n" for i in range(0, 240, 20)
    )
    bare = "timestamp, power.draw\n2026/11/15 09:30:00.000, 90.1\n2026/11/15 09:30:01.000, [N/A]\n2026/11/15 09:30:02.000, 95\n"
    return [own.encode(), smi.encode(), bare.encode()]


def _redfish_seeds() -> list[bytes]:
    from fakes.redfish_server import new_service, old_service, pdu_service

    return [json.dumps(service).encode() for service in (old_service(), new_service(), pdu_service(3))]


def _dynolog_seeds() -> list[bytes]:
    from tessera.profile.attach import daemon

    return [
        daemon.encode(daemon.REQUEST, daemon.encode_request(daemon.ACTIVITIES, 0, (1, 2, 3))),
        daemon.encode(daemon.REGISTER, daemon.encode_context(0, 1, 0)),
    ]


def _plan_seeds() -> list[bytes]:
    import msgspec

    from tessera.runtime.tuning.plan import OpPlan, Plan, TuningTrial

    trials = [
        TuningTrial(
            setting={},
            time_s=1.0,
            error_s=0.1,
            energy_j=100.0,
            error_j=1.0,
            power_w=100.0,
            basis="measured",
        ),
        TuningTrial(setting={"compile": True, "cap_w": 300.0}, time_s=0.8, energy_j=70.0, deviation=1e-4),
        TuningTrial(setting={"precision": "bf16"}, refused="changes the result"),
    ]
    op = OpPlan(op="aten::mm", calls=3, share_pct=60.0, precision="bf16", clock="low", why="fits")
    plan = Plan(
        function="f", policy="energy", setting={"compile": True, "cap_w": 300.0}, why={"compile": "saves 30%"}, trials=trials,
        ops=[op], device="cpu", key={"device": "cpu"}, notes=["a note"], spent_s=3.0, made="2026-11-15",
    )  # fmt: skip
    return [msgspec.json.encode(plan)]


def _calibration_seeds() -> list[bytes]:
    watts = {"value": 700.0, "how": "measured", "error_w": 7.0}
    scale = {"factor": 1.1, "spread": 0.05, "points": 4, "mean": 1.12}
    return [json.dumps({
        "device": "h200", "board": "NVIDIA H200", "driver": "580", "torch": "2.11", "date": "2026-11-15", "host_cpu": "Xeon",
        "host_scale": scale, "time_scale": {"gemm.bf16": scale, "norm": scale}, "energy_scale": {"gemm.bf16": scale},
        "idle_w": watts, "idle_context_w": watts, "static_w": watts, "limit_w": {"value": None, "how": "not reached"},
        "notes": ["a note"], "schema_version": 1,
    }).encode()]  # fmt: skip


def _device_seeds() -> list[bytes]:
    catalog = BENCHMARKS.parent / "src" / "tessera" / "hardware" / "catalog"
    own = b'id = "h200"\n[memory]\nbandwidth = { value = 4.5e12, source = "measured" }\n[notes]\nidle_w = "mine"\n'
    return [(catalog / name).read_bytes() for name in ("h200.toml", "jetson-orin.toml", "epyc-9654.toml")] + [own]


def _report_seeds() -> list[bytes]:
    import msgspec

    from tessera.schema import Energy, EnergyReport, Work

    from synthetic_run import make

    energy = Energy(energy_j=10.0, error_j=0.5, time_s=2.0, source="nvml-samples")
    work = (Work(unit="step", amount=4.0),)
    report = EnergyReport(name="train.py", total=energy, by_domain={"gpu0": energy}, work=work)
    measured = msgspec.json.encode({"returncode": 0, "report": report})
    return [json.dumps(make(steps=2, layers=2).table.to_json(), default=float).encode(), measured]


def _regions_seeds() -> list[bytes]:
    import msgspec

    from tessera.monitor.regions import ProcessRegions, RegionStretch
    from tessera.schema import Energy, RegionEnergy

    energy = Energy(energy_j=1.0, error_j=0.1, time_s=1.0, source="x")
    regions = [
        RegionEnergy(name=n, calls=2, energy=energy, start_ns=s, end_ns=s + 5)
        for n, s in (("a", 0), ("a", 3), ("b", 9))
    ]
    stretches = {
        r.name: [RegionStretch(start_ns=0, end_ns=10**9, energies={"machine": r.energy, "process": r.energy})]
        for r in regions
    }
    return [msgspec.json.encode(ProcessRegions(regions=regions, stretches=stretches))]


def _journal_seeds() -> list[bytes]:
    import msgspec

    from tessera.actuators.journal import Claim, ClockChange, Journal, LimitChange

    claim = Claim(id="1", owner="2", pid=3, cap_w=300.0, clocks_mhz=(300, 1500))
    clocks = ClockChange(was_mhz=None, ours_mhz=(300, 1500), done=True)
    limit = LimitChange(was_w=700.0, ours_w=(300.0,))
    return [
        msgspec.json.encode(
            Journal(uuid="GPU-1", gpu="H200", vendor="nvidia", boot="b", claims=(claim,), limit=limit, clocks=clocks)
        )
    ]


def _text_seeds(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


class Target(NamedTuple):
    """A parser: what is right for it, how it is called, and how its input is damaged."""

    seeds: Callable[[], list[bytes]]
    parse: Callable[[bytes, Path], None]
    damage: Callable[[random.Random, bytes], bytes] = damaged
    share: int = 1
    """Cases of a hundred thousand go to the parsers by these shares."""


IPMI = """
    Instantaneous power reading:                   220 Watts
    Minimum during sampling period:                 18 Watts
    IPMI timestamp:                           Thu Nov 13 10:00:00 2026
    Sampling period:                          00000001 Seconds.
    Power reading state is:                   activated
"""
KINETO = json.dumps({"baseTimeNanoseconds": 1, "traceEvents": [
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 2.0, "args": {"External id": 1, "Input Dims": [[8, 8]]}},
    {"ph": "X", "cat": "kernel", "name": "ncclAllReduce", "ts": 2.0, "dur": 2.0, "args": {"External id": 1, "Collective name": "x"}},
]})  # fmt: skip
TARGETS = {
    "units": Target(_text_seeds("275W", "node:1.2kW", "20 ms", "[1,5]", "64MiB", "85C", "5%"), _units),
    "runfile": Target(lambda: [_run_seed()], _runfile, damaged_database),
    "power": Target(_power_seeds, _power_log, share=2),
    "replay": Target(_power_seeds, _replay),
    "ncu": Target(_files("ncu_h200.csv"), _ncu),
    "rocprof": Target(_files("rocprof.csv", "rocprofv3.csv"), _counters("amd")),
    "unitrace": Target(
        _files("unitrace_query.csv", "unitrace_sampling.csv", "unitrace_stalls.csv"), _counters("intel")
    ),
    "redfish": Target(_redfish_seeds, _redfish, share=2),
    "ipmi": Target(_text_seeds(IPMI), _ipmi),
    "dynolog": Target(_dynolog_seeds, _dynolog, share=2),
    "kineto": Target(_text_seeds(KINETO), _kineto_figures),
    "plan": Target(_plan_seeds, _plan, share=2),
    "calibration": Target(_calibration_seeds, _calibration, share=2),
    "device": Target(_device_seeds, _device),
    "report": Target(_report_seeds, _report),
    "regions": Target(_regions_seeds, _regions),
    "journal": Target(_journal_seeds, _journal),
    "address": Target(_text_seeds("127.0.0.1:9400", "[::1]:9400"), _address),
}


# -- running --------------------------------------------------------------------------------------------------------


class Hang(Exception):
    """A case took too long."""


def _alarm(*_: object) -> None:
    raise Hang


@functools.cache
def _seeds(name: str) -> list[bytes]:
    return TARGETS[name].seeds()


def case(name: str, number: int) -> bytes:
    """A damaged input, always the same for one parser and number; number 0 is undamaged."""
    rng = random.Random(f"{name}/{number}")
    seeds = _seeds(name)
    seed = seeds[number % len(seeds)]
    return seed if number < len(seeds) else TARGETS[name].damage(rng, seed)


def run(name: str, number: int, folder: Path) -> str:
    """How a case ended, "result" or "error"; anything else is raised."""
    data = case(name, number)
    signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an overflow in numpy is a wrong number
            TARGETS[name].parse(data, folder)
    except TesseraError as error:
        assert error.what and len(str(error)) < 4000
        return "error"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return "result"


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="tessera-fuzz-", dir=base)


def _tried(what: tuple[str, int]) -> tuple[str, int, str, float]:
    start = time.perf_counter()
    try:
        how = run(*what, Path(_folder().name))
    except BaseException as error:  # noqa: BLE001  (a fuzzer reports whatever comes)
        how = f"FAILED: {type(error).__name__}: {error}"[:200]
    return *what, how, time.perf_counter() - start


def _work(only: list[str], count: int, first: int) -> Iterator[tuple[str, int]]:
    shares = [name for name in only for _ in range(TARGETS[name].share)]
    numbers: Counter[str] = Counter()
    for i in range(count):
        name = shares[i % len(shares)]
        yield name, first + numbers[name]
        numbers[name] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=100_000)
    parser.add_argument("--only", action="append", choices=list(TARGETS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int, help="run one case of one --only parser and show how it fails")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", type=Path, default=BENCHMARKS / "results" / "fuzz_parsers.json")
    given = parser.parse_args()
    only = given.only or list(TARGETS)
    if given.case is not None:
        print(case(only[0], given.case)[:3000])
        print(run(only[0], given.case, Path(_folder().name)))
        return
    ends: dict[str, Counter[str]] = defaultdict(Counter)
    failed: list[tuple[str, int, str]] = []
    slowest: tuple[float, str, int] = (0.0, "", -1)
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        for name, number, how, seconds in pool.imap_unordered(_tried, _work(only, given.count, given.first), 100):
            ends[name][how.partition(":")[0]] += 1
            slowest = max(slowest, (seconds, name, number))
            if how.startswith("FAILED"):
                failed.append((name, number, how))
                if ends[name]["FAILED"] <= 5:
                    print(name, number, how, flush=True)
    figures = {
        "cases": given.count, "ends": {name: dict(ends[name]) for name in only}, "failed": failed[:50],
        "failures": len(failed), "slowest_s": round(slowest[0], 3), "slowest_case": slowest[1:],
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip
    for name, counted in ends.items():
        print(f"{name:10}", "  ".join(f"{how} {n}" for how, n in sorted(counted.items())))
    print(
        f"{given.count} cases, {len(failed)} failures, {figures['seconds']} s; slowest {slowest[0]:.2f} s ({slowest[1]} {slowest[2]})"
    )
    if not given.only:
        write_result(given.save, figures)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
