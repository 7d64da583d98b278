"""Redfish against a real HTTPS server on localhost."""

from __future__ import annotations

import datetime
import logging
import math
import threading
import time
from dataclasses import replace

import pytest

from tessera.clock import Clock, EpochMap
from tessera.errors import ArgumentError, SensorLost, SensorPermission, SensorUnavailable
from tessera.sensors import _redfish_http
from tessera.sensors._redfish_http import RedfishClient, RequestFailed, local_path
from tessera.sensors.base import Sensor
from tessera.sensors.redfish import RedfishConfig, RedfishSensor

from fakes.redfish_server import (
    CHASSIS,
    LOG,
    PASSWORD,
    PDU,
    ROOT,
    USER,
    Pki,
    RedfishServer,
    branch,
    log_entry,
    new_service,
    old_service,
    pdu_service,
)

POWER = f"{CHASSIS}/1/Power"
EPOCH_NS = 1_700_000_000 * 10**9


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def serve(pki):
    servers = []

    def make(resources):
        servers.append(RedfishServer(pki, resources))
        return servers[-1]

    yield make
    for server in servers:
        server.die()


class FakeClock:
    """Runs with the real clock, and ahead of it when told."""

    def __init__(self):
        self.ahead_ns = 0

    def __call__(self):
        return time.monotonic_ns() + self.ahead_ns

    def pass_s(self, seconds):
        self.ahead_ns += round(seconds * 1e9)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def start(pki, clock):
    sensors = []

    def make(server, *, events_period_s=10.0, **config):
        given = {
            "url": server.url,
            "username": USER,
            "password": PASSWORD,
            "ca_file": str(pki.ca_file),
            "timeout_s": 2.0,
        }
        sensor = RedfishSensor(
            RedfishConfig(**{**given, **config}),
            clock_ns=clock,
            epoch=EpochMap(Clock(clock, lambda: clock() + EPOCH_NS)),
            events_period_s=events_period_s,
        )
        sensors.append(sensor)
        sensor.start()
        return sensor

    yield make
    for sensor in sensors:
        sensor.stop()
        sensor.stop()


def watts(batch):
    return {domain: samples[-1][1] for domain, samples in batch.samples.items()}


def test_old_resources(serve, start):
    sensor = start(serve(old_service()))
    assert isinstance(sensor, Sensor)
    batch = sensor.read()
    assert watts(batch) == {"node": 512.0, "node.psu0": 260.0, "node.psu1": 240.0}
    domains = {d.name: d for d in sensor.domains()}
    assert not any(d.counted for d in domains.values())
    assert "assumed" in domains["node"].note
    assert "output power" in domains["node.psu1"].note
    limits = {t.domain: t for t in batch.telemetry}
    assert limits["node"].power_limit_w == 900.0
    assert limits["node.psu0"].voltage_v == 230.0
    assert not batch.gaps


def test_new_resources(serve, start):
    sensor = start(serve(new_service()))
    batch = sensor.read()
    assert watts(batch) == {
        "node": 4321.5,
        "node.psu0": 2200.0,
        "node.psu1": 2000.0,
        "chassis.HGX_GPU_0": 650.0,
    }
    (supply,) = batch.telemetry
    assert (supply.current_a, supply.peak_current_a, supply.voltage_v) == (9.5, 12.5, 231.0)


def test_one_resource_is_fetched_once_a_read(serve, start):
    server = serve(old_service())
    sensor = start(server)
    server.requests.clear()
    sensor.read()
    assert server.requests == [("GET", POWER)]


def test_repeats_with_the_same_time_stamp_are_not_data(serve, start, clock):
    server = serve(new_service())
    sensor = start(server)
    sensor.read()
    clock.pass_s(5.0)
    assert "chassis.HGX_GPU_0" not in sensor.read().samples
    path = f"{CHASSIS}/GPU0/Sensors/total_power"
    server.resources[path] = {**server.resources[path], "ReadingTime": "2024-01-01T00:00:05Z"}
    assert sensor.read().samples["chassis.HGX_GPU_0"][-1][1] == 650.0


def test_average_is_the_last_resort(serve, start):
    server = serve(old_service())
    control = {"PowerMetrics": {"AverageConsumedWatts": 480, "IntervalInMin": 1}}
    server.resources[POWER] = {"PowerControl": [control]}
    sensor = start(server)
    assert watts(sensor.read()) == {"node": 480.0}
    assert "mean over minutes" in sensor.domains()[0].note


