"""`tessera doctor`."""

from __future__ import annotations

import dataclasses

import click

from .options import json_option, print_json


@click.command("doctor")
@click.option("--sensor", "sensors", multiple=True, help="Check only this sensor (may be repeated).")
@json_option
@click.option("--restore", is_flag=True, help="Put back the power limits and clocks that killed processes left.")
def command(sensors: tuple[str, ...], as_json: bool, restore: bool) -> int:
    """Show every sensor of this machine, its true resolution, what is missing, and how to fix it.

    \b
    Example:
      tessera doctor
      sudo tessera doctor --restore

    Also shows whether GPU performance counters are readable, whether the host's clock is synchronised, the lease of a
    power governor, and which power limits or clocks Tessera's processes hold now, or left behind when they were killed,
    or nobody holds although they are not the default. Changes nothing without --restore. Exit code: 0 if a sensor here
    measures power, 1 if joules would be modelled; with --restore, 0 if everything was put back, 1 otherwise.
    """
    from .. import actuators
    from ..runtime.node_lease import check_lease
    from ..sensors.health import examine

    control = actuators.restore_outstanding() if restore else actuators.list_outstanding()
    health = examine(sensors or None)
    found = [*actuators.check_limits(), *actuators.check_smoothing(), *check_lease()]
    health = dataclasses.replace(health, checks=[*health.checks, *found])
    if as_json:
        import msgspec

        print_json({**msgspec.to_builtins(health), "control": control})
    else:
        from ..report.console import open_console
        from ..report.doctor import print_health

        print_health(health, open_console(), control, restored=restore)
    if restore:
        return 1 if any(c.error for c in control) else 0
    return 0 if health.measures else 1
