"""`tessera.optimize` beside eager torch and torch.compile's modes: GPT-2-small training, BERT and ResNet-50 inference.

    PYTHONPATH=src:.carry/site python benchmarks/device/optimize.py RESULTS.json [--only gpt2,bert,resnet50]
                                                                    [--budget-s 400] [--variants reduce-overhead] [--tuned] [--quick]

For each model: ms and J of eager, of `torch.compile` in its modes (model alone, as people use it), and of `optimize()`;
what it rewrote; and how much of the measured difference to eager the trace of rewrites explains. The last comparison
(optimize against the best mode) is made in turns, so that drift falls on both. `--tuned` adds max-autotune-no-cudagraphs
(333 s to compile for GPT-2). `--quick` runs tiny models on the CPU: the logic, no figures. No clock or limit is changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics as st
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tessera
import vision
from tessera.monitor.iteration import measure_iteration

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

MODES = ("default", "reduce-overhead")
SECONDS_EACH = 4.5  # of measuring a variant: three times the least EnergyBenchmark takes
TURNS = 3
KERNELS = 40  # of an iteration that are kept


@dataclasses.dataclass(slots=True)
class Load:
    """One model: how to run an iteration with `model` in its place, and what to hand to optimize."""

    name: str
    model: torch.nn.Module
    iteration: Callable[[Callable[..., Any]], Callable[[], Any]]
    to_optimize: Callable[[], tuple[Any, Any]]
    after: Callable[[Any], Callable[[], Any]]


def gpt2(quick: bool, device: str, dtype: torch.dtype) -> Load:
    """A training step: forward with its loss, backward, AdamW. As in benchmarks/device/overhead.py."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 128} if quick else {}
    config = GPT2Config(use_cache=False, **size)
    model = GPT2LMHeadModel(config).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (2, 32) if quick else (8, 1024)
    ids = torch.randint(0, config.vocab_size, shape, device=device)

    def step_with(run: Callable[..., Any]) -> Callable[[], Any]:
        def step() -> Any:
            loss = run(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    return Load("gpt2", model, step_with, lambda: (step_with(model), ()), lambda fast: fast)


def inference(name: str, model: torch.nn.Module, kwargs: dict[str, Any], args: tuple[Any, ...] = ()) -> Load:
    """One forward without gradients."""
    model.eval()

    def forward_with(run: Callable[..., Any]) -> Callable[[], Any]:
        def forward() -> Any:
            with torch.no_grad():
                return run(*args, **kwargs)

        return forward

    return Load(name, model, forward_with, lambda: (model, kwargs or args), forward_with)


def bert(quick: bool, device: str, dtype: torch.dtype) -> Load:
    """BERT-base, batch 32 of 128 tokens."""
    from transformers import BertConfig, BertModel

    size = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128,
            "vocab_size": 128} if quick else {}  # fmt: skip
    config = BertConfig(**size)
    ids = torch.randint(0, config.vocab_size, (2, 16) if quick else (32, 128), device=device)
    return inference("bert", BertModel(config).to(device, dtype), {"input_ids": ids})


def resnet50(quick: bool, device: str, dtype: torch.dtype) -> Load:
    """ResNet-50, batch 64, channels last as torch recommends for bf16."""
    vision.importable()
    import torchvision

    model = (torchvision.models.resnet18 if quick else torchvision.models.resnet50)(weights=None)
    model = model.to(device, dtype, memory_format=torch.channels_last)
    x = torch.randn((1, 3, 32, 32) if quick else (64, 3, 224, 224), device=device, dtype=dtype)
    return inference("resnet50", model, {}, (x.to(memory_format=torch.channels_last),))


LOADS = {"gpt2": gpt2, "bert": bert, "resnet50": resnet50}


