"""What can be compared, as one type: a run, a trace, a table, a report or its JSON becomes a `DiffSide`.

::

    .tessera, Kineto, session ──► EnergyTable ──┐
    tessera report --json ──────► EnergyTable ──┼──► DiffSide: joules, seconds, work, rows by view ──► change.diff
    predict(), measure() ───────► EnergyReport ─┘
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec

from ..attribute.table import VIEWS, EnergyTable
from ..errors import ArgumentError, RecordingError
from ..estimate.prediction_errors import errors_of, model_of, watts_error, whole_errors
from ..monitor.command import CommandRun
from ..monitor.scope import EnergyScope
from ..profile.open_recording import open_recording
from ..recording import Facts, Recording
from ..schema import SCHEMA_VERSION, EnergyReport
from ..timeline.source import read_json, read_start
from .answer import describe_device, find_rows, name_of, work_amounts
from .mean_step import StepRows, find_step_rows, mean_step, select_steps, wall_s
from .run_energy import is_partial, whole_of
from .run_steps import find_every_step
from .sides import Cell, DiffSide, Span, make_cell
from .slowdown import Slowdown, slowdown_of
from .time_table import sum_idle, time_table

_NAN = float("nan")
_LONGEST_COMMAND = 20_000
_FIRST_KEY = re.compile(rb'\s*\{\s*"(\w+)"')


_OURS = {f.name for kind in (EnergyReport, EnergyTable) for f in dataclasses.fields(kind)} | {
    "answer",
    "crashed",
    "goal",  # the first key of a plan
    "model",  # the first key of a served model
    "opportunities",
    "path",
    "report",
    "returncode",
    "total_j",  # the first key of an older version's table
    "rows",
    "run",
    "summary",
}


def side_of(given: Any, power: Any = None, name: str = "table") -> DiffSide:
    """Return whatever was given as a `DiffSide`; `power` is the log beside a trace that has none."""
    side = _of_result(given, name)
    if side is None:
        return _of_recording(open_recording(given, power=power))
    if power is not None:
        fix = "leave the power log out, or give the trace"
        raise ArgumentError(f"{side.name} states its joules", why="a power log is for a trace without them", fix=fix)
    return side


def _of_result(given: Any, name: str) -> DiffSide | None:
    """Return the side of a result that was computed before; None for a recording."""
    if isinstance(given, DiffSide):
        return given
    if isinstance(given, EnergyReport):
        return _of_report(given)
    if isinstance(given, EnergyTable):
        return _of_table(given, name)
    if isinstance(given, Mapping):
        return _of_json(given, name)
    if isinstance(given, (str, Path)) and _is_json(Path(given)):
        return _of_json(_read_json(Path(given)), Path(given).name)
    if isinstance(given, EnergyScope):
        return _of_report(given.report())
    if isinstance(given, CommandRun):
        return dataclasses.replace(_of_report(given.report), from_start=True)
    return None


def split_runs(given: Any) -> list[Any]:
    """Return the reports in the JSON of `tessera measure --runs`; anything else as it is."""
    data = _read_json(Path(given)) if isinstance(given, (str, Path)) and _is_json(Path(given)) else given
    commands = data.get("commands") if isinstance(data, Mapping) else None
    if not isinstance(commands, list):
        return [given]
    if len(commands) != 1 or not isinstance(commands[0], Mapping):
        fix = "measure each in a file of its own; the JSON itself compares the commands (comparisons)"
        raise RecordingError(f"{given} has the runs of {len(commands)} commands", fix=fix)
    return [{"returncode": 0, "report": report} for report in commands[0].get("reports") or ()]


# -- reports --------------------------------------------------------------------------------------------------------


def _of_report(report: EnergyReport) -> DiffSide:
    of, total = report.prediction, report.total
    ops: dict[str, Cell] = {}
    for d in report.descriptors:
        errors = errors_of([d])
        cell = Cell(d.total_energy_j, d.error_j, d.latency_s, d.error_s, d.calls, d.kind, errors)
        ops[d.subgraph_name] = ops[d.subgraph_name] + cell if d.subgraph_name in ops else cell
    regions = {
        r.name: Cell(r.energy.energy_j, r.energy.error_j, r.energy.time_s, _NAN, r.calls, "region", once=True)
        for r in report.regions
    }
    sensors, gain = _level(total.source, "predicted" if of else report.basis, total.energy_j, total.error_j)
    parts = {"compute": report.compute_energy_j, "memory": report.memory_energy_j, "static": report.static_energy_j}
    return DiffSide(
        name=f"{report.name} on {of.device}" if of else report.name,
        basis="predicted" if of else report.basis,
        total=Cell(
            total.energy_j,
            total.error_j,
            total.time_s,
            of.error_s if of else _NAN,
            1,
            errors=whole_errors(report) if of else None,
            once=of is None,
            error_w=watts_error(report),
        ),
        span="" if of else "run",
        work={w.unit: w.amount for w in report.work},
        views={"ops": ops, "regions": regions},
        components={name: joules for name, joules in parts.items() if joules is not None},
        model=model_of(report),
        sensors=sensors,
        gain=gain,
    )


# -- tables ---------------------------------------------------------------------------------------------------------


def _level(source: str, basis: str, joules: float, error_j: float) -> tuple[str, float]:
    """Return sensors and their common error by the name of the source; a power model's error is all common."""
    if basis != "modelled":
        return "", 0.0
    return f"model {source}", error_j / joules if joules > 0 else 0.0


