"""IPMI with a fake runner, and with a fake ipmitool script run for real."""

from __future__ import annotations

import math
import subprocess
from subprocess import CompletedProcess

import pytest

from tessera.errors import SensorLost, SensorPermission, SensorUnavailable
from tessera.sensors._meters import PolledPower
from tessera.sensors.base import Batch, Sensor
from tessera.sensors.ipmi import IpmiSensor, classify_event, parse_power_reading

OLD = "   1 | 01/15/2024 | 10:23:45 | Power Supply PS1 Status | Failure detected () | Asserted"


def reading(watts, stamp="Thu Jan  1 00:00:00 1970", state="activated"):
    return f"""
    Instantaneous power reading:                   {watts} Watts
    Minimum during sampling period:                 18 Watts
    Maximum during sampling period:                304 Watts
    Average power reading over sample period:      215 Watts
    IPMI timestamp:                           {stamp}
    Sampling period:                          00000005 Seconds.
    Power reading state is:                   {state}

"""


def finish(returncode=0, stdout="", stderr=""):
    return CompletedProcess(("ipmitool",), returncode, stdout, stderr)


class Bmc:
    """A runner that answers from attributes; an exception among the answers is raised."""

    def __init__(self):
        self.ns = 0
        self.power = reading(220)
        self.log = OLD + "\n"
        self.calls = []

    def clock(self):
        return self.ns

    def __call__(self, command):
        self.calls.append(tuple(command))
        answer = self.power if "dcmi" in command else self.log
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, CompletedProcess) else finish(stdout=answer)

    def sensor(self, **more):
        return IpmiSensor(runner=self, clock_ns=self.clock, **more)

    def read_after(self, sensor, seconds):
        self.ns += round(seconds * 1e9)
        return sensor.read()


@pytest.fixture
def bmc():
    return Bmc()


def test_node_power(bmc):
    sensor = bmc.sensor()
    assert isinstance(sensor, Sensor)
    sensor.start()
    (domain,) = sensor.domains()
    assert (domain.name, domain.counted, domain.source) == ("node", False, "ipmi")
    assert "assumed" in domain.note
    assert bmc.read_after(sensor, 1.0).samples == {"node": [(bmc.ns, 220.0)]}
    assert all(c.available for c in sensor.capabilities())
    sensor.stop()
    sensor.stop()


def test_repeats_are_not_data_and_the_refresh_is_learnt(bmc):
    sensor = bmc.sensor()
    sensor.start()
    kept = []
    for i in range(40):  # polled four times a refresh
        bmc.power = reading(200 + i // 4)
        kept += bmc.read_after(sensor, 0.25).samples.get("node", [])
    assert [w for _, w in kept] == [200.0 + i for i in range(10)]
    assert sensor.domains()[0].resolution_s == pytest.approx(1.0)
    assert "assumed" not in sensor.domains()[0].note


def test_a_steady_value_is_kept_once_a_refresh():
    power, batch = PolledPower("node", started_ns=0), Batch()
    for i in range(20):
        power.observe(batch, power_w=200.0, time_ns=i * 250_000_000)
    assert len(batch.samples["node"]) == pytest.approx(5, abs=2)


def test_the_stamp_tells_a_new_reading_and_a_dead_one():
    power, batch = PolledPower("node", started_ns=0), Batch()
    power.observe(batch, power_w=200.0, time_ns=0, stamp="a")
    power.observe(batch, power_w=200.0, time_ns=10_000_000_000, stamp="a")
    assert len(batch.samples["node"]) == 1
    power.observe(batch, power_w=200.0, time_ns=11_000_000_000, stamp="b")
    assert len(batch.samples["node"]) == 2
    power.observe(batch, power_w=200.0, time_ns=60_000_000_000, stamp="b")
    assert "has not changed" in batch.gaps[0].reason


def test_failures_are_a_gap_then_a_loss(bmc):
    sensor = bmc.sensor()
    sensor.start()
    bmc.read_after(sensor, 1.0)
    last_ns = bmc.ns
    bmc.power = subprocess.TimeoutExpired("ipmitool", 5.0)
    batch = bmc.read_after(sensor, 1.0)
    assert [(g.start_ns, g.end_ns) for g in batch.gaps] == [(last_ns, None)]
    assert "within 5 s" in batch.gaps[0].reason
    bmc.power = reading(250)
    back = bmc.read_after(sensor, 1.0).samples["node"]
    assert math.isnan(back[0][1])
    assert back[1] == (bmc.ns, 250.0)
    bmc.power = finish(returncode=1, stderr="Unable to send command")
    bmc.read_after(sensor, 1.0)
    bmc.read_after(sensor, 1.0)
    with pytest.raises(SensorLost) as error:
        bmc.read_after(sensor, 1.0)
    assert error.value.why
    assert error.value.fix
    bmc.power = reading(260)
    sensor.start()
    assert bmc.read_after(sensor, 1.0).samples["node"] == [(bmc.ns, 260.0)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (reading(65535), "no reading"),
        (reading(100, state="deactivated"), "deactivated"),
        ("garbage \x00 in", "no power reading"),
        ("", "no power reading"),
    ],
)
def test_useless_answers(bmc, text, why):
    with pytest.raises(ValueError, match=why):
        parse_power_reading(text)
    bmc.power = text
    with pytest.raises(SensorUnavailable, match="DCMI"):
        bmc.sensor().start()


