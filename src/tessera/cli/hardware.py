"""`tessera hardware`."""

from __future__ import annotations

from typing import get_args

import click

from ..device import Kind
from ..errors import ArgumentError, did_you_mean
from . import completion


class NearestGroup(click.Group):
    """A group that answers a wrong subcommand with the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            near = did_you_mean(args[0], self.commands)
            raise ArgumentError(
                f"there is no command {args[0]!r}{near}", fix=f"one of: {', '.join(self.list_commands(ctx))}"
            )
        return super().resolve_command(ctx, args)


@click.group("hardware", cls=NearestGroup)
def command() -> None:
    """Show the chips we know: peaks, memory, watts, and where each number comes from.

    \b
    Example:
      tessera hardware show h200

    A file of your own in ~/.config/tessera/hardware/ (or $XDG_CONFIG_HOME) adds a chip, or replaces figures of one.
    """


@command.command("list")
@click.option("--kind", type=click.Choice(get_args(Kind)), help="Only this kind of device.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def list_devices(kind: str | None, as_json: bool) -> None:
    """List every device, one a line.

    \b
    Example:
      tessera hardware list --kind gpu

    Peaks are dense. "~" marks an assumed number, "-" an unknown one; `tessera hardware show` says why.
    """
    from ..hardware import catalogue

    devices = [device for device in catalogue().values() if kind in (None, device.kind)]
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(devices).decode())
        return
    from ..report.hardware import print_devices
    from ..report.screen import readable

    print_devices(devices, readable())


@command.command("show")
@click.argument("name", shell_complete=completion.device)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def show(name: str, as_json: bool) -> None:
    """Show one device with every figure, its uncertainty and its source.

    \b
    Example:
      tessera hardware show jetson-orin@15W

    NAME is an id or an alias; "@15W" after it takes the device at that power mode. Assumed figures are marked.
    """
    from ..hardware import lookup

    device = lookup(name)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(device).decode())
        return
    from ..report.hardware import print_device
    from ..report.screen import readable

    print_device(device, readable())
