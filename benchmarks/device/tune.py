"""`policy="throughput_per_watt"` on unmodified models: joules and seconds against bf16 eager and torch.compile's modes.

    PYTHONPATH=src:.carry/site python benchmarks/device/tune.py RESULTS.json [--only gpt2 bert resnet] [--budget-s 420] [--quick]

Each model: the function as it is, each compile mode alone, and what the tuner came to; then the chosen setting and the
best compile mode once more, in turns, so that drift falls on both. Regret: for the model with the smallest space every
setting is measured, and the search's choice is set against the best of them. `--warm` compiles beforehand, several
settings at once: it shortens the search, and changes no figure.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

os.environ["TESSERA_CONTROL"] = "0"  # limits and clocks of this GPU are never changed here, whatever the shell says

import vision
from tessera.rewrite.state import State
from tessera.runtime.options import ScheduleOptions
from tessera.runtime.tuning.changes import apply_setting
from tessera.runtime.tuning.parts import COMPILE_MODES, find_parts
from tessera.runtime.tuning.plan import Setting, TuningTrial, is_same
from tessera.runtime.tuning.trial import TrialBench
from tessera.runtime.tuning.tuner import TunedFunction

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

Step = Callable[[], Any]
WARMING_S = 150.0
# Of the time, by model: GPT-2's training has the largest space, and compiles forward and backward.
SHARES = {"gpt2": 2.0, "bert": 1.0, "resnet": 1.0}
GOALS = {
    "gpt2": "40% fewer J than eager",
    "bert": "below the best compile mode",
    "resnet": "below the best compile mode",
}


def gpt2(quick: bool) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=509) if quick else GPT2Config()
    device, length, batch = ("cpu", 32, 2) if quick else ("cuda", 1024, 8)
    model = GPT2LMHeadModel(config).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, config.vocab_size, (batch, length), device=device)

    def step() -> Any:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def bert(quick: bool) -> Step:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = (
        BertConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2, intermediate_size=128)
        if quick
        else BertConfig()
    )
    device, length, batch = ("cpu", 16, 2) if quick else ("cuda", 128, 32)
    model = BertModel(config).to(device, torch.bfloat16).eval()
    ids = torch.randint(0, config.vocab_size, (batch, length), device=device)

    def infer() -> Any:
        with torch.inference_mode():
            return model(input_ids=ids).last_hidden_state

    return infer


def resnet(quick: bool) -> Step:
    import torchvision

    torch.manual_seed(0)
    device, size, batch = ("cpu", 32, 2) if quick else ("cuda", 224, 64)
    model = torchvision.models.resnet50().to(device, torch.bfloat16).eval()
    images = torch.randn(batch, 3, size, size, device=device, dtype=torch.bfloat16)

    def infer() -> Any:
        with torch.inference_mode():
            return model(images)

    return infer


MODELS = {"gpt2": gpt2, "bert": bert, "resnet": resnet}


def row(trial: TuningTrial) -> dict[str, Any]:
    keep = (
        "setting",
        "time_s",
        "error_s",
        "energy_j",
        "error_j",
        "power_w",
        "deviation",
        "prepared_s",
        "refused",
    )
    return {k: getattr(trial, k) for k in keep}


Save = Callable[[dict[str, Any]], None]


def one(name: str, quick: bool, budget_s: float, save: Save) -> dict[str, Any]:
    """A model in about so many seconds; `save` is given what there is after every trial."""
    step = MODELS[name](quick)
    begun = time.monotonic()
    found: dict[str, Any] = {"model": name, "trials": []}

    def progress(i: int, n: int, trial: TuningTrial) -> None:
        print(f"  {name} {i}/{n} {line(trial)}", flush=True)
        found["trials"].append(row(trial))
        save(found)

    options = ScheduleOptions(policy="throughput_per_watt", budget_s=0.6 * budget_s, cache=False)
    fn = TunedFunction(step, options, progress=progress)
    fn()
    plan = fn.plan()
    fn.close()
    found |= {"chosen": plan.setting, "notes": plan.notes, "searched_s": plan.spent_s}
    save(found)
    modes = [t for t in plan.trials if set(t.setting) == {"compile"} and not t.refused and t.energy_j]
    settings: dict[str, Setting] = {"eager": {}, "chosen": plan.setting}
    best_mode = min(modes, key=lambda t: t.energy_j or 0.0, default=None)
    if best_mode is not None and best_mode.setting != plan.setting:
        settings["best_mode"] = best_mode.setting
    again = repeated(step, settings, 1 if quick else 3, begun + budget_s)
    found |= {"again": {k: row(t) for k, t in again.items()}, "spent_s": time.monotonic() - begun}
    return found | compared(again, best_mode is not None)


def compared(again: dict[str, TuningTrial], any_mode: bool) -> dict[str, Any]:
    """The chosen setting against the others, in percent."""
    eager, chosen = again["eager"], again["chosen"]
    if not (eager.energy_j and chosen.energy_j):
        return {}
    found = {
        "saved_pct": 100 * (1 - chosen.energy_j / eager.energy_j),
        "speedup": (eager.time_s or 0) / (chosen.time_s or 1),
    }
    if "best_mode" in again and again["best_mode"].energy_j:
        found["below_best_mode_pct"] = 100 * (1 - chosen.energy_j / again["best_mode"].energy_j)
    elif any_mode:
        found["below_best_mode_pct"] = 0.0  # it is the best mode
    return found


def repeated(step: Step, settings: dict[str, Setting], rounds: int, end: float) -> dict[str, TuningTrial]:
    """Each setting in turns, once at least; the median by joules of each."""
    found = find_parts(step)
    bench = TrialBench(fn=step, args=(), kwargs={}, parts=found, state=State(found), own={}, trial_s=1.0)
    seen: dict[str, list[TuningTrial]] = {k: [] for k in settings}
    for done in range(rounds):
        if done and time.monotonic() > end:
            break
        for name, setting in settings.items():
            seen[name].append(bench(setting))
    return {k: sorted(t, key=lambda x: x.energy_j or 0.0)[len(t) // 2] for k, t in seen.items()}


def regret(name: str, quick: bool) -> dict[str, Any]:
    """Every setting of compile x graph, against what a descent picks among them."""
    from tessera.runtime.tuning import search as searching

    step = MODELS[name](quick)
    found = find_parts(step)
    cuda = found.device.type == "cuda"
    bench = TrialBench(fn=step, args=(), kwargs={}, parts=found, state=State(found), own={}, trial_s=0.6)
    space = [
        searching.Knob(name="compile", values=(None, *(COMPILE_MODES[:2] if cuda else ("default",)))),
        searching.Knob(name="graph", values=(None, True)),
    ]
    kept: dict[str, TuningTrial] = {}

    def measure(setting: Setting) -> TuningTrial:
        key = json.dumps(setting, sort_keys=True)
        return kept.setdefault(key, kept.get(key) or bench(setting))

    goal = searching.TuningGoal(policy="energy")
    whole = searching.search(space, measure, goal)
    searching.EXHAUSTIVE, before = 0, searching.EXHAUSTIVE
    descent = searching.search(space, measure, goal)
    searching.EXHAUSTIVE = before
    best = min((t.energy_j for t in whole.trials if t.energy_j and not t.refused), default=None)
    return {
        "settings": len(whole.trials),
        "regret_pct": None if not best else 100 * ((descent.best.energy_j or best) / best - 1),
    }


def ended(figures: dict[str, Any]) -> dict[str, Any]:
    """A run that was cut off: the model it was at, compared by the trials of its search, and the regret they tell."""
    running = figures.pop("running", None)
    if running and "chosen" in running:
        trials = [msgspec.convert(t, TuningTrial) for t in running["trials"]]
        least = {
            "eager": next(t for t in trials if not t.setting),
            "chosen": next(t for t in trials if is_same(t.setting, running["chosen"])),
            "best_mode": min((t for t in trials if set(t.setting) == {"compile"}), key=lambda t: t.energy_j or 1e9),
        }
        running["compared_by"] = "the search's own trials, once each: the run was cut off before its turns"
        figures["models"].append(running | compared(least, True))
    for model in figures["models"]:
        known = {
            json.dumps(t["setting"], sort_keys=True): msgspec.convert(t, TuningTrial) for t in model.get("trials", ())
        }
        told = told_regret(known)
        if "regret" not in figures and told is not None:
            figures["regret"] = {**told, "model": model["model"], "of": "trials of the search: all of compile x graph"}
    return figures


def told_regret(known: dict[str, TuningTrial]) -> dict[str, Any] | None:
    """The regret in compile x graph, where every setting of it was measured anyway."""
    from tessera.runtime.tuning import search as searching

    space = [
        searching.Knob(name="compile", values=(None, *COMPILE_MODES[:2])),
        searching.Knob(name="graph", values=(None, True), instead={"compile": {COMPILE_MODES[1]: COMPILE_MODES[0]}}),
    ]
    every = [json.dumps(s, sort_keys=True) for s in searching._all_settings(space)]
    if any(key not in known or known[key].refused for key in every):
        return None
    goal = searching.TuningGoal(policy="energy")
    searching.EXHAUSTIVE, before = 0, searching.EXHAUSTIVE
    descent = searching.search(space, lambda setting: known[json.dumps(setting, sort_keys=True)], goal)
    searching.EXHAUSTIVE = before
    best = min(known[key].energy_j or 1e9 for key in every)
    return {"settings": len(every), "regret_pct": 100 * ((descent.best.energy_j or best) / best - 1)}


def line(t: TuningTrial) -> str:
    what = ", ".join(f"{k}={v}" for k, v in t.setting.items()) or "as it is"
    figures = t.refused or f"{(t.time_s or 0) * 1e3:.2f} ms  {t.energy_j or float('nan'):.3f} J"
    return f"{what}: {figures} (prepared in {t.prepared_s:.0f} s)"


def tidy() -> None:
    """What the compiler keeps of one model (code, the memory of its graphs) is not the next one's."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# What the search is likely to compile. Only the time that it takes depends on this list.
