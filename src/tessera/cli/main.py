"""The `tessera` command: a group that imports a command's module only when that command runs.

`run_command` turns every error into a message and an exit code, for `tessera` and `tessera-prof` alike.
"""

from __future__ import annotations

import atexit
import codecs
import gc
import importlib
import io
import sys
import warnings
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem, get_completion_class

from .. import __version__
from ..errors import ArgumentError, TesseraError, did_you_mean
from .failures import INTERRUPTED, ErrorStyle, accept_style, explain_usage_error, report_failure
from .options import WordChoice

# Name -> one line of help. The line stands here so that --help need not import the module of the same name.
COMMANDS = {
    "measure": "Run any command and report its energy: joules, watts, seconds.",
    "run": "Profile a script unchanged: joules by operator and kernel, one screen, an HTML page.",
    "report": "Show a recorded run again, and write its page.",
    "runs": "List the run files of a folder, compare two, delete old ones.",
    "export": "Write a recorded run as Chrome/Perfetto JSON, CSV, OTLP or Parquet.",
    "attribute": "Assign the joules of a power log to the kernels of a trace.",
    "merge": "Merge the runs of several ranks into one, on one clock.",
    "analyze": "Explain a trace: breakdown, roofline, stalls, collectives, power, advice ...",
    "diff": "Compare two runs, and show whether the difference is more than noise.",
    "predict": "Predict latency, energy and memory of a model on a chip, before it runs there.",
    "plan": "Choose how to divide training over many GPUs: tp, pp, dp ..., time, joules, memory, why.",
    "policy": "Explain power policies, and find what in them cannot work.",
    "simulate": "Simulate the power of a data centre: jobs, racks, breakers, heat, policies, a utility's spec.",
    "calibrate": "Measure this machine's GPU and host, so that predictions match them.",
    "doctor": "Show every sensor of this machine, what is missing, and how to fix it.",
    "selftest": "Check Tessera's accuracy on this machine, in a minute.",
    "governor": "Own the power budget of a rack: leases of watts for jobs, caps for nodes.",
    "watch": "Show power, clocks and temperature live.",
    "metrics": "Serve Prometheus metrics: joules as counters.",
    "fleet": "Place and move jobs by temperature, explain power events, watch racks and nodes.",
    "hardware": "Show the chips in the catalogue: peaks, memory, watts, each with its source.",
    "completion": "Print the script that completes commands, options and chips in a shell.",
}
ASCII_ERRORS = "tessera-ascii"
"""The name of our error handler that replaces non-ASCII characters, for `open(..., errors=ASCII_ERRORS)`."""

_BARS = dict(zip("▁▂▃▄▅▆▇█░▒▓▏▎▍▌▋▊▉", "_.:=+*%#.+%:::####", strict=True))
_LINES = dict.fromkeys("─━═╴╶╸╺–—−", "-") | dict.fromkeys("│┃║╵╷", "|")
_SIGNS = {"±": "+-", "µ": "u", "μ": "u", "°": "", "×": "x", "·": "-", "•": "*", "✓": "+", "✗": "x", "★": "*"}
_ARROWS = {"→": "->", "←": "<-", "►": ">"}
_EMOJI = {"✅": "+", "❌": "x", "⚠": "!", "\ufe0f": ""}
_QUOTES = {"‘": "'", "’": "'", "“": '"', "”": '"'}
_ASCII = {**_BARS, **_LINES, **_SIGNS, **_ARROWS, **_EMOJI, **_QUOTES}


