"""`tessera hardware`."""

from __future__ import annotations

from typing import get_args

import click

from ..device import Kind
from .main import NearestGroup
from .options import WordChoice, complete_device, json_option


@click.group("hardware", cls=NearestGroup)
def command() -> None:
    """Show the chips in the catalogue: peaks, memory, watts, and the source of each number.

    \b
    Example:
      tessera hardware show h200

    A file of your own in ~/.config/tessera/hardware/ (or $XDG_CONFIG_HOME) adds a chip, or replaces figures of one.
    """


@command.command("list")
@click.option("--kind", type=WordChoice(get_args(Kind)), help="Only this kind of device.")
@json_option
def list_devices(kind: str | None, as_json: bool) -> None:
    """List every device, one per line.

    \b
    Example:
      tessera hardware list --kind gpu

    Peaks are dense. "~" marks an assumed number, "-" an unknown one; `tessera hardware show` explains each.
    """
    from ..hardware import catalogue

    devices = [device for device in catalogue().values() if kind in (None, device.kind)]
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(devices).decode())
        return
    from ..report.console import open_console
    from ..report.hardware import print_devices

    print_devices(devices, open_console())


@command.command("show")
@click.argument("name", shell_complete=complete_device)
@json_option
def show(name: str, as_json: bool) -> None:
    """Show one device with every figure, its uncertainty and its source.

    \b
    Example:
      tessera hardware show jetson-orin@15W

    NAME is an id or an alias; append "@15W" for the device in that power mode. Assumed figures are marked.
    """
    from ..hardware import lookup

    device = lookup(name)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(device).decode())
        return
    from ..report.console import open_console
    from ..report.hardware import print_device

    print_device(device, open_console())
