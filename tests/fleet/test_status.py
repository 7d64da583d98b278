"""The state of a fleet: asked from endpoints and a governor, shown in a terminal, as metrics, alerts and a board."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import prometheus_client
import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tessera.cli.fleet import incidents, migrate, place, serve, watch
from tessera.errors import ArgumentError, GovernorError
from tessera.fleet.leases import BudgetStatus, Emergency, JobState, JobStatus, NodeStatus
from tessera.fleet.node_metrics import NodeReading, ask_endpoint, read_metrics
from tessera.fleet.placement_file import load_fleet
from tessera.fleet.status import FleetPoller, FleetStatus
from tessera.report import fleet_metrics
from tessera.report.console import plain_console
from tessera.report.fleet_watch import fleet_screen, json_line, plain_lines
from tessera.report.metrics import registry

from command_line import invoke

FLEET = """
defaults: {gpus: 8, idle: 1.9kW, max: 10.2kW, metrics: "http://{name}:9400/metrics"}
racks: {r1: 12kW}
nodes:
  - {name: n1, rack: r1, aisle: a1}
  - {name: n2, rack: r1, aisle: a1}
  - {name: n3, rack: r2, aisle: a2}
jobs:
  - {name: train, gpus: 8, power: 5kW, duration: 1h}
"""
METRICS = """\
# TYPE tessera_power_watts gauge
tessera_power_watts{domain="gpu0"} 512.5
tessera_power_watts{domain="cpu"} 120.0
# TYPE tessera_temperature_celsius gauge
tessera_temperature_celsius{domain="gpu0",part="core"} 71.0
tessera_temperature_celsius{domain="gpu0",part="memory"} 88.0
# TYPE tessera_power_limit_watts gauge
tessera_power_limit_watts{domain="gpu0"} 700.0
# TYPE tessera_throttle gauge
tessera_throttle{domain="gpu0",reason="power cap"} 1.0
tessera_throttle{domain="gpu0",reason="sync boost"} 0.0
# TYPE tessera_crest_factor gauge
tessera_crest_factor{domain="gpu0"} 1.31
# TYPE tessera_power_events_total counter
tessera_power_events_total{domain="psu1",kind="psu_fault"} 1.0
tessera_power_events_total{domain="pdu1",kind="over_current"} 2.0
tessera_power_events_total{domain="pdu2",kind="over_current"} 1.0
"""


@pytest.fixture
def fleet_file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


class FakeGovernor:
    def describe(self) -> BudgetStatus:
        nodes = [
            NodeStatus(
                node=f"n{i}", guaranteed_w=2000.0, exposure_w=6000.0, measured_w=100.0 * i, jobs=("train",),
                heard_s_ago=1.0, joined=True,
            )
            for i in (1, 2)
        ]  # fmt: skip
        job = JobStatus(job="train", state=JobState.ACTIVE, asked_w=9000.0, granted_w=8000.0, ends_in_s=50.0)
        return BudgetStatus(
            cap_w=20_000.0, limit_w=16_000.0, exposure_w=12_000.0, measured_w=None, throttled_w=500.0,
            emergency=Emergency(to_w=1.0, reason="feed lost", since_s=0.0), nodes=tuple(nodes), jobs=(job,),
        )  # fmt: skip


READINGS = {
    "n1": NodeReading(power_w=7000.0, temperature_c=88.0, crest_factor=1.6, energy_j=5.0, throttled=("power cap",),
                      events={"over_current": 1}),
    "n2": NodeReading(power_w=4000.0, temperature_c=60.0, cap_w=5600.0),
    "n3": NodeReading(problem="no answer: connection refused"),
}  # fmt: skip


def poll(path: Path, readings: dict[str, NodeReading] = READINGS, governor: object = None) -> FleetStatus:
    return make_poller(path, readings, governor).poll()


def make_poller(path: Path, readings: dict[str, NodeReading], governor: object = None) -> FleetPoller:
    return FleetPoller(
        load_fleet(path),
        governor,  # type: ignore[arg-type]
        ask=lambda url: readings[url.removeprefix("http://").partition(":")[0]],
        clock_s=lambda: 1.79e9,
    )


def test_a_nodes_metrics_are_summed() -> None:
    reading = read_metrics(METRICS)
    assert (reading.power_w, reading.temperature_c, reading.cap_w, reading.crest_factor) == (632.5, 88.0, 700.0, 1.31)
    assert reading.throttled == ("power cap",)
    assert reading.events == {"psu_fault": 1, "over_current": 3}
    whole = (
        METRICS + '# TYPE tessera_overlapping_power_watts gauge\ntessera_overlapping_power_watts{domain="node"} 900\n'
    )
    assert read_metrics(whole).power_w == 900.0  # the node's own meter knows its fans and losses too


@pytest.mark.parametrize("text", ["", "hello", "other_metric 1\n", 'tessera_power_watts{domain="gpu0" 5\n'])
def test_an_answer_that_is_not_ours_is_a_problem_and_not_a_zero(text: str) -> None:
    reading = read_metrics(text)
    assert reading.problem and reading.power_w is None


@pytest.fixture
def endpoint() -> Iterator[str]:
    class Quiet(WSGIRequestHandler):
        def log_message(self, *_: object) -> None: ...

    def app(environ: dict[str, str], start_response: object) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])  # type: ignore[operator]
        return [METRICS.encode()]

    server = make_server("127.0.0.1", 0, app, handler_class=Quiet)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_endpoint_is_asked_over_http(endpoint: str) -> None:
    assert ask_endpoint(endpoint).power_w == 632.5
    dead = ask_endpoint("http://127.0.0.1:9/metrics")
    assert "no answer" in dead.problem
    with pytest.raises(ArgumentError, match="not the address"):
        ask_endpoint("file:///etc/passwd")


def test_racks_leases_and_what_does_not_answer(fleet_file: Path) -> None:
    status = poll(fleet_file, governor=FakeGovernor())
    first, second = status.racks
    assert (first.power_w, first.limit_w, first.hottest_c, first.near_trips) == (11_000.0, 12_000.0, 88.0, 1)
    assert (second.power_w, second.known, second.nodes) == (None, 0, 1)  # unknown is not zero
    assert status.power_w == 11_000.0
    assert [n.leased_w for n in status.nodes] == [6000.0, 6000.0, None]
    assert status.budget is not None and status.budget.emergency == "feed lost"


def test_events_are_those_since_the_last_poll_and_a_restart_is_no_event(fleet_file: Path) -> None:
    readings = dict(READINGS)
    poller = make_poller(fleet_file, readings)
    assert poller.poll().events == ()  # what was before is not news
    readings["n1"] = NodeReading(power_w=1.0, events={"over_current": 3})
    (event,) = poller.poll().events
    assert (event.node, event.kind, event.count) == ("n1", "over_current", 2)
    readings["n1"] = NodeReading(problem="gone")
    readings["n1"] = NodeReading(power_w=1.0, events={})
    poller.poll()
    readings["n1"] = NodeReading(power_w=1.0, events={"over_current": 1})
    assert [e.count for e in poller.poll().events] == [1, 2]  # newest first


def test_a_governor_that_is_away_does_not_hide_the_nodes(fleet_file: Path) -> None:
    class Away:
        def describe(self) -> BudgetStatus:
            raise GovernorError("the governor cannot be asked", why="refused")

    status = poll(fleet_file, governor=Away())
    assert status.power_w == 11_000.0 and status.budget is None
    assert status.problems == ("the governor cannot be asked: refused",)


# -- terminal ---------------------------------------------------------------------------------------------------------


def test_the_screen_has_the_hottest_first_and_says_why_a_node_is_unknown(fleet_file: Path) -> None:
    status = poll(fleet_file, governor=FakeGovernor())
    text = plain_console(160).text(fleet_screen(status))
    assert "11 kW" in text and "leased 12 kW of 16 kW" in text and "EMERGENCY: feed lost" in text
    assert "92%" in text and "connection refused" in text and "power cap" in text
    assert text.index("n3 ") < text.index("n1 ") < text.index("n2 ")  # unknown, hottest, cooler
    narrow = plain_console(60).text(fleet_screen(status))
    assert max(map(len, narrow.splitlines())) <= 60 and "not shown" in narrow


def test_json_and_plain_lines(fleet_file: Path) -> None:
    status = poll(fleet_file, governor=FakeGovernor())
    data = json.loads(json_line(status))
    assert data["power_w"] == 11_000.0 and data["nodes"][0]["near_trips"] == 1 and data["jobs"][0]["state"] == "active"
    lines = list(plain_lines(status))
    assert "rack=r1 power_w=11000.0 limit_w=12000.0" in lines[0] and "power_w=-" in lines[1]
    text = "\n".join(lines)
    assert "node=n3 power_w=- problem='no answer: connection refused'" in text
    assert "node=n1 power_w=7000.0 leased_w=6000.0 jobs=train over_lease_w=1000.0" in text
    assert "node=n2 power_w=4000.0 leased_w=6000.0 jobs=train\n" in text
    assert "budget leased_w=12000.0 limit_w=16000.0 throttled_w=500.0 emergency='feed lost' to_w=1.0" in text
    assert "job=train state=active granted_w=8000.0 asked_w=9000.0" in text


MIXED = """
defaults: {gpus: 8, idle: 1.9kW, rack: r1}
nodes:
  - {name: fixed, power: 4kW, temperature: 50C}
  - {name: told}
  - {name: modelled, metrics: "http://modelled:9400/metrics"}
  - {name: blind, metrics: "http://blind:9400/metrics"}
  - {name: gone, metrics: "http://gone:9400/metrics"}
