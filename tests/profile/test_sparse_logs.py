"""Power logs whose rows lie farther apart than a sensor refreshes: `nvidia-smi -l 1`, stamps of whole seconds."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest

from tessera.errors import RecordingError
from tessera.profile.open_recording import load
from tessera.profile.powerlog import read_power

from power_logs import BASE_NS, smi, write_own, write_trace

RUN_S = 10.0


def write_smi(path: Path, rows: list[tuple[float, float]], field: str = "power.draw") -> Path:
    return smi(path, field, [(seconds, 0, f"{watts:.2f} W") for seconds, watts in rows])


@pytest.mark.parametrize("every_s", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("field", ["power.draw", "power.draw.instant", "power.draw.average"])
def test_rows_seconds_apart_are_no_holes(tmp_path, every_s, field):
    trace = read_power(write_smi(tmp_path / "p.csv", [(i * every_s, 600.0 + i % 2) for i in range(15)], field))
    energy = trace.energy()
    assert energy.coverage > 0.9
    assert energy.energy_j == pytest.approx(600.5 * energy.coverage * energy.time_s, rel=0.01)
    assert trace.domains[0].resolution_s == pytest.approx(every_s, rel=0.01)


def test_a_trace_and_a_log_of_a_row_a_second(tmp_path):
    log = write_smi(tmp_path / "p.csv", [(float(i), 500.0) for i in range(-3, 6)])
    table = load(write_trace(tmp_path / "t.json", kernels=200), power=log).energy()
    assert table.energy_j == pytest.approx(500.0 * table.time_s, rel=0.02)
    assert table.coverage > 0.99
    said = " ".join(table.notes)
    assert "logged every 1 s" in said and "-lms 100" in said and "record more steps" not in said


def test_a_sample_after_a_hole_speaks_for_as_long_as_any_other(tmp_path):
    """Not for a nanosecond: a log of bursts and lone rows had joules of microjoules and terawatts."""
    path = write_own(tmp_path / "p.csv", [500.0] * 50, every_ms=100)
    with path.open("a") as f:
        f.write("".join(f"{BASE_NS // 1000 + 10_000_000 * i},gpu0,500\n" for i in range(1, 20)))
    lone = read_power(path).energy(None, BASE_NS + 8_000_000_000, BASE_NS + 188_000_000_000)
    assert lone.energy_j == pytest.approx(500.0 * 0.1 * 18, rel=0.1)


def glimpses_hold(rng: np.random.Generator, folder: Path, *, in_step: bool) -> bool:
    """Whether the interval of a log with a row a second holds the joules of a square wave."""
    period_s = rng.choice([0.25, 0.5, 1.0, 2.0]) if in_step else 10 ** rng.uniform(-1.3, 0.6)
    duty, low, phase, first_s = rng.uniform(0.1, 0.9), rng.uniform(0.15, 1.0), rng.uniform(), rng.uniform(0.1, 1.0)
    grid_s = np.arange(0.0, RUN_S + 2.0, 0.005)
    watts = np.where((grid_s / period_s + phase) % 1.0 < duty, 600.0, 600.0 * low)
    so_far = np.concatenate([[0.0], np.cumsum(watts)]) * 0.005
    at_s = np.arange(first_s, RUN_S + 2.0, 1.0)
    looked = [(so_far[round(t / 0.005)] - so_far[round((t - 0.1) / 0.005)]) / 0.1 for t in at_s]
    rows = list(zip(at_s.tolist(), looked, strict=True))
    trace = read_power(write_smi(folder / "p.csv", rows, "power.draw.instant"))
    start_s, end_s = first_s + 0.2, first_s + 0.2 + RUN_S - 1.0
    found = trace.energy(None, BASE_NS + round(start_s * 1e9), BASE_NS + round(end_s * 1e9))
    truth = so_far[round(end_s / 0.005)] - so_far[round(start_s / 0.005)]
    return bool(abs(found.energy_j - truth) <= found.error_j)


@pytest.mark.parametrize(("in_step", "least"), [(False, 0.95), (True, 0.75)])
def test_rows_that_are_glimpses_have_the_intervals_they_deserve(tmp_path, in_step, least):
    """By their scatter alone: 93% of the loads of any period, 35% of those that repeat with the rows."""
    rng = np.random.default_rng(1)
    held = [glimpses_hold(rng, tmp_path, in_step=in_step) for _ in range(150)]
    assert np.mean(held) >= least, np.mean(held)


def test_rows_of_one_second_are_spread_over_it(tmp_path):
    """amd-smi stamps whole seconds: of ten rows the first alone counted, so 600 W of a load of 435 W."""
    first = BASE_NS // 10**9
    rows = [(first + k // 10, 600 if k % 10 < 5 else 270) for k in range(7, 128)]
    path = tmp_path / "p.csv"
    path.write_text("timestamp,gpu,socket_power\n" + "".join(f"{t},0,{w}\n" for t, w in rows))
    trace = read_power(path)
    times = trace.columns["gpu0"].times_ns
    assert len(times) == len(rows) and set(np.diff(times).tolist()) == {100_000_000}
    energy = trace.energy(None, BASE_NS + 10**9, BASE_NS + 11 * 10**9)
    assert abs(energy.energy_j - 4350.0) <= energy.error_j < 300.0


def test_rows_of_one_fine_stamp_are_averaged(tmp_path):
    rows = [(0.1 * (k // 2), 400.0 + 100.0 * (k % 2)) for k in range(40)]
    assert read_power(write_smi(tmp_path / "p.csv", rows)).columns["gpu0"].watts.tolist()[:3] == [450.0] * 3


def test_partitions_of_a_gpu_are_no_further_rows(tmp_path):
    path = tmp_path / "p.csv"
    rows = "".join(f"{BASE_NS // 10**9 + s},0,{xcp},300\n" for s in range(10) for xcp in range(4))
    path.write_text("timestamp,gpu,xcp,power_usage\n" + rows)
    assert len(read_power(path).columns["gpu0"].times_ns) == 10


# -- logs of one's own ----------------------------------------------------------------------------------------------

FIRST_S = BASE_NS // 10**9


def iso(seconds: float, hours: int) -> str:
    return datetime.fromtimestamp(FIRST_S + seconds, timezone(timedelta(hours=hours))).isoformat(
        timespec="milliseconds"
    )


@pytest.mark.parametrize(
    ("head", "stamp"),
    [
        ("timestamp,power_w", lambda s: f"{FIRST_S + s:.3f}"),
        ("time,watts", lambda s: iso(s, 0).replace("+00:00", "Z")),
        ("timestamp,power", lambda s: iso(s, -5)),
        ("Time,Power [W]", lambda s: iso(s, 5).replace("T", " ")),
    ],
)
def test_plain_columns_are_read_where_they_are_unambiguous(tmp_path, head, stamp):
    path = tmp_path / "p.csv"
    path.write_text(head + "\n" + "".join(f"{stamp(0.1 * i)},{400 + i % 2}\n" for i in range(50)))
    trace = read_power(path)
    assert list(trace.columns) == ["gpu0"] and trace.domains[0].source.startswith("plain log")
    assert trace.start_ns == FIRST_S * 10**9
    assert trace.energy_j == pytest.approx(400.5 * 4.85, rel=0.01)


def test_a_plain_log_names_its_domains(tmp_path):
    """As ours does: the power of a host is not that of gpu0."""
    path = tmp_path / "p.csv"
    rows = [f"{FIRST_S + i},{name},{watts}\n" for i in range(50) for name, watts in (("cpu0", 90), ("gpu1", 400))]
    path.write_text("timestamp,domain,power_w\n" + "".join(rows))
    trace = read_power(path)
    assert {d.name: d.device.is_gpu for d in trace.domains} == {"cpu0": False, "gpu1": True}
    assert trace.columns["cpu0"].watts.mean() == pytest.approx(90.0)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("timestamp,power_w,watts\n1790000000,1,2\n", "power_w"),
        ("seconds,watts\n0.0,100\n", "name them timestamp"),
        ("timestamp, uuid, power.draw [W]\n1790000000, GPU-a, 1 W\n1790000000, GPU-b, 2 W\n", "add a column index"),
    ],
)
def test_ambiguous_columns_are_to_be_renamed(tmp_path, text, fix):
    path = tmp_path / "p.csv"
    path.write_text(text)
    with pytest.raises(RecordingError) as refused:
        read_power(path)
    assert fix in str(refused.value.fix)
