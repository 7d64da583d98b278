"""What was typed wrong, in our words: Click's usage errors with what, why and fix, and no dump of the usage.

Every command raises `ArgumentError` or lets Click raise its own; `entry.enter` brings both here and ends with 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click
from click.types import FloatParamType, IntParamType

from ..errors import ArgumentError, UnitError, did_you_mean
from .missing import missing

_T = TypeVar("_T")
_QUOTED = re.compile(r"""(?P<quote>['"])(?P<given>.*?)(?P=quote)""")  # by the quote that begins it: "it's"


def explained(exc: click.UsageError) -> ArgumentError:
    """The same mistake as an error of ours."""
    path = exc.ctx.command_path if exc.ctx is not None else "tessera"
    shown = f"`{path} --help` shows how it is used"
    if isinstance(exc, click.NoSuchOption):
        return ArgumentError(
            f"{path} has no option {exc.option_name}{_nearest(exc)}", fix=f"`{path} --help` lists them"
        )
    if isinstance(exc, click.MissingParameter):
        return ArgumentError(f"{path} needs {_name(exc)}", fix=f"{_usage(exc)}; `{path} --help` says more")
    if isinstance(exc, click.BadOptionUsage) and exc.ctx is None:  # Click's parser does not say of which command
        return ArgumentError(f"{exc.option_name} needs a value", fix="the command's --help says which")
    message = exc.message.rstrip(".")
    if not isinstance(exc, click.BadParameter):
        return ArgumentError(message[:1].lower() + message[1:], fix=shown)
    name, kind = _name(exc), exc.param.type if exc.param is not None else None
    if isinstance(kind, click.Choice):
        known = list(map(str, kind.choices))
        given = _QUOTED.match(message)
        near = did_you_mean(given["given"], known) if given else ""
        return ArgumentError(f"{name}: {given[0] if given else message} is not known{near}", fix=_one_of(known))
    if isinstance(kind, IntParamType | FloatParamType):
        return _number(name, message, kind)
    if isinstance(kind, click.Path):
        return _path(name, message, shown)
    return ArgumentError(f"{name}: {message[:1].lower() + message[1:]}", fix=shown)


def _path(name: str, message: str, otherwise: str) -> ArgumentError:
    """A file that is not there is answered with those that are; the rest is Click's own message."""
    given = _QUOTED.search(message)
    if given is None or Path(given["given"]).exists():
        return ArgumentError(f"{name}: {message[:1].lower() + message[1:]}", fix=otherwise)
    return missing(Path(given["given"]), (), f"give {name} a file that is there")


def _name(exc: click.BadParameter) -> str:
    """The option's longest spelling, or the argument's name in capitals, as the usage shows it."""
    if exc.param is None:
        return str(exc.param_hint or "the value")
    if isinstance(exc.param, click.Option):
        return max(exc.param.opts, key=len)
    return exc.param.metavar or str(exc.param.name).upper()


def _usage(exc: click.MissingParameter) -> str:
    """How the command is typed, with the option that is missing."""
    if exc.ctx is None:
        return "give it"
    typed = exc.ctx.command.get_usage(exc.ctx).removeprefix("Usage: ")
    if not isinstance(exc.param, click.Option):
        return typed
    return typed.replace("[OPTIONS]", f"{_name(exc)} {exc.param.make_metavar(exc.ctx)} [OPTIONS]")


def _nearest(exc: click.NoSuchOption) -> str:
    """From all options there are: Click offers those that look alike, and `--help` for `--htlm` before `--html`."""
    known = [o for p in exc.ctx.command.get_params(exc.ctx) for o in p.opts] if exc.ctx is not None else []
    return did_you_mean(exc.option_name, known)


def _one_of(known: list[str]) -> str:
    return f"one of: {', '.join(known)}"


def _number(name: str, message: str, kind: click.ParamType) -> ArgumentError:  # type: ignore[type-arg]
    """Click says `1.0 is not in the range x>=5`, or `'x' is not a valid integer range`: here the fix says the range."""
    given = _QUOTED.match(message)
    sort = "a whole number" if isinstance(kind, IntParamType) else "a number"
    what = f"{given[0]} is not {sort}" if given else re.sub(r" is not in the range .*$", " is out of range", message)
    return ArgumentError(f"{name}: {what}", fix=f"give {sort}{_range(kind)}")


def _range(kind: click.ParamType) -> str:  # type: ignore[type-arg]
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return ""
    if kind.min is not None and kind.max is not None:
        return f" from {kind.min:g} to {kind.max:g}"
    if kind.min is not None:
        return f" above {kind.min:g}" if kind.min_open else f", {kind.min:g} or more"
    return f", {kind.max:g} or less" if kind.max is not None else ""


def quantity(parse: Callable[[str], _T]) -> Callable[[click.Context, click.Parameter, str | None], _T | None]:
    """A callback that reads an option such as 20ms or 64MiB, and names the option where it cannot."""

    def read(_ctx: click.Context, param: click.Parameter, value: str | None) -> _T | None:
        try:
            return None if value is None else parse(value)
        except UnitError as exc:
            exc.what = f"{max(param.opts, key=len)}: {exc.what}"
            raise

    return read
