"""Power logs recorded by anything: our own CSV, and nvidia-smi's. What the sensor behind them does is inferred.

A log says watts and times, not how its sensor lags and smears: that decides which kernels a sample belongs to. The
NVML ring is known by its 20 ms; nvidia-smi's `power.draw` is a 1 s average, `power.draw.instant` refreshes at 10 Hz,
and both repeat a value until the next one: repeats are not samples.
"""

from __future__ import annotations

import itertools
import math
import re
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, RecordingError
from ..hardware import identify_board
from ..joules import DomainSamples, Floats, Ints
from ..schema import Basis, Domain, Hold
from ..sensors._nvml_power import RING_BLUR_S, RING_GAIN_ERROR, RING_LAG_S, RING_NOISE, RING_RESOLUTION_S
from ..sensors.modelled import MODEL_ERROR
from ..trace import MOST_NS, MOST_W, PowerTrace, check_domain_count, open_csv, read_csv

_RING_SPACING_S = (0.012, 0.030)
# nvidia-smi's `power.draw` on GPUs since Ampere: a 1 s average, refreshed at 10 Hz (docs/measuring.md).
_AVERAGE_S, _REFRESH_S = 1.0, 0.1
# Longer without a sample is a hole: the logger stood still. NVML's own ring has spacings of up to 46 ms.
_HOLE_S, _HOLE_SPACINGS = 0.25, 6.0
_STAMPS = ("%Y/%m/%d %H:%M:%S.%f", "%Y-%m-%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S")
_BOARD = ("uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id", "serial", "gpu_serial")
_WATTS = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*(m?W)?\s*$")


def read_power(path: str | Path, *, of_nvidia: bool = True) -> PowerTrace:
    """A power log as a trace in epoch time: columns epoch_us, domain, watts, or those of nvidia-smi's CSV log.

    `of_nvidia` False: it is known that the chip is another's, so that no spacing makes it NVML's ring.
    """
    source = Path(path)
    with open_csv(source) as reader:
        head = [c.strip() for c in next(reader, [])]
    columns = _nvidia_smi(source, head) if "timestamp" in head else _own(source, of_nvidia)
    if not columns:
        raise RecordingError(f"{source} contains no power sample", fix="record it while the program runs")
    times = np.concatenate([c.times_ns for c in columns.values()])
    return PowerTrace(columns, start_ns=int(times.min()), end_ns=int(times.max()))


def _own(source: Path, of_nvidia: bool) -> dict[str, DomainSamples]:
    columns = {}
    for name, (logged_ns, logged_w, basis) in read_csv(source).items():
        once = np.append(True, np.diff(logged_ns) > 0)  # a line written twice is one sample
        times_ns, watts = logged_ns[once], logged_w[once]
        columns[name] = _column(_domain(name, times_ns, basis, of_nvidia), times_ns, watts)
    return columns


def _column(domain: Domain, times_ns: Ints, watts: Floats) -> DomainSamples:
    """Samples with their holes marked: where nothing was logged for long, nothing is known."""
    hole_ns = max(_HOLE_S, _HOLE_SPACINGS * domain.resolution_s) * 1e9
    after = np.flatnonzero(np.diff(times_ns) > hole_ns) + 1
    # NaN says that nothing is known since the sample before it.
    times_ns = np.insert(times_ns, after, times_ns[after] - 1)
    return DomainSamples.of(domain, times_ns, np.insert(watts, after, np.nan))


def _domain(name: str, times_ns: Ints, basis: Basis | None, of_nvidia: bool) -> Domain:
    """A domain as its name and spacing tell it."""
    spacing_s = float(np.median(np.diff(times_ns))) * 1e-9 if len(times_ns) > 1 else 0.0
    stated_basis = basis or "measured"
    counted = "." not in name
    low, high = _RING_SPACING_S
    if of_nvidia and name.startswith("gpu") and low <= spacing_s <= high and stated_basis == "measured":
        return Domain(
            name=name, source="csv", resolution_s=RING_RESOLUTION_S, lag_s=RING_LAG_S, blur_s=RING_BLUR_S,
            sample_noise=RING_NOISE, gain_error=RING_GAIN_ERROR, counted=counted, taken_as="nvml-samples",
            note="taken as NVML's ring: 20 ms apart",
        )  # fmt: skip
    if name.startswith(("cpu", "dram", "package")):  # differences of an energy counter
        return Domain(
            name=name, source="csv", resolution_s=spacing_s, hold=Hold.MEAN, counted=counted, basis=stated_basis,
            gain_error=MODEL_ERROR if stated_basis == "modelled" else 0.0,
        )  # fmt: skip
    return Domain(
        name=name, source="csv", resolution_s=spacing_s, lag_s=0.5 * spacing_s, blur_s=spacing_s / math.sqrt(12),
        counted=counted, basis=stated_basis, gain_error=MODEL_ERROR if stated_basis == "modelled" else 0.02,
        note="a sensor that is not known: each sample is taken as the mean since the one before",
    )  # fmt: skip