"""
MODELLED = METRICS.replace('domain="cpu"', 'domain="cpu",basis="modelled"')


def test_what_is_not_measured_and_who_was_not_asked_is_said(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(MIXED)
    blind = read_metrics("# TYPE tessera_sampler_memory_bytes gauge\ntessera_sampler_memory_bytes 5\n")
    readings = {"modelled": read_metrics(MODELLED), "blind": blind, "gone": NodeReading(problem="no answer")}
    status = poll(path, readings)
    by_name = {n.name: n for n in status.nodes}
    assert [(n.name, n.is_up) for n in status.nodes] == [
        ("fixed", None), ("told", None), ("modelled", True), ("blind", True), ("gone", False),
    ]  # fmt: skip
    assert (by_name["fixed"].basis, by_name["modelled"].basis) == ("file", "modelled")
    assert read_metrics(METRICS).basis == "measured"
    data = json.loads(json_line(status))
    assert [data[k] for k in ("asked_nodes", "answering_nodes", "known_nodes", "unmeasured_w")] == [3, 2, 2, 4632.5]
    text = plain_console(160).text(fleet_screen(status))
    assert "2 of 3 nodes answer, the power of 2 of 5 is known" in text and "4.63 kW of it not measured" in text
    assert "power modelled" in text and "power from the file" in text
    assert "node=fixed power_w=4000.0 basis=file" in "\n".join(plain_lines(status))
    scraped = prometheus_client.generate_latest(registry(fleet_metrics.FleetCollector(lambda: status))).decode()
    assert 'tessera_fleet_node_power_watts{aisle="",basis="modelled",node="modelled",rack="r1"} 632.5' in scraped
    assert 'tessera_fleet_node_up{aisle="",node="gone",rack="r1"} 0.0' in scraped
    assert not re.search(r'tessera_fleet_node_up\{.*node="(fixed|told)"', scraped)
    # `increase` sees a first event only if there was a zero before it
    assert 'tessera_fleet_node_events_total{aisle="",kind="breaker_tripped",node="blind",rack="r1"} 0.0' in scraped
    assert 'node="gone",rack="r1"} 0.0' not in scraped.partition("node_events_total{")[2].partition("# HELP")[0]


def test_all_jobs_are_shown_where_there_is_room_and_counted_where_not(fleet_file: Path) -> None:
    status = poll(fleet_file, governor=FakeGovernor())
    jobs = tuple(dataclasses.replace(status.jobs[0], job=f"job{i:02}") for i in range(12))
    many = dataclasses.replace(status, jobs=jobs)
    tall = plain_console(160).text(fleet_screen(many, height=60))
    assert "job11" in tall and "more jobs" not in tall
    short = plain_console(160).text(fleet_screen(many, height=24))
    assert "job05" in short and "job11" not in short
    shown = short.count("job0") + short.count("job1")
    assert f"and {12 - shown} more jobs" in short


def test_a_name_cannot_control_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text('nodes: [{name: "n\\e[31m", gpus: 1, idle: 1W, power: 5W, rack: "[bold]r"}]')
    text = plain_console(120).text(fleet_screen(FleetPoller(load_fleet(path)).poll()))
    assert "\x1b" not in text and "[bold]r" in text


# -- Prometheus -------------------------------------------------------------------------------------------------------


def test_prometheus_own_parser_reads_every_metric(fleet_file: Path) -> None:
    status = poll(fleet_file, governor=FakeGovernor())
    collector = fleet_metrics.FleetCollector(lambda: status, has_governor=True)
    text = prometheus_client.generate_latest(registry(collector)).decode()
    samples = {
        (s.name, " ".join(s.labels[k] for k in sorted(s.labels))): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
    }
    assert {name for name, _ in samples} == set(fleet_metrics.FLEET_METRICS)
    assert samples["tessera_fleet_rack_power_watts", "a1 r1"] == 11_000.0
    assert ("tessera_fleet_rack_power_watts", "a2 r2") not in samples  # unknown is absent
    assert samples["tessera_fleet_node_up", "a2 n3 r2"] == 0.0
    assert samples["tessera_fleet_node_events_total", "a1 over_current n1 r1"] == 1.0
    assert samples["tessera_fleet_jobs", "active"] == 1.0 and samples["tessera_fleet_emergency", ""] == 1.0
    strict = prometheus_client.openmetrics.exposition.generate_latest(registry(collector)).decode()
    assert list(parse_openmetrics(strict))
    for name, (kind, help_) in fleet_metrics.FLEET_METRICS.items():
        assert name.endswith("_total") == (kind == "counter") and help_.endswith(".")


def test_the_board_and_the_alerts_use_only_metrics_that_exist() -> None:
    board = json.loads(invoke(serve, "--dashboard").output)
    expressions = [t["expr"] for p in board["panels"] for t in p["targets"]]
    rules = yaml.safe_load(invoke(serve, "--alerts").output)["groups"][0]["rules"]
    expressions += [r["expr"] for r in rules] + [v.get("definition", "") for v in board["templating"]["list"]]
    used = set(re.findall(r"tessera_[a-z_]+", " ".join(expressions)))
    assert used <= set(fleet_metrics.FLEET_METRICS), used - set(fleet_metrics.FLEET_METRICS)
    assert all(e.count("(") == e.count(")") and e.count("{") == e.count("}") for e in expressions)
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
    assert len({r["alert"] for r in rules}) == len(rules)
    for rule in rules:
        assert {"alert", "expr", "labels", "annotations"} <= rule.keys()
        assert rule["labels"]["severity"] in ("info", "warning", "critical") and rule["annotations"]["action"]


# -- commands ---------------------------------------------------------------------------------------------------------


def test_place_prints_reasons_and_ends_with_1_when_a_job_waits(tmp_path: Path, endpoint: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET.replace("http://{name}:9400/metrics", endpoint))
    done = invoke(place, path)
    assert done.code == 0 and "train" in done.output and "coolest" in done.output
    assert "88 °C" in done.output  # asked from the endpoint, which has the memory's
    policy = tmp_path / "policy.yaml"
    policy.write_text("thermal_policy: {hotspot_threshold: 60C, prefer_cool_nodes: true}")
    waits = invoke(place, path, "--policy", policy, "--json")
    data = json.loads(waits.output)
    assert waits.code == 1 and data["waiting"][0]["refused"][0]["kind"] == "hot_spot"
    packed = json.loads(invoke(place, path, "--order", "pack", "--compare", "--json").output)
    assert packed["packing"]["basis"] == "modelled"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("nodes: []", "has no nodes"),
        ("nodes: [{name: n1, gpus: 8}]", "has no idle"),
        ("nodes: [{name: n1, gpus: 8, idle: 1.9kW, temprature: 5C}]", "did you mean 'temperature'"),
        ("nodes: [{name: n1, gpus: 8, idle: 1900}]", "has no unit"),
        ("nodes: [{name: n1, gpus: 8, idle: 1.9kV}]", "unknown unit"),
        ("nodes: [{name: n1, gpus: 8, idle: 1kW, rack: r1}]\nracks: {rx: 5kW}", "unknown key 'rx'"),
        ("nodes: {a: 1}", "is not a list"),
        ("nodes: [", "cannot read"),
    ],
)
def test_a_wrong_fleet_file_says_what_is_wrong(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=what):
        load_fleet(path)


def test_watch_once_prints_a_line_for_each_rack(tmp_path: Path, endpoint: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET.replace("http://{name}:9400/metrics", endpoint))
    done = invoke(watch, path, "--once")
    assert "rack=r1 power_w=1265.0" in done.output and "rack=r2 power_w=632.5" in done.output
    assert json.loads(invoke(watch, path, "--once", "--json").output)["power_w"] == 1897.5


def test_migrate_orders_a_running_job_only(tmp_path: Path) -> None:
    assert isinstance(invoke(migrate, tmp_path).code, ArgumentError)
    (tmp_path / "status.json").write_text('{"phase": "running", "step": 3}')
    assert invoke(migrate, tmp_path, "--ranks", 2).code == 0
    assert json.loads((tmp_path / "order.json").read_text()) == {"ranks": 2, "node": None}
    (tmp_path / "status.json").write_text('{"phase": "done", "step": 3}')
    assert isinstance(invoke(migrate, tmp_path).code, ArgumentError)


def test_incidents_of_a_run(tmp_path: Path) -> None:
    from fleet.test_incidents import SEL, write_rank

    log = tmp_path / "sel.log"
    log.write_text(SEL)
    run = write_rank(tmp_path, 0)
    done = invoke(incidents, run, "--events", log)
    assert done.code == 0 and "outside the time" in done.output and "next" in done.output
    data = json.loads(invoke(incidents, run, "--events", log, "--json").output)
    assert len(data["incidents"]) == 2 and {a["key"] for a in data["checklist"]} == {
        "aligned", "throttle", "feeds", "links",
    }  # fmt: skip


def test_once_with_a_governor_that_is_away_is_no_success(tmp_path: Path) -> None:
    path, token = tmp_path / "fleet.yaml", tmp_path / "token"
    path.write_text("nodes: [{name: n1, gpus: 8, idle: 1kW, power: 4kW}]")
    token.write_text("tsg_x")
    token.chmod(0o600)
    assert invoke(watch, path, "--once").code == 0
    away = invoke(watch, path, "--once", "--governor", "http://127.0.0.1:9", "--token-file", token)
    assert away.code == 1 and "problem=" in away.output and "power_w=4000.0" in away.output


def test_incidents_of_a_folder_with_one_run_and_of_a_log_without_events(tmp_path: Path) -> None:
    from fleet.test_incidents import write_rank

    folder, log = tmp_path / "runs", tmp_path / "pdu.log"
    folder.mkdir()
    write_rank(folder, 0)
    log.write_text('{"foo": 1}')
    done = invoke(incidents, folder, "--events", log)
    assert done.code == 0 and "has no power event" in " ".join(done.output.split())
    line = '{"time": "2020-01-01T00:00:00.5Z", "kind": "over_current", "domain": "pdu1"}\n'
    log.write_text(line + "rotated\n")
    said = " ".join(invoke(incidents, folder, "--events", log).output.split())
    assert "1 power event (1 outside the recording), 1 node recorded" in said
    assert "line 2 left out: it is not JSON" in said
    noted = json.loads(invoke(incidents, folder, "--events", log, "--json").output)["notes"]
    assert len(set(noted)) == len(noted)
    log.write_text('{"foo": 1}')
    notes = json.loads(invoke(incidents, folder, "--events", log, "--json").output)["notes"]
    assert any("pdu.log has no power event" in note for note in notes)


def test_serve_says_its_address_as_json(fleet_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.cli.watch.Quit.wait", lambda *_: True)
    done = invoke(serve, fleet_file, "--listen", "127.0.0.1:0", "--json")
    assert re.fullmatch(r"http://(localhost|127\.0\.0\.1):\d+", json.loads(done.output)["url"]), done.output


def test_run_says_each_start_as_json_and_the_jobs_output_is_apart(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    job = f"open({str(folder / 'status.json')!r}, 'w').write('{{\"phase\": \"done\"}}'); print('trained')"
    typed = [sys.executable, "-m", "tessera", "fleet", "run", str(folder), "--json", "--", sys.executable, "-c", job]
    done = subprocess.run(typed, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (
        json.loads(done.stdout) == {"start": 1, "command": [sys.executable, "-c", job]} and done.stderr == "trained\n"
    )
