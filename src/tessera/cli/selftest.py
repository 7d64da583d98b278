"""`tessera selftest`."""

from __future__ import annotations

import sys

import click

from .options import print_json

MOST = 2
"""No check begins that would end later than this many times `--seconds`: loading CUDA may take half a minute."""


@click.command("selftest")
@click.option("--seconds", type=click.FloatRange(min=5), default=45.0, show_default=True, help="About how long.")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def command(seconds: float, as_json: bool) -> int:
    """Check Tessera's accuracy on this machine: the error of each figure, pass or fail, to paste into an issue.

    \b
    Example:
      tessera selftest

    Compares samples with the energy counter, joules attributed to kernels with each kernel measured alone, and
    predictions with measurements, and shows what measuring costs. Checks that this machine cannot do are listed. Exit
    code 1 if a check fails.
    """
    click.echo(
        f"six checks take about {seconds:.0f} s; none begins that would end after {MOST * seconds:.0f} s", err=True
    )
    from ..selftest import run_checks, to_dict

    checks = run_checks(budget_s=seconds, limit_s=MOST * seconds, progress=_print_progress)
    if sys.stderr.isatty():
        print("\r\033[K", file=sys.stderr, end="", flush=True)
    if as_json:
        print_json(to_dict(checks))
    else:
        from ..report.console import open_console
        from ..report.doctor import print_checks

        print_checks(checks, _describe_machine(), open_console())
    return int(any(c.verdict == "fail" for c in checks))


def _print_progress(done: int, total: int, name: str) -> None:
    """Print one line that is overwritten on a terminal; a line each in a log."""
    begin, end = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
    print(f"{begin}{done + 1}/{total} {name} ...", file=sys.stderr, end=end, flush=True)


def _describe_machine() -> str:
    import platform

    from .. import __version__
    from ..monitor.core import default

    sensors = ", ".join(f"{d.name} ({d.source})" for d in default().sampler.domains if d.counted) or "no sensor"
    return f"tessera {__version__}, Python {platform.python_version()}, {platform.machine()}; {sensors}"