# -- nvidia-smi ----------------------------------------------------------------------------------------------------


def _nvidia_smi(source: Path, head: list[str]) -> dict[str, DomainSamples]:
    """`nvidia-smi --query-gpu=timestamp,index,power.draw --format=csv -lms 20`, with or without units."""
    power = next((c for c in head if c.startswith("power.draw")), None)
    if power is None:
        raise RecordingError(
            f"{source} has a timestamp but no power.draw", why=f"its columns are {', '.join(head)}",
            fix="nvidia-smi --query-gpu=timestamp,index,power.draw.instant --format=csv -lms 20 > power.csv",
        )  # fmt: skip
    rows: dict[str, list[tuple[int, float]]] = {}
    labels: dict[str, str] = {}
    boards: set[tuple[str, ...]] = set()
    with open_csv(source) as reader:
        for row in itertools.islice(reader, 1, None):
            line, cells = reader.line_num, dict(zip(head, row, strict=False))
            if cells.get("timestamp") in (None, "", "timestamp"):
                continue
            name = f"gpu{(cells.get('index') or '0').strip()}"
            boards.add(tuple(cells.get(c, "").strip() for c in _BOARD))
            watts = _watts(cells.get(power), source, line)
            if watts is not None:
                if name not in rows:
                    check_domain_count(len(rows), source)
                rows.setdefault(name, []).append((_stamp_ns(cells["timestamp"], source, line), watts))
                labels.setdefault(name, cells.get("name", "").strip())
    if "index" not in head and len(boards) > 1:
        raise RecordingError(
            f"{source} has {len(boards)} GPUs and no index", why="their watts cannot be distinguished by device number",
            fix="nvidia-smi --query-gpu=timestamp,index,power.draw.instant --format=csv -lms 20 > power.csv",
        )  # fmt: skip
    return {n: _smi_column(n, pairs, power, labels[n]) for n, pairs in rows.items()}


def _smi_column(name: str, pairs: list[tuple[int, float]], power: str, label: str) -> DomainSamples:
    pairs.sort()
    times, watts = np.array([t for t, _ in pairs]), np.array([w for _, w in pairs])
    fresh = _fresh(times, watts)
    instant = power.startswith("power.draw.instant")
    averaged_s = 0.0 if instant else _AVERAGE_S
    domain = Domain(
        name=name, source=f"nvidia-smi {power.split(' ', maxsplit=1)[0]}", label=label, resolution_s=_REFRESH_S,
        lag_s=0.5 * (averaged_s + _REFRESH_S), blur_s=max(averaged_s, _REFRESH_S) / math.sqrt(12), gain_error=0.05,
        note="refreshed at 10 Hz" if instant else "a 1 s average, refreshed at 10 Hz: single kernels hardly show",
        limit_w=_limit_w(label),
    )  # fmt: skip
    return _column(domain, times[fresh], watts[fresh])


def _limit_w(label: str) -> float | None:
    """The power limit of a board by its name; None where the catalogue does not have it."""
    try:
        tdp_w = identify_board(label).tdp_w
    except ArgumentError:
        return None
    return None if tdp_w is None else tdp_w.value


def _fresh(times_ns: Ints, watts: Floats) -> NDArray[np.bool_]:
    """Which readings are new: a value is shown again until the next refresh, and one that stays is refreshed too."""
    is_new = np.zeros(len(watts), bool)
    last_ns, last_w = -(1 << 62), math.nan
    for i, (t, w) in enumerate(zip(times_ns.tolist(), watts.tolist(), strict=True)):
        if w != last_w or t - last_ns >= 1.4 * _REFRESH_S * 1e9:
            is_new[i], last_ns, last_w = True, t, w
    return is_new


def _watts(text: str | None, source: Path, line: int) -> float | None:
    if text is None or text.strip().strip("[]").lower() in ("", "n/a", "not supported", "unknown error"):
        return None
    match = _WATTS.match(text)
    watts = float(match.group(1)) * (1e-3 if match.group(2) == "mW" else 1.0) if match else math.inf
    if abs(watts) > MOST_W:
        raise RecordingError(
            f"{source}, line {line}: {text[:40]!r} is not a power", fix="nvidia-smi writes 300.25 W, or [N/A]"
        )
    return watts


def _stamp_ns(text: str, source: Path, line: int) -> int:
    """nvidia-smi writes local time without saying so."""
    for pattern in _STAMPS:
        try:
            moment = datetime.strptime(text.strip(), pattern).astimezone()
        except (ValueError, OverflowError):  # the year 1, moved to another zone, is before it
            continue
        time_ns = int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1000
        if abs(time_ns) < MOST_NS:
            return time_ns
    raise RecordingError(
        f"{source}, line {line}: {text[:40]!r} is not a time", fix="nvidia-smi writes 2026/11/15 09:30:00.123"
    )