def test_unknown_ca_is_refused(serve, start):
    with pytest.raises(SensorUnavailable) as error:
        start(serve(old_service()), ca_file=None)
    assert "certificate" in str(error.value)
    assert "ca_file" in error.value.fix


def test_wrong_host_name_is_refused(serve, start):
    server = serve(old_service())
    with pytest.raises(SensorUnavailable, match="certificate"):
        start(server, url=server.url.replace("127.0.0.1", "localhost"))


def test_wrong_password(serve, start):
    server = serve(old_service())
    with pytest.raises(SensorPermission) as error:
        start(server, password="wr0ng-pa55")
    assert "wr0ng-pa55" not in str(error.value)
    assert len(server.requests) == 1  # not tried again: that locks accounts


def test_a_changed_password_is_a_loss_at_once(serve, start, monkeypatch):
    server = serve(old_service())
    sensor = start(server)
    monkeypatch.setattr("fakes.redfish_server.PASSWORD", "another")
    with pytest.raises(SensorLost):
        sensor.read()


def test_pdu_and_near_trip(serve, start):
    server = serve(pdu_service())
    sensor = start(server)
    name = "rack.pdu.A.branch.B1"
    batch = sensor.read()
    assert watts(batch) == {"rack.pdu.A": 8000.0, name: 2760.0}
    assert {d.name for d in sensor.domains()} == {"rack.pdu.A", name}  # the main has a current, but no power
    mains = next(t for t in batch.telemetry if t.domain == "rack.pdu.A.mains.AC1")
    assert (mains.current_a, mains.peak_current_a) == (20.0, 24.0)
    assert not batch.events
    kinds = []
    for current_a in (16.0, 16.1, 17.0, 15.5, 16.2, 14.0, 19.0):  # 80% of 20 A is 16 A
        server.resources[f"{PDU}/Branches/B1"] = branch(current_a)
        kinds.append([e.kind for e in sensor.read().events])
    near = ["breaker_near_trip"]
    assert kinds == [[], near, [], [], [], [], near]
    server.resources[f"{PDU}/Branches/B1"] = branch(0.0, "Tripped")
    (event,) = sensor.read().events
    assert (event.kind, event.domain) == ("breaker_tripped", name)


def test_many_outlets_take_turns(serve, start):
    server = serve(pdu_service(outlets=20))
    sensor = start(server)
    seen = set()
    for _ in range(3):
        server.requests.clear()
        seen |= {d for d in sensor.read().samples if "outlet" in d}
        assert len(server.requests) <= 9
    assert len(seen) == 20


def test_only_new_events_and_their_kinds(serve, start, clock):
    server = serve(old_service())
    sensor = start(server, events_period_s=0.0)
    assert not sensor.read().events
    soon = "2999-01-01T00:00:00Z"
    new = [
        log_entry(2, "Input lost", MessageId="Power.1.0.PowerSupplyFailed", Created=soon),
        log_entry(3, "PSU2 over-current protection", Links={"OriginOfCondition": {"@odata.id": f"{CHASSIS}/1"}}),
        log_entry(4, "PSU2 over-current cleared"),
        log_entry(5, "User root logged in", Created=5),
    ]
    server.resources[LOG] = {
        "Members": server.resources[LOG]["Members"] + new[:2],
        "Members@odata.nextLink": f"{LOG}?$skip=3",
    }
    server.resources[f"{LOG}?$skip=3"] = {"Members": new[2:]}
    events = sensor.read().events
    assert [(e.kind, e.domain) for e in events] == [("psu_fault", "node"), ("over_current", "node")]
    assert events[0].time_ns <= clock()
    assert not sensor.read().events


def test_an_event_is_placed_by_its_own_time_when_that_can_be(serve, start, clock):
    server = serve(old_service())
    sensor = start(server)

    def logged(number, seconds_ago):
        clock.pass_s(20.0)
        stamp = datetime.datetime.fromtimestamp((clock() + EPOCH_NS) / 1e9 - seconds_ago, datetime.UTC)
        server.resources[LOG] = {"Members": [log_entry(number, "OCP", Created=stamp.isoformat())]}
        (event,) = sensor.read().events
        return (clock() - event.time_ns) / 1e9

    assert logged(1, 5.0) == pytest.approx(5.0, abs=0.5)
    assert logged(2, 3600.0) == pytest.approx(0.0, abs=0.5)  # before the last look at the log: a wrong clock
    assert logged(3, -3600.0) == pytest.approx(0.0, abs=0.5)


