"""`measure_command`: the exit code, signals, the child's own regions, idle power."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tessera.device import Device, Figure
from tessera.errors import SensorLost
from tessera.monitor import Monitor
from tessera.monitor.command import CommandNotRun, measure_command
from tessera.monitor.regions import (
    REGIONS_VARIABLE,
    ProcessRegions,
    RegionStretch,
    merge_regions,
    read_regions,
    write_regions,
)
from tessera.schema import Domain, Energy, RegionEnergy, Scope, Work
from tessera.sensors.modelled import ModelledSensor
from tessera.sensors.processes import ProcessTree, read_wait_s

from fakes.sensor import ScriptSensor

CPU = Device(
    id="cpu", name="A CPU", kind="cpu", vendor="?",
    tdp_w=Figure(value=8.0, source="its box"), idle_w=Figure(value=2.0, source="a guess"),
)  # fmt: skip


def sensor(power_w: Callable[[float], float] = lambda t: 150.0, name: str = "gpu0", **kwargs: object) -> ScriptSensor:
    made = Domain(name=name, source="script", resolution_s=0.005, **kwargs)  # type: ignore[arg-type]
    return ScriptSensor(power_w, clock=time.monotonic_ns, step_ms=5.0, period_s=0.02, domain=made)


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    m = Monitor([sensor()]).start()
    yield m
    m.stop()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 600
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def test_the_command_is_measured_and_its_exit_code_passed_on(monitor: Monitor) -> None:
    begin = time.monotonic()
    run = measure_command(["sh", "-c", "sleep 0.1; exit 3"], monitor, work=[Work(amount=10, unit="step")])
    assert run.cpu is not None and run.cpu.over_s >= 0.1 and run.cpu.cpu_s >= 0.0
    assert (run.cpu.waited_s is None) == (read_wait_s("self") is None)  # read before it is reaped
    took = time.monotonic() - begin
    assert run.returncode == 3
    total = run.report.total
    assert 0.1 <= total.time_s <= took
    assert total.energy_j == pytest.approx(150.0 * total.time_s)
    assert run.report.by_domain["gpu0"].energy_j == total.energy_j
    assert run.report.peak_w == pytest.approx(150.0)
    assert run.report.per_work()[0][:2] == ("step", pytest.approx(total.energy_j / 10))
    assert run.report.name == "sh -c sleep 0.1; exit 3"
    assert run.trace.energy_j == pytest.approx(total.energy_j, rel=0.05)
    assert set(run.telemetry) == {"gpu0"}


BURN = """
import sys, time
until_s = time.process_time() + float(sys.argv[1])
while time.process_time() < until_s: pass
"""


@pytest.mark.parametrize("spend_s", [0.03, 0.15, 0.4])
def test_a_command_is_charged_for_all_of_its_cpu_time(spend_s: float) -> None:
    """Its joules are those of the model at the CPU time that the kernel says it has used, however short it is."""
    own = Monitor([ModelledSensor(CPU, tree=ProcessTree(with_root=False))]).start()
    try:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = measure_command(["sh", "-c", f"{sys.executable} -S -c '{BURN}' {spend_s}; true"], own)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    finally:
        own.stop()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_s >= spend_s
    full_w = CPU.tdp_w.value  # type: ignore[union-attr]
    assert run.report.total.energy_j == pytest.approx(full_w * cpu_s / (os.cpu_count() or 1), rel=0.02)
    assert run.report.peak_w is not None and run.report.peak_w <= full_w * (1 + 1e-9)


def test_the_peak_of_a_short_command_is_no_less_than_its_mean() -> None:
    own = Monitor([ModelledSensor(CPU, tree=ProcessTree(with_root=False))]).start()
    try:
        reports = [measure_command(["true"], own).report for _ in range(5)]
    finally:
        own.stop()
    for report in reports:
        assert report.peak_w is None or report.peak_w >= (report.total.power_w or 0.0)


def test_output_and_environment_are_the_commands_own(monitor: Monitor, tmp_path: Path) -> None:
    out = tmp_path / "env"
    measure_command(["sh", "-c", f'echo "$HOME:${REGIONS_VARIABLE}" > {out}'], monitor)
    home, folder = out.read_text().strip().rsplit(":", 1)
    assert home == os.environ.get("HOME", "")
    assert folder and not Path(folder).exists(), "its folder is removed afterwards"
    assert REGIONS_VARIABLE not in os.environ


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_death_by_a_signal_is_128_and_its_number(monitor: Monitor, signum: signal.Signals) -> None:
    run = measure_command(["sh", "-c", f"kill -{signum.value} $$"], monitor)
    assert run.returncode == 128 + signum


def test_a_command_that_is_not_there(monitor: Monitor, tmp_path: Path) -> None:
    with pytest.raises(CommandNotRun, match="no command 'not-a-command'") as caught:
        measure_command(["not-a-command", "--flag"], monitor)
    assert caught.value.fix
    text = tmp_path / "data.txt"
    text.write_text("not a program")
    with pytest.raises(CommandNotRun, match="cannot run"):
        measure_command([str(text)], monitor)


def sent_when_ready(folder: Path, signum: signal.Signals) -> Path:
    """A file the command makes when it runs: then we get the signal.

    Not before it has a handler, as it would end the tests: the command may be faster than we are after starting it.
    """
    ready, before = folder / "ready", signal.getsignal(signum)

    def send() -> None:
        wait_for(ready)
        deadline = time.monotonic() + 600.0
        while signal.getsignal(signum) is before and time.monotonic() < deadline:
            time.sleep(0.001)
        if signal.getsignal(signum) is not before:
            os.kill(os.getpid(), signum)

    threading.Thread(target=send).start()
    return ready


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_goes_to_the_command_and_the_report_is_still_made(
    monitor: Monitor, tmp_path: Path, number: signal.Signals
) -> None:
    old = signal.getsignal(number), signal.getsignal(signal.SIGINT)
    ready = sent_when_ready(tmp_path, number)
    wait = "for i in $(seq 9000); do sleep 0.01; done"  # not for ever: it may be that nobody tells it
    run = measure_command(["sh", "-c", f"trap 'exit 7' TERM HUP; touch {ready}; {wait}"], monitor)
    assert run.returncode == 7
    assert run.report.total.energy_j > 0
    assert (signal.getsignal(number), signal.getsignal(signal.SIGINT)) == old, "handlers are put back"


def test_what_we_ignore_the_command_ignores(monitor: Monitor) -> None:
    """`nohup tessera measure`: a handler of ours would take that from the command."""
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert measure_command(["sh", "-c", "kill -HUP $$; exit 5"], monitor).returncode == 5
    finally:
        signal.signal(signal.SIGHUP, old)


def test_a_signal_that_comes_while_the_command_starts_goes_to_it(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would end us, and leave the command running."""
    start = subprocess.Popen

    def slowly(*args: object, **options: object) -> object:
        signal.raise_signal(signal.SIGTERM)
        child = start(*args, **options)  # type: ignore[call-overload]
        signal.raise_signal(signal.SIGTERM)
        return child

    monkeypatch.setattr("tessera.monitor.command.subprocess.Popen", slowly)
    assert measure_command(["sleep", "120"], monitor).returncode == 128 + signal.SIGTERM