WARMED: dict[str, list[Setting]] = {
    "gpt2": [
        {"compile": "default"},
        {"compile": "reduce-overhead"},
        {"compile": "default", "masks": "folded"},
        {"compile": "default", "masks": "folded", "padding": True},
    ],
    "bert": [
        {"compile": "default"},
        {"compile": "reduce-overhead"},
        {"compile": "default", "masks": "folded"},
        {"compile": "default", "freeze": True},
        {"compile": "default", "freeze": True, "masks": "folded"},
    ],
    "resnet": [{"compile": "default"}, {"compile": "reduce-overhead"}, {"compile": "default", "freeze": True}],
}


def called(name: str, quick: bool, setting: Setting) -> None:
    """A model under a setting, three times: whatever it compiles is in the cache then."""
    step = MODELS[name](quick)
    with apply_setting(step, find_parts(step), setting, {}) as call:
        for _ in range(3):
            call()


def warmed(given: argparse.Namespace) -> None:
    """Compile what the search will want in processes side by side. The search itself then finds it in the cache."""
    begun = time.monotonic()
    jobs = [(name, json.dumps(setting)) for name in given.only for setting in WARMED[name]]
    more = ["--quick"] if given.quick else []
    command = [sys.executable, __file__, str(given.out), *more, "--compile"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen([*command, *job], **quiet) for job in jobs]
    codes = []
    for each in running:
        try:
            codes.append(each.wait(timeout=max(1.0, begun + WARMING_S - time.monotonic())))
        except subprocess.TimeoutExpired:
            each.kill()
            codes.append(None)
    print(f"warmed in {time.monotonic() - begun:.0f} s: {dict(zip(map(str, jobs), codes, strict=True))}", flush=True)