def test_a_failing_log_does_not_cost_the_power(serve, start):
    server = serve(old_service())
    sensor = start(server, events_period_s=0.0)
    server.resources[LOG] = 500
    assert sensor.read().samples["node"]
    server.resources[LOG] = b"["
    assert not sensor.read().events


def test_critical_health_of_a_supply_is_told_once(serve, start):
    server = serve(old_service())
    sensor = start(server)
    server.resources[POWER]["PowerSupplies"][0]["Status"]["Health"] = "Critical"
    (event,) = sensor.read().events
    assert (event.kind, event.domain) == ("psu_fault", "node.psu0")
    assert not sensor.read().events


@pytest.mark.parametrize(
    ("control", "reason"),
    [
        ({"PowerConsumedWatts": None}, "null"),
        ({"PowerConsumedWatts": "512"}, "not a number"),
        ({"PowerConsumedWatts": True}, "not a number"),
        ({"PowerConsumedWatts": float("nan")}, "not a number"),
        ({"PowerConsumedWatts": -3}, "impossible"),
        ({"PowerConsumedWatts": 10**400}, "not a number"),
        (["odd"], "null"),
    ],
)
def test_useless_values_are_gaps(serve, start, control, reason):
    server = serve(old_service())
    sensor = start(server)
    good = server.resources[POWER]
    sensor.read()
    server.resources[POWER] = {**good, "PowerControl": [control]}
    batch = sensor.read()
    (gap,) = batch.gaps
    assert gap.domain == "node"
    assert reason in gap.reason
    assert not sensor.read().gaps  # told once
    server.resources[POWER] = good
    back = sensor.read().samples["node"]
    assert [math.isnan(w) for _, w in back] == [True, False]
    assert back[0][0] < back[1][0]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"not json", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b"[1, 2]", "not an object"),
        (b"\xff\xfe\x00", "not JSON"),
        (b'{"a": "' + b"x" * 70_000 + b'"}', "more than"),
        (500, "HTTP 500"),
        (302, "HTTP 302"),
    ],
)
def test_useless_bodies_are_gaps_then_a_loss(serve, start, monkeypatch, answer, reason):
    server = serve(old_service())
    sensor = start(server)
    if reason == "more than":
        monkeypatch.setattr(_redfish_http, "MAX_BODY_BYTES", 65_536)
    server.resources[POWER] = answer
    batch = sensor.read()
    assert {g.domain for g in batch.gaps} == {"node", "node.psu0", "node.psu1"}
    assert reason in batch.gaps[0].reason
    sensor.read()
    with pytest.raises(SensorLost, match=reason):
        sensor.read()


def test_hostile_links_are_not_followed(serve, start):
    server = serve(old_service())
    server.resources[CHASSIS] = {
        "Members": [
            {"@odata.id": "https://evil.example/redfish/v1/Chassis/1"},
            {"@odata.id": "//evil.example/redfish/v1"},
            {"@odata.id": "/redfish/v1/../../etc"},
            {"@odata.id": 7},
            {"@odata.id": f"{CHASSIS}/1"},
        ]
    }
    sensor = start(server)
    assert watts(sensor.read())["node"] == 512.0
    refused = [c.reason for c in sensor.capabilities() if c.name == "redfish.resource"]
    assert len(refused) == 4
    assert all("leaves the service" in r for r in refused)


@pytest.mark.parametrize(
    "uri",
    ["", None, "http://h/redfish/v1", "https://h:444/redfish/v1", "https://u@h/redfish/v1", "/redfish/v1/a b",
     "/redfish/v1/a\r\nX: y", "/other", "\\\\h\\redfish"],
)  # fmt: skip
def test_links_that_leave(uri):
    with pytest.raises(RequestFailed):
        local_path(uri, ("h", 443))


