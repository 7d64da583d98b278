"""Power logs of other tools, and `tessera attribute` on them."""

from __future__ import annotations

import json
import os
from datetime import datetime

import numpy as np
import pytest
from click.testing import CliRunner

from tessera.attribute.fit import RING_TAU_S, response_of
from tessera.cli.main import cli
from tessera.errors import ArgumentError, MeasurementError, RecordingError, TesseraError
from tessera.profile.open_recording import load
from tessera.profile.powerlog import read_power

import synthetic_run
from power_logs import BASE_NS, smi, write_own, write_trace


def test_a_log_at_20_ms_is_taken_as_the_ring(tmp_path):
    trace = read_power(write_own(tmp_path / "p.csv", [500.0] * 100))
    column = trace.columns["gpu0"]
    assert column.domain.source == "csv", "the log does not say what recorded it"
    assert response_of(column.domain, 0.02).tau_s == pytest.approx(RING_TAU_S, rel=0.01)
    assert column.domain.lag_s > 0
    assert trace.energy_j == pytest.approx(500 * 0.02 * 99, rel=0.02)


def test_other_spacings_and_domains_are_not(tmp_path):
    slow = read_power(write_own(tmp_path / "p.csv", [500.0] * 30, every_ms=100)).columns["gpu0"].domain
    assert slow.source == "csv"
    assert "mean since the one before" in slow.note
    cpu = read_power(write_own(tmp_path / "c.csv", [50.0] * 30, domain="cpu0")).columns["cpu0"].domain
    assert cpu.hold.value == "mean"


def test_the_parts_of_a_modelled_sample_have_no_peak_of_their_own(tmp_path):
    """`power_trace` of a program divides its samples of 100 ms at regions, here every 5 ms."""
    watts = ([0.0] * 19 + [8.0]) * 10
    rows = [f"{1_790_000_000_000_000 + k * 5000},cpu0,{w},modelled," for k, w in enumerate(watts)]
    (tmp_path / "own.csv").write_text("\n".join(["epoch_us,domain,watts,basis,part_of", *rows]))
    trace = read_power(tmp_path / "own.csv")
    assert trace.domains[0].resolution_s == 0.1
    assert trace.peak_w is not None and trace.peak_w < 1.0 and trace.energy_j == pytest.approx(0.4, rel=0.02)


@pytest.mark.parametrize(("parts", "scope"), [(("cpu0", "cpu0.idle_share"), "process"), (("cpu0",), "machine")])
def test_a_log_of_one_program_is_not_of_the_machine(tmp_path, parts, scope):
    """Only a program's own CPU time has a share of the machine's idle power."""
    rows = [f"{1_790_000_000_000_000 + k * 100_000},{name},4.0,modelled," for name in parts for k in range(20)]
    (tmp_path / "own.csv").write_text("\n".join(["epoch_us,domain,watts,basis,part_of", *rows]))
    assert read_power(tmp_path / "own.csv").domains[0].scope == scope


def test_a_hole_is_unknown_not_bridged(tmp_path):
    path = write_own(tmp_path / "p.csv", [500.0] * 50)
    with path.open("a") as f:
        for i in range(50):
            f.write(f"{BASE_NS // 1000 + 5_000_000 + i * 20_000},gpu0,100\n")
    trace = read_power(path)
    energy = trace.energy()
    assert energy.coverage < 0.5
    assert energy.energy_j == pytest.approx(500 * 0.98 + 100 * 0.98, rel=0.05)


def test_nvidia_smi_logs(tmp_path):
    rows = [(i * 0.02, g, f"{300 + 100 * g + i // 5:.2f} W") for i in range(200) for g in (0, 1)]
    trace = read_power(smi(tmp_path / "smi.csv", "power.draw.instant", rows))
    assert list(trace.columns) == ["gpu0", "gpu1"]
    column = trace.columns["gpu0"]
    assert column.domain.label == "NVIDIA H200"
    assert len(column.watts) == 40  # each value was shown five times
    assert abs(int(column.times_ns[0]) - BASE_NS) < 2_000_000
    average = read_power(smi(tmp_path / "avg.csv", "power.draw", rows)).columns["gpu0"].domain
    assert average.lag_s > 0.5
    assert "1 s average" in average.note


