"""The modelled sensor: power by utilisation, and never without saying that it is a model."""

from __future__ import annotations

import dataclasses
import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.clock import Clock
from tessera.device import ASSUMED_ERROR, Device, Figure
from tessera.errors import SensorLost, SensorUnavailable
from tessera.hardware import host_cpu, lookup
from tessera.joules import Z90
from tessera.monitor.sampler import Sampler
from tessera.monitor.series import PowerSeries
from tessera.schema import Domain, Hold
from tessera.sensors.base import Sensor
from tessera.sensors.modelled import (
    LINE_ERROR,
    MODEL_ERROR,
    ModelledSensor,
    ProcessShare,
    model_error,
    proc_stat_busy,
)
from tessera.sensors.processes import OwnCpu

from fakes.sensor import ScriptSensor

CPU = Device(
    id="cpu", name="A CPU", kind="cpu", vendor="?",
    tdp_w=Figure(value=300.0, source="its box"), idle_w=Figure(value=100.0, source="a guess"),
)  # fmt: skip
HZ = os.sysconf("SC_CLK_TCK")


class Machine:
    """Busy and total CPU seconds of four CPUs, and a clock."""

    def __init__(self):
        self.ns, self.busy_s, self.total_s = 10**12, 500.0, 4000.0

    def run(self, seconds, share):
        self.ns += round(seconds * 1e9)
        self.total_s += 4 * seconds
        self.busy_s += 4 * seconds * share

    def busy(self):
        return self.busy_s, self.total_s

    def sensor(self, device=CPU, **kwargs):
        sensor = ModelledSensor(device, busy=self.busy, clock=lambda: self.ns, **kwargs)
        sensor.start()
        return sensor


@pytest.fixture
def machine():
    return Machine()


@pytest.mark.parametrize(("share", "power_w"), [(0.0, 100.0), (0.5, 200.0), (1.0, 300.0)])
def test_power_runs_from_idle_to_full(machine, share, power_w):
    sensor = machine.sensor()
    sensor.read()
    machine.run(0.1, share)
    batch = sensor.read()
    ((t, watts),) = batch.samples["cpu0"]
    assert (t, watts) == (machine.ns, pytest.approx(power_w))
    assert batch.telemetry[0].utilization_pct == pytest.approx(100 * share)


@given(st.lists(st.floats(min_value=0, max_value=1), min_size=1, max_size=20))
def test_each_sample_is_the_mean_since_the_one_before(shares):
    machine = Machine()
    sensor = machine.sensor()
    sensor.read()
    joules = 0.0
    for share in shares:
        machine.run(0.1, share)
        ((_, watts),) = sensor.read().samples["cpu0"]
        assert watts == pytest.approx(100 + 200 * share)
        joules += watts * 0.1
    assert joules == pytest.approx(sum(10 + 20 * s for s in shares))


def test_nothing_is_known_before_the_first_read(machine):
    sensor = machine.sensor()
    ((t, watts),) = sensor.read().samples["cpu0"]
    assert t == machine.ns
    assert math.isnan(watts)


def test_started_again_it_bridges_nothing(machine):
    sensor = machine.sensor()
    sensor.read()
    machine.run(60, 1.0)
    sensor.start()
    assert math.isnan(sensor.read().samples["cpu0"][0][1])


def test_a_read_within_one_tick_of_the_kernel_adds_nothing_and_loses_nothing(machine):
    sensor = machine.sensor()
    sensor.read()
    machine.ns += 1_000_000
    assert not sensor.read().samples
    machine.run(0.1, 0.5)
    assert sensor.read().samples["cpu0"][0][1] == pytest.approx(200.0)


def test_idle_time_that_the_kernel_takes_back_is_no_reset(machine):
    sensor = machine.sensor()
    sensor.read()
    machine.total_s -= 0.02
    assert not sensor.read().samples
    machine.run(1.0, 0.5)
    assert sensor.read().samples["cpu0"][0][1] == pytest.approx(200.0, rel=0.01)