def _sensor_level(recording: Recording, table: EnergyTable) -> tuple[str, float]:
    """Return the counted sensors of a recording, and their common error as a share of all joules."""
    if recording.power is None or table.basis == "modelled":
        return _level(table.source, table.basis, table.energy_j, table.error_j)
    counted = [d for d in recording.power.domains if d.counted]
    spent = {d.name: recording.power.energy(d.name).energy_j for d in counted}
    spent = {name: joules for name, joules in spent.items() if not math.isnan(joules)}
    total_j = math.fsum(spent.values())
    if not total_j > 0:
        return "", 0.0
    off_j = math.hypot(*(d.gain_error * spent[d.name] for d in counted if d.name in spent))
    names = ", ".join(sorted(f"{d.name} {d.label} {d.source}" for d in counted))
    return f"{recording.facts.host}: {names}", off_j / total_j


def _of_table(
    table: EnergyTable,
    name: str,
    *,
    work: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
    level: tuple[str, float] | None = None,
    span: Span = "",
    whole: Cell | None = None,
    stepped: StepRows | None = None,
    command: Sequence[str] = (),
    untraced: Cell | None = None,
    every: Cell | None = None,
    idle_s: float | None = None,
) -> DiffSide:
    """Return a table as a side.

    `whole` is the run of which it is a part, `stepped` its rows by step, `level` its sensors and their error, `idle_s`
    its idle seconds where no watts tell them.
    """
    steps = {s.name for s in table.steps}
    views: dict[str, dict[str, Cell]] = {}
    for view in ("ops", "kernels", "regions", "modules"):
        rows: dict[str, Cell] = {}
        for r in table.rows(view):
            if view == "regions" and r.name in steps:  # they are numbered, so both sides never have the same one
                continue
            cell = Cell(r.energy_j, r.error_j, wall_s(r), _NAN, r.calls, r.kind, once=True)
            rows[r.name] = rows[r.name] + cell if r.name in rows else cell
        if rows and view in ("ops", "kernels") and table.busy_s > 0 and not table.idle_j <= 0:  # NaN: time is known
            waited_s = table.idle_s if idle_s is None else idle_s
            rows[table.idle_name] = Cell(table.idle_j, table.idle_error_j, waited_s, _NAN, 0, "idle", once=True)
        views[view] = rows
    total = Cell(table.energy_j, table.error_j, table.time_s, _NAN, 1, once=True)
    count = float(len(table.steps)) or (every.calls if every is not None else 0.0)
    sensors, gain = level or _level(table.source, table.basis, table.energy_j, table.error_j)
    return DiffSide(
        name=name,
        basis=table.basis,
        total=whole or total,
        traced=total if whole else None,
        work={**({"step": count} if count else {}), **(work or {})},
        steps=table.steps,
        stepped=stepped,
        untraced=untraced,
        every=every,
        span=span,
        views=views,
        notes=[*notes, *(n for n in table.notes if n not in notes)],
        sensors=sensors,
        gain=gain,
        command=command,
    )


