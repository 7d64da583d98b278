"""How long a prediction takes, warm, and what it holds in memory. Beside it branes-ai/graphs where it is installed.

    python benchmarks/predict/predict_time.py [--graphs PATH]

`--graphs` names a checkout of github.com/branes-ai/graphs before fafa79e (Dec 2025; later ones need a package that is
not published), imported from its `src/`; its `analyze_model` is timed in the same run for the models it knows. Needs torchvision and transformers.
"""

from __future__ import annotations

import argparse
import logging
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tessera

BENCHMARKS = Path(__file__).parents[1]
sys.path.insert(0, str(BENCHMARKS))
from device import vision
from result_file import write_result

GOALS = {"resnet18": 0.5, "vit_b_16": 1.0, "bert-base": 1.0, "llama-70b": 10.0}


def cases() -> dict[str, Callable[[], tuple[Any, Any]]]:
    import torchvision
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    def vision(name: str) -> tuple[Any, Any]:
        return getattr(torchvision.models, name)(), torch.empty(1, 3, 224, 224)

    def words(model: Any, length: int) -> tuple[Any, Any]:
        return model, {"input_ids": torch.empty(1, length, dtype=torch.int64, device="meta")}

    def llama() -> Any:
        with torch.device("meta"):
            config = LlamaConfig(
                hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                num_key_value_heads=8, vocab_size=128256,
            )  # fmt: skip
            return LlamaForCausalLM(config).to(torch.bfloat16)

    return {
        "resnet18": lambda: vision("resnet18"),
        "vit_b_16": lambda: vision("vit_b_16"),
        "bert-base": lambda: words(BertModel(BertConfig()), 128),
        "llama-70b": lambda: words(llama(), 2048),
    }


def timed(fn: Callable[[], Any], times: int) -> float:
    took = []
    for _ in range(times):
        begin = time.perf_counter()
        fn()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def peer(path: Path | None) -> Callable[[str], float | None]:
    """Seconds of branes-ai/graphs' analyze_model for a model it knows, or None."""
    if path is None:
        return lambda _name: None
    sys.path.insert(0, str(path / "src"))
    try:
        from graphs.analysis.unified_analyzer import UnifiedAnalyzer
    except ImportError as e:
        print(f"branes-ai/graphs cannot be imported: {e}")
        return lambda _name: None
    analyzer = UnifiedAnalyzer(verbose=False)

    def run(name: str) -> float | None:
        try:
            analyzer.analyze_model(name, "H100", batch_size=1)
            return timed(lambda: analyzer.analyze_model(name, "H100", batch_size=1), 3)
        except Exception as e:  # noqa: BLE001 - whatever the peer raises is its answer
            print(f"branes-ai/graphs on {name}: {type(e).__name__}: {str(e)[:100]}")
            return None

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    vision.importable()
    other, found = peer(given.graphs), {}
    for name, build in cases().items():
        model, inputs = build()
        run = lambda model=model, inputs=inputs: tessera.predict(model, inputs, on="h200", check_memory=False)  # noqa: E731
        begin = time.perf_counter()
        run()
        cold = time.perf_counter() - begin
        warm = timed(run, 3)
        beside = other(name)
        found[name] = {"goal_s": GOALS[name], "warm_s": warm, "cold_s": cold, "graphs_s": beside}
        ratio = f"{beside / warm:.1f}x" if beside else "-"
        print(
            f"{name:10s} warm {warm:6.3f} s (goal {GOALS[name]} s), first {cold:6.3f} s, branes-ai/graphs {beside or float('nan'):6.3f} s, ratio {ratio}"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["resident_bytes"] = peak
    print(f"resident memory {peak / 2**20:.0f} MiB, torch and the model zoos included")
    if given.graphs is not None:  # a result stands on the page beside its peer, from one run
        write_result(BENCHMARKS / "results/predict_time.json", found)


if __name__ == "__main__":
    main()