def test_counters_that_begin_anew_are_not_waited_for(machine):
    sensor = machine.sensor()
    sensor.read()
    machine.busy_s = machine.total_s = 0.0
    machine.ns += 10**8
    assert math.isnan(sensor.read().samples["cpu0"][0][1])
    machine.run(0.1, 1.0)
    assert sensor.read().samples["cpu0"][0][1] == pytest.approx(300.0)


@pytest.mark.parametrize("busy_s", [-50.0, 5000.0])
def test_power_never_leaves_the_curve(machine, busy_s):
    sensor = machine.sensor()
    sensor.read()
    machine.run(1.0, 0.0)
    machine.busy_s += busy_s
    assert sensor.read().samples["cpu0"][0][1] == (100.0 if busy_s < 0 else 300.0)


def test_it_says_that_it_is_a_model(machine):
    (domain,) = machine.sensor(domain="host").domains()
    assert isinstance(machine.sensor(), Sensor)
    assert (domain.name, domain.source, domain.basis) == ("host", "modelled", "modelled")
    assert domain.gain_error == LINE_ERROR  # both ends are said to be known
    assert domain.hold is Hold.MEAN
    assert domain.label == "A CPU"
    assert "100-300 W" in domain.note
    assert "its box" in domain.note


@pytest.mark.parametrize(
    ("idle", "full", "worse"),
    [
        (Figure(value=1.0, error=0.8, source="x"), Figure(value=4.0, error=3.0, source="x"), 0.8),
        (Figure(value=1.0, error=0.1, source="x"), Figure(value=4.0, error=3.0, source="x"), 0.75),
        (Figure(value=100.0, source="x", assumed=True), Figure(value=300.0, source="x"), ASSUMED_ERROR),
        (Figure(value=100.0, source="measured"), Figure(value=300.0, source="measured"), 0.0),
    ],
)
def test_its_error_is_that_of_its_figures_and_of_the_line(machine, idle, full, worse):
    (domain,) = machine.sensor(dataclasses.replace(CPU, idle_w=idle, tdp_w=full)).domains()
    assert domain.gain_error == pytest.approx(math.hypot(LINE_ERROR, worse))


def test_a_cpu_that_nobody_knows_is_as_uncertain_as_the_catalogue_says(tmp_path):
    generic, here = lookup("generic-cpu"), host_cpu(tmp_path / "cpuinfo", threads=2)
    for figure in (generic.idle_w, generic.tdp_w):
        assert model_error(here) >= figure.error / figure.value
    assert model_error(generic) == pytest.approx(MODEL_ERROR)  # what a log without a curve is taken for


def test_a_device_without_a_curve_is_refused(machine):
    for device in (Device(id="x", name="X", kind="cpu", vendor="?", idle_w=CPU.idle_w),
                   Device(id="x", name="X", kind="cpu", vendor="?", tdp_w=CPU.tdp_w)):  # fmt: skip
        with pytest.raises(SensorUnavailable, match="X has no power curve") as caught:
            machine.sensor(device)
        assert caught.value.fix


def test_a_source_that_goes_away_is_a_loss(machine):
    sensor = machine.sensor()
    sensor.read()

    def gone():
        raise SensorUnavailable("cannot read it", why="unmounted", fix="mount it")

    machine.busy = gone
    sensor._busy = gone
    with pytest.raises(SensorLost) as caught:
        sensor.read()
    assert (caught.value.what, caught.value.why, caught.value.fix) == ("cannot read it", "unmounted", "mount it")


def test_this_machine():
    sensor = ModelledSensor()
    assert sensor.domains() == []
    sensor.start()
    (domain,) = sensor.domains()
    assert domain.basis == "modelled"
    assert len(sensor.read().samples["cpu0"]) == 1
    sensor.stop()
    sensor.stop()


