"""Plays a recording through the same code that reads a live sensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..clock import now_ns
from ..errors import ArgumentError, RecordingError
from ..joules import DomainSamples, Ints
from ..schema import Basis, Capability, Domain, Gap
from ..trace import read_csv
from .base import Batch
from .modelled import MODEL_ERROR


class ReplaySensor:
    """Plays recorded columns from the moment it is started, in real time (`speed=1`) or all at once (`speed=None`).

    All at once, the recording's end is placed at the moment of the start, so that its samples have just happened.
    """

    name = "replay"
    period_s = 0.05  # often enough that a waiting reader is not held up

    def __init__(
        self,
        columns: Mapping[str, DomainSamples],
        *,
        speed: float | None = 1.0,
        clock: Callable[[], int] = now_ns,
    ) -> None:
        if not any(len(c.times_ns) for c in columns.values()):
            raise RecordingError("the recording has no samples", fix="record with power_trace(...).to_csv(path)")
        if speed is not None and not 0 < speed < float("inf"):
            raise ArgumentError(
                f"a recording cannot be played at speed {speed!r}",
                fix="speed=1 is real time, 10 ten times faster, None all at once",
            )
        self._columns = dict(columns)
        self._speed = speed
        self._clock = clock
        self._sent: dict[str, int] = {}
        self._over = False
        self._begun_ns = 0
        self._first_ns = min(int(c.times_ns[0]) for c in self._columns.values() if len(c.times_ns))
        self._last_ns = max(int(c.times_ns[-1]) for c in self._columns.values() if len(c.times_ns))

    @classmethod
    def from_csv(cls, path: str | Path, *, speed: float | None = 1.0) -> ReplaySensor:
        """Play a CSV as `PowerTrace.to_csv` writes it (epoch_us, domain, watts)."""
        samples = read_csv(path).items()
        columns = {name: DomainSamples.of(_describe_column(name, t, basis), t, w) for name, (t, w, basis) in samples}
        return cls(columns, speed=speed)

    def start(self) -> None:
        """Begin to play from the first sample."""
        self._begun_ns = self._clock()
        self._sent = {}
        self._over = False

    def domains(self) -> Sequence[Domain]:
        return [_mark_as_replay(c.domain) for c in self._columns.values()]

    def capabilities(self) -> Sequence[Capability]:
        return []

    def read(self) -> Batch:
        """Return what was played since the last read; after the end, nothing more."""
        batch = Batch()
        for name, column in self._columns.items():
            batch.samples[name] = self._until_now(name, column)
        if not self._over and all(self._sent[n] == len(c.times_ns) for n, c in self._columns.items()):
            self._over = True
            for name, column in self._columns.items():
                end_ns = int(self._to_present(column.times_ns[-1:])[0]) if len(column.times_ns) else self._begun_ns
                batch.gaps.append(Gap(domain=name, start_ns=end_ns, end_ns=None, reason="the recording is over"))
        return batch

    def _until_now(self, name: str, column: DomainSamples) -> list[tuple[int, float]]:
        first = self._sent.get(name, 0)
        placed = self._to_present(column.times_ns[first:])
        n = int(np.searchsorted(placed, self._clock(), side="right"))
        self._sent[name] = first + n
        return list(zip(placed[:n].tolist(), column.watts[first : first + n].tolist(), strict=True))

    def _to_present(self, times: Ints) -> Ints:
        """Map recorded times to the present clock."""
        if self._speed is None:
            return times - self._last_ns + self._begun_ns
        shifted: Ints = ((times - self._first_ns) / self._speed).astype(np.int64) + self._begun_ns
        return shifted

    def stop(self) -> None:
        """Do nothing: there is nothing to release."""


def _describe_column(name: str, times_ns: Ints, basis: Basis | None) -> Domain:
    spacing_s = float(np.median(np.diff(times_ns))) * 1e-9 if len(times_ns) > 1 else 0.0
    return Domain(
        name=name,
        source="csv",
        resolution_s=spacing_s,
        counted="." not in name,
        basis=basis or "measured",
        gain_error=MODEL_ERROR if basis == "modelled" else 0.0,
        note="a recording" if basis else "a recording that does not say whether it was measured or modelled",
    )


def _mark_as_replay(domain: Domain) -> Domain:
    if domain.source.startswith("replay"):
        return domain
    return dataclasses.replace(domain, source=f"replay:{domain.source}")
