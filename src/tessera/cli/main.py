"""The `tessera` command: a group that imports a command's module only when that command runs.

`run_command` turns every error into a message and an exit code, for `tessera` and `tessera-prof` alike.
"""

from __future__ import annotations

import codecs
import importlib
import io
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem, get_completion_class

from .. import __version__
from ..errors import ArgumentError, RecordingError, TesseraError, did_you_mean
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
    "calibrate": "Measure this machine's GPU and host, so that predictions match them.",
    "doctor": "Show every sensor of this machine, what is missing, and how to fix it.",
    "selftest": "Check Tessera's accuracy on this machine, in a minute.",
    "watch": "Show power, clocks and temperature live.",
    "metrics": "Serve Prometheus metrics: joules as counters.",
    "hardware": "Show the chips in the catalogue: peaks, memory, watts, each with its source.",
    "completion": "Print the script that completes commands, options and chips in a shell.",
}
FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130
ASCII_ERRORS = "tessera-ascii"
"""The name of our replacement of non-ASCII characters, for `open(..., errors=ASCII_ERRORS)`."""

_BARS = dict(zip("▁▂▃▄▅▆▇█░▏▎▍▌▋▊▉", "_.:=+*%#.:::####", strict=True))
_LINES = dict.fromkeys("─━═╴╶╸╺–—−", "-") | dict.fromkeys("│┃║╵╷", "|")
_SIGNS = {"±": "+-", "µ": "u", "μ": "u", "°": "", "×": "x", "·": "-", "•": "*", "✓": "+", "★": "*", "→": "->"}
_QUOTES = {"←": "<-", "‘": "'", "’": "'", "“": '"', "”": '"'}
_ASCII = {**_BARS, **_LINES, **_SIGNS, **_QUOTES}


class NearestGroup(click.Group):
    """A group that answers a wrong name with the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in names:
            fix = f"`tessera --help` lists all {len(names)}" if len(names) > 5 else f"one of: {', '.join(names)}"
            raise ArgumentError(f"there is no command {args[0]!r}{did_you_mean(args[0], names)}", fix=fix)
        return super().resolve_command(ctx, args)


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
        """From the table above: importing every command takes a third of a second, at each press of a key."""
        names = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tessera")
@click.option("--debug", is_flag=True, help="Show a traceback when something goes wrong.")
def cli(debug: bool) -> None:
    """Where every joule goes: measure, predict, explain and act on the energy of GPU programs.

    \b
    Example:
      tessera measure -- python train.py
    """


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
    """Entry point of `tessera`."""
    run_command(cli, "tessera", argv)


def run_command(command: click.Command, name: str, argv: Sequence[str] | None = None) -> None:
    """Run a command; print errors as messages, and a traceback only with --debug.

    Exit code 2: an option, a value or a file cannot be used. Exit code 1: a run, a prediction or a check failed.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    replace_non_ascii()
    # Only before the command's own arguments: `tessera measure -- prog --debug` is prog's flag.
    debug = "--debug" in args[: args.index("--")] if "--" in args else "--debug" in args
    try:
        code = command.main(args, prog_name=name, standalone_mode=False)
    except click.exceptions.Abort:
        code = INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as exc:  # the help itself, and no mistake to explain
        exc.show(file=sys.stderr)
        code = exc.exit_code
    except click.UsageError as exc:
        print_error(explain_usage_error(exc))
        code = WRONG_USAGE
    except TesseraError as exc:
        if debug:
            raise
        print_error(exc)
        code = WRONG_USAGE if isinstance(exc, ArgumentError | RecordingError) else FAILED
    except BrokenPipeError:  # `tessera ... | head`: not an error of ours
        sys.stderr.close()
        code = 0
    except OSError as exc:
        if debug:
            raise
        what = "cannot write the output" if exc.filename is None else f"cannot use {exc.filename}"
        print_error(f"{what}: {exc.strerror}\n  fix: run it again with --debug to see where")
        code = FAILED
    sys.exit(code if isinstance(code, int) else 0)


def print_error(error: Exception | str) -> None:
    """Print an error on standard error, without characters that would control the terminal."""
    text = "".join(c if c.isprintable() or c == "\n" else " " for c in str(error))
    print(f"error: {text}", file=sys.stderr)


def explain_usage_error(exc: click.UsageError) -> ArgumentError:
    """Click's usage error as one of ours: what is wrong and what to do, without printing the whole usage."""
    path = exc.ctx.command_path if exc.ctx is not None else "tessera"
    fix = f"run `{path} --help` to see how it is used"
    if isinstance(exc, click.NoSuchOption):
        # From all options: click's own list for `--htlm` offers `--help` before `--html`.
        options = [o for p in exc.ctx.command.get_params(exc.ctx) for o in p.opts] if exc.ctx is not None else []
        what = f"{path} has no option {exc.option_name}{did_you_mean(exc.option_name, options)}"
        return ArgumentError(what, fix=f"run `{path} --help` to see its options")
    if isinstance(exc, click.MissingParameter):
        return ArgumentError(f"{path} needs {_parameter_name(exc)}", fix=f"usage: {_usage_with(exc)}")
    if isinstance(exc, click.BadOptionUsage) and exc.ctx is None:  # click's parser does not know the command here
        return ArgumentError(
            f"{exc.option_name} needs a value", fix="run the command with --help to see which values it takes"
        )
    message = exc.message.rstrip(".")
    where = f"{_parameter_name(exc)}: " if isinstance(exc, click.BadParameter) else ""
    kind = getattr(getattr(exc, "param", None), "type", None)
    if isinstance(kind, click.IntRange | click.FloatRange):
        low = "from" if kind.max is not None else "above" if kind.min_open else "of at least"
        fix = f"give a number {low} {kind.min:g}"
        fix += f" to {kind.max:g}" if kind.max is not None else ""
        message = message.replace("a valid integer range", "a whole number").replace("a valid float range", "a number")
    return ArgumentError(f"{where}{message[:1].lower()}{message[1:]}", fix=fix)


def _parameter_name(exc: click.UsageError) -> str:
    """The option's longest spelling, or the argument's name in capitals, as the usage shows it."""
    param = getattr(exc, "param", None)
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return "the value" if param is None else param.metavar or str(param.name).upper()


def _usage_with(exc: click.MissingParameter) -> str:
    """How the command is typed, with the option that is missing."""
    if exc.ctx is None:
        return "--help"
    usage = exc.ctx.command.get_usage(exc.ctx).removeprefix("Usage: ")
    if not isinstance(exc.param, click.Option):
        return usage
    return usage.replace("[OPTIONS]", f"{_parameter_name(exc)} {exc.param.make_metavar(exc.ctx)} [OPTIONS]")


# -- terminals that have ASCII only (LC_ALL=C): "84 +-51 us", not "84 ? 51 ?s" ----------------------------------------


def replace_non_ascii() -> None:
    """Make standard output and error write something readable for characters they cannot encode."""
    codecs.register_error(ASCII_ERRORS, _encode_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ASCII_ERRORS)


def to_ascii(text: str) -> str:
    """The text in ASCII: accents are dropped, and "?" stands for what has no equivalent."""
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
