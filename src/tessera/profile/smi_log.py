"""Reads power logs of the vendors' tools: nvidia-smi, amd-smi, rocm-smi and xpu-smi, each with its own columns.

::

    nvidia-smi --query-gpu=timestamp,index,power.draw.instant --format=csv -lms 20 > power.csv
    amd-smi monitor --power-usage --csv --watch 1 --file power.csv       timestamp,gpu,power_usage
    amd-smi metric --power --csv --watch 1 --file power.csv              timestamp,gpu,socket_power,...
    rocm-smi --showpower --csv, each line after a time                   timestamp,device,Average Graphics Package ...
    xpu-smi dump -d 0 -m 1 -i 1 --date > power.csv                       Timestamp, DeviceId, GPU Power (W)

A log has watts and times, but not how its sensor lags and smears, which decides to which kernels a sample belongs.
nvidia-smi's `power.draw` is a 1 s average, `power.draw.instant` refreshes at 10 Hz, and both repeat a value until the
next one: repeats are not samples. A sample of the other tools is taken as the mean since the sample before.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, RecordingError
from ..hardware import identify_board
from ..joules import Floats, Ints
from ..schema import Domain
from ..trace import MOST_NS, MOST_W, check_domain_count, open_csv

# nvidia-smi's `power.draw` on GPUs since Ampere: a 1 s average, refreshed at 10 Hz (docs/measuring.md).
_AVERAGE_S, _REFRESH_S = 1.0, 0.1
_S = 1_000_000_000
_STAMPS = (
    "%Y/%m/%d %H:%M:%S.%f", "%Y-%m-%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S.%f",
    "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S.%f%z", "%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%d %H:%M:%S.%f%z",
    "%Y-%m-%d %H:%M:%S%z",
)  # fmt: skip
_TIMES_OF_DAY = ("%H:%M:%S.%f", "%H:%M:%S")
_BOARD = ("uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id", "serial", "gpu_serial")
_WATTS = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*(m?W)?\s*$")
_NUMBER = re.compile(r"\d+")
_NOT_MEASURED = ("", "n/a", "not supported", "unknown error")
_ASSUMED_GAIN_ERROR = 0.05
"""The same as `sensors` has for boards that nobody here has compared with a meter."""
# If rows are further apart than the time each of them measures, part of the time is unseen. Loads of any period between
# 50 ms and 4 s were tried: the scatter of the rows alone covers 93% of the means over 10 s, but only 35% for loads in
# step with the rows, which scatter does not reveal. With this share of the unseen time as an error of the level, 99%
# and 80% are covered (`tests/profile/test_sparse_logs.py`).
_UNSEEN = 0.3
Samples = tuple[Domain, Ints, Floats]


PLAIN = "timestamp,power_w and, of several GPUs, index, or domain (gpu0, cpu0); a line: 1794705251.357,124.6"


@dataclass(frozen=True, slots=True)
class SmiTool:
    """A tool, and the names of its columns for time, device and power (any one of `power`)."""

    name: str
    time: str
    device: str
    power: tuple[str, ...]
    example: str


TOOLS = (
    SmiTool(
        "nvidia-smi", "timestamp", "index", ("power.draw.instant", "power.draw", "power.draw.average"),
        "nvidia-smi --query-gpu=timestamp,index,power.draw.instant --format=csv -lms 20 > power.csv",
    ),
    SmiTool(
        "amd-smi", "timestamp", "gpu", ("socket_power", "power_usage", "current_socket_power", "average_socket_power"),
        "amd-smi monitor --power-usage --csv --watch 1 --file power.csv",
    ),
    SmiTool(
        "rocm-smi", "timestamp", "device",
        ("Current Socket Graphics Package Power (W)", "Average Graphics Package Power (W)"),
        "rocm-smi --showpower --csv, with a column timestamp before its own",
    ),
    SmiTool(
        "xpu-smi", "Timestamp", "DeviceId", ("GPU Power (W)", "Power (W)"), "xpu-smi dump -d 0 -m 1 -i 1 --date"
    ),
)  # fmt: skip
"""Columns as the tools write them; nvidia-smi adds the unit to the name."""


_DOMAIN = "domain"
"""The column of a plain log that has whole names, as ours have them: cpu0 is the host's."""
_PLAIN_TIMES = ("timestamp", "time", "datetime", "epoch_s")
_PLAIN_DEVICES = ("index", "gpu", "gpu_id", "gpu_index", "device", "device_id", _DOMAIN)
_PLAIN_POWER = ("power_w", "watts", "power", "power [W]", "power (W)", "W")


