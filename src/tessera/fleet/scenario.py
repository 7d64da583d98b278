"""`Scenario`: a facility, its jobs, faults and policies, for how long: the file that `tessera simulate` reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, check_positive
from ..policy import Policies, load_policies, parse_policies
from ..units import format_duration, format_power, parse_duration, with_unit
from .facility import SECTIONS, Facility, read_facility
from .faults import Fault, read_faults
from .jobs import FleetJob, read_jobs
from .yaml_tables import check_keys, load_yaml, prefix_error, read_section, read_whole

MOST_S = 86400.0
LEAST_STEPS = 4
"""Steps in the shortest period that is simulated: with fewer, the power depends on where steps fall in a wave."""
MOST_OVER = 2.0
"""A load may want more than a GPU's limit allows, and is held at the limit; more than this factor is a mistake.

Recorded loads of an H200 want 1.3 times its limit (docs/fleet.md).
"""
_KEYS = (*SECTIONS, "jobs", "faults", "policies", "duration", "seed", "judge_from")
_EXAMPLE = "examples/fleet/row.yaml is one to begin with"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated. Ramps count at all times, the rest from `judge_from_s` on; None: from when all jobs run."""

    facility: Facility
    jobs: tuple[FleetJob, ...] = ()
    faults: tuple[Fault, ...] = ()
    policies: Policies = field(default_factory=Policies)
    duration_s: float = 60.0
    seed: int = 1
    judge_from_s: float | None = None

    def __post_init__(self) -> None:
        check_positive("duration_s", self.duration_s)
        if self.duration_s > MOST_S:
            raise ArgumentError(f"a simulation takes at most {MOST_S:g} s, not {self.duration_s:g} s")
        for job in self.jobs:
            self._check_wave(job)
        asked = sum(job.gpus for job in self.jobs)
        if asked > self.facility.gpus and all(job.end_s is None for job in self.jobs):
            raise ArgumentError(
                f"the jobs want {asked:,} GPUs, and {self.facility.name} has {self.facility.gpus:,}",
                fix="more rows, racks or nodes, or smaller jobs",
            )

    def _check_wave(self, job: FleetJob) -> None:
        gpu, step_s = self.facility.gpu, self.facility.step_s
        if job.peak_w > MOST_OVER * gpu.limit_w:
            limit = format_power(gpu.limit_w)
            raise ArgumentError(
                f"job {job.name!r} draws {format_power(job.peak_w)} a GPU, and {gpu.name} has a limit of {limit}",
                fix=f"watts of one GPU, such as {limit}; or another limit: gpus: {{limit: ...}}",
            )
        if job.period_s < LEAST_STEPS * step_s:
            raise ArgumentError(
                f"job {job.name!r} has a period of {format_duration(job.period_s)}: too short for steps of "
                f"{format_duration(step_s)}",
                why="where the steps fall in it would decide what it draws",
                fix=f"{format_duration(LEAST_STEPS * step_s)} or longer: several of its steps as one period",
            )

    @property
    def steady_from_s(self) -> float:
        """Return the time from which the swing is judged."""
        if self.judge_from_s is not None:
            return self.judge_from_s
        governor = self.policies.rack_power_governor
        begun = max((job.start_s + job.period_s for job in self.jobs), default=0.0)
        return min(begun + (governor.soft_start_s if governor else 0.0), 0.5 * self.duration_s)


def load_scenario(path: str | Path) -> Scenario:
    """Return a scenario from a YAML file."""
    place = Path(path)
    table = load_yaml(place, _EXAMPLE)
    try:
        return parse_scenario(table, place.parent, place.stem)
    except ArgumentError as error:
        raise prefix_error(place, error) from None


def parse_scenario(table: Any, folder: Path = Path(), name: str = "facility") -> Scenario:
    """Return a scenario from the tables of a file; relative paths are taken from `folder`."""
    if not isinstance(table, dict):
        raise ArgumentError("there is no table of settings", fix=_EXAMPLE)
    check_keys(table, _KEYS, "the file")
    facility = read_facility({"name": name, **table})
    return Scenario(
        facility=facility,
        jobs=tuple(read_jobs(table.get("jobs", []), folder)),
        faults=tuple(read_faults(table.get("faults", []), facility)),
        policies=_read_policies(table.get("policies"), folder),
        duration_s=_read_time(table, "duration") if "duration" in table else 60.0,
        seed=read_whole(table.get("seed", 1)),
        judge_from_s=_read_time(table, "judge_from") if "judge_from" in table else None,
    )


def _read_time(table: dict[str, Any], key: str) -> float:
    return float(read_section({key: table[key]}, {key: (key, with_unit(parse_duration))}, "the file")[key])


def _read_policies(given: Any, folder: Path) -> Policies:
    if given is None:
        return Policies()
    if isinstance(given, str):
        return load_policies(folder / given)
    return parse_policies(given, "policies")
