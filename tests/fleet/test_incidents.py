"""Incidents: over-current events tied to what ran on each node, on one clock, and the checklist for all of them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tessera.analyze.correlate import correlate_recording
from tessera.analyze.power import power as analyze_power
from tessera.errors import RecordingError
from tessera.fleet.event_log import read_event_log, read_events
from tessera.fleet.incidents import find_incidents, read_clock_errors
from tessera.profile.ranks import Offset, merge
from tessera.profile.runfile import RunFile, RunWriter
from tessera.profile.runfile_checksum import unseal
from tessera.schema import Domain, PowerEvent, Telemetry
from tessera.timeline import Builder, Launch

T0 = 1_790_000_000_000_000_000
MS = 1_000_000
STEP = 200 * MS
STEPS = 30
BEHIND = 40 * MS  # node2's clock shows so much less than node1's
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
GEMM = "nvjet_sm90_tst_192x128"


def write_rank(folder: Path, rank: int, events: list[PowerEvent] | None = None) -> Path:
    """A rank whose power rises with each all-reduce (60 of 200 ms); node2 writes its own, wrong times."""
    off, b = (-BEHIND if rank else 0), Builder()
    launch = b.intern_launch(Launch(collective_type="all_reduce", collective_bytes=1 << 20, group="0", group_size=2))
    times, watts = [], []
    for step in range(STEPS):
        at = T0 + step * STEP + off
        b.add("kernel", GEMM, at, at + 100 * MS, device=0, stream=7)
        b.add("collective", REDUCE, at + 100 * MS, at + 160 * MS, device=0, stream=8, launch=launch)
        for k in range(20):
            times.append(at + k * 10 * MS)
            watts.append(650.0 if 10 <= k < 16 else 380.0)
    path = folder / f"run-rank{rank}.tessera"
    with RunWriter(path) as run:
        run.add_timeline(b.build())
        run.add_samples(
            Domain(name="gpu0", source="nvml", resolution_s=0.01, sample_noise=0.01), np.array(times), np.array(watts)
        )
        run.set("rank", rank)
        run.set("start_ns", T0 + off)
        run.set("end_ns", T0 + STEPS * STEP + off)
        clock = Offset(rank=rank, offset_ns=-off, error_ns=2.0 * MS, at_ns=T0, source="exchange")
        run.set("clock", clock.to_dict())
        if events is not None:
            run.set("events", events)
    unseal(path)
    with closing(sqlite3.connect(path)) as db:  # as if another machine had written it
        db.execute("UPDATE about SET value = ? WHERE key = 'host'", (f"node{rank + 1}",))
        db.execute("UPDATE about SET value = ? WHERE key = 'boot'", (f"boot{rank + 1}",))
        db.commit()
    return path


def alarm(at_ns: int, since_ns: int | None = None, domain: str = "pdu1") -> PowerEvent:
    return PowerEvent(time_ns=at_ns, since_ns=since_ns, domain=domain, kind="over_current", message="L2 above 30 A")


def in_reduce(step: int) -> int:
    return T0 + step * STEP + 130 * MS


def test_an_event_is_tied_to_what_ran_on_each_node_although_their_clocks_differ(tmp_path: Path) -> None:
    events = [alarm(in_reduce(step)) for step in range(3, 28, 5)]
    paths = [write_rank(tmp_path, 0), write_rank(tmp_path, 1)]
    found = find_incidents(paths, events, within_s=0.005)
    assert len(found.incidents) == 5 and found.hosts == ("node1", "node2")
    for incident in found.incidents:
        assert {node.work[0].name for node in incident.nodes} == {REDUCE}  # 40 ms of wrong clock would show the GEMM
        assert all(node.collective_share > 0.9 for node in incident.nodes)
        assert incident.peak_w == pytest.approx(1300.0) and not incident.outside
    by_name = {a.name: a for a in found.aligned}
    assert by_name["collectives"].verdict == "aligned" and by_name[GEMM].verdict == "not aligned"
    assert found.answer("feeds").verdict == "yes" and "L2 above 30 A" in found.answer("feeds").evidence
    assert found.answer("aligned").verdict == "yes"
    assert found.answer("links").verdict == "yes" and "100% of the events' time" in found.answer("links").evidence
    assert json.loads(found.to_json())["incidents"][0]["nodes"][1]["host"] == "node2"


def test_throttling_after_events_is_found(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0)
    recording = RunFile(path).recording()
    events = [alarm(in_reduce(step)) for step in (3, 9, 17)]
    slow = [(e.time_ns, e.time_ns + 150 * MS) for e in events]
    recording.telemetry = [
        Telemetry(
            time_ns=at, domain="gpu0", throttle=("power cap",) if any(a <= at <= b for a, b in slow) else ()
        )
        for at in range(T0, T0 + STEPS * STEP, 50 * MS)
    ]  # fmt: skip
    answer = find_incidents(recording, events, within_s=0.005).answer("throttle")
    assert answer.verdict == "yes" and "3 of 3 events are followed by throttling" in answer.evidence


def test_the_window_of_a_node_is_as_much_wider_as_its_clock_is_unsure(tmp_path: Path) -> None:
    paths = [write_rank(tmp_path, 0), write_rank(tmp_path, 1)]
    merged = merge(paths)
    errors = read_clock_errors(merged)
    assert errors["node1"] == 0.0 and errors["node2"] is not None and errors["node2"] > 0
    # 3 ms after an all-reduce began, looked at within 1 ms: on node1 only that ran, on node2 perhaps what was before.
    (incident,) = find_incidents(merged, [alarm(T0 + 5 * STEP + 100 * MS + 2 * MS)], within_s=0.001).incidents
    one, two = incident.nodes
    assert [w.name for w in one.work] == [REDUCE]
    length_s = (incident.end_ns - incident.start_ns) * 1e-9
    width = two.work[0].overlap_s / two.work[0].share
    assert width == pytest.approx(length_s + 2 * errors["node2"])


def test_an_event_of_unknown_time_shows_all_that_ran_while_it_may_have_happened(tmp_path: Path) -> None:
    (incident,) = find_incidents(
        write_rank(tmp_path, 0), [alarm(T0 + 6 * STEP, since_ns=T0 + 5 * STEP)], within_s=0.0
    ).incidents
    assert {w.name: round(w.share, 2) for w in incident.nodes[0].work} == {GEMM: 0.5, REDUCE: 0.3}


def test_events_outside_the_recording_are_told_apart(tmp_path: Path) -> None:
    found = find_incidents(write_rank(tmp_path, 0), [alarm(T0 - 10**12)])
    assert found.incidents[0].outside and "outside the time" in " ".join(found.notes)


def test_the_samplers_events_reach_the_checklist_of_one_run_and_of_a_merge(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0, [alarm(in_reduce(4), domain="psu1")])
    recording = RunFile(path).recording()
    assert [e.domain for e in recording.events] == ["psu1"]
    found = correlate_recording(recording)
    assert found is not None and found.answer("feeds").verdict == "yes"
    assert "psu1" in analyze_power(path).correlation.answer("feeds").evidence  # type: ignore[union-attr]
    merged = merge([path, write_rank(tmp_path, 1, [alarm(in_reduce(4) - BEHIND, domain="psu1")])])
    assert [e.domain for e in merged.events] == ["node1.psu1", "node2.psu1"]
    for event in merged.events:  # both on node1's clock, as unsure as that is
        assert event.start_ns <= in_reduce(4) <= event.time_ns
    merged.write(tmp_path / "all.tessera")
    assert list(RunFile(tmp_path / "all.tessera").recording().events) == list(merged.events)


def test_a_session_keeps_what_the_sensors_reported(tmp_path: Path) -> None:
    from tessera.clock import now_ns
    from tessera.monitor.core import Monitor
    from tessera.profile.power_feed import PowerFeed

    monitor = Monitor([])
    with RunWriter(tmp_path / "run.tessera") as writer:
        feed = PowerFeed(writer, monitor.sampler)
        monitor.sampler.events.append(alarm(0))  # of before the session
        monitor.sampler.events.append(alarm(now_ns()))
        feed.take()
        monitor.sampler.events.append(alarm(now_ns(), domain="pdu2"))
        feed.take()
        feed.take()
        writer.set("start_ns", T0)
        writer.set("end_ns", T0)
    events = RunFile(tmp_path / "run.tessera").recording().events
    assert [e.domain for e in events] == ["pdu1", "pdu2"]
    assert events[0].time_ns > T0 // 2  # epoch, not the monotonic clock


def test_a_run_without_events_or_power_says_so(tmp_path: Path) -> None:
    b = Builder()
    b.add("kernel", GEMM, T0, T0 + MS, device=0, stream=7)
    path = tmp_path / "run.tessera"
    with RunWriter(path) as run:
        run.add_timeline(b.build())
    found = find_incidents(path, [alarm(T0)])
    assert "no power was recorded" in found.notes[0]
    assert [a.verdict for a in found.checklist] == ["unknown", "unknown", "yes", "unknown"]
    assert found.incidents[0].nodes[0].work[0].name == GEMM


# -- logs --------------------------------------------------------------------------------------------------------------

SEL = """   1 | 11/18/2026 | 01:02:03 | Power Supply #0x51 | Failure detected | Asserted
   2 | 11/18/2026 | 01:02:04 PM UTC | Current PDU1 | Upper Critical going high | Asserted
   3 | 11/18/2026 | 01:02:05 | Temperature #0x30 | Upper Critical going high | Asserted
