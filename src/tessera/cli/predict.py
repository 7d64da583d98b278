"""`tessera predict`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ArgumentError
from ..output import remove_controls
from .options import (
    FILE,
    WordChoice,
    check_writable,
    choice_option,
    complete_devices,
    is_typed,
    json_option,
    retype_command,
    write_page,
)
from .serve import predict_server, refuse_serving_options, serving_options

if TYPE_CHECKING:
    from ..estimate.search import Sweep
    from ..schema import EnergyReport
    from .model_loader import LoadedModel

# A sweep of fewer points is done before anybody could read a progress bar.
PROGRESS_FROM = 6


def _parse_words(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Return words separated by commas."""
    if value is None:
        return None
    words = tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))
    if not words:
        raise ArgumentError(f"{param.opts[0]} {value!r} is empty", fix=f"give one or more: {param.metavar}")
    return words


def _parse_numbers(separator: str, example: str) -> Callable[..., tuple[int, ...] | None]:
    """Return positive whole numbers with a separator between them."""

    def parse(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        words = value.lower().replace(" ", "").split(separator)
        if not all(word.isdecimal() and len(word) < 10 and int(word) > 0 for word in words):
            raise ArgumentError(
                f"{param.opts[0]} {value[:40]!r} is not a positive whole number",
                fix=f"give one, or several with {separator!r} between them: {param.opts[0]} {example}",
            )
        return tuple(int(word) for word in words)

    return parse


@click.command("predict")
@click.argument("model")
@click.option(
    "--on",
    "devices",
    callback=_parse_words,
    default="h200",
    show_default=True,
    metavar="CHIP,...",
    shell_complete=complete_devices,
    help="Chips to predict for (`tessera hardware list`), or all; with a limit: h200@400W, h200@1200MHz.",
)
@click.option("--power-curve", is_flag=True, help="Time and joules over power limits of each chip: which is best.")
@click.option(
    "--precision",
    "--dtype",
    "precisions",
    callback=_parse_words,
    metavar="P,...",
    help="fp32, tf32, bf16, fp16, fp8, int8; weights alone: int8wo, int4wo, fp8wo, fp4wo. [default: the model's own]",
)
@click.option(
    "--batch", "batches", callback=_parse_numbers(",", "1,8,64"), metavar="N,...", help="Samples in one iteration."
)
@choice_option("--mode", ["infer", "train"], "A forward pass, or a training step with loss, backward and optimizer.")
@click.option(
    "--launch",
    type=WordChoice(["eager", "graph", "compile"]),
    help="Launch operators one by one, replay a CUDA graph, or fuse as torch.compile does. "
    "[default: eager; compile for a compiled model]",
)
@choice_option("--optimizer", ["sgd", "adamw"], "The optimizer of --mode train.")
@click.option(
    "--input", "shape", callback=_parse_numbers("x", "3x224x224"), metavar="SHAPE", help="Shape of one sample."
)
@click.option("--seq", type=click.IntRange(min=1), help="Tokens in one sequence. [default: 128]")
@choice_option("--state", ["sustained", "burst"], "Under the power limit, or the first moments at the boost clock.")
@click.option("--top", type=click.IntRange(min=0), default=10, show_default=True, help="How many consumers to list.")
@json_option
@click.option("--html", type=FILE, help="Write a self-contained page to this file.")
@click.option("--no-opportunities", is_flag=True, help="Do not look for changes that save energy.")
@serving_options(_parse_numbers)
def command(
    model: str,
    devices: tuple[str, ...],
    power_curve: bool,
    precisions: tuple[str, ...] | None,
    batches: tuple[int, ...] | None,
    mode: str,
    launch: str | None,
    optimizer: str,
    shape: tuple[int, ...] | None,
    seq: int | None,
    state: str,
    top: int,
    as_json: bool,
    html: Path | None,
    no_opportunities: bool,
    serve: bool,
    **server: Any,
) -> int:
    """Predict latency, energy and memory of a model on a chip, before it runs there.

    \b
    Examples:
      tessera predict resnet18 --on a100 --precision bf16 --batch 8
      tessera predict resnet18 --on a100,h200,jetson-orin --precision fp32,bf16 --batch 1,8,64 --html resnet18.html
      tessera predict mymodule:make_model --on h200 --mode train --optimizer adamw
      tessera predict resnet50 --batch 64 --on h200 --power-curve
      tessera predict hf:config.json --seq 2048 --on h100,mi300x
      tessera predict llama-3.1-70b --serve --on h200,b200 --dtype bf16,fp8 --tp 2,4 --batch 8,32,128

    MODEL is a torchvision name, timm:NAME, hf: and a transformers configuration (a file or the JSON itself), or
    module:name of your own: a function in the current folder that returns a module or (module, inputs).
    Nothing is downloaded, allocated or computed. One combination gives a full report, several give a table with the
    best choices; rows marked * are on the Pareto frontier of joules per sample and latency.
    """
    from .model_loader import InputShape, load_model

    _check_optimizer(mode, optimizer)
    devices = _expand_devices(
        devices, power_curve=power_curve, serve=serve
    )  # fails on a wrong name before torch is imported
    if serve:
        return predict_server(
            model,
            devices=devices,
            dtypes=precisions,
            batches=batches,
            launch=launch if is_typed("launch") else "graph",  # as engines do
            as_json=as_json,
            **server,
        )
    refuse_serving_options()
    if html:
        check_writable(html)
    loaded = load_model(model, InputShape(input=shape, seq=seq), training=mode == "train")
    if loaded.note:
        print(remove_controls(f"note: {loaded.note}"), file=sys.stderr)
    options = {"mode": mode, "launch": launch, "optimizer": optimizer, "state": state}
    if len(devices) * len(precisions or (1,)) * len(batches or (1,)) == 1:
        one = {"on": devices[0], "precision": (precisions or (None,))[0], "batch": (batches or (None,))[0]}
        return _predict_one(loaded, {**options, **one}, top, as_json, html, opportunities=not no_opportunities)
    points = {"on": devices, "precisions": precisions or (None,), "batches": batches or (None,)}
    return _predict_several(loaded, {**options, **points}, as_json, html)


def _check_optimizer(mode: str, optimizer: str) -> None:
    if mode != "train" and is_typed("optimizer"):
        raise ArgumentError(
            f"--optimizer {optimizer} needs --mode train",
            why="a forward pass (--mode infer, the default) has no optimizer",
            fix="add --mode train, or leave --optimizer out",
        )


def _expand_devices(devices: tuple[str, ...], *, power_curve: bool, serve: bool) -> tuple[str, ...]:
    """Return chips by name; "all" is the catalogue without CPUs, a power curve is a chip at several limits."""
    from ..hardware import lookup

    for device in devices:
        if device != "all":
            lookup(device.partition("@")[0] if serve else device)  # a server's sweep lists limits that are not possible
    if "all" in devices or power_curve:
        from ..estimate.search import list_chips, list_limits

        devices = tuple(chip for name in devices for chip in (list_chips() if name == "all" else [name]))
        if power_curve:
            devices = tuple(limit for name in devices for limit in list_limits(lookup(name)))
    return devices


def _predict_one(
    loaded: LoadedModel, options: dict[str, Any], top: int, as_json: bool, html: Path | None, *, opportunities: bool
) -> int:
    from ..estimate.predict import predict

    report = predict(loaded.model, loaded.inputs, name=loaded.name, **options)
    savings = report.opportunities() if opportunities else None
    if html:
        from ..report.predict_html import page

        write_page(html, page(report, opportunities=savings))
    if as_json:
        from ..report.predict import report_json

        click.echo(report_json(report, savings))
        return 0
    from ..report.console import Console
    from ..report.predict import prediction

    screen = prediction(report, top=top, opportunities=savings, next_command=_next_after_report(report))
    Console(highlight=False).print(screen, crop=False)  # the next command stays in one piece
    return 0


def _predict_several(loaded: LoadedModel, options: dict[str, Any], as_json: bool, html: Path | None) -> int:
    sweep = _sweep(loaded, options)
    if html:
        from ..report.predict_html import page

        write_page(html, page(sweep))
    if as_json:
        click.echo(sweep.to_json())
    else:
        from ..report.console import Console
        from ..report.sweep import comparison

        Console(highlight=False).print(comparison(sweep, next_command=_next_after_sweep(sweep)), crop=False)
    return 0 if sweep.feasible else 1


def _sweep(loaded: LoadedModel, options: dict[str, Any]) -> Sweep:
    from ..estimate.search import sweep

    points = len(options["on"]) * len(options["precisions"]) * len(options["batches"])
    arguments = {"name": loaded.name, **options}
    if points < PROGRESS_FROM or not sys.stderr.isatty():
        return sweep(loaded.model, loaded.inputs, **arguments)
    from rich.progress import Progress

    from ..report.console import Console

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("predicting", total=points)

        def step(done: int, _total: int, label: str) -> None:
            progress.update(task, completed=done, description=label or "predicting")

        return sweep(loaded.model, loaded.inputs, progress=step, **arguments)


def _next_after_report(report: EnergyReport) -> str:
    """Suggest a graph if the host limits it, else a larger batch, else other chips."""
    of = report.prediction
    if of is not None and of.bound == "host":
        return retype_command("predict", launch="graph")
    if of is not None and of.batch and of.batch < 64:
        return retype_command("predict", batch=f"{of.batch},{of.batch * 4},{of.batch * 16}")
    return retype_command("predict", on="a100,h200,b200", html="report.html")


def _next_after_sweep(sweep: Sweep) -> str | None:
    best = sweep.best_batch()
    if best is None:
        return None
    kept = [word for word in sys.argv if word != "--power-curve"]
    with_one = {"on": best.on, "precision": best.precision, "batch": best.batch, "html": None}
    return retype_command("predict", typed=kept, **with_one)