def check_applied() -> None:
    """The settings used here exist: a typo would be a silent no-op."""
    with apply_setting(lambda: None, find_parts(lambda: None), {}, {}):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--budget-s", type=float, default=420.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ended", action="store_true", help="finish the file of a run that was cut off; no GPU")
    parser.add_argument("--warm", action="store_true", help="first fill the compiler's cache, several at once")
    parser.add_argument("--compile", nargs=2, metavar=("MODEL", "SETTING"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ended:
        write_result(given.out, ended(json.loads(given.out.read_text())))
        return
    if given.compile:
        vision.importable()
        called(given.compile[0], given.quick, json.loads(given.compile[1]))
        return
    faulthandler.dump_traceback_later(given.budget_s + 120.0, exit=True)  # what hangs must not take the others' time
    check_applied()
    vision.importable()
    if given.warm:
        warmed(given)
    begun, figures = time.monotonic(), {"goals": GOALS, "models": []}
    if torch.cuda.is_available():
        os.environ.setdefault("TESSERA_SENSORS", "nvml")  # the GPU's joules alone, whatever RAPL may say
        figures |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def save(now: dict[str, Any] | None = None) -> None:
        figures["running"] = now
        write_result(given.out, figures)

    for at, name in enumerate(given.only):
        left = given.budget_s - (time.monotonic() - begun)
        if left < 20 and not given.quick:
            print(f"{name}: no time left")
            continue
        try:
            share = SHARES[name] / sum(SHARES[n] for n in given.only[at:])
            figures["models"].append(one(name, given.quick, left * share, save))
        except Exception as exc:  # noqa: BLE001  (one model's failure must not lose the others)
            traceback.print_exc()
            figures["models"].append({"model": name, "error": f"{type(exc).__name__}: {exc}"})
        tidy()
        save()
    left = given.budget_s - (time.monotonic() - begun)
    if "bert" in given.only and (left > 40 or given.quick):
        try:
            figures["regret"] = regret("bert", given.quick)
        except Exception as exc:  # noqa: BLE001
            figures["regret"] = {"error": str(exc)}
        save()
    for m in figures["models"]:
        if "error" in m:
            print(f"{m['model']:8} {m['error']}")
            continue
        print(
            f"{m['model']:8} chosen {m['chosen']}  {m.get('saved_pct', float('nan')):.1f}% fewer J than eager, {m.get('speedup', float('nan')):.2f}x as fast, "
            f"{m.get('below_best_mode_pct', float('nan')):.1f}% below the best compile mode"
        )
    print("regret", figures.get("regret"))


if __name__ == "__main__":
    main()