class NearestGroup(click.Group):
    """A group that answers a wrong name with the nearest one. All its commands take --debug."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in names:
            group = ctx.command_path
            fix = f"`{group} --help` lists all {len(names)}" if len(names) > 5 else f"one of: {', '.join(names)}"
            raise ArgumentError(f"there is no command {args[0]!r}{did_you_mean(args[0], names)}", fix=fix)
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else accept_style(command), rest


class LazyGroup(NearestGroup):
    """Imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands or cmd_name not in COMMANDS:
            return self.commands.get(cmd_name)
        command: click.Command = importlib.import_module(f".{cmd_name}", __package__).command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete from the table above: importing every command would take a third of a second at each key."""
        names = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tessera")
@click.option("--config", "settings", multiple=True, metavar="KEY=VALUE", help="A setting, such as price_per_kwh=0.30.")
def cli(settings: tuple[str, ...]) -> None:
    """Where every joule goes: measure, predict, explain and act on the energy of GPU programs.

    \b
    Example:
      tessera measure -- python train.py
    """
    from .. import config

    for setting in settings:
        config.set_value(setting)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config.load()  # report a mistake in a settings file before the work
    for warning in said:
        click.echo(f"warning: {warning.message}", err=True)


@cli.command("completion")
@click.argument("shell", type=WordChoice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, options, chips and analyses in a shell.

    \b
    Examples:
      echo 'eval "$(tessera completion bash)"' >> ~/.bashrc
      echo 'eval "$(tessera completion zsh)"' >> ~/.zshrc
      tessera completion fish > ~/.config/fish/completions/tessera.fish

    It takes effect in the next shell, and need not be renewed after an update: the script asks `tessera` itself. Bash
    must be 4.4 or newer; zsh must have loaded compinit before.
    """
    from .prof import command as prof

    kind = get_completion_class(shell)
    assert kind is not None  # click has all three
    for program, commands in (("tessera", cli), ("tessera-prof", prof)):
        variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
        script = kind(commands, {}, program, variable)
        # Not source(): it runs bash to see its version, which may not be the shell that will read this.
        click.echo(script.source_template % script.source_vars())


def main(argv: Sequence[str] | None = None) -> None:
    """Run `tessera`: its entry point."""
    run_command(cli, "tessera", argv)


def run_command(command: click.Command, name: str, argv: Sequence[str] | None = None) -> None:
    """Run a command; print errors as messages (as JSON with --json), and a traceback only with --debug.

    Exit code 2: an option, a value or a file cannot be used. Exit code 1: a run, a prediction or a check failed.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    spare_collections()
    replace_non_ascii()
    style = ErrorStyle()
    try:
        code = accept_style(command).main(args, prog_name=name, standalone_mode=False, obj=style)
    except click.exceptions.Abort:
        code = INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as exc:  # the help itself, and no mistake to explain
        exc.show(file=sys.stderr)
        code = exc.exit_code
    except click.UsageError as exc:
        # The options were not read to the end: --json may come after the mistake.
        as_json = style.as_json or "--json" in args[: args.index("--") if "--" in args else None]
        code = report_failure(explain_usage_error(exc), as_json=as_json)
    except TesseraError as exc:
        if style.debug:
            raise
        code = report_failure(exc, as_json=style.as_json)
    except BrokenPipeError:  # `tessera ... | head`: not an error of ours
        sys.stderr.close()
        code = 0
    except OSError as exc:
        if style.debug:
            raise
        what = "cannot write the output" if exc.filename is None else f"cannot use {exc.filename}"
        error = TesseraError(what, why=exc.strerror, fix="run it again with --debug to see where")
        code = report_failure(error, as_json=style.as_json)
    sys.exit(code if isinstance(code, int) else 0)


def spare_collections() -> None:
    """Collect garbage less often, and not at the end: it took a fifth of the CPU time of `tessera predict`."""
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)


# -- terminals that have ASCII only (LC_ALL=C): "84 +-51 us", not "84 ? 51 ?s" ----------------------------------------


def replace_non_ascii() -> None:
    """Make standard output and error write something readable for characters they cannot encode."""
    codecs.register_error(ASCII_ERRORS, _encode_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ASCII_ERRORS)


def to_ascii(text: str) -> str:
    """Return the text in ASCII: accents are dropped, and "?" stands for what has no equivalent."""
    import unicodedata

    def convert(letter: str) -> str:
        if letter.isascii() or letter in _ASCII:
            return _ASCII.get(letter, letter)
        if "\u2500" <= letter <= "\u257f":
            return "+"  # corners and crossings
        if unicodedata.combining(letter):
            return ""  # an accent by itself, on the letter before it
        return unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode().strip() or "?"

    return "".join(map(convert, text))


def _encode_ascii(error: UnicodeError) -> tuple[str, int]:
    """The replacement takes the spaces after it where it is longer than the original, so that columns stay aligned."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text, end = error.object, error.end
    replacement = to_ascii(text[error.start : end])
    rest = text[end:].lstrip(" ")
    spaces = len(text) - end - len(rest)
    free = spaces if text[end - 1] == "±" and rest[:1].isdigit() else spaces - 1  # "+-51", but "a -> b"
    return replacement, end + max(0, min(len(replacement) - (end - error.start), free))
