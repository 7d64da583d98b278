"""`%%energy`: shows what a notebook's cell cost.

::

    %load_ext tessera.notebook

    %%energy
    model(batch)                    # 41.2 ± 0.6 J   352 W   117 ms

    %%energy --profile --steps 10   # and which kernels and operators spent it
    for _ in range(10): model(batch)

    %energy model(batch)            # one line

The cell's own output is not changed; the value of the magic is a `CellEnergy`, also in `_` afterwards. This module can
be imported without IPython.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import ArgumentError, MeasurementError, TesseraError
from .schema import Energy

if TYPE_CHECKING:
    from .attribute.table import EnergyTable

_USAGE = "%%energy [--profile] [--steps N] [--samples N] [--tokens N] [--path RUN.tessera]"
_UNITS = ("step", "sample", "token")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEnergy:
    """The energy of a cell. If it was profiled, `table` has the joules by kernel and operator, `path` the run file."""

    energy: Energy
    table: EnergyTable | None = None
    path: Path | None = None
    work: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    notes: tuple[str, ...] = ()

    @property
    def joules(self) -> float:
        return self.energy.energy_j

    def lines(self) -> list[str]:
        """Return the main line, then notes."""
        from .units import format_duration, format_energy_error, format_error

        e = self.energy
        seen_s = e.time_s * e.coverage
        known = seen_s > 0 and e.energy_j >= 0
        watts = format_error(e.energy_j / seen_s, e.error_j / seen_s, "W") if known else "unknown W"
        out = ["   ".join((format_energy_error(e.energy_j, e.error_j), watts, format_duration(e.time_s)))]
        out += [f"{format_energy_error(e.energy_j / n, e.error_j / n)} per {unit}" for unit, n in self.work.items()]
        if e.basis != "measured":
            out.append(f"{e.basis.upper()}, not measured: run `tessera doctor` to see which sensors are available")
        if self.failed:
            out.append("the cell failed; the energy is up to then")
        out += self.notes
        if self.path is not None:
            out.append(f"tessera report {self.path} --open")
        return out

    def __repr__(self) -> str:
        first, *rest = self.lines()
        body = [str(self.table)] if self.table is not None else []
        return "\n".join([f"{first}   {self.energy.source}, 90% intervals", *rest, *body])

    def _repr_html_(self) -> str:
        first, *rest = (escape(line) for line in self.lines())
        source = escape(f"{self.energy.source}, 90% intervals")
        more = "".join(f"<div style='opacity:.75'>{line}</div>" for line in rest)
        body = self.table._repr_html_() if self.table is not None else ""
        return (
            "<div style='font:14px/1.45 system-ui,sans-serif;font-variant-numeric:tabular-nums'>"
            f"<b>{first}</b> <span style='opacity:.75'>{source}</span>{more}{body}</div>"
        )


def load_ipython_extension(shell: Any) -> None:
    """Register the magic; `%load_ext tessera.notebook` calls this."""

    def energy(line: str, cell: str | None = None) -> CellEnergy:
        """Measure a cell, or a line: joules, watts, seconds; --profile says which kernels spent them."""
        try:
            return measure_cell(shell, line, cell)
        except TesseraError as exc:
            if not hasattr(shell, "show_usage_error"):
                raise
            from IPython.core.error import UsageError

            raise UsageError(str(exc)) from None  # IPython shows this error without a traceback

    shell.register_magic_function(energy, magic_kind="line_cell", magic_name="energy")


def unload_ipython_extension(shell: Any) -> None:
    """Remove the magic; `%unload_ext tessera.notebook` calls this."""
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("energy", None)


def measure_cell(shell: Any, line: str, cell: str | None) -> CellEnergy:
    """Run a cell in a shell and measure it; the shell shows the cell's errors."""
    options, rest = _parse_line(line, one_line=cell is None)
    code = rest if cell is None else cell
    if not code.strip():
        raise ArgumentError("there is nothing to measure", fix=f"{_USAGE}, with code below it")
    if _awaits(shell, code):
        raise ArgumentError(
            "%%energy cannot run a cell with await outside a function",
            why="the notebook's event loop is running the magic itself",
            fix="with tessera.monitor.energy_scope('cell') as energy: around the await, without the magic",
        )
    work = {unit: n for unit in _UNITS if (n := getattr(options, f"{unit}s")) is not None}
    return _profile(shell, code, work, options.path) if options.profile else _measure(shell, code, work)


def _awaits(shell: Any, code: str) -> bool:
    """Return whether the code needs the event loop in which a notebook runs its cells."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False  # a terminal: IPython starts a loop for the cell
    return hasattr(shell, "should_run_async") and bool(shell.should_run_async(code, transformed_cell=code))


def _measure(shell: Any, code: str, work: dict[str, float]) -> CellEnergy:
    from .monitor import energy_scope

    # Wait for the device at both ends, so that kernels count for the cell that launched them.
    with energy_scope("cell", sync=True) as scope:
        outcome = shell.run_cell(code)
    return CellEnergy(energy=scope.energy, work=work, failed=not getattr(outcome, "success", True))


def _profile(shell: Any, code: str, work: dict[str, float], path: str | None) -> CellEnergy:
    from .monitor.scope import synchronize
    from .profile.session import default_path, session

    target = Path(path) if path else default_path("cell")
    with session(path=target) as recorded:
        if work:
            recorded.set("work", work)
        outcome = shell.run_cell(code)
        synchronize()
    notes: tuple[str, ...] = ()
    try:
        table = recorded.energy()
    except MeasurementError as exc:  # the cell is too short for one sample, or there is no sensor
        table, notes = None, (f"no joules by kernel: {exc.what}",)
    energy = recorded.report().total if table is None else _total_of(table)
    failed = not getattr(outcome, "success", True)
    return CellEnergy(energy=energy, table=table, path=recorded.path, work=work, failed=failed, notes=notes)


def _total_of(table: EnergyTable) -> Energy:
    return Energy(
        energy_j=table.energy_j,
        error_j=table.error_j,
        time_s=table.time_s,
        source=table.source,
        coverage=table.coverage,
        basis=table.basis,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"%%energy: {message}", fix=_USAGE)


def _parse_line(line: str, *, one_line: bool) -> tuple[argparse.Namespace, str]:
    """Return the options of a line and, for a line magic, the code after them."""
    parser = _Parser(prog="%%energy", add_help=False)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--path")
    for unit in _UNITS:
        parser.add_argument(f"--{unit}s", type=float)
    if not one_line:
        try:
            words = shlex.split(line)
        except ValueError as exc:
            raise ArgumentError(f"%%energy: {exc}", fix=_USAGE) from exc
        return _check_amounts(parser.parse_args(words)), ""
    options, code = [], line.strip()
    while code.startswith("--"):  # do not split the code itself: it keeps its quotes and spaces
        option, _, code = code.partition(" ")
        options.append(option)
        if option != "--profile" and "=" not in option:
            value, _, code = code.lstrip().partition(" ")
            options.append(value)
        code = code.lstrip()
    return _check_amounts(parser.parse_args(options)), code


def _check_amounts(options: argparse.Namespace) -> argparse.Namespace:
    for unit in _UNITS:
        amount = getattr(options, f"{unit}s")
        if amount is not None and not 0 < amount < float("inf"):
            raise ArgumentError(f"%%energy: --{unit}s {amount:g} is not a positive number", fix=_USAGE)
    return options
