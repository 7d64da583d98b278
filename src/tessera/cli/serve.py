"""`tessera predict --serve`: the options of a served model, and what the command does with them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import ArgumentError
from .options import WordChoice, choice_option, duration_option, is_typed, retype_command

if TYPE_CHECKING:
    from ..serving.deployment import Deployment
    from ..serving.estimate import ServingReport

ENGINES = ["vllm", "trtllm", "sglang", "vllm-0.11"]
# What belongs to other predictions only.
_REFUSED = {
    "html": "--html",
    "mode": "--mode",
    "optimizer": "--optimizer",
    "shape": "--input",
    "seq": "--seq",
    "state": "--state",
}
_NAMES = ("prompt", "generate", "tp", "ep", "attention_dp", "cache_dtype", "engine", "max_tpot_s", "max_ttft_s")


def serving_options(parse_numbers: Callable[[str, str], Any]) -> Callable[[Any], Any]:
    """Return the options that belong to `--serve`."""
    size: dict[str, Any] = {"type": click.IntRange(min=1), "show_default": True}
    options = [
        click.option("--serve", is_flag=True, help="Predict a served language model: prefill, decode, generation."),
        click.option("--prompt", default=1024, help="Tokens of a prompt (--serve).", **size),
        click.option("--generate", default=256, help="Tokens of an answer (--serve).", **size),
        click.option(
            "--tp",
            callback=parse_numbers(",", "1,2,8"),
            metavar="N,...",
            help="GPUs that share one copy (--serve). [default: 1]",
        ),
        click.option("--ep", type=click.IntRange(min=1), help="Ranks that share the experts by expert (--serve)."),
        click.option(
            "--attention-dp",
            default=1,
            help="Groups of these GPUs that share the sequences, and not the heads (--serve).",
            **size,
        ),
        click.option(
            "--cache-dtype",
            type=WordChoice(["fp32", "bf16", "fp16", "fp8"]),
            help="Format of the cache (--serve). [default: fp8 beside fp8 and fp4 weights, else 16 bits]",
        ),
        choice_option("--engine", ENGINES, "Whose overheads (--serve)."),
        duration_option("--max-tpot", "Limit of the time per output token, such as 20ms (--serve)."),
        duration_option("--max-ttft", "Limit of the time to the first token (--serve)."),
    ]

    def add(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def refuse_serving_options() -> None:
    """Say that an option was typed which only a server has."""
    for name in _NAMES:
        if is_typed(name):
            option = name.removesuffix("_s").replace("_", "-")
            raise ArgumentError(f"--{option} needs --serve", fix=f"add --serve, or leave --{option} out")


def refuse_other_options() -> None:
    """Say that an option was typed which a served model does not have."""
    for name, option in _REFUSED.items():
        if is_typed(name):
            instead = {"seq": "; use --prompt and --generate instead", "html": "; use --json instead"}.get(name, "")
            raise ArgumentError(f"{option} is not for --serve", fix=f"leave {option} out{instead}")


def predict_server(
    model: str,
    *,
    devices: Sequence[str],
    dtypes: Sequence[str] | None,
    batches: Sequence[int] | None,
    tp: Sequence[int] | None,
    max_tpot_s: float | None,
    max_ttft_s: float | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Return every combination of chip, format, GPUs and batch as a table, one combination as a report."""
    from ..serving.estimate import RefusedServer, sweep_serving

    refuse_other_options()
    refused: list[RefusedServer] = []
    reports, best = sweep_serving(
        model,
        on=list(devices),
        dtype=dtypes or (None,),
        tp=list(tp or (1,)),
        batch=list(batches or (1,)),
        max_time_per_output_token_s=max_tpot_s,
        max_time_to_first_token_s=max_ttft_s,
        refused=refused,
        **options,
    )
    if as_json:
        rows = [report.to_dict() for report in reports]
        cheapest = reports.index(best) if best is not None else None
        several = {"rows": rows, "cheapest": cheapest, "refused": [dataclasses.asdict(row) for row in refused]}
        click.echo(json.dumps(rows[0] if len(rows) == 1 and not refused else several, indent=1))
    else:
        from ..report.console import Console
        from ..report.serving import serving_screen

        limited = max_tpot_s is not None or max_ttft_s is not None
        screen = serving_screen(
            reports, best, refused, limited=limited, next_command=_next(reports, best, refused=bool(refused))
        )
        Console(highlight=False).print(screen, crop=False)
    return 0 if best is not None else 1


def _next(reports: Sequence[ServingReport], best: ServingReport | None, *, refused: bool) -> str:
    from ..serving.estimate import find_fitting

    if not any(report.fits is not False for report in reports):
        fitting = next(filter(None, map(find_fitting, reports)), None)
        return _retype(*fitting) if fitting else "tessera hardware list"
    if (len(reports) > 1 or refused) and best is not None:
        return _retype(best.deployment, best.batch)
    size, most = reports[0].batch, reports[0].largest_batch
    sizes = [n for n in (size, 4 * size, 16 * size) if most is None or n <= most]
    if len(reports) == 1 and len(sizes) > 1:
        return retype_command("predict", batch=",".join(map(str, sizes)))
    return retype_command("predict", tp="1,2,4,8")


def _retype(on: Deployment, batch: int) -> str:
    typed = [word for word in sys.argv if word != "--power-curve"]  # the chip has its limit in its name
    changes = {"on": on.device.id, "precision": None, "dtype": on.weights, "tp": on.gpus, "batch": batch}
    return retype_command("predict", typed=typed, **changes)
