"""`tessera plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..errors import ArgumentError
from .options import FILE, check_writable, json_option, print_json, retype_command, write_page

DEFAULT_SEQ = 4096


def _complete_clusters(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ..dist.cluster import list_clusters

    return [
        CompletionItem(key, help=table["name"]) for key, table in list_clusters().items() if key.startswith(incomplete)
    ]


@click.command("plan")
@click.argument("model", required=False)
@click.option(
    "--cluster",
    default="dgx-h200",
    show_default=True,
    metavar="NAME[:NODES]",
    shell_complete=_complete_clusters,
    help="A cluster or a file (.toml, .yaml, .json) of one; `list` shows those with a name.",
)
@click.option("--goal", default="time", show_default=True, help='time, energy, or "energy, time<=1.05".')
@click.option("--seq", type=click.IntRange(min=1), help=f"Tokens in one sequence. [default: {DEFAULT_SEQ}]")
@click.option("--global-batch", type=click.IntRange(min=1), help="Sequences in one step. [default: 4 million tokens]")
@click.option("--precision", default="bf16", show_default=True, metavar="P", help="bf16, fp16, fp8 or fp4.")
@click.option("--gpus", type=click.IntRange(min=1), help="Use only so many GPUs of the cluster.")
@click.option("--no-offload", is_flag=True, help="Keep everything on the GPUs.")
@json_option
@click.option("--html", type=FILE, help="Write a self-contained page to this file.")
def command(
    model: str | None,
    cluster: str,
    goal: str,
    seq: int | None,
    no_offload: bool,
    as_json: bool,
    html: Path | None,
    **options: Any,
) -> int:
    """Choose how to divide the training of a model over many GPUs: what it takes, and why.

    \b
    Examples:
      tessera plan llama-3.1-70b --cluster dgx-h200:4
      tessera plan hf:config.json --cluster dgx-h200:4 --seq 8192 --global-batch 128
      tessera plan hf:config.json --cluster gb200-nvl72 --goal energy --html plan.html
      tessera plan mymodule:make_model --cluster my.toml:16 --goal "energy, time<=1.05" --json
      tessera plan --cluster list

    MODEL is the name of a public language model (llama-3.1-70b), hf: and a transformers configuration (a file or the
    JSON itself), or module:name of your own: a function in the current folder that returns (module, inputs), or a
    module alone with --seq. A module that is not a decoder is divided by data parallelism. Nothing is downloaded,
    allocated or computed.
    """
    from ..report.console import Console

    console = Console(highlight=False)
    if cluster == "list":
        from ..report.plan import clusters_table

        console.print(clusters_table())
        return 0
    if model is None:
        raise ArgumentError("the model is missing", fix="tessera plan llama-3.1-70b --cluster dgx-h200:4")
    from ..dist.cluster import load_cluster
    from ..dist.planner import default_batch, plan

    where = load_cluster(cluster)  # fail on a wrong name before torch is imported
    if html:
        check_writable(html)
    sizes, inputs = _load(model, seq)
    tokens = seq or (None if inputs is not None else DEFAULT_SEQ)
    if seq and options["global_batch"] is None:  # inputs are one sequence then: an example, not a batch
        options["global_batch"] = default_batch(seq, options["gpus"] or where.gpus)
    result = plan(sizes, inputs, where, goal, seq=tokens, offload=not no_offload, **options)
    if html:
        from ..report.plan_html import plan_page

        write_page(html, plan_page(result))
    if as_json:
        print_json(result.to_dict())
        return 0
    from ..report.plan import plan_screen

    other = "energy, time<=1.05" if result.goal == "time" else "time"
    following = retype_command("plan", goal=other) if html else retype_command("plan", html="plan.html")
    console.print(plan_screen(result, next_command=following), crop=False)
    return 0


def _load(model: str, seq: int | None) -> tuple[Any, Any]:
    """Return the model of a specification, and inputs: those returned with it, or one sequence of `seq`."""
    if model.startswith("hf:") or model.lower().endswith(".json"):
        return model, None
    from .model_loader import InputShape, find_language_model, load_model

    if (known := find_language_model(model)) is not None:
        return known.shape, None
    loaded = load_model(model, InputShape(seq=seq))
    return loaded.model, loaded.inputs
