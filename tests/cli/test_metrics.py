"""`tessera metrics`: what a scrape gets, where it may come from, and how the server ends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from cli.test_watch import board, here, shot, tessera, throttled
from tessera.cli.metrics import Address
from tessera.config import Config
from tessera.errors import ArgumentError, MissingExtra, SensorLost
from tessera.monitor.snapshot import PowerWatch, Snapshot
from tessera.report import metrics as report
from tessera.schema import Domain, PowerEvent, Telemetry
from tessera.sensors.discover import DiscoveredSensors

from fakes.nvml import Scenario, fake_env, missing_compiler
from fakes.sensor import ScriptSensor
from waiting import wait_until

needs_fake = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def named(samples: Samples, name: str) -> dict[str, float]:
    """The values of one metric by domain (or sensor), and the label that tells them apart further."""
    rows = {}
    for (found, labels), value in samples.items():
        if found == name:
            by = dict(labels)
            extra = by.get("reason") or by.get("clock") or by.get("part")
            rows[" ".join(filter(None, (by.get("domain") or by.get("sensor"), extra)))] = value
    return rows


def exposed(snapshot: Snapshot, asked: tuple[str, ...] = ()) -> Samples:
    return parse(report.format_metrics(report.SnapshotCollector(lambda: snapshot, asked)))


# -- what a scrape gets ------------------------------------------------------------------------------------------


def test_units_are_si():
    found = exposed(shot([throttled(board(), "power cap")]))
    assert named(found, "tessera_clock_hertz") == {"gpu0 sm": 1.53e9, "gpu0 memory": 3.201e9}
    assert named(found, "tessera_sm_activity_ratio") == {"gpu0": 0.93}
    assert named(found, "tessera_temperature_celsius") == {"gpu0 core": 61.0, "gpu0 memory": 70.0}
    assert named(found, "tessera_throttle") == {"gpu0 power cap": 1.0}
    key = ("tessera_energy_joules_total", frozenset(
        {"domain": "gpu0", "source": "nvml-samples", "basis": "measured", "label": "NVIDIA H200"}.items()
    ))  # fmt: skip
    assert found[key] == 20_913.0


def test_money_and_co2_are_counted_where_factors_are_configured():
    cost = Config(price_per_kwh=0.3, currency="EUR", gco2e_per_kwh=380).cost_of(3.6e6)
    found = exposed(shot([board()], cost=cost))
    assert found["tessera_energy_cost_total", frozenset({"currency": "EUR"}.items())] == pytest.approx(0.3)
    assert found["tessera_emissions_grams_total", frozenset()] == pytest.approx(380.0)


def test_what_is_missing_is_absent():
    found = exposed(shot([board(telemetry=None, power_w=None, coverage=0.0, energy_j=0.0)]))
    names = {name for name, _ in found}
    assert names == {
        "tessera_gaps_total", "tessera_sampler_cpu_seconds_total", "tessera_sampler_memory_bytes", "tessera_build_info",
    }  # fmt: skip


def test_a_lost_gpu_keeps_its_joules_and_nothing_else():
    found = exposed(shot([board(lost="gone", power_w=None)]))
    assert named(found, "tessera_energy_joules_total") == {"gpu0": 20_913.0}
    assert not named(found, "tessera_power_watts") and not named(found, "tessera_temperature_celsius")


def test_labels_are_escaped():
    odd = 'a "quoted" \\ label\nwith a break'
    labels = [dict(k[1]) for k in exposed(shot([board(label=odd)])) if k[0] == "tessera_power_watts"]
    assert labels[0]["label"] == odd


def test_a_reason_that_is_over_goes_to_zero_and_does_not_vanish():
    now = [throttled(board(), "sync boost")]
    collector = report.SnapshotCollector(lambda: shot(now))
    report.format_metrics(collector)
    now[0] = throttled(board())
    assert named(parse(report.format_metrics(collector)), "tessera_throttle") == {"gpu0 sync boost": 0.0}


def test_domains_that_overlap_are_not_in_the_sum():
    found = exposed(shot([board(), board(domain="gpu0.memory", counted=False, telemetry=None, power_w=71.0)]))
    assert named(found, "tessera_power_watts") == {"gpu0": 512.3}
    assert named(found, "tessera_overlapping_power_watts") == {"gpu0.memory": 71.0}
    assert set(named(found, "tessera_overlapping_energy_joules_total")) == {"gpu0.memory"}


def test_feeds_show_their_current_crest_factor_and_events():
    pdu = Telemetry(time_ns=0, domain="pdu1", current_a=21.5, peak_current_a=31.0)
    reading = board(domain="pdu1", counted=False, telemetry=pdu, crest_factor=1.42)
    found = exposed(shot([reading], events={"pdu1": {"over_current": 2, "breaker_near_trip": 1}}))
    assert named(found, "tessera_current_amperes") == {"pdu1": 21.5}
    assert named(found, "tessera_peak_current_amperes") == {"pdu1": 31.0}
    assert named(found, "tessera_crest_factor") == {"pdu1": 1.42}
    events = {dict(labels)["kind"]: n for (name, labels), n in found.items() if name == "tessera_power_events_total"}
    assert events == {"over_current": 2.0, "breaker_near_trip": 1.0}


def test_a_watch_counts_each_event_once():
    sensor = ScriptSensor(clock=time.monotonic_ns, domain=Domain(name="gpu0", source="script", resolution_s=0.02))
    with PowerWatch(DiscoveredSensors([sensor], []), 1.0) as watch:
        event = PowerEvent(time_ns=1, domain="psu1", kind="psu_fault", message="x")
        watch._monitor.sampler.events.append(event)
        counts = [watch.take_snapshot().events for _ in range(2)]
        watch._monitor.sampler.events.append(dataclasses.replace(event, time_ns=2))
        counts.append(watch.take_snapshot().events)
    assert counts == [{"psu1": {"psu_fault": n}} for n in (1, 1, 2)]


def test_only_a_sensor_that_was_asked_for_is_down_when_it_is_not_there():
    whole = shot([board()], sensors={"nvml": True}, missing={"rapl": "no", "amd": "no"})
    assert named(exposed(whole), "tessera_sensor_up") == {"nvml": 1.0}
    assert named(exposed(whole, ("nvml", "rapl")), "tessera_sensor_up") == {"nvml": 1.0, "rapl": 0.0}


def joules_of(watch: PowerWatch) -> float:
    return watch.take_snapshot().readings[0].energy_j


def has_more_than(watch: PowerWatch, energy_j: float) -> bool:
    return joules_of(watch) > energy_j


def is_lost(watch: PowerWatch) -> bool:
    return watch.take_snapshot().readings[0].lost is not None


def test_joules_are_monotone_through_a_loss():
    sensor = ScriptSensor(clock=time.monotonic_ns, domain=Domain(name="gpu0", source="script", resolution_s=0.02))
    seen: list[Samples] = []
    with PowerWatch(DiscoveredSensors([sensor], []), 1.0) as watch:
        collector = report.SnapshotCollector(watch.take_snapshot)
        for failing in (None, SensorLost("GPU is lost"), None):
            sensor.fail = failing
            if failing:
                wait_until(lambda: is_lost(watch))
            else:
                wait_until(functools.partial(has_more_than, watch, joules_of(watch)))
            seen += [parse(report.format_metrics(collector)) for _ in range(2)]
    joules = [named(s, "tessera_energy_joules_total")["gpu0"] for s in seen]
    assert joules == sorted(joules) and joules[0] > 0 and joules[-1] > joules[2]
    assert [named(s, "tessera_sensor_up")["script"] for s in seen] == [1, 1, 0, 0, 1, 1]
    assert [named(s, "tessera_gaps_total")["gpu0"] for s in seen] == [0, 0, 1, 1, 1, 1]
    assert all(bool(named(s, "tessera_power_watts")) == bool(u) for s, u in zip(seen, [1, 1, 0, 0, 1, 1], strict=True))


@needs_fake
def test_once_prints_every_metric_of_a_gpu():
    scenario = Scenario(gpus=2, wave="const:300", reasons=4, throttled={"power": 0.5})
    for _ in range(50):
        begun_s = time.monotonic()
        done = tessera("metrics", "--once", scenario=scenario)
        took_s = time.monotonic() - begun_s
        assert done.returncode == 0 and done.stderr == "", done.stderr
        found = parse(done.stdout)
        if named(found, "tessera_sm_activity_ratio"):
            break  # activity is known between two looks: on a busy machine the second one may not have come
    estimates = {"tessera_job_energy_joules_total", "tessera_job_power_watts", "tessera_job_gpu_memory_bytes"}
    costs = {"tessera_energy_cost_total", "tessera_emissions_grams_total"}
    feeds = {"tessera_current_amperes", "tessera_peak_current_amperes", "tessera_power_events_total"}  # of PDUs
    assert {name for name, _ in found} | estimates | costs | feeds == set(report.METRICS), "nobody uses the GPUs"
    for power_w in named(found, "tessera_power_watts").values():
        assert power_w == pytest.approx(300, rel=0.05)
    for energy_j in named(found, "tessera_energy_joules_total").values():  # of 1.2 s, or more on a busy machine
        assert 0.75 * 360 <= energy_j <= 1.05 * 300 * took_s
    assert named(found, "tessera_throttled_seconds_total")["gpu1 power cap"] > 0


def test_names_follow_the_conventions():
    for name, (kind, text) in report.METRICS.items():
        assert re.fullmatch(r"tessera_[a-z_]+", name) and text.endswith(".")
        assert name.endswith("_total") == (kind == "counter") and name.endswith("_info") == (kind == "info")


# -- the dashboard -----------------------------------------------------------------------------------------------


def test_the_dashboard_refers_only_to_metrics_that_exist(capsys: pytest.CaptureFixture[str]):
    code, text, _ = here(capsys, "metrics", "--dashboard")
    board_ = json.loads(text)
    assert code == 0
    expressions = [t["expr"] for p in board_["panels"] for t in p["targets"]]
    variables = [v.get("definition", "") for v in board_["templating"]["list"]]
    used = set(re.findall(r"tessera_[a-z_]+", " ".join([*expressions, *variables])))
    assert used <= set(report.METRICS), used - set(report.METRICS)
    for wanted in ("power_watts", "energy_joules_total", "clock_hertz", "temperature_celsius", "throttle",
                   "sm_activity_ratio", "gaps_total"):  # fmt: skip
        assert f"tessera_{wanted}" in used
    assert board_["templating"]["list"][0]["type"] == "datasource"
    assert len({p["id"] for p in board_["panels"]}) == len(board_["panels"])
    assert all(p["datasource"]["uid"] == "${datasource}" for p in board_["panels"])


# -- the address -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "loopback"),
    [("127.0.0.1:9400", "127.0.0.1", True), ("[::1]:9400", "::1", True), ("0.0.0.0:9400", "0.0.0.0", False)],
)
def test_addresses(text: str, host: str, loopback: bool):
    address = Address.parse(text)
    assert address.sockaddr == (host, 9400) and address.loopback is loopback


@pytest.mark.parametrize(
    "text", ["9400", ":9400", "localhost", "::1:9400", "127.0.0.1:99999", "127.0.0.1:http", "a b:1"]
)
def test_bad_addresses_are_answered_with_the_fix(text: str):
    with pytest.raises(ArgumentError) as caught:
        Address.parse(text)
    assert caught.value.fix and "127.0.0.1:9400" in caught.value.fix


def test_the_default_is_loopback():
    from tessera.cli.metrics import command

    listen = next(p for p in command.params if p.name == "listen")
    assert Address.parse(str(listen.default)).loopback


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, errors = here(capsys, "metrics", "--sensor", "modelled", "--listen", f"127.0.0.1:{port}")
    assert code == 1 and "in use" in errors and f"127.0.0.1:{port + 1}" in errors


def test_without_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtra, match="prometheus_client") as caught:
        report.import_client()
    assert caught.value.fix is not None and caught.value.fix.startswith("pip install prometheus_client, ")


# -- the server --------------------------------------------------------------------------------------------------


def get(url: str, method: str = "GET", accept: str = "*/*", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, method=method, headers={"Accept": accept, **headers})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


@contextlib.contextmanager
def served(*args: str, scenario: Scenario) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "from tessera.cli.main import main; main()", "metrics", *args],
        env=fake_env(scenario), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+/metrics", line)
        try:
            assert found, line + (process.stderr.read() if process.stderr else "")
            yield process, found.group()
        finally:
            process.kill()


@needs_fake
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_the_server_answers_get_metrics_and_stops_cleanly(end: signal.Signals):
    with served("--listen", "127.0.0.1:0", scenario=Scenario(wave="const:300")) as (process, url):
        time.sleep(0.1)  # before the first sample there are no joules to show
        edges = [time.monotonic()]
        first = parse(get(url)[1])
        edges.append(time.monotonic())
        time.sleep(0.2)
        edges.append(time.monotonic())
        status, text = get(url, accept="application/openmetrics-text;version=1.0.0")
        edges.append(time.monotonic())
        second = {(s.name, frozenset(s.labels.items())): s.value
                  for f in openmetrics.text_string_to_metric_families(text) for s in f.samples}  # fmt: skip
        assert status == 200
        assert second.keys() >= first.keys()
        assert all(second[k] >= v for k, v in first.items() if k[0].endswith("_total"))
        gained_j = [named(x, "tessera_energy_joules_total")["gpu0"] for x in (first, second)]
        # A scrape has data up to its own time: 300 W from somewhere in the first to somewhere in the second.
        assert 0.4 * 300 * (edges[2] - edges[1]) < gained_j[1] - gained_j[0] < 1.6 * 300 * (edges[3] - edges[0])
        base = url.removesuffix("/metrics")
        assert get(base + "/")[0] == 200 and "/metrics" in get(base + "/")[1]
        assert get(base + "/else")[0] == 404 and get(url, "POST")[0] == 405 and get(url, "OPTIONS")[0] == 405
        process.send_signal(end)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0 and errors == ""


@needs_fake
def test_another_address_is_allowed_with_a_warning():
    with served("--listen", "0.0.0.0:0", scenario=Scenario()) as (process, url):
        assert get(url.replace("0.0.0.0", "127.0.0.1"))[0] == 200
        process.terminate()
        _, errors = process.communicate(timeout=300)
    assert errors.count("\n") == 1 and "without authentication" in errors


def test_ipv6_and_no_thread_is_left():
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    address = Address.parse("[::1]:0")
    collector = report.SnapshotCollector(lambda: shot([board()]))
    with report.bind(address.family, address.sockaddr) as server, report.serve(server, collector):
        results: list[int] = []
        url = f"http://[::1]:{server.server_port}/metrics"
        threads = [threading.Thread(target=lambda: results.append(get(url)[0])) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert results == [200] * 4
    assert not [t for t in threading.enumerate() if t.name == "tessera-metrics"]


def test_a_snapshot_is_taken_at_each_scrape_not_at_registration():
    count = [0]

    def look() -> Snapshot:
        count[0] += 1
        return dataclasses.replace(shot([board()]), time_s=float(count[0]))

    own = report.registry(report.SnapshotCollector(look))
    assert count == [0]
    report.import_client().generate_latest(own)
    assert count == [1]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:9400", 200), ("127.0.0.1:9400", 200), ("[::1]:9400", 200),
        ("evil.example", 421), ("localhost.evil.example:9400", 421), ("127.0.0.1.evil.example", 421), ("[x", 421),
    ],
)  # fmt: skip
def test_a_page_that_rebinds_its_name_reads_nothing(host: str, status: int):
    server = report.bind(socket.AF_INET, ("127.0.0.1", 0))
    with server, report.serve(server, report.SnapshotCollector(lambda: shot([board()]))):
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        found, text = get(url, Host=host)
        assert found == status and ("joules" in text) == (status == 200)