def _of_recording(recording: Recording) -> DiffSide:
    """Return a run from its start to its end, whatever part of it was traced; a trace of another tool as it is."""
    table, timeline, facts = recording.find_energy(), recording.timeline, recording.facts
    is_run = facts.kind == "run"
    name = f"{name_of(recording)} ({facts.name})" if is_run else facts.name
    work = {unit.removesuffix("s"): n for unit, n in work_amounts(facts.work).items()} if is_run else {}
    command = _command_of(facts) if is_run else []
    crowded = facts.cpu_use.crowded_share if facts.cpu_use is not None else 0.0
    if table is None:
        notes = [*recording.notes, f"{name} has no power: only time is known"]
        table = time_table(timeline)
        side = _of_table(
            table,
            name,
            work=work,
            notes=notes,
            span="trace",
            stepped=find_step_rows(timeline, table),
            command=command,
            idle_s=sum_idle(timeline, table.time_s),
        )
        return dataclasses.replace(side, chip=describe_device(recording), crowded=crowded)
    whole = None
    if is_run and is_partial(recording, table):
        run = whole_of(recording, table, True, None)
        whole = Cell(run.energy_j, run.error_j, run.time_s, _NAN, 1, once=True)
    untraced = _untraced_step(slowdown_of(recording, table))
    every = _every_step(recording, table, whole) if whole is not None and untraced is None else None
    side = _of_table(
        find_rows(recording, table) if is_run else table,
        name,
        work=work,
        notes=recording.notes,
        untraced=untraced,
        every=every,
        level=_sensor_level(recording, table),
        span="run" if is_run else "trace",
        whole=whole,
        stepped=find_step_rows(timeline, table, recording.accounted_windows if is_run else ()),
        command=command,
    )
    return dataclasses.replace(side, chip=describe_device(recording), crowded=crowded)


def _untraced_step(tracing: Slowdown | None) -> Cell | None:
    """Return a step that was not traced, if tracing slowed the others: `tessera report` states this one."""
    if tracing is None or not tracing.matters or tracing.untraced_step_j is None or not tracing.untraced_steps_per_s:
        return None
    error_j, error_s = (
        _NAN if e is None else e for e in (tracing.untraced_step_error_j, tracing.untraced_step_error_s)
    )
    return Cell(tracing.untraced_step_j, error_j, 1.0 / tracing.untraced_steps_per_s, error_s, 1.0)


def _every_step(recording: Recording, table: EnergyTable, whole: Cell) -> Cell | None:
    """Return all counted steps of a run of which only some were traced: `tessera report` states their mean."""
    rows = find_every_step(recording, table)
    if not rows:
        return None
    counted = [rows[i] for i in select_steps(rows).places]
    level = whole.error_j / whole.energy_j if whole.energy_j > 0 else 0.0
    return make_cell(mean_step(counted, level), 1.0).scale(float(len(counted)))


def _command_of(facts: Facts) -> list[str]:
    """Return what was run, word by word; empty if that is not recorded, or if a notebook's kernel ran it."""
    command = facts.command or []
    words = _words(command) if isinstance(command, str) else [str(word) for word in command]
    return [] if any("ipykernel" in word for word in words) else words


def _words(command: str) -> list[str]:
    """Return a command as it was typed, word by word; empty if it is only a name."""
    try:
        # shlex copies a word for each of its letters, so a command of 500 KB would take a minute.
        words = shlex.split(command) if len(command) <= _LONGEST_COMMAND else command.split()
    except ValueError:  # a quote is never closed: it is a name that a user gave to a run
        return []
    return words if len(words) > 1 else []


# -- JSON -----------------------------------------------------------------------------------------------------------


def _is_json(path: Path) -> bool:
    """Return whether one of our commands printed a file, by its first key: a Kineto trace is JSON too."""
    if path.suffix not in (".json", ".gz") or not path.is_file():
        return False
    first = _FIRST_KEY.match(read_start(path, 1 << 12))
    return first is not None and first.group(1).decode(errors="replace") in _OURS


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        data = msgspec.json.decode(read_json(path))
    except (ValueError, RecursionError, msgspec.DecodeError) as exc:
        raise RecordingError(
            f"cannot read {path}", why=str(exc), fix="give the --json output of tessera predict, measure or report"
        ) from exc
    if not isinstance(data, dict):
        fix = "give the --json output of tessera predict, measure or report"
        raise RecordingError(f"{path} is not a report", fix=fix)
    return data


def _of_json(data: Mapping[str, Any], name: str) -> DiffSide:
    """Return a side from the JSON of predict and measure (`report`), report and attribute (a table), or a report."""
    try:
        data = _rename_keys(data)
        if "kernels" in data and "energy_j" in data:
            return _json_table(data, name)
        report = data.get("report", data)
        if isinstance(report, Mapping) and "total" in report:
            if int(report.get("schema_version", SCHEMA_VERSION)) > SCHEMA_VERSION:
                raise RecordingError(f"{name} was written by a newer Tessera", fix="update Tessera")
            side = _of_report(msgspec.convert(_restore_nan(report), EnergyReport))
            words = [str(word) for word in data.get("command") or ()]
            from_start = "returncode" in data and not side.is_prediction
            return dataclasses.replace(side, from_start=from_start, command=words)
    except (msgspec.ValidationError, TypeError, ValueError, KeyError, OverflowError) as exc:
        if isinstance(exc, ArgumentError):
            raise
        raise RecordingError(f"{name} is not a report", why=str(exc), fix="record or predict it again") from exc
    why = f"it has the keys: {', '.join(list(data)[:5])}" if data else "it is empty"
    fix = "give the --json output of tessera predict (for one chip), measure or report"
    if "time_per_output_token_s" in data:
        why = "it is the prediction of a server (--serve), which has several times and no step"
        fix = f"predict both in one command: tessera predict {data.get('model')} --serve --on h100,h200 --batch 8,32"
    elif "candidates" in data and "best" in data:
        why = "it is a plan (tessera plan), whose parts are not operators"
        fix = f"compare the figures of both: jq '.best | {{time_s, error_s, energy_j, error_j, memory_bytes}}' {name}"
    elif "rows" in data:
        why = "it is a sweep or an analysis of several things"
    raise RecordingError(f"{name} is neither a report nor a table", why=why, fix=fix)


