"""The `tessera` command: a group whose commands are imported only when they are run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from .. import __version__
from ..errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Name -> (module, one line of help). The line stands here so that --help need not import the module.
COMMANDS = {
    "measure": ("measure", "Run any command and say what it cost: joules, watts, seconds."),
    "run": ("run", "Profile a script unchanged: joules by operator and kernel, one screen, an HTML page."),
    "report": ("report", "Show a recorded run again, and write its page."),
    "export": ("export", "Write a recorded run as Chrome/Perfetto JSON, CSV, OTLP or Parquet."),
    "attribute": ("attribute", "Assign the joules of a power log to the kernels of a trace."),
    "merge": ("merge", "Merge the runs of several ranks into one, on one clock."),
    "analyze": ("analyze", "Explain a trace: breakdown, roofline, stalls, collectives, power, advice ..."),
    "diff": ("diff", "What changed between two runs, and whether it is more than noise."),
    "predict": ("predict", "Predict latency, energy and memory of a model on a chip, before it runs there."),
    "calibrate": ("calibrate", "Measure the GPU and host at hand, so that predictions are those of this machine."),
    "doctor": ("doctor", "Show every sensor of this machine, what is missing, and the fix."),
    "selftest": ("selftest", "Check Tessera's own figures on this machine, in a minute."),
    "watch": ("watch", "Show power, clocks and temperature live."),
    "metrics": ("metrics", "Serve Prometheus metrics: joules as counters."),
    "hardware": ("hardware", "Show the chips we know: peaks, memory, watts, each with its source."),
    "completion": ("completion", "Print the script that completes commands, options and chips in a shell."),
}


class LazyGroup(click.Group):
    """Imports a command's module when it is used, and answers a wrong name with the nearest one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f".{COMMANDS[cmd_name][0]}", __package__)
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = did_you_mean(args[0], COMMANDS)
            raise ArgumentError(f"there is no command {args[0]!r}{near}", fix="`tessera --help` lists them")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """From the table above: importing every command takes a third of a second, at each press of a key."""
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tessera")
@click.option("--debug", is_flag=True, help="Show a traceback when something goes wrong.")
def cli(debug: bool) -> None:
    """Where every joule goes: measure, predict, explain and act on the energy of GPU programs.

    \b
    Example:
      tessera measure -- python train.py
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `tessera`."""
    from .entry import enter

    enter(cli, "tessera", argv)
