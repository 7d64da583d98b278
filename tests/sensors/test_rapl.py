"""RAPL on a fake powercap tree with a fake clock."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import SensorLost, SensorPermission, SensorUnavailable
from tessera.schema import Hold
from tessera.sensors.base import Batch, Sensor
from tessera.sensors.rapl import RaplSensor, counter_delta

RANGE_UJ = 262_143_328_850  # what an Intel server reports


class Clock:
    def __init__(self):
        self.ns = 1_000_000_000

    def __call__(self):
        return self.ns

    def pass_s(self, seconds):
        self.ns += round(seconds * 1e9)


class Tree:
    """A powercap tree whose counters advance when told."""

    def __init__(self, root: Path):
        self.root = root
        root.mkdir()

    def zone(self, zone, name, *, energy_uj=0, range_uj=RANGE_UJ, **limits_uw):
        path = self.root / zone
        path.mkdir(parents=True)
        (path / "name").write_text(name + "\n")
        (path / "energy_uj").write_text(f"{energy_uj}\n")
        (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
        for key, value in limits_uw.items():
            (path / key).write_text(f"{value}\n")
        return path

    def set(self, zone, energy_uj):
        (self.root / zone / "energy_uj").write_text(f"{energy_uj}\n")


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "powercap")


@pytest.fixture
def clock():
    return Clock()


def started(tree, clock, **more):
    sensor = RaplSensor(root=tree.root, clock_ns=clock, **more)
    sensor.start()
    return sensor


def joules(batches: list[Batch], domain: str) -> float:
    samples = [s for b in batches for s in b.samples.get(domain, [])]
    assert [t for t, _ in samples] == sorted({t for t, _ in samples})
    pairs = itertools.pairwise(samples)
    return math.fsum((t1 - t0) * 1e-9 * w for (t0, _), (t1, w) in pairs if not math.isnan(w))


def test_zones_become_domains(tree, clock):
    tree.zone("intel-rapl:0", "package-0")
    tree.zone("intel-rapl:0:0", "core")
    tree.zone("intel-rapl:0:1", "dram")
    tree.zone("intel-rapl:0/intel-rapl:0:2", "uncore")  # seen only inside its parent
    tree.zone("intel-rapl:1", "package-1-die-1")
    tree.zone("intel-rapl:1:0", "dram")
    tree.zone("intel-rapl:2", "psys")
    tree.zone("intel-rapl:3", "something-new")
    tree.zone("intel-rapl-mmio:0", "package-0")  # the same package by another way
    sensor = started(tree, clock)
    assert isinstance(sensor, Sensor)
    by_name = {d.name: d for d in sensor.domains()}
    assert {n: d.counted for n, d in by_name.items()} == {
        "cpu0": True,
        "cpu0.core": False,
        "dram0": True,
        "cpu0.uncore": False,
        "cpu1.die1": True,
        "dram1.die1": True,
        "psys": False,
    }
    assert all(d.hold is Hold.MEAN and d.source == "rapl" for d in by_name.values())
    assert by_name["cpu0"].label == "intel-rapl:0 package-0"
    assert "contains" in by_name["psys"].note
    assert "inside" in by_name["cpu0.core"].note
    assert all(c.available for c in sensor.capabilities())


def test_mmio_is_used_when_it_is_the_only_way(tree, clock):
    tree.zone("intel-rapl-mmio:0", "package-0")
    assert [d.name for d in started(tree, clock).domains()] == ["cpu0"]


def test_mean_power_between_reads(tree, clock):
    tree.zone("intel-rapl:0", "package-0", energy_uj=5_000_000)
    sensor = started(tree, clock)
    t0 = clock.ns
    clock.pass_s(0.1)
    tree.set("intel-rapl:0", 5_000_000 + 12_000_000)
    batch = sensor.read()
    (first, nan), (time_ns, power_w) = batch.samples["cpu0"]
    assert (first, time_ns) == (t0, clock.ns)
    assert math.isnan(nan)
    assert power_w == pytest.approx(120.0)
    assert not batch.gaps


def test_a_standing_counter_keeps_the_interval_open(tree, clock):
    tree.zone("intel-rapl:0", "package-0")
    sensor = started(tree, clock)
    clock.pass_s(0.0005)
    first = sensor.read()  # sooner than the counter ticks: nothing new
    assert len(first.samples["cpu0"]) == 1
    clock.pass_s(0.0995)
    tree.set("intel-rapl:0", 10_000_000)
    assert sensor.read().samples["cpu0"] == [(clock.ns, pytest.approx(100.0))]


def test_a_dead_counter_is_a_gap_not_zero_watts(tree, clock):
    tree.zone("intel-rapl:0", "package-0")
    tree.zone("intel-rapl:0:0", "dram")
    sensor = started(tree, clock)
    batches = []
    for i in range(1, 31):
        clock.pass_s(0.1)
        tree.set("intel-rapl:0", i * 5_000_000)
        batches.append(sensor.read())
    assert joules(batches, "cpu0") == pytest.approx(150.0)
    assert [w for b in batches for _, w in b.samples.get("dram0", []) if not math.isnan(w)] == []
    (gap,) = [g for b in batches for g in b.gaps]
    assert gap.domain == "dram0"
    assert "not moved" in gap.reason
    clock.pass_s(0.1)
    tree.set("intel-rapl:0:0", 900)
    sensor.read()
    clock.pass_s(0.1)
    tree.set("intel-rapl:0:0", 900 + 300_000)
    assert sensor.read().samples["dram0"][-1][1] == pytest.approx(3.0)


def test_one_wrap(tree, clock):
    tree.zone("intel-rapl:0", "package-0", energy_uj=RANGE_UJ - 4_000_000)
    sensor = started(tree, clock)
    clock.pass_s(0.1)
    tree.set("intel-rapl:0", 6_000_000)
    assert sensor.read().samples["cpu0"][-1][1] == pytest.approx(100.0)


def test_two_wraps_told_by_the_power_before():
    # 100 J range, at most 100 W for 2.4 s: 30, 130 and 230 J are possible; the power before says 230 J.
    delta = counter_delta(0, 30_000_000, range_uj=100_000_000, elapsed_s=2.4, max_power_w=100.0, previous_w=96.0)
    assert delta.energy_j == pytest.approx(230.0)
    assert delta.guessed


def test_undecided_wraps_are_a_gap():
    call = {"range_uj": 100_000_000, "elapsed_s": 2.4, "max_power_w": 100.0}
    assert counter_delta(0, 30_000_000, **call, previous_w=None).energy_j is None
    between = counter_delta(0, 30_000_000, **call, previous_w=75.0)  # 180 J: halfway between 130 J and 230 J
    assert between.energy_j is None
    assert "wrapped" in between.reason


def test_several_wraps_between_reads_are_inferred_and_said(tree, clock):
    tree.zone("intel-rapl:0", "package-0", range_uj=100_000_000, constraint_0_max_power_uw=100_000_000)
    sensor = started(tree, clock)
    clock.pass_s(0.1)
    tree.set("intel-rapl:0", 9_000_000)
    batches = [sensor.read()]
    clock.pass_s(3.0)  # 90 W: 270 J, two wraps and 70 J
    tree.set("intel-rapl:0", 79_000_000)
    batches.append(sensor.read())
    assert joules(batches, "cpu0") == pytest.approx(279.0)
    assert "inferred" in sensor.domains()[0].note


def test_undecided_wraps_in_a_run(tree, clock):
    tree.zone("intel-rapl:0", "package-0", range_uj=100_000_000, constraint_0_max_power_uw=100_000_000)
    sensor = started(tree, clock)
    clock.pass_s(3.0)
    tree.set("intel-rapl:0", 79_000_000)
    batch = sensor.read()
    assert [g.end_ns for g in batch.gaps] == [clock.ns]
    clock.pass_s(0.1)
    tree.set("intel-rapl:0", 84_000_000)
    assert sensor.read().samples["cpu0"] == [(clock.ns, pytest.approx(50.0))]


def test_a_reset_is_a_gap(tree, clock):
    tree.zone("intel-rapl:0", "package-0", energy_uj=100_000_000_000)
    sensor = started(tree, clock)
    t0 = clock.ns
    clock.pass_s(0.1)
    tree.set("intel-rapl:0", 1_000)
    batch = sensor.read()
    (gap,) = batch.gaps
    assert (gap.start_ns, gap.end_ns) == (t0, clock.ns)
    assert "backwards" in gap.reason
    assert math.isnan(batch.samples["cpu0"][-1][1])
    clock.pass_s(0.1)
    tree.set("intel-rapl:0", 1_000 + 7_000_000)
    assert sensor.read().samples["cpu0"] == [(clock.ns, pytest.approx(70.0))]


def test_a_jump_and_a_value_out_of_range_are_gaps(tree, clock):
    tree.zone("intel-rapl:0", "package-0")
    sensor = started(tree, clock)
    clock.pass_s(0.1)
    tree.set("intel-rapl:0", 90_000_000_000)
    assert "jumped" in sensor.read().gaps[0].reason
    clock.pass_s(0.1)
    tree.set("intel-rapl:0", RANGE_UJ * 3)
    assert "outside its range" in sensor.read().gaps[0].reason


@settings(max_examples=60, deadline=None)
@given(
    powers_w=st.lists(st.floats(0.01, 190.0), min_size=1, max_size=30),
    steps_s=st.lists(st.floats(0.01, 0.45), min_size=30, max_size=30),
    first_uj=st.integers(0, 99_999_999),
)
def test_any_powers_with_wraps_reproduce_the_joules(tmp_path_factory, powers_w, steps_s, first_uj):
    tree, clock = Tree(tmp_path_factory.mktemp("rapl") / "powercap"), Clock()
    # A 100 J range and 200 W at most: many wraps in a run, at most one between two reads.
    tree.zone(
        "intel-rapl:0",
        "package-0",
        energy_uj=first_uj,
        range_uj=100_000_000,
        constraint_0_max_power_uw=100_000_000,
    )
    sensor = started(tree, clock)
    total_uj, batches = first_uj, []
    for power_w, step_s in zip(powers_w, steps_s, strict=False):
        clock.pass_s(step_s)
        total_uj += round(power_w * step_s * 1e6)
        tree.set("intel-rapl:0", total_uj % 100_000_000)
        batches.append(sensor.read())
    assert not [g for b in batches for g in b.gaps]
    assert joules(batches, "cpu0") == pytest.approx((total_uj - first_uj) * 1e-6, abs=1e-5)


def test_the_period_follows_the_fastest_wrap(tree, clock):
    tree.zone("intel-rapl:0", "package-0")
    assert started(tree, clock).period_s == 0.1
    tree.zone("intel-rapl:1", "package-1", range_uj=4_000_000, constraint_0_power_limit_uw=50_000_000)
    assert started(tree, clock).period_s == pytest.approx(0.01)


def test_limits_are_believed_only_within_reason(tree, clock):
    tree.zone("intel-rapl:0", "package-0", range_uj=40_000_000, constraint_0_power_limit_uw=4_294_967_000_000)
    assert started(tree, clock).period_s == pytest.approx(0.01)  # 1000 W, not 4 MW
    tree.zone("intel-rapl:1", "package-1", range_uj=1_000_000, constraint_0_power_limit_uw=0)
    assert started(tree, clock).period_s == pytest.approx(0.00025)  # a limit of 0 W is no limit


def denying(*zones):
    def read_text(path):
        if path.name == "energy_uj" and path.parent.name in zones:
            raise PermissionError(13, "Permission denied", str(path))
        return path.read_text()

    return read_text


def test_no_permission(tree, clock):
    tree.zone("intel-rapl:0", "package-0")
    with pytest.raises(SensorPermission) as error:
        started(tree, clock, read_text=denying("intel-rapl:0"))
    assert "CVE-2020-8694" in str(error.value)
    assert "chmod" in str(error.value)
    assert "udev" in str(error.value)


def test_readable_zones_are_used_beside_unreadable_ones(tree, clock):
    tree.zone("intel-rapl:0", "package-0")
    tree.zone("intel-rapl:1", "package-1")
    sensor = started(tree, clock, read_text=denying("intel-rapl:1"))
    assert [d.name for d in sensor.domains()] == ["cpu0"]
    missing = [c for c in sensor.capabilities() if not c.available]
    assert [c.name for c in missing] == ["cpu1.power"]
    assert "chmod" in missing[0].fix


def test_a_zone_with_nonsense_is_told_and_left_out(tree, clock):
    tree.zone("intel-rapl:0", "package-0")
    tree.zone("intel-rapl:1", "package-1", energy_uj="garbage")
    tree.zone("intel-rapl:2", "package-2", range_uj=0)
    sensor = started(tree, clock)
    assert [d.name for d in sensor.domains()] == ["cpu0"]
    assert [c.available for c in sensor.capabilities()] == [True, False, False]


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "why"),
    [
        ("aarch64", "", "x86"),
        ("x86_64", "flags : hypervisor", "virtual"),
        ("x86_64", "flags : sse", "container"),
    ],
)
def test_no_powercap_says_why(tmp_path, machine, cpuinfo, why):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    sensor = RaplSensor(root=tmp_path / "none", machine=lambda: machine, cpuinfo=tmp_path / "cpuinfo")
    with pytest.raises(SensorUnavailable) as error:
        sensor.start()
    assert why in str(error.value)
    assert error.value.fix


def test_a_vanished_zone_is_a_gap_and_all_vanished_is_loss(tree, clock):
    tree.zone("intel-rapl:0", "package-0")
    gone = tree.zone("intel-rapl:1", "package-1", energy_uj=10)
    sensor = started(tree, clock)
    sensor.read()
    (gone / "energy_uj").unlink()
    clock.pass_s(0.1)
    tree.set("intel-rapl:0", 1_000_000)
    batch = sensor.read()
    assert batch.samples["cpu0"][-1][1] == pytest.approx(10.0)
    assert [(g.domain, g.end_ns) for g in batch.gaps] == [("cpu1", None)]
    clock.pass_s(0.1)
    tree.set("intel-rapl:0", 2_000_000)
    assert not sensor.read().gaps  # told once
    tree.set("intel-rapl:1", 500)
    clock.pass_s(0.1)
    back = sensor.read().samples["cpu1"]
    assert len(back) == 1
    assert math.isnan(back[0][1])
    for path in tree.root.glob("*/energy_uj"):
        path.unlink()
    with pytest.raises(SensorLost):
        sensor.read()
    sensor.stop()
    sensor.stop()


def test_starting_again_after_a_loss(tree, clock):
    path = tree.zone("intel-rapl:0", "package-0")
    sensor = started(tree, clock)
    (path / "energy_uj").unlink()
    with pytest.raises(SensorLost):
        sensor.read()
    tree.set("intel-rapl:0", 0)
    sensor.start()
    clock.pass_s(0.1)
    tree.set("intel-rapl:0", 1_000_000)
    assert sensor.read().samples["cpu0"][-1][1] == pytest.approx(10.0)