class _JsonWork(TypedDict):
    unit: str
    amount: float
    energy_j: NotRequired[float]
    error_j: NotRequired[float]
    rate_per_s: NotRequired[float]
    traced_steps: NotRequired[int | None]


class _JsonAnswer(TypedDict, total=False):
    name: str | None
    per_work: list[_JsonWork]


class _JsonRun(TypedDict):
    energy_j: float
    error_j: float
    time_s: float


def _json_table(data: Mapping[str, Any], name: str) -> DiffSide:
    fields = {f.name for f in dataclasses.fields(EnergyTable)}
    plain = {k: v for k, v in _restore_nan(data).items() if k in fields}
    for view in VIEWS:
        plain[view] = [{**r, "name": r.get("kernel_name", r.get("name"))} for r in plain.get(view, ())]
    table = msgspec.convert(plain, EnergyTable)
    if not table.time_s > 0:
        raise ValueError("its time_s is 0: nothing was recorded")
    answer, run = msgspec.convert(_restore_nan(data.get("answer") or {}), _JsonAnswer), data.get("run")
    work = {p["unit"]: p["amount"] for p in answer.get("per_work", ()) if p["unit"] != "step"}
    shown = answer.get("name") or (Path(str(data["path"])).name if "path" in data else "")
    whole = None
    if isinstance(run, Mapping):
        values = msgspec.convert(_restore_nan(run), _JsonRun)
        whole = Cell(values["energy_j"], values["error_j"], values["time_s"], _NAN, 1, once=True)
        whole = whole if whole.seconds > table.time_s * (1 + 1e-9) else None
    span: Span = "run" if data.get("answer") or run else "trace"
    command = _words(answer.get("name") or "")
    every = _json_steps(answer.get("per_work", ()))
    title = f"{shown} ({name})" if shown else name
    return _of_table(table, title, work=work, span=span, whole=whole, command=command, every=every)


def _json_steps(per_work: Sequence[_JsonWork]) -> Cell | None:
    """Return all steps of a partly traced run, like `_every_step`.

    The JSON does not have the scatter of their seconds.
    """
    for per in per_work:
        rate_per_s = per.get("rate_per_s", 0.0)
        if per["unit"] == "step" and per.get("traced_steps") is not None and rate_per_s > 0:
            one = Cell(per.get("energy_j", _NAN), per.get("error_j", _NAN), 1.0 / rate_per_s, _NAN, 1.0)
            return one.scale(per["amount"])
    return None


_NEVER_NULL = ("energy_j", "error_j", "idle_j", "idle_error_j", "share")
_OLD_NAMES = {
    "total_j": "energy_j",
    "total_error_j": "error_j",
    "joules": "energy_j",
    "energy_error_j": "error_j",
    "seconds": "time_s",
    "latency_error_s": "error_s",
}
"""New names of keys in JSON that an older Tessera printed, so that a stored baseline can still be compared."""


_MOST, _LEAST = 1e60, 1e-15  # beyond these, a ratio or a square may overflow
_POSITIVE = ("time_s", "wall_s", "amount")


def _rename_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_OLD_NAMES.get(key, key): _rename_keys(v) for key, v in value.items()}
    return [_rename_keys(v) for v in value] if isinstance(value, list) else value


def _restore_nan(value: Any, key: str = "") -> Any:
    """Replace null joules and seconds by NaN, which JSON does not have; raise ValueError for impossible numbers."""
    if isinstance(value, Mapping):
        return {k: _restore_nan(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_restore_nan(v) for v in value]
    if isinstance(value, (int, float)) and (abs(value) > _MOST or (key in _POSITIVE and 0 != value < _LEAST)):
        raise ValueError(f"{key or 'a number'} is {value:g}, which nothing can have taken or spent")
    return _NAN if value is None and key in _NEVER_NULL else value
