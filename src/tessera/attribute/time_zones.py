"""Recognises a power log that was written in another time zone: tools write local time, without its zone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from ..errors import MeasurementError

# Time zones are multiples of a quarter of an hour from UTC, +14 h at most.
_QUARTER_S, _MOST_S = 900, 15 * 3600


@dataclass(frozen=True, slots=True)
class OtherZone:
    """By how many hours a log is off, and the zone in which it seems to be written: a value of the variable TZ."""

    hours: float
    variable: str


def find_other_zone(trace_ns: tuple[int, int], log_ns: tuple[int, int]) -> OtherZone | None:
    """Return the zone with which log and trace would overlap; None if there is none."""
    between_s = (sum(log_ns) - sum(trace_ns)) * 0.5e-9
    off_s = round(between_s / _QUARTER_S) * _QUARTER_S
    moved_ns = [t - off_s * 1_000_000_000 for t in log_ns]
    if not 0 < abs(off_s) <= _MOST_S or moved_ns[0] >= trace_ns[1] or moved_ns[1] <= trace_ns[0]:
        return None
    here = datetime.fromtimestamp(log_ns[0] // 1_000_000_000).astimezone().utcoffset()
    east_s = off_s + (round(here.total_seconds()) if here is not None else 0)
    hours, minutes = divmod(abs(east_s) // 60, 60)
    sign = "-" if east_s > 0 else "+"  # POSIX counts westwards
    return OtherZone(off_s / 3600, f"LOG{sign}{hours}" + (f":{minutes:02d}" if minutes else ""))


def explain_no_overlap(trace_ns: tuple[int, int], log_ns: tuple[int, int]) -> MeasurementError:
    """Return the error for a log and a trace of different times, with the zone in which the log seems to be written."""
    zone = find_other_zone(trace_ns, log_ns)
    why = f"the trace lasts from {_span(*trace_ns)}, the log from {_span(*log_ns)}"
    fix = "use a power log of the same run; if the clocks of two machines differ, shift one of them"
    if zone is not None:
        why += f": {zone.hours:+g} h, so its times look like those of another time zone"
        fix = f"if they are local times, put TZ={zone.variable} before the command: TZ={zone.variable} tessera ..."
    return MeasurementError("the power log and the trace do not overlap in time", why=why, fix=fix)


def _span(start_ns: int, end_ns: int) -> str:
    """Return two epoch times in UTC; in seconds if they are beyond any date."""
    try:
        start, end = (datetime.fromtimestamp(t // 1_000_000_000, UTC) for t in (start_ns, end_ns))
    except (OverflowError, ValueError, OSError):
        return f"{start_ns / 1e9:.3f} s to {end_ns / 1e9:.3f} s"
    day = "" if start.date() == end.date() else "%Y-%m-%d "
    return f"{start:%Y-%m-%d %H:%M:%S} to {end:{day}%H:%M:%S} UTC"