# user nice system idle iowait irq softirq steal guest guest_nice
@pytest.mark.parametrize(
    ("line", "busy", "total"),
    [
        ("cpu  100 10 50 800 20 5 5 10 70 3", 180, 1000),
        ("cpu 100 0 0 300", 100, 400),
        ("cpu  0 0 0 0 0 0 0 0 0 0", 0, 0),
    ],
)
def test_proc_stat(tmp_path, line, busy, total):
    path = tmp_path / "stat"
    path.write_text(line + "\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 5\n")
    assert proc_stat_busy(path) == (pytest.approx(busy / HZ), pytest.approx(total / HZ))


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu 1 2\n", "cpu a b c d e\n", "\xff\xfe"])
def test_proc_stat_that_is_none(tmp_path, text):
    path = tmp_path / "stat"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SensorUnavailable, match="stat"):
        proc_stat_busy(path)


def test_no_proc_stat_at_all(tmp_path):
    with pytest.raises(SensorUnavailable) as caught:
        proc_stat_busy(tmp_path / "stat")
    assert caught.value.fix == "the modelled sensor needs Linux"


class Tree:
    """The CPU time of a process tree, as the test says; `own_cpu` where it is this process's."""

    def __init__(self):
        self.cpu_s = 0.0
        self.own_cpu = None

    def poll(self):
        return self.cpu_s


@pytest.mark.parametrize("neighbours", [0.0, 0.5])
def test_a_process_has_its_own_share_whatever_its_neighbours_do(machine, neighbours):
    tree = Tree()
    sensor = machine.sensor(tree=tree)
    cpu, idle = sensor.domains()
    assert (cpu.scope, cpu.counted, idle.name, idle.counted) == ("process", True, "cpu0.idle_share", False)
    assert {n: len(s) for n, s in sensor.read().samples.items()} == {"cpu0": 1, "cpu0.idle_share": 1}
    machine.run(1.0, neighbours)
    tree.cpu_s += 0.25 * os.cpu_count()
    samples = sensor.read().samples
    assert samples["cpu0"][0][1] == pytest.approx(0.25 * 300.0)
    assert samples["cpu0.idle_share"][0][1] == pytest.approx(0.25 * 100.0)


@given(st.lists(st.tuples(st.floats(0.001, 0.2), st.floats(0, 1), st.booleans()), min_size=1, max_size=30))
def test_cpu_time_of_a_process_that_is_seen_late_is_not_lost(steps):
    machine, tree, unseen_s = Machine(), Tree(), 0.0
    sensor = machine.sensor(tree=tree)
    sampler = Sampler([sensor], clock=Clock(lambda: machine.ns, lambda: machine.ns))
    sampler.read_due()
    series, start_ns = sampler.series["cpu0"], machine.ns
    for seconds, share, is_seen in [*steps, (1e-6, 0.0, True)]:
        machine.run(seconds, 0.0)
        unseen_s += os.cpu_count() * seconds * share
        if is_seen:  # the child was found, or has ended
            tree.cpu_s, unseen_s = tree.cpu_s + unseen_s, 0.0
        sampler.wait_for(machine.ns)
    assert series.mark(machine.ns).joules == pytest.approx(300.0 * tree.cpu_s / os.cpu_count(), rel=1e-6, abs=1e-6)
    column = series.column(start_ns, machine.ns)
    assert np.nanmax(column.watts) <= 300.0 * (1 + 1e-9)  # the curve's end


