"""How the commands begin and end: what was typed, where output goes, and errors as messages with an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ..errors import ArgumentError, RecordingError, TesseraError
from . import plain
from .plain import printable, say
from .usage import explained

FAILED, WRONG_USAGE = 1, 2


def enter(command: click.Command, name: str, argv: Sequence[str] | None = None) -> None:
    """Run a command: errors become a message and an exit code; tracebacks only with --debug.

    2 is what was asked: an option, a value or a file that cannot be used. 1 is what happened: a run, a prediction or
    a check that failed.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    plain.reconfigure()
    # Only before the command's own arguments: `tessera measure -- prog --debug` is prog's flag.
    debug = "--debug" in args[: args.index("--")] if "--" in args else "--debug" in args
    try:
        code = command.main(args, prog_name=name, standalone_mode=False)
    except click.exceptions.Abort:
        code = 130
    except click.exceptions.NoArgsIsHelpError as exc:  # the help itself, and no mistake to explain
        exc.show(file=sys.stderr)
        code = exc.exit_code
    except click.UsageError as exc:
        say(f"error: {printable(str(explained(exc)))}", err=True)
        code = WRONG_USAGE
    except TesseraError as exc:
        if debug:
            raise
        say(f"error: {printable(str(exc))}", err=True)
        code = WRONG_USAGE if isinstance(exc, ArgumentError | RecordingError) else FAILED
    except BrokenPipeError:  # `tessera ... | head`: not an error of ours
        sys.stderr.close()
        code = 0
    except OSError as exc:
        if debug:
            raise
        what = "the output could not be written" if exc.filename is None else f"{exc.filename} could not be used"
        say(f"error: {what}: {exc.strerror}\n  fix: --debug shows where", err=True)
        code = FAILED
    sys.exit(code if isinstance(code, int) else 0)


def check_writable(path: Path, option: str = "", *, parents: bool = False) -> None:
    """Before the work, not after it: an hour's measurement must not end in a wrong path. Leaves no empty file."""
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as exc:
        fix = f"give {option} a path you may write".replace("  ", " ")
        raise ArgumentError(f"cannot write {path}", why=str(exc.strerror), fix=fix) from exc


def save_page(page: Path, text: str) -> bool:
    """Whether a page was written; says why where it was not: the screen is worth having all the same."""
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as exc:
        say(f"error: the page could not be written to {page}: {exc.strerror}", err=True)
        return False
    return True
