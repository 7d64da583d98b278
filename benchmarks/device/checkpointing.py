"""Energy-aware checkpointing on a Llama of 1.1 billion parameters: joules, seconds and peak memory of three settings.

    PYTHONPATH=src:.carry/site python benchmarks/device/checkpointing.py RESULTS.json [--budget-s 150] [--batch 16]
        [--sequence 1024] [--layers 22] [--quick] [--plan-only] [--host-cost] [--reorder]

The settings are: no checkpointing, the plan of fewest joules within the middle of the other two's memory, and every
block recomputed. Each is predicted first (on the meta device), then trained (bf16, AdamW, random weights and tokens)
in steady state, in rounds, so that a drift of the clocks falls on all. Goal: each prediction within 10%. `--quick` runs
tiny shapes for a moment, on a CPU too (no joules there). `--plan-only` stops after the predictions, `--host-cost` prints
what checkpoints cost the host, `--reorder` what another order of a step is predicted to do to its peak. At a batch of 16 the device is the slower of the two clocks; at 4 the host may be.
No clock, limit or mode is changed. RESULTS.json is written after every row.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import gc
import json
import statistics as st
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import vision
from tessera.rewrite import checkpoint as plans

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

Row = dict[str, Any]
SETTINGS = ("none", "chosen", "all")
ROUNDS, WARM_STEPS, MEASURED_S = 2, 3, 4.5
# A round of three settings, with its warm-up, the sensor's answer and the tidying between: not begun with less left.
ROUND_S = 40.0


class Results:
    """The rows so far, on disk after each."""

    def __init__(self, path: Path, head: Row) -> None:
        self._path, self.data = path, {**head, "rows": [], "skipped": [], "errors": []}
        self.save()

    def save(self) -> None:
        write_result(self._path, self.data)

    def add(self, row: Row) -> None:
        self.data["rows"].append(row)
        self.save()

    def guarded(self, what: str, fn: Callable[[], Any]) -> Any:
        """The answer, or None and the error written down: one failure must not cost the rest."""
        try:
            return fn()
        except Exception as e:  # noqa: BLE001 - whatever a device run throws is a result
            print(f"{what}: {type(e).__name__}: {e}", flush=True)
            self.data["errors"].append({"what": what, "error": f"{type(e).__name__}: {str(e)[:500]}"})
            self.save()
            return None


# -- the model --------------------------------------------------------------------------------------------------


def llama(args: argparse.Namespace, device: str) -> torch.nn.Module:
    """TinyLlama's shape; random weights."""
    vision.importable()
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, heads, kv_heads, vocabulary = (64, 128, 4, 2, 256) if args.quick else (2048, 5632, 32, 4, 32000)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
        vocab_size=vocabulary, num_hidden_layers=args.layers, max_position_embeddings=args.sequence, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def inputs_of(args: argparse.Namespace, device: str) -> dict[str, torch.Tensor]:
    vocabulary = 256 if args.quick else 32000
    ids = torch.randint(0, vocabulary, (args.batch, args.sequence), device=device)
    return {"input_ids": ids, "labels": ids}


def training_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Mapping[str, Any]) -> Any:
    def step() -> torch.Tensor:
        out = model(**inputs)  # held until the step is over, as the prediction takes it to be
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return out.loss.detach()

    return step


# -- predicted --------------------------------------------------------------------------------------------------


def planned(args: argparse.Namespace, chip: str) -> plans.CheckpointPlan:
    """The plan of fewest joules within the middle of what no and full checkpointing need."""
    model, inputs = llama(args, "meta"), inputs_of(args, "meta")
    ends = plans.plan(model, inputs, on=chip, optimizer="adamw", selective=False).settings
    middle = 0.5 * (ends["none"].peak_bytes + ends["all"].peak_bytes)
    return plans.plan(model, inputs, on=chip, optimizer="adamw", memory_bytes=middle)


# -- measured ---------------------------------------------------------------------------------------------------


