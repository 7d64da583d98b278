"""Score the predictions of servers on published latencies and joules, each row with its own deployment.

    python benchmarks/measure/published_serving.py ../shared/published/serving_latency.csv.gz \
        ../shared/published/serving_energy.jsonl.gz --json
    python benchmarks/measure/published_serving.py LATENCY ENERGY --write benchmarks/results/published_serving.json

Takes any files of that form (CSV of latencies, JSON lines of energies, plain or gzipped; either may be left out). A row
that lacks something is skipped with the reason. The constants of `tessera.serving` were chosen on half of the (model,
system) groups, by a hash; `--half` scores one half. The other half was looked at by group afterwards, and twice while
the form of the model was chosen: it is not blind.

Conventions of the rows. `batch_size` is that of one copy of the attention. Where tp_size (or attention_dp_size) is the
square of the GPUs of a node (tp8 with ep8 is written as tp_size 64, moe 8 x 8), its root is meant: the ids say so. Rows
with joules name no length of the prompt: PROMPTS has one for each task, chosen on the same half.
"""

from __future__ import annotations

import argparse
import collections
import csv
import gzip
import hashlib
import io
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError
from tessera.hardware import lookup
from tessera.serving.deployment import Deployment
from tessera.serving.estimate import ServingReport, predict_serving
from tessera.serving.served_model import ServedModel, read_served_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

Row = dict[str, Any]
# Tokens of a prompt by task of the ML.ENERGY benchmark: text of a chat, a question of GPQA, a file of code; images and
# videos become tokens of the served (their encoders are not counted).
PROMPTS = {"lm-arena-chat": 200, "gpqa": 250, "sourcegraph-fim": 1500, "image-chat": 1200, "video-chat": 2800}


class RowSkipped(Exception):
    """A row that cannot be scored; the message is the reason."""


def read_text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8", "replace")


def number(row: Row, *names: str, default: float | None = None) -> float:
    """A positive number of a row; the first name that has one."""
    for name in names:
        try:
            value = float(str(row.get(name, "")).replace(",", ""))
        except ValueError:
            continue
        if math.isfinite(value) and value > 0:
            return value
    if default is None:
        raise RowSkipped(f"{names[0]} is missing")
    return default


def read_format(*words: object) -> str:
    """The first format that is named."""
    for word in words:
        text = str(word or "").lower()
        for name in ("fp4", "fp8", "int8", "int4", "bf16", "fp16"):
            if name in text:
                return name
        if "bfloat16" in text:
            return "bf16"
    return "bf16"


def read_model(name: object) -> ServedModel:
    try:
        return read_served_model(str(name))
    except TesseraError as error:
        raise RowSkipped(f"model {name}: {error.what}") from None


def read_chip(name: object) -> Any:
    text = str(name or "").lower().replace("_", "-")
    for word in (text, text.removesuffix("-sxm"), text.removesuffix("-server")):
        try:
            return lookup(word)
        except TesseraError:
            continue
    raise RowSkipped(f"chip {name} is not in the catalogue")


def read_ranks(row: Row) -> tuple[int, int, int, int]:
    """Sequences in all, GPUs, copies of the attention, ranks of experts."""
    tp, copies = round(number(row, "tp_size", default=1)), round(number(row, "attention_dp_size", default=1))
    width, experts = round(number(row, "moe_tp_size", default=1)), round(number(row, "moe_ep_size", default=1))
    if number(row, "pp_size", default=1) > 1:
        raise RowSkipped("pipeline parallel servers are not modelled")
    batch, gpus = round(number(row, "batch_size")) * copies, tp * copies
    root = math.isqrt(gpus)
    squared = root * root == gpus and (gpus > 8 or (tp == copies > 1))
    if squared and (width == experts == root or experts == gpus):
        return batch, root, root if copies > 1 else 1, root
    if gpus > 72:
        raise RowSkipped(f"{gpus} GPUs are more than a node's")
    return batch, gpus, copies, experts if 1 < experts <= gpus and gpus % experts == 0 else 1


