"""`tessera selftest`."""

from __future__ import annotations

import click

from .plain import say


@click.command("selftest")
@click.option(
    "--seconds", type=click.FloatRange(min=5), default=45.0, show_default=True, help="About how long it takes."
)
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def command(seconds: float, as_json: bool) -> int:
    """Check Tessera's own figures on this machine: how far off, pass or fail, to paste into an issue.

    \b
    Example:
      tessera selftest

    Compares samples with the energy counter, joules given to kernels with each kernel alone, predictions with
    measurements, and says what measuring costs. What a machine cannot check is named. Exits 1 where a check fails.
    """
    from ..selftest import run_checks, to_dict

    checks = run_checks(budget_s=seconds, progress=None if as_json else _progress)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(to_dict(checks)).decode())
    else:
        from ..report.screen import readable
        from ..report.selftest import print_checks

        print_checks(checks, _machine(), readable())
    return int(any(c.verdict == "fail" for c in checks))


def _progress(done: int, total: int, name: str) -> None:
    import sys

    if sys.stderr.isatty():
        say(f"\r\033[K{done + 1}/{total} {name}", nl=False, err=True)


def _machine() -> str:
    import platform

    from .. import __version__
    from ..monitor.core import default

    sensors = ", ".join(f"{d.name} ({d.source})" for d in default().sampler.domains if d.counted) or "no sensor"
    return f"tessera {__version__}, Python {platform.python_version()}, {platform.machine()}; {sensors}"