def find_tool(head: Sequence[str]) -> SmiTool | None:
    """Return the tool that writes such columns, or a plain log's columns; nvidia-smi if there is only a timestamp.

    A plain log must have one column of each meaning, with a usual name: two power columns would be ambiguous.
    """
    for tool in TOOLS:
        if tool.time in head and _power_column(tool, head) is not None:
            return tool
    meanings = _PLAIN_TIMES, _PLAIN_DEVICES, _PLAIN_POWER
    times, devices, powers = ([c for c in head if c.casefold() in map(str.casefold, names)] for names in meanings)
    if len(times) == len(powers) == 1 and len(devices) <= 1:
        return SmiTool(
            "plain log", times[0], devices[0] if devices else "index", (powers[0].partition(" [")[0],), PLAIN
        )
    return TOOLS[0] if "timestamp" in head else None


def _power_column(tool: SmiTool, head: Sequence[str]) -> str | None:
    named = {column.partition(" [")[0]: column for column in reversed(head)}
    return next((named[power] for power in tool.power if power in named), None)


def read_smi_log(source: Path, head: list[str], tool: SmiTool) -> dict[str, Samples]:
    """Return domain, times and watts of each GPU in a log."""
    power = _power_column(tool, head)
    if power is None:
        raise RecordingError(
            f"{source} has a timestamp but no power.draw", why=f"its columns are {', '.join(head)}",
            fix=f"rename that of its watts to power_w, or record anew: {tool.example}",
        )  # fmt: skip
    rows: dict[str, dict[int, list[float]]] = {}
    partitions: dict[str, str | None] = {}
    labels: dict[str, str] = {}
    boards: set[tuple[str, ...]] = set()
    stamp = _Stamps(source, tool)
    with open_csv(source) as reader:
        for row in itertools.islice(reader, 1, None):
            line, cells = reader.line_num, dict(zip(head, row, strict=False))
            if cells.get(tool.time) in (None, "", tool.time):  # the header, written once more
                continue
            cell = cells.get(tool.device)
            name = cell.strip() if cell and tool.device.casefold() == _DOMAIN else _device_name(cell)
            boards.add(tuple(cells.get(c, "").strip() for c in _BOARD))
            watts = _watts(cells.get(power), source, line, tool)
            if watts is None:
                continue
            if name not in rows:
                check_domain_count(len(rows), source)
            # Partitions of one GPU report the same watts: the first partition with a value counts.
            if partitions.setdefault(name, cells.get("xcp")) == cells.get("xcp"):
                rows.setdefault(name, {}).setdefault(stamp.ns(cells[tool.time], line), []).append(watts)
                labels.setdefault(name, cells.get("name", "").strip())
    count = max([len(boards), *(_count_boards(pairs) for pairs in rows.values())])
    if tool.device not in head and count > 1:
        raise RecordingError(
            f"{source} has {count} GPUs and no {tool.device}",
            why="rows of one time have different watts" if len(boards) < 2 else "a board's name is not its number",
            fix=f"add a column {tool.device} with the number of each GPU (nvidia-smi -L lists both), or record anew: "
            + tool.example,
        )  # fmt: skip
    make = _nvidia_samples if tool is TOOLS[0] else _other_samples
    found = {}
    for name, pairs in rows.items():
        times_ns, logged_w = _spread(pairs)
        found[name] = make(name, times_ns, logged_w, tool, power, labels[name])
    return found