def predict_latency(row: Row) -> tuple[ServingReport, float, float | None]:
    """The prediction of a row, and its measured seconds per output token and to the first one."""
    if str(row.get("mode") or "agg") != "agg":
        raise RowSkipped("prefill and decode on different GPUs are not modelled")
    measured_s = number(row, "silicon_tpot_ms", "tpot_ms") * 1e-3
    served, device = read_model(row.get("model_path") or row.get("model")), read_chip(row.get("system"))
    batch, gpus, copies, experts = read_ranks(row)
    weights = read_format(row.get("gemm_quant_mode"), row.get("precision"), row.get("model_path"))
    stored = read_format(row.get("moe_quant_mode"), row.get("precision"), row.get("model_path"))
    deployment = Deployment(
        device=device,
        gpus=gpus,
        replicas=copies,
        expert_ranks=experts if served.shape.experts else 1,
        weights="bf16" if served.expert_format else weights,
        experts=stored,
        cache="bf16" if weights in ("bf16", "fp16") else "fp8",
        engine=str(row.get("backend") or "vllm"),
    )
    report = predict_serving(
        served, deployment, batch=batch, prompt=round(number(row, "isl")), generate=round(number(row, "osl"))
    )
    first_ms = number(row, "silicon_ttft_ms", "ttft_ms", default=math.nan)
    return report, measured_s, None if math.isnan(first_ms) else first_ms * 1e-3


def predict_energy(row: Row) -> tuple[ServingReport, float, float | None]:
    """The prediction of a row, its measured joules per token, and its seconds per output token."""
    measured_j = number(row, "joules_per_output_token")
    task = str(row.get("task"))
    if task not in PROMPTS:
        raise RowSkipped(f"the prompts of task {task!r} are not known")
    served, device = read_model(row.get("model")), read_chip(row.get("gpu"))
    gpus = round(number(row, "gpus", default=1))
    experts = round(number(row, "ep", default=1))
    weights = read_format(row.get("weight_precision"), row.get("model"))
    deployment = Deployment(
        device=device,
        gpus=gpus,
        expert_ranks=experts if served.shape.experts and gpus % experts == 0 else 1,
        weights="bf16" if served.expert_format else weights,
        experts=weights,
        cache="bf16",
        engine="vllm-0.11",
    )
    batch = max(1, round(number(row, "avg_batch_size", "max_num_seqs")))
    generate = max(1, round(number(row, "avg_output_len")))
    report = predict_serving(served, deployment, batch=batch, prompt=PROMPTS[task], generate=generate)
    between_ms = number(row, "median_itl_ms", default=math.nan)
    return report, measured_j, None if math.isnan(between_ms) else between_ms * 1e-3


def read_latency_rows(path: Path) -> Iterator[Row]:
    yield from csv.DictReader(io.StringIO(read_text(path)))


def read_energy_rows(path: Path) -> Iterator[Row]:
    for line in read_text(path).splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if line.strip():
            yield row if isinstance(row, dict) else {}


def find_half(row: Row) -> str:
    """Which half a row belongs to: whole groups of model and system."""
    text = f"{row.get('model_path') or row.get('model')}|{row.get('system') or row.get('gpu')}"
    return "chosen_on" if hashlib.sha1(text.encode()).digest()[0] % 2 == 0 else "kept_apart"


