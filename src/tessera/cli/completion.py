"""`tessera completion SHELL`: click's own script, and what it completes beyond commands and options."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

PROGRAMS = ("tessera", "tessera-prof")


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script that completes commands, options, chips and analyses in a shell.

    \b
    Examples:
      echo 'eval "$(tessera completion bash)"' >> ~/.bashrc
      echo 'eval "$(tessera completion zsh)"' >> ~/.zshrc
      tessera completion fish > ~/.config/fish/completions/tessera.fish

    It holds in the next shell. A script asks `tessera` itself what comes next, so it need not be renewed. Bash must be
    4.4 or newer; zsh must have loaded compinit before.
    """
    from .main import cli
    from .prof import command as prof

    found = get_completion_class(shell)
    assert found is not None  # the three above are click's own
    for program, commands in zip(PROGRAMS, (cli, prof), strict=True):
        variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
        script = found(commands, {}, program, variable)
        # Not source(): it runs bash to see its version, which may not be the shell that will read this.
        click.echo(script.source_template % script.source_vars())


def devices(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Chips of the catalogue; after a comma the next one, for options that take several."""
    from ..errors import TesseraError
    from ..hardware import catalogue

    before, comma, word = incomplete.rpartition(",")
    try:
        known = catalogue()
    except TesseraError:  # a file of the user's own that cannot be read: nothing to offer, and no place to say so
        return []
    given = before.split(",")
    return [
        CompletionItem(f"{before}{comma}{name}", help=device.name)
        for name, device in known.items()
        if name.startswith(word.lower()) and name not in given
    ]


def device(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """One chip."""
    return [] if "," in incomplete else devices(ctx, param, incomplete)


def sensors(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The sensors that may be asked for by name."""
    from ..sensors.discover import KINDS

    return [CompletionItem(name) for name in (*KINDS, "replay:") if name.startswith(incomplete)]