def _count_boards(rows: dict[int, list[float]]) -> int:
    """Return how many boards must have written the rows of a log that names none: one has one power at a time.

    Times in whole seconds are those of one board that was read several times a second.
    """
    if not any(t % _S for t in rows):
        return 1
    return round(float(np.median([len(set(watts)) for watts in rows.values()])))


def _spread(rows: dict[int, list[float]]) -> tuple[Ints, Floats]:
    """Return times and watts in order. Rows with equal times are averaged; with whole seconds they are spread out.

    The first and the last second of the log may be incomplete: rows are put at the end of the first one and at the
    begin of the last one.
    """
    stamps = sorted(rows)
    usual = round(float(np.median([len(rows[t]) for t in stamps])))
    if usual < 2 or any(t % _S for t in stamps):
        return np.array(stamps), np.array([np.mean(rows[t]) for t in stamps])
    times: list[int] = []
    for t in stamps:
        count = max(len(rows[t]), usual)
        missing = count - len(rows[t]) if t == stamps[0] else 0
        times += [t + (2 * (missing + i) + 1) * _S // (2 * count) for i in range(len(rows[t]))]
    return np.array(times), np.array([w for t in stamps for w in rows[t]])


def _device_name(cell: str | None) -> str:
    """Return gpu3 for '3', 'card3' and ' 3'; gpu0 for a log without such a column, since it has only one GPU."""
    number = _NUMBER.search(cell or "")
    return f"gpu{number[0] if number else 0}"


def _nvidia_samples(name: str, times: Ints, watts: Floats, tool: SmiTool, power: str, label: str) -> Samples:
    fresh = _fresh(times, watts)
    field = power.split(" ", maxsplit=1)[0]
    averaged_s = 0.0 if field == "power.draw.instant" else _AVERAGE_S
    # `power.draw` of a GA100 and of older boards is not an average, and a log may not say which board it is from.
    looks_s = _AVERAGE_S if field == "power.draw.average" else _REFRESH_S
    spacing_s, noise, unseen = _sparse(times, watts, looks_s)
    domain = Domain(
        name=name, source=f"{tool.name} {field}", label=label, resolution_s=max(spacing_s, _REFRESH_S),
        lag_s=0.5 * (averaged_s + _REFRESH_S), blur_s=max(averaged_s, _REFRESH_S) / math.sqrt(12),
        sample_noise=noise, gain_error=math.hypot(_ASSUMED_GAIN_ERROR, unseen), limit_w=_limit_w(label),
        note="a 1 s average, refreshed at 10 Hz: single kernels hardly show" if averaged_s else "refreshed at 10 Hz",
    )  # fmt: skip
    return domain, times[fresh], watts[fresh]


def _other_samples(name: str, times: Ints, watts: Floats, tool: SmiTool, power: str, label: str) -> Samples:
    spacing_s, noise, unseen = _sparse(times, watts, _REFRESH_S)
    domain = Domain(
        name=name, source=f"{tool.name} {power}", label=label, resolution_s=spacing_s, lag_s=0.5 * spacing_s,
        blur_s=spacing_s / math.sqrt(12), sample_noise=noise, gain_error=math.hypot(_ASSUMED_GAIN_ERROR, unseen),
        limit_w=_limit_w(label), counted="." not in name, note="each sample is taken as the mean since the one before",
    )  # fmt: skip
    return domain, times, watts


def _sparse(times_ns: Ints, watts: Floats, looks_s: float) -> tuple[float, float, float]:
    """Return the spacing of the rows in seconds, and two errors if each row measures only part of it (`looks_s`).

    The errors are the relative standard deviation of one row as the mean until the next, and the relative 90% error of
    the level.
    """
    spacing_s = float(np.median(np.diff(times_ns))) * 1e-9 if len(times_ns) > 1 else 0.0
    unseen = 1.0 - looks_s / spacing_s if spacing_s > looks_s else 0.0
    if unseen == 0.0 or not watts.mean() > 0.0:
        return spacing_s, 0.0, 0.0
    scatter = float(np.sqrt(0.5 * np.mean(np.diff(watts) ** 2)) / watts.mean())
    return spacing_s, unseen * scatter, _UNSEEN * unseen


def _limit_w(label: str) -> float | None:
    """Return the power limit of a board by its name; None if the catalogue does not have it."""
    try:
        tdp_w = identify_board(label).tdp_w
    except ArgumentError:
        return None
    return None if tdp_w is None else tdp_w.value


def _fresh(times_ns: Ints, watts: Floats) -> NDArray[np.bool_]:
    """Return which readings are new. A value is repeated until the next refresh, which may give the same one again."""
    is_new = np.zeros(len(watts), bool)
    last_ns, last_w = -(1 << 62), math.nan
    for i, (t, w) in enumerate(zip(times_ns.tolist(), watts.tolist(), strict=True)):
        if w != last_w or t - last_ns >= 1.4 * _REFRESH_S * 1e9:
            is_new[i], last_ns, last_w = True, t, w
    return is_new


def _watts(text: str | None, source: Path, line: int, tool: SmiTool) -> float | None:
    bare = (text or "").strip().strip("[]").lower()
    if bare in _NOT_MEASURED or bare.startswith("n/a"):  # rocm-smi: N/A (Secondary die)
        return None
    match = _WATTS.match(text or "")
    watts = float(match.group(1)) * (1e-3 if match.group(2) == "mW" else 1.0) if match else math.inf
    if abs(watts) > MOST_W:
        raise RecordingError(
            f"{source}, line {line}: {bare[:40]!r} is not a power", fix=f"{tool.name} writes 300.25 W, or [N/A]"
        )
    return watts


class _Stamps:
    """Reads the times of a log: seconds since 1970, or local time. A time of day is on the day the file was written."""

    def __init__(self, source: Path, tool: SmiTool) -> None:
        self._source, self._tool = source, tool
        self._known: dict[str, int] = {}
        self._pattern: str | None = None

    def ns(self, text: str, line: int) -> int:
        """Return the time in a cell as nanoseconds since 1970."""
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._parse(text.strip(), line)
        return known

    def _parse(self, text: str, line: int) -> int:
        number = _WATTS.match(text)
        if number and not number.group(2):
            time_s = float(number.group(1))  # infinite for 400 digits
            if abs(time_s) * 1e9 < MOST_NS:
                return round(time_s * 1e9)
        for pattern in (self._pattern, *_STAMPS, *_TIMES_OF_DAY):
            if pattern is None:
                continue
            try:
                moment = datetime.strptime(text, pattern)
                if pattern in _TIMES_OF_DAY:
                    moment = self._on_its_day(moment)
                moment = moment.astimezone()
            except (ValueError, OverflowError):  # e.g. the year 1, which another time zone moves before the year 1
                continue
            self._pattern = pattern
            time_ns = int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1000
            if abs(time_ns) < MOST_NS:
                return time_ns
        raise RecordingError(
            f"{self._source}, line {line}: {text[:40]!r} is not a time",
            fix=f"{self._tool.name} writes 2026/11/15 09:30:00.123, or seconds since 1970",
        )

    def _on_its_day(self, moment: datetime) -> datetime:
        """Put a time of day at its last moment before the file was written: a log may begin before midnight."""
        written = datetime.fromtimestamp(self._source.stat().st_mtime) + timedelta(minutes=1)
        moment = datetime.combine(written, moment.time())
        return moment if moment <= written else moment - timedelta(days=1)
