"""Traces that are small, or wrong, and that once took gigabytes or hours. None is judged by the clock."""

from __future__ import annotations

import gzip
import time

import pytest

from tessera import read_limits
from tessera.errors import RecordingError
from tessera.timeline import events, kineto, stream

EVENT = b'{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":%d,"dur":1}'
EVENTS = b",".join(EVENT % i for i in range(10))
MB = 1 << 20


def test_a_gzip_bomb_is_refused() -> None:
    packed = gzip.compress(b'{"traceEvents":[' + b" " * (70 * MB))
    assert len(packed) < 110_000
    with pytest.raises(RecordingError, match="no recording shrinks so well"):
        kineto.read(packed)


def test_the_fix_of_a_bomb_is_to_unpack_it_first(tmp_path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * (70 * MB)))
    with pytest.raises(RecordingError) as caught:
        kineto.read(path)
    assert "gunzip" in str(caught.value.fix)


def test_a_small_trace_of_many_events_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(read_limits, "ROWS", 10_000)
    packed = gzip.compress(b'{"traceEvents":[' + b",".join([EVENTS] * 10_000) + b"]}", 9)
    with pytest.raises(RecordingError, match="rows, more than a recording"):
        kineto.read(packed)


def test_a_counter_of_many_series_counts_as_many_rows(monkeypatch) -> None:
    monkeypatch.setattr(read_limits, "ROWS", 1_000)
    series = b",".join(b'"%d":1' % i for i in range(20_000))
    packed = gzip.compress(b'[{"ph":"C","name":"c","pid":1,"ts":1,"args":{' + series + b"}}]", 9)
    monkeypatch.setattr(read_limits, "BYTES_PER_ROW", 1_000)
    with pytest.raises(RecordingError, match="rows, more than a recording"):
        kineto.read(packed)


def test_a_trace_cut_after_its_list_keeps_the_keys_before(monkeypatch) -> None:
    """It was tried again without the last key, and again: over an hour for 1.2 MB."""
    keys = b",".join(b'"k%d":[%d,"x"]' % (i, i) for i in range(50_000))
    text = b'{"schemaVersion":1,"traceEvents":[' + EVENTS + b"]," + keys + b',"last":[1,{"a'
    calls = []
    monkeypatch.setattr(stream, "_is_json", lambda *a, real=stream._is_json, **k: calls.append(1) or real(*a, **k))
    timeline = kineto.read(text)
    assert len(timeline) == 10
    assert timeline.meta["k49999"] == [49_999, "x"]
    assert "last" not in timeline.meta
    assert len(calls) < 30
    assert any("was cut" in note for note in timeline.notes)


def test_json_that_is_not_a_trace_is_scanned_once(monkeypatch) -> None:
    """The word was looked for from the start again with each piece, and each place where it stood."""
    searched = []
    real = stream._first_event

    def first_event(buffer: bytes) -> int:
        searched.append(len(buffer))
        return real(buffer)

    monkeypatch.setattr(stream, "_first_event", first_event)
    text = b'{"a":[' + b'{"traceEvents":[1],"b":2},' * 50_000 + b"1]}"
    with pytest.raises(RecordingError, match="not a trace"):
        kineto.read(text)
    assert sum(searched) < 4 * len(text)


def test_text_that_never_ends_an_event_is_dropped(monkeypatch) -> None:
    scanned = []
    monkeypatch.setattr(stream, "_spans", lambda b, t, real=stream._spans: scanned.append(len(b)) or real(b, t))
    text = b'{"traceEvents":[' + b'{"a":[' * (MB // 2) + b"}," + EVENT % 1 + b"," + EVENT % 2 + b"]}"
    timeline = kineto.read(text)
    assert len(timeline) == 2
    assert sum(scanned) < 6 * len(text)


def test_a_file_that_is_slow_to_repair_is_refused(monkeypatch) -> None:
    """By the CPU's clock: a busy machine does not make a file unreadable."""
    now = iter(range(10**9))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(now)))
    with pytest.raises(RecordingError, match="takes too long to read for its size"):
        kineto.read(b'{"traceEvents":[' + b",".join([b'{"ph":"X","name":"a"b"}'] * 100) + b"]}")