"""


def test_the_lines_of_ipmitool(tmp_path: Path) -> None:
    path = tmp_path / "node7.log"
    path.write_text(SEL)
    events = read_events(path)
    assert [(e.kind, e.domain) for e in events] == [("psu_fault", "node7"), ("over_current", "node7")]
    assert events[0].since_ns == 1_794_963_723 * 10**9 and events[0].time_ns - events[0].start_ns == 10**9
    assert events[1].start_ns - events[0].start_ns == (12 * 3600 + 1) * 10**9


def test_the_entries_of_redfish_and_lines_of_json(tmp_path: Path) -> None:
    entry = {"Created": "2026-11-18T01:02:03+00:00", "MessageId": "X.1.0.OverCurrent", "Message": "PSU1 over current"}
    other = {"Created": "2026-11-18T01:02:03Z", "MessageId": "X.1.0.FanOk", "Message": "fan ok"}
    path = tmp_path / "log.json"
    path.write_text(json.dumps({"Members": [entry, other]}))
    (event,) = read_events(path, domain="node3")
    assert (event.kind, event.domain, event.since_ns) == ("over_current", "node3", 1_794_963_723 * 10**9)
    path.write_text(
        json.dumps({"time": "2026-11-18T01:02:03.250Z", "kind": "breaker_near_trip", "domain": "pdu1"}) + "\n" * 2
        + json.dumps({"time_ns": T0, "since_ns": T0 - 5, "kind": "over_current", "message": "x"})
    )  # fmt: skip
    first, second = read_events(path)
    assert (first.time_ns, first.since_ns, first.domain) == (T0, T0 - 5, "log")
    assert (second.time_ns, second.since_ns) == (1_794_963_723_250_000_000, None)


def test_an_event_whose_kind_or_time_is_not_known_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pdu.log"
    rows = [
        {"time": "2026-03-01T10:00:00Z", "kind": "over_curent", "message": "outlet 3"},
        {"time": 1772359200, "kind": "psu_fault"},
        {"time": "2026-03-01T10:00:00Z", "message": "fan ok"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    said = ((1, "'over_curent' is no kind of event; did you mean 'over_current'?"), (2, "its time cannot be read"))
    assert read_event_log(path).wrong_lines == said
    path.write_text(json.dumps({"Members": rows}))
    assert read_event_log(path).wrong_lines == said


def test_a_line_that_is_no_json_is_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "pdu.log"
    line = '{"time": "2026-03-01T10:00:0%d.5Z", "kind": "over_current", "domain": "pdu1"}\n'
    path.write_text(line % 1 + line % 2 + "\n" + "### rotated ###\n" + line % 3 + '{"time": "2026-')
    log = read_event_log(path)
    assert len(log.events) == 3 and [number for number, _ in log.wrong_lines] == [4, 6]
    assert read_events(path) == list(log.events)
    assert all(why.startswith("it is not JSON (") for _, why in log.wrong_lines)
    path.write_text('{"time": "2026-\n{"kind": ')
    with pytest.raises(RecordingError, match="is not JSON"):
        read_events(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("nothing of power\n")
    with pytest.raises(RecordingError, match="not a log of power events"):
        read_events(path)