def test_a_signal_is_ours_where_no_command_was_started(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **options: object) -> object:
        signal.raise_signal(signal.SIGTERM)
        raise FileNotFoundError(2, "No such file or directory")

    got: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda signum, frame: got.append(signum))
    try:
        monkeypatch.setattr("tessera.monitor.command.subprocess.Popen", refused)
        with pytest.raises(CommandNotRun):
            measure_command(["sleep", "120"], monitor)
    finally:
        signal.signal(signal.SIGTERM, old)
    assert got == [signal.SIGTERM]


def test_sigint_of_a_terminal_is_left_to_the_command(
    monitor: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal sends it to both: we go on until the command has ended by its own choice."""
    ready = sent_when_ready(tmp_path, signal.SIGINT)
    monkeypatch.setattr("tessera.monitor.command._terminal_interrupts", lambda: True)
    run = measure_command(["sh", "-c", f"touch {ready}; sleep 1; exit 5"], monitor)
    assert run.returncode == 5
    assert run.report.total.time_s >= 0.2


def test_sigint_without_a_terminal_is_passed_on(
    monitor: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = sent_when_ready(tmp_path, signal.SIGINT)
    monkeypatch.setattr("tessera.monitor.command._terminal_interrupts", lambda: False)
    run = measure_command(["sh", "-c", f"trap 'exit 7' INT; touch {ready}; sleep 60 & wait; exit 5"], monitor)
    assert run.returncode == 7


def test_from_another_thread_signals_are_left_alone(monitor: Monitor) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(measure_command(["false"], monitor).returncode))
    thread.start()
    thread.join(120)
    assert codes == [1]


def test_the_regions_of_the_command_and_its_children_are_collected(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_SENSORS", "modelled")
    body = """
import subprocess, sys, time
from tessera.monitor import energy_scope
with energy_scope("shared"):
    time.sleep(0.03)
if len(sys.argv) > 1:
    with energy_scope("parent only"):
        time.sleep(0.01)
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""
    run = measure_command([sys.executable, "-c", body, body], monitor)
    assert run.returncode == 0
    regions = {r.name: r for r in run.report.regions}
    assert regions["shared"].calls == 2
    assert regions["parent only"].calls == 1
    assert regions["shared"].energy.time_s >= 0.06
    assert regions["shared"].energy.energy_j > 0
    assert regions["shared"].energy.basis == "modelled"


def test_a_command_without_scopes_has_no_regions(monitor: Monitor) -> None:
    assert list(measure_command(["true"], monitor).report.regions) == []


def test_idle_power_is_what_was_drawn_before_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        started.append(time.monotonic())
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    m = Monitor([sensor(lambda t: 500.0 if started and t >= started[0] else 80.0), sensor(lambda t: 20.0, "cpu0")])
    m.start()
    time.sleep(0.6)
    run = measure_command(["sleep", "0.2"], m)
    m.stop()
    assert run.report.idle_w == pytest.approx(100.0, rel=0.3), "520 W if the command were in it"
    total, before_s = run.report.total, started[0] - 1e-9 * run.trace.monotonic_span_ns[0]  # long on a busy machine
    assert 520.0 * (total.time_s - before_s) <= 1.05 * total.energy_j <= 1.05 * 1.05 * 520.0 * total.time_s


def test_idle_power_is_unknown_where_the_sensor_had_just_begun(monitor: Monitor) -> None:
    assert measure_command(["true"], monitor).report.idle_w is None


def test_a_sensor_lost_during_the_command_is_in_the_report() -> None:
    s = sensor(note="whole board")
    m = Monitor([s]).start()
    threading.Timer(0.1, lambda: setattr(s, "fail", SensorLost("unplugged"))).start()
    run = measure_command(["sleep", "1"], m)
    m.stop()
    assert 0.0 <= run.report.total.coverage < 0.9
    assert run.report.total.energy_j == pytest.approx(150.0 * run.report.total.time_s * run.report.total.coverage)
    assert [g.reason for g in run.report.gaps] == ["unplugged"]
    assert run.report.notes == ["gpu0: whole board"]


def test_one_domain_that_never_answers_does_not_spoil_the_report() -> None:
    m = Monitor([sensor(), sensor(lambda t: 0.0, "gpu1")]).start()  # the script sensor's 0 W is "not known"
    run = measure_command(["sleep", "0.05"], m)
    m.stop()
    assert run.report.by_domain["gpu0"].energy_j > 0
    assert run.report.by_domain["gpu1"].coverage == 0
    assert run.report.peak_w == pytest.approx(150.0)


# -- regions files -------------------------------------------------------------------------------------------


def region(name: str, joules: float, *, calls: int = 1, seconds: float = 1.0, **kwargs: object) -> RegionEnergy:
    energy = Energy(
        energy_j=joules, error_j=0.1 * joules, common_error_j=0.08 * joules, time_s=seconds, source="script", **kwargs
    )  # type: ignore[arg-type]
    return RegionEnergy(name=name, calls=calls, energy=energy)


def of_process(*regions: RegionEnergy, pid: int = 0, parent_pid: int = 0, scope: Scope = "machine") -> ProcessRegions:
    """What a process writes of regions that were passed once each."""
    stretches = {
        r.name: [RegionStretch(start_ns=r.start_ns, end_ns=r.end_ns, energies={scope: r.energy})] for r in regions
    }
    return ProcessRegions(pid=pid, parent_pid=parent_pid, regions=list(regions), stretches=stretches)


def test_regions_round_trip_and_add_up(tmp_path: Path) -> None:
    for pid in (7, 8):
        write_regions(tmp_path, of_process(region("a", 30.0, calls=2), region("b", 5.0), pid=pid))
        (tmp_path / f"{os.getpid()}.json").rename(tmp_path / f"{pid}.json")
    found = read_regions(tmp_path)
    assert [(r.name, r.calls, r.energy.energy_j) for r in found] == [("a", 4, 60.0), ("b", 2, 10.0)]
    assert found[0].energy.error_j == pytest.approx(math.hypot(2 * 2.4, 1.8 * 2**0.5)), "the level adds up"
    assert found[0].energy.time_s == 2.0


def test_a_torn_file_does_not_lose_the_others(tmp_path: Path) -> None:
    write_regions(tmp_path, of_process(region("a", 30.0)))
    (tmp_path / "1.json").write_bytes(b'{"schema_version": 1, "regions": [{"name": "a"')
    (tmp_path / "2.json").write_bytes(msgspec.json.encode({"regions": "no"}))
    assert [r.name for r in read_regions(tmp_path)] == ["a"]


def test_nothing_to_write_writes_nothing(tmp_path: Path) -> None:
    write_regions(tmp_path, of_process())
    write_regions(tmp_path / "gone", of_process(region("a", 1.0)))
    assert list(tmp_path.iterdir()) == []
    assert read_regions(tmp_path) == []


def test_merging_weighs_coverage_by_time_and_keeps_the_worst_basis() -> None:
    (merged,) = merge_regions(
        [
            of_process(region("a", 1.0, seconds=3.0, coverage=1.0), pid=7),
            of_process(region("a", 1.0, seconds=1.0, coverage=0.0, basis="modelled"), pid=8),
        ]
    )
    assert merged.energy.coverage == pytest.approx(0.75)
    assert merged.energy.basis == "modelled"


def test_a_region_of_which_nothing_is_known_keeps_the_others(tmp_path: Path) -> None:
    good = Energy(energy_j=5.0, error_j=0.1, time_s=1.0, source="x")
    lost = Energy(energy_j=math.nan, error_j=math.nan, time_s=1.0, source="x", coverage=0.0)
    regions = [RegionEnergy(name="a", calls=1, energy=good), RegionEnergy(name="b", calls=2, energy=lost)]
    write_regions(tmp_path, of_process(*regions))
    back = read_regions(tmp_path)
    assert [r.name for r in back] == ["a", "b"]
    assert math.isnan(back[1].energy.energy_j)


@pytest.mark.parametrize(
    ("passes", "joules", "seconds"),
    [
        pytest.param([(0, 10), (1, 5), (7, 11)], 1100.0, 11.0, id="side by side: each moment once"),
        pytest.param([(0, 10), (5, 20), (5, 20)], 2000.0, 20.0, id="not only the largest"),
        pytest.param([(0, 10), (12, 20)], 1800.0, 18.0, id="one after the other"),
    ],
)
def test_a_moment_in_regions_of_several_processes_counts_once(
    passes: list[tuple[int, int]], joules: float, seconds: float
) -> None:
    """Every process measures the same board, of 100 W."""

    def rank(pid: int, start_s: int, end_s: int, scope: Scope, parent_pid: int = 0) -> ProcessRegions:
        length_s, level_j = end_s - start_s, 20.0 * (end_s - start_s)
        energy = Energy(energy_j=100.0 * length_s, error_j=level_j, common_error_j=level_j, time_s=length_s, source="x")
        return of_process(
            RegionEnergy(name="train", calls=1, energy=energy, start_ns=start_s * 10**9, end_ns=end_s * 10**9),
            pid=pid, parent_pid=parent_pid, scope=scope,
        )  # fmt: skip

    (merged,) = merge_regions([rank(pid, *span, "machine") for pid, span in enumerate(passes, 7)])
    assert (merged.energy.energy_j, merged.energy.time_s) == (pytest.approx(joules), pytest.approx(seconds))
    assert merged.energy.error_j == pytest.approx(0.2 * joules), "all are off by the level of one sensor"
    assert merged.calls == len(passes)
    (own,) = merge_regions([rank(pid, *span, "process") for pid, span in enumerate(passes, 7)])
    assert own.energy.energy_j == pytest.approx(100.0 * sum(end - start for start, end in passes)), "each its own"
    assert own.energy.time_s == pytest.approx(seconds)
    (parent,) = merge_regions([rank(7, *passes[0], "process"), rank(8, *passes[0], "process", parent_pid=7)])
    assert parent.energy.energy_j == pytest.approx(100.0 * passes[0][1]), "a child's is its parent's too"


def test_a_domain_that_drew_nothing_before_the_command_is_no_error() -> None:
    m = Monitor([sensor(lambda t: 1e-12)])
    m.start()
    time.sleep(0.7)
    assert measure_command(["true"], m).report.idle_w == pytest.approx(0.0, abs=1e-9)
    m.stop()