def test_links_that_stay():
    assert local_path("https://h/redfish/v1/x", ("h", 443)) == "/redfish/v1/x"
    assert local_path("/redfish/v1/x?$skip=5", ("h", 443)) == "/redfish/v1/x?$skip=5"


def test_a_closed_connection_is_opened_again(serve, start):
    server = serve(old_service())
    sensor = start(server)
    server.hang_up()
    assert watts(sensor.read())["node"] == 512.0


def test_death_is_a_gap_then_a_loss_then_recovery(serve, start):
    server = serve(old_service())
    sensor = start(server)
    sensor.read()
    server.die()
    first = sensor.read()
    assert {g.domain for g in first.gaps} == {"node", "node.psu0", "node.psu1"}
    assert all(g.end_ns is None for g in first.gaps)
    sensor.read()
    with pytest.raises(SensorLost) as error:
        sensor.read()
    assert error.value.fix
    with pytest.raises(SensorUnavailable):
        sensor.start()
    with pytest.raises(SensorLost):
        sensor.read()
    sensor._config = replace(sensor._config, url=serve(old_service()).url)
    sensor.start()
    assert watts(sensor.read())["node"] == 512.0


def test_a_service_without_power(serve, start):
    with pytest.raises(SensorUnavailable, match="no chassis"):
        start(serve({ROOT: {}, CHASSIS: {"Members": []}}))


def test_a_dripping_server_is_cut_off(serve, pki):
    server = serve(old_service())
    config = RedfishConfig(url=server.url, username=USER, password=PASSWORD, ca_file=str(pki.ca_file))
    ticks = iter(range(0, 10**6, 100))
    client = RedfishClient(config, monotonic_s=lambda: float(next(ticks)))
    with pytest.raises(RequestFailed, match="no answer within"):
        client.get(ROOT)
    client.close()


def test_a_dripping_head_is_cut_off(serve, pki):
    """Each byte comes in time, and the answer never."""
    over = threading.Event()

    def drip(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while not over.wait(0.01):
            handler.wfile.write(b"x")
            handler.wfile.flush()

    server = serve(old_service())
    server.drip = drip
    config = RedfishConfig(url=server.url, username=USER, password=PASSWORD, ca_file=str(pki.ca_file), timeout_s=0.2)
    client = RedfishClient(config)
    with pytest.raises(RequestFailed, match="no answer within"):
        client.get(ROOT)
    client.close()
    over.set()


def test_a_service_that_describes_itself_for_ever_is_given_up(serve, start, monkeypatch):
    monkeypatch.setattr("tessera.sensors.redfish.START_S", -1.0)
    with pytest.raises(SensorUnavailable) as caught:
        start(serve(old_service()))
    assert "to describe itself" in str(caught.value.why)


def test_the_password_shows_nowhere(serve, start, caplog):
    caplog.set_level(logging.DEBUG)
    sensor = start(serve(old_service()))
    sensor.read()
    shown = [repr(sensor), repr(sensor._config), repr(sensor._client), caplog.text, str(vars(sensor))]
    assert all(PASSWORD not in s for s in shown)


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "http://bmc"},
        {"url": "https://u:hunter2@bmc"},
        {"url": "https://bmc/other"},
        {"url": "https://bmc:port"},
        {"url": "bmc"},
        {"username": ""},
        {"timeout_s": 0.0},
    ],
)
def test_wrong_configuration(wrong):
    with pytest.raises(ArgumentError) as error:
        RedfishConfig(**{"url": "https://bmc", "username": "u", "password": "hunter2", **wrong})
    assert "hunter2" not in str(error.value)
    assert error.value.fix


def test_wrong_ca_file(tmp_path):
    for name, content in (("missing.pem", None), ("odd.pem", "odd")):
        if content is not None:
            (tmp_path / name).write_text(content)
        config = RedfishConfig(url="https://bmc", username="u", password="p", ca_file=str(tmp_path / name))
        with pytest.raises(ArgumentError, match="CA file"):
            RedfishClient(config)


def test_configuration_from_the_environment():
    assert RedfishConfig.from_env({}) is None
    env = {"TESSERA_REDFISH_URL": "https://bmc", "TESSERA_REDFISH_USER": "u", "TESSERA_REDFISH_PASSWORD": "p"}
    config = RedfishConfig.from_env(env)
    assert (config.address, config.username, config.password) == (("bmc", 443), "u", "p")
