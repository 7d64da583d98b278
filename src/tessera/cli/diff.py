"""`tessera diff A B`."""

from __future__ import annotations

import shlex
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ArgumentError, TesseraError
from .entry import save_page
from .missing import missing
from .plain import printable, say, show

if TYPE_CHECKING:
    from ..analyze.diff import Difference, Metric, Verdict

VIEWS = ("ops", "kernels", "regions", "modules")
AFTER = "tessera.diff.after"
# Not `exists`: click would answer with its usage, and not with the files that are there.
_FILE = click.Path(path_type=Path)
_READABLE = (".tessera", ".json", ".gz")


def _fraction(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """A share such as 5% or 0.05."""
    if value is None:
        return None
    from ..units import parse_fraction

    try:
        share = parse_fraction(value)
    except TesseraError as exc:
        raise click.BadParameter(f"{value!r} is no share such as 5% or 0.05") from exc
    if share > 1 and "%" not in value:
        raise click.BadParameter(f"{value!r} is {share:.0%}; write {value}% if that was meant")
    return share


class _Sides(click.Command):
    """Takes `A... -- B...` beside `A B`: what follows the dashes is kept in `ctx.meta[AFTER]`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Options may stand behind the files, as they may without the dashes."""
        if "--" in args:
            at = args.index("--")
            rest = args[at + 1 :]
            files = list(takewhile(lambda word: not word.startswith("-"), rest))
            ctx.meta[AFTER] = [Path(word) for word in files]
            args = [*args[:at], *rest[len(files) :]]
        return super().parse_args(ctx, args)


@click.command("diff", cls=_Sides)
@click.argument("files", nargs=-1, metavar="A... [--] B...", type=_FILE)
@click.option("--by", type=click.Choice(VIEWS), default="ops", show_default=True, help="What the rows are.")
@click.option("--fail-above", "fail_above", callback=_fraction, metavar="SHARE",
              help="Exit with 1 when B is worse by more than this share (5%), and by more than noise. Measured once "
                   "each, nobody knows: that is 0.")  # fmt: skip
@click.option("--metric", type=click.Choice(["energy", "time"]),
              help="What worse means: energy, unless joules are not known of both.")  # fmt: skip
@click.option("--top", type=click.IntRange(1), default=12, show_default=True, help="How many rows to print.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a self-contained page here.")
@click.option("--power-a", type=_FILE, help="Power log of the same time, where A is a Kineto trace.")
@click.option("--power-b", type=_FILE, help="The same for B.")
@click.pass_context
def command(
    ctx: click.Context, files: tuple[Path, ...], by: str, fail_above: float | None, metric: Metric | None, top: int,
    as_json: bool, html: Path | None, power_a: Path | None, power_b: Path | None,
) -> int:  # fmt: skip
    """What changed from A to B in joules and seconds, and whether it is more than noise.

    \b
    Examples:
      tessera diff before.tessera after.tessera
      tessera diff baseline.json runs/train.tessera --fail-above 5%
      tessera diff predicted.json runs/train.tessera --html diff.html
      tessera diff base1.json base2.json base3.json -- now1.json now2.json now3.json
      tessera diff a.json.gz b.json.gz --power-a a.csv --power-b b.csv --by kernels

    A and B are run files, Kineto traces, or what tessera predict, measure, run, report or attribute printed with
    --json; with -- between them, several runs of each, whose scatter decides what is noise. Everything is per step
    where both have steps. Exit codes: 0, or 1 when B is worse than --fail-above allows and the difference is
    significant, or 2 when something could not be read.
    """
    from ..analyze.diff import diff

    try:
        before, after = _sides(list(files), ctx.meta.get(AFTER))
        for path in (*before, *after):
            _check(path, _READABLE, "record a run: tessera run SCRIPT, or write one with --json")
        for log in (power_a, power_b):
            if log is not None:
                _check(log, (".csv",), "give the power log of the same time as the trace")
        found = diff(before, after, by=by, power_a=power_a, power_b=power_b)
    except (TesseraError, OSError) as exc:  # not 1: a baseline that cannot be read is no regression
        say(f"error: {printable(str(exc))}", err=True)
        return 2
    verdict = found.verdict(metric, fail_above)
    if html is not None and not _write(html, found, verdict):
        return 2
    if as_json:
        _print_json(found, verdict)
    else:
        typed = _typed(before, after, power_a, power_b)
        _print(found, verdict, top, _next(found, typed, html, after[-1]))
    return 1 if verdict.failed else 0


def _sides(files: list[Path], after: list[Path] | None) -> tuple[list[Path], list[Path]]:
    """The files before and after; `after` are those behind the dashes, None where there are no dashes."""
    if after is None and len(files) == 2:
        return files[:1], files[1:]
    if files and after:
        return files, after
    if after is None:
        count = {0: "no file was given", 1: "one file was given"}.get(len(files), f"{len(files)} files were given")
        why = (
            "it takes two: one before, one after" if len(files) < 2 else "which are before and which after is not said"
        )
    else:
        count = f"there is no file {'before' if not files else 'after'} --"
        why = "the runs before stand in front of --, the runs after behind it"
    raise ArgumentError(
        f"nothing can be compared: {count}", why=why,
        fix="tessera diff BEFORE AFTER, or of several runs each: tessera diff A1 A2 A3 -- B1 B2 B3",
    )  # fmt: skip


def _check(path: Path, endings: tuple[str, ...], otherwise: str) -> None:
    if not path.exists():
        raise missing(path, (*endings, path.suffix), otherwise)


def _write(path: Path, found: Difference, verdict: Verdict) -> bool:
    from ..report.diff_html import page

    if not save_page(path, page(found, verdict=verdict)):
        return False
    say(f"wrote {path}", err=True)
    return True


def _print_json(found: Difference, verdict: Verdict) -> None:
    import dataclasses

    import msgspec

    data: dict[str, Any] = {**found.to_json(), "verdict": dataclasses.asdict(verdict)}
    click.echo(msgspec.json.encode(data).decode())


def _print(found: Difference, verdict: Verdict, top: int, following: str) -> None:
    from ..report.diff import renderable
    from ..report.screen import Console

    out = Console(highlight=False)
    shown = renderable(found, verdict=verdict, next_command=following, top=top, width=out.width)
    show(out, shown)


def _typed(before: list[Path], after: list[Path], power_a: Path | None, power_b: Path | None) -> str:
    between = ["--"] if len(before) + len(after) > 2 else []
    files = [*map(str, before), *between, *map(str, after)]
    options = ["--power-a", str(power_a)] if power_a else []
    options += ["--power-b", str(power_b)] if power_b else []
    return shlex.join(["tessera", "diff", *options, *files])


def _next(found: Difference, typed: str, html: Path | None, b: Path) -> str:
    """Closer to the reason: kernels where operators changed, then the page, then the second run on its own."""
    if found.by == "ops" and found.significant and "kernels" in found.views and "predicted" not in found.basis:
        return f"{typed} --by kernels"
    if html is None:
        rows = f" --by {found.by}" if found.rows else ""
        return f"{typed}{rows} --html diff.html"
    return shlex.join(["tessera", "report", str(b), "--open"]) if b.suffix == ".tessera" else f"{typed} --json"
