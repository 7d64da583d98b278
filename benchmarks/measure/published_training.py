"""Score the cost model of a training step on published runs, each with its own layout.

    python benchmarks/measure/published_training.py ../shared/published/training_runs.jsonl.gz --json
    python benchmarks/measure/published_training.py FILE --write benchmarks/results/published_training.json

Takes any file of that form, plain or gzipped. A row that lacks something is skipped with the reason. Conventions: GB of
a memory column are GiB (what torch and nvidia-smi print); a TFLOP/s or MFU column without a time counts model FLOPs with
all scores, and recomputation where the row has an HFU. The constants of the model were chosen on half of the (model,
GPU, source) groups of that file, by a hash; `--half` scores one half. The other half is not blind any more: its results
by group said where to look (docs/distributed.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import math
import re
import statistics
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tessera.device import Device, Figure
from tessera.dist.training import TrainingCost, choose_recompute, estimate_training
from tessera.dist.training_model import ModelShape, TrainingJob
from tessera.errors import TesseraError
from tessera.hardware import lookup

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

Row = dict[str, Any]
GIB = 1024.0**3
# AC at the wall over the GPUs' own watts: CPUs, fans, network cards, and the conversion of power (DGX H100: 10.2 kW
# for 5.6 kW of GPUs at most; a typical load is nearer to 1.35).
_HOST_W_PER_GPU = 180.0
LARGEST = 1e15
"""No figure of a training run is larger; a larger one counts as missing."""


# Public dimensions of models that tables give by name only (NVIDIA/NeMo, nemo/collections/llm).
KNOWN_SHAPES: dict[str, Row] = {
    "gpt3-5b": {"hidden": 4096, "layers": 24, "heads": 32, "ffn": 16384, "vocab": 51200},
    "nemotron-8b": {"hidden": 4096, "layers": 32, "heads": 32, "ffn": 16384, "vocab": 256000},
    "nemotron-22b": {"hidden": 6144, "layers": 40, "heads": 48, "ffn": 24576, "vocab": 256000},
    "llama4-scout": {"hidden": 5120, "layers": 48, "heads": 40, "kv_heads": 8, "ffn": 16384, "vocab": 202048}
    | {"experts": 16, "topk": 1, "moe_ffn": 8192, "shared_experts": 1, "head_dim": 128},
}


class RowSkipped(Exception):
    """A row that cannot be scored; the message is the reason."""


def read_rows(path: Path) -> Iterator[tuple[int, Row | None]]:
    """Rows by line number; None for a line that is not a JSON object."""
    with path.open("rb") as file:
        opener = gzip.open if file.read(2) == b"\x1f\x8b" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield number, row if isinstance(row, dict) else None


def number(row: Row, key: str) -> float | None:
    """A positive number of a row, or None; a string may hold one ("8,192")."""
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = float(value.strip().replace(",", "").removesuffix("%"))
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LARGEST:  # nor NaN
        return None
    return float(value)


def count(row: Row, key: str, default: int | None = None) -> int:
    """A whole number of a row, or the default."""
    value = number(row, key)
    if value is None:
        if default is None:
            raise RowSkipped(f"{key} is missing")
        return default
    return max(1, round(value))


def setting(row: Row, *names: str) -> str:
    """A setting of an MLPerf configuration file, as it is written there."""
    settings = row.get("overlap")
    if not isinstance(settings, dict):
        return ""
    return next((str(settings[name]) for name in names if settings.get(name) is not None), "")


def read_precision(row: Row) -> str:
    """The format of the matrix products."""
    text = str(row.get("precision") or "").lower()
    if not text:
        text = "fp4" if setting(row, "FP4") == "True" else "fp8" if setting(row, "FP8") == "True" else ""
    if not text and str(row.get("source")).startswith("mlperf"):
        text = "fp8"  # every language model of MLPerf since 2023 on chips that have it; fp4 is stated
    if "fp4" in text:
        return "fp4"
    if "mxfp8 grouped" in text or "mxfp8 linears" in text:
        return "fp8"
    if text.startswith("none") or ("bf16" in text and "fp8" not in text):
        return "bf16"
    if any(word in text for word in ("fp8", "float8", "rowwise", "tensorwise")):
        return "fp8"
    for name in ("bf16", "bfloat16", "fp16", "fp32", "tf32"):
        if name in text:
            return "bf16" if name == "bfloat16" else name
    raise RowSkipped(f"precision {text!r} is not known" if text else "precision is missing")


def read_chip(row: Row) -> Device:
    """The chip, with the power limit and the memory of the variant that a row names."""
    name = row.get("gpu")
    if not name:
        raise RowSkipped("gpu is missing")
    try:
        device = lookup(str(name))
    except TesseraError:
        raise RowSkipped(f"gpu {name!r} is not in the catalogue") from None
    variant = str(row.get("gpu_variant") or "")
    watts = re.search(r"(\d+) ?W\b", variant)
    size = re.search(r"(\d+) ?GB", variant)
    if watts:
        device = dataclasses.replace(device, tdp_w=Figure(value=float(watts[1]), source="the row"))
    if size:
        memory = dataclasses.replace(device.memory, capacity_bytes=Figure(value=float(size[1]) * GIB, source="the row"))
        if "HBM2e" in variant:  # six stacks at 3.2 Gb/s a pin
            memory = dataclasses.replace(
                memory, kind="HBM2E", bandwidth_bytes_per_s=Figure(value=2.4e12, source="six stacks of HBM2e")
            )
        device = dataclasses.replace(device, memory=memory)
    return device


def read_model(row: Row) -> ModelShape:
    """The model's dimensions; what is missing follows from its name, the number of parameters or the family's habit."""
    known = KNOWN_SHAPES.get(str(row.get("model") or "").lower().split(" (")[0], {})
    row = {**known, **{key: value for key, value in row.items() if value is not None}}
    hidden, heads = count(row, "hidden"), count(row, "heads")
    name = str(row.get("model") or "").lower()
    classic = ("gpt" in name and "oss" not in name) or "megatron" in name or "turing" in name
    if not number(row, "vocab") and not classic:
        raise RowSkipped("vocab is missing")
    vocab = count(row, "vocab", 51200)
    experts = count(row, "experts", 0) if number(row, "experts") else 0
    fields: dict[str, Any] = {"hidden": hidden, "heads": heads, "vocab": vocab}
    fields["kv_heads"] = count(row, "kv_heads", heads)
    fields["head_dim"] = count(row, "head_dim", 0) if number(row, "head_dim") else 0
    fields["mla"] = "mla" in str(row.get("attention") or "").lower()
    stated = number(row, "params")
    in_name = re.search(r"(\d+(?:\.\d+)?)b", name)
    params = stated or (float(in_name[1]) * 1e9 if in_name else None)
    width = count(row, "ffn", 4 * hidden if classic else -(-8 * hidden // (3 * 256)) * 256)
    if experts:
        fields |= {"experts": experts, "topk": count(row, "topk"), "moe_ffn": count(row, "moe_ffn")}
        fields |= {"shared_experts": int(number(row, "shared_experts") or 0), "ffn": width}
        layers = count(row, "layers")
        choices = [ModelShape(**fields, layers=layers, dense_layers=n) for n in range(min(layers, 5))]
        if params is None or not number(row, "ffn"):
            return choices[0]
        return min(choices, key=lambda m: abs(m.parameters - params))
    if not number(row, "layers"):
        if params is None:
            raise RowSkipped("layers is missing")
        one = ModelShape(**fields, layers=1, ffn=width, gated=not classic, tied=True)
        per_layer = one.parameters - one.embedding_parameters
        return dataclasses.replace(one, layers=max(1, round((params - one.embedding_parameters) / per_layer)))
    fields |= {"layers": count(row, "layers"), "ffn": width}
    if stated is None:
        return ModelShape(**fields, gated=not classic, tied=classic)
    gates = (False,) if width == 4 * hidden else (True, False)  # four times h is the classic MLP without a gate
    shapes = [ModelShape(**fields, gated=gated, tied=tied) for gated in gates for tied in (False, True)]
    return min(shapes, key=lambda m: abs(m.parameters - stated))


def read_sequence(row: Row, model: ModelShape) -> int:
    """Tokens of a sequence; where only a step and its TFLOP/s are published, the power of two that explains both."""
    batch, step, rate = number(row, "global_batch"), number(row, "step_s"), number(row, "tflops_per_gpu")
    if number(row, "seq") or not (batch and step and rate):
        return count(row, "seq")
    flops = rate * 1e12 * count(row, "gpus") * step / batch
    sizes = [512, 1024, 2048, 4096, 8192, 16384]

    def distance(seq: int) -> float:  # of the nearer of both ways to count, with and without recomputation
        once = model.training_flops(seq, causal=False)
        return min(abs(math.log(flops / (once * factor))) for factor in (1.0, 4.0 / 3.0))

    return min(sizes, key=distance)


def read_network(row: Row, gpus_per_node: int) -> float | None:
    """Bytes per second one way and per GPU, where the row's text gives a number for the node."""
    text = str(row.get("network") or "")
    text = re.sub(r"(Storage|Management)[^,]*,?", "", text)
    per_node = re.search(r"(\d+) ?Gbps (?:RoCE )?(?:per node|node-node)", text)
    if per_node:
        return float(per_node[1]) * 1e9 / 8 / gpus_per_node
    cards = re.search(r"(\d+)x ?[^,]*?(\d+) ?Gb(?:/s|/Sec)?\b", text)
    if cards and float(cards[2]) >= 100:
        return float(cards[1]) * float(cards[2]) * 1e9 / 8 / gpus_per_node
    return None


