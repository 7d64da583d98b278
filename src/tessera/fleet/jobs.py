"""`FleetJob`: what runs on the GPUs of a facility, and how a file says it.

::

    jobs:
      - {name: train, gpus: 512, shape: {period: 2s, duty: 75%, high: 650W, low: 200W}, replicas: 8, start: 5s}
      - {name: phases, gpus: 64, phases: [{compute: 1.2s, power: 650W}, {communicate: 300ms, power: 220W}]}
      - {name: serve, gpus: 64, recording: power.csv}                     a .tessera run or a power CSV of one GPU
      - {name: llama, gpus: 64, plan: {model: "hf:config.json", cluster: "dgx-h200:8", seq: 4096, global_batch: 512}}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..units import parse_duration, parse_fraction, parse_power, with_unit
from .waves import Wave, make_square, make_wave, plan_to_waves, read_wave
from .yaml_tables import Keys, check_names, keep, list_tables, read_bool, read_section, read_text, read_whole

_SOURCES = ("shape", "phases", "recording", "plan")


@dataclass(frozen=True, kw_only=True)
class FleetJob:
    """Ranks that draw waves. `waves` has one for each pipeline stage; `replicas` divide the job into equal groups.

    `at_s` is how far into its first iteration the job begins. With `scatter`, every node begins anywhere in the wave,
    as servers do. `least_share` is the least share of its watts that the job needs (`PowerRequest.min_share`).
    """

    name: str
    gpus: int
    waves: tuple[Wave, ...]
    replicas: int = 1
    start_s: float = 0.0
    end_s: float | None = None
    at_s: float = 0.0
    scatter: bool = False
    priority: int = 5
    least_share: float = 0.5

    def __post_init__(self) -> None:
        if not self.waves:
            raise ArgumentError(f"job {self.name!r} has no wave")
        if self.gpus < 1 or self.gpus % (self.replicas * len(self.waves)):
            raise ArgumentError(
                f"job {self.name!r}: {self.gpus} GPUs cannot be divided into {self.replicas} replicas of "
                f"{len(self.waves)} stages"
            )
        if self.end_s is not None and not self.end_s > self.start_s:
            raise ArgumentError(f"job {self.name!r} ends before it starts")

    @property
    def period_s(self) -> float:
        """Return the seconds of one iteration if nothing slows it."""
        return self.waves[0].period_s

    @property
    def is_synchronous(self) -> bool:
        """Return whether the job's ranks wait for each other."""
        return self.waves[0].sync_s is not None

    @property
    def duty(self) -> float | None:
        """Return the share of an iteration before the ranks synchronise."""
        wave = self.waves[0]
        return None if wave.sync_s is None else wave.sync_s / wave.period_s

    @property
    def peak_w(self) -> float:
        """Return the highest watts of a GPU."""
        return max(wave.peak_w for wave in self.waves)


# -- reading ------------------------------------------------------------------------------------------------------

_power, _duration = with_unit(parse_power), with_unit(parse_duration)
_SHAPE: Keys = {
    "period": ("period_s", _duration),
    "duty": ("duty", parse_fraction),
    "high": ("high_w", _power),
    "low": ("low_w", _power),
}
_PLAN: Keys = {
    "model": ("model", read_text),
    "cluster": ("cluster", read_text),
    "seq": ("seq", read_whole),
    "global_batch": ("global_batch", read_whole),
    "precision": ("precision", read_text),
    "goal": ("goal", read_text),
}


def _read_offset(value: Any) -> Any:
    return value if isinstance(value, str) and not value[:1].isdigit() else _duration(value)


_JOB: Keys = {
    "name": ("name", read_text),
    "gpus": ("gpus", read_whole),
    "copies": ("copies", read_whole),
    "replicas": ("replicas", read_whole),
    "start": ("start_s", _duration),
    "end": ("end_s", _duration),
    "at": ("at_s", _duration),
    "offset": ("offset", _read_offset),
    "priority": ("priority", read_whole),
    "least_share": ("least_share", parse_fraction),
    "synchronous": ("synchronous", read_bool),
    "scatter": ("scatter", read_bool),
    "domain": ("domain", read_text),
    **{source: (source, keep) for source in _SOURCES},
}