class Score:
    """Errors of a set of rows."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.inside: list[bool] = []
        self.by: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, predicted: Any, measured: float, group: str) -> None:
        error = float(predicted) / measured - 1.0
        self.errors.append(error)
        self.inside.append(abs(float(predicted) - measured) <= predicted.error)
        self.by[group].append(error)

    def to_dict(self) -> dict[str, Any]:
        if not self.errors:
            return {"rows": 0, "median_error": None, "within_30": None, "coverage": None}
        sizes = [abs(error) for error in self.errors]
        return {
            "rows": len(sizes),
            "median_error": statistics.median(sizes),
            "within_30": sum(size <= 0.3 for size in sizes) / len(sizes),
            "coverage": sum(self.inside) / len(self.inside),
            "by_group": {
                name: {"rows": len(v), "median": statistics.median(v), "median_error": statistics.median(map(abs, v))}
                for name, v in sorted(self.by.items())
            },
        }


def score(latency: Iterable[Row], energy: Iterable[Row], half: str | None) -> dict[str, Any]:
    alone: list[tuple[float, float]] = []
    names = ("tpot", "ttft", "joules_per_token", "tpot_of_energy_rows")
    scores = {name: Score() for name in names}
    skipped: collections.Counter[str] = collections.Counter()
    scored = 0
    for rows, predict in ((latency, predict_latency), (energy, predict_energy)):
        for row in rows:
            if half and find_half(row) != half:
                continue
            try:
                report, measured, other = predict(row)
            except RowSkipped as reason:
                skipped[str(reason)] += 1
                continue
            except TesseraError as error:
                skipped[error.what] += 1
                continue
            scored += 1
            on = report.deployment
            group = f"{report.served.name}, {on.device.id}, {on.engine}, {on.experts}"
            if predict is predict_latency:
                scores["tpot"].add(report.time_per_output_token_s, measured, group)
                if other is not None:
                    scores["ttft"].add(report.time_to_first_token_s, other, group)
                    if report.batch <= on.replicas:  # no prompt of another sequence comes meanwhile
                        after_s = other - report.prefill.time_s
                        alone.append((other / report.prefill.time_s, after_s / report.decode.time_s))
            else:
                scores["joules_per_token"].add(report.joules_per_token, measured, f"{group}, {row.get('task')}")
                if other is not None:
                    scores["tpot_of_energy_rows"].add(report.time_per_output_token_s, other, group)
    inside = [*scores["tpot"].inside, *scores["joules_per_token"].inside]
    return {
        "scored": scored,
        "skipped": dict(skipped.most_common()),
        "tpot_median_error": scores["tpot"].to_dict()["median_error"],
        "joules_per_token_median_error": scores["joules_per_token"].to_dict()["median_error"],
        "coverage": sum(inside) / len(inside) if inside else None,
        "first_token_alone": {
            "rows": len(alone),
            "over_prefill": statistics.median(row[0] for row in alone) if alone else None,
            "steps_after_prefill": statistics.median(row[1] for row in alone) if alone else None,
        },
        **{name: made.to_dict() for name, made in scores.items()},
    }


def print_score(name: str, result: dict[str, Any]) -> None:
    print(f"{name}: {result['scored']} rows scored, {sum(result['skipped'].values())} skipped")
    for key, goal in (("tpot", 0.15), ("joules_per_token", 0.20), ("ttft", None), ("tpot_of_energy_rows", None)):
        s = result[key]
        if s["rows"]:
            aim = f"goal {100 * goal:.0f}%" if goal else ""
            print(
                f"  {key:20} {s['rows']:5} rows  median error {100 * s['median_error']:5.1f}%  within 30% "
                f"{100 * s['within_30']:3.0f}%  in the 90% interval {100 * s['coverage']:3.0f}%  {aim}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="CSV of latencies and JSON lines of energies, in any order")
    parser.add_argument("--half", choices=("chosen_on", "kept_apart"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--groups", action="store_true", help="print each group")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    latency, energy = [], []
    for path in args.files:
        (latency if ".csv" in path.name else energy).append(path)
    rows = (
        [row for path in latency for row in read_latency_rows(path)],
        [row for p in energy for row in read_energy_rows(p)],
    )
    result = score(*rows, args.half)
    if args.write:
        halves = {half: score(*rows, half) for half in ("chosen_on", "kept_apart")}
        for part in (result, *halves.values()):
            part["skipped"] = {reason: n for reason, n in part["skipped"].items() if n > 1}
        write_result(args.write, {"all": result, **halves})
    if args.json:
        print(json.dumps(result, indent=1))
        return
    print_score(args.half or "all", result)
    for key in ("tpot", "joules_per_token", "ttft") if args.groups else ():
        for group, s in result[key].get("by_group", {}).items():
            print(
                f"    {key} {group}: {s['rows']} rows, {100 * s['median']:+.0f}% median, {100 * s['median_error']:.0f}%"
            )
    for reason, n in list(result["skipped"].items())[:8]:
        print(f"  skipped {n}: {reason}")


if __name__ == "__main__":
    main()