def read_sharding(row: Row, dp: int) -> tuple[str, int]:
    """What data-parallel ranks share out, and over how many."""
    text = str(row.get("sharding") or "").lower()
    over = re.search(r"over (\d+) gpus", text)
    ranks = min(dp, int(over[1])) if over else 0
    if "hsdp" in text:
        return "zero3", 8
    if "fsdp" in text or "zero3" in text:
        return "zero3", 0
    if text in ("none", "zero0"):
        return "none", 1
    return "zero1", ranks


def read_recompute(row: Row) -> str | None:
    """The policy of a row, or None."""
    text = str(row.get("recompute") or "").lower()
    return next((word for word in ("full", "selective", "none") if word in text), "selective" if text else None)


# NVIDIA's recipes (NeMo, Megatron-Bridge, their MLPerf entries) keep and reduce gradients in bf16.
_NEMO = ("dgxc", "nemo", "megatron-bridge", "mlperf")
# DeepSpeed's and InternEvo's Adam is not fused: fp32 gradients and temporaries of the shard, 16 bytes more at the peak.
_EAGER_ADAM = ("bigscience", "internevo")


def read_gradient_bytes(source: str, precision: str) -> float:
    """Bytes of a parameter's gradients, by the framework's habit."""
    if source.startswith("bigscience"):
        return 2.0 if precision == "fp16" else 6.0  # bf16 with another copy in fp32
    if source.startswith("nanotron"):
        return 6.0
    return 2.0 if source.startswith((*_NEMO, "internevo")) else 4.0