class Results:
    """Rows by model, written after each one."""

    def __init__(self, path: Path, deadline: float) -> None:
        self.path, self.deadline = path, deadline
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self.data: dict[str, Any] = {
            "device": name, "torch": torch.__version__, "models": {}, "skipped": [],
        }  # fmt: skip

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def save(self) -> None:
        write_result(self.path, self.data)

    def row(self, model: str, name: str, make: Callable[[], dict[str, Any]], needs_s: float) -> dict[str, Any] | None:
        """Run one guarded row; None where it was skipped or failed."""
        if self.left_s() < needs_s:
            self.data["skipped"].append(f"{model} {name}: {needs_s:.0f} s needed, {self.left_s():.0f} s left")
            self.save()
            return None
        begin = time.monotonic()
        try:
            found = make()
        except Exception as e:  # noqa: BLE001 - a row must not take the others with it
            traceback.print_exc()
            found = {"error": f"{type(e).__name__}: {str(e)[:300]}"}
        found["took_s"] = time.monotonic() - begin
        self.data["models"].setdefault(model, {})[name] = found
        self.save()
        print(f"{model:9s} {name:28s} " + "  ".join(f"{k} {_short(v)}" for k, v in found.items() if not isinstance(v, dict)),
              flush=True)  # fmt: skip
        return None if "error" in found else found


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def figures(call: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Milliseconds and joules of a call at steady state."""
    for _ in range(3):
        call()
    found = measure_iteration(call, seconds)
    return {"ms": found.time_s * 1e3, "j": found.energy_j, "error_j": found.error_j}


def compiled(call: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """A compiled iteration: how long the first calls take, and the steady state."""
    begin = time.monotonic()
    for _ in range(3):
        call()
    compile_s = time.monotonic() - begin
    return {"compile_s": compile_s, **figures(call, seconds)}


def in_turns(first: Callable[[], Any], second: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """(J of the first over J of the second, the same for seconds), medians of alternating measurements."""
    joules, times = [], []
    for _ in range(TURNS):
        a, b = figures(first, seconds), figures(second, seconds)
        times.append(a["ms"] / b["ms"])
        joules.append(a["j"] / b["j"] if a["j"] and b["j"] else float("nan"))
    return st.median(joules), st.median(times)


def explained(fast: Any) -> dict[str, Any]:
    """The sum of the trace's savings beside the measured difference; 1 is all of it, neither more nor less.

    Eager and chosen are those that `optimize` itself measured one after the other: what a user of its report sees. The
    line "rest" explains nothing and is kept apart: with it timed lines add up to the difference whatever they say.
    """
    named = [r for r in fast.rewrites if r.rule != "rest"]
    rest = [r for r in fast.rewrites if r.rule == "rest"]
    saved_s = sum(r.saved_s or 0.0 for r in named)
    saved_j = sum(r.saved_j or 0.0 for r in named)
    found = {"trace_saved_ms": saved_s * 1e3, "trace_saved_j": saved_j,
             "rest_ms": sum(r.saved_s or 0.0 for r in rest) * 1e3, "rest_j": sum(r.saved_j or 0.0 for r in rest)}  # fmt: skip
    eager = next(w for w in fast.variants if w.name == "eager")
    chosen = next(w for w in fast.variants if w.name == fast.chosen)
    for name, told, before, after in (
        ("s", saved_s, eager.time_s, chosen.time_s), ("j", saved_j, eager.energy_j, chosen.energy_j)
    ):  # fmt: skip
        if before and after and before != after:
            found[f"explained_{name}"] = 1.0 - abs(told - (before - after)) / abs(before - after)
            found[f"told_over_true_{name}"] = told / (before - after)
    return found


def kernel_ms(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of an iteration by kernel, the longest first: what the trace's figures can be held against."""
    if not torch.cuda.is_available():
        return {}
    from torch.profiler import ProfilerActivity, profile

    count = 3
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    sums: dict[str, float] = {}
    for event in seen.events():
        sums[event.name] = sums.get(event.name, 0.0) + event.device_time_total * 1e-3 / count
    return {name[:90]: round(ms, 4) for name, ms in sorted(sums.items(), key=lambda item: -item[1])[:KERNELS] if ms}


def optimized(
    load: Load, budget_s: float, seconds: float, keep: list[Any], variants: list[str] | None
) -> dict[str, Any]:
    """`tessera.optimize`, what it did, and what it takes."""
    target, inputs = load.to_optimize()
    begin = time.monotonic()
    fast = tessera.optimize(target, inputs, budget_s=budget_s, on=None if torch.cuda.is_available() else "h200",
                            variants=variants if torch.cuda.is_available() else ["default"],
                            progress=lambda line: print(f"          {line}", flush=True))  # fmt: skip
    prepare_s = time.monotonic() - begin
    print(fast, flush=True)
    keep.append(load.after(fast))
    now = figures(keep[-1], seconds)
    trace = fast.trace
    told = {} if trace is None else {
        "basis": trace.basis, "told_before_ms": (trace.before_s or 0) * 1e3, "told_after_ms": (trace.after_s or 0) * 1e3,
        "told_before_j": trace.before_j, "told_after_j": trace.after_j,
        "launches": [trace.launches_before, trace.launches_after],
    }  # fmt: skip
    return {"chosen": fast.chosen, "prepare_s": prepare_s, **now, **explained(fast), **told,
            "rewrites": fast.to_dict(), "eager_kernel_ms": kernel_ms(load.iteration(load.model)),
            "kernel_ms": kernel_ms(keep[-1])}  # fmt: skip


def one(
    name: str, results: Results, quick: bool, modes: tuple[str, ...], share_s: float, variants: list[str] | None
) -> None:
    """All rows of one model."""
    device = "cpu" if quick else "cuda"
    torch.manual_seed(0)
    load = LOADS[name](quick, device, torch.float32 if quick else torch.bfloat16)
    seconds = 0.2 if quick else SECONDS_EACH
    until = time.monotonic() + share_s
    keep: list[Any] = []
    eager = results.row(name, "eager", lambda: figures(load.iteration(load.model), seconds), 2 * seconds)
    if eager is None:
        return
    fast = results.row(
        name, "optimize", lambda: optimized(load, 0.55 * share_s, seconds, keep, variants), 0.2 * share_s
    )
    calls = {mode: load.iteration(torch.compile(load.model, mode=mode)) for mode in modes}
    costs: dict[str, float] = {}
    for mode, call in calls.items():
        needs = 350.0 if mode.startswith("max") else min(60.0, 0.5 * max(0.0, until - time.monotonic()))
        row = results.row(name, f"torch.compile {mode}", lambda call=call: compiled(call, seconds), needs)
        if row is not None:
            costs[mode] = row["j"] or row["ms"]
    if fast is None or not costs or not keep:
        return
    mode = min(costs, key=lambda name: costs[name])

    def against() -> dict[str, Any]:
        joules, times = in_turns(keep[0], calls[mode], seconds / 3)
        return {"best_mode": mode, "j_ratio": joules, "s_ratio": times}

    results.row(name, "optimize over best mode", against, 2 * TURNS * seconds / 3 + 15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(LOADS))
    parser.add_argument("--budget-s", type=float, default=400.0)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--modes", default=",".join(MODES), help="of torch.compile, by comma; '' for none")
    parser.add_argument("--variants", help="those optimize() may try, by comma; all where not given")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if not given.quick and not torch.cuda.is_available():
        sys.exit("no CUDA device: --quick runs the logic on the CPU")
    vision.importable()
    names = given.only.split(",")
    results = Results(given.out, time.monotonic() + given.budget_s)
    modes = (
        ("default",)
        if given.quick
        else (*filter(None, given.modes.split(",")), *(["max-autotune-no-cudagraphs"] if given.tuned else []))
    )
    for i, name in enumerate(names):
        weights = [2.0 if n == "gpt2" else 1.0 for n in names[i:]]  # a backward and an optimizer to compile
        try:
            one(name, results, given.quick, modes, results.left_s() * weights[0] / sum(weights),
                given.variants.split(",") if given.variants else None)  # fmt: skip
        except Exception:  # noqa: BLE001 - the next model may work
            traceback.print_exc()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print("\nmodel     row                          ms        J        explained J / s")
    for name, rows in results.data["models"].items():
        for row, found in rows.items():
            if "ms" in found:
                share = "  ".join(_short(found[k]) for k in ("explained_j", "explained_s") if k in found)
                print(f"{name:9s} {row:28s} {found['ms']:<9.4g} {_short(found['j']):<8s} {share}")
            elif "j_ratio" in found:
                print(f"{name:9s} {row:28s} J {found['j_ratio']:.3f}  s {found['s_ratio']:.3f}  ({found['best_mode']})")
    for line in results.data["skipped"]:
        print("skipped:", line)


if __name__ == "__main__":
    main()