def test_stamps_of_1970_mean_nothing():
    assert parse_power_reading(reading(100)).stamp is None
    assert parse_power_reading(reading(100, "Tue Jan  2 03:04:05 2024")).stamp == "Tue Jan  2 03:04:05 2024"


def test_only_new_power_events(bmc):
    sensor = bmc.sensor(events_period_s=10.0)
    sensor.start()
    bmc.log = "\n".join(
        [
            OLD,
            "   2 | 01/15/2024 | 11:00:00 | Power Supply PS2 Status | Power Supply AC lost | Asserted",
            "   3 | 01/15/2024 | 11:00:01 | Power Supply PS2 Status | Power Supply AC lost | Deasserted",
            "   4 | 01/15/2024 | 11:00:02 | Current PSU1 Iout | Upper Critical going high | Asserted",
            "   5 | 01/15/2024 | 11:00:03 | Temperature CPU1 | Upper Critical going high | Asserted",
        ]
    )
    assert not bmc.read_after(sensor, 1.0).events  # too soon to ask
    events = bmc.read_after(sensor, 10.0).events
    assert [e.kind for e in events] == ["psu_fault", "over_current"]
    assert "AC lost" in events[0].message
    assert not bmc.read_after(sensor, 10.0).events
    bmc.log = finish(returncode=1, stderr="busy")
    assert bmc.read_after(sensor, 10.0).samples["node"]
    bmc.log = "SEL has no entries\n"
    assert not bmc.read_after(sensor, 10.0).events


def test_power_without_a_log(bmc):
    bmc.log = finish(returncode=1, stderr="SEL not supported")
    sensor = bmc.sensor()
    sensor.start()
    assert [(c.name, c.available) for c in sensor.capabilities()] == [("node.power", True), ("events", False)]
    assert bmc.read_after(sensor, 20.0).samples["node"]


def test_errors_of_start(bmc, tmp_path):
    bmc.power = FileNotFoundError(2, "no such file", "ipmitool")
    with pytest.raises(SensorUnavailable, match="not installed"):
        bmc.sensor().start()
    bmc.power = PermissionError(13, "Permission denied")
    with pytest.raises(SensorUnavailable, match="cannot be run"):
        bmc.sensor().start()
    said = "Could not open device at /dev/ipmi0 or /dev/ipmi/0 or /dev/ipmidev/0: No such file or directory"
    bmc.power = finish(returncode=1, stderr=said)
    with pytest.raises(SensorUnavailable, match="modprobe"):
        bmc.sensor(device=tmp_path / "none").start()
    (tmp_path / "ipmi0").touch()
    with pytest.raises(SensorPermission, match="chmod"):
        bmc.sensor(device=tmp_path / "ipmi0", readable=lambda _: False).start()
    with pytest.raises(SensorLost):
        bmc.sensor().read()


def test_a_real_process(tmp_path, monkeypatch):
    tool = tmp_path / "ipmitool"
    tool.write_text(f"#!/bin/sh\ncase $1 in dcmi) cat <<'E'\n{reading(321)}\nE\n;; *) echo '{OLD}';; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    sensor = IpmiSensor()
    sensor.start()
    assert sensor.read().samples["node"][0][1] == 321.0
    tool.write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr("tessera.sensors.ipmi.TIMEOUT_S", 0.1)
    with pytest.raises(SensorUnavailable, match="within"):
        IpmiSensor().start()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(SensorUnavailable, match="not installed"):
        IpmiSensor().start()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Alert.1.0.PowerSupplyFailed", "psu_fault"),
        ("PSU 1 input lost", "psu_fault"),
        ("PSU0 OCP asserted", "over_current"),
        ("OverCurrent on rail 12V", "over_current"),
        ("Breaker B1 load near trip", "breaker_near_trip"),
        ("Circuit breaker 2 tripped", "breaker_tripped"),
        ("Power supply fault cleared", None),
        ("Power supply redundancy restored", None),
        ("Fan failure", None),
        ("User login", None),
    ],
)
def test_log_lines_have_kinds(text, kind):
    assert classify_event(text) == kind