def read_chunks(row: Row, model: ModelShape, pp: int) -> int:
    """Chunks of layers that each pipeline stage holds."""
    if number(row, "vp") or pp == 1:
        return count(row, "vp", 1)
    if number(row, "vp_layers_per_stage"):
        return max(1, model.layers // pp // count(row, "vp_layers_per_stage"))
    interleaves = "dgxc" in str(row.get("source")) and model.layers % pp == 0
    return model.layers // pp if interleaves else 1


def read_release(row: Row) -> tuple[int, int] | None:
    """Year and month of a Megatron-Bridge release, or None."""
    found = re.match(r"megatron-bridge-(\d+)\.(\d+)", str(row.get("source")))
    return (int(found[1]), int(found[2])) if found else None


def read_experts(row: Row, chip: str) -> dict[str, Any]:
    """How tokens reach their experts and how those run, by what its release's public recipes say.

    Megatron-Bridge (scripts/performance/configs, src/megatron/bridge/perf_recipes at v0.2.0 to v0.6.0): NCCL's
    all-to-all at first; DeepEP or HybridEP on NVL72 racks from 25.11 on, on others from 26.02 on, but not for
    Qwen3-235B; H100s overlap the exchange with compute until 26.04 and for that model after, B200s where it leaves the
    node. MXFP8 runs of Qwen, DeepSeek and GPT-OSS on racks are one CUDA graph with fused experts and an overlapped
    exchange from 26.06 on, as is Qwen3-30B on B300, and from 26.08 on the rest of Qwen and DeepSeek on B300, Qwen on
    B200.
    """
    release, model = read_release(row), str(row.get("model")).lower()
    if release is None:
        return {}
    rack, qwen, large = chip in ("gb200", "gb300"), "qwen" in model, "235b" in model
    late = {"b300": qwen or "deepseek" in model, "b200": qwen}.get(chip, False)
    where = (rack and "kimi" not in model) or (chip == "b300" and qwen and not large) or (release >= (26, 8) and late)
    whole = "mx" in str(row.get("precision")).lower() and release >= (26, 6) and where
    once = whole or "deepseek" in model or (release >= (25, 11) if rack else release >= (26, 2) and not large)
    under = chip == "h100" and (large or release < (26, 6))
    return {
        "exchange": "deduplicated" if once else "all_to_all",
        "overlap_experts": whole or under or (chip == "b200" and count(row, "ep", 1) > 8),
        "fused_experts": whole,
        "graphs": whole,
    }


def build_job(row: Row) -> TrainingJob:
    """The job that a row describes."""
    device, precision, model = read_chip(row), read_precision(row), read_model(row)
    gpus, seq = count(row, "gpus"), read_sequence(row, model)
    tp, pp, cp = count(row, "tp", 1), count(row, "pp", 1), count(row, "cp", 1)
    if gpus % (tp * pp * cp):
        raise RowSkipped(f"{gpus} GPUs do not divide into tp {tp} x pp {pp} x cp {cp}")
    dp = gpus // (tp * pp * cp)
    micro, local = number(row, "micro_batch"), number(row, "local_batch")
    batch, accumulated = number(row, "global_batch"), number(row, "grad_accum")
    if micro is None and local is not None:  # a pipeline cuts the local batch into microbatches
        micro, batch = (local if pp == 1 else 1.0), batch or local * dp
    if micro is None:
        micro = batch / dp / accumulated if batch and accumulated else 1.0
    batch = batch or dp * micro * (accumulated or 1.0)
    node = count(row, "gpus_per_node", 4 if device.id in ("gb200", "gb300") else 8)
    sharding, ranks = read_sharding(row, dp)
    source = str(row.get("source"))
    old = precision == "fp16" or source.startswith("bigscience")
    recompute = read_recompute(row)
    shape = f"{row.get('recompute') or ''} {row.get('source')}".lower()
    # Before flash attention and sequence parallelism (2022) Megatron stored scores and repeated norms on every rank.
    sequence = (
        "sp=false" not in str(row.get("overlap")).lower()
        and (not old or "sequence" in shape)
        and setting(row, "SP", "SEQ_PARALLEL") not in ("0", "False")
    )
    # Transformer Engine's kernels, or AMD's own in Primus, rather than PyTorch's.
    library = "megatron" in str(row.get("sharding")) or "TE " in str(row.get("overlap")) or "primus" in source
    native = (sharding == "zero3" and not library) or "nanotron" in source  # FlashAttention-2 in both
    pure = row.get("mp_mode") == "PURE"
    how = read_experts(row, device.id) if model.experts else {}
    if "1" in (setting(row, "MCORE_CUDA_GRAPH"), setting(row, "LAYER_CUDA_GRAPH")):
        how["graphs"] = True
    eights = setting(row, "FP8_DPA") in ("1", "True") or (how.get("fused_experts") and device.id.endswith("300"))
    attention = "unfused" if old else "flash2" if native else "flash8" if eights else "flash"
    return TrainingJob(
        model=model,
        on=device,
        gpus=gpus,
        seq=seq,
        global_batch=max(1, round(batch)),
        micro_batch=max(1, round(micro)),
        precision=precision,
        tp=tp,
        pp=pp,
        vp=read_chunks(row, model, pp),
        cp=cp,
        ep=count(row, "ep", 1),
        sharding=sharding,
        shard_ranks=ranks,
        recompute=recompute,
        lora="lora" in str(row.get("task") or "").lower(),
        attention=attention,
        sequence_parallel=sequence,
        overlap=not old,
        gradient_bytes=read_gradient_bytes(source, precision),
        optimizer_bytes=28.0 if source.startswith(_EAGER_ADAM) else 12.0,
        shard_weight_bytes=2.0 if pure else 4.0,
        network_bytes_per_s=read_network(row, node),
        node_gpus=min(node, gpus) if device.id not in ("gb200", "gb300") else node,
        **how,
    )


def read_step(row: Row, job: TrainingJob) -> float | None:
    """The measured seconds of a step, or None."""
    if number(row, "step_s"):
        return number(row, "step_s")
    tokens = job.global_batch * job.seq
    rate = number(row, "tokens_per_s_per_gpu")
    if rate:
        return tokens / rate / job.gpus
    flops = job.model.training_flops(job.seq, causal=False) * job.global_batch
    share, counted = number(row, "mfu_pct"), number(row, "tflops_per_gpu")
    peak = job.device.peak("fp8" if job.precision == "fp8" else "bf16") or job.device.peak("fp16")
    if counted:
        if number(row, "hfu_pct") and job.recompute == "full":
            flops *= 4.0 / 3.0
        return flops / (counted * 1e12 * job.gpus)
    if share and peak:
        return flops / (share / 100 * peak.value * job.gpus)
    return None


@dataclasses.dataclass
class RowScore:
    """What was predicted for a row and what was published."""

    row: Row
    job: TrainingJob
    cost: TrainingCost
    step_s: float | None
    memory: float | None
    oom: bool
    power_w: float | None

    @property
    def error(self) -> float | None:
        """The relative error of the step."""
        return self.cost.step_s / self.step_s - 1.0 if self.step_s else None

    @property
    def memory_error(self) -> float | None:
        """The relative error of the memory."""
        return self.cost.memory_bytes / self.memory - 1.0 if self.memory else None

    @property
    def power_error(self) -> float | None:
        """The relative error of the watts at the wall per GPU."""
        return (self.cost.power_w + _HOST_W_PER_GPU) / self.power_w - 1.0 if self.power_w else None


def score_row(row: Row) -> RowScore:
    """Predict a row and keep what it publishes."""
    try:
        job = build_job(row)
        # The run did run: where its policy is not stated, take the least that fits within the model's own error.
        job = dataclasses.replace(job, recompute=choose_recompute(job, room=1.15))
        with np.errstate(over="raise", invalid="raise"):
            cost = estimate_training(job)
        step = read_step(row, job)
    except TesseraError as error:
        raise RowSkipped(str(error).splitlines()[0]) from error
    except (ArithmeticError, ValueError, TypeError, LookupError) as error:
        raise RowSkipped(f"cannot be computed: {error}") from error
    if not all(map(math.isfinite, (cost.step_s, cost.error_s, cost.memory_bytes, cost.power_w))):
        raise RowSkipped("cannot be computed: sizes beyond all that exists")
    memory = number(row, "memory_gib") or number(row, "memory_gb_published")
    oom = row.get("oom") is True
    if step is None and memory is None and not oom:
        raise RowSkipped("no time, rate or memory is published")
    power = number(row, "avg_power_w_per_gpu_incl_host")
    return RowScore(row, job, cost, step, memory * GIB if memory else None, oom, power)


def choose_half(row: Row) -> int:
    """0: the half that the constants were chosen on; 1: the half that was kept."""
    key = "|".join(str(row.get(name)) for name in ("model", "gpu", "source"))
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 2


def summarise(scores: Iterable[RowScore]) -> dict[str, Any]:
    """Errors of a set of rows."""
    scores = list(scores)
    steps = [s for s in scores if s.error is not None]
    errors = [abs(s.error) for s in steps if s.error is not None]
    memory = [abs(s.memory_error) for s in scores if s.memory_error is not None]
    power = [abs(s.power_error) for s in scores if s.power_error is not None]
    inside = [abs(s.cost.step_s - s.step_s) <= s.cost.error_s for s in steps if s.step_s]
    return {
        "scored": len(scores),
        "steps": len(steps),
        "median_error": statistics.median(errors) if errors else None,
        "within_30": sum(e <= 0.30 for e in errors) / len(errors) if errors else None,
        "median_bias": statistics.median(s.error for s in steps if s.error is not None) if errors else None,
        "coverage": sum(inside) / len(inside) if inside else None,
        "memory_rows": len(memory),
        "memory_median_error": statistics.median(memory) if memory else None,
        "power_rows": len(power),
        "power_median_error": statistics.median(power) if power else None,
        "oom_rows": sum(s.oom for s in scores),
        "oom_called_fitting": sum(s.oom and s.cost.fits for s in scores),
    }


def score_file(path: Path, half: int | None = None) -> tuple[list[RowScore], Counter[str]]:
    """Scores of a file's rows and the reasons of those that were skipped."""
    scores, skipped = [], Counter[str]()
    try:
        rows = list(read_rows(path))
    except (OSError, EOFError, zlib.error) as error:
        raise SystemExit(f"cannot read {path}: {error}") from None
    for _, row in rows:
        if row is None:
            skipped["not a JSON object"] += 1
            continue
        if half is not None and choose_half(row) != half:
            continue
        try:
            scores.append(score_row(row))
        except RowSkipped as reason:
            skipped[str(reason)[:120]] += 1
    return scores, skipped


KEYS = ("source", "gpu", "precision", "kind")


def name_group(score: RowScore, key: str) -> str:
    """The group of a row: a field of it, the format that was understood, or the kind of model."""
    if key == "precision":
        return score.job.precision
    if key == "kind":
        return "experts" if score.job.model.experts else "LoRA" if score.job.lora else "dense"
    return str(score.row.get(key))


def report_scores(scores: list[RowScore], skipped: Counter[str]) -> dict[str, Any]:
    """Errors of all rows and by group, and why rows were skipped."""
    result = summarise(scores)
    result["skipped"] = {"rows": sum(skipped.values()), "reasons": dict(skipped.most_common())}
    result["by"] = {}
    for key in KEYS:
        groups: dict[str, list[RowScore]] = defaultdict(list)
        for score in scores:
            groups[name_group(score, key)].append(score)
        result["by"][key] = {name: summarise(groups[name]) for name in sorted(groups)}
    return result


def main() -> None:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--half", type=int, choices=(0, 1), help="0: the constants were chosen on it; 1: kept apart")
    parser.add_argument("--rows", action="store_true", help="print every row, worst first")
    parser.add_argument("--write", type=Path, help="write the errors of both halves to this file")
    args = parser.parse_args()
    if args.write:
        sides = {"chosen_on": 0, "kept_apart": 1, "all": None}
        write_result(args.write, {name: report_scores(*score_file(args.file, half)) for name, half in sides.items()})
        return
    scores, skipped = score_file(args.file, args.half)
    result = report_scores(scores, skipped)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    if args.rows:
        for s in sorted(scores, key=lambda s: -abs(s.error or 0.0)):
            print(describe(s))
    for key in KEYS:
        for name, one in result["by"][key].items():
            print(f"{key:10} {name:34} {format_summary(one)}")
    print(f"{'all':45} {format_summary(result)}")
    print("skipped", result["skipped"])


def format_summary(one: dict[str, Any]) -> str:
    """One line of a summary."""

    def share(value: float | None) -> str:
        return "    -" if value is None else f"{value:5.0%}"

    return (
        f"steps {one['steps']:4} median {share(one['median_error'])} bias {share(one['median_bias'])} "
        f"within 30% {share(one['within_30'])} coverage {share(one['coverage'])} "
        f"memory {one['memory_rows']:3} {share(one['memory_median_error'])} power {share(one['power_median_error'])}"
    )


def describe(s: RowScore) -> str:
    """One row: what it is, both figures, the parts."""
    job, parts = s.job, s.cost.parts
    layout = (
        f"tp{job.tp} pp{job.pp} vp{job.vp} cp{job.cp} ep{job.ep} dp{job.dp} mb{job.micro_batch} m{job.microbatches}"
    )
    top = " ".join(f"{k} {v / s.cost.step_s:.0%}" for k, v in parts.items() if v > 0.02 * s.cost.step_s)
    error = "     -" if s.error is None else f"{s.error:+6.0%}"
    memory = (
        ""
        if s.memory_error is None
        else f" mem {s.cost.memory_bytes / GIB:.0f}/{s.memory / GIB:.0f} {s.memory_error:+.0%}"
    )
    return (
        f"{error} {s.row.get('source')} {s.row.get('model')} {job.gpus}x{job.device.id} {job.precision} s{job.seq} {layout} "
        f"{job.sharding} {s.cost.recompute}{'' if s.cost.fits else ' OVER'}{' OOM' if s.oom else ''} {top}{memory}"
    )


if __name__ == "__main__":
    main()
