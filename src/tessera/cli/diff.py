"""`tessera diff A B`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import TesseraError

if TYPE_CHECKING:
    from ..analyze.change import Difference, Metric, Verdict

VIEWS = ("ops", "kernels", "regions", "modules")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


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


@click.command("diff")
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
@click.option("--by", type=click.Choice(VIEWS), default="ops", show_default=True, help="What the rows are.")
@click.option("--fail-above", "fail_above", callback=_fraction, metavar="SHARE",
              help="Exit with 1 when B is worse by more than this share (5%), and by more than noise.")  # fmt: skip
@click.option("--metric", type=click.Choice(["energy", "time"]),
              help="What worse means: energy, unless joules are not known of both.")  # fmt: skip
@click.option("--top", type=click.IntRange(1), default=12, show_default=True, help="How many rows to print.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a self-contained page here.")
@click.option("--power-a", type=_FILE, help="Power log of the same time, where A is a Kineto trace.")
@click.option("--power-b", type=_FILE, help="The same for B.")
def command(
    a: Path, b: Path, by: str, fail_above: float | None, metric: Metric | None, top: int, as_json: bool,
    html: Path | None, power_a: Path | None, power_b: Path | None,
) -> int:  # fmt: skip
    """What changed from A to B in joules and seconds, and whether it is more than noise.

    \b
    Examples:
      tessera diff before.tessera after.tessera
      tessera diff baseline.json runs/train.tessera --fail-above 5%
      tessera diff predicted.json runs/train.tessera --html diff.html
      tessera diff a.json.gz b.json.gz --power-a a.csv --power-b b.csv --by kernels

    A and B are run files, Kineto traces, or what tessera predict, measure, report or attribute printed with --json.
    Everything is per step where both have steps. Exit codes: 0, or 1 when B is worse than --fail-above allows and the
    difference is significant, or 2 when something could not be read.
    """
    from ..analyze.change import diff

    try:
        found = diff(a, b, by=by, power_a=power_a, power_b=power_b)
    except TesseraError as exc:  # not 1: a baseline that cannot be read is no regression
        click.echo(f"error: {exc}", err=True)
        return 2
    verdict = found.verdict(metric, fail_above)
    if html is not None and not _write(html, found, verdict):
        return 2
    if as_json:
        _print_json(found, verdict)
    else:
        typed = _typed(a, b, power_a, power_b)
        _print(found, verdict, top, _next(found, typed, html, b))
    return 1 if verdict.failed else 0


def _write(path: Path, found: Difference, verdict: Verdict) -> bool:
    from ..report.diff_html import page

    try:
        path.write_text(page(found, verdict=verdict), encoding="utf-8")
    except OSError as exc:
        click.echo(f"error: the page could not be written to {path}: {exc.strerror}", err=True)
        return False
    click.echo(f"wrote {path}", err=True)
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
    out.print(shown, crop=False)  # the next command stays in one piece


def _typed(a: Path, b: Path, power_a: Path | None, power_b: Path | None) -> str:
    words = ["tessera", "diff", str(a), str(b)]
    words += ["--power-a", str(power_a)] if power_a else []
    words += ["--power-b", str(power_b)] if power_b else []
    return shlex.join(words)


def _next(found: Difference, typed: str, html: Path | None, b: Path) -> str:
    """Closer to the reason: kernels where operators changed, then the page, then the second run on its own."""
    if found.by == "ops" and found.significant and "kernels" in found.views and "predicted" not in found.basis:
        return f"{typed} --by kernels"
    if html is None:
        return f"{typed} --by {found.by} --html diff.html"
    return shlex.join(["tessera", "report", str(b), "--open"]) if b.suffix == ".tessera" else f"{typed} --json"
