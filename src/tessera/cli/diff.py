"""`tessera diff A B`."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ArgumentError, TesseraError
from .failures import WRONG_USAGE, report_failure
from .options import FILE, WordChoice, choice_option, json_option, missing_file, print_json, save_page

if TYPE_CHECKING:
    from ..analyze.diff import Difference, DiffVerdict, Metric

VIEWS = ("ops", "kernels", "regions", "modules")
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
"""The file whose Markdown GitHub shows on the page of a workflow's run."""
AFTER = "tessera.diff.after"
# Not `exists`, because click would answer with its usage instead of the files that are there.
_PATH = click.Path(path_type=Path)
_READABLE = (".tessera", ".json", ".gz")


def _parse_share(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """Return a share such as 5% or 0.05."""
    if value is None:
        return None
    from ..units import parse_fraction

    try:
        share = parse_fraction(value)
    except TesseraError as exc:
        raise ArgumentError(f"--fail-above {value!r} is not a share", fix="write 5% or 0.05") from exc
    if share > 1 and "%" not in value:
        raise ArgumentError(f"--fail-above {value} means {share:.0%}", fix=f"write {value}% for {value} percent")
    return share


class _SidesCommand(click.Command):
    """Accepts `A... -- B...` as well as `A B`: the files after the dashes are kept in `ctx.meta[AFTER]`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options that may follow the files, with and without the dashes."""
        if "--" in args:
            at = args.index("--")
            rest = args[at + 1 :]
            files = list(takewhile(lambda word: not word.startswith("-"), rest))
            ctx.meta[AFTER] = [Path(word) for word in files]
            args = [*args[:at], *rest[len(files) :]]
        return super().parse_args(ctx, args)


@click.command("diff", cls=_SidesCommand)
@click.argument("files", nargs=-1, metavar="A... [--] B...", type=_PATH)
@choice_option("--by", VIEWS, "What the rows are.")
@click.option(
    "--fail-above",
    callback=_parse_share,
    metavar="SHARE",
    help="Exit with 1 if B is worse by more than this share (5%) and by more than noise. "
    "With one run without steps on each side the noise is unknown, and the exit code is 0.",
)
@click.option(
    "--metric", type=WordChoice(["energy", "time"]), help="What to compare. [default: energy if both have it]"
)
@click.option("--top", type=click.IntRange(1), default=12, show_default=True, help="How many rows to print.")
@json_option
@click.option("--html", type=FILE, help="Write a self-contained page here.")
@click.option(
    "--github", is_flag=True, help="Add a Markdown summary to $GITHUB_STEP_SUMMARY; print it where that is not set."
)
@click.option("--power-a", type=_PATH, help="Power log of the same time, if A is a Kineto trace.")
@click.option("--power-b", type=_PATH, help="The same for B.")
@click.pass_context
def command(
    ctx: click.Context,
    files: tuple[Path, ...],
    by: str,
    fail_above: float | None,
    metric: Metric | None,
    top: int,
    as_json: bool,
    html: Path | None,
    github: bool,
    power_a: Path | None,
    power_b: Path | None,
) -> int:
    """Compare two runs in joules and seconds, and show whether the difference is more than noise.

    \b
    Examples:
      tessera diff before.tessera after.tessera
      tessera diff baseline.json runs/train.tessera --fail-above 5%
      tessera diff predicted.json runs/train.tessera --html diff.html
      tessera diff base1.json base2.json base3.json -- now1.json now2.json now3.json
      tessera diff a.json.gz b.json.gz --power-a a.csv --power-b b.csv --by kernels

    A and B are run files, Kineto traces, or the --json output of tessera measure, run, report, attribute or predict
    (one chip, without --serve). With -- between them, give several runs of each: their scatter decides what is noise.
    Figures are per step if both have steps. Exit codes: 0; 1 if B is worse than --fail-above allows and the difference
    is significant; 2 if a file cannot be read.
    """
    from ..analyze.diff import diff

    try:
        before, after = _split_sides(list(files), ctx.meta.get(AFTER))
        for path in (*before, *after):
            _check_exists(path, _READABLE, "record a run: tessera run SCRIPT, or write one with --json")
        for log in (power_a, power_b):
            if log is not None:
                _check_exists(log, (".csv",), "give the power log of the same time as the trace")
        difference = diff(before, after, by=by, power_a=power_a, power_b=power_b)
    except (TesseraError, OSError) as exc:  # not 1, because a baseline that cannot be read is not a regression
        return report_failure(exc, WRONG_USAGE, as_json=as_json)
    verdict = difference.verdict(metric, fail_above)
    if html is not None:
        from ..report.diff_html import page

        if not save_page(html, page(difference, verdict=verdict)):
            return 2
        print(f"wrote {html}", file=sys.stderr)
    if github:
        _write_summary(difference, verdict)
    if as_json:
        print_json({**difference.to_dict(), "verdict": dataclasses.asdict(verdict)})
    elif not github or os.environ.get(STEP_SUMMARY):
        from ..report.console import Console
        from ..report.diff import renderable

        typed = _typed_command(before, after, power_a, power_b)
        next_command = _next_command(difference, typed, html, after[-1])
        console = Console(highlight=False)
        console.show(renderable(difference, verdict=verdict, next_command=next_command, top=top, width=console.width))
    return 1 if verdict.failed else 0


def _write_summary(difference: Difference, verdict: DiffVerdict) -> None:
    from ..report.diff_markdown import markdown

    text, path = markdown(difference, verdict), os.environ.get(STEP_SUMMARY)
    if not path:
        print(text)
        return
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as exc:  # the exit code has the verdict, so a summary that cannot be written does not change it
        print(f"error: cannot write the summary to {path}: {exc.strerror}", file=sys.stderr)


def _split_sides(files: list[Path], after: list[Path] | None) -> tuple[list[Path], list[Path]]:
    """Return the files before and after; `after` are those behind the dashes, None if there are no dashes."""
    if after is None and len(files) == 2:
        return files[:1], files[1:]
    if files and after:
        return files, after
    if after is not None:
        what = f"there is no file {'before' if not files else 'after'} --"
        why = "the first runs go before --, the second runs after it"
    elif len(files) < 2:
        what = "one file was given" if files else "no file was given"
        why = "diff compares two runs"
    else:
        what, why = f"{len(files)} files were given", "it is not clear which are before and which are after"
    raise ArgumentError(
        f"cannot compare: {what}",
        why=why,
        fix="tessera diff BEFORE AFTER, or with several runs of each: tessera diff A1 A2 A3 -- B1 B2 B3",
    )


def _check_exists(path: Path, suffixes: tuple[str, ...], otherwise: str) -> None:
    if not path.exists():
        raise missing_file(path, (*suffixes, path.suffix), otherwise)


def _typed_command(before: list[Path], after: list[Path], power_a: Path | None, power_b: Path | None) -> str:
    between = ["--"] if len(before) + len(after) > 2 else []
    files = [*map(str, before), *between, *map(str, after)]
    options = ["--power-a", str(power_a)] if power_a else []
    options += ["--power-b", str(power_b)] if power_b else []
    return shlex.join(["tessera", "diff", *options, *files])


def _next_command(difference: Difference, typed: str, html: Path | None, b: Path) -> str:
    """Return a command closer to the reason: kernels if operators changed, then the page, then the second run."""
    predicted = "predicted" in difference.basis
    if difference.by == "ops" and difference.significant and "kernels" in difference.views and not predicted:
        return f"{typed} --by kernels"
    if html is None:
        rows = f" --by {difference.by}" if difference.rows else ""
        return f"{typed}{rows} --html diff.html"
    return shlex.join(["tessera", "report", str(b), "--open"]) if b.suffix == ".tessera" else f"{typed} --json"
