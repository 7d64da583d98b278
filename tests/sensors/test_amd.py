"""AmdSensor, with the real amdsmi package, on a fake libamd_smi.so compiled here.

The `check_*` functions run in a child process (fakes/vendor_abi.py) so that neither library stays in this
one.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import time

import pytest

from tessera.errors import SensorLost, SensorPermission, SensorUnavailable
from tessera.schema import Hold
from tessera.sensors._amd_gpu import select_visible
from tessera.sensors._meters import CounterPower, PolledPower
from tessera.sensors.amd import AmdSensor
from tessera.sensors.base import Batch, Sensor

from fakes import vendor_abi
from fakes.vendor_abi import Fake, by_name, watts

MS = 1_000_000
NO_PERM, NOT_SUPPORTED, RETRY, NOT_FOUND = 10, 2, 9, 31


def started(**env: str) -> AmdSensor:
    sensor = AmdSensor(env=env)
    sensor.start()
    return sensor


def check_layout(fake: Fake) -> None:
    from amdsmi import amdsmi_wrapper as w

    for name in ("power_info", "clk_info", "power_cap_info", "engine_usage", "asic_info", "enumeration_info"):
        assert fake.layout(name) == ctypes.sizeof(getattr(w, f"amdsmi_{name}_t")), name
    assert fake.layout("violation_status") == ctypes.sizeof(w.amdsmi_violation_status_t)
    for name in (
        "power_info.average_socket_power",
        "asic_info.asic_serial",
        "violation_status.active_ppt_pwr",
    ):
        struct, field = name.split(".")
        assert fake.layout(name) == getattr(getattr(w, f"amdsmi_{struct}_t"), field).offset, name


def check_counter_gives_mean_power(fake: Fake) -> None:
    fake.set(power_w=612.0)
    sensor = started()
    assert isinstance(sensor, Sensor)
    (domain,) = sensor.domains()
    assert (domain.name, domain.hold, domain.source) == ("gpu0", Hold.MEAN, "amdsmi-energy")
    assert domain.label == "AMD Instinct MI300X" and domain.note.startswith("0000:41:00.0 deadbeef")
    assert sensor.period_s == 0.1
    first = sensor.read()
    assert math.isnan(watts(first)[0])
    before = time.monotonic_ns()
    time.sleep(0.05)
    batch = sensor.read()
    ((at_ns, power_w),) = batch.samples["gpu0"]
    assert abs(power_w - 612.0) < 0.5
    assert before < at_ns <= time.monotonic_ns()
    sensor.stop()
    sensor.stop()


def check_telemetry(fake: Fake) -> None:
    fake.set(gfx_pct=0)
    sensor = started()
    (told,) = sensor.read().telemetry
    assert told.temperature_c == 71.0 and told.memory_temperature_c == 64.0
    assert told.clocks_mhz == {"sys": 2100.0, "mem": 1600.0}
    assert told.power_limit_w == 750.0
    assert told.throttle == ("power",)
    assert told.utilization_pct == 0.0, "an idle GPU is 0%, not missing"
    assert told.memory_utilization_pct is None, "0xFFFF is missing, not 65535%"
    assert told.memory_used_bytes == 3 << 30 and told.memory_total_bytes == 192 << 30
    assert sensor.read().telemetry == [], "once a second"


def check_missing_telemetry_is_a_capability(fake: Fake) -> None:
    fake.set(fail_violation=NOT_SUPPORTED, fail_cap=NO_PERM, vram_c=0, sys_mhz=0xFFFFFFFF)
    sensor = started()
    told = by_name(sensor.capabilities())
    assert not told["gpu0.throttle"].available and "not supported" in (told["gpu0.throttle"].reason or "")
    assert not told["gpu0.power_limit"].available and "Permission" in (told["gpu0.power_limit"].reason or "")
    assert not told["gpu0.memory_temperature"].available
    assert told["gpu0.temperature"].available and told["gpu0.energy"].available
    assert sensor.read().telemetry[0].clocks_mhz == {"mem": 1600.0}


def check_slow_violation_call_is_rationed(fake: Fake) -> None:
    fake.set(violation_ms=30)
    sensor = started()
    assert fake.calls("violation") == 1
    sensor.read()
    assert fake.calls("violation") == 1, "30 ms of sleep is followed by 1.5 s of rest"


def check_without_counter_power_is_polled(fake: Fake) -> None:
    fake.set(fail_energy=NOT_SUPPORTED, current_w=300)
    sensor = started()
    (domain,) = sensor.domains()
    assert (domain.hold, domain.source) == (Hold.LINEAR, "amdsmi-current-socket-power")
    assert sensor.period_s == 0.02
    batches = [sensor.read() for _ in range(10)]
    seen = [w for b in batches for w in watts(b)]
    assert math.isnan(seen[0]) and seen[1:] == [300.0], "repeats are no data"
    fake.set(current_w=310)
    assert watts(sensor.read()) == [310.0]
    energy = by_name(sensor.capabilities())["gpu0.energy"]
    assert not energy.available and "not supported" in (energy.reason or "")


def check_average_power_where_there_is_no_current(fake: Fake) -> None:
    fake.set(energy_na=2, average_w=150)
    (domain,) = started().domains()
    assert domain.source == "amdsmi-average-socket-power"


def check_frozen_counter_is_not_trusted(fake: Fake) -> None:
    fake.set(frozen=1)
    sensor = started()
    assert sensor.domains()[0].hold is Hold.LINEAR
    assert "did not move" in (by_name(sensor.capabilities())["gpu0.energy"].reason or "")


def check_counter_of_another_scale_is_not_trusted(fake: Fake) -> None:
    fake.set(counter_scale=0.01)
    sensor = started()
    assert sensor.domains()[0].hold is Hold.LINEAR
    assert "200 W" in (by_name(sensor.capabilities())["gpu0.energy"].reason or "")


def check_second_die_of_mi250x_has_no_domain(fake: Fake) -> None:
    fake.set(gpus=2, mi250x=1, gpu1_energy_na=1, gpu1_power_w=0, gpu1_average_w=0)
    sensor = started()
    assert [d.name for d in sensor.domains()] == ["gpu0"]
    assert "both dies" in sensor.domains()[0].note
    power = by_name(sensor.capabilities())["gpu1.power"]
    assert not power.available and "second die" in (power.reason or "") and power.fix


def check_reset_is_a_gap(fake: Fake) -> None:
    sensor = started()
    sensor.read()
    fake.set(energy_j=10.0)
    batch = sensor.read()
    assert [math.isnan(w) for w in watts(batch)] == [True]
    assert "backwards" in batch.gaps[0].reason
    time.sleep(0.02)
    assert abs(watts(sensor.read())[0] - 200.0) < 0.5


def check_one_gpu_gone_is_a_gap_and_comes_back(fake: Fake) -> None:
    fake.set(gpus=2)
    sensor = started()
    sensor.read()
    fake.set(gpu1_fail=NOT_FOUND)
    batch = sensor.read()
    assert [(g.domain, g.end_ns) for g in batch.gaps] == [("gpu1", None)]
    assert "gpu1" not in batch.samples and "gpu0" in batch.samples
    assert sensor.read().gaps == [], "one gap, not one per read"
    fake.set(gpu1_fail=0)
    assert math.isnan(watts(sensor.read(), "gpu1")[0])


def check_all_gone_is_lost_and_start_revives(fake: Fake) -> None:
    fake.set(gpus=2)
    sensor = started()
    sensor.read()
    fake.set(fail=NOT_FOUND)
    with pytest.raises(SensorLost) as lost:
        sensor.read()
    assert lost.value.fix and "Not found" in (lost.value.why or "")
    fake.set(fail=0)
    sensor.start()
    assert fake.calls("shut_down") == 1
    assert math.isnan(watts(sensor.read())[0])


def check_busy_gpu_loses_nothing(fake: Fake) -> None:
    sensor = started()
    sensor.read()
    fake.set(fail_energy=RETRY)
    batch = sensor.read()
    assert batch.samples == {} and batch.gaps == []
    fake.set(fail_energy=0)
    time.sleep(0.02)
    assert abs(watts(sensor.read())[0] - 200.0) < 0.5


def check_no_permission(fake: Fake) -> None:
    fake.set(fail_init=NO_PERM)
    with pytest.raises(SensorPermission) as denied:
        started()
    assert "usermod" in (denied.value.fix or "")
    fake.set(fail_init=0, fail_energy=NO_PERM, fail_power=NO_PERM)
    with pytest.raises(SensorPermission):
        started()


def check_no_gpu(fake: Fake) -> None:
    fake.set(gpus=0)
    with pytest.raises(SensorUnavailable):
        started()
    fake.set(gpus=1, fail_init=34)
    with pytest.raises(SensorUnavailable, match="does not start"):
        started()


def check_visible_devices(fake: Fake) -> None:
    fake.set(gpus=3)
    assert [d.name for d in started(HIP_VISIBLE_DEVICES="2,0").domains()] == ["gpu2", "gpu0"]
    assert [d.name for d in started(ROCR_VISIBLE_DEVICES="GPU-abcdef0000000001").domains()] == ["gpu1"]
    both = started(ROCR_VISIBLE_DEVICES="1,2", HIP_VISIBLE_DEVICES="1")
    assert [d.name for d in both.domains()] == ["gpu2"]
    with pytest.raises(SensorUnavailable):
        started(ROCR_VISIBLE_DEVICES="")


def check_hip_order(fake: Fake) -> None:
    fake.set(gpus=2, gpu0_hip_id=1, gpu1_hip_id=0)
    assert [d.note.split()[0] for d in started().domains()] == ["0000:42:00.0", "0000:41:00.0"]


CHECKS = [name for name in list(globals()) if name.startswith("check_")]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return vendor_abi.run_amdsmi(__file__, tmp_path_factory.mktemp("rocm"))


@pytest.mark.parametrize("check", CHECKS)
def test_on_fake_library(check, outcome):
    assert outcome[check] == "", outcome[check]


@pytest.mark.skipif(vendor_abi.why_not("amdsmi") is not None, reason="needs the Python package amdsmi")
def test_without_library_says_how_to_get_it():
    code = (
        "from tessera.sensors.amd import AmdSensor\ntry: AmdSensor().start()\nexcept Exception as e: print(repr(e), e)"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("ROCM")} | {"ROCM_PATH": "/nowhere"}
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    if not told:
        pytest.skip("this machine has a libamd_smi.so and an AMD GPU")
    assert told.startswith("SensorUnavailable("), "the binding's own prints are swallowed"
    assert "ROCm" in told


def test_without_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(SensorUnavailable) as missing:
        AmdSensor().start()
    assert missing.value.fix == "pip install amdsmi"


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2, 0", [2, 0]),
        ("0,7,1", [0]),
        ("b", [1]),
        ("-1", []),
        ("0,0", [0]),
    ],
)
def test_select_visible(setting, left):
    assert select_visible([{"a"}, {"B"}, {"c"}], setting) == left


def observe(meter: CounterPower, batch: Batch, at_ms: float, energy_j: float, stamp_ms: float | None = None) -> None:
    stamp_ns = int((at_ms if stamp_ms is None else stamp_ms) * MS) + 7_000_000_000
    now_ns = int(at_ms * MS)
    meter.observe(batch, energy_j=energy_j, stamp_ns=stamp_ns, before_ns=now_ns - 1000, after_ns=now_ns)


def test_slow_counter_is_placed_at_its_ticks():
    """A counter that ticks each 250 ms, read each 100 ms: means over ticks, not jittered by the reads."""
    meter, batch = CounterPower("gpu0"), Batch()
    for at_ms in range(1000, 6000, 100):
        tick_ms = at_ms - at_ms % 250
        observe(meter, batch, at_ms, tick_ms * 0.3, tick_ms)
    samples = batch.samples["gpu0"][1:]
    assert all(abs(w - 300.0) < 1e-6 for _, w in samples)
    assert meter.resolution_s == pytest.approx(0.25)
    late_ms = [t / MS % 250 for t, _ in samples[2:]]
    assert max(late_ms) - min(late_ms) < 1


def test_stamps_in_another_unit_are_not_used():
    meter, batch = CounterPower("gpu0"), Batch()
    for at_ms in range(1000, 2000, 100):
        observe(meter, batch, at_ms, at_ms * 0.3, at_ms / 1000)
    assert [w for _, w in batch.samples["gpu0"][1:]] == pytest.approx([300.0] * 9)


def test_counter_that_stands_still_is_a_gap():
    meter, batch = CounterPower("gpu0"), Batch()
    for at_ms in range(1000, 9000, 500):
        observe(meter, batch, at_ms, 5.0)
    assert [g.reason for g in batch.gaps] == ["the energy counter does not change"]


def test_jump_is_a_gap_not_a_megawatt():
    meter, batch = CounterPower("gpu0"), Batch()
    observe(meter, batch, 1000, 5.0)
    observe(meter, batch, 1100, 1e9)
    assert len(batch.gaps) == 1
    assert all(math.isnan(w) for _, w in batch.samples["gpu0"])


def test_refresh_of_polled_power_is_found():
    meter, batch = PolledPower("gpu0"), Batch()
    for at_ms in range(0, 4000, 20):
        meter.observe(batch, power_w=100.0 + at_ms // 100 % 7, time_ns=(at_ms + 10_000) * MS)
    assert meter.resolution_s == pytest.approx(0.1)
    assert len(batch.samples["gpu0"]) == 41


def test_constant_polled_power_is_confirmed_once_per_refresh():
    meter, batch = PolledPower("gpu0"), Batch()
    for at_ms in range(0, 5000, 20):
        meter.observe(batch, power_w=100.0, time_ns=(at_ms + 10_000) * MS)
    assert len(batch.samples["gpu0"]) == 6  # the NaN, then one a second