def read_jobs(tables: Any, folder: Path) -> list[FleetJob]:
    """Return the jobs of a file. Paths are relative to its folder; `copies` are independent jobs of the same kind."""
    jobs: list[FleetJob] = []
    for number, table in enumerate(list_tables(tables, "jobs", "{name: train, gpus: 64, shape: {...}}"), 1):
        values = read_section(table, _JOB, f"jobs[{number}]")
        where = f"job {values.get('name', number)!r}"
        if "gpus" not in values:
            raise ArgumentError(f"{where} needs gpus", fix="gpus: 64")
        values.setdefault("name", f"job{number}")
        waves = _read_waves(values, folder, where)
        copies, offset = values.pop("copies", 1), values.pop("offset", None)
        values = {k: v for k, v in values.items() if k not in (*_SOURCES, "synchronous", "domain")}
        values.setdefault("scatter", waves[0].sync_s is None)
        one = FleetJob(waves=waves, **values)
        jobs += copy_job(one, copies, offset)
    check_names(job.name for job in jobs)
    return jobs


def copy_job(job: FleetJob, copies: int, offset: Any = None) -> list[FleetJob]:
    """Return independent equal jobs, each begun later in its iteration than the last, by `runtime.shaping`'s rules."""
    from ..runtime.shaping import group_offsets

    if copies == 1:
        return [job]
    shift = parse_duration(offset) if isinstance(offset, (int, float)) or str(offset)[:1].isdigit() else offset
    if shift not in (None, "auto", "round_robin") and not isinstance(shift, float):
        raise ArgumentError(f"job {job.name!r}: no offset {offset!r}", fix="auto, round_robin or a time such as 250ms")
    offsets = group_offsets(copies, shift, job.period_s, job.duty)
    return [
        dataclasses.replace(job, name=f"{job.name}-{i + 1}", at_s=(job.at_s + float(offsets[i])) % job.period_s)
        for i in range(copies)
    ]


def _read_waves(values: Mapping[str, Any], folder: Path, where: str) -> tuple[Wave, ...]:
    given = [source for source in _SOURCES if source in values]
    if len(given) != 1:
        raise ArgumentError(f"{where} needs one of: {', '.join(_SOURCES)}", why=f"it has {given or 'none'}")
    synchronous = values.get("synchronous", True)
    if "shape" in values:
        shape = read_section(values["shape"], _SHAPE, f"{where}.shape")
        if missing := [key for key, (name, _) in _SHAPE.items() if name not in shape]:
            raise ArgumentError(f"{where}.shape needs {', '.join(missing)}")
        return (make_square(**shape, synchronous=synchronous),)
    if "phases" in values:
        phases = _read_phases(values["phases"], where)
        return (make_wave(phases, synchronous=synchronous, source="phases of the file"),)
    if "recording" in values:
        return (read_wave(folder / read_text(values["recording"]), values.get("domain")),)
    from ..dist.planner import plan
    from ..serving.served_model import read_served_model

    asked = read_section(values["plan"], _PLAN, f"{where}.plan")
    model = asked.pop("model", "")
    if model.endswith(".json"):
        model = f"hf:{folder / model.removeprefix('hf:')}"
    return tuple(plan_to_waves(plan(read_served_model(model).shape, gpus=values["gpus"], **asked)))


def _read_phases(tables: Any, where: str) -> list[tuple[str, float, float]]:
    keys: Keys = {
        "compute": ("compute", _duration),
        "communicate": ("communicate", _duration),
        "power": ("power_w", _power),
    }
    phases: list[tuple[str, float, float]] = []
    for number, table in enumerate(list_tables(tables or None, f"{where}.phases", "{compute: 1.2s, power: 650W}"), 1):
        phase = read_section(table, keys, f"{where}.phases[{number}]")
        kinds = [kind for kind in ("compute", "communicate") if kind in phase]
        if len(kinds) != 1 or "power_w" not in phase:
            raise ArgumentError(f"{where}.phases[{number}] needs power, and compute or communicate with its time")
        phases.append((kinds[0], phase[kinds[0]], phase["power_w"]))
    return phases