def test_a_value_that_stays_is_refreshed_and_na_is_left_out(tmp_path):
    rows = [(i * 0.02, 0, "300.00 W") for i in range(100)] + [(2.0 + i * 0.02, 0, "[N/A]") for i in range(5)]
    column = read_power(smi(tmp_path / "smi.csv", "power.draw.instant", rows)).columns["gpu0"]
    assert 12 <= len(column.watts) <= 15
    assert not np.isnan(column.watts).any()
    plain = read_power(
        smi(tmp_path / "nounits.csv", "power.draw", [(i * 0.1, 0, "300") for i in range(5)], units=False)
    )
    assert plain.columns["gpu0"].watts[0] == 300


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("timestamp, index, temperature.gpu\n2026/01/01 00:00:00.000, 0, 33\n", "no power.draw"),
        ("timestamp, power.draw [W]\nyesterday, 33 W\n", "is not a time"),
        ("timestamp, power.draw [W]\n2026/01/01 00:00:00.000, warm\n", "is not a power"),
        ("timestamp, power.draw [W]\n", "no power sample"),
        ("a,b\n1,2\n", "not a power log"),
        ('{"samples_mw": [[1, 2]]}', "it is JSON, and a log is CSV"),
    ],
)
def test_bad_logs_say_what_is_wrong(tmp_path, text, match):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(RecordingError, match=match):
        read_power(path)


def test_load_answers_like_a_session(tmp_path):
    trace = write_trace(tmp_path / "t.json.gz")
    power = write_own(tmp_path / "p.csv", [400.0] * 110)
    found = load(trace, power=power)
    table = found.energy()
    assert table.kernels[0].name == "gemm"
    assert table.kernels[0].calls == 200
    assert table.ops[0].name == "aten::mm"
    assert sum(r.energy_j for r in table.kernels) + table.idle_j == pytest.approx(table.energy_j)
    kernels = [r for r in found.records() if r.kind == "kernel"]
    assert kernels[0].energy_j == pytest.approx(table.kernels[0].j_per_call, rel=0.2)
    assert kernels[0].end_ns - kernels[0].start_ns == 8_000_125
    with pytest.raises(MeasurementError, match="has no power log"):
        load(trace).energy()


def test_the_command(tmp_path):
    trace = write_trace(tmp_path / "t.json")
    power = write_own(tmp_path / "p.csv", [400.0] * 110)
    run = CliRunner().invoke(cli, ["attribute", str(trace), "--power", str(power), "--json"])
    assert run.exit_code == 0, run.output
    data = json.loads(run.output)
    assert data["kernels"][0]["kernel_name"] == "gemm"
    assert data["kernels"][0]["kind"] == "kernel"
    assert data["idle_j"] > 0
    text = CliRunner().invoke(cli, ["attribute", str(trace), "--power", str(power), "--by", "ops"])
    assert text.exit_code == 0
    assert "aten::mm" in text.output
    assert "next" in text.output
    none = CliRunner().invoke(cli, ["attribute", str(trace), "--power", str(power), "--by", "modules"])
    assert "the trace has no modules" in none.output
    missing = CliRunner().invoke(cli, ["attribute", str(trace)])
    assert missing.exit_code == 2


@pytest.mark.parametrize(("domain", "said"), [("gpu0", False), ("gpu1", True), ("board", False)])
def test_power_of_another_number_is_said(tmp_path, domain, said):
    power = write_own(tmp_path / "p.csv", [400.0] * 110, domain=domain)
    table = load(write_trace(tmp_path / "t.json"), power=power).energy()
    assert any("kernels ran on gpu0, and the power is that of gpu1" in note for note in table.notes) is said


