"""`EnergyTable`: what a session's joules were spent on, by kernel, operator, region, module and step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from ..errors import check_choice, needs_extra
from ..schema import Basis, Domain
from ..sensors.response_store import ResponseFit
from ..units import format_duration, format_energy_error

UNTRACED_SHARE = 0.02
"""A table that leaves out more than this share of its time covers a trace, not the whole run."""
IdleName = Literal["idle", "between operators"]
"""Name of the joules in no row: "idle" for a device; for a host alone "between operators", where Python runs."""
IDLE_NAMES: tuple[IdleName, ...] = get_args(IdleName)
VIEWS = ("kernels", "ops", "regions", "modules", "steps", "groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyRow:
    """One line: calls, seconds on the device, and joules with the half-width of their 90% interval.

    Joules are the board's while the kernels ran, including its static power. `group` numbers the kernels that the
    samples cannot tell apart: only their sum (`EnergyTable.groups`) is known well. Regions include the idle joules
    between their own kernels; `with_backward_j` adds what autograd spent later for what was called inside. Steps
    include the idle joules beside their kernels, so that they sum to the time they took. `idle_s` are the seconds of
    these idle joules. `devices` is the number of devices of a step. `overlaps`: the calls overlap in time, and a moment
    in several of them counts once. `share_error` is the half-width of the share's 90% interval, if rows are counted in
    samples of stacks.
    """

    name: str
    kind: str
    calls: int
    time_s: float
    energy_j: float
    error_j: float
    share: float
    group: int | None = None
    with_backward_j: float | None = None
    wall_s: float | None = None
    idle_s: float | None = None
    devices: int = 1
    overlaps: bool = False
    share_error: float | None = None

    @property
    def spent_s(self) -> float:
        """The seconds in which its joules were spent; not its wall time, since a device runs behind its host."""
        return (self.time_s + (self.idle_s or 0.0)) / self.devices

    @property
    def power_w(self) -> float | None:
        """Mean watts over the seconds in which its joules were spent; None if it took no time on the device."""
        return self.energy_j / self.spent_s if self.spent_s > 0 else None

    @property
    def j_per_call(self) -> float:
        return self.energy_j / self.calls if self.calls else self.energy_j


def name_idle(ops: Sequence[EnergyRow], kernels: Sequence[EnergyRow]) -> IdleName:
    """Return the name of the joules that are in no row."""
    return "between operators" if ops and not kernels else "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCoverage:
    """How many kernels of a light run, and how many of their joules, have an operator.

    "Traced": in the few steps whose operators were recorded. "Aligned": in other steps, with the operator of the traced
    kernel that they repeat. "Unknown": without an operator, or unlike everything that was traced.
    """

    traced_kernels: int
    aligned_kernels: int
    unknown_kernels: int
    traced_j: float
    aligned_j: float
    unknown_j: float

    @property
    def share(self) -> float:
        """The share of the kernels' joules (without joules: of their number) that has an operator."""
        known, unknown = self.traced_j + self.aligned_j, self.unknown_j
        if not known + unknown > 0:
            known, unknown = self.traced_kernels + self.aligned_kernels, self.unknown_kernels
        return known / (known + unknown) if known + unknown > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with the share."""
        return {**dataclasses.asdict(self), "share": self.share}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyTable:
    """The joules of what was traced. They are conserved: kernels and idle sum to the measured `energy_j`.

    `time_s` is the traced time. `untraced_j` and `untraced_s` are what the power samples tell of other times: they are
    in no row and not idle, since nobody recorded what ran. `basis` is that of the power samples, `coverage` the share
    of the time they saw, where boards differ weighted by their joules. `operators` is how much of a light run has an
    operator; None for other runs. `learnt` is what the run has shown of its power sensors. `busy_error_j` is the error
    of what is not idle; both errors include the sensor's level.
    """

    energy_j: float
    error_j: float
    idle_j: float
    idle_error_j: float
    time_s: float
    busy_s: float
    kernels: Sequence[EnergyRow]
    ops: Sequence[EnergyRow] = ()
    regions: Sequence[EnergyRow] = ()
    modules: Sequence[EnergyRow] = ()
    steps: Sequence[EnergyRow] = ()
    groups: Sequence[EnergyRow] = ()
    source: str = ""
    basis: Basis = "measured"
    coverage: float = 1.0
    idle_w: float | None = None
    untraced_j: float = 0.0
    untraced_s: float = 0.0
    operators: OperatorCoverage | None = None
    notes: Sequence[str] = ()
    learnt: Sequence[tuple[Domain, ResponseFit]] = ()
    busy_error_j: float | None = None

    @property
    def idle_name(self) -> IdleName:
        """The name of `idle_j`."""
        return name_idle(self.ops, self.kernels)

    @property
    def idle_s(self) -> float:
        """The seconds of `idle_j`, of all devices together: not those without power samples."""
        return self.idle_j / self.idle_w if self.idle_w else max(self.time_s - self.busy_s, 0.0)

    @property
    def covers(self) -> Literal["run", "trace"]:
        """Whether `energy_j` and the rows cover the whole run, or only what was traced of it."""
        return "trace" if self.untraced_s > UNTRACED_SHARE * self.time_s else "run"

    def rows(self, by: str = "kernels") -> Sequence[EnergyRow]:
        """Return the rows of one view: kernels, ops, regions, modules, steps or groups."""
        check_choice("by", by, VIEWS)
        rows: Sequence[EnergyRow] = getattr(self, by)
        return rows

    def top(self, count: int = 10, by: str = "kernels") -> list[EnergyRow]:
        """Return the most expensive rows of a view."""
        return sorted(self.rows(by), key=lambda r: r.energy_j, reverse=True)[:count]

    def to_json(self) -> dict[str, Any]:
        """Return plain data: `energy_j`, `idle_j`, `untraced_j` ..., and the rows of every view."""
        head = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in VIEWS}
        head["operators"] = self.operators.to_dict() if self.operators is not None else None
        head["learnt"] = [{"domain": domain.name, **msgspec.to_builtins(fit)} for domain, fit in self.learnt]
        views = {v: [_row(r) for r in self.rows(v)] for v in VIEWS}
        return {**head, "covers": self.covers, "notes": [str(note) for note in self.notes], **views}

    def to_frame(self, by: str = "kernels") -> Any:
        with needs_extra("pandas", "frame", "EnergyTable.to_frame"):
            import pandas as pd
        return pd.DataFrame([_row(r) for r in self.rows(by)])

    def __repr__(self) -> str:
        views = ("kernels", "ops", "regions", "modules", "steps")
        counts = ", ".join(f"{len(rows)} {view}" for view in views if (rows := getattr(self, view)))
        spent = format_energy_error(self.energy_j, self.error_j)
        return f"<EnergyTable {spent} in {format_duration(self.time_s, 3)}: {counts or 'no rows'}; print() shows more>"

    def __str__(self) -> str:
        from ..report.energy import text

        return text(self)

    def _repr_html_(self) -> str:
        from ..report.energy import html

        return html(self)


def note_overlaps(regions: Sequence[EnergyRow]) -> list[str]:
    """Return a note about regions whose calls overlap."""
    names = [r.name for r in regions if r.overlaps]
    if not names:
        return []
    named = f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
    return [f"the calls of {named} overlap (threads, asyncio tasks): their sum counts each moment once"]


def _row(row: EnergyRow) -> dict[str, Any]:
    """Return a row as the command prints it; a kernel's name is its `kernel_name`."""
    data = dataclasses.asdict(row)
    name = data.pop("name")
    key = "kernel_name" if row.kind in ("kernel", "memcpy", "memset", "collective") else "name"
    return {key: name, **data, "power_w": row.power_w, "j_per_call": row.j_per_call}