def play_blocks(blocks):
    """Blocks of (seconds, cores, children's cores) under a sampler that reads every 0.1 s.

    Returns the marks at their edges, and what each used.
    """
    machine, tree = Machine(), Tree()
    sampler = Sampler([machine.sensor(tree=tree)], clock=Clock(lambda: machine.ns, lambda: machine.ns))
    own_s = waited_s = 0.0
    tree.own_cpu = OwnCpu(own_s, waited_s)
    sampler.read_due()
    edges, used = [(machine.ns, tree.own_cpu)], []
    for lasts_s, own, child in blocks:
        end_ns, child_s = machine.ns + round(lasts_s * 1e9), child * lasts_s
        while machine.ns < end_ns:
            next_ns = min(end_ns, sampler._slots[0].due_ns)
            own_s += own * (next_ns - machine.ns) * 1e-9
            machine.run((next_ns - machine.ns) * 1e-9, 0.0)
            if machine.ns == end_ns:  # the child is waited for at the end of its block, and seen only then
                waited_s += child_s
            tree.cpu_s, tree.own_cpu = own_s + waited_s, OwnCpu(own_s, waited_s)
            sampler.read_due()
        edges.append((end_ns, tree.own_cpu))
        used.append(own * lasts_s + child_s)
    machine.run(0.2, 0.0)
    sampler.read_due()
    series = sampler.series["cpu0"]
    return [series.mark(*edge) for edge in edges], np.array(used) * 300.0 / os.cpu_count()


@given(st.lists(st.tuples(st.floats(0.001, 0.3), st.floats(0, 1), st.just(0.0)), min_size=1, max_size=20))
def test_blocks_shorter_than_a_sample_get_the_joules_of_their_own_cpu_time(blocks):
    marks, truth_j = play_blocks(blocks)
    assert np.diff([m.joules for m in marks]) == pytest.approx(truth_j, rel=1e-6, abs=1e-6)
    assert all(m.loose_j2 == pytest.approx(0.0, abs=1e-9) for m in marks)


def test_a_child_that_was_waited_for_belongs_to_the_block_that_waited():
    marks, truth_j = play_blocks([(0.03, 0.0, 0.8), (0.05, 0.0, 0.0)] * 10)
    assert np.diff([m.joules for m in marks]) == pytest.approx(truth_j, rel=1e-6, abs=1e-6)


def test_children_that_run_on_are_divided_by_time_and_the_interval_says_so():
    series = PowerSeries(Domain(name="cpu0", source="modelled", resolution_s=0.1, hold=Hold.MEAN))
    for at, (watts, own_s) in enumerate([(math.nan, 0.0), (40.0, 0.02)]):
        series.extend([(at * 10**8, watts)])
        series.note_cpu(OwnCpu(own_s, 0.0), 100.0)
    mark = series.mark(25_000_000, OwnCpu(0.02, 0.0))
    assert mark.joules == pytest.approx(2.0 + 0.25 * 2.0)  # all of its own 20 ms, and a quarter of its child's
    assert 0.5 < Z90 * math.sqrt(mark.loose_j2) < 2.0  # the 20 ms of the child may lie before or after
    full = PowerSeries(series.domain)
    for at, (watts, own_s) in enumerate([(math.nan, 0.0), (120.0, 0.02)]):
        full.extend([(at * 10**8, watts)])
        full.note_cpu(OwnCpu(own_s, 0.0), 100.0)
    busy = full.mark(25_000_000, OwnCpu(0.02, 0.0))
    assert busy.loose_j2 < mark.loose_j2 * (10.0 / 2.0) ** 2 / 4  # a child that is busy all the time is known better


def test_cpu_time_of_other_running_threads_is_known_at_ticks():
    series = PowerSeries(Domain(name="cpu0", source="modelled", resolution_s=0.1, hold=Hold.MEAN))
    for at, (watts, own_s) in enumerate([(math.nan, 0.0), (300.0, 0.3)]):
        series.extend([(at * 10**8, watts)])
        series.note_cpu(OwnCpu(own_s, 0.0), 100.0)
    assert series.mark(50_000_000, OwnCpu(0.15, 0.0)).loose_j2 > 0.0


