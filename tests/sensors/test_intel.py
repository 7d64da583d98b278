"""IntelSensor, with the real pyzes package, on a fake Level Zero loader compiled here.

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
from tessera.sensors.base import Sensor
from tessera.sensors.intel import IntelSensor, select_masked

from fakes import vendor_abi
from fakes.vendor_abi import Fake, by_name, watts

DEVICE_LOST, UNSUPPORTED, DENIED, NOT_READY = 0x70000001, 0x78000003, 0x70010000, 1
CARD, PACKAGE, STACKS, MEMORY = 1, 2, 4, 8


def started(**env: str) -> IntelSensor:
    sensor = IntelSensor(env=env)
    sensor.start()
    return sensor


def check_layout(fake: Fake) -> None:
    import pyzes

    for name in [
        "device_properties",
        "pci_properties",
        "power_properties",
        "power_limit_ext_desc",
        "power_ext_properties",
        "power_energy_counter",
        "temp_properties",
        "freq_properties",
        "freq_state",
        "freq_throttle_time",
        "mem_properties",
        "mem_state",
        "mem_bandwidth",
        "engine_properties",
        "engine_stats",
    ]:
        assert fake.layout(name) == ctypes.sizeof(getattr(pyzes, f"zes_{name}_t")), name
    for name in (
        "device_properties.numSubdevices",
        "power_limit_ext_desc.limit",
        "freq_state.throttleReasons",
        "mem_properties.location",
    ):
        struct, field = name.split(".")
        assert fake.layout(name) == getattr(getattr(pyzes, f"zes_{struct}_t"), field).offset, name


def check_counter_gives_mean_power(fake: Fake) -> None:
    fake.set(power_w=480.0)
    sensor = started()
    assert isinstance(sensor, Sensor)
    (domain,) = sensor.domains()
    assert (domain.name, domain.hold, domain.source) == ("gpu0", Hold.MEAN, "level-zero-card")
    assert domain.label == "Intel(R) Data Center GPU Max 1550" and domain.note.startswith("0000:18:00.0 a000")
    assert math.isnan(watts(sensor.read())[0])
    before = time.monotonic_ns()
    time.sleep(0.05)
    ((at_ns, power_w),) = sensor.read().samples["gpu0"]
    assert abs(power_w - 480.0) < 0.5
    assert before < at_ns <= time.monotonic_ns()
    sensor.stop()
    sensor.stop()


def check_card_counts_and_parts_do_not(fake: Fake) -> None:
    fake.set(domains=CARD | PACKAGE | STACKS | MEMORY, tiles=2)
    sensor = started()
    told = [(d.name, d.counted) for d in sensor.domains()]
    assert told == [
        ("gpu0", True),
        ("gpu0.package", False),
        ("gpu0.memory", False),
        ("gpu0.stack0", False),
        ("gpu0.stack1", False),
    ]
    sensor.read()
    time.sleep(0.02)
    batch = sensor.read()
    assert abs(watts(batch)[0] - 400.0) < 0.5 and abs(watts(batch, "gpu0.stack1")[0] - 120.0) < 0.5


def check_package_where_the_card_is_not_supported(fake: Fake) -> None:
    fake.set(domains=CARD | PACKAGE, fail_energy1=UNSUPPORTED)
    (domain,) = started().domains()
    assert (domain.name, domain.source) == ("gpu0", "level-zero-package")


def check_tiles_alone_all_count(fake: Fake) -> None:
    fake.set(domains=STACKS)
    assert [(d.name, d.counted) for d in started().domains()] == [
        ("gpu0.stack0", True),
        ("gpu0.stack1", True),
    ]


def check_driver_without_extended_properties(fake: Fake) -> None:
    fake.set(domains=CARD | STACKS, old_driver=1)
    told = [(d.name, d.source, d.counted) for d in started().domains()]
    assert told[0] == ("gpu0", "level-zero-device", True)
    assert [name for name, _, _ in told[1:]] == ["gpu0.stack0", "gpu0.stack1"]


def check_telemetry(fake: Fake) -> None:
    fake.set(reasons=0b1001)
    sensor = started()
    time.sleep(0.01)
    (told,) = sensor.read().telemetry
    assert told.temperature_c == 63.0 and told.memory_temperature_c == 58.0
    assert told.clocks_mhz == {"gpu": 1550.0, "mem": 3200.0}
    assert told.throttle == ("power-average", "thermal")
    assert told.throttled_s == {"gpu": 2.5, "mem": 2.5}
    assert told.power_limit_w == 600.0
    assert told.memory_used_bytes == 8 << 30 and told.memory_total_bytes == 128 << 30
    assert told.utilization_pct is not None and abs(told.utilization_pct - 25.0) < 1.0
    assert told.memory_utilization_pct is not None and abs(told.memory_utilization_pct - 25.0) < 1.0
    assert all(c.available for c in sensor.capabilities())
    assert sensor.read().telemetry == [], "once a second"


def check_missing_telemetry_is_a_capability(fake: Fake) -> None:
    fake.set(fail_limits=UNSUPPORTED, fail_temperature_enum=DENIED, fail_bandwidth=DENIED, gpu_mhz=-1)
    sensor = started()
    told = by_name(sensor.capabilities())
    assert "UNSUPPORTED_FEATURE" in (told["gpu0.power_limit"].reason or "")
    assert "INSUFFICIENT_PERMISSIONS" in (told["gpu0.temperature"].reason or "")
    assert not told["gpu0.memory_utilization"].available
    assert told["gpu0.energy"].available
    assert sensor.read().telemetry[0].clocks_mhz == {"mem": 3200.0}


def check_reset_and_wrapped_stamp_are_gaps(fake: Fake) -> None:
    sensor = started()
    sensor.read()
    fake.set(energy_j=10.0)
    batch = sensor.read()
    assert "backwards" in batch.gaps[0].reason and math.isnan(watts(batch)[0])
    fake.set(stamp_back_us=1e6)
    batch = sensor.read()
    assert "clock went backwards" in batch.gaps[0].reason and math.isnan(watts(batch)[0])
    time.sleep(0.02)
    assert abs(watts(sensor.read())[0] - 400.0) < 0.5


def check_one_gpu_lost_is_a_gap_and_comes_back(fake: Fake) -> None:
    fake.set(gpus=2)
    sensor = started()
    sensor.read()
    fake.set(gpu1_fail=DEVICE_LOST)
    batch = sensor.read()
    assert [(g.domain, g.end_ns) for g in batch.gaps] == [("gpu1", None)] and "gpu0" in batch.samples
    assert "DEVICE_LOST" in batch.gaps[0].reason
    assert sensor.read().gaps == [], "one gap, not one per read"
    fake.set(gpu1_fail=0)
    assert math.isnan(watts(sensor.read(), "gpu1")[0])


def check_all_lost_and_start_revives(fake: Fake) -> None:
    sensor = started()
    sensor.read()
    fake.set(fail=DEVICE_LOST)
    with pytest.raises(SensorLost) as lost:
        sensor.read()
    assert lost.value.why and lost.value.fix
    fake.set(fail=0)
    sensor.start()
    assert math.isnan(watts(sensor.read())[0])


def check_not_ready_loses_nothing(fake: Fake) -> None:
    sensor = started()
    sensor.read()
    fake.set(fail_energy=NOT_READY)
    batch = sensor.read()
    assert batch.samples == {} and batch.gaps == []


def check_no_permission(fake: Fake) -> None:
    fake.set(fail_energy=DENIED)
    with pytest.raises(SensorPermission) as denied:
        started()
    assert "usermod" in (denied.value.fix or "")
    fake.set(fail_energy=0, fail_init=DENIED)
    with pytest.raises(SensorPermission):
        started()


def check_nothing_to_measure(fake: Fake) -> None:
    fake.set(gpus=0)
    with pytest.raises(SensorUnavailable):
        started()
    fake.set(gpus=1, type=5)
    with pytest.raises(SensorUnavailable):  # a neural processor only
        started()
    fake.set(type=1, energy_na=1)
    with pytest.raises(SensorUnavailable, match="has an energy counter"):
        started()
    fake.set(fail_init=0x78000001)
    with pytest.raises(SensorUnavailable, match="does not start"):
        started()


def check_affinity_mask(fake: Fake) -> None:
    fake.set(gpus=2, tiles=2)
    assert [d.name for d in started(ZE_AFFINITY_MASK="2").domains()] == ["gpu1"]
    composite = started(ZE_AFFINITY_MASK="0.1", ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE")
    assert [d.name for d in composite.domains()] == ["gpu0"]


CHECKS = [name for name in list(globals()) if name.startswith("check_")]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return vendor_abi.run_zes(__file__, tmp_path_factory.mktemp("zes"))


@pytest.mark.parametrize("check", CHECKS)
def test_on_fake_library(check, outcome):
    assert outcome[check] == "", outcome[check]


@pytest.mark.skipif(vendor_abi.why_not("pyzes") is not None, reason="needs the Python package pyzes")
def test_without_library_says_how_to_get_it():
    code = (
        "from tessera.sensors.intel import IntelSensor\n"
        "try: IntelSensor().start()\n"
        "except Exception as e: print(repr(e), e)"
    )
    if os.path.exists("/usr/lib/x86_64-linux-gnu/libze_loader.so.1"):
        pytest.skip("this machine has a Level Zero loader")
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.startswith("SensorUnavailable(")
    assert "libze1" in told


def test_without_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyzes", None)
    with pytest.raises(SensorUnavailable) as missing:
        IntelSensor().start()
    assert missing.value.fix == "pip install pyzes"


@pytest.mark.parametrize(
    ("mask", "flat", "left"),
    [
        (None, True, [0, 1]),
        ("", True, [0, 1]),
        ("0,1", True, [0]),
        ("0,1", False, [0, 1]),
        ("2", True, [1]),
        ("1.0,1.1", False, [1]),
        ("7", True, []),
        ("7,3", True, [1]),
    ],
)
def test_select_masked(mask, flat, left):
    assert select_masked([2, 2], mask, flat=flat) == left
