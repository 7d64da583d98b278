"""Options that several commands share: their types, their completion in a shell, and checks of paths."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ..errors import ArgumentError, TesseraError, UnitError, did_you_mean
from ..output import cannot_write, is_stream, replace_when_written
from .failures import print_error

FILE = click.Path(dir_okay=False, path_type=Path)
SUGGESTED = 5
"""How many files are suggested in place of one that does not exist: the line stays readable."""
RUNS = Path("runs")
"""Where `tessera run` writes its files; searched when the named folder has no run."""

_T = TypeVar("_T")
_Callback = Callable[[click.Context, click.Parameter, "str | None"], "_T | None"]


# -- types ----------------------------------------------------------------------------------------------------------


class WordChoice(click.Choice):  # type: ignore[type-arg]
    """One of several words; a wrong one is answered with the nearest. `former` words are taken, and not shown."""

    def __init__(self, words: Sequence[str], *, former: Sequence[str] = ()) -> None:
        super().__init__(words)
        self._former = former

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.choices or value in self._former:
            return value
        words = list(map(str, self.choices))
        option = f" for {max(param.opts, key=len)}" if isinstance(param, click.Option) else ""
        raise ArgumentError(
            f"unknown value {value!r}{option}{did_you_mean(str(value), words)}", fix=f"one of: {', '.join(words)}"
        )


class ExistingPath(click.Path):
    """A file or folder that exists; where it does not, the error suggests similar ones."""

    def __init__(self, *, folder: bool = False) -> None:
        super().__init__(dir_okay=folder, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not Path(value).exists():
            raise missing_file(Path(value))
        return super().convert(value, param, ctx)


def parse_option(parse: Callable[[str], _T]) -> _Callback[_T]:
    """Return a callback that parses an option such as 20ms or 64MiB; its errors name the option."""

    def callback(_ctx: click.Context, param: click.Parameter, value: str | None) -> _T | None:
        try:
            return None if value is None else parse(value)
        except UnitError as exc:
            exc.what = f"{max(param.opts, key=len)}: {exc.what}"
            raise

    return callback


# -- completion in a shell ------------------------------------------------------------------------------------------


def complete_devices(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return chips of the catalogue; after a comma the next one, for options that take several."""
    from ..hardware import catalogue

    before, comma, word = incomplete.rpartition(",")
    try:
        devices = catalogue()
    except TesseraError:  # a device file of the user cannot be read; a completion cannot show an error
        return []
    return [
        CompletionItem(f"{before}{comma}{name}", help=device.name)
        for name, device in devices.items()
        if name.startswith(word.lower()) and name not in before.split(",")
    ]