@pytest.mark.parametrize("domain", ["cpu0", "dram0"])
def test_kernels_of_a_gpu_get_no_power_of_the_host(tmp_path, domain):
    power = write_own(tmp_path / "p.csv", [150.0] * 110, domain=domain)
    with pytest.raises(MeasurementError) as refused:
        load(write_trace(tmp_path / "t.json"), power=power).energy()
    assert f"kernels ran on gpu0, and the power is that of {domain}" in str(refused.value.why)


def test_a_log_that_ends_before_its_sensor_shows_the_trace_says_how_late_it_is(tmp_path):
    """power.draw is a mean over 1 s: samples in the first half second of a trace are of the time before it."""
    log = smi(tmp_path / "p.csv", "power.draw", [(0.1 * i - 2, 0, "300.00 W") for i in range(25)])
    with pytest.raises(MeasurementError) as refused:
        load(write_trace(tmp_path / "t.json"), power=log).energy()
    assert "0.55 s late" in str(refused.value.why)


def test_a_run_with_power_of_its_own_takes_no_log(tmp_path):
    run = tmp_path / "r.tessera"
    synthetic_run.make(2).write(run).close()
    power = write_own(tmp_path / "p.csv", [400.0] * 110)
    for words in (["attribute", run], ["analyze", "power", run], ["analyze", "kernels", run]):
        refused = CliRunner().invoke(cli, [*map(str, words), "--power", str(power)]).exception
        assert isinstance(refused, ArgumentError) and "r.tessera has its own power samples" in refused.what
        assert f"tessera export {run} --chrome" in refused.fix
    refused = CliRunner().invoke(cli, ["analyze", "power", str(power), "--power", str(power)]).exception
    assert isinstance(refused, TesseraError), "a log alone takes no other"


def test_the_next_command_shows_another_table(tmp_path):
    trace = json.loads(write_trace(tmp_path / "t.json").read_text())
    trace["traceEvents"] = [e | {"dur": 5000.0} for e in trace["traceEvents"] if e["cat"] == "cpu_op"]
    (tmp_path / "cpu.json").write_text(json.dumps(trace))
    on = {"t.json": write_own(tmp_path / "g.csv", [400.0] * 110),
          "cpu.json": write_own(tmp_path / "c.csv", [50.0] * 110, domain="cpu0")}  # fmt: skip
    said = {name: CliRunner().invoke(cli, ["attribute", str(tmp_path / name), "--power", str(power)]).output
            for name, power in on.items()}  # fmt: skip
    assert "--by ops" in said["t.json"]
    assert "aten::mm" in said["cpu.json"] and "--by ops" not in said["cpu.json"]


def test_lines_written_twice_are_one_sample(tmp_path):
    path = write_own(tmp_path / "p.csv", [500.0] * 50)
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([head, *(line for line in lines for _ in range(2))]) + "\n")
    column = read_power(path).columns["gpu0"]
    assert len(column.times_ns) == 50 and column.domain.taken_as == "nvml-samples"


def test_two_gpus_without_their_index_are_not_mixed(tmp_path):
    path = tmp_path / "smi.csv"
    lines = [f"2026/11/15 09:30:00.{i:03d}, 0000000{i % 2}:19:00.0, {100 + 400 * (i % 2)}.00 W" for i in range(10)]
    path.write_text("timestamp, pci.bus_id, power.draw [W]\n" + "\n".join(lines) + "\n")
    with pytest.raises(RecordingError, match="2 GPUs and no index"):
        read_power(path)


@pytest.mark.parametrize("named", ["", ", name"])
def test_gpus_without_their_index_are_known_by_rows_of_the_same_time(tmp_path, named):
    path = tmp_path / "smi.csv"
    board = ", NVIDIA H200" if named else ""
    lines = [f"2026/11/15 09:30:00.{i:03d}{board}, {100 + 100 * k}.00 W" for i in range(10) for k in range(4)]
    path.write_text(f"timestamp{named}, power.draw [W]\n" + "\n".join(lines) + "\n")
    with pytest.raises(RecordingError, match="4 GPUs and no index"):
        read_power(path)


