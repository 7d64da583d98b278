"""`tessera calibrate`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .options import FILE, check_writable, print_json

LEAST_BURSTS_S = 6.0


@click.command("calibrate")
@click.option("--device", type=int, default=0, show_default=True, help="Which GPU, by torch's number.")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="About how long to measure.")
@click.option("--force", is_flag=True, help="Measure even if another process uses the GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print the calibration and its points as JSON.")
@click.option("--dry-run", is_flag=True, help="Measure and show, but write nothing.")
@click.option("--out", type=FILE, help="Also write the calibration to this file, to send it to others.")
def command(device: int, seconds: float, force: bool, as_json: bool, dry_run: bool, out: Path | None) -> int:
    """Measure this machine's GPU and host, so that predictions match them.

    \b
    Example:
      tessera calibrate
      tessera calibrate --out my-a100.json     # others: tessera hardware add my-a100.json

    Compares idle power, the power limit, a few kernels of each kind and two small networks with their predictions, and
    writes the correction to ~/.config/tessera/calibration/ (or $XDG_CONFIG_HOME). `tessera predict` then uses it, and
    its report says so. It changes no clock and no limit of the GPU. Delete the file to undo the calibration.

    Then it learns from bursts of kernels how late the board's power sensor shows a change, and keeps that for all
    later measurements (`tessera doctor` shows it).
    """
    from ..estimate.calibrate import calibrate
    from ..estimate.calibration import save, write_calibration
    from ..estimate.calibration_bench import CudaBench

    if out is not None:
        check_writable(out)
    with CudaBench(device) as bench:
        result = calibrate(bench, seconds=seconds, progress=_print_progress, force=force)
    path = None if dry_run else save(result.calibration)
    if not dry_run:
        _learn_sensor(device, max(LEAST_BURSTS_S, 0.15 * seconds))
    if out is not None:
        write_calibration(result.calibration, out)
        print(f"wrote {out}: it names the board, driver, torch and CPU model, and nothing else of this machine; "
              "others add it by `tessera hardware add`", file=sys.stderr)  # fmt: skip
    if as_json:
        data = {"calibration": result.calibration, "points": result.rows, "time_s": result.seconds}
        print_json({**data, "path": str(path) if path else None})
        return 0
    from ..report.calibrate import print_calibration
    from ..report.console import Console

    print_calibration(result, path, Console(highlight=False))
    return 0


def _learn_sensor(device: int, seconds: float) -> None:
    """Run bursts of kernels under a session, which keeps what they show of the sensor; print that on standard error."""
    import torch

    from ..profile.mixture import make_kernels, run_mixture, time_kernels
    from ..report.doctor import lag_and_blur

    if not torch.cuda.is_available():
        return
    print(f"learning the response of the power sensor, {seconds:.0f} s", file=sys.stderr)
    with torch.cuda.device(device):
        kernels = make_kernels(torch)
        table, _ = run_mixture(torch, kernels, time_kernels(torch, kernels), seconds)
    found = [f"{domain.label}: {lag_and_blur(fit)}" for domain, fit in table.learnt]
    print("; ".join(found) or "the power samples could not tell it: the assumed response stays", file=sys.stderr)


def _print_progress(done: int, steps: int, name: str) -> None:
    """Print the current step on standard error: one overwritten line in a terminal, a line each in a log."""
    line = f"[{done + 1}/{steps}] {name}"
    if not sys.stderr.isatty():
        print(line, file=sys.stderr)
        return
    print(f"\r\x1b[K{line[:100]}", file=sys.stderr, end="", flush=True)
    if done + 1 == steps:
        print("\r\x1b[K", file=sys.stderr, end="", flush=True)
