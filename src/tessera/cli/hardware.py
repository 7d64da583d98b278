"""`tessera hardware`."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from ..device import Kind
from .main import NearestGroup
from .options import ExistingPath, WordChoice, complete_device, json_option, print_json


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
        print_json(devices)
        return
    from ..report.console import open_console
    from ..report.hardware import print_devices

    print_devices(devices, open_console())


@command.command("add")
@click.argument("file", type=ExistingPath())
@click.option("--force", is_flag=True, help="Replace a file of the same chip.")
@json_option
def add(file: Path, force: bool, as_json: bool) -> None:
    """Add a chip (a TOML file), or a calibration that somebody measured (a JSON file of `tessera calibrate --out`).

    \b
    Example:
      tessera hardware add acme-900.toml
      tessera hardware add my-a100.json

    The file is checked, then copied below ~/.config/tessera (or $XDG_CONFIG_HOME). Of a calibration, the factors of the
    board are used, not those of its host. Delete the copy to undo it.
    """
    if file.suffix.lower() == ".json":
        from ..estimate.calibration import receive

        calibration, path = receive(file, replace_own=force)
        name, what = calibration.device, f"the calibration of {calibration.device}, measured on {calibration.board}"
    else:
        from ..hardware import add_file

        device, path = add_file(file, force=force)
        name, what = device.id, device.name
    if as_json:
        print_json({"device": name, "path": str(path)})
        return
    from ..output import remove_controls

    click.echo(remove_controls(f"added {what}: {path}"))
    click.echo(f"next  tessera predict resnet18 --on {name}")


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
        print_json(device)
        return
    from ..report.console import open_console
    from ..report.hardware import print_device

    print_device(device, open_console())
