"""Keeps how the power sensors of this machine's boards respond, as earlier runs have learnt it.

    run with a trace ──► ResponseFit ──► keep() ──► $XDG_CONFIG_HOME/tessera/sensors/<board, driver, source>.json
    sensor that starts ◄── Domain with the board's own lag and blur ◄── SensorResponse ◄── find()

A file has the fits of the last runs. They are combined by their precision and by how much they scatter beyond it: runs
of one board that disagree make its response less certain, never more certain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from ..errors import ArgumentError
from ..output import replace_when_written
from ..read_limits import read_bytes
from ..schema import Domain

KEPT_FITS = 32
FILE_BYTES = 64 << 10
# The error that all fits of a board may share, because they make the same assumptions (90% half-width).
COMMON_ERROR_S = 0.0005
# No sensor whose response can be learnt has a longer lag or blur: NVML's slowest is an average over a second.
MOST_S = 3.0
MOST_W = 5000.0
_Z90 = 1.6449  # `joules.Z90`, which would load numpy


class ResponseFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one run has learnt; errors are 90% half-widths. `start_ns` (epoch) identifies the run, which counts once."""

    start_ns: int
    seconds: float
    lag_s: float
    lag_error_s: float
    blur_s: float
    blur_error_s: float
    idle_w: float | None = None
    idle_error_w: float | None = None

    def __post_init__(self) -> None:
        times = (self.seconds, self.lag_error_s, self.blur_s, self.blur_error_s)
        if not all(t > 0.0 for t in times) or not all(abs(t) < MOST_S for t in (self.lag_s, *times[1:])):
            raise ValueError("no sensor responds like this")
        if not self.seconds < 1e9:
            raise ValueError("no run lasts so long")
        watts = (self.idle_w, self.idle_error_w)
        if None not in watts and not all(0.0 < w < MOST_W for w in watts if w is not None):
            raise ValueError("no board idles like this")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    board: str
    driver: str
    source: str
    fits: list[ResponseFit]


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorResponse:
    """The known response of a board's power sensor; errors are 90% half-widths. `blur_s` is a standard deviation."""

    lag_s: float
    lag_error_s: float
    blur_s: float
    blur_error_s: float
    idle_w: float | None
    idle_error_w: float | None
    seconds: float
    runs: int

    def apply(self, domain: Domain) -> Domain:
        """Return the domain with this lag and blur."""
        return dataclasses.replace(domain, lag_s=self.lag_s, lag_error_s=self.lag_error_s, blur_s=self.blur_s)


def find(domain: Domain) -> SensorResponse | None:
    """Return what earlier runs have learnt of a domain's sensor; None if there is nothing that can be read."""
    path = path_of(domain)
    fits = _read(path, domain) if path is not None else []
    return combine(fits) if fits else None


def keep(domain: Domain, fit: ResponseFit) -> SensorResponse | None:
    """Add what a run has learnt. Return what is known now, or None if it cannot be kept (no folder, no driver)."""
    path = path_of(domain)
    if path is None:
        return None
    others = [f for f in _read(path, domain) if f.start_ns != fit.start_ns]
    fits = sorted([*others, fit], key=lambda f: f.start_ns)[-KEPT_FITS:]
    text = msgspec.json.encode(_File(domain.label, domain.driver, _source(domain), fits))
    with contextlib.suppress(ArgumentError):  # a home that cannot be written: the next run learns it again
        with replace_when_written(path, make_folder=True) as draft:
            draft.write_bytes(msgspec.json.format(text, indent=1) + b"\n")
        return combine(fits)
    return None


class _Taught(Protocol):
    @property
    def learnt(self) -> Sequence[tuple[Domain, ResponseFit]]: ...


_Table = TypeVar("_Table", bound=_Taught)


def keep_learnt(table: _Table) -> _Table:
    """Keep what a run of this machine has shown of its sensors, and return the table of its joules."""
    for domain, fit in table.learnt:
        keep(domain, fit)
    return table


def folder() -> Path:
    """Return the folder with what was learnt."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "tessera" / "sensors"


def path_of(domain: Domain) -> Path | None:
    """Return the file of a domain's sensor; None if the board or its driver is not known."""
    if not domain.label or not domain.driver:
        return None
    parts = (domain.label, domain.driver, _source(domain))
    return folder() / ("_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip(".-")[:60] for part in parts) + ".json")


def _source(domain: Domain) -> str:
    return domain.source.removeprefix("replay:")


def _read(path: Path, domain: Domain) -> list[ResponseFit]:
    """Return the fits in a file; empty if it is missing or damaged, and then the next run replaces it."""
    try:
        found = msgspec.json.decode(read_bytes(path, FILE_BYTES), type=_File)
    except (OSError, ValueError, RecursionError, msgspec.DecodeError):
        return []
    same = (found.board, found.driver, found.source) == (domain.label, domain.driver, _source(domain))
    return found.fits[-KEPT_FITS:] if same else []


def combine(fits: Sequence[ResponseFit]) -> SensorResponse:
    """Combine all fits into one response."""
    lag_s, lag_error_s = combine_values([(f.lag_s, f.lag_error_s) for f in fits])
    blur_s, blur_error_s = combine_values([(f.blur_s, f.blur_error_s) for f in fits])
    idle = [(f.idle_w, f.idle_error_w) for f in fits if f.idle_w is not None and f.idle_error_w is not None]
    idle_w, idle_error_w = combine_values(idle) if idle else (None, None)
    return SensorResponse(
        lag_s=lag_s, lag_error_s=math.hypot(lag_error_s, COMMON_ERROR_S), blur_s=blur_s,
        blur_error_s=math.hypot(blur_error_s, COMMON_ERROR_S), idle_w=idle_w, idle_error_w=idle_error_w,
        seconds=sum(f.seconds for f in fits), runs=len(fits),
    )  # fmt: skip


def combine_values(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of values with errors, weighted by precision, and its error.

    If the values scatter more than their errors allow, they really differ: the excess variance is added to each one's
    (DerSimonian and Laird, "Meta-analysis in clinical trials", 1986).
    """
    weights = [error**-2.0 for _, error in values]
    total = sum(weights)
    mean = sum(w * v for w, (v, _) in zip(weights, values, strict=True)) / total
    excess = sum(w * (v - mean) ** 2 for w, (v, _) in zip(weights, values, strict=True))
    # The scatter is in standard deviations, the errors are 90% half-widths: convert the former to the latter.
    excess = excess * _Z90**2 - (len(values) - 1)
    spare = total - sum(w * w for w in weights) / total
    between = max(excess / spare, 0.0) if spare > 1e-9 * total else 0.0
    weights = [1.0 / (error**2 + between) for _, error in values]
    total = sum(weights)
    return sum(w * v for w, (v, _) in zip(weights, values, strict=True)) / total, total**-0.5
