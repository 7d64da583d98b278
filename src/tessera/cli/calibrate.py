"""`tessera calibrate`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from .plain import say

if TYPE_CHECKING:
    from pathlib import Path

    from ..estimate.calibrate import CalibrationResult


@click.command("calibrate")
@click.option("--device", type=int, default=0, show_default=True, help="Which GPU, as torch counts them.")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="About how long to measure.")
@click.option("--force", is_flag=True, help="Measure even if another process uses the GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print the calibration and its points as JSON.")
@click.option("--dry-run", is_flag=True, help="Measure and show, but write nothing.")
def command(device: int, seconds: float, force: bool, as_json: bool, dry_run: bool) -> int:
    """Measure the GPU and the host at hand, so that predictions for them are those of this machine.

    \b
    Example:
      tessera calibrate

    Idle power, the power limit, a few kernels of each kind and two small networks are compared with what is predicted
    for them. What is found is written to ~/.config/tessera/calibration/ (or $XDG_CONFIG_HOME); `tessera predict` then
    uses it, and says so. Nothing of the GPU's state is changed: no clock, no limit. Delete the file to undo it.
    """
    from ..estimate.calibration import save

    found = _measure(device, seconds, force)
    path = None if dry_run else save(found.calibration)
    if as_json:
        _print_json(found, path)
        return 0
    from ..report.calibrate import print_calibration
    from ..report.screen import Console

    print_calibration(found, path, Console(highlight=False))
    return 0


def _measure(device: int, seconds: float, force: bool) -> CalibrationResult:
    from ..estimate.calibrate import calibrate
    from ..estimate.calibration_bench import CudaBench

    with CudaBench(device) as bench:
        return calibrate(bench, seconds=seconds, progress=_say, force=force)


def _say(done: int, steps: int, name: str) -> None:
    """Where we are, on standard error: one line that is written over in a terminal, a line each in a log."""
    line = f"[{done + 1}/{steps}] {name}"
    if not sys.stderr.isatty():
        say(line, err=True)
        return
    say(f"\r\x1b[K{line[:100]}", err=True, nl=False)
    if done + 1 == steps:
        say("\r\x1b[K", err=True, nl=False)


def _print_json(found: CalibrationResult, path: Path | None) -> None:
    import msgspec

    data = {
        "calibration": found.calibration,
        "points": found.rows,
        "seconds": found.seconds,
        "path": str(path) if path else None,
    }
    click.echo(msgspec.json.encode(data).decode())
