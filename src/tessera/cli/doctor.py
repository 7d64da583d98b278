"""`tessera doctor`."""

from __future__ import annotations

import click


@click.command("doctor")
@click.option("--sensor", "sensors", multiple=True, help="Look at this sensor only (may be repeated).")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--restore", is_flag=True, help="Put back the power limits and clocks that killed processes left.")
def command(sensors: tuple[str, ...], as_json: bool, restore: bool) -> int:
    """Show every sensor of this machine, its true resolution, what is missing, and the fix.

    \b
    Example:
      tessera doctor
      sudo tessera doctor --restore

    Also says whether GPU performance counters may be read, whether the host's clock is synchronised, and which power
    limits or clocks processes of Tessera hold or, being killed, left behind. Nothing is changed without --restore.
    Exit code 0 when something here measures power, 1 when joules would be modelled; with --restore, 0 when nothing is
    left to put back, 1 otherwise.
    """
    from .. import actuators
    from ..sensors.health import examine

    control = actuators.restore_outstanding() if restore else actuators.list_outstanding()
    health = examine(sensors or None)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({**msgspec.to_builtins(health), "control": control}).decode())
    else:
        from ..report.doctor import print_health
        from ..report.screen import readable

        print_health(health, readable(), control, restored=restore)
    if restore:
        return 1 if any(c.error for c in control) else 0
    return 0 if health.measures else 1