def measure(step: Callable[[], Any], args: argparse.Namespace) -> Row:
    """Steady steps without synchronising; the peak is that of the steps alone."""
    if not torch.cuda.is_available():
        step()
        begin = time.perf_counter()
        step()
        return {"ms": (time.perf_counter() - begin) * 1e3, "J": None, "W": None, "peak_bytes": None}
    import pynvml

    from record_models import figures, steady

    pynvml.nvmlInit()  # `steady` reads clocks; counted by NVML, so once more does no harm
    for _ in range(WARM_STEPS):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    each_s = time.perf_counter() - begin
    row = figures(*steady(step, each_s, 0.6 if args.quick else MEASURED_S))
    return {**row, "peak_bytes": torch.cuda.max_memory_allocated()}


def tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def gradients_differ(model: torch.nn.Module, inputs: Mapping[str, Any], ways: Mapping[str, Any]) -> float:
    """The largest relative Frobenius difference of any parameter's gradient with the plan applied."""

    def gradients() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        model(**inputs).loss.backward()
        found = [p.grad.detach().clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found

    plain = gradients()
    with plans.apply(model, ways):
        again = gradients()
    return max(
        float((a - b).float().norm() / b.float().norm().clamp_min(1e-30)) for a, b in zip(again, plain, strict=True)
    )


def trained(args: argparse.Namespace, plan: plans.CheckpointPlan, results: Results, left: Callable[[], float]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model, inputs = llama(args, device), inputs_of(args, device)
    ways = {"none": {}, "chosen": plan.choices, "all": plans.every(model)}
    differ = results.guarded("gradients", lambda: gradients_differ(model, inputs, plan.choices))
    results.data["gradients_differ"] = differ
    tidy()
    step = training_step(model, torch.optim.AdamW(model.parameters(), lr=1e-5), inputs)
    for round_ in range(1 if args.quick else ROUNDS):
        for name in SETTINGS:
            if left() < (2.0 if args.quick else ROUND_S / len(SETTINGS)):
                results.data["skipped"].append(f"{name}, round {round_}: {left():.0f} s of the budget left")
                continue
            with plans.apply(model, ways[name]):
                row = results.guarded(f"{name}, round {round_}", lambda: measure(step, args))
            if row is not None:
                results.add({"setting": name, "round": round_, **row})
            tidy()


# -- another order ----------------------------------------------------------------------------------------------


def reordering() -> list[Row]:
    """Predicted peaks of power of a training step of twelve transformer layers, in its own order and in a better one."""
    from tessera.graph.capture import capture
    from tessera.rewrite import reorder

    with torch.device("meta"):
        layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True, dropout=0.0)
        blocks = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        model = torch.nn.Sequential(blocks, torch.nn.Linear(1024, 32000)).to(torch.bfloat16)
        x = torch.empty(16, 1024, 1024, dtype=torch.bfloat16)
    graph = capture(model, x, mode="train", optimizer="adamw")
    found = []
    for window_s in (0.02, 0.005, 0.001):
        order = reorder.plan(graph, window_s=window_s)
        row = {k: getattr(order, k) for k in ("window_s", "peak_w_before", "peak_w_after", "free", "moved", "why")}
        found.append({**row, "operators": len(graph.ops)})
        print(
            f"{1e3 * window_s:5.0f} ms: {order.peak_w_before:.0f} W -> {order.peak_w_after:.0f} W, {order.free} of "
            f"{len(graph.ops)} operators free, {order.moved} moved: {order.why}"
        )
    return found


# -- what the host pays -----------------------------------------------------------------------------------------


def host_cost(count: int = 100) -> Row:
    """Microseconds of the host for small CPU products: plain, in a checkpoint, in a selective one; and a block alone."""
    torch.set_num_threads(1)
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def chain(n: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(y: torch.Tensor) -> torch.Tensor:
            for _ in range(n):
                y = torch.mm(y, w)
            return y

        return run

    def save(_ctx: Any, _func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    selective = functools.partial(create_selective_checkpoint_contexts, save)

    def us(run: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, float]:
        took = []
        for _ in range(60):
            t0 = time.perf_counter()
            y = run(x)
            t1 = time.perf_counter()
            y.sum().backward()
            took.append((t1 - t0, time.perf_counter() - t1))
        return 1e6 * min(t[0] for t in took), 1e6 * min(t[1] for t in took)  # what others on the machine do not add to

    ways: dict[str, Callable[[Any], Any]] = {
        "plain": lambda f: f,
        "checkpoint": lambda f: lambda y: checkpoint(f, y, use_reentrant=False),
        "selective": lambda f: lambda y: checkpoint(f, y, use_reentrant=False, context_fn=selective),
    }
    found: Row = {}
    for name, way in ways.items():
        forward, backward = us(way(chain(count)))
        one = us(way(chain(1)))
        found[name] = {"forward_us": forward / count, "backward_us": backward / count, "block_us": sum(one)}
    return found


# -- the table --------------------------------------------------------------------------------------------------


def table(results: Results) -> None:
    """Predicted beside measured (means of the rounds), and off by how much."""
    data = results.data
    print(f"\n{'setting':8} {'':9} {'ms':>9} {'J':>9} {'peak GiB':>9}")
    for name in SETTINGS:
        p = data["predicted"].get(name)
        rows = [r for r in data["rows"] if r["setting"] == name]
        if p is None or not rows:
            continue
        seen = {k: st.mean(r[k] for r in rows) if rows[0][k] is not None else None for k in ("ms", "J", "peak_bytes")}
        told = {"ms": p["time_s"] * 1e3, "J": p["energy_j"], "peak_bytes": p["peak_bytes"]}
        off = {k: told[k] / seen[k] - 1.0 if seen[k] else None for k in told}
        data.setdefault("off", {})[name] = off
        for label, values in (("predicted", told), ("measured", seen)):
            cells = [values["ms"], values["J"], None if values["peak_bytes"] is None else values["peak_bytes"] / 2**30]
            print(f"{name:8} {label:9} " + " ".join("        -" if c is None else f"{c:9.2f}" for c in cells))
        print(f"{name:8} {'off':9} " + " ".join("        -" if c is None else f"{c:+9.1%}" for c in off.values()))
    results.save()
    if data["device"] == "cpu":
        print("these times are a CPU's beside predictions for an H200: they show that the script runs, nothing else")
    for line in (*data["skipped"], *(f"{e['what']}: {e['error']}" for e in data["errors"])):
        print("skipped or failed:", line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--host-cost", action="store_true")
    parser.add_argument("--reorder", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    faulthandler.dump_traceback_later(args.budget_s + 120.0, exit=True)  # what hangs must not take the others' time

    def left() -> float:
        return float(args.budget_s - (time.perf_counter() - began))

    if args.quick:
        args.batch, args.sequence, args.layers = 8, 128, 4
    cuda = torch.cuda.is_available()
    head = {"torch": torch.__version__, "device": "cpu", "arguments": vars(args)}
    if cuda:
        head["device"] = torch.cuda.get_device_name()
    results = Results(args.results, head)
    if args.reorder:
        results.data["reorder"] = results.guarded("reorder", reordering)
        results.save()
        return
    results.data["host_cost"] = results.guarded("host cost", host_cost)
    if args.host_cost:
        print(json.dumps(results.data["host_cost"], indent=1))
        return
    plan = results.guarded("plan", lambda: planned(args, "h200"))
    if plan is None:
        return
    results.data |= {"predicted": {k: asdict(s) for k, s in plan.settings.items()}, "plan": plan.to_dict()}
    results.data["planned_s"] = time.perf_counter() - began
    results.save()
    print(plan, flush=True)
    if args.plan_only:
        return
    results.guarded("training", lambda: trained(args, plan, results, left))
    table(results)
    print(f"{time.perf_counter() - began:.0f} s of {args.budget_s:.0f}")


if __name__ == "__main__":
    main()
