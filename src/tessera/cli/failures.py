"""How a command reports that it failed: words on standard error, or with --json one JSON object on standard output."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click

from ..errors import ArgumentError, RecordingError, TesseraError, did_you_mean
from ..output import remove_controls

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130


@dataclass(slots=True)
class ErrorStyle:
    """What the user asked for: tracebacks (--debug), JSON (--json). It is the `obj` of every context of click."""

    debug: bool = False
    as_json: bool = False


def accept_style(command: click.Command) -> click.Command:
    """Give a command --debug; read that and --json first, so that errors of other options follow them."""
    if all(p.name != "debug" for p in command.params):
        text = "Show a traceback when something goes wrong."
        command.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help=text))
    for param in command.params:
        if "--debug" in param.opts or "--json" in param.opts:
            param.is_eager, param.callback = True, _note_style
    return command


def _note_style(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    if value and isinstance(ctx.obj, ErrorStyle):
        setattr(ctx.obj, str(param.name), True)
    return value


def print_error(error: Exception | str) -> None:
    """Print an error on standard error, without characters that would control the terminal."""
    print(f"error: {remove_controls(str(error))}", file=sys.stderr)


def report_failure(error: TesseraError | OSError, code: int | None = None, *, as_json: bool = False) -> int:
    """Report why a command failed, in the form that was asked for; return its exit code."""
    if code is None:
        code = WRONG_USAGE if isinstance(error, ArgumentError | RecordingError) else FAILED
    if not as_json:
        print_error(error)
        return code
    import msgspec

    about = {"kind": type(error).__name__, "what": str(error), "why": None, "fix": None, "exit_code": code}
    if isinstance(error, TesseraError):
        about |= {"what": error.what, "why": error.why, "fix": error.fix}
    try:
        click.echo(msgspec.json.encode({"error": about}).decode())
    except OSError:  # standard output is what could not be written
        print_error(error)
    return code


def explain_usage_error(exc: click.UsageError) -> ArgumentError:
    """Return click's usage error as one of ours: what is wrong and what to do, without the whole usage."""
    path = exc.ctx.command_path if exc.ctx is not None else "tessera"
    fix = f"run `{path} --help` to see how it is used"
    if isinstance(exc, click.NoSuchOption):
        # From all options, because click's own list for `--htlm` offers `--help` before `--html`.
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
    """Return the option's longest spelling, or the argument's name in capitals, as the usage shows it."""
    param = getattr(exc, "param", None)
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return "the value" if param is None else param.metavar or str(param.name).upper()


def _usage_with(exc: click.MissingParameter) -> str:
    """Return how the command is typed, with the option that is missing."""
    if exc.ctx is None:
        return "--help"
    usage = exc.ctx.command.get_usage(exc.ctx).removeprefix("Usage: ")
    if not isinstance(exc.param, click.Option):
        return usage
    return usage.replace("[OPTIONS]", f"{_parameter_name(exc)} {exc.param.make_metavar(exc.ctx)} [OPTIONS]")