def complete_device(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a single chip."""
    return [] if "," in incomplete else complete_devices(ctx, param, incomplete)


def complete_sensors(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the sensors that can be requested by name."""
    from ..sensors.discover import KINDS

    return [CompletionItem(name) for name in (*KINDS, "replay:") if name.startswith(incomplete)]


def choice_option(name: str, words: Sequence[str], help: str) -> Callable[[Any], Any]:
    """Return an option that is one of some words; the first is the default."""
    return click.option(name, type=WordChoice(words), default=words[0], show_default=True, help=help)


def duration_option(name: str, help: str, default: str | None = None) -> Callable[[Any], Any]:
    """Return an option such as --duration 5s, in seconds; the parameter of --duration is `duration_s`."""
    from ..units import parse_duration

    return _quantity_option(name, "s", "TIME", parse_duration, help=help, default=default)


def power_option(name: str, help: str, default: str | None = None, *, required: bool = False) -> Callable[[Any], Any]:
    """Return an option such as --cap 20kW, in watts; the parameter of --cap is `cap_w`."""
    from ..units import parse_power

    return _quantity_option(name, "w", "POWER", parse_power, help=help, default=default, required=required)


def _quantity_option(
    name: str, unit: str, metavar: str, parse: Callable[[str], float], *, default: str | None, **more: Any
) -> Callable[[Any], Any]:
    parameter, callback = f"{name.removeprefix('--').replace('-', '_')}_{unit}", parse_option(parse)
    return click.option(
        name, parameter, metavar=metavar, callback=callback, default=default, show_default=bool(default), **more
    )


def is_typed(parameter: str) -> bool:
    """Return whether the user typed an option of the command that runs: its default does not count."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source is click.core.ParameterSource.COMMANDLINE


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    import msgspec

    click.echo(msgspec.json.encode(value).decode())


json_option = click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
sensor_option = click.option(
    "--sensor",
    "sensors",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_sensors,
    help="Use only this sensor (nvml, rapl, modelled, replay:FILE.csv, ...); may be repeated.",
)
scope_option = click.option(
    "--scope",
    type=WordChoice(["process", "machine"]),
    help="CPU energy of the program and its children, or of all that runs. "
    "[default: process if it is modelled, machine if it is measured]",
)


# -- paths ----------------------------------------------------------------------------------------------------------


def missing_file(path: Path, suffixes: tuple[str, ...] = (), otherwise: str = "check the path") -> ArgumentError:
    """Return the error for a file that does not exist, with similar files as the fix, or else `otherwise`.

    `suffixes` are those of the kind of file that is wanted; none means any kind.
    """
    why = None
    if path.is_dir():
        why = f"{path} is a folder"
    elif not path.parent.is_dir():
        why, otherwise = f"there is no folder {path.parent}", "check the path"
    near = did_you_mean(path.name, [p.name for p in _similar_files(path, _neighbours(path, suffixes))])
    return ArgumentError(f"there is no file {path}{near}", why=why, fix=suggest_files(path, suffixes) or otherwise)


def suggest_files(path: Path, suffixes: tuple[str, ...]) -> str:
    """Files of that kind in its folder: those with similar names, or else the newest; empty where there are none."""
    files = _neighbours(path, suffixes)
    if not files and ".tessera" in suffixes:
        files = _neighbours(RUNS / path.name, (".tessera",))
    files = [p for p in files if p.name != path.name or p.parent.resolve() != path.parent.resolve()]
    suggested = _similar_files(path, files)
    if not suggested and suffixes:  # the newest files of any kind would say nothing
        suggested = sorted(files, key=lambda p: p.stat().st_mtime, reverse=True)
    return f"one of: {', '.join(map(str, suggested[:SUGGESTED]))}" if suggested else ""


def _similar_files(path: Path, files: list[Path]) -> list[Path]:
    """Files with similar names, the nearest first; without their suffixes, which all of a kind have in common."""
    import difflib

    if path.suffix:  # of another kind only the same name: policy.yaml for policy.yml, and not noop.py for nope.yaml
        files = [p for p in files if _stem(p) == _stem(path) or {*p.suffixes} & {*path.suffixes}]
    stems = [_stem(p) for p in files]
    near = difflib.get_close_matches(_stem(path), set(stems), n=SUGGESTED, cutoff=0.7)  # at 0.6 "other" is like "notes"
    return [p for one in near for p, stem in zip(files, stems, strict=True) if stem == one]


def _stem(path: Path) -> str:
    """Return the name up to its first dot, as `trace` of `trace.json.gz`; the dot of a hidden file begins its name."""
    return path.name[:1] + path.name[1:].split(".", 1)[0]


def _neighbours(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return files with these suffixes (or all) in the path's folder, or in the path where it is a folder."""
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if not suffixes or (p.is_file() and p.suffix in suffixes))


def check_writable(path: Path) -> None:
    """Fail before the work if a path cannot be written. Leaves no empty file."""
    try:
        if is_stream(path):
            return
        existed = path.exists()
        path.open("ab" if existed else "xb").close()
        if not existed:
            path.unlink()
    except OSError as exc:
        raise cannot_write(path, exc) from exc


def save_page(page: Path, text: str) -> bool:
    """Write a page; print why and return False where that fails: the screen is still worth having."""
    try:
        with replace_when_written(page) as part:
            part.write_text(text, encoding="utf-8")
    except ArgumentError as exc:
        print_error(exc)
        return False
    return True


def write_page(path: Path, text: str) -> None:
    """Write a page that was asked for, and say where."""
    with replace_when_written(path) as part:
        part.write_text(text, encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)


def retype_command(command: str, *, typed: Sequence[str] | None = None, **changes: Any) -> str:
    """Return what the user typed after `tessera COMMAND`, with some options changed (None: left out)."""
    words: list[str] = []
    line = sys.argv if typed is None else typed
    rest = iter(line[line.index(command) + 1 :] if command in line else [])
    for word in rest:
        flag, equals, _ = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") in changes:
            if not equals:
                next(rest, None)
        else:
            words.append(word)
    for name, value in changes.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(["tessera", command, *words])