def test_what_no_sample_has_room_for_is_charged_later(machine):
    tree = Tree()
    sensor = machine.sensor(tree=tree)
    sensor.read()
    watts = []
    for cpu_s in (2.5 * os.cpu_count(), 0.0, 0.0, 0.0):
        tree.cpu_s += cpu_s
        machine.run(1.0, 0.0)
        watts += [w for _, w in sensor.read().samples["cpu0"][-1:]]
    assert watts == pytest.approx([300.0, 300.0, 150.0, 0.0])


def test_what_a_sample_of_a_process_covers_is_in_it(machine):
    """A command that ends while /proc is read: the sample before its end must not claim to cover it."""
    tree = Tree()
    sensor = machine.sensor(tree=tree)
    sensor.read()
    machine.run(1.0, 0.0)
    began_ns = machine.ns

    def poll_slowly():
        machine.run(1.0, 0.0)
        return tree.cpu_s

    tree.poll = poll_slowly
    assert sensor.read().samples["cpu0"][-1][0] == began_ns


def test_a_process_that_sleeps_is_not_charged_for_a_busy_machine(machine):
    sensor = machine.sensor(tree=Tree())
    sensor.read()
    machine.run(2.0, 1.0)
    assert sensor.read().samples["cpu0"][0][1] == 0.0


def test_a_measured_package_is_divided_by_cpu_time(machine):
    package = Domain(name="cpu0", source="rapl", resolution_s=0.001, gain_error=0.05, hold=Hold.MEAN)
    rapl = ScriptSensor(lambda t: 80.0, clock=lambda: machine.ns, step_ms=100.0, period_s=0.1, domain=package)
    tree = Tree()
    shared = ProcessShare(rapl, tree, busy=machine.busy)
    shared.start()
    assert isinstance(shared, Sensor)
    own, whole = shared.domains()
    assert (own.name, own.basis, own.scope, own.counted) == ("cpu0", "modelled", "process", True)
    assert (whole.name, whole.basis, whole.scope, whole.counted) == ("cpu0.machine", "measured", "machine", False)
    assert own.gain_error > whole.gain_error
    shared.read()
    machine.run(1.0, 0.5)
    tree.cpu_s += 0.5  # of the 2 s that the four CPUs were busy
    samples = shared.read().samples
    assert {w for _, w in samples["cpu0.machine"]} == {80.0}
    assert {w for _, w in samples["cpu0"]} == {20.0}
    machine.ns += 10**8  # no tick of /proc/stat yet
    assert {w for _, w in shared.read().samples["cpu0"]} == {0.0}
    machine.run(0.1, 0.5)
    tree.cpu_s += 0.05
    assert [w for _, w in shared.read().samples["cpu0"]] == pytest.approx([20.0, 20.0]), "that before the tick too"
    shared.stop()


@pytest.mark.parametrize("late", [1, 4, 10])
def test_cpu_time_that_is_seen_late_gets_its_share_of_a_measured_package(machine, late):
    """A child that uses 1.5 of the 2 CPUs that are busy, and is found or ends only after so many reads."""
    package = Domain(name="cpu0", source="rapl", resolution_s=0.001, hold=Hold.MEAN)
    rapl = ScriptSensor(lambda t: 80.0, clock=lambda: machine.ns, step_ms=100.0, period_s=0.1, domain=package)
    tree = Tree()
    sampler = Sampler(
        [ProcessShare(rapl, tree, busy=machine.busy)], clock=Clock(lambda: machine.ns, lambda: machine.ns)
    )
    sampler.read_due()
    begin = sampler.series["cpu0"].mark(machine.ns).joules
    for i in range(1, 21):
        machine.run(0.1, 0.5)
        if i % late == 0:
            tree.cpu_s += 0.15 * late
        sampler.wait_for(machine.ns)
    assert sampler.series["cpu0"].mark(machine.ns).joules - begin == pytest.approx(80.0 * 2.0 * 0.75)
    assert sampler.series["cpu0.machine"].mark(machine.ns).joules == pytest.approx(160.0)
