"""`tessera predict`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ArgumentError
from . import completion
from .entry import check_writable
from .plain import say

if TYPE_CHECKING:
    from ..estimate.search import Sweep
    from ..schema import EnergyReport
    from .models import Loaded

# Points from which a sweep is worth a progress bar: fewer are done before one could read it.
PROGRESS_FROM = 6


def _words(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Words separated by commas."""
    if value is None:
        return None
    words = tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))
    if not words:
        raise ArgumentError(f"{param.opts[0]} {value!r} names nothing", fix=f"give one or more: {param.metavar}")
    return words


def _numbers(separator: str, example: str) -> Callable[..., tuple[int, ...] | None]:
    """Positive whole numbers with a separator between them."""

    def parse(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        words = value.lower().replace(" ", "").split(separator)
        if not all(word.isdecimal() and len(word) < 10 and int(word) > 0 for word in words):
            raise ArgumentError(
                f"{param.opts[0]} {value[:40]!r}: a positive whole number is expected",
                fix=f"one, or several with {separator!r} between them: {param.opts[0]} {example}",
            )
        return tuple(int(word) for word in words)

    return parse


@click.command("predict")
@click.argument("model")
@click.option("--on", "devices", callback=_words, default="h200", show_default=True, metavar="CHIP,...",
              shell_complete=completion.devices,
              help="Chips to predict for; see `tessera hardware list`.")  # fmt: skip
@click.option("--precision", "precisions", callback=_words, metavar="P,...",
              help="fp32, tf32, bf16, fp16, fp8 or int8; without it the model as it is.")  # fmt: skip
@click.option("--batch", "batches", callback=_numbers(",", "1,8,64"), metavar="N,...", help="Samples in one iteration.")
@click.option("--mode", type=click.Choice(["infer", "train"]), default="infer", show_default=True,
              help="A forward pass, or a training step with loss, backward and optimizer.")  # fmt: skip
@click.option("--launch", type=click.Choice(["eager", "graph"]), default="eager", show_default=True,
              help="Operators launched one by one, or a CUDA graph replayed.")  # fmt: skip
@click.option("--optimizer", type=click.Choice(["sgd", "adamw"]), default="sgd", show_default=True,
              help="The optimizer of --mode train.")  # fmt: skip
@click.option(
    "--input", "shape", callback=_numbers("x", "3x224x224"), metavar="SHAPE", help="Shape of one sample, 3x224x224."
)
@click.option("--seq", type=click.IntRange(min=1), help="Tokens in one sequence (128 unless given).")
@click.option("--burst", is_flag=True, help="The first moments at the boost clock, not the sustained state.")
@click.option("--top", type=click.IntRange(min=0), default=10, show_default=True, help="How many consumers to list.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a self-contained page to this file."
)
@click.option("--no-opportunities", is_flag=True, help="Do not look for what would save joules.")
def command(
    model: str, devices: tuple[str, ...], precisions: tuple[str, ...] | None, batches: tuple[int, ...] | None,
    mode: str, launch: str, optimizer: str, shape: tuple[int, ...] | None, seq: int | None, burst: bool, top: int,
    as_json: bool, html: Path | None, no_opportunities: bool,
) -> int:  # fmt: skip
    """Predict latency, energy and memory of a model on a chip, before it runs there.

    \b
    Examples:
      tessera predict resnet18 --on a100 --precision bf16 --batch 8
      tessera predict resnet18 --on a100,h200,jetson-orin --precision fp32,bf16 --batch 1,8,64 --html resnet18.html
      tessera predict mymodule:make_model --on h200 --mode train --optimizer adamw
      tessera predict hf:config.json --seq 2048 --on h100,mi300x

    MODEL is a torchvision name, timm:NAME, hf: and a transformers configuration (a file or the JSON itself), or
    module:name of your own: a function in the current folder that returns a module or (module, inputs).
    Nothing is downloaded, allocated or computed. One combination gives a full report, several give a table with the
    best choices; rows marked * are on the Pareto frontier of joules per sample and latency.
    """
    from ..hardware import lookup
    from .models import Shape, load

    if mode != "train" and _given("optimizer"):
        raise ArgumentError(
            f"--optimizer {optimizer} needs --mode train",
            why="a forward pass (--mode infer, the default) has no optimizer",
            fix="add --mode train, or leave --optimizer out",
        )
    for device in devices:
        lookup(device)  # a wrong name is said before torch is imported
    if html:
        check_writable(html, "--html")
    loaded = load(model, Shape(input=shape, seq=seq), training=mode == "train")
    if loaded.note:
        say(f"note: {loaded.note}", err=True)
    options = {"mode": mode, "launch": launch, "optimizer": optimizer, "burst": burst}
    if len(devices) * len(precisions or (1,)) * len(batches or (1,)) == 1:
        one = {"on": devices[0], "precision": (precisions or (None,))[0], "batch": (batches or (None,))[0]}
        return _one(loaded, {**options, **one}, top, as_json, html, opportunities=not no_opportunities)
    return _several(loaded, options, devices, precisions or (None,), batches or (None,), as_json, html)


def _given(option: str) -> bool:
    """Whether it was typed: a default says nothing about what was meant."""
    from click.core import ParameterSource

    return click.get_current_context().get_parameter_source(option) is not ParameterSource.DEFAULT


def _one(
    loaded: Loaded, options: dict[str, Any], top: int, as_json: bool, html: Path | None, *, opportunities: bool
) -> int:
    from ..estimate.predict import predict

    report = predict(loaded.model, loaded.inputs, name=loaded.name, **options)
    found = report.opportunities() if opportunities else None
    if html:
        from ..report.predict_html import page

        _write(html, page(report, opportunities=found))
    if as_json:
        from ..report.predict import report_json

        click.echo(report_json(report, found))
        return 0
    from ..report.predict import prediction
    from ..report.screen import Console

    following = _next_of_report(report)
    answer = prediction(report, top=top, opportunities=found, next_command=following)
    Console(highlight=False).print(answer, crop=False)  # the next command stays in one piece
    return 0


def _several(
    loaded: Loaded,
    options: dict[str, Any],
    devices: Any,
    precisions: Any,
    batches: Any,
    as_json: bool,
    html: Path | None,
) -> int:
    found = _swept(loaded, options, devices, precisions, batches)
    if html:
        from ..report.predict_html import page

        _write(html, page(found))
    if as_json:
        click.echo(found.to_json())
    else:
        from ..report.predict import comparison
        from ..report.screen import Console

        console = Console(highlight=False)
        console.print(comparison(found, next_command=_next_of_sweep(found), width=console.width), crop=False)
    return 0 if found.feasible else 1


def _swept(loaded: Loaded, options: dict[str, Any], devices: Any, precisions: Any, batches: Any) -> Sweep:
    from ..estimate.search import sweep

    points = len(devices) * len(precisions) * len(batches)
    asked = {"on": devices, "precisions": precisions, "batches": batches, "name": loaded.name, **options}
    if points < PROGRESS_FROM or not sys.stderr.isatty():
        return sweep(loaded.model, loaded.inputs, **asked)
    from rich.progress import Progress

    from ..report.screen import Console

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("predicting", total=points)

        def step(done: int, _total: int, label: str) -> None:
            progress.update(task, completed=done, description=label or "predicting")

        return sweep(loaded.model, loaded.inputs, progress=step, **asked)


def _next_of_report(report: EnergyReport) -> str:
    """What one would ask next: without the host where it bounds, else with more samples at once, else other chips."""
    of = report.prediction
    if of is not None and of.bound == "host":
        return _again(launch="graph")
    if of is not None and of.batch and of.batch < 64:
        return _again(batch=f"{of.batch},{of.batch * 4},{of.batch * 16}")
    return _again(on="a100,h200,b200", html="report.html")


def _next_of_sweep(found: Sweep) -> str | None:
    best = found.best_batch()
    if best is None:
        return None
    changes = {"on": best.on, "precision": best.precision, "batch": best.batch, "html": None}
    return _again(**changes)


def _again(**changes: Any) -> str:
    """What the user typed, with some options changed (None: left out)."""
    from ..report.text import command_line

    typed = sys.argv[sys.argv.index("predict") + 1 :] if "predict" in sys.argv else []
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") in changes:
            if not equals:
                next(words, None)
        else:
            kept.append(word)
    for name, value in changes.items():
        if value is not None:
            kept += [f"--{name.replace('_', '-')}", str(value)]
    return command_line(["tessera", "predict", *kept])


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ArgumentError(f"cannot write {path}", why=str(exc.strerror), fix="give --html another path") from exc
    say(f"wrote {path}", err=True)
