"""Power events from a file: what supplies, PDUs and BMCs logged while jobs ran.

Three forms are recognised by content: the entries of a Redfish log (JSON with "Members", as `curl
.../LogServices/Log1/Entries` gives them), Tessera's JSON lines ({"time": "2026-03-01T10:00:00Z", "domain": "pdu1",
"kind": "over_current", "message": "..."}), and the lines of `ipmitool sel elist`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, RecordingError, did_you_mean
from ..power_event import PowerEvent
from ..read_limits import JSON_BYTES, quote_value, read_bytes
from ..sensors.ipmi import classify_event

KINDS = ("over_current", "breaker_near_trip", "breaker_tripped", "psu_fault")
# Nanoseconds: logs have whole seconds, so an event is within the second after its stamp.
STAMP_NS = 1_000_000_000
_SEL = re.compile(
    r"\s*[0-9a-fA-F]+\s*\|\s*(?P<date>\d\d/\d\d/(?:\d{4}|\d\d))\s*\|\s*(?P<time>\d\d:\d\d:\d\d(?: [AP]M)?)"
    r"(?: (?P<zone>[A-Z]{1,5}))?\s*\|(?P<text>.*)"
)
_FORMS = ("%m/%d/%Y %H:%M:%S", "%m/%d/%Y %I:%M:%S %p", "%m/%d/%y %H:%M:%S", "%m/%d/%y %I:%M:%S %p")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLog:
    """The events of a log in time order, and the lines of it that could not be read: (number from 1, why).

    In a log that is one JSON value they are its entries.
    """

    events: tuple[PowerEvent, ...]
    wrong_lines: tuple[tuple[int, str], ...] = ()


def read_events(path: str | Path, *, domain: str | None = None) -> list[PowerEvent]:
    """Return the power events of a log, in time order, in epoch time.

    `domain` names the log's source if it does not.
    """
    return list(read_event_log(path, domain=domain).events)


def read_event_log(path: str | Path, *, domain: str | None = None) -> EventLog:
    """Return the events of a log, and the lines that were left out."""
    path = Path(path)
    try:
        text = read_bytes(path, JSON_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise ArgumentError(f"cannot read {str(path)!r}", why=error.strerror, fix="check the path") from None
    except ValueError as error:
        raise RecordingError(
            f"cannot read {str(path)!r}", why=str(error), fix="give the part of the log that matters"
        ) from None
    whose = domain or path.stem
    wrong: list[tuple[int, str]] = []
    if text.lstrip()[:1] in ("{", "["):
        entries = []
        for number, row in _read_json(text, path, wrong):
            if isinstance(row, dict) and (event := _read_entry(row, whose)) is not None:
                entries.append(event)
            elif isinstance(row, dict) and isinstance(row.get("kind"), str):  # meant as an event of ours
                wrong.append((number, _explain_kind(row["kind"])))
        wrong.sort()
    else:
        entries = list(_read_sel(text, whose))
    if not entries and text.strip() and not any(map(_SEL.match, text.splitlines())) and text.lstrip()[:1] not in "{[":
        raise RecordingError(
            f"{path} is not a log of power events",
            why="it has neither JSON nor lines of `ipmitool sel elist`",
            fix="ipmitool sel elist > events.log, or the Entries of a Redfish log service as JSON",
        )
    return EventLog(events=tuple(sorted(entries, key=lambda e: (e.time_ns, e.domain))), wrong_lines=tuple(wrong))


def _read_sel(text: str, domain: str) -> Iterator[PowerEvent]:
    for line in text.splitlines():
        match = _SEL.match(line)
        kind = classify_event(line) if match else None
        if match is None or kind is None:
            continue
        for form in _FORMS:
            try:
                moment = datetime.strptime(f"{match['date']} {match['time']}", form)
            except ValueError:
                continue
            stamp_ns = _to_ns(moment.replace(tzinfo=UTC))  # the log of a BMC has no zone; IPMI specifies UTC
            message = " ".join(match["text"].replace("|", " ").split())
            yield PowerEvent(time_ns=stamp_ns + STAMP_NS, since_ns=stamp_ns, domain=domain, kind=kind, message=message)
            break


def _explain_kind(kind: str) -> str:
    if kind in KINDS:
        return "its time cannot be read"
    return f"{quote_value(kind)} is no kind of event{did_you_mean(kind[:80], KINDS)}"


def _read_json(text: str, path: Path, wrong: list[tuple[int, str]]) -> list[tuple[int, Any]]:
    """Return the rows of one JSON value, or of one on each line; a line that is not JSON is added to `wrong`."""
    try:
        whole = json.loads(text)
        rows = whole.get("Members", [whole]) if isinstance(whole, dict) else whole
        return list(enumerate(rows, 1)) if isinstance(rows, list) else []
    except (ValueError, RecursionError) as error:
        why = str(error)[:200]
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows += [(number, json.loads(line))] if line.strip() else []
        except (ValueError, RecursionError) as error:
            wrong.append((number, f"it is not JSON ({str(error).partition(': line 1')[0][:80]})"))
    if not rows:
        raise RecordingError(f"{path} is not JSON", why=why, fix="one object a line, or a list")
    return rows


def _read_entry(row: dict[str, Any], domain: str) -> PowerEvent | None:
    message = str(row.get("Message") or row.get("message") or row.get("MessageId") or "")
    words = " ".join(str(row.get(key) or "") for key in ("MessageId", "SensorType", "EntryCode"))
    stated = row.get("kind")
    kind = stated if stated in KINDS else classify_event(f"{words} {message}")
    if kind is None:
        return None
    if isinstance(row.get("time_ns"), int):
        since_ns = row.get("since_ns")
        return PowerEvent(
            time_ns=row["time_ns"],
            since_ns=since_ns if isinstance(since_ns, int) else None,
            domain=str(row.get("domain") or domain),
            kind=kind,
            message=message,
        )
    try:
        moment = datetime.fromisoformat(str(row.get("Created") or row.get("time")))
    except ValueError:
        return None
    stamp_ns = _to_ns(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
    whose = str(row.get("domain") or row.get("node") or domain)
    fine = moment.microsecond != 0  # a stamp with a fraction is as good as its clock
    return PowerEvent(
        time_ns=stamp_ns if fine else stamp_ns + STAMP_NS,
        since_ns=None if fine else stamp_ns,
        domain=whose,
        kind=kind,
        message=message,
    )


def _to_ns(moment: datetime) -> int:
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86400 + since.seconds) * 1_000_000_000 + since.microseconds * 1000