@pytest.mark.parametrize("device", ["gpu", "gpu_id", "GPU_index", "device_id"])
def test_a_plain_log_may_name_its_gpus_in_other_words(tmp_path, device):
    path = tmp_path / "p.csv"
    lines = [f"{1_790_000_000 + 0.1 * i:.1f},{k},{100 + 100 * k}" for i in range(10) for k in range(4)]
    path.write_text(f"timestamp,{device},power_w\n" + "\n".join(lines) + "\n")
    assert [c.watts[0] for c in read_power(path).columns.values()] == [100, 200, 300, 400]


@pytest.mark.parametrize("factor", [-1.0, 1000.0])
def test_a_log_of_impossible_watts_says_so_with_the_values(tmp_path, factor):
    path = write_own(tmp_path / "p.csv", [factor * w for w in (300.0, 600.0) * 10])
    low, high = sorted((300 * factor, 600 * factor))
    with pytest.raises(RecordingError) as refused:
        read_power(path)
    assert f"gpu0 draws {low:.6g} W to {high:.6g} W" in refused.value.what
    assert "all 20 samples were refused" in str(refused.value.why) and "unit" in str(refused.value.fix)


@pytest.mark.parametrize("rubbish", [4_294_967.295, -5000.0, 20_000.0])
def test_a_sample_that_no_board_can_have_drawn_is_a_gap(tmp_path, rubbish):
    energy = read_power(write_own(tmp_path / "p.csv", [500.0] * 50 + [rubbish] + [500.0] * 50)).energy()
    assert energy.energy_j == pytest.approx(500 * 0.02 * 99, rel=0.01)
    assert 0.98 < energy.coverage < 1.0


def test_the_name_of_the_board_in_a_log_tells_its_limit(tmp_path):
    rows = [(0.1 * i, 0, f"{2000.0 if i == 20 else 500.0 + i:.2f} W") for i in range(40)]  # an H200 has 700 W
    trace = read_power(smi(tmp_path / "p.csv", "power.draw.instant", rows))
    assert trace.columns["gpu0"].domain.limit_w == 700.0
    assert trace.peak_w == pytest.approx(539.0)
    assert np.isnan(trace.columns["gpu0"].watts[20])