@pytest.mark.parametrize(
    "value",
    [b"1e99999999999999999999", b"1" * 5000, b"-1e-99999999999999999999", b"1." * 2000, b"NaN", b'"1e999999999"'],
)
@pytest.mark.parametrize("late", [False, True])
def test_numbers_that_are_none_cost_their_event_and_no_more(value, late) -> None:
    odd = b'{"ph":"X","cat":"cpu_op","name":"odd","pid":1,"tid":1,"ts":' + value + b',"dur":1}'
    first = EVENT % (1_790_857_026_000_000 if late else 5)
    timeline = kineto.read(b"[" + first + b"," + odd + b"," + first + b"]")
    assert timeline.names.count("a") == 1
    assert int((timeline["end_ns"] - timeline["start_ns"] == 1000).sum()) >= 2


def test_values_of_odd_types_are_read_without_scanning(monkeypatch) -> None:
    """A trace of another tool, with 1.5 for a thread: every event went through the slow way."""
    scanned = []
    monkeypatch.setattr(stream, "_spans", lambda b, t, real=stream._spans: scanned.append(len(b)) or real(b, t))
    odd = EVENT.replace(b'"tid":1', b'"tid":1.5')
    timeline = kineto.read(b"[" + b",".join([odd % i for i in range(50)] + [EVENT % 60]) + b"]")
    assert len(timeline) == 51
    assert sum(scanned) < 100  # the last event, which has none after it


def test_an_event_that_is_fine_keeps_its_digits_beside_one_that_is_odd() -> None:
    fine = b'{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1790857026000000.123,"dur":1.001}'
    odd = EVENT.replace(b'"tid":1', b'"tid":1.5') % 1_790_857_026_000_000
    assert kineto.read(b"[" + fine + b"," + odd + b"," + fine + b"]")["start_ns"][0] == 1_790_857_026_000_000_123


def test_one_note_for_many_categories() -> None:
    events = b",".join(b'{"ph":"X","cat":"c%d","name":"n","ts":1,"dur":1}' % i for i in range(500))
    assert len(kineto.read(b"[" + events + b"]").notes) < 30


def test_a_decimal_too_large_is_no_time() -> None:
    assert events.nanoseconds(b"1e999999999999") is None
    assert events.nanoseconds(b"x") is None
    assert events.nanoseconds(b"5.001") == 5001


def test_a_device_or_rank_of_an_impossible_number_is_unknown():
    kernel = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 5, "args": {"device": %d}}'
    events = ",".join(kernel % device for device in (3, 2**63 - 1, 2**64 - 5))
    timeline = kineto.read(f'{{"distributedInfo": {{"rank": {2**63}}}, "traceEvents": [{events}]}}'.encode())
    assert timeline["device"].tolist() == [3, -1, -1]
    assert timeline.rank is None
    assert "with the number of no device, taken as unknown: 2 events" in timeline.notes


def test_a_trace_of_more_devices_than_any_machine_has_is_refused() -> None:
    kernel = b'{"ph":"X","cat":"kernel","name":"k","pid":%d,"tid":7,"ts":%d,"dur":1,"args":{"device":%d,"stream":7}}'
    text = b",".join(kernel % (i, 10 * i, i) for i in range(5000))
    with pytest.raises(RecordingError, match="5,000 devices"):
        kineto.read(b'{"traceEvents":[' + text + b"]}")
    few = b",".join(kernel % (i % 3, 10 * i, 10_000 * (i % 3)) for i in range(30))
    timeline = kineto.read(b'{"traceEvents":[' + few + b"]}")
    assert [len(rows) for rows in timeline.by_device().values()] == [10, 10, 10]
