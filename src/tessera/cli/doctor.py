"""`tessera doctor`."""

from __future__ import annotations

import click


@click.command("doctor")
@click.option("--sensor", "sensors", multiple=True, help="Look at this sensor only (may be repeated).")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(sensors: tuple[str, ...], as_json: bool) -> int:
    """Show every sensor of this machine, its true resolution, what is missing, and the fix.

    \b
    Example:
      tessera doctor

    Also says whether GPU performance counters may be read and whether the host's clock is synchronised.
    Nothing is changed. Exit code 0 when something here measures power, 1 when joules would be modelled.
    """
    from ..sensors.health import examine

    health = examine(sensors or None)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(health).decode())
    else:
        from rich.console import Console

        from ..report.doctor import print_health

        print_health(health, Console(highlight=False))
    return 0 if health.measures else 1