def test_a_log_of_endless_domains_is_refused(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("epoch_us,domain,watts\n" + "".join(f"{i},d{i},1\n" for i in range(5000)))
    with pytest.raises(RecordingError, match="more than 4096 domains"):
        read_power(path)


@pytest.mark.parametrize("spoilt", [b"\xff\xfe", b'"' + b"x" * 200_000])
def test_a_log_of_nvidia_smi_spoilt_after_its_first_lines(tmp_path, spoilt):
    path = smi(tmp_path / "p.csv", "power.draw", [(0.1 * i, 0, "300.25 W") for i in range(2000)])
    path.write_bytes(path.read_bytes() + spoilt)
    with pytest.raises(RecordingError, match="cannot read"):
        read_power(path)


# -- logs of other vendors' tools -----------------------------------------------------------------------------------

SECOND = 1_790_000_000


def of_amd_smi(seconds: int) -> list[str]:
    lines = ["timestamp,gpu,xcp,power_usage,gfx"]
    for i in range(seconds):
        for gpu in (0, 1):
            lines += [f"{SECOND + i},{gpu},{xcp},{300 + 100 * gpu if xcp == 0 else 'N/A'},98" for xcp in (0, 1)]
    return lines


def of_amd_smi_metric(seconds: int) -> list[str]:
    head = "timestamp,gpu,socket_power,gfx_voltage"
    return [head, *(f"{SECOND + i},{gpu},{300 + 100 * gpu} W,N/A" for i in range(seconds) for gpu in (0, 1))]


def of_rocm_smi(seconds: int) -> list[str]:
    """A loop that puts a time before each line, and so repeats the head."""
    lines = []
    for i in range(seconds):
        lines.append("timestamp,device,Average Graphics Package Power (W)")
        lines += [
            f"{SECOND + i}.5,card0,300.0",
            f"{SECOND + i}.5,card1,400.0",
            f"{SECOND + i}.5,card2,N/A (Secondary die)",
        ]
    return lines


def of_xpu_smi(seconds: int) -> list[str]:
    lines = ["Timestamp, DeviceId, GPU Utilization (%), GPU Power (W)"]
    for i in range(seconds):
        moment = datetime.fromtimestamp(SECOND + i)
        lines += [f"{moment:%H:%M:%S}.000,    {gpu}, N/A, {300.0 + 100 * gpu:.2f}" for gpu in (0, 1)]
    return lines


@pytest.mark.parametrize(
    ("make", "source"),
    [
        (of_amd_smi, "amd-smi power_usage"),
        (of_amd_smi_metric, "amd-smi socket_power"),
        (of_rocm_smi, "rocm-smi Average Graphics Package Power (W)"),
        (of_xpu_smi, "xpu-smi GPU Power (W)"),
    ],
)
def test_logs_of_other_vendors_are_read(tmp_path, make, source):
    path = tmp_path / "power.csv"
    path.write_text("\n".join(make(20)) + "\n")
    os.utime(path, (SECOND + 20, SECOND + 20))  # xpu-smi writes the time of day: the file says which day
    trace = read_power(path)
    assert sorted(trace.columns) == ["gpu0", "gpu1"]
    for name, watts in (("gpu0", 300.0), ("gpu1", 400.0)):
        column = trace.columns[name]
        assert column.domain.source == source and column.domain.resolution_s == pytest.approx(1.0)
        assert len(column.times_ns) == 20 and set(column.watts.tolist()) == {watts}
        assert abs(int(column.times_ns[0]) - SECOND * 10**9) <= 500_000_000
    assert trace.energy_j == pytest.approx(700.0 * 18.5)  # a sample is a mean: that of the last half second came late


def test_a_log_of_times_of_day_may_cross_midnight(tmp_path):
    path = tmp_path / "power.csv"
    path.write_text("Timestamp, DeviceId, GPU Power (W)\n23:59:59.000, 0, 10\n00:00:01.000, 0, 10\n")
    midnight = datetime(2026, 11, 15).timestamp()
    os.utime(path, (midnight + 2, midnight + 2))
    times = read_power(path).columns["gpu0"].times_ns
    assert [round(t / 1e9 - midnight) for t in (times[0], times[-1])] == [-1, 1]


def test_a_log_of_amd_smi_gives_a_trace_its_joules(tmp_path):
    path = tmp_path / "power.csv"
    path.write_text(
        "\n".join(["timestamp,gpu,power_usage", *(f"{BASE_NS // 10**9 + i},0,500" for i in range(5))]) + "\n"
    )
    table = load(write_trace(tmp_path / "t.json", kernels=200), power=path).energy()
    assert table.energy_j == pytest.approx(500.0 * table.time_s, rel=0.1)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("timestamp,gpu,power_usage\nyesterday,0,5\n", "is not a time"),
        (f"timestamp,gpu,power_usage\n{'9' * 400},0,5\n", "is not a time"),  # infinite, found by fuzzing
        ("timestamp,gpu,power_usage\n300 W,0,5\n", "is not a time"),
        ("timestamp,gpu,power_usage\n1790000000,0,much\n", "is not a power"),
        ("timestamp,gpu,temperature\n1790000000,0,50\n", "no power.draw"),
        ("Timestamp, DeviceId, GPU Power (W)\n25:61:00, 0, 3\n", "is not a time"),
    ],
)
def test_wrong_cells_of_other_logs_are_named(tmp_path, text, what):
    path = tmp_path / "power.csv"
    path.write_text(text)
    with pytest.raises(RecordingError, match=what):
        read_power(path)
